//! The JetStream stream in which the server keeps the events.

use std::time::Duration;

use async_nats::datetime::DateTime;
use async_nats::jetstream::consumer::{AckPolicy, Consumer, DeliverPolicy, StreamError as PullError, pull};
use async_nats::jetstream::context::{CreateStreamError, GetStreamError, GetStreamErrorKind};
use async_nats::jetstream::stream::{self, ConsumerError, DiscardPolicy, Info, RetentionPolicy, StorageType};
use async_nats::jetstream::{Context, ErrorCode, Message};
use futures_util::StreamExt;

use kvatlas_client::unix_time_us;
use kvatlas_config::StreamConfig;
use kvatlas_core::snapshot::StreamCursor;

use super::stream_info::{leadership, look_up, unix_us};
use crate::lanes::ServerClock;

/// Time for which the server keeps an idle consumer. A new consumer is made after every break of reading.
const CONSUMER_IDLE_MAX: Duration = Duration::from_secs(60);
/// Time that the server may take to answer the first request for messages.
const PROBE_PATIENCE: Duration = Duration::from_secs(5);

/// Reason why the events stream cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// Stream does not exist, and may not be created.
    #[error("the stream {name} does not exist; create it, or set events.stream_create")]
    Missing {
        /// Name of the stream.
        name: String,
    },
    /// Looking up the stream failed.
    #[error(
        "cannot look up the stream {name}: {source}; does the server answer at all, and has it JetStream?"
    )]
    LookUp {
        /// Name of the stream.
        name: String,
        /// Error of the client library.
        source: GetStreamError,
    },
    /// Creating the missing stream failed.
    #[error(
        "cannot create the stream {name}: {source}; see events.stream_max_bytes and events.stream_replicas"
    )]
    Create {
        /// Name of the stream.
        name: String,
        /// Error of the client library.
        source: CreateStreamError,
    },
    /// Stream takes other messages than the events.
    #[error(
        "the stream {name} has the subjects {subjects:?}, but must have {expected:?} and no other, so that its numbers prove \
         that nothing was lost; correct it, or name another in events.stream"
    )]
    Subjects {
        /// Name of the stream.
        name: String,
        /// Subjects of the stream.
        subjects: Vec<String>,
        /// Subjects that the stream must have.
        expected: String,
    },
    /// Stream drops messages once they have been read.
    #[error(
        "the stream {name} does not have the retention policy \"limits\"; correct it, or name another in events.stream"
    )]
    Retention {
        /// Name of the stream.
        name: String,
    },
    /// Stream has a setting with which the server does not take all events, or changes them.
    #[error(
        "the stream {name} has {setting}, with which events may not reach it as they were sent; correct it, or name \
         another in events.stream"
    )]
    Setting {
        /// Name of the stream.
        name: String,
        /// Setting that the stream must not have.
        setting: &'static str,
    },
    /// Stream has no leader, so that it takes no events.
    #[error("the stream {name} has no leader: too few of the servers that have it can be reached")]
    Leaderless {
        /// Name of the stream.
        name: String,
    },
    /// Asking for messages failed.
    #[error("cannot read the stream {name}: {source}")]
    Pull {
        /// Name of the stream.
        name: String,
        /// Error of the client library.
        source: PullError,
    },
    /// First request for a message was not answered.
    #[error(
        "cannot read the stream {name}: {reason}; may the daemon publish to $JS.API.CONSUMER.MSG.NEXT.>?"
    )]
    Probe {
        /// Name of the stream.
        name: String,
        /// Error that came instead of an answer.
        reason: String,
    },
    /// Server did not create a consumer.
    #[error("cannot create a consumer of the stream {name}: {source}")]
    Consumer {
        /// Name of the stream.
        name: String,
        /// Error of the client library.
        source: ConsumerError,
    },
}

impl StreamError {
    /// Whether the error lasts until an operator acts. The operator must correct the stream, or make it possible to
    /// create the stream.
    pub(super) fn is_of_stream(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Create { .. }
                | Self::Subjects { .. }
                | Self::Retention { .. }
                | Self::Setting { .. }
        )
    }
}

/// Events stream, as the server describes it.
pub(super) struct EventStream {
    jetstream: Context,
    info: Info,
    subject: String,
    /// Digest of who leads the stream, and since when (see [`leadership`]).
    pub(super) leadership: u64,
}

/// First and last number of the messages in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamSpan {
    /// Sequence number of the first message. One above `last` if the stream is empty.
    pub(super) first: u64,
    /// Sequence number of the last message that the stream ever had. 0 if it never had one.
    pub(super) last: u64,
}

