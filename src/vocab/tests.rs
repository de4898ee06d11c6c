//! Tests that compare the masks of token tries with the masks that the documentation's recursive function gives.

use proptest::prelude::*;

use super::*;

fn vocabulary(tokens: &[Vec<u8>]) -> Vocabulary {
    let mut builder = VocabularyBuilder::new();
    for (id, bytes) in (0..).zip(tokens) {
        builder.insert(id, bytes.clone()).unwrap();
    }
    builder.build().unwrap()
}

fn trie(tokens: &[&str]) -> (Vocabulary, TokenTrie) {
    let tokens: Vec<Vec<u8>> = tokens.iter().map(|token| token.as_bytes().to_vec()).collect();
    let vocabulary = vocabulary(&tokens);
    let trie = TokenTrie::new(&vocabulary);
    (vocabulary, trie)
}

/// Node of a token trie in its simplest form: tokens, and children by byte.
#[derive(Default)]
struct Tree {
    tokens: Vec<TokenId>,
    children: Vec<(u8, Tree)>,
}

impl Tree {
    fn new(vocabulary: &Vocabulary) -> Self {
        let mut root = Self::default();
        for (token, bytes) in vocabulary.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let end = bytes.iter().fold(&mut root, |tree, byte| tree.child(*byte));
            end.tokens.push(token);
        }
        root
    }

    fn child(&mut self, byte: u8) -> &mut Self {
        let found = self.children.iter().position(|(other, _)| *other == byte);
        let index = found.unwrap_or_else(|| {
            self.children.push((byte, Self::default()));
            self.children.len() - 1
        });
        &mut self.children[index].1
    }

    /// Traverses the tree recursively, as the documentation of the crate defines it.
    fn traverse(&self, recognizer: &mut impl Recognizer, allowed: &mut Vec<TokenId>) {
        allowed.extend(&self.tokens);
        for (byte, child) in &self.children {
            if recognizer.byte_allowed(*byte) {
                assert!(recognizer.try_push_byte(*byte));
                child.traverse(recognizer, allowed);
                recognizer.pop_bytes(1);
            }
        }
    }

    fn allowed(&self, recognizer: &mut impl Recognizer) -> Vec<TokenId> {
        let mut allowed = Vec::new();
        self.traverse(recognizer, &mut allowed);
        allowed.sort_unstable();
        allowed
    }
}

/// Recogniser that checks how a traversal calls it: when bytes are pushed and popped, and when the traversal starts and
/// finishes.
struct Watched<'a> {
    inner: TableRecognizer<'a>,
    depth: usize,
    started: usize,
    finished: usize,
}

impl Recognizer for Watched<'_> {
    fn try_push_byte(&mut self, byte: u8) -> bool {
        assert_eq!((self.started, self.finished), (1, 0));
        let is_allowed = self.inner.try_push_byte(byte);
        self.depth += usize::from(is_allowed);
        is_allowed
    }

    fn pop_bytes(&mut self, count: usize) {
        self.depth = self.depth.checked_sub(count).unwrap();
        self.inner.pop_bytes(count);
    }

    fn traversal_started(&mut self) {
        self.started += 1;
    }

    fn traversal_finished(&mut self) {
        assert_eq!(self.depth, 0);
        self.finished += 1;
    }
}

fn tokens() -> impl Strategy<Value = Vec<Vec<u8>>> {
    // Few letters, so that tokens share prefixes and come twice; some tokens are empty.
    let byte = prop_oneof![6 => b'a'..=b'd', 1 => any::<u8>()];
    prop::collection::vec(prop::collection::vec(byte, 0..7), 0..120)
}

fn tables() -> impl Strategy<Value = TransitionTable> {
    (1..7_u32).prop_flat_map(|states| {
        let next = prop_oneof![1 => Just(None), 2 => (0..states).prop_map(Some)];
        let row = (prop::collection::vec(next, 6), any::<bool>());
        prop::collection::vec(row, states as usize).prop_map(|rows| {
            let rows: Vec<TableRow> = rows
                .into_iter()
                .map(|(some, is_match)| spread(&some, is_match))
                .collect();
            TransitionTable::new(&rows).unwrap()
        })
    })
}

