//! Hints: a router reports to which worker it has sent a request, before any event reports the blocks there.
//!
//! The subject is `PREFIX.v1.hint.NAMESPACE`. A hint is only a prediction, and never counts as known state. If a
//! query asks for predictions, the reply lists them separately, as
//! [`QueryReply::predicted`](super::QueryReply::predicted).

use serde::Deserialize;

use super::entries::{Entries, Message};
use super::error::DecodeError;
use super::limits::WireLimits;
use super::query::{SingleQuery, decode_query};
use super::reader::{Reader, check_version, set_once};
use super::subject::{Rank, WorkerName};
use super::writer::encode;

/// Maximum number of hints in one report.
pub const HINTS_MAX: usize = 64;

/// A hint: a request has been sent to a worker, which will have the blocks of the request's prompt soon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hint {
    /// Worker to which the request was sent.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    #[serde(default)]
    pub rank: Rank,
    /// Prompt of the request, in the form of a query. The options of that query have no meaning here.
    pub prompt: SingleQuery,
}

/// Hints about several requests of one namespace, at most [`HINTS_MAX`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HintReport(pub Vec<Hint>);

impl HintReport {
    /// Encodes the report as the payload for a hint subject.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a payload within `limits`. A prompt in a hint has the same limits as a query.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload is not a report of this version, or exceeds a limit.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let (mut version, mut hints) = (None, None);
        reader.map("the report", |reader, key| match key {
            b"v" => set_once(&mut version, "v", reader.unsigned("v")?),
            b"hints" => {
                let count = reader.array("hints", HINTS_MAX)?;
                let decoded = (0..count)
                    .map(|_| decode_hint(reader, limits))
                    .collect::<Result<_, _>>()?;
                set_once(&mut hints, "hints", decoded)
            }
            _ => reader.skip(),
        })?;
        reader.finish()?;
        check_version(version)?;
        Ok(Self(hints.unwrap_or_default()))
    }
}

fn decode_hint(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Hint, DecodeError> {
    let (mut worker, mut rank, mut prompt) = (None, None, None);
    reader.map("a hint", |reader, key| match key {
        b"worker" => {
            let text = reader.text("worker", limits.name_bytes_max)?;
            let name = WorkerName::bounded(text, limits.name_bytes_max);
            let named = name.map_err(|source| DecodeError::Name {
                field: "worker",
                source,
            });
            set_once(&mut worker, "worker", named?)
        }
        b"rank" => set_once(&mut rank, "rank", reader.unsigned_32("rank")?),
        b"prompt" => set_once(&mut prompt, "prompt", decode_query(reader, "the prompt", limits)?),
        _ => reader.skip(),
    })?;
    Ok(Hint {
        worker: worker.ok_or(DecodeError::Missing { field: "worker" })?,
        rank: rank.unwrap_or_default(),
        prompt: prompt.ok_or(DecodeError::Missing { field: "prompt" })?,
    })
}

impl Message for Hint {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.text("worker", self.worker.as_str())?;
        entries.number("rank", u64::from(self.rank))?;
        entries.map("prompt", &self.prompt)
    }
}

impl Message for HintReport {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", super::PROTOCOL_VERSION)?;
        entries.maps("hints", &self.0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::hash::SequenceHash;
    use crate::wire::QueryKey;

    use super::*;

    fn hint() -> Hint {
        Hint {
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 2,
            prompt: SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(7), SequenceHash(8)])),
        }
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let report = HintReport(vec![hint(), hint()]);
        let limits = WireLimits::default();
        assert_eq!(HintReport::decode(&report.encode(), &limits), Ok(report));
        let many = HintReport(vec![hint(); HINTS_MAX + 1]);
        assert!(HintReport::decode(&many.encode(), &limits).is_err());
        let deep = WireLimits {
            query_depth_max: 1,
            ..limits
        };
        assert!(HintReport::decode(&HintReport(vec![hint()]).encode(), &deep).is_err());
    }

    #[test]
    fn what_is_no_report_is_refused_and_what_is_unknown_is_passed_over() {
        let limits = WireLimits::default();
        let decode =
            |sent: &serde_json::Value| HintReport::decode(&rmp_serde::to_vec_named(sent).unwrap(), &limits);
        let prompt = json!({ "sequence_hashes": [7, 8], "later": 1 });
        let sent =
            json!({ "v": 1, "more": {}, "hints": [{ "worker": "gpu-0", "prompt": prompt, "why": [] }] });
        let read = decode(&sent).unwrap();
        assert_eq!(read.0, [Hint { rank: 0, ..hint() }]);
        for wrong in [
            json!({ "v": 2, "hints": [] }),
            json!({ "v": 1, "hints": [{ "worker": "a.b", "prompt": prompt }] }),
            json!({ "v": 1, "hints": [{ "worker": "gpu-0" }] }),
            json!({ "v": 1, "hints": [{ "prompt": prompt }] }),
            json!({ "v": 1, "hints": [{ "worker": "gpu-0", "prompt": { "limit": 1 } }] }),
            json!({ "v": 1, "hints": [{ "worker": "gpu-0", "rank": -1, "prompt": prompt }] }),
        ] {
            assert!(decode(&wrong).is_err(), "{wrong}");
        }
        assert!(HintReport::decode(b"garbage", &limits).is_err());
    }
}
