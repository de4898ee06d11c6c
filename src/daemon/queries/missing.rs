//! Shards that are missing from a gateway's answers at present, and the time at which each began to be missing. A
//! shard is missing because it is silent, or because it refuses to answer about a namespace. An *outage* is the time
//! in which the gateway has no answer at all, because all shards are missing.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use serde::Serialize;

use kvatlas_client::{Refusal, Refused};
use kvatlas_core::wire::{Gathered, NamespaceName, Subjects};

/// Time in microseconds after which a shard no longer counts as missing, measured from the last answer that lacked the
/// shard. An outage ends as long after the last request without an answer.
const FORGOTTEN_AFTER_US: u64 = 60_000_000;
/// Time in microseconds for which a refused request counts. While one counts, the gateway asks again at shorter intervals.
const REFUSED_FOR_US: u64 = 10_000_000;
/// Maximum number of remembered refusals. A bound is needed because clients choose the names of namespaces, and each
/// shard may refuse to answer about each name.
const REFUSALS_MAX: usize = 64;
/// Maximum length of the text of a refusal, in characters.
const WORDS_CHARS_MAX: usize = 512;

/// Shard that is missing from answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct MissingShard {
    /// Index of the shard, from 0. `shards` is the number of shards.
    shard: u32,
    shards: u32,
    /// Time of the first answer without the shard, in microseconds since the Unix epoch.
    since_us: u64,
    /// Refusal of the shard to answer; `None` if the shard is silent.
    #[serde(flatten)]
    refusal: Option<ShardRefusal>,
    #[serde(skip)]
    last_us: u64,
}

/// Refusal of a shard: at present it does not answer requests about a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ShardRefusal {
    namespace: NamespaceName,
    /// Reason, in the shard's words.
    refusal: String,
}

/// Outage: no shard answers the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ShardOutage {
    /// Time of the first request without an answer, in microseconds since the Unix epoch.
    since_us: u64,
    /// Error of the last request without an answer.
    error: String,
    #[serde(skip)]
    last_us: u64,
}

/// Record of the shards that are missing from answers.
#[derive(Debug, Default)]
pub(crate) struct MissingShards(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    silent: BTreeMap<u32, MissingShard>,
    /// Refusals by namespace and shard, at most [`REFUSALS_MAX`].
    refusing: BTreeMap<(NamespaceName, u32), MissingShard>,
    outage: Option<ShardOutage>,
    /// Text of the NATS server's last refusal of a request to the shards, with its time in microseconds.
    refused: Option<(String, u64)>,
}

impl MissingShards {
    /// Notes the shards that are missing from an answer about `namespace`. Forgets the shards that are in the answer. If
    /// `namespace` is `None`, the answer is about all namespaces, and only silent shards are noted.
    ///
    /// A missing shard is in `refused` if it has replied with a refusal; the value is the text of the refusal.
    /// `now_us` is in microseconds since the Unix epoch.
    pub(super) fn note(
        &self,
        namespace: Option<&NamespaceName>,
        gathered: &Gathered,
        refused: &BTreeMap<u32, String>,
        now_us: u64,
    ) {
        let mut known = self.0.lock();
        (known.outage, known.refused) = (None, None);
        let Known { silent, refusing, .. } = &mut *known;
        let is_silent = |shard: &u32| gathered.missing.contains(shard) && !refused.contains_key(shard);
        silent.retain(|shard, _| is_silent(shard));
        refusing.retain(|(about, shard), missing| {
            let has_changed = namespace == Some(about) && !refused.contains_key(shard);
            !has_changed && is_recent(missing.last_us, now_us)
        });
        let missing = |shard, refusal| MissingShard {
            shard,
            shards: gathered.shards,
            since_us: now_us,
            refusal,
            last_us: now_us,
        };
        for shard in gathered.missing.iter().copied().filter(is_silent) {
            let known = silent.entry(shard).or_insert_with(|| missing(shard, None));
            (known.shards, known.last_us) = (gathered.shards, now_us);
        }
        let Some(namespace) = namespace else {
            return;
        };
        for (shard, words) in refused {
            let key = (namespace.clone(), *shard);
            if refusing.len() >= REFUSALS_MAX && !refusing.contains_key(&key) {
                break;
            }
            let refusal = Some(ShardRefusal {
                namespace: namespace.clone(),
                refusal: words.chars().take(WORDS_CHARS_MAX).collect(),
            });
            let since_us = refusing.get(&key).map_or(now_us, |known| known.since_us);
            let refusing_now = MissingShard {
                since_us,
                ..missing(*shard, refusal)
            };
            refusing.insert(key, refusing_now);
        }
    }

