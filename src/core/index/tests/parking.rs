//! Stored events that wait for their parent.

use crate::hash::{Position, SequenceHash};
use crate::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{
    Applied, Capacity, Hashing, HolderWriter, IndexLimits, NamespaceSettings, ParkingLimits,
    PositionalIndexer, RejectReason, Search,
};

fn new_holder(parking: ParkingLimits) -> (PositionalIndexer, HolderWriter) {
    let limits = IndexLimits {
        parking,
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    let worker = WorkerName::new("w").unwrap();
    let writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
    (index, writer)
}

fn hashes(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}

fn stored(parent: u64, chain: &[u64]) -> Event {
    let parent = (parent > 0).then_some(SequenceHash(parent));
    Event::Stored(StoredBlocks::by_sequence(parent, None, hashes(chain)))
}

fn stored_at(position: u64, parent: u64, chain: &[u64]) -> Event {
    let position = Position::new(position).unwrap();
    Event::Stored(StoredBlocks::by_sequence(
        Some(SequenceHash(parent)),
        Some(position),
        hashes(chain),
    ))
}

fn removed(names: &[u64]) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(hashes(names)))
}

fn matched(index: &PositionalIndexer, chain: &[u64]) -> u32 {
    let query = QueryKey::SequenceHashes(hashes(chain));
    let matches = index.find_matches(&query, Search::default()).unwrap();
    matches.holders().map(|found| found.matched_blocks).sum()
}

fn apply(writer: &mut HolderWriter, event: Event) -> Applied {
    writer.apply(event, Tier::DEVICE, 0)
}

