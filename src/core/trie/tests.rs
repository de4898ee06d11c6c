//! Tests that compare the layout with the recursive definition of a trie.

use proptest::prelude::*;

use super::*;

/// A node whose size field is small enough to overflow in tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Node<const SIZE_MAX: usize> {
    label: u8,
    value: Option<u32>,
    links: Option<Links>,
}

impl<const SIZE_MAX: usize> FlatNode for Node<SIZE_MAX> {
    type Label = u8;
    const DEPTH_MAX: usize = 12;

    fn label(&self) -> u8 {
        self.label
    }

    fn links(&self) -> Option<Links> {
        self.links
    }

    fn with_links(self, links: Links) -> Self {
        let links = stored::<SIZE_MAX>(links);
        Self { links, ..self }
    }
}

/// Returns the links that a node carries. A node with children has room for them only if neither number is above
/// `SIZE_MAX`.
fn stored<const SIZE_MAX: usize>(links: Links) -> Option<Links> {
    let has_room = links.is_leaf() || links.subtree_size.max(links.num_parents) <= SIZE_MAX;
    has_room.then_some(links)
}

fn node<const SIZE_MAX: usize>(label: u8, value: Option<u32>) -> Node<SIZE_MAX> {
    Node {
        label,
        value,
        links: None,
    }
}

/// A trie by its recursive definition: each node contains its children.
#[derive(Debug, Clone, Default)]
struct Tree {
    children: Vec<(u8, Option<u32>, Tree)>,
}

impl Tree {
    fn insert(&mut self, key: &[u8], value: u32) {
        let (first, rest) = key.split_first().unwrap();
        let found = self.children.iter().position(|(label, ..)| label == first);
        let position = found.unwrap_or_else(|| {
            let after = self.children.iter().filter(|(label, ..)| label < first).count();
            self.children.insert(after, (*first, None, Self::default()));
            after
        });
        if !rest.is_empty() {
            self.children[position].2.insert(rest, value);
        } else if self.children[position].1.is_none() {
            self.children[position].1 = Some(value);
        } else {
            let same = self.children.iter().filter(|(label, ..)| label <= first).count();
            self.children.insert(same, (*first, Some(value), Self::default()));
        }
    }

    fn size(&self) -> usize {
        self.children.iter().map(|(.., tree)| 1 + tree.size()).sum()
    }

    /// Appends label, value, depth, size and pops of each node to `into`, in depth-first order. `above` is the number
    /// of ancestors whose subtrees end with this level.
    fn flatten(&self, depth: usize, above: usize, into: &mut Vec<(u8, Option<u32>, usize, usize, usize)>) {
        for (position, (label, value, tree)) in self.children.iter().enumerate() {
            let is_last = position + 1 == self.children.len();
            let num_parents = if is_last { above + 1 } else { 1 };
            into.push((*label, *value, depth, 1 + tree.size(), num_parents));
            tree.flatten(depth + 1, num_parents, into);
        }
    }
}

fn keys() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let key = prop::collection::vec(0..4_u8, 1..7);
    prop::collection::vec(key, 0..40)
}

fn entries(keys: &[Vec<u8>]) -> Vec<(Vec<u8>, u32)> {
    (0..).zip(keys).map(|(value, key)| (key.clone(), value)).collect()
}

fn trie<const SIZE_MAX: usize>(keys: &[Vec<u8>]) -> FlatTrie<Node<SIZE_MAX>> {
    FlatTrie::from_entries(entries(keys), node).unwrap()
}

fn example() -> FlatTrie<Node<100>> {
    let keys = ["a", "b", "c", "ax", "ay", "az", "aya", "ayb", "aza"];
    trie(&keys.map(|key| key.as_bytes().to_vec()))
}

#[test]
fn the_example_of_the_notes() {
    let trie = example();
    let columns = |column: fn(&Node<100>) -> usize| trie.nodes().iter().map(column).collect::<Vec<_>>();
    let labels: Vec<u8> = trie.nodes().iter().map(|node| node.label).collect();
    assert_eq!(labels, b"axyabzabc");
    assert_eq!(
        columns(|node| node.links.unwrap().subtree_size),
        [7, 1, 3, 1, 1, 2, 1, 1, 1]
    );
    assert_eq!(
        columns(|node| node.links.unwrap().num_parents),
        [1, 1, 1, 1, 2, 2, 3, 1, 1]
    );
    let mut met = Vec::new();
    let mut walk = trie.depth_first();
    while let Some(visit) = walk.next() {
        met.push((visit.node.label, visit.depth));
        if visit.index == 2 {
            walk.skip_subtree();
            walk.skip_subtree();
        }
    }
    assert_eq!(
        met,
        [
            (b'a', 1),
            (b'x', 2),
            (b'y', 2),
            (b'z', 2),
            (b'a', 3),
            (b'b', 1),
            (b'c', 1)
        ]
    );
    assert_eq!(trie.find(*b"ayb"), Some(4));
    assert_eq!(trie.find(*b"aa"), None);
    assert_eq!(trie.find([]), None);
    assert_eq!(
        trie.children(2).map(|(index, _)| index).collect::<Vec<_>>(),
        [3, 4]
    );
    assert_eq!(trie.children(99).count(), 0);
}

