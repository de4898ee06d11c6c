//! Shards that are missing from a gateway's answers at present, and the time since which each is missing.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use serde::Serialize;

use kvatlas_core::wire::Gathered;

/// Time in microseconds after which a shard no longer counts as missing, measured from the last answer that lacked the
/// shard.
const FORGOTTEN_AFTER_US: u64 = 60_000_000;

/// Shard that is missing from answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct MissingShard {
    /// Index of the shard, from 0. `shards` is the number of shards.
    shard: u32,
    shards: u32,
    /// Time of the first answer without the shard, in microseconds since the Unix epoch.
    since_us: u64,
    #[serde(skip)]
    last_us: u64,
}

/// Missing shards, by index. The contract bounds the number of shards.
#[derive(Debug, Default)]
pub(crate) struct MissingShards(Mutex<BTreeMap<u32, MissingShard>>);

impl MissingShards {
    /// Notes the shards that an answer lacks, and forgets the shards that the answer includes. `now_us` is in
    /// microseconds since the Unix epoch.
    pub(super) fn note(&self, gathered: &Gathered, now_us: u64) {
        let mut known = self.0.lock();
        known.retain(|shard, _| gathered.missing.contains(shard));
        for shard in gathered.missing.iter().copied() {
            let missing = known.entry(shard).or_insert(MissingShard {
                shard,
                shards: gathered.shards,
                since_us: now_us,
                last_us: now_us,
            });
            (missing.shards, missing.last_us) = (gathered.shards, now_us);
        }
    }

    /// Returns the shards that count as missing at `now_us`, in microseconds since the Unix epoch.
    pub(crate) fn all(&self, now_us: u64) -> Vec<MissingShard> {
        let known = self.0.lock();
        let lately = known
            .values()
            .filter(|missing| now_us.saturating_sub(missing.last_us) < FORGOTTEN_AFTER_US);
        lately.copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_missing_from_the_first_answer_without_it_until_one_with_it() {
        let missing = MissingShards::default();
        let note = |shards: &[u32], now_us| {
            let gathered = Gathered {
                shards: 3,
                missing: shards.to_vec(),
            };
            missing.note(&gathered, now_us);
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
}
