//! Windows and states, one rule at a time: which blocks are resumable, and which events make that unknown.

mod first_groups;

use std::collections::BTreeSet;

use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{Event, Tier};
use kvatlas_engines::{Format, GroupFacts, GroupKind, Reason, Translation, Translator, TranslatorSettings};

use crate::common::{Change, Naive, Store, contract_chain, feed, restarted, translator};

const SIZE: u32 = 4;

/// The tokens of a chain of `count` tokens.
fn tokens(count: u32) -> Vec<u32> {
    (0..count).collect()
}

/// A store of a group's blocks, which end at the tokens `ends`. A block that ends after n tokens has the name n.
fn stored(
    group: u32,
    kind: &'static str,
    window: Option<u32>,
    block: u32,
    tokens_of: std::ops::Range<u32>,
    ends: &[u64],
) -> Change {
    let parent = (tokens_of.start > 0).then_some(u64::from(tokens_of.start));
    let mut store = Store::new(
        ends,
        parent,
        &tokens(tokens_of.end)[tokens_of.start as usize..],
        block,
    );
    store.group = Some((group, Some(kind)));
    store.window = window;
    Change::Store(store)
}

/// A store of all blocks of main attention, group 0, in this range of tokens.
fn main(tokens_of: std::ops::Range<u32>) -> Change {
    let ends = (tokens_of.start / SIZE + 1..=tokens_of.end / SIZE).map(|block| u64::from(block * SIZE));
    stored(
        0,
        "full_attention",
        None,
        SIZE,
        tokens_of,
        &ends.collect::<Vec<_>>(),
    )
}

/// A store of blocks of group 1, a window of nine tokens, which needs two blocks.
fn window(tokens_of: std::ops::Range<u32>, ends: &[u64]) -> Change {
    stored(1, "sliding_window", Some(9), SIZE, tokens_of, ends)
}

/// The store `change` with other fields.
fn changed(change: Change, with: impl FnOnce(&mut Store)) -> Change {
    let Change::Store(mut store) = change else {
        unreachable!("it is a store")
    };
    with(&mut store);
    Change::Store(store)
}

fn removed(group: u32, names: &[u64]) -> Change {
    Change::Remove {
        names: names.to_vec(),
        medium: Some("GPU"),
        group: Some(group),
    }
}

/// A translator, and a naive index of its events.
struct Told {
    translator: Translator,
    naive: Naive,
    last: Translation,
}

impl Told {
    fn new() -> Self {
        Self::of(translator(SIZE))
    }

    fn of(translator: Translator) -> Self {
        Self {
            translator,
            naive: Naive::default(),
            last: Translation::default(),
        }
    }

    fn step(&mut self, changes: &[Change]) -> &mut Self {
        self.last = feed(&mut self.translator, changes);
        self.naive.apply(&self.last);
        self
    }

    /// The positions in tokens at which resumable blocks end.
    fn resumable(&self) -> BTreeSet<u32> {
        let chain = contract_chain(&tokens(1000), SIZE, None, None);
        let is_resumable = |hash: &SequenceHash| {
            self.naive.blocks(0).contains(hash) && !self.naive.barred.contains(&(0, *hash))
        };
        (1_u32..)
            .zip(&chain)
            .filter(|(_, hash)| is_resumable(hash))
            .map(|(block, _)| block * SIZE)
            .collect()
    }
}

#[test]
fn a_window_decides_where_a_request_resumes() {
    let mut told = Told::new();
    // The window's event skips blocks, and comes before the event of main attention, which tells the places of the
    // names.
    told.step(&[window(0..24, &[20, 24]), main(0..24)]);
    assert_eq!(told.resumable(), BTreeSet::from([24]));
    assert!(!told.translator.hides_groups());
    // Near the start of a sequence, fewer blocks are enough.
    told.step(&[window(0..24, &[4]), main(0..24)]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 24]));
    // The block becomes not resumable in the batch that removes the window's block. All blocks of main attention stay
    // held.
    told.step(&[removed(1, &[20])]);
    let events = &told.last.parts[0].events;
    assert!(
        matches!(&events[..], [Event::Resumable(blocks)] if !blocks.resumable && blocks.hashes.len() == 1)
    );
    assert_eq!(
        (told.resumable(), told.naive.blocks(0).len()),
        (BTreeSet::from([4]), 6)
    );
    // Blocks 24 and 28 are the two that block 28 needs.
    told.step(&[window(24..28, &[28]), main(24..28)]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 28]));
    told.step(&[window(0..24, &[20]), main(0..24)]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 24, 28]));
}

