//! Names that the translator learned before batches were lost. The tests check which blocks count as held again, and after
//! which event.

use std::collections::BTreeSet;

use kvatlas_core::hash::SequenceHash;
use kvatlas_engines::{Format, Reason, Translation, Translator, TranslatorSettings};

use crate::common::{Change, Engine, Naive, Store, contract_chain, decode, feed, restarted, settings};

const SIZE: u32 = 2;

fn of_vllm() -> TranslatorSettings {
    TranslatorSettings {
        proves_ancestors: true,
        ..settings(SIZE)
    }
}

fn tokens(blocks: std::ops::Range<u32>) -> Vec<u32> {
    (blocks.start * SIZE..blocks.end * SIZE).collect()
}

/// A store of blocks of the sequence with the tokens 0, 1, 2, and so on. The first block has the name 1, the next 2, and so on.
fn stored(blocks: std::ops::Range<u32>) -> Change {
    let names: Vec<u64> = (blocks.start + 1..=blocks.end).map(u64::from).collect();
    let parent = (blocks.start > 0).then_some(u64::from(blocks.start));
    Change::Store(Store::new(&names, parent, &tokens(blocks), SIZE))
}

/// The store of one block that belongs to another request. The block follows block `parent` of the sequence that
/// [`stored`] has.
fn branch(name: u64, parent: u64) -> Change {
    Change::Store(Store::new(&[name], Some(parent), &[900, 901], SIZE))
}

fn removed(name: u64) -> Change {
    Change::Remove {
        names: vec![name],
        medium: Some("GPU"),
        group: None,
    }
}

fn prefix(blocks: u32) -> BTreeSet<SequenceHash> {
    contract_chain(&tokens(0..blocks), SIZE, None, None)
        .into_iter()
        .collect()
}

/// A translator that had six blocks and has forgotten them. It still knows their names.
fn forgetful(settings: TranslatorSettings) -> Translator {
    let mut translator = Translator::new(settings);
    feed(&mut translator, &[stored(0..6)]);
    translator.reset_but_names();
    translator
}

#[test]
fn a_block_behind_a_known_name_brings_its_prefix_back() {
    let mut translator = forgetful(of_vllm());
    translator.note_doubt(Reason::LostBatches);
    assert_eq!((translator.blocks(), translator.names()), (0, 0));
    // The same holds for a translator that was saved and restored.
    let mut translator = restarted(&translator, of_vllm());
    let mut naive = Naive::default();
    naive.apply(&feed(&mut translator, &[branch(70, 4)]));
    let mut expected = prefix(4);
    let mut with_branch = tokens(0..4);
    with_branch.extend([900, 901]);
    expected.extend(contract_chain(&with_branch, SIZE, None, None));
    assert_eq!(naive.blocks(0), expected);
    assert_eq!(
        translator.doubt(),
        Some(Reason::LostBatches),
        "of the rest nothing is known"
    );
    // The recalled blocks are now like any others: each is emitted once, and is removed when the engine removes it.
    naive.apply(&feed(&mut translator, &[stored(4..6), removed(6), removed(70)]));
    assert_eq!(naive.blocks(0), prefix(5));
    let mut full = Translation::default();
    translator.full_state(&mut full);
    let mut again = Naive::default();
    again.apply(&full);
    assert_eq!(again, naive);
    naive.apply(&feed(&mut translator, &[Change::Clear, branch(71, 4)]));
    assert!(naive.blocks(0).is_empty(), "a clear ends it all");
}

#[test]
fn a_gap_in_the_prefix_is_filled_and_what_is_held_stays() {
    let mut translator = forgetful(of_vllm());
    translator.note_doubt(Reason::LostBatches);
    let mut naive = Naive::default();
    naive.apply(&feed(&mut translator, &[stored(0..2), removed(2), stored(5..6)]));
    assert_eq!(naive.blocks(0), prefix(6));
}

#[test]
fn nothing_is_recalled_without_proof() {
    let unknown = |mut translator: Translator, change: Change| {
        let output = feed(&mut translator, &[change]);
        assert!(output.parts.is_empty(), "{:?}", output.parts);
        assert_eq!(output.reasons.of(Reason::UnknownParent), 1);
    };
    let mut in_doubt = forgetful(of_vllm());
    in_doubt.note_doubt(Reason::LostBatches);
    unknown(in_doubt, branch(70, 40));
    // No events were lost, so an unknown parent contradicts the earlier events.
    unknown(forgetful(of_vllm()), branch(70, 4));
    let mut of_another = forgetful(settings(SIZE));
    of_another.note_doubt(Reason::LostBatches);
    unknown(of_another, branch(70, 4));
    let mut other_process = Translator::new(of_vllm());
    feed(&mut other_process, &[stored(0..6)]);
    other_process.reset();
    other_process.note_doubt(Reason::LostBatches);
    unknown(other_process, branch(70, 4));
}

