//! Sample of recent queries, which shows the prompts that routers ask about.
//!
//! The sample is a ring of the last [`QUERIES_MAX`] sampled queries, at most one every [`SAMPLING_INTERVAL`]. So at
//! any rate of queries, the sample takes some megabytes of memory, and a small share of one core. Counts over the
//! sample are exact for the queries that it keeps. A sketch (approximate counters) would take less memory, but lose
//! the chains of blocks. The page's atlas needs the chains to ask the index for their holders.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::index::QueryChain;
use kvatlas_core::wire::NamespaceName;

/// Maximum number of queries that the sample keeps.
const QUERIES_MAX: usize = 2048;
/// Maximum number of leading blocks that are kept of a query.
pub(crate) const BLOCKS_MAX: usize = 256;
/// Maximum number of blocks of all kept queries together. A block takes 16 bytes.
const BLOCKS_TOTAL_MAX: usize = 1 << 18;
/// Minimum time between two queries that are kept.
const SAMPLING_INTERVAL: Duration = Duration::from_millis(20);

/// Query in the sample.
#[derive(Debug, Clone)]
pub(crate) struct SampledQuery {
    /// Time at which the query was answered.
    pub(crate) at: Instant,
    /// Leading blocks for which the query asked; at least one.
    pub(crate) blocks: Arc<[PositionalLineageHash]>,
    namespace: NamespaceName,
}

/// Sample of recent queries.
#[derive(Debug, Default)]
pub(crate) struct QuerySample {
    /// Earliest time at which the sample takes another query, in microseconds.
    next_us: AtomicU64,
    kept: Mutex<KeptQueries>,
}

#[derive(Debug, Default)]
struct KeptQueries {
    queries: VecDeque<SampledQuery>,
    blocks: usize,
}

impl QuerySample {
    /// Adds a query to the sample if enough time has passed since the last one was added. `now_us` is the time in
    /// microseconds on a clock that does not run backwards.
    pub(crate) fn offer(&self, namespace: &NamespaceName, chain: &mut QueryChain<'_>, now_us: u64) {
        if !chain.is_empty() && self.is_time(now_us) {
            let blocks = (0..chain.len().min(BLOCKS_MAX)).map(|index| chain.key(index));
            self.keep(namespace.clone(), blocks.collect());
        }
    }

    /// Returns the sampled queries about a namespace, the oldest first.
    pub(crate) fn queries(&self, namespace: &NamespaceName) -> Vec<SampledQuery> {
        let kept = self.kept.lock();
        let about = kept.queries.iter().filter(|query| query.namespace == *namespace);
        about.cloned().collect()
    }

    /// Whether enough time has passed since a query was last added to the sample. If several threads call this at the
    /// same time, only one gets true.
    fn is_time(&self, now_us: u64) -> bool {
        let interval_us = u64::try_from(SAMPLING_INTERVAL.as_micros()).unwrap_or(u64::MAX);
        let next = self.next_us.load(Ordering::Relaxed);
        let after = now_us.saturating_add(interval_us);
        now_us >= next
            && self
                .next_us
                .compare_exchange(next, after, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    fn keep(&self, namespace: NamespaceName, blocks: Arc<[PositionalLineageHash]>) {
        let mut kept = self.kept.lock();
        kept.blocks += blocks.len();
        kept.queries.push_back(SampledQuery {
            at: Instant::now(),
            blocks,
            namespace,
        });
        while kept.queries.len() > QUERIES_MAX || kept.blocks > BLOCKS_TOTAL_MAX {
            let Some(oldest) = kept.queries.pop_front() else {
                break;
            };
            kept.blocks -= oldest.blocks.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::{BlockSize, SequenceHash};
    use kvatlas_core::wire::QueryKey;

    use super::*;
    use crate::lanes::now_us;

    fn name(text: &str) -> NamespaceName {
        NamespaceName::new(text).unwrap()
    }

    #[test]
    fn the_ring_keeps_the_newest_within_both_bounds() {
        let sample = QuerySample::default();
        let key = QueryKey::SequenceHashes((0..1000).map(SequenceHash).collect());
        let mut chain = QueryChain::new(&key, BlockSize::DEFAULT).unwrap();
        sample.offer(&name("a"), &mut chain, now_us());
        let [first] = &sample.queries(&name("a"))[..] else {
            panic!("the first query is kept");
        };
        assert_eq!(first.blocks.len(), BLOCKS_MAX, "a long query is cut");
        assert!(sample.queries(&name("b")).is_empty());
        for _ in 0..2 * QUERIES_MAX {
            sample.keep(name("b"), Arc::clone(&first.blocks));
        }
        let kept = sample.queries(&name("b"));
        assert_eq!(kept.len() * BLOCKS_MAX, BLOCKS_TOTAL_MAX);
        assert!(sample.queries(&name("a")).is_empty(), "the oldest went first");
        for _ in 0..2 * QUERIES_MAX {
            sample.keep(name("c"), first.blocks[..1].into());
        }
        assert_eq!(sample.queries(&name("c")).len(), QUERIES_MAX);
        assert_eq!(sample.kept.lock().blocks, QUERIES_MAX);
    }

    #[test]
    fn a_flood_of_queries_is_sampled_by_the_clock() {
        let sample = QuerySample::default();
        let key = QueryKey::SequenceHashes(vec![SequenceHash(1)]);
        let mut chain = QueryChain::new(&key, BlockSize::DEFAULT).unwrap();
        let begun = Instant::now();
        for _ in 0..10_000 {
            sample.offer(&name("a"), &mut chain, now_us());
        }
        let slots = begun.elapsed().as_millis() / SAMPLING_INTERVAL.as_millis() + 2;
        assert!(sample.queries(&name("a")).len() as u128 <= slots);
    }
}