/// Makes a row from six transitions: one for each of the letters `a` to `d`, and two for all other bytes, by their parity.
fn spread(some: &[Option<u32>], is_match: bool) -> TableRow {
    let next = |byte: u8| match byte {
        b'a'..=b'd' => some[usize::from(byte - b'a')],
        _ => some[4 + usize::from(byte % 2)],
    };
    TableRow {
        next: (0..=u8::MAX).map(next).collect(),
        is_match,
    }
}

fn check_equal(tokens: &[Vec<u8>], table: &TransitionTable) -> Result<(), TestCaseError> {
    let vocabulary = vocabulary(tokens);
    let trie = TokenTrie::new(&vocabulary);
    let tree = Tree::new(&vocabulary);
    let start = table.start().unwrap();
    let expected = tree.allowed(&mut table.recognizer(start));

    let mut watched = Watched {
        inner: table.recognizer(start),
        depth: 0,
        started: 0,
        finished: 0,
    };
    let mut mask = trie.empty_mask();
    trie.allow(&mut watched, &mut mask).unwrap();
    prop_assert_eq!((watched.depth, watched.finished), (0, 1));
    prop_assert_eq!(watched.inner.state(), start);
    prop_assert_eq!(&mask.iter().collect::<Vec<_>>(), &expected);
    prop_assert_eq!(mask.count(), expected.len());

    let mut by_table = trie.empty_mask();
    trie.allow_by_table(table, start, &mut by_table).unwrap();
    prop_assert_eq!(&by_table, &mask);

    let mut logits = vec![-100.0; vocabulary.size() + 1];
    trie.allow_logits(&mut table.recognizer(start), &mut logits)
        .unwrap();
    for (token, bytes) in vocabulary.iter() {
        let is_allowed = expected.binary_search(&token).is_ok();
        prop_assert_eq!(logits[token.index()] == 0.0, is_allowed);
        prop_assert_eq!(mask.contains(token), is_allowed);
        let by_bytes = !bytes.is_empty() && table.advance(start, bytes).is_some();
        prop_assert_eq!(is_allowed, by_bytes);
    }
    Ok(())
}

fn tokenize_naively(tokens: &[Vec<u8>], text: &[u8]) -> Option<Vec<TokenId>> {
    let mut rest = text;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let fits = (0..)
            .zip(tokens)
            .filter(|(_, token)| !token.is_empty() && rest.starts_with(token));
        let (id, longest) = fits.min_by_key(|(_, token)| std::cmp::Reverse(token.len()))?;
        found.push(TokenId(id));
        rest = &rest[longest.len()..];
    }
    Some(found)
}

proptest! {
    #[test]
    fn masks_are_the_recursive_definition(tokens in tokens(), table in tables()) {
        check_equal(&tokens, &table)?;
    }

    /// A test with tokens of up to the maximum length, for which a walk needs its whole stack.
    #[test]
    fn long_tokens_are_walked(lengths in prop::collection::vec(1..=TOKEN_BYTES_MAX, 1..6), table in tables()) {
        let mut tokens: Vec<Vec<u8>> = lengths.iter().map(|length| vec![b'a'; *length]).collect();
        tokens.push([vec![b'a'; TOKEN_BYTES_MAX - 1], b"b".to_vec()].concat());
        tokens.push(vec![b'c'; 3]);
        check_equal(&tokens, &table)?;
    }

    #[test]
    fn greedy_tokens_are_the_longest(tokens in tokens(), text in prop::collection::vec(b'a'..=b'd', 0..40)) {
        let vocabulary = vocabulary(&tokens);
        let trie = TokenTrie::new(&vocabulary);
        let expected = tokenize_naively(&tokens, &text);
        prop_assert_eq!(trie.tokenize_greedily(&text).ok(), expected);
        for (token, bytes) in vocabulary.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let lowest = tokens.iter().position(|other| other == bytes).unwrap();
            prop_assert_eq!(trie.token(bytes).map(TokenId::index), Some(lowest));
            prop_assert!(lowest <= token.index());
        }
    }
}

#[test]
fn the_example_of_the_notes() {
    let (_, trie) = trie(&["a", "b", "c", "ax", "ay", "az", "aya", "ayb", "aza"]);
    let pops: Vec<usize> = trie
        .nodes()
        .iter()
        .map(|node| node.links().unwrap().num_parents)
        .collect();
    assert_eq!(pops, [1, 1, 1, 1, 2, 2, 3, 1, 1]);
    let automaton = RegexAutomaton::new("a(ya|z)+b?", RegexLimits::default()).unwrap();
    let start = automaton.table().start().unwrap();
    let mut mask = trie.empty_mask();
    trie.allow_by_table(automaton.table(), start, &mut mask).unwrap();
    let allowed: Vec<u32> = mask.iter().map(|token| token.0).collect();
    assert_eq!(allowed, [0, 4, 5, 6]);
}