#[test]
fn a_state_is_needed_where_it_ends_only() {
    let mut told = Told::new();
    let state = |ends: &[u64]| stored(1, "mamba", None, SIZE, 0..24, ends);
    told.step(&[state(&[12, 24]), main(0..24)]);
    assert_eq!(told.resumable(), BTreeSet::from([12, 24]));
    told.step(&[removed(1, &[24])]);
    assert_eq!(told.resumable(), BTreeSet::from([12]));
}

#[test]
fn small_blocks_before_a_known_name_are_in_a_row() {
    let mut told = Told::new();
    // A window of six tokens, with blocks of one token: a request needs the last five. To resume after token 8, it
    // needs one of them from the block of main attention before the last.
    let small = |ends: &[u64]| stored(1, "sliding_window_mla", Some(6), 1, 0..12, ends);
    told.step(&[small(&[4, 5, 6, 7, 8]), main(0..12)]);
    assert_eq!(told.resumable(), BTreeSet::from([8]));
    told.step(&[removed(1, &[5])]);
    assert_eq!(told.resumable(), BTreeSet::new());
    told.step(&[small(&[5, 6, 7, 8]), main(0..12)]);
    assert_eq!(
        (told.resumable(), told.translator.hides_groups()),
        (BTreeSet::from([8]), false)
    );
    // Names after the last known name cannot be placed.
    told.step(&[small(&[12, 13]), main(0..12)]);
    assert!(told.translator.hides_groups());
    assert_eq!(
        (
            told.last.reasons.of(Reason::UnplacedName),
            told.translator.doubt()
        ),
        (1, None)
    );
}

/// The store of some blocks of group 1. This group is a window of which a request needs two blocks. Its blocks have
/// two tokens, half as many as the blocks of main attention.
fn halves(parent: Option<u64>, tokens: &[u32], names: &[u64]) -> Store {
    let mut store = Store::new(names, parent, tokens, SIZE / 2);
    store.group = Some((1, Some("sliding_window")));
    store.window = Some(5);
    store
}

/// A stored block of main attention at the start of a sequence.
fn block(name: u64, tokens: [u32; SIZE as usize]) -> Store {
    let mut store = Store::new(&[name], None, &tokens, SIZE);
    store.group = Some((0, Some("full_attention")));
    store
}

/// The number of resumable blocks on the device, the number of held blocks there, and whether it is known how much a
/// request can reuse.
fn counts(told: &Told) -> (usize, usize, bool) {
    let held = told.naive.blocks(0).len();
    let is_known = !told.translator.hides_groups();
    (held - told.naive.barred.len(), held, is_known)
}

#[test]
fn blocks_that_begin_alike_have_the_same_small_blocks() {
    let mut told = Told::new();
    let small = |tokens: &[u32], names: &[u64]| Change::Store(halves(None, tokens, names));
    let main = |name, tokens| Change::Store(block(name, tokens));
    // The event of main attention comes first.
    told.step(&[main(4, [0, 1, 2, 3]), small(&[0, 1, 2, 3], &[2, 4])]);
    assert_eq!(counts(&told), (1, 1, true));
    // Another block that begins with the same tokens shares the first half.
    told.step(&[small(&[0, 1, 8, 9], &[104]), main(104, [0, 1, 8, 9])]);
    assert_eq!(counts(&told), (2, 2, true));
    told.step(&[removed(1, &[2])]);
    assert_eq!(counts(&told), (0, 2, true));
    told.step(&[removed(0, &[4]), small(&[0, 1], &[2])]);
    assert_eq!(counts(&told), (1, 1, true));
    // A block that only ends with the same tokens shares no half, and neither does a block with a salt.
    told.step(&[small(&[7, 1, 2, 3], &[204]), main(204, [7, 1, 2, 3])]);
    let (mut salted, mut salted_half) = (block(304, [0, 1, 2, 3]), halves(None, &[0, 1, 2, 3], &[304]));
    (salted.cache_salt, salted_half.cache_salt) = (Some("tenant".to_owned()), Some("tenant".to_owned()));
    told.step(&[Change::Store(salted), Change::Store(salted_half)]);
    assert_eq!(counts(&told), (1, 3, true));
    told.step(&[removed(0, &[104, 204, 304]), removed(1, &[2, 4, 104, 204, 304])]);
    assert_eq!((told.translator.blocks(), told.translator.names()), (0, 0));
}

