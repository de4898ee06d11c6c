//! Tests that compare the layout with the recursive definition of a trie.

use proptest::prelude::*;

use super::super::{TokenTrie, VocabularyBuilder};
use super::*;

/// A trie by its recursive definition: each node contains its children.
#[derive(Debug, Clone, Default)]
struct Tree {
    children: Vec<(u8, Option<u32>, Tree)>,
}

impl Tree {
    fn insert(&mut self, key: &[u8], value: u32) {
        let (first, rest) = key.split_first().unwrap();
        let found = self.children.iter().position(|(byte, ..)| byte == first);
        let position = found.unwrap_or_else(|| {
            let after = self.children.iter().filter(|(byte, ..)| byte < first).count();
            self.children.insert(after, (*first, None, Self::default()));
            after
        });
        if !rest.is_empty() {
            self.children[position].2.insert(rest, value);
        } else if self.children[position].1.is_none() {
            self.children[position].1 = Some(value);
        } else {
            let same = self.children.iter().filter(|(byte, ..)| byte <= first).count();
            self.children.insert(same, (*first, Some(value), Self::default()));
        }
    }

    fn size(&self) -> usize {
        self.children.iter().map(|(.., tree)| 1 + tree.size()).sum()
    }

    /// Appends byte, token and links of each node to `into`, in depth-first order. `above` is the `num_parents` of the
    /// node whose children these are, or 0 at the root.
    fn flatten(&self, above: usize, into: &mut Vec<(u8, Option<u32>, Links)>) {
        for (position, (byte, token, tree)) in self.children.iter().enumerate() {
            let is_last = position + 1 == self.children.len();
            let links = Links {
                subtree_size: 1 + tree.size(),
                num_parents: if is_last { above + 1 } else { 1 },
            };
            into.push((*byte, *token, links));
            tree.flatten(links.num_parents, into);
        }
    }
}

/// Returns keys made of few letters, so that keys share prefixes and some are equal. In a long key each letter is
/// repeated 15 times, so that a node can have more levels to pop than its field holds.
fn keys() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let key = prop::collection::vec(0..4_u8, 1..7);
    let repeated = (key, prop_oneof![Just(1), Just(15)])
        .prop_map(|(key, times): (Vec<u8>, usize)| key.iter().flat_map(|byte| vec![*byte; times]).collect());
    prop::collection::vec(repeated, 0..40)
}

fn trie(keys: &[Vec<u8>]) -> TokenTrie {
    let mut builder = VocabularyBuilder::new();
    for (id, key) in (0..).zip(keys) {
        builder.insert(id, key.clone()).unwrap();
    }
    TokenTrie::new(&builder.build().unwrap())
}

#[test]
fn the_example_of_the_documentation() {
    let keys = ["a", "b", "c", "ax", "ay", "az", "aya", "ayb", "aza"];
    let trie = trie(&keys.map(|key| key.as_bytes().to_vec()));
    let column = |column: fn(Links) -> usize| -> Vec<_> {
        (0..9).map(|index| column(trie.links(index).unwrap())).collect()
    };
    let letters: Vec<u8> = trie.nodes().iter().map(|node| node.byte()).collect();
    assert_eq!(letters, b"axyabzabc");
    assert_eq!(column(|links| links.subtree_size), [7, 1, 3, 1, 1, 2, 1, 1, 1]);
    assert_eq!(column(|links| links.num_parents), [1, 1, 1, 1, 2, 2, 3, 1, 1]);
    let indexes = |first| -> Vec<usize> { siblings(trie.nodes(), first).map(|(index, _)| index).collect() };
    assert_eq!(indexes(0), [0, 7, 8]);
    assert_eq!(indexes(3), [3, 4]);
    assert!(indexes(99).is_empty());
    assert_eq!(trie.links(99), None);
    assert_eq!(trie.token(b"ayb"), Some(TokenId(7)));
    assert_eq!(trie.token(b"aa"), None);
}

proptest! {
    #[test]
    fn a_trie_is_its_recursive_definition(keys in keys()) {
        let trie = trie(&keys);
        let mut tree = Tree::default();
        for (token, key) in (0..).zip(&keys) {
            tree.insert(key, token);
        }
        let mut expected = Vec::new();
        tree.flatten(0, &mut expected);
        prop_assert_eq!(trie.len(), expected.len());
        for (index, (byte, token, links)) in expected.into_iter().enumerate() {
            let node = trie.nodes()[index];
            let found = Some(node.token_bits()).filter(|token| (*token as usize) < keys.len());
            prop_assert_eq!((node.byte(), found), (byte, token));
            let has_room = links.subtree_size == 1 || links.num_parents < 32;
            prop_assert_eq!(node.links(), has_room.then_some(links));
            prop_assert_eq!(trie.links(index), Some(links));
        }
        for key in &keys {
            let first = (0..).zip(&keys).find_map(|(token, other)| (other == key).then_some(TokenId(token)));
            prop_assert_eq!(trie.token(key), first);
        }
    }
}