impl EventStream {
    /// Looks the stream up. Creates it if it is missing and `config` allows that. The stream must keep messages on
    /// `subject` and on no other. Notes the server's time in `clock`.
    pub(super) async fn open(
        jetstream: &Context,
        config: &StreamConfig,
        subject: String,
        clock: &ServerClock,
    ) -> Result<Self, StreamError> {
        let name = || config.name.clone();
        let info = match look_up(jetstream, &config.name, clock).await {
            Ok(info) => info,
            Err(error) if is_missing(&error) && config.create => {
                let created = jetstream.create_stream(stream_config(config, &subject)).await;
                // A failure does not matter if another replica has just created the stream, with other limits.
                match (look_up(jetstream, &config.name, clock).await, created) {
                    (Ok(info), _) => info,
                    (Err(_), Err(source)) => return Err(StreamError::Create { name: name(), source }),
                    (Err(source), Ok(_)) => return Err(StreamError::LookUp { name: name(), source }),
                }
            }
            Err(error) if is_missing(&error) => return Err(StreamError::Missing { name: name() }),
            Err(source) => {
                return Err(StreamError::LookUp { name: name(), source });
            }
        };
        check_config(&info.config, &subject)?;
        Ok(Self {
            jetstream: jetstream.clone(),
            leadership: leadership(&info).ok_or_else(|| StreamError::Leaderless { name: name() })?,
            info,
            subject,
        })
    }

    /// Returns the span of messages that the stream had when it was looked up.
    pub(super) fn span(&self) -> StreamSpan {
        let state = &self.info.state;
        StreamSpan {
            first: state.first_sequence.max(1),
            last: state.last_sequence,
        }
    }

    /// Returns the position before the stream's first message.
    pub(super) fn beginning(&self) -> StreamCursor {
        StreamCursor {
            stream: self.info.config.name.clone(),
            created_us: unix_us(self.info.created),
            sequence: self.span().first - 1,
            digest: None,
            intake: None,
            has_all: false,
            server: None,
        }
    }

    /// Makes a consumer that begins with the message `sequence`. The server forgets the consumer soon after this daemon
    /// stops using it.
    pub(super) async fn consume_from(&self, sequence: u64) -> Result<Consumer<pull::Config>, StreamError> {
        let config = pull::Config {
            deliver_policy: DeliverPolicy::ByStartSequence {
                start_sequence: sequence,
            },
            ack_policy: AckPolicy::None,
            filter_subject: self.subject.clone(),
            inactive_threshold: CONSUMER_IDLE_MAX,
            memory_storage: true,
            num_replicas: 1,
            ..pull::Config::default()
        };
        let name = self.info.config.name.clone();
        let created = self.jetstream.create_consumer_on_stream(config, &name).await;
        created.map_err(|source| StreamError::Consumer { name, source })
    }
}

/// Asks for one message, and returns it if the stream has one. Any answer, even that there is no message, shows
/// that the daemon may ask for messages and receives them.
pub(super) async fn probe(consumer: &Consumer<pull::Config>) -> Result<Option<Message>, StreamError> {
    let failed = |reason: String| StreamError::Probe {
        name: consumer.cached_info().stream_name.clone(),
        reason,
    };
    let asking = async {
        let mut found = consumer
            .fetch()
            .max_messages(1)
            .messages()
            .await
            .map_err(|error| failed(error.to_string()))?;
        let first = found.next().await.transpose();
        first.map_err(|error| failed(error.to_string()))
    };
    match tokio::time::timeout(PROBE_PATIENCE, asking).await {
        Ok(answered) => answered,
        Err(_) => Err(failed(format!("no answer within {PROBE_PATIENCE:?}"))),
    }
}

/// Checks that a stream with this configuration keeps all messages on `subject`, and no others.
pub fn check_config(config: &stream::Config, subject: &str) -> Result<(), StreamError> {
    let name = || config.name.clone();
    if config.subjects.as_slice() != [subject] {
        return Err(StreamError::Subjects {
            name: name(),
            subjects: config.subjects.clone(),
            expected: subject.to_owned(),
        });
    }
    if config.retention != RetentionPolicy::Limits {
        return Err(StreamError::Retention { name: name() });
    }
    let setting = match config {
        // At a limit, the server refuses the newest messages, and nobody hears of that.
        config if config.discard == DiscardPolicy::New => "discard = new",
        // Nor of a larger message: it leaves no hole in the stream's numbers.
        config if config.max_message_size > 0 => "max_msg_size",
        config if config.sealed => "sealed = true",
        config if config.subject_transform.is_some() => "subject_transform",
        // Their messages are not on the subject, or come twice.
        config if config.sources.as_ref().is_some_and(|sources| !sources.is_empty()) => "sources",
        _ => return Ok(()),
    };
    Err(StreamError::Setting {
        name: name(),
        setting,
    })
}

