//! The two formats of snapshots beside each other, on the same index in the same run.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas::hash::SequenceHash;
use kvatlas::ingest::{LanePool, StreamPosition, snapshot_limits};
use kvatlas::snapshot::SnapshotFormat;
use kvatlas::snapshotter::{Restorer, SnapshotDirectory, Snapshotter};
use kvatlas::telemetry::SnapshotMetrics;
use kvatlas::tracking::StreamTrust;
use kvatlas::wire::QueryKey;
use tokio::runtime::Handle;

use super::{DEPTH, QUERY_BLOCKS, batch, measure, mix, namespace, namespaces, pool, save, worker};

/// Blocks that the chains of a family have in common.
const TRUNK: u64 = 512;
/// Chains of a family.
const BRANCHES: u64 = 8;
/// Holders of a chain that is shared.
const SHARING: u64 = 4;
/// How often each format is written and loaded, in turns; the fastest counts.
const ROUNDS: usize = 5;

/// Which chains there are, and who has them.
#[derive(Debug, Clone, Copy)]
struct Shape {
    is_shared: bool,
    chains: u64,
    holders: u64,
}

impl Shape {
    fn new(is_shared: bool, distinct: u64, holders: u64) -> Self {
        let chains = if is_shared {
            distinct / (TRUNK + BRANCHES * (DEPTH - TRUNK)) * BRANCHES
        } else {
            distinct / DEPTH
        };
        Self {
            is_shared,
            chains: chains.max(BRANCHES),
            holders,
        }
    }

    fn distinct(self) -> u64 {
        if self.is_shared {
            self.chains * (DEPTH - TRUNK) + self.chains / BRANCHES * TRUNK
        } else {
            self.chains * DEPTH
        }
    }

    fn sharing(self) -> u64 {
        if self.is_shared { SHARING } else { 1 }
    }

    /// The block of a chain at a position.
    fn hash(self, chain: u64, position: u64) -> SequenceHash {
        let is_common = self.is_shared && position < TRUNK;
        let owner = if is_common {
            chain - chain % BRANCHES
        } else {
            chain
        };
        SequenceHash(mix(owner * DEPTH + position))
    }

    fn chain(self, chain: u64, depth: u64) -> Vec<SequenceHash> {
        (0..depth).map(|position| self.hash(chain, position)).collect()
    }

    /// The holders of a chain. Those of a family's chains overlap, and each has a chain of the family only once.
    fn holders_of(self, chain: u64) -> impl Iterator<Item = u64> {
        let first = mix(chain) % self.holders;
        (0..self.sharing()).map(move |copy| (first + copy) % self.holders)
    }

    /// How many holders have the first blocks of a chain.
    fn holders_of_prefix(self, chain: u64) -> usize {
        let family = if self.is_shared {
            let first = chain - chain % BRANCHES;
            first..first + BRANCHES
        } else {
            chain..chain + 1
        };
        let holders: std::collections::HashSet<u64> =
            family.flat_map(|chain| self.holders_of(chain)).collect();
        holders.len()
    }
}

/// Prints what each format costs, with and without shared prefixes.
pub(super) async fn compare(distinct: u64, holders: u64) {
    for is_shared in [false, true] {
        let shape = Shape::new(is_shared, distinct, holders);
        let namespaces = Arc::new(namespaces());
        let pool = Arc::new(pool(&namespaces));
        fill(&pool, shape).await;
        println!(
            "{} distinct blocks, {} held, {holders} holders, {}",
            shape.distinct(),
            shape.chains * shape.sharing() * DEPTH,
            if is_shared {
                "shared prefixes"
            } else {
                "nothing shared"
            },
        );
        let query = move |number: u64| {
            let chain = mix(number) % shape.chains;
            let query = QueryKey::SequenceHashes(shape.chain(chain, QUERY_BLOCKS));
            (query, shape.holders_of_prefix(chain))
        };
        measure(&pool, &namespaces, query, None)
            .await
            .print("no snapshot");
        let mut formats = [SnapshotFormat::Events, SnapshotFormat::Forest]
            .map(|format| Measured::new(format, Arc::clone(&pool)));
        for _ in 0..ROUNDS {
            for measured in &mut formats {
                measured.round(shape).await;
            }
        }
        for measured in formats {
            measured.print(shape);
            let during = measure(&pool, &namespaces, query, Some(&measured.snapshotter)).await;
            during.print("while saving");
        }
    }
}

/// What one format costs; the fastest rounds count.
struct Measured {
    format: SnapshotFormat,
    snapshotter: Arc<Snapshotter>,
    folder: tempfile::TempDir,
    bytes: u64,
    written: Duration,
    loaded: Duration,
}

impl Measured {
    fn new(format: SnapshotFormat, pool: Arc<LanePool>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path(), 1).unwrap();
        let snapshotter = Snapshotter::new(pool, directory, Arc::default(), Arc::default());
        Self {
            format,
            snapshotter: Arc::new(snapshotter.with_format(format)),
            folder,
            bytes: 0,
            written: Duration::MAX,
            loaded: Duration::MAX,
        }
    }

    async fn round(&mut self, shape: Shape) {
        let saved = save(&self.snapshotter).await;
        self.bytes = saved.bytes;
        self.written = self.written.min(saved.elapsed);
        self.loaded = self.loaded.min(load(self.folder.path(), shape).await);
    }

    fn print(&self, shape: Shape) {
        println!(
            "{:<8} write {:7.3} s, load {:7.3} s, {} bytes: {:.2} a distinct block",
            format!("{:?}", self.format),
            self.written.as_secs_f64(),
            self.loaded.as_secs_f64(),
            self.bytes,
            self.bytes as f64 / shape.distinct() as f64,
        );
    }
}

async fn fill(pool: &LanePool, shape: Shape) {
    let generation = StreamTrust::default().generation();
    let mut batches = vec![0_u64; usize::try_from(shape.holders).unwrap()];
    for chain in 0..shape.chains {
        for holder in shape.holders_of(chain) {
            let seq = &mut batches[usize::try_from(holder).unwrap()];
            *seq += 1;
            let batch = batch(*seq, shape.chain(chain, DEPTH));
            pool.dispatch(&namespace(), worker(holder), batch.encode().into(), generation)
                .await
                .unwrap();
        }
    }
    pool.drain().await.unwrap();
}

/// Checks and applies the snapshot as a daemon does at its start; how long that takes.
async fn load(folder: &Path, shape: Shape) -> Duration {
    let namespaces = Arc::new(namespaces());
    let restorer = Restorer {
        pool: Arc::new(pool(&namespaces)),
        limits: snapshot_limits(),
        stream: None,
        position: Arc::new(StreamPosition::default()),
        trust: Arc::default(),
        metrics: Arc::new(SnapshotMetrics::new()),
    };
    let (directory, runtime) = (SnapshotDirectory::open(folder, 1).unwrap(), Handle::current());
    let started = Instant::now();
    let restoring =
        tokio::task::spawn_blocking(move || restorer.restore_newest(&directory, &runtime).unwrap());
    assert!(restoring.await.unwrap().is_some(), "the snapshot is refused");
    let elapsed = started.elapsed();
    let sizes = namespaces.get(&namespace()).unwrap().indexer.sizes();
    assert_eq!(sizes.distinct_blocks, shape.distinct());
    elapsed
}