    /// Notes a request that no shard has answered. `now_us` is in microseconds since the Unix epoch.
    pub(super) fn note_outage(&self, error: &str, now_us: u64) {
        let mut known = self.0.lock();
        let before = known.outage.as_ref().filter(|outage| outage.is_recent(now_us));
        known.outage = Some(ShardOutage {
            since_us: before.map_or(now_us, |outage| outage.since_us),
            error: error.chars().take(WORDS_CHARS_MAX).collect(),
            last_us: now_us,
        });
    }

    /// Notes what the NATS server refuses, if it refuses a request on the subjects of `shards`. `now_us` is in
    /// microseconds since the Unix epoch.
    pub(super) fn note_refused(&self, shards: &Subjects, refusal: &Refusal, now_us: u64) {
        if let Refused::Message(subject) = &refusal.refused
            && shards.is_of_requests(subject)
        {
            self.0.lock().refused = Some((refusal.words.clone(), now_us));
        }
    }

    /// Returns the words in which the NATS server has lately refused a request to the shards; `None` if it has not, or
    /// if a shard has answered since.
    pub(super) fn refused(&self, now_us: u64) -> Option<String> {
        let known = self.0.lock();
        let refused = known.refused.as_ref();
        let lately = refused.filter(|(_, last_us)| now_us.abs_diff(*last_us) < REFUSED_FOR_US);
        lately.map(|(words, _)| words.clone())
    }

    /// Returns the outage at `now_us`, in microseconds since the Unix epoch; `None` if some shard answers, or if nobody
    /// has asked lately.
    pub(crate) fn outage(&self, now_us: u64) -> Option<ShardOutage> {
        let known = self.0.lock();
        known.outage.clone().filter(|outage| outage.is_recent(now_us))
    }

    /// Returns the shards that count as missing at `now_us`, in microseconds since the Unix epoch: the silent ones,
    /// and then those that refuse.
    pub(crate) fn all(&self, now_us: u64) -> Vec<MissingShard> {
        let known = self.0.lock();
        let lately = known
            .silent
            .values()
            .chain(known.refusing.values())
            .filter(|missing| is_recent(missing.last_us, now_us));
        lately.cloned().collect()
    }
}

impl ShardOutage {
    fn is_recent(&self, now_us: u64) -> bool {
        is_recent(self.last_us, now_us)
    }
}