#[test]
fn odd_vocabularies_are_handled() {
    let (vocabulary, trie) = trie(&["", "ab", "ab", "", "abc", "ab", "b"]);
    assert_eq!(vocabulary.without_bytes(), 2);
    let mut mask = trie.empty_mask();
    let automaton = RegexAutomaton::new("a.*", RegexLimits::default()).unwrap();
    let start = automaton.table().start().unwrap();
    trie.allow(&mut automaton.table().recognizer(start), &mut mask)
        .unwrap();
    assert_eq!(mask.iter().map(|token| token.0).collect::<Vec<_>>(), [1, 2, 4, 5]);
    assert!(mask.insert(TokenId(3)) && !mask.insert(TokenId(7)));
    assert_eq!(mask.count(), 5);
    mask.clear();
    assert_eq!(mask.count(), 0);
    assert_eq!(trie.token(b""), None);
    assert_eq!(trie.longest_prefix(b"abx"), Some((TokenId(1), 2)));
    assert_eq!(
        trie.tokenize_greedily(b"babca"),
        Err(UnknownByte {
            offset: 4,
            byte: b'a'
        })
    );

    let none = TokenTrie::new(&VocabularyBuilder::new().build().unwrap());
    let mut mask = none.empty_mask();
    none.allow_by_table(automaton.table(), start, &mut mask).unwrap();
    assert!(none.is_empty() && mask.count() == 0);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (_, trie) = trie(&["a", "b"]);
    let automaton = RegexAutomaton::new("a", RegexLimits::default()).unwrap();
    let start = automaton.table().start().unwrap();
    let mut other = TokenMask::new(3);
    let refusal = MaskError {
        mask: 3,
        vocabulary: 2,
    };
    assert_eq!(
        trie.allow_by_table(automaton.table(), start, &mut other),
        Err(refusal)
    );
    let mut recognizer = automaton.table().recognizer(start);
    assert_eq!(trie.allow(&mut recognizer, &mut other), Err(refusal));
    let refusal = LogitsError { logits: 2, needed: 3 };
    assert_eq!(trie.allow_logits(&mut recognizer, &mut [0.0; 2]), Err(refusal));

    // A state of a larger table is no state of this one.
    let larger = RegexAutomaton::new("[0-9]{50}", RegexLimits::default()).unwrap();
    let far = larger
        .table()
        .advance(larger.table().start().unwrap(), &[b'1'; 49])
        .unwrap();
    let mut mask = trie.empty_mask();
    trie.allow_by_table(automaton.table(), far, &mut mask).unwrap();
    assert_eq!(mask.count(), 0);
}

#[test]
fn wrong_tables_are_refused() {
    let row = |next: Vec<Option<u32>>| TableRow { next, is_match: true };
    let short = TransitionTable::new(&[row(vec![None; 255])]);
    assert_eq!(
        short,
        Err(TableError::WrongRow {
            state: 0,
            transitions: 255
        })
    );
    let nowhere = TransitionTable::new(&[row(vec![None; 256]), row(vec![Some(2); 256])]);
    let refusal = TableError::NoSuchState {
        state: 1,
        next: 2,
        states: 2,
    };
    assert_eq!(nowhere, Err(refusal));
    let many = vec![row(Vec::new()); TABLE_STATES_MAX + 1];
    assert!(matches!(
        TransitionTable::new(&many),
        Err(TableError::TooManyStates { .. })
    ));
    assert_eq!(TransitionTable::new(&[]).unwrap().start(), None);
}

/// Checks the links of all nodes. The expected links are computed from the depths of the nodes, which follow from the
/// nodes' changes of depth into their subtrees.
fn check_links(trie: &TokenTrie) {
    let mut depths = Vec::new();
    let mut depth = 1_usize;
    for node in trie.nodes() {
        depths.push(depth);
        depth = depth.checked_add_signed(node.depth_into()).unwrap();
    }
    assert_eq!(depth, 1);
    depths.push(depth);
    // The next node of the same depth or less, for each depth on the path that leads back from the end.
    let mut ends = vec![(1, trie.len())];
    for (index, depth) in depths[..trie.len()].iter().enumerate().rev() {
        while ends.last().unwrap().0 > *depth {
            ends.pop();
        }
        let (next, end) = *ends.last().unwrap();
        let links = Links {
            subtree_size: end - index,
            num_parents: depth + 1 - next,
        };
        assert_eq!(trie.links(index), Some(links), "node {index}");
        ends.push((*depth, index));
    }
}

