//! Reads a worker's whole state, from the worker's answers to questions for its events.
//!
//! A *dump* is an answer with everything that the worker has. A dump has all events up to the number that it names, and may
//! have some later events. So after each dump, the bridge asks for the events from that number on. The dump and this second
//! answer together give the worker's state after the last event of the second answer.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::task::spawn_blocking;

use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, Format};

use super::holder_of;
use super::questions::{ANSWER_BYTES_MAX, Asker, QuestionError, Room};
use super::records::SourceRecord;

/// Maximum number of questions for one whole state. If a worker stores blocks faster than the bridge can ask it, its
/// state cannot be read.
const ROUNDS_MAX: usize = 4;

/// Error that keeps a worker's state from being read.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum AnswerError {
    /// The question had no answer.
    #[error(transparent)]
    Question(#[from] QuestionError),
    /// The worker has answered with an error instead of its events.
    #[error("the worker answers: {0}")]
    Worker(String),
    /// The worker's answer does not have the expected form.
    #[error("the answer cannot be read: {0}")]
    Form(String),
    /// The answer has events of another worker.
    #[error("the answer tells of another worker")]
    Foreign,
    /// The numbers of two answers contradict each other.
    #[error("the worker counts backwards: event {newest} is its last, and {known} is known")]
    Backwards {
        /// Number of the newest event, according to the last answer.
        newest: u64,
        /// Number of the last event in the worker's previous answer.
        known: u64,
    },
    /// The worker stored further blocks between any two questions, so the bridge never got its whole state.
    #[error("the worker stores faster than it can be asked")]
    TooFast,
}

/// Decoded events of an answer.
#[derive(Debug)]
pub(super) struct DecodedEvents {
    pub(super) batch: EngineBatch,
    /// Number of the last event in the batch.
    pub(super) last: u64,
}

/// Part of a worker's state that the bridge did not know, read from the worker's answers.
#[derive(Debug)]
pub(in super::super) struct Caught {
    _room: Room,
    /// Full state of the worker; `None` if `tail` continues the events that were known before.
    pub(super) base: Option<DecodedEvents>,
    /// Events that follow the full state in `base`; without `base`, events that follow the known events. `None` if
    /// there are none.
    pub(super) tail: Option<DecodedEvents>,
    /// Number of the worker's last event.
    pub(super) newest: u64,
}

/// One answer of a worker. The bytes are a list of events in JSON.
#[derive(Debug)]
enum WorkerAnswer {
    /// Everything that the worker has, up to the event with this number.
    Dump(Bytes, u64),
    /// The events from the requested number up to this one.
    Events(Bytes, u64),
    /// The worker has not reached the requested number yet; its newest event has this number.
    TooNew(u64),
}

/// Asks a worker for its events from event `start` on. The worker must have given that event before. Without `start`, asks for
/// everything.
pub(super) async fn catch_up(
    asker: &Asker,
    record: &SourceRecord,
    start: Option<u64>,
) -> Result<Caught, AnswerError> {
    let (mut start, mut base, mut room): (_, Option<DecodedEvents>, _) = (start, None, Room::default());
    for _ in 0..ROUNDS_MAX {
        let answer = read_answer(&asker.ask(record, start, &mut room).await?)?;
        let known = base.as_ref().map(|dump| dump.last);
        let (tail, newest) = match (answer, known) {
            (WorkerAnswer::Events(events, last), _) => (Some(decode(events, last, record).await?), last),
            // The second dump ends at the same event as the first, so the worker has stored nothing since.
            (WorkerAnswer::Dump(_, last), Some(known)) if last == known => (None, last),
            (WorkerAnswer::Dump(events, last), _) => {
                start = Some(last);
                base = Some(decode(events, last, record).await?);
                continue;
            }
            (WorkerAnswer::TooNew(newest), Some(known)) => {
                return Err(AnswerError::Backwards { newest, known });
            }
            (WorkerAnswer::TooNew(_), None) => {
                // The worker counts its events anew. So the events that were known before no longer count.
                start = None;
                continue;
            }
        };
        return Ok(Caught {
            _room: room,
            base,
            tail,
            newest,
        });
    }
    Err(AnswerError::TooFast)
}