#[test]
fn what_cannot_be_built_is_refused() {
    let deep = vec![(vec![1_u8; 13], 0)];
    let refused = FlatTrie::<Node<9>>::from_entries(deep, node).unwrap_err();
    assert_eq!(refused, EntryError::Build(BuildError::TooDeep { depth_max: 12 }));
    let empty = vec![(vec![1_u8], 0), (vec![], 1)];
    let refused = FlatTrie::<Node<9>>::from_entries(empty, node).unwrap_err();
    assert_eq!(refused, EntryError::EmptyKey { entry: 0 });
    let unsorted = [(vec![2_u8], 0), (vec![1, 1], 1)];
    let refused = FlatTrie::<Node<9>>::from_sorted_entries(unsorted, node).unwrap_err();
    assert_eq!(refused, EntryError::NotSorted { entry: 1 });
    assert_eq!(
        FlatTrieBuilder::<Node<9>>::new().leave(),
        Err(BuildError::NothingOpen)
    );
    assert_eq!(Outline::<()>::new().leave(), Err(OutlineError::NothingOpen));
}

fn links(subtree_size: usize, num_parents: usize) -> Node<100> {
    let links = Some(Links {
        subtree_size,
        num_parents,
    });
    Node {
        links,
        ..node(0, None)
    }
}

#[test]
fn links_that_lie_are_refused() {
    let refused = |nodes: &[Node<100>]| FlatTrie::from_nodes(nodes.to_vec()).unwrap_err();
    let wrong_size = |index, stored, actual| LayoutError::WrongSize {
        index,
        stored,
        actual,
    };
    let wrong_pops = |index, stored, expected| LayoutError::WrongPops {
        index,
        stored,
        expected,
    };
    // The faults: a subtree that ends after the last node; subtrees that overlap; a size of 0; pops beyond the roots,
    // no pops, or pops that do not lead to the parent of the next node; and a last node that must have children.
    assert_eq!(refused(&[links(9, 1), links(1, 2)]), wrong_size(0, 9, 2));
    assert_eq!(
        refused(&[links(2, 1), links(2, 2), links(1, 3)]),
        wrong_size(0, 2, 3)
    );
    assert_eq!(refused(&[links(0, 1), links(1, 2)]), wrong_size(0, 0, 2));
    assert_eq!(refused(&[links(1, 2), links(1, 1)]), wrong_pops(0, 2, 1));
    assert_eq!(refused(&[links(1, 0), links(1, 1)]), wrong_pops(0, 0, 1));
    assert_eq!(refused(&[links(2, 1), links(1, 1)]), wrong_pops(1, 1, 2));
    assert_eq!(refused(&[links(2, 2), links(1, 2)]), wrong_pops(0, 2, 1));
    assert_eq!(refused(&[links(1, 1), links(2, 1)]), LayoutError::Cut);
    // A node has room for its links, but carries none.
    assert_eq!(refused(&[node(0, None), links(1, 2)]), wrong_size(0, 0, 2));
    assert_eq!(refused(&[node(0, None)]), LayoutError::Cut);
    let deep = [links(2, 1); 13];
    let too_deep = LayoutError::TooDeep {
        index: 12,
        depth: 13,
        depth_max: 12,
    };
    assert_eq!(refused(&deep), too_deep);
    assert!(FlatTrie::<Node<100>>::from_nodes(Vec::new()).unwrap().is_empty());
}