#[test]
fn only_formats_of_caches_that_prove_ancestors_recall() {
    let proves = |format: &Format| TranslatorSettings::for_format(*format).proves_ancestors;
    let proving: Vec<Format> = Format::ALL.into_iter().filter(proves).collect();
    assert_eq!(proving, [Format::Vllm, Format::Sglang]);
}

#[test]
fn what_is_recalled_is_bounded() {
    let small = TranslatorSettings {
        blocks_max: 6,
        ..of_vllm()
    };
    let mut translator = forgetful(small);
    translator.note_doubt(Reason::LostBatches);
    let mut naive = Naive::default();
    naive.apply(&feed(&mut translator, &[branch(70, 4)]));
    assert_eq!(naive.blocks(0).len(), 5);
    let output = feed(&mut translator, &[branch(71, 6)]);
    assert_eq!(output.reasons.of(Reason::UnknownParent), 1);
    naive.apply(&output);
    assert!(translator.names() <= 6);
}

/// Translates `change`, after asking `other` for the names that `translator` lacks.
fn taught(translator: &mut Translator, other: &Translator, change: Change) -> Translation {
    let batch = decode(Format::Vllm, &Engine::PLAIN.payload(&[change]));
    for name in translator.strange_parents(&batch) {
        other
            .named_prefix(name)
            .into_iter()
            .for_each(|named| translator.learn_names(named));
    }
    let mut output = Translation::default();
    translator.translate(&batch, &mut output);
    output
}

#[test]
fn a_name_that_another_engine_has_brings_the_prefix_back() {
    let mut other = Translator::new(of_vllm());
    feed(&mut other, &[stored(0..6), branch(60, 2)]);
    let mut translator = Translator::new(of_vllm());
    translator.note_doubt(Reason::LostBatches);
    let mut naive = Naive::default();
    naive.apply(&taught(&mut translator, &other, branch(70, 4)));
    let mut expected = prefix(4);
    let mut with_branch = tokens(0..4);
    with_branch.extend([900, 901]);
    expected.extend(contract_chain(&with_branch, SIZE, None, None));
    assert_eq!(
        naive.blocks(0),
        expected,
        "and nothing else that the other engine has"
    );
    assert_eq!(translator.doubt(), Some(Reason::LostBatches));
    // Names that were learned from another engine can be passed on. They are forgotten when their blocks are removed.
    let mut third = Translator::new(of_vllm());
    third.note_doubt(Reason::LostBatches);
    let mut naive = Naive::default();
    naive.apply(&taught(&mut third, &translator, branch(71, 3)));
    naive.apply(&feed(&mut third, &[removed(71), removed(3)]));
    assert_eq!(naive.blocks(0), prefix(2));
}

#[test]
fn names_are_asked_for_in_doubt_only_and_where_they_prove_something() {
    let batch = decode(Format::Vllm, &Engine::PLAIN.payload(&[branch(70, 4)]));
    let mut translator = Translator::new(of_vllm());
    assert_eq!(translator.strange_parents(&batch), [] as [u64; 0]);
    translator.note_doubt(Reason::LostBatches);
    assert_eq!(translator.strange_parents(&batch), [4]);
    feed(&mut translator, &[stored(0..4)]);
    assert_eq!(
        translator.strange_parents(&batch),
        [] as [u64; 0],
        "its own events tell"
    );
    let mut of_another = Translator::new(settings(SIZE));
    of_another.note_doubt(Reason::LostBatches);
    assert_eq!(of_another.strange_parents(&batch), [] as [u64; 0]);
}

#[test]
fn names_that_contradict_the_engines_own_are_not_believed() {
    // In the other engine, the name 1 stands for another block.
    let mut other = Translator::new(of_vllm());
    feed(
        &mut other,
        &[Change::Store(Store::new(&[1, 2], None, &[7, 8, 9, 10], SIZE))],
    );
    let mut translator = Translator::new(of_vllm());
    translator.note_doubt(Reason::LostBatches);
    feed(&mut translator, &[stored(0..1)]);
    let output = taught(&mut translator, &other, branch(70, 2));
    assert!(output.parts.is_empty(), "{:?}", output.parts);
    assert_eq!(output.reasons.of(Reason::UnknownParent), 1);
}

#[test]
fn what_is_learnt_is_bounded() {
    let mut other = Translator::new(of_vllm());
    feed(&mut other, &[stored(0..6)]);
    let mut translator = Translator::new(TranslatorSettings {
        blocks_max: 5,
        ..of_vllm()
    });
    translator.note_doubt(Reason::LostBatches);
    let output = taught(&mut translator, &other, branch(70, 6));
    assert_eq!(output.reasons.of(Reason::UnknownParent), 1);
    let mut naive = Naive::default();
    naive.apply(&taught(&mut translator, &other, branch(71, 4)));
    assert_eq!(naive.blocks(0).len(), 5);
}
