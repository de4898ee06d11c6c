//! How events travel in a scenario.

use std::fmt;

use kvatlas_client::publish::Transport;

use super::fleet::{QUICK_RESYNCS, THROUGH_STREAM};
use super::jetstream::JETSTREAM;

/// How events travel from the workers to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// As messages of core NATS.
    Core,
    /// Workers publish as ever; a stream keeps what they say, and the daemon reads it.
    Stream,
    /// As before, and workers wait for the stream's word that it has a batch.
    Acknowledged,
}

impl Way {
    /// How workers publish.
    pub fn publishers(self) -> Transport {
        match self {
            Self::Core | Self::Stream => Transport::Core,
            Self::Acknowledged => THROUGH_STREAM,
        }
    }

    /// The daemon's settings for it, and `more`, which count where both have one.
    pub fn settings<'a>(self, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let transport = (self != Self::Core).then_some(JETSTREAM);
        let is_free = |(key, _): &(&str, &str)| more.iter().all(|(other, _)| other != key);
        let quick = QUICK_RESYNCS.into_iter().filter(is_free);
        quick.chain(transport).chain(more.iter().copied()).collect()
    }
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Core => "core NATS",
            Self::Stream => "JetStream",
            Self::Acknowledged => "JetStream, acknowledged",
        })
    }
}