/// Decodes events. Refuses them if one of them names another worker or rank than `record` does.
async fn decode(events: Bytes, last: u64, record: &SourceRecord) -> Result<DecodedEvents, AnswerError> {
    let decoding = spawn_blocking(move || {
        let limits = DecodeLimits {
            payload_bytes_max: ANSWER_BYTES_MAX,
            ..DecodeLimits::default()
        };
        let mut batch = EngineBatch::default();
        let decoded = Decoder::new(Format::Dynamo, limits).decode(&events, &mut batch);
        decoded.map(|()| batch)
    });
    let unreadable = |error: &dyn std::fmt::Display| AnswerError::Form(error.to_string());
    let decoded = decoding.await.map_err(|error| unreadable(&error))?;
    let batch = decoded.map_err(|error| unreadable(&error))?;
    let mut holders = batch.events().iter().map(|event| holder_of(&batch, event));
    match holders
        .all(|holder| holder.is_some_and(|(worker, rank)| worker == record.worker && rank == record.rank))
    {
        true => Ok(DecodedEvents { batch, last }),
        false => Err(AnswerError::Foreign),
    }
}

fn read_answer(answer: &Bytes) -> Result<WorkerAnswer, AnswerError> {
    #[derive(Deserialize)]
    enum Told<'a> {
        TreeDump {
            #[serde(borrow)]
            events: &'a RawValue,
            last_event_id: u64,
            reset_scope: Option<String>,
        },
        Events {
            #[serde(borrow)]
            events: &'a RawValue,
            last_event_id: u64,
        },
        TooNew {
            newest_available: u64,
        },
        TreeDumpFailed {
            message: String,
        },
        InvalidRange {
            start_id: u64,
            end_id: u64,
        },
        Error(String),
    }

    let told: Told<'_> =
        serde_json::from_slice(answer).map_err(|error| AnswerError::Form(error.to_string()))?;
    let part = |events: &RawValue| answer.slice_ref(events.get().as_bytes());
    match told {
        Told::TreeDump {
            events,
            last_event_id,
            reset_scope,
        } => match reset_scope.as_deref() {
            None | Some("all") => Ok(WorkerAnswer::Dump(part(events), last_event_id)),
            Some(scope) => Err(AnswerError::Form(format!("a dump of {scope} only"))),
        },
        Told::Events {
            events,
            last_event_id,
        } => Ok(WorkerAnswer::Events(part(events), last_event_id)),
        Told::TooNew { newest_available } => Ok(WorkerAnswer::TooNew(newest_available)),
        Told::TreeDumpFailed { message } => Err(AnswerError::Worker(format!("the dump failed: {message}"))),
        Told::InvalidRange { start_id, end_id } => Err(AnswerError::Worker(format!(
            "the range from {start_id} to {end_id} is none"
        ))),
        Told::Error(error) => Err(AnswerError::Worker(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &'static str) -> Result<WorkerAnswer, AnswerError> {
        read_answer(&Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn answers_are_read_by_their_names() {
        let Ok(WorkerAnswer::Dump(events, 9)) =
            read(r#"{"TreeDump":{"events":[{"a":1}],"last_event_id":9,"reset_scope":"all"}}"#)
        else {
            panic!("no dump");
        };
        assert_eq!(events, &br#"[{"a":1}]"#[..]);
        assert!(matches!(
            read(r#"{"TreeDump":{"events":[],"last_event_id":0}}"#),
            Ok(WorkerAnswer::Dump(_, 0))
        ));
        assert!(matches!(
            read(r#"{"Events":{"events":[],"last_event_id":3}}"#),
            Ok(WorkerAnswer::Events(_, 3))
        ));
        let too_new = r#"{"TooNew":{"requested_start":3000,"requested_end":10,"newest_available":10}}"#;
        assert!(matches!(read(too_new), Ok(WorkerAnswer::TooNew(10))));
    }

    #[test]
    fn an_error_of_the_worker_is_told_from_an_answer_of_another_form() {
        for (text, part) in [
            (
                r#"{"TreeDumpFailed":{"last_event_id":1,"message":"busy"}}"#,
                "busy",
            ),
            (r#"{"InvalidRange":{"start_id":3,"end_id":1}}"#, "from 3 to 1"),
            (r#"{"Error":"dp_rank mismatch"}"#, "dp_rank mismatch"),
        ] {
            let error = read(text).unwrap_err();
            assert!(
                matches!(&error, AnswerError::Worker(told) if told.contains(part)),
                "{text}: {error}"
            );
        }
        for (text, part) in [
            (
                r#"{"TreeDump":{"events":[],"last_event_id":1,"reset_scope":"worker"}}"#,
                "worker only",
            ),
            (r#"{"Status":{}}"#, "unknown variant"),
            (r#"{"TreeDump":{"events":[]}}"#, "missing field"),
            ("[]", ""),
        ] {
            let error = read(text).unwrap_err();
            assert!(
                matches!(&error, AnswerError::Form(told) if told.contains(part)),
                "{text}: {error}"
            );
        }
    }
}