#[test]
fn small_blocks_may_come_before_the_block_that_they_lie_in() {
    let mut told = Told::new();
    told.step(&[Change::Store(halves(None, &[0, 1], &[2]))]);
    assert_eq!((told.translator.blocks(), told.translator.names()), (0, 1));
    // The next small blocks continue within the block, and beyond its end.
    told.step(&[Change::Store(halves(Some(2), &[2, 3, 4, 5], &[4, 6])), main(0..4)]);
    assert_eq!(
        (told.resumable(), counts(&told)),
        (BTreeSet::from([4]), (1, 1, true))
    );
    told.step(&[Change::Store(halves(Some(6), &[6, 7], &[8])), main(4..8)]);
    assert_eq!(
        (told.resumable(), counts(&told)),
        (BTreeSet::from([4, 8]), (2, 2, true))
    );
}

#[test]
fn small_blocks_of_an_engine_that_looks_ahead_differ_by_the_token_after_them() {
    let mut told = Told::new();
    let small = |tokens: &[u32], names: &[u64], next| {
        let ahead = Some(next);
        Change::Store(Store {
            ahead,
            ..halves(None, tokens, names)
        })
    };
    let main = |name, tokens, next| {
        let ahead = Some(next);
        Change::Store(Store {
            ahead,
            ..block(name, tokens)
        })
    };
    told.step(&[main(4, [0, 1, 2, 3], 4), small(&[0, 1, 2, 3], &[2, 4], 4)]);
    assert_eq!(counts(&told), (1, 1, true));
    // The first half of this block is the same, and so is the token after it.
    told.step(&[main(104, [0, 1, 2, 9], 4), small(&[0, 1, 2, 9], &[104], 4)]);
    assert_eq!(counts(&told), (2, 2, true));
    // Here, another token comes after the first half, so that its name is another one.
    told.step(&[main(204, [0, 1, 8, 9], 4), small(&[0, 1, 8, 9], &[204], 4)]);
    assert_eq!(counts(&told), (2, 3, true));
    told.step(&[small(&[0, 1], &[202], 8)]);
    assert_eq!(counts(&told), (3, 3, true));
    told.step(&[removed(1, &[2])]);
    assert_eq!(counts(&told), (1, 3, true));
    // A window whose names cover no token after the block contradicts the other names.
    told.step(&[Change::Store(halves(None, &[0, 1], &[2]))]);
    assert_eq!(told.translator.doubt(), Some(Reason::Lookahead));
}

#[test]
fn small_blocks_of_a_block_with_an_image_are_not_known_while_it_is_there() {
    let mut told = Told::new();
    let mut image = block(4, [0, 1, 2, 3]);
    image.images = vec![(0, "picture".to_owned())];
    told.step(&[
        Change::Store(image.clone()),
        Change::Store(halves(None, &[0, 1, 2, 3], &[4])),
    ]);
    assert_eq!(counts(&told), (0, 1, false));
    told.step(&[removed(0, &[4]), removed(1, &[4])]);
    assert_eq!(counts(&told), (0, 0, true));
    // The small blocks of a block with an image cannot be placed.
    let mut half = halves(None, &[0, 1, 2, 3], &[2, 4]);
    half.images = vec![(0, "picture".to_owned())];
    told.step(&[Change::Store(image), Change::Store(half)]);
    assert_eq!(told.last.reasons.of(Reason::UnplacedName), 1);
    told.step(&[removed(0, &[4]), removed(1, &[4])]);
    assert_eq!(counts(&told), (0, 0, false));
    told.step(&[Change::Clear]);
    assert_eq!(counts(&told), (0, 0, true));
}

#[test]
fn small_blocks_of_a_group_that_is_learned_late_are_known_in_blocks_that_come_then() {
    let mut told = Told::new();
    told.step(&[main(0..8)]);
    told.step(&[
        main(8..12),
        Change::Store(halves(Some(8), &[8, 9, 10, 11], &[10, 12])),
    ]);
    assert_eq!(
        (told.resumable(), counts(&told)),
        (BTreeSet::from([12]), (1, 3, false))
    );
    // A second copy of block 4 tells its small blocks. Block 8, whose small blocks are unknown, is removed.
    told.step(&[main(0..4), removed(0, &[8])]);
    assert_eq!(
        (told.resumable(), counts(&told)),
        (BTreeSet::from([12]), (1, 2, true))
    );
    told.step(&[Change::Store(halves(None, &[0, 1, 2, 3], &[2, 4]))]);
    assert_eq!(
        (told.resumable(), counts(&told)),
        (BTreeSet::from([4, 12]), (2, 2, true))
    );
}