/// Returns the age of a message that the server stored at `published`, by the server's clock. By this machine's clock
/// if the server tells no time.
///
/// A time in the future says nothing, because a clock was set back. The age is then the longest possible.
pub(super) fn age_of(published: DateTime, clock: &ServerClock) -> Duration {
    let published_us = unix_us(published);
    let by_own_clock = || unix_time_us().checked_sub(published_us).unwrap_or(u64::MAX);
    Duration::from_micros(clock.age_us(published_us).unwrap_or_else(by_own_clock))
}

fn is_missing(error: &GetStreamError) -> bool {
    matches!(error.kind(), GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

fn stream_config(config: &StreamConfig, subject: &str) -> stream::Config {
    // To a server, -1 is no limit.
    let limit = |limit: u64| {
        if limit == 0 {
            -1
        } else {
            i64::try_from(limit).unwrap_or(i64::MAX)
        }
    };
    stream::Config {
        name: config.name.clone(),
        description: Some("KV events for kvatlas".to_owned()),
        subjects: vec![subject.to_owned()],
        retention: RetentionPolicy::Limits,
        // The oldest messages are dropped, never the newest, so that no publisher is held up.
        discard: DiscardPolicy::Old,
        storage: StorageType::File,
        max_age: config.age_max,
        max_bytes: limit(config.bytes_max),
        max_messages: limit(config.messages_max),
        max_messages_per_subject: -1,
        num_replicas: config.replicas,
        ..stream::Config::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvatlas_config::Config;

    use crate::lanes::now_us;

    use super::*;

    /// Time of the tests in seconds: 2026-01-01T00:00:00Z.
    const EPOCH_S: u64 = 1_767_225_600;

    fn state(messages: u64, first: &str, last: &str) -> stream::State {
        let at = |time: &str| format!("2026-01-01T00:00:{time}Z");
        let state = serde_json::json!({
            "messages": messages, "bytes": 0, "consumer_count": 0, "first_seq": 1, "first_ts": at(first),
            "last_seq": messages, "last_ts": at(last),
        });
        serde_json::from_value(state).unwrap()
    }

    /// Returns the clock of a server that has told this time.
    fn clock_at(now_ms: u64) -> ServerClock {
        let clock = ServerClock::default();
        clock.note(EPOCH_S * 1_000_000 + now_ms * 1000, now_us());
        clock
    }

    #[test]
    fn a_stream_that_does_not_keep_all_events_is_not_read() {
        let config = Config::load(BTreeMap::new(), std::iter::empty(), None).unwrap();
        let right = stream_config(&config.events.stream, "e.>");
        assert!(check_config(&right, "e.>").is_ok());
        let is_refused = |config: &stream::Config, words: &str| {
            let error = check_config(config, "e.>").unwrap_err();
            assert!(error.is_of_stream());
            assert!(error.to_string().contains(words), "{error}");
        };
        let changed = |change: fn(&mut stream::Config)| {
            let mut config = right.clone();
            change(&mut config);
            config
        };
        is_refused(
            &changed(|config| config.subjects = vec!["other.>".to_owned()]),
            "other.>",
        );
        is_refused(
            &changed(|config| config.retention = RetentionPolicy::Interest),
            "retention",
        );
        is_refused(
            &changed(|config| config.discard = DiscardPolicy::New),
            "discard = new",
        );
        is_refused(
            &changed(|config| config.max_message_size = 64 << 20),
            "max_msg_size",
        );
        is_refused(&changed(|config| config.sealed = true), "sealed");
        is_refused(
            &changed(|config| config.sources = Some(vec![stream::Source::default()])),
            "sources",
        );
    }

    #[test]
    fn messages_are_as_old_as_the_servers_clock_says() {
        let published = state(1, "10.000", "10.000").last_timestamp;
        let age = age_of(published, &clock_at(18_000));
        assert!((Duration::from_secs(8)..Duration::from_secs(60)).contains(&age));
        // The server's clock was set back since, so the message may be of any age.
        assert!(age_of(published, &clock_at(9_000)) > Duration::from_secs(1 << 40));
    }
}
