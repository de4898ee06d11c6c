//! Tests of holders that change while a walk over the index finds their blocks.

use super::*;

/// Events in a worker's batches 2 to 4, which come in the middle of a snapshot.
type Meanwhile = Vec<(u64, u64, Vec<Event>)>;

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_during_a_walk_is_right_after_it() {
    let cases: Vec<(&str, Meanwhile)> = vec![
        ("nothing", vec![]),
        (
            "more is stored",
            vec![(1, 2, vec![stored(10..20)]), (1, 3, vec![stored(30..35)])],
        ),
        ("some is removed", vec![(1, 2, vec![removed(14..18)])]),
        (
            "it is removed and stored again",
            vec![
                (1, 2, vec![removed(12..18)]),
                (1, 3, vec![stored(10..19)]),
                (1, 4, vec![removed(16..19)]),
            ],
        ),
        (
            "what is stored is removed",
            vec![(1, 2, vec![stored(10..24)]), (1, 3, vec![removed(12..24)])],
        ),
        ("it has a hole", vec![(1, 2, vec![removed(12..13)])]),
        (
            "it had a hole",
            vec![(1, 2, vec![removed(12..13)]), (1, 3, vec![stored(10..13)])],
        ),
        ("it is cleared", vec![(1, 2, vec![Event::Cleared])]),
        (
            "it begins a new epoch",
            vec![(2, 1, vec![stored(50..54)]), (2, 2, vec![stored(50..60)])],
        ),
        ("it is emptied", vec![(1, 2, vec![removed(10..18)])]),
    ];
    for (name, batches) in cases {
        for meanwhile in [Moment::BeforeWalk, Moment::AfterWalk] {
            let folder = tempfile::tempdir().unwrap();
            let world = Arc::new(World::new());
            for worker in ["other", "gpu"] {
                world.tell(worker, 1, 1, vec![stored(10..18)]).await;
            }
            world.position.set(cursor(1));
            let sent = batches.clone();
            save_with(&world, folder.path(), meanwhile, async move |world: &World| {
                for (epoch, seq, events) in sent {
                    world.tell("gpu", epoch, seq, events).await;
                }
            })
            .await;
            let restarted = World::new();
            restarted.restore(folder.path(), Some(STREAM)).await.unwrap();
            for (epoch, seq, events) in batches.clone() {
                restarted.tell("gpu", epoch, seq, events).await;
            }
            assert_eq!(restarted.holders(), world.holders(), "{name}, {meanwhile:?}");
            for first in [10, 30, 50] {
                assert_eq!(
                    restarted.depths(first),
                    world.depths(first),
                    "{name}, {meanwhile:?}"
                );
            }
        }
    }
}

impl World {
    /// Returns each worker with the number of blocks that it has from block `first` on, without a hole.
    pub(super) fn depths(&self, first: u64) -> Vec<(String, u32)> {
        let query =
            kvatlas_core::wire::QueryKey::SequenceHashes((first..first + 20).map(SequenceHash).collect());
        let namespace = self.namespaces.get(&namespace()).unwrap();
        let matches = namespace
            .indexer
            .find_matches(&query, kvatlas_core::index::Search::default());
        let mut depths: Vec<_> = matches
            .unwrap()
            .holders()
            .map(|found| (found.holder.id.worker.to_string(), found.matched_blocks))
            .collect();
        depths.sort();
        depths
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_leaves_during_a_walk_is_not_taken_for_whole() {
    for comes_back in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        // Batches are not held, so a holder that comes back in the middle of an epoch is applied immediately.
        let world = Arc::new(World::keeping_back(None));
        for worker in ["other", "gpu"] {
            world.tell(worker, 1, 1, vec![stored(10..18)]).await;
        }
        world.position.set(cursor(1));
        save_with(
            &world,
            folder.path(),
            Moment::BeforeWalk,
            async move |world: &World| {
                world.tell("gpu", 1, 2, vec![Event::Goodbye]).await;
                if comes_back {
                    world.tell("gpu", 1, 3, vec![stored(10..12)]).await;
                }
            },
        )
        .await;
        let restarted = World::new();
        restarted.restore(folder.path(), None).await.unwrap();
        let holders = restarted.holders();
        let gpu = holders.iter().find(|holder| holder.0 == "gpu").unwrap();
        assert_eq!(gpu.2, if comes_back { 2 } else { 0 });
        assert!(gpu.3.contains(kvatlas_core::wire::DegradedReason::Gap));
        assert_eq!(restarted.depths(10).last(), Some(&("other".to_owned(), 8)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_of_a_namespace_that_was_forgotten_and_made_again_keep_their_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let world = Arc::new(World::new());
    world.tell("first", 1, 1, vec![stored(30..38)]).await;
    world.position.set(cursor(1));
    save_with(
        &world,
        folder.path(),
        Moment::BeforeLastDump,
        async |world: &World| {
            world.tell("first", 1, 2, vec![Event::Goodbye]).await;
            let forgotten: usize = [1, 2]
                .map(|now_us| world.namespaces.forget_empty(now_us, 0).len())
                .iter()
                .sum();
            assert_eq!(forgotten, 1);
            world.tell("second", 1, 1, vec![stored(10..18)]).await;
        },
    )
    .await;
    let restarted = World::new();
    restarted.restore(folder.path(), Some(STREAM)).await.unwrap();
    assert_eq!(restarted.depths(10), [("second".to_owned(), 8)]);
    assert!(restarted.depths(30).is_empty());
}