#[test]
fn events_whose_parents_may_have_been_evicted_are_counted_when_the_holder_catches_up() {
    let capacity = Capacity {
        blocks_max: 8,
        ..Capacity::UNBOUNDED
    };
    let limits = IndexLimits {
        capacity,
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    let [mut holder, mut other] = ["w", "other"].map(|worker| {
        let worker = WorkerName::new(worker).unwrap();
        index.register(&HolderId { worker, rank: 0 }).unwrap()
    });
    apply(&mut holder, stored(0, &[1, 2, 3, 4, 5, 6]));
    assert_eq!(apply(&mut holder, stored(10, &[11, 12, 13])).parked, 1);
    apply(&mut other, stored(0, &[21, 22, 23, 24]));
    assert_eq!(holder.catch_up().rejected(RejectReason::Capacity), 3);
    assert_eq!(holder.catch_up(), Applied::default());
}

#[test]
fn nested_events_apply_when_the_first_parent_arrives() {
    let (index, mut writer) = new_holder(ParkingLimits::default());
    for event in [stored(4, &[5, 6]), stored(2, &[3, 4]), stored(6, &[7])] {
        let applied = apply(&mut writer, event);
        assert_eq!((applied.parked, applied.stored), (1, 0));
    }
    assert_eq!(index.sizes().parked_events, 3);
    assert_eq!(writer.blocks(), 0);
    let applied = apply(&mut writer, stored(0, &[1, 2]));
    assert_eq!((applied.parked, applied.stored), (0, 7));
    assert_eq!(matched(&index, &[1, 2, 3, 4, 5, 6, 7, 8]), 7);
    assert_eq!(index.sizes().parked_events, 0);
}

#[test]
fn what_was_removed_while_it_waited_stays_away() {
    let (index, mut writer) = new_holder(ParkingLimits::default());
    apply(&mut writer, stored(1, &[2, 3, 4]));
    assert_eq!(apply(&mut writer, removed(&[3])).removed, 1);
    assert_eq!(
        apply(&mut writer, removed(&[3])).rejected(RejectReason::UnknownBlock),
        1
    );
    assert_eq!(apply(&mut writer, stored(0, &[1])).stored, 3);
    assert_eq!(matched(&index, &[1, 2, 3, 4]), 2);
    // The third held block is block 4, after the hole.
    assert_eq!(writer.blocks(), 3);
    apply(&mut writer, stored(2, &[3]));
    assert_eq!(matched(&index, &[1, 2, 3, 4]), 4);
}

#[test]
fn a_removal_from_another_tier_does_not_touch_what_waits() {
    let (index, mut writer) = new_holder(ParkingLimits::default());
    apply(&mut writer, stored(1, &[2]));
    writer.apply(removed(&[2]), Tier::new(1).unwrap(), 0);
    apply(&mut writer, stored(0, &[1]));
    assert_eq!(matched(&index, &[1, 2]), 2);
}

/// Checks that a removed block does not come back with a waiting event. Two events store the block. The first is
/// applied: the block is held, although the block before it is missing. The second waits for the missing block. Then
/// the block is removed, and the missing block arrives.
#[test]
fn a_removed_block_does_not_come_back_with_an_event_that_waited() {
    let (index, mut writer) = new_holder(ParkingLimits::default());
    apply(&mut writer, stored_at(1, 1, &[2]));
    apply(&mut writer, stored(1, &[2]));
    assert_eq!(index.sizes().parked_events, 1);
    assert_eq!(apply(&mut writer, removed(&[2])).removed, 1);
    apply(&mut writer, stored(0, &[1]));
    assert_eq!(matched(&index, &[1, 2]), 1);
}

#[test]
fn a_block_stored_after_its_removal_survives_an_event_that_waited() {
    let (index, mut writer) = new_holder(ParkingLimits::default());
    apply(&mut writer, stored(1, &[2]));
    apply(&mut writer, removed(&[2]));
    apply(&mut writer, stored_at(1, 1, &[2]));
    apply(&mut writer, stored(0, &[1]));
    assert_eq!(matched(&index, &[1, 2]), 2);
}

#[test]
fn clearing_forgets_what_waits() {
    for clear in [Event::Cleared, Event::Goodbye] {
        let (index, mut writer) = new_holder(ParkingLimits::default());
        apply(&mut writer, stored(1, &[2]));
        apply(&mut writer, clear);
        assert_eq!(index.sizes().parked_events, 0);
        apply(&mut writer, stored(0, &[1]));
        assert_eq!(matched(&index, &[1, 2]), 1);
    }
}

#[test]
fn the_oldest_events_make_room_for_new_ones() {
    let (index, mut writer) = new_holder(ParkingLimits {
        events_max: 2,
        ..ParkingLimits::default()
    });
    apply(&mut writer, stored(1, &[11, 12]));
    apply(&mut writer, stored(1, &[21]));
    let applied = apply(&mut writer, stored(1, &[31]));
    assert_eq!(
        (applied.parked, applied.rejected(RejectReason::ParkingFull)),
        (1, 2)
    );
    apply(&mut writer, stored(0, &[1]));
    let depths = [11, 21, 31].map(|hash| matched(&index, &[1, hash]));
    assert_eq!(depths, [1, 2, 2]);
}

#[test]
fn blocks_that_wait_are_bounded_in_all() {
    let (index, mut writer) = new_holder(ParkingLimits {
        blocks_max: 4,
        ..ParkingLimits::default()
    });
    apply(&mut writer, stored(1, &[11]));
    apply(&mut writer, stored(1, &[21, 22, 23]));
    assert_eq!(
        apply(&mut writer, stored(1, &[31])).rejected(RejectReason::ParkingFull),
        1
    );
    assert_eq!(index.sizes().parked_events, 2);
    // The event alone is larger than the limit, so no other event is dropped to make room for it.
    let applied = apply(&mut writer, stored(1, &[41, 42, 43, 44, 45]));
    assert_eq!(applied.rejected(RejectReason::ParkingFull), 5);
    assert_eq!(index.sizes().parked_events, 2);
    apply(&mut writer, stored(0, &[1]));
    let depths = [11, 21, 31, 41].map(|hash| matched(&index, &[1, hash]));
    assert_eq!(depths, [1, 2, 2, 1]);
}

#[test]
fn parking_can_be_switched_off() {
    let (index, mut writer) = new_holder(ParkingLimits {
        events_max: 0,
        ..ParkingLimits::default()
    });
    assert_eq!(
        apply(&mut writer, stored(1, &[2, 3])).rejected(RejectReason::ParkingFull),
        2
    );
    assert_eq!(index.sizes().parked_events, 0);
}

#[test]
fn events_wait_no_longer_than_they_may() {
    let (index, mut writer) = new_holder(ParkingLimits {
        wait_us_max: 100,
        ..ParkingLimits::default()
    });
    writer.apply(stored(1, &[11, 12]), Tier::DEVICE, 1000);
    writer.apply(stored(1, &[21]), Tier::DEVICE, 1050);
    assert_eq!(writer.expire_parked(1099), Applied::default());
    assert_eq!(
        writer.expire_parked(1100).rejected(RejectReason::ParkingExpired),
        2
    );
    assert_eq!(index.sizes().parked_events, 1);
    writer.apply(stored(0, &[1]), Tier::DEVICE, 1149);
    assert_eq!([11, 21].map(|hash| matched(&index, &[1, hash])), [1, 2]);
    assert_eq!(writer.expire_parked(u64::MAX), Applied::default());
}

#[test]
fn content_that_waits_is_no_more_than_the_blocks_need() {
    use crate::wire::BlockContent;
    // The event has one block, but tokens for a thousand blocks. While it waits, it would count as one block.
    let tokens = vec![7; 16_000];
    let content = || {
        Some(BlockContent::Tokens {
            tokens: tokens.clone(),
            lora_name: None,
            cache_salt: None,
        })
    };
    for (hashing, refused) in [(Hashing::Engine, 0), (Hashing::Recompute, 1)] {
        let settings = NamespaceSettings {
            hashing,
            ..NamespaceSettings::default()
        };
        let index = PositionalIndexer::new(settings, IndexLimits::default());
        let worker = WorkerName::new("w").unwrap();
        let mut holder = index.register(&HolderId { worker, rank: 0 }).unwrap();
        let mut stored = StoredBlocks::by_sequence(Some(SequenceHash(1)), None, vec![SequenceHash(2)]);
        stored.content = content();
        let applied = holder.apply(Event::Stored(stored), Tier::DEVICE, 0);
        assert_eq!(applied.rejected(RejectReason::ContentMismatch), refused);
        assert_eq!(applied.parked, 1 - refused);
    }
}

#[test]
fn what_was_removed_while_it_waited_is_not_lost() {
    let (index, mut writer) = new_holder(ParkingLimits::default());
    apply(&mut writer, stored(2, &[3, 4]));
    apply(&mut writer, removed(&[4, 3]));
    assert_eq!(writer.expire_parked(u64::MAX), Applied::default());
    assert_eq!(index.sizes().parked_events, 0);
    apply(&mut writer, stored(2, &[3, 4]));
    apply(&mut writer, removed(&[3]));
    let applied = writer.expire_parked(u64::MAX);
    assert_eq!(applied.rejected(RejectReason::ParkingExpired), 1);
}

#[test]
fn tokens_wait_as_their_hashes_and_all_holders_within_one_bound() {
    use crate::wire::BlockContent;
    let settings = NamespaceSettings {
        hashing: Hashing::Recompute,
        ..NamespaceSettings::default()
    };
    let limits = IndexLimits {
        parking: ParkingLimits {
            bytes_max: 1 << 20,
            ..ParkingLimits::default()
        },
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::new(settings, limits);
    let blocks = 1000_u16;
    let event = |seed: u64| {
        let hashes: Vec<SequenceHash> = (0..blocks)
            .map(|block| SequenceHash(seed + u64::from(block)))
            .collect();
        let mut stored = StoredBlocks::by_sequence(Some(SequenceHash(1)), None, hashes);
        stored.content = Some(BlockContent::Tokens {
            tokens: vec![3; usize::from(blocks) * settings.block_size.as_usize()],
            lora_name: None,
            cache_salt: None,
        });
        Event::Stored(stored)
    };
    let holder = |name: &str| {
        let worker = WorkerName::new(name).unwrap();
        index.register(&HolderId { worker, rank: 0 }).unwrap()
    };
    let flood = |writer: &mut HolderWriter| {
        let mut parked = 0;
        for number in 0..100 {
            let applied = apply(writer, event((number + 1) * 1_000_000));
            // Blocks for which there is no room are counted as dropped.
            let dropped = applied.rejected(RejectReason::ParkingFull);
            assert_eq!(dropped, if applied.parked == 1 { 0 } else { u64::from(blocks) });
            parked += applied.parked;
        }
        parked
    };
    let (mut greedy, mut other) = (holder("greedy"), holder("other"));
    let first = flood(&mut greedy);
    // The tokens of one event would take 64,000 bytes.
    assert!((4..=12).contains(&first), "{first}");
    assert!(index.sizes().bytes <= 1 << 18, "a fourth at most");
    // The first holder leaves room for others, and its own room is free again after a clear.
    let second = flood(&mut other);
    assert!((3..first).contains(&second), "{second}");
    assert!(index.sizes().bytes <= 1 << 19);
    greedy.clear();
    other.clear();
    assert_eq!(flood(&mut other), first);
}
