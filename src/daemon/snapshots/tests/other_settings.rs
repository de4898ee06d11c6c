//! Tests of snapshots that were written under other settings of a namespace.

use kvatlas_core::index::{Capacity, IndexLimits, NamespaceSettings};
use kvatlas_core::wire::DegradedReason;

use super::*;

/// A test that holders whose blocks do not fit the namespace any more come from the stream, if it is read from its
/// beginning. Without such a stream they wait for their publishers' answers.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_do_not_fit_any_more_come_from_the_stream_where_it_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    for sequence in 1..=8 {
        world.dispatch(sequence).await;
    }
    world.pool.drain().await.unwrap();
    save(&world.snapshotter(folder.path())).await;
    for stream in [Some("OTHERS"), None] {
        let settings = NamespaceSettings {
            block_size: BlockSize::new(32).unwrap(),
            ..NamespaceSettings::default()
        };
        let (capacity, limits) = (Capacity::UNBOUNDED, IndexLimits::default());
        let restarted = World::of(Namespaces::new(capacity, settings, Vec::new(), limits, 4));
        restarted.restore(folder.path(), stream).await.unwrap();
        for sequence in 1..=8 {
            restarted.dispatch(sequence).await;
        }
        restarted.pool.drain().await.unwrap();
        let holders = restarted.holders();
        if stream.is_some() {
            assert_eq!(holders, world.holders());
            continue;
        }
        let is_rejected = |holder: &(_, _, u64, DegradedReasons)| {
            holder.2 == 0 && holder.3.contains(DegradedReason::Rejected)
        };
        assert!(
            holders.len() == 4 && holders.iter().all(is_rejected),
            "{holders:?}"
        );
    }
}
