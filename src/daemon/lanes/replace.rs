//! Replacement of a holder's blocks by the full state that its publisher has sent.

use std::collections::HashSet;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::HolderWriter;
use kvatlas_core::wire::{BlockNames, Event, RemovedBlocks, StoredBlocks, Tier};

/// Name of a block in a tier. The name is the one by which the engine's events refer to the block.
type TierBlockName = (Tier, u64);

/// Maximum number of blocks in one event of the holder's dump.
const EVENT_BLOCKS_MAX: usize = 4096;

/// Removes the holder's blocks that `state` does not have. After `state` has been stored as well, the holder has
/// exactly the blocks of `state`.
///
/// Blocks that `state` has are not removed, so queries find them all the time. If the holder were cleared first, it
/// would look empty until its last block is stored. So it is cleared only if a block has no name, or if events wait
/// for a parent.
pub(super) fn remove_surplus<'a>(
    writer: &mut HolderWriter,
    state: impl Iterator<Item = (Tier, &'a Event)>,
    now_us: u64,
) {
    let is_settled = writer.status().parked_events.load() == 0;
    let wanted = is_settled.then(|| names_of(state)).flatten();
    let present: Vec<(Tier, Event)> = match &wanted {
        Some(_) => writer.dump_events(EVENT_BLOCKS_MAX).collect(),
        None => Vec::new(),
    };
    let present = names_of(present.iter().map(|(tier, event)| (*tier, event)));
    let (Some(wanted), Some(present)) = (wanted, present) else {
        writer.clear();
        return;
    };
    for tier in (0..Tier::COUNT).filter_map(Tier::new) {
        let surplus = present
            .iter()
            .filter(|named| named.0 == tier && !wanted.contains(*named));
        let hashes: Vec<SequenceHash> = surplus.map(|(_, name)| SequenceHash(*name)).collect();
        if !hashes.is_empty() {
            writer.apply(Event::Removed(RemovedBlocks::by_sequence(hashes)), tier, now_us);
        }
    }
}

/// Returns the names of all stored blocks, or `None` if a block has no name.
fn names_of<'a>(events: impl Iterator<Item = (Tier, &'a Event)>) -> Option<HashSet<TierBlockName>> {
    let mut names = HashSet::new();
    for (tier, event) in events {
        match event {
            Event::Stored(StoredBlocks {
                engine_hashes: Some(engine_hashes),
                ..
            }) => names.extend(engine_hashes.iter().map(|name| (tier, *name))),
            Event::Stored(StoredBlocks {
                names: BlockNames::Sequence { hashes, .. },
                ..
            }) => names.extend(hashes.iter().map(|hash| (tier, hash.as_u64()))),
            _ => return None,
        }
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use kvatlas_core::index::{IndexLimits, NamespaceSettings, PositionalIndexer};
    use kvatlas_core::wire::{HolderId, Resumable, ResumableBlocks, WorkerName};

    use super::*;

    fn holder() -> HolderWriter {
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        let worker = WorkerName::new("w").unwrap();
        index.register(&HolderId { worker, rank: 0 }).unwrap()
    }

    /// Strategy for one change, in one of three tiers. Stored chains share prefixes, and removals leave holes.
    fn change() -> impl Strategy<Value = (Tier, Event)> {
        let tier = (0..3_u8).prop_map(|tier| Tier::new(tier).unwrap());
        let block = |chain: u64, position: u64| {
            SequenceHash(if position < 3 {
                position + 1
            } else {
                chain * 100 + position + 1
            })
        };
        let chain =
            move |(chain, length): (u64, u64)| (0..length).map(|at| block(chain, at)).collect::<Vec<_>>();
        let stored = (1..4_u64, 1..8_u64, vec(any::<bool>(), 8), any::<bool>()).prop_map(
            move |(number, length, flags, is_all)| {
                let flags = flags.into_iter().take(usize::try_from(length).unwrap());
                Event::Stored(StoredBlocks {
                    resumable: Resumable::from_flags(flags.map(|flag| flag || is_all)),
                    ..StoredBlocks::by_sequence(None, None, chain((number, length)))
                })
            },
        );
        let marked = (1..4_u64, 0..8_u64, any::<bool>()).prop_map(move |(chain, at, resumable)| {
            Event::Resumable(ResumableBlocks::by_sequence(vec![block(chain, at)], resumable))
        });
        let removed = (1..4_u64, 0..8_u64)
            .prop_map(move |(chain, at)| Event::Removed(RemovedBlocks::by_sequence(vec![block(chain, at)])));
        (tier, prop_oneof![3 => stored, 1 => removed, 1 => marked])
    }

    /// Returns the contents of a holder in a form that can be compared. Leaves out the names of blocks if they equal
    /// the blocks' hashes, because such names are the same as none.
    fn contents(writer: &mut HolderWriter) -> Vec<String> {
        let without_hashes_as_names = |event| match event {
            Event::Stored(mut stored) => {
                if let BlockNames::Sequence { hashes, .. } = &stored.names {
                    let names: Vec<u64> = hashes.iter().map(|hash| hash.as_u64()).collect();
                    stored.engine_hashes.take_if(|own| *own == names);
                }
                Event::Stored(stored)
            }
            other => other,
        };
        let mut blocks: Vec<String> = writer
            .dump_events(1)
            .map(|(tier, event)| format!("{tier:?} {:?}", without_hashes_as_names(event)))
            .collect();
        blocks.sort();
        blocks
    }

    proptest! {
        #[test]
        fn a_replaced_holder_is_what_it_was_replaced_by(
            before in vec(change(), 0..30),
            after in vec(change(), 0..30),
        ) {
            let (mut replaced, mut publisher) = (holder(), holder());
            for (tier, event) in before {
                replaced.apply(event, tier, 0);
            }
            for (tier, event) in after {
                publisher.apply(event, tier, 0);
            }
            let state: Vec<(Tier, Event)> = publisher.dump_events(3).collect();
            remove_surplus(&mut replaced, state.iter().map(|(tier, event)| (*tier, event)), 0);
            for (tier, event) in state {
                replaced.apply(event, tier, 0);
            }
            prop_assert_eq!(contents(&mut replaced), contents(&mut publisher));
            prop_assert_eq!(replaced.blocks(), publisher.blocks());
        }
    }
}
