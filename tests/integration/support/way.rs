//! Ways in which events travel in a scenario.

use std::fmt;

use kvatlas_client::publish::Transport;

use super::fleet::{QUICK_RESYNCS, THROUGH_STREAM};
use super::jetstream::JETSTREAM;

/// Way in which events travel from the workers to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Events travel as messages of core NATS.
    Core,
    /// Workers publish over core NATS. A stream keeps the events, and the daemon reads the stream.
    Stream,
    /// Workers publish to the stream, and wait until it has acknowledged each batch. The daemon reads the stream.
    Acknowledged,
}

impl Way {
    /// Returns the transport with which workers publish.
    pub fn publishers(self) -> Transport {
        match self {
            Self::Core | Self::Stream => Transport::Core,
            Self::Acknowledged => THROUGH_STREAM,
        }
    }

    /// Returns the settings of a daemon that receives events in this way and soon repeats a failed resync. `more` are
    /// further settings; they take precedence.
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
