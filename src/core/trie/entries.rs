//! Building of a trie from keys.

use super::builder::{BuildError, FlatTrieBuilder};
use super::flat::FlatTrie;
use super::node::FlatNode;

/// Reason why a trie cannot be made from entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// A key is empty. An empty key has no node to which its value could belong.
    #[error("entry {entry} has an empty key, for which there is no node; leave it out")]
    EmptyKey {
        /// Index of the entry, from 0, in the order of building.
        entry: usize,
    },
    /// The entries are not sorted by their keys.
    #[error("entry {entry} has a key that sorts before the one of the entry ahead of it; sort the entries")]
    NotSorted {
        /// Index of the entry, from 0.
        entry: usize,
    },
    /// The trie itself cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl<N: FlatNode> FlatTrie<N> {
    /// Makes a trie of entries in any order. Siblings are ordered by their labels. `node` makes a node from a label
    /// and, if a key ends there, the key's value.
    ///
    /// Entries with the same key become siblings, in the order of the entries. The first of these siblings has the
    /// key's subtree, and look-ups find it. The others have no children.
    ///
    /// # Errors
    ///
    /// If a key is empty, or the trie is too deep or too large.
    pub fn from_entries<K: AsRef<[N::Label]>, V>(
        mut entries: Vec<(K, V)>,
        node: impl FnMut(N::Label, Option<V>) -> N,
    ) -> Result<Self, EntryError> {
        entries.sort_by(|(one, _), (other, _)| one.as_ref().cmp(other.as_ref()));
        Self::from_sorted_entries(entries, node)
    }

    /// Makes a trie like [`from_entries`](Self::from_entries), but from entries that are sorted by key.
    ///
    /// # Errors
    ///
    /// If a key is empty or out of order, or the trie is too deep or too large.
    pub fn from_sorted_entries<K: AsRef<[N::Label]>, V>(
        entries: impl IntoIterator<Item = (K, V)>,
        mut node: impl FnMut(N::Label, Option<V>) -> N,
    ) -> Result<Self, EntryError> {
        let mut path = Path::default();
        for (entry, (key, value)) in entries.into_iter().enumerate() {
            let key = key.as_ref();
            let Some((last, before)) = key.split_last() else {
                return Err(EntryError::EmptyKey { entry });
            };
            if key < path.labels.as_slice() {
                return Err(EntryError::NotSorted { entry });
            }
            if key == path.labels {
                path.repeats.push(node(*last, Some(value)));
                continue;
            }
            let shared = path.shared(key);
            path.leave_to(shared)?;
            for label in before.iter().skip(shared) {
                path.enter(*label, node(*label, None))?;
            }
            path.enter(*last, node(*last, Some(value)))?;
        }
        path.leave_to(0)?;
        Ok(path.builder.finish())
    }
}

/// The path to the entry that was added last.
struct Path<N: FlatNode> {
    builder: FlatTrieBuilder<N>,
    labels: Vec<N::Label>,
    /// Nodes of further entries with the same key as the last entry. They are added when the first node of that key
    /// is left.
    repeats: Vec<N>,
    waiting: Vec<(usize, Vec<N>)>,
}

impl<N: FlatNode> Default for Path<N> {
    fn default() -> Self {
        Self {
            builder: FlatTrieBuilder::new(),
            labels: Vec::new(),
            repeats: Vec::new(),
            waiting: Vec::new(),
        }
    }
}

impl<N: FlatNode> Path<N> {
    /// Number of leading labels that the path and `key` have in common.
    fn shared(&self, key: &[N::Label]) -> usize {
        let pairs = self.labels.iter().zip(key);
        pairs.take_while(|(one, other)| one == other).count()
    }

    fn enter(&mut self, label: N::Label, node: N) -> Result<(), BuildError> {
        self.builder.enter(node)?;
        self.labels.push(label);
        Ok(())
    }

    fn leave_to(&mut self, depth: usize) -> Result<(), BuildError> {
        if !self.repeats.is_empty() {
            let repeats = std::mem::take(&mut self.repeats);
            self.waiting.push((self.labels.len(), repeats));
        }
        while self.labels.len() > depth {
            let depth_left = self.labels.len();
            self.builder.leave()?;
            self.labels.pop();
            for repeat in self.take_waiting(depth_left) {
                self.builder.enter(repeat)?;
                self.builder.leave()?;
            }
        }
        Ok(())
    }

    fn take_waiting(&mut self, depth: usize) -> Vec<N> {
        match self.waiting.pop_if(|(waiting, _)| *waiting == depth) {
            Some((_, repeats)) => repeats,
            None => Vec::new(),
        }
    }
}