/// A test with subtrees of more nodes than a node can store as a size, and with a token that has the maximum number.
#[test]
fn the_largest_vocabularies_are_walked() {
    let last = VOCABULARY_SIZE_MAX as u64 - 1;
    let mut builder = VocabularyBuilder::new();
    for id in 0..5_u64 << 18 {
        let [.., high, middle, low] = id.to_be_bytes();
        builder.insert(id, vec![b'a', high, middle, low]).unwrap();
    }
    builder.insert(last, b"b".to_vec()).unwrap();
    let trie = TokenTrie::new(&builder.build().unwrap());
    let [whole, high, middle] = [0, 1, 2].map(|index| trie.nodes()[index]);
    assert!(whole.is_large() && high.is_large() && !middle.is_large());
    assert_eq!(trie.links(0).unwrap().subtree_size, trie.len() - 1);
    check_links(&trie);
    for (expression, expected) in [
        (r"(?s-u:.*)", (5 << 18) + 1),
        (r"(?s-u:a\x02..)", 1 << 16),
        (r"(?s-u:.\x00\xff\xff)|b", 2),
        (r"b+", 1),
        (r"(?s-u:..)", 1),
    ] {
        let automaton = RegexAutomaton::new(expression, RegexLimits::default()).unwrap();
        let table = automaton.table();
        let start = table.start().unwrap();
        let mut mask = trie.empty_mask();
        trie.allow_by_table(table, start, &mut mask).unwrap();
        assert_eq!(mask.count(), expected, "{expression}");
        let mut by_recognizer = trie.empty_mask();
        trie.allow(&mut table.recognizer(start), &mut by_recognizer)
            .unwrap();
        assert_eq!(by_recognizer, mask, "{expression}");
    }
}

/// A test that walks past large nodes, of both kinds. Nodes of one kind have a subtree whose size does not fit in the
/// node; some of them lie in the subtree of another. Nodes of the other kind have more levels to pop than fit in the
/// node.
#[test]
fn large_subtrees_are_passed() {
    let mut builder = VocabularyBuilder::new();
    for id in 0..5_u64 << 18 {
        let [.., high, middle, low] = id.to_be_bytes();
        builder.insert(id, vec![b'a', b'a', high, middle, low]).unwrap();
    }
    let more = 5 << 18;
    builder.insert(more, b"ab".to_vec()).unwrap();
    builder
        .insert(more + 1, [b"ac".as_slice(), &[b'c'; 60]].concat())
        .unwrap();
    builder.insert(more + 2, b"ad".to_vec()).unwrap();
    let trie = TokenTrie::new(&builder.build().unwrap());
    let node = |bytes: &[u8]| {
        let index = bytes.iter().fold(None, |parent: Option<usize>, byte| {
            let first = parent.map_or(0, |parent| parent + 1);
            let mut siblings = flat::siblings(trie.nodes(), first);
            siblings.find_map(|(index, node)| (node.byte() == *byte).then_some(index))
        });
        trie.nodes()[index.unwrap()]
    };
    assert!(node(b"aa").is_large() && node(b"aa\0").is_large());
    assert!(!node(b"ab").is_large() && node(&[b"a".as_slice(), &[b'c'; 41]].concat()).is_large());
    for (expression, expected) in [("a[bd]", vec![more, more + 2]), ("a(d|c{40}d)", vec![more + 2])] {
        let automaton = RegexAutomaton::new(expression, RegexLimits::default()).unwrap();
        let start = automaton.table().start().unwrap();
        let mut mask = trie.empty_mask();
        trie.allow_by_table(automaton.table(), start, &mut mask).unwrap();
        let allowed: Vec<u64> = mask.iter().map(|token| u64::from(token.0)).collect();
        assert_eq!(allowed, expected, "{expression}");
        let mut by_recognizer = trie.empty_mask();
        trie.allow(&mut automaton.table().recognizer(start), &mut by_recognizer)
            .unwrap();
        assert_eq!(by_recognizer, mask, "{expression}");
    }
}
