//! Silence of the NATS server: a daemon receives nothing from it, not even the messages that the daemon sends to
//! itself. Or silence of the stream: nobody tells the daemon what the events stream has. The daemon's route `/index`
//! reports how long the silence has lasted.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Silence of the NATS server or of the events stream, as a daemon reports it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct BrokerSilence {
    /// Time for which the NATS server or the stream has been silent, in microseconds; `None` if neither is, or if an
    /// older daemon does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    broker_silent_us: Option<u64>,
    /// Reason in words why nothing new is known of the stream; `None` unless only the stream is silent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stream_trouble: Option<String>,
}

impl BrokerSilence {
    /// Returns the silence in words; `None` if there is none.
    pub(super) fn told(&self) -> Option<String> {
        let silent = Duration::from_micros(self.broker_silent_us?);
        Some(match &self.stream_trouble {
            Some(trouble) => {
                format!("nothing has been known of the events stream for {silent:.1?}: {trouble}")
            }
            None => format!(
                "nothing has come from the NATS server for {silent:.1?}, not even the daemon's own messages"
            ),
        })
    }

    /// Returns the advice on the silence.
    pub(super) fn mend(&self) -> &'static str {
        match self.stream_trouble {
            Some(_) => {
                "correct what it names; otherwise see whether the NATS servers run and answer others: more than half of those that \
                 have the stream must; until then all holders are behind, and more lanes do not help"
            }
            None => {
                "see whether the NATS server runs and answers others, and the network to it; until then all holders are \
                 behind, and more lanes do not help"
            }
        }
    }
}
