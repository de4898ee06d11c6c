//! Cases in which indexes give different answers: sequences with the same blocks after different prefixes, and holders
//! with holes. No times are measured.

use crate::contender::{
    Binary, ChainIndex, CompressedTree, Contender, Form, Kvatlas, Positional, RadixTree, Reader, Run,
    SmgTree, Strided, Writer, row,
};
use crate::measure::Timing;
use crate::oracle::Oracle;
use crate::report::Ledger;
use crate::workload::{Prompt, Segment, mix};

use super::progress;

const SEQUENCES: u64 = 512;
/// Number of blocks that differ between the sequences. The other blocks are the same in all.
const OWN_BLOCKS: u32 = 8;
const DEPTH: u32 = 64;
const WORKERS: u32 = 32;
const HOLDERS: u64 = 4;

/// Change of a holder's blocks after it has stored a sequence.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// No change.
    Whole,
    /// One block in the middle is removed, which leaves a hole.
    Hole(u32),
    /// One block in the middle is removed and stored again.
    Healed(u32),
    /// The first block is removed, so that the holder has no leading block.
    Headless,
}

fn fate(sequence: u64, holder: u32) -> Fate {
    let mixed = mix(sequence << 8 | u64::from(holder));
    let middle = 1 + u32::try_from((mixed >> 8) % u64::from(DEPTH - 2)).unwrap_or(0);
    match mixed % 4 {
        0 => Fate::Whole,
        1 => Fate::Hole(middle),
        2 => Fate::Healed(middle),
        _ => Fate::Headless,
    }
}

fn prompt(sequence: u64) -> Prompt {
    let own = Segment {
        source: (1 << 36) + sequence,
        blocks: 0..OWN_BLOCKS,
    };
    let common = Segment {
        source: 1 << 37,
        blocks: OWN_BLOCKS..DEPTH,
    };
    Prompt::new(vec![own, common])
}

fn holders(sequence: u64) -> impl Iterator<Item = u32> {
    let first = mix(sequence);
    (0..HOLDERS).map(move |number| u32::try_from((first + number * 5) % u64::from(WORKERS)).unwrap_or(0))
}

/// Counts the right and wrong answers of every contender.
pub fn run(ledger: &mut Ledger) {
    progress("holes");
    let prompts: Vec<Prompt> = (0..SEQUENCES).map(prompt).collect();
    let mut oracle = Oracle::default();
    for (sequence, prompt) in (0..).zip(&prompts) {
        for holder in holders(sequence) {
            oracle.store(holder, &prompt.sequence);
            match fate(sequence, holder) {
                Fate::Whole | Fate::Healed(_) => {}
                Fate::Hole(at) => oracle.remove(holder, &prompt.sequence[at as usize..=at as usize]),
                Fate::Headless => oracle.remove(holder, &prompt.sequence[..1]),
            }
        }
    }
    let contenders: [fn(&[Prompt], &Oracle, &mut Ledger); 7] = [
        check::<Kvatlas>,
        check::<ChainIndex>,
        check::<SmgTree>,
        check::<CompressedTree>,
        check::<Positional<Strided>>,
        check::<Positional<Binary>>,
        check::<RadixTree>,
    ];
    for contender in contenders {
        contender(&prompts, &oracle, ledger);
    }
}

fn check<C: Contender>(prompts: &[Prompt], oracle: &Oracle, ledger: &mut Ledger) {
    let (reader, mut writer) = C::build(WORKERS);
    let mut events = Vec::new();
    for (sequence, prompt) in (0..).zip(prompts) {
        for holder in holders(sequence) {
            events.push(C::Writer::stored(holder, run_of(prompt, 0, DEPTH)));
            match fate(sequence, holder) {
                Fate::Whole => {}
                Fate::Hole(at) => events.push(remove::<C>(prompt, holder, at)),
                Fate::Healed(at) => {
                    events.push(remove::<C>(prompt, holder, at));
                    events.push(C::Writer::stored(holder, run_of(prompt, at, at + 1)));
                }
                Fate::Headless => events.push(remove::<C>(prompt, holder, 0)),
            }
        }
    }
    writer.apply(events, Timing::Whole);
    for prompt in prompts {
        for &(shape, _) in <C::Reader as Reader>::SHAPES {
            let mut query = C::Reader::query(Form::Native, prompt);
            let is_right = reader.answer(&mut query, shape) == oracle.answer(&prompt.sequence);
            ledger.judge("holes", &row::<C>(shape), is_right);
        }
    }
}

fn run_of(prompt: &Prompt, from: u32, to: u32) -> Run<'_> {
    let range = from as usize..to as usize;
    Run {
        parent: from.checked_sub(1).map(|before| prompt.sequence[before as usize]),
        position: from,
        blocks: &prompt.blocks[range.clone()],
        sequence: &prompt.sequence[range],
    }
}

fn remove<C: Contender>(prompt: &Prompt, holder: u32, at: u32) -> <C::Writer as Writer>::Event {
    C::Writer::removed(holder, &prompt.sequence[at as usize..=at as usize])
}
