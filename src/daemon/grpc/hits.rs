//! Hit counts: the number of look-ups of each block.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;

use kvatlas_telemetry::GrpcHitMetrics;

use super::messages::HitCountEntry;

/// Approximate size of one count, in bytes, in the map and in the queue together.
const COUNT_BYTES: usize = 64;

/// Number of look-ups (hits) of each block hash, in bounded memory. If there is no room for a new hash, the oldest
/// count is dropped.
pub(super) struct Hits {
    kept: Mutex<LookUpCounts>,
    counts_max: usize,
    metrics: GrpcHitMetrics,
}

#[derive(Default)]
struct LookUpCounts {
    counts: HashMap<i64, u64>,
    /// Hashes that have a count. The hash whose count began first comes first.
    order: VecDeque<i64>,
}

impl Hits {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            kept: Mutex::default(),
            counts_max: bytes_max / COUNT_BYTES,
            metrics: GrpcHitMetrics::new(),
        }
    }

    /// Adds one look-up to the count of each of `hashes`.
    pub(super) fn count(&self, hashes: impl IntoIterator<Item = i64>) {
        let mut kept = self.kept.lock();
        let mut dropped = 0;
        for hash in hashes {
            match kept.counts.entry(hash) {
                Entry::Occupied(mut known) => *known.get_mut() = known.get().saturating_add(1),
                Entry::Vacant(vacant) => {
                    vacant.insert(1);
                    kept.order.push_back(hash);
                }
            }
            if kept.order.len() > self.counts_max
                && let Some(oldest) = kept.order.pop_front()
            {
                kept.counts.remove(&oldest);
                dropped += 1;
            }
        }
        self.metrics.counted.set(kept.counts.len() as f64);
        self.metrics.dropped.increment(dropped);
    }

    /// Returns the counts of `hashes`, in the order of `hashes`. A hash without a count is left out.
    pub(super) fn of(&self, hashes: &[i64]) -> Vec<HitCountEntry> {
        let kept = self.kept.lock();
        let entry = |hash: &i64| {
            let hit_count_total = *kept.counts.get(hash)?;
            Some(HitCountEntry {
                hash: *hash,
                hit_count_total,
            })
        };
        hashes.iter().filter_map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_counts_go_where_there_is_no_room() {
        let hits = Hits::new(3 * COUNT_BYTES);
        hits.count([1, 2, 3]);
        hits.count([1, 3]);
        let counts = |hits: &Hits| -> Vec<_> {
            let found = hits.of(&[3, 4, 1, 2]).into_iter();
            found.map(|entry| (entry.hash, entry.hit_count_total)).collect()
        };
        assert_eq!(counts(&hits), [(3, 2), (1, 2), (2, 1)]);
        hits.count([4]);
        assert_eq!(counts(&hits), [(3, 2), (4, 1), (2, 1)]);
        assert_eq!(hits.kept.lock().order.len(), 3);
    }
}