#[test]
fn a_block_beyond_the_device_need_not_list_its_small_blocks() {
    let mut told = Told::new();
    let small = |ends: &[u64]| Change::Store(halves(None, &[0, 1, 2, 3], ends));
    told.step(&[main(0..4), small(&[2, 4])]);
    let mut offloaded = Store::new(&[104], None, &[9, 9, 9, 9], SIZE);
    offloaded.medium = Some("CPU");
    told.step(&[Change::Store(offloaded)]);
    assert_eq!(
        (told.translator.blocks(), told.translator.hides_groups()),
        (2, false)
    );
    // On the device, the small blocks of each block must be known.
    let mut image = block(104, [9, 9, 9, 9]);
    image.images = vec![(0, "picture".to_owned())];
    told.step(&[main(4..8), Change::Store(block(104, [9, 9, 9, 9]))]);
    assert!(counts(&told).2);
    image.names = vec![204];
    told.step(&[Change::Store(image)]);
    assert!(!counts(&told).2);
}

#[test]
fn a_full_table_lists_no_more_small_blocks() {
    let mut told = Told::of(Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        blocks_max: 8,
        ..TranslatorSettings::default()
    }));
    let small = stored(1, "sliding_window", Some(99), 1, 0..8, &[8]);
    told.step(&[main(0..8), small]);
    // Each block needs three cells. Eight are allowed, so only two blocks fit.
    assert_eq!(counts(&told), (0, 2, true));
    told.step(&[main(8..12)]);
    assert_eq!(counts(&told), (0, 3, false));
    told.step(&[removed(0, &[12])]);
    assert_eq!(counts(&told), (0, 2, true));
}

#[test]
fn hits_end_where_blocks_of_all_groups_do() {
    let mut told = Told::new();
    let large = stored(1, "sliding_window", Some(5), 3 * SIZE, 0..36, &[24, 36]);
    told.step(&[large, main(0..44)]);
    assert_eq!(told.resumable(), BTreeSet::from([24, 36]));
}

#[test]
fn a_group_that_is_learned_late_takes_back_what_was_promised() {
    let mut told = Told::new();
    told.step(&[main(0..24)]);
    assert_eq!(told.resumable().len(), 6);
    // The group has kept no block, but a request needs it from now on.
    told.step(&[window(24..28, &[]), main(24..28)]);
    assert_eq!(told.resumable(), BTreeSet::new());
    told.step(&[Change::Clear, main(0..8)]);
    assert_eq!(told.resumable(), BTreeSet::new());
    told.step(&[window(0..8, &[4, 8])]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 8]));
    assert!(!told.translator.hides_groups());
}

#[test]
fn blocks_that_main_attention_has_lost_in_the_same_step_are_placed() {
    let mut told = Told::new();
    told.step(&[window(0..8, &[4, 8]), main(0..8), removed(0, &[8])]);
    assert_eq!(
        (told.resumable(), told.translator.hides_groups()),
        (BTreeSet::from([4]), false)
    );
    told.step(&[main(4..8)]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 8]));
    told.step(&[removed(0, &[8, 4]), removed(1, &[8, 4])]);
    assert_eq!((told.translator.blocks(), told.translator.names()), (0, 0));
}

#[test]
fn removals_from_a_group_without_blocks_do_not_wait_for_its_first() {
    let mut told = Told::of(Translator::new(TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        groups: GroupFacts {
            kinds: vec![GroupKind::Main, GroupKind::State],
            ..GroupFacts::default()
        },
        ..TranslatorSettings::default()
    }));
    told.step(&[main(0..4)]);
    told.step(&[removed(1, &[77])]).step(&[removed(1, &[78])]);
    told.step(&[stored(1, "mamba", None, SIZE, 0..4, &[4])]);
    assert_eq!(told.last.reasons.of(Reason::NotHeld), 0);
    assert_eq!(told.resumable(), BTreeSet::from([4]));
}

