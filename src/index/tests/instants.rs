//! The module's consistency contract: in the shared runs every holder is prefix-closed at every instant, within events too, and
//! what it has changes within one run at a time.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::index::{IndexLimits, NamespaceSettings, PositionalIndexer};
use crate::wire::{Event, HolderId, RemovedBlocks, StoredBlocks, Tier, WorkerName};

/// A tree of sequence hashes: node n has the children 3n + 1 to 3n + 3, so that chains share prefixes and branch.
fn chain(mut node: u64) -> Vec<SequenceHash> {
    let mut chain = vec![SequenceHash(node)];
    while node > 0 {
        node = (node - 1) / 3;
        chain.push(SequenceHash(node));
    }
    chain.reverse();
    chain
}

#[derive(Debug, Clone)]
enum Change {
    /// The whole chain down to a node.
    Store(u64),
    /// A node alone, behind its parent, which may be missing.
    StoreOne(u64),
    /// Nodes in any order, heads and middles among them.
    Remove(Vec<u64>),
    Clear,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let node = 0_u64..120;
    let change = prop_oneof![
        4 => node.clone().prop_map(Change::Store),
        3 => node.clone().prop_map(Change::StoreOne),
        4 => proptest::collection::vec(node, 1..12).prop_map(Change::Remove),
        1 => Just(Change::Clear),
    ];
    proptest::collection::vec(change, 1..60)
}

fn event(change: Change) -> Event {
    match change {
        Change::Store(node) => {
            let chain = chain(node);
            Event::Stored(StoredBlocks::by_sequence(None, None, chain))
        }
        Change::StoreOne(node) => {
            let parent = (node > 0).then(|| SequenceHash((node - 1) / 3));
            let position = chain(node).len() as u64 - 1;
            let position = crate::hash::Position::new(position).unwrap();
            Event::Stored(StoredBlocks::by_sequence(
                parent,
                Some(position),
                vec![SequenceHash(node)],
            ))
        }
        Change::Remove(nodes) => {
            let hashes = nodes.into_iter().map(SequenceHash).collect();
            Event::Removed(RemovedBlocks::by_sequence(hashes))
        }
        Change::Clear => Event::Cleared,
    }
}

proptest! {
    #[test]
    fn every_holder_is_prefix_closed_at_every_instant(changes in changes()) {
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        index.runs().write().take_steps();
        let worker = WorkerName::new("w").unwrap();
        let mut holder = index.register(&HolderId { worker, rank: 0 }).unwrap();
        for change in changes {
            holder.apply(event(change), Tier::DEVICE, 0);
        }
        let mut seen: BTreeSet<PositionalLineageHash> = BTreeSet::new();
        for step in index.runs().write().take_steps() {
            let keys: Vec<PositionalLineageHash> = step.keys.into_iter().map(Into::into).collect();
            for (parent, child) in keys.iter().zip(&keys[1..]) {
                prop_assert!(child.is_child_of(parent), "{keys:?} are not of one run");
            }
            if step.is_insertion {
                let first = keys.first().unwrap();
                let has_parent = first.position() == 0 || seen.iter().any(|parent| first.is_child_of(parent));
                prop_assert!(has_parent, "{first:?} appears before its parent");
                for key in keys {
                    prop_assert!(seen.insert(key), "{key:?} appears twice");
                }
            } else {
                for key in &keys {
                    prop_assert!(seen.remove(key), "{key:?} goes twice");
                }
                for key in &keys {
                    let has_child = seen.iter().any(|child| child.is_child_of(key));
                    prop_assert!(!has_child, "{key:?} goes before its children");
                }
            }
        }
    }
}