/// Whether `last_us` is recent at `now_us`. A time far in the future is not: the clock has been set back since.
fn is_recent(last_us: u64, now_us: u64) -> bool {
    now_us.abs_diff(last_us) < FORGOTTEN_AFTER_US
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NamespaceName {
        NamespaceName::new(text).unwrap()
    }

    fn gathered(missing: &[u32]) -> Gathered {
        Gathered {
            shards: 3,
            missing: missing.to_vec(),
        }
    }

    #[test]
    fn a_refused_request_counts_for_some_seconds_or_until_a_shard_answers() {
        let missing = MissingShards::default();
        let subjects = Subjects::new("kvatlas").unwrap();
        let note = |subject: &str, now_us| {
            let words = format!(r#"Permissions Violation for Publish to "{subject}""#);
            missing.note_refused(&subjects.of_shards(), &Refusal::parse(&words).unwrap(), now_us);
        };
        note("kvatlas.v1.hint.llama", 10);
        note("_INBOX.1", 10);
        assert_eq!(missing.refused(10), None);
        note("kvatlas.v1.shards.query.llama", 10);
        assert!(missing.refused(11).unwrap().contains("shards.query.llama"));
        assert_eq!(missing.refused(10 + REFUSED_FOR_US), None);
        note("kvatlas.v1.shards.query.llama", 10 + REFUSED_FOR_US);
        assert_eq!(missing.refused(10), None, "the clock has been set back");
        note("kvatlas.v1.shards.status.~all", 20);
        missing.note(Some(&name("n")), &gathered(&[]), &BTreeMap::new(), 30);
        assert_eq!(missing.refused(30), None);
    }

    #[test]
    fn a_shard_is_missing_from_the_first_answer_without_it_until_one_with_it() {
        let missing = MissingShards::default();
        let note = |shards: &[u32], now_us| {
            missing.note(Some(&name("n")), &gathered(shards), &BTreeMap::new(), now_us);
        };
        let told = |now_us| -> Vec<_> {
            let all = missing.all(now_us).into_iter();
            all.map(|one| (one.shard, one.shards, one.since_us)).collect()
        };
        note(&[1], 10);
        note(&[1, 2], 20);
        assert_eq!(told(30), [(1, 3, 10), (2, 3, 20)]);
        note(&[2], 40);
        assert_eq!(told(50), [(2, 3, 20)]);
        assert_eq!(told(40 + FORGOTTEN_AFTER_US), [], "nobody has asked since");
        note(&[], 60);
        assert_eq!(told(60), []);
    }

    #[test]
    fn a_shard_that_refuses_a_namespace_is_not_silent() {
        let missing = MissingShards::default();
        let note = |namespace: &str, refused: &[u32], now_us| {
            let words = refused.iter().map(|shard| (*shard, "no".to_owned())).collect();
            missing.note(Some(&name(namespace)), &gathered(refused), &words, now_us);
        };
        let told = |now_us| serde_json::to_value(missing.all(now_us)).unwrap();
        let refusing = serde_json::json!([{"shard": 0, "shards": 3, "since_us": 10, "namespace": "llama", "refusal": "no"}]);
        note("llama", &[0], 10);
        // The shard answers about other namespaces.
        note("qwen", &[], 20);
        note("llama", &[0], 30);
        assert_eq!(told(40), refusing);
        assert_eq!(told(30 + FORGOTTEN_AFTER_US), serde_json::json!([]));
        note("llama", &[], 50);
        assert_eq!(told(60), serde_json::json!([]));
        (0..1_000).for_each(|number| note(&format!("n-{number}"), &[0, 1], 70));
        assert_eq!(missing.all(80).len(), REFUSALS_MAX);
    }
    #[test]
    fn an_outage_lasts_from_the_first_request_without_an_answer_until_one_with_one() {
        let missing = MissingShards::default();
        let told = |now_us| {
            missing
                .outage(now_us)
                .map(|outage| (outage.since_us, outage.error))
        };
        assert_eq!(told(5), None);
        missing.note_outage("nobody", 10);
        missing.note_outage("late", 20);
        assert_eq!(told(30), Some((10, "late".to_owned())));
        assert_eq!(told(20 + FORGOTTEN_AFTER_US), None, "nobody has asked since");
        missing.note_outage("nobody", 20 + FORGOTTEN_AFTER_US);
        assert_eq!(told(20), None, "the clock has been set back");
        missing.note(None, &gathered(&[1]), &BTreeMap::new(), 40);
        assert_eq!(told(50), None);
        missing.note_outage("nobody", 60);
        assert_eq!(told(70), Some((60, "nobody".to_owned())));
    }
}