#[test]
fn what_is_not_told_of_groups_leaves_hits_unknown() {
    let hides = |changes: &[Change]| {
        let mut told = Told::new();
        told.step(changes);
        assert_eq!(told.translator.doubt(), None);
        told.translator.hides_groups()
    };
    assert!(!hides(&[main(0..8)]));
    assert!(!hides(&[window(0..8, &[4, 8]), main(0..8)]));
    let of_kind = |kind, window, block| [stored(1, kind, window, block, 0..8, &[8]), main(0..8)];
    assert!(hides(&of_kind("chunked_local_attention", None, SIZE)));
    assert!(
        hides(&of_kind("sliding_window", None, SIZE)),
        "its width is not told"
    );
    assert!(
        hides(&of_kind("sliding_window", Some(9), 3)),
        "its blocks end elsewhere"
    );
    // Cache hits may end within blocks. Then parts of blocks are stored, and no event tells which blocks follow them.
    assert!(hides(&[
        window(0..8, &[4, 8]),
        main(0..8),
        stored(1, "sliding_window", Some(9), 2, 8..10, &[10])
    ]));
    // The model has no main attention.
    assert!(hides(&[window(0..8, &[4, 8])]));
}

#[test]
fn a_model_of_windows_only_is_known_as_far_as_it_is_told() {
    let mut told = Told::new();
    told.step(&[window(0..16, &[4, 8, 12, 16])]);
    assert_eq!(
        (told.resumable().len(), told.translator.hides_groups()),
        (4, true)
    );
    told.step(&[removed(1, &[16])]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 8, 12]));
    // The event of main attention, which was missing so far, comes now.
    told.step(&[window(0..8, &[]), main(0..8)]);
    assert_eq!(
        (told.resumable(), told.translator.hides_groups()),
        (BTreeSet::from([4, 8]), false)
    );
}

#[test]
fn kinds_of_groups_can_be_stated() {
    let kindless = |group: u32, ends: &[u64]| {
        let mut store = Store::new(ends, None, &tokens(8), SIZE);
        store.group = Some((group, None));
        Change::Store(store)
    };
    let settings = |groups| TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        groups,
        ..TranslatorSettings::default()
    };
    let kinds = vec![GroupKind::Window(9), GroupKind::Main];
    let stated = GroupFacts {
        kinds,
        ..GroupFacts::default()
    };
    let mut told = Told::of(Translator::new(settings(stated)));
    told.step(&[kindless(0, &[8]), kindless(1, &[4, 8])]);
    assert_eq!(
        (told.resumable(), told.translator.hides_groups()),
        (BTreeSet::new(), false)
    );
    told.step(&[kindless(0, &[4])]);
    assert_eq!(told.resumable(), BTreeSet::from([4, 8]));
    for facts in [
        GroupFacts {
            is_hybrid: true,
            ..GroupFacts::default()
        },
        GroupFacts {
            has_eagle_drop: true,
            ..GroupFacts::default()
        },
    ] {
        let mut told = Told::of(Translator::new(settings(facts)));
        assert!(told.step(&[main(0..8)]).translator.hides_groups());
    }
}

#[test]
fn beyond_the_device_only_divergent_hits_are_resumable() {
    for (has_divergent_hits, is_sizeless) in [(false, false), (false, true), (true, false), (true, true)] {
        let groups = GroupFacts {
            has_divergent_hits,
            ..GroupFacts::default()
        };
        let mut told = Told::of(Translator::new(TranslatorSettings {
            block_size: BlockSize::new(SIZE).unwrap(),
            groups,
            ..TranslatorSettings::default()
        }));
        let mut offloaded = Store::new(&[4, 8], None, &tokens(8), SIZE);
        offloaded.medium = Some("CPU");
        told.step(&[window(0..8, &[4, 8]), main(0..8), Change::Store(offloaded)]);
        assert_eq!(told.naive.blocks(1).len(), 2);
        let barred = told.naive.barred.iter().filter(|(tier, _)| *tier == 1).count();
        assert_eq!(barred, if has_divergent_hits { 0 } else { 2 });
        assert_eq!(told.translator.tier_doubts().next(), None);
        // A connector that keeps the window's blocks, too, lets requests reuse them. It may tell no size.
        told.step(&[changed(window(0..8, &[4, 8]), |store| {
            store.medium = Some("CPU");
            if is_sizeless {
                (store.block_size, store.tokens) = (0, Vec::new());
            }
        })]);
        let doubted = (!has_divergent_hits).then_some((Tier::HOST, Reason::OtherGroup));
        assert_eq!(told.translator.tier_doubts().next(), doubted);
        assert_eq!(told.translator.doubt(), None);
        assert!(!told.translator.hides_groups());
    }
}
