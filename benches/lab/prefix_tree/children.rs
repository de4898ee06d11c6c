//! Children of a node. Most nodes have at most one child, and then need no table.

use std::hash::Hash;

use hashbrown::HashMap;

use super::SharedNode;

/// Children by their keys.
pub(super) enum NodeChildren<K, G> {
    /// At most one child.
    Few(Option<(K, SharedNode<K, G>)>),
    /// At least two children, in a table.
    #[allow(
        clippy::box_collection,
        reason = "keeps a node small: most nodes have one child at most"
    )]
    Many(Box<HashMap<K, SharedNode<K, G>>>),
}

impl<K, G> Default for NodeChildren<K, G> {
    fn default() -> Self {
        Self::Few(None)
    }
}

/// A table with at most this capacity is not shrunk, as long as its node has several children.
const SMALL_TABLE: usize = 64;

impl<K: Copy + Eq + Hash, G> NodeChildren<K, G> {
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Few(None))
    }

    pub(super) fn get(&self, key: &K) -> Option<&SharedNode<K, G>> {
        match self {
            Self::Few(only) => only.as_ref().filter(|(own, _)| own == key).map(|(_, node)| node),
            Self::Many(table) => table.get(key),
        }
    }

    /// Adds a child. `key` must not have a child yet.
    pub(super) fn insert(&mut self, key: K, node: SharedNode<K, G>) {
        match self {
            Self::Few(only) => {
                *self = match only.take() {
                    None => Self::Few(Some((key, node))),
                    Some(first) => Self::Many(Box::new(HashMap::from_iter([first, (key, node)]))),
                };
            }
            Self::Many(table) => {
                table.insert(key, node);
            }
        }
    }

    /// Removes a child. Frees the table if only one child is left, and shrinks a large table that has become mostly
    /// empty.
    pub(super) fn remove(&mut self, key: &K) {
        match self {
            Self::Few(only) => {
                only.take_if(|(own, _)| own == key);
            }
            Self::Many(table) => {
                table.remove(key);
                if table.len() == 1 {
                    let last = table.drain().next();
                    *self = Self::Few(last);
                } else if table.capacity() > SMALL_TABLE.max(table.len() * 8) {
                    table.shrink_to(table.len() * 2);
                }
            }
        }
    }

    /// Removes and returns all children.
    pub(super) fn take(&mut self) -> impl Iterator<Item = SharedNode<K, G>> + use<K, G> {
        let (only, table) = match std::mem::take(self) {
            Self::Few(only) => (only, None),
            Self::Many(table) => (None, Some(*table)),
        };
        let nodes = only.into_iter().chain(table.into_iter().flatten());
        nodes.map(|(_, node)| node)
    }

    /// Number of bytes that the table takes on the heap, without the nodes.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::Many(table) => size_of::<HashMap<K, SharedNode<K, G>>>() + table.allocation_size(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::TreeNode;
    use super::*;
    use crate::HolderNumber;

    proptest! {
        #[test]
        fn children_equal_a_model(changes in proptest::collection::vec((any::<bool>(), 0_u64..150), 0..600)) {
            let mut children: NodeChildren<u64, hashbrown::HashSet<HolderNumber>> = NodeChildren::default();
            let mut model = BTreeSet::new();
            for (is_insertion, key) in changes {
                prop_assert_eq!(children.get(&key).is_some(), model.contains(&key));
                if !is_insertion {
                    children.remove(&key);
                    model.remove(&key);
                } else if model.insert(key) {
                    children.insert(key, Arc::new(TreeNode::new(None)));
                }
                prop_assert_eq!(children.is_empty(), model.is_empty());
                prop_assert_eq!(children.heap_bytes() == 0, model.len() < 2);
            }
            prop_assert_eq!(children.take().count(), model.len());
            prop_assert!(children.is_empty());
        }
    }
}