/// Compares the trie built from these keys with the recursive definition.
fn check_against_tree<const SIZE_MAX: usize>(keys: &[Vec<u8>]) -> Result<(), TestCaseError> {
    let trie = trie::<SIZE_MAX>(keys);
    let mut tree = Tree::default();
    for (key, value) in entries(keys) {
        tree.insert(&key, value);
    }
    let mut expected = Vec::new();
    tree.flatten(1, 0, &mut expected);
    let met: Vec<_> = trie.depth_first().collect();
    prop_assert_eq!(met.len(), expected.len());
    for (visit, (label, value, depth, size, num_parents)) in met.iter().zip(&expected) {
        prop_assert_eq!(
            (visit.node.label, visit.node.value, visit.depth),
            (*label, *value, *depth)
        );
        let links = Links {
            subtree_size: *size,
            num_parents: *num_parents,
        };
        prop_assert_eq!(visit.node.links, stored::<SIZE_MAX>(links));
        prop_assert_eq!(trie.links(visit.index), Some(links));
        prop_assert_eq!(trie.subtree_end(visit.index), visit.index + size);
        let mut walk = trie.depth_first();
        walk.nth(visit.index);
        walk.skip_subtree();
        let after = expected.get(visit.index + size).map(|(_, _, depth, ..)| *depth);
        prop_assert_eq!(walk.next().map(|visit| visit.depth), after);
    }
    prop_assert_eq!(trie.depth_max(), keys.iter().map(Vec::len).max().unwrap_or(0));
    for key in keys {
        let first = keys.iter().position(|other| other == key).unwrap();
        let found = trie.find(key.iter().copied()).unwrap();
        prop_assert_eq!(trie.get(found).unwrap().value, u32::try_from(first).ok());
    }
    prop_assert_eq!(FlatTrie::from_nodes(trie.nodes().to_vec()), Ok(trie));
    Ok(())
}

proptest! {
    #[test]
    fn a_trie_is_its_recursive_definition(keys in keys()) {
        check_against_tree::<1000>(&keys)?;
    }

    #[test]
    fn links_without_room_are_found(keys in keys()) {
        check_against_tree::<3>(&keys)?;
        check_against_tree::<1>(&keys)?;
    }

    /// Checks that arbitrary nodes are refused or make a sound trie. A trie rebuilt from a walk over a sound trie
    /// must equal it.
    #[test]
    fn arbitrary_links_are_refused_or_sound(
        pairs in prop::collection::vec((0..6_usize, 0..5_usize), 0..8),
    ) {
        let nodes: Vec<_> = pairs.iter().map(|(size, pops)| links(*size, *pops)).collect();
        if let Ok(trie) = FlatTrie::from_nodes(nodes) {
            let mut builder = FlatTrieBuilder::new();
            for visit in trie.depth_first() {
                builder.leave_to(visit.depth - 1);
                builder.enter(*visit.node).unwrap();
            }
            prop_assert_eq!(builder.finish(), trie);
        }
    }

    /// A sound trie in which one link has been changed is never accepted.
    #[test]
    fn one_changed_link_is_noticed(
        keys in keys().prop_filter("an empty trie has no links", |keys| !keys.is_empty()),
        at in any::<prop::sample::Index>(),
        changed in 0..60_usize,
        kind in 0..3,
    ) {
        let mut nodes = trie::<1000>(&keys).into_nodes();
        let index = at.index(nodes.len());
        let before = nodes[index].links;
        let after = match (kind, before) {
            (0, Some(before)) => Some(Links { subtree_size: changed, ..before }),
            (1, Some(before)) => Some(Links { num_parents: changed, ..before }),
            _ => None,
        };
        nodes[index].links = after;
        prop_assert_eq!(FlatTrie::from_nodes(nodes).is_ok(), after == before);
    }

    #[test]
    fn an_outline_gives_the_shape_back(keys in keys()) {
        let trie = trie::<1000>(&keys);
        let mut outline = Outline::new();
        let mut records = Vec::new();
        let mut open = 0;
        for visit in trie.depth_first() {
            while open >= visit.depth {
                outline.leave().unwrap();
                open -= 1;
            }
            open += 1;
            records.extend(outline.enter(visit.node.label));
        }
        records.extend(outline.finish());
        prop_assert_eq!(records.len(), trie.len());
        let mut reader = OutlineReader::new(12);
        for (visit, record) in trie.depth_first().zip(&records) {
            let depth = reader.take(record.pops).unwrap();
            prop_assert_eq!((depth, record.payload), (visit.depth as u64, visit.node.label));
            let links = visit.node.links.unwrap();
            let pops = if links.is_leaf() { links.num_parents } else { 0 };
            prop_assert_eq!(record.pops, pops as u64);
        }
        prop_assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn arbitrary_pops_are_refused_or_sound(pops in prop::collection::vec(0..5_u64, 0..12)) {
        let mut reader = OutlineReader::new(6);
        let mut open = 0;
        for pops in pops {
            match reader.take(pops) {
                Ok(depth) => {
                    prop_assert_eq!(depth, open + 1);
                    prop_assert!((1..=6).contains(&depth) && pops <= depth);
                    open = depth - pops;
                }
                Err(OutlineError::TooDeep { .. }) => {
                    prop_assert_eq!(open, 6);
                    return Ok(());
                }
                Err(_) => {
                    prop_assert!(pops > open + 1);
                    return Ok(());
                }
            }
        }
        prop_assert_eq!(reader.finish().is_ok(), open == 0);
    }
}
