//! Tests of forests. Everything that is written is read back, apart from blocks after holes. Other input is refused,
//! without a panic.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::hash::SequenceHash;
use crate::index::{HolderPart, WalkedRun};

use super::*;

fn parts(parts: &[(u32, u16)]) -> Vec<HolderPart> {
    let part = |(holder, blocks): &(u32, u16)| HolderPart {
        holder: *holder,
        blocks: *blocks,
    };
    parts.iter().map(part).collect()
}

fn hashes(text: &str) -> Vec<SequenceHash> {
    text.bytes().map(|byte| SequenceHash(u64::from(byte))).collect()
}

/// Returns a run that is in no index and that has no holder.
fn walked(depth: usize, position: usize, hashes: Vec<SequenceHash>) -> WalkedRun {
    WalkedRun {
        depth,
        position,
        hashes,
        ..WalkedRun::default()
    }
}

/// One holder's blocks of one run: the holder's number, the position and the parent of the first block, and the
/// blocks' hashes.
type Had = (u32, usize, Option<SequenceHash>, Vec<SequenceHash>);

fn read(frames: &[ForestFrame], holders: u32) -> Result<Vec<ForestChunk>, ForestError> {
    let mut reader = ForestReader::default();
    let chunks: Result<Vec<_>, _> = frames
        .iter()
        .map(|frame| reader.read(&frame.payload, holders))
        .collect();
    assert!(chunks.is_err() || !reader.is_open());
    chunks
}

fn had(chunks: &[ForestChunk]) -> Vec<Had> {
    let mut had = Vec::new();
    for chunk in chunks {
        for (holder, runs) in chunk.holders() {
            had.extend(runs.map(|run| (holder, run.position as usize, run.parent, run.hashes.to_vec())));
        }
    }
    // Sorted by holder. The runs of each holder keep their order.
    had.sort_by_key(|(holder, ..)| *holder);
    had
}

fn example() -> Vec<ForestFrame> {
    let mut encoder = ForestEncoder::new(vec![2, 0, 1]);
    for (depth, position, text, held) in [
        (1, 0, "abcdefg", &[(0, 7), (1, 7), (2, 3)][..]),
        (2, 7, "hi", &[(1, 2)]),
        (2, 3, "xyz", &[(2, 3)]),
    ] {
        let run = walked(depth, position, hashes(text));
        assert_eq!(encoder.push(&run, &parts(held)), Pushed::Taken);
    }
    encoder.finish()
}

#[test]
fn the_example_of_the_documentation() {
    let frames = example();
    let mut expected = vec![3, 3, 0, 0, 0, 3];
    expected.extend([0x06, 0x02, 0x02, 0x03, 0x00]);
    expected.extend([0x00, 0x01, 0x02, 0x00, 0x01, 0x01]);
    expected.extend([0x04, 0x02, 0x03, 0x02, 0x00, 0x02]);
    expected.extend(
        b"abcdefghixyz"
            .iter()
            .flat_map(|letter| [*letter, 0, 0, 0, 0, 0, 0, 0]),
    );
    assert_eq!(frames.len(), 1);
    assert_eq!((frames[0].runs, frames[0].blocks), (3, 12));
    assert_eq!(frames[0].payload, expected);
    let of = |letter: u8| Some(SequenceHash(u64::from(letter)));
    assert_eq!(
        had(&read(&frames, 3).unwrap()),
        [
            (0, 0, None, hashes("abcdefg")),
            (1, 0, None, hashes("abcdefg")),
            (1, 7, of(b'g'), hashes("hi")),
            (2, 0, None, hashes("abc")),
            (2, 3, of(b'c'), hashes("xyz")),
        ]
    );
}

#[test]
fn what_has_no_parent_or_no_holder_is_left_out() {
    let mut encoder = ForestEncoder::new(vec![0, 1]);
    let mut push = |depth, position, text, held| {
        let run = walked(depth, position, hashes(text));
        encoder.push(&run, &parts(held))
    };
    assert_eq!(push(1, 0, "ab", &[]), Pushed::Unheld);
    // Number 7 is none of the holders.
    assert_eq!(push(1, 0, "ab", &[(7, 2)]), Pushed::Unheld);
    assert_eq!(push(1, 0, "abc", &[(0, 2), (1, 1)]), Pushed::Taken);
    // Holder 1 lacks the block b, and no holder has the block c.
    assert_eq!(push(2, 2, "x", &[(1, 1)]), Pushed::Unheld);
    assert_eq!(push(2, 3, "y", &[(0, 1)]), Pushed::Unheld);
    assert_eq!(push(2, 2, "z", &[(0, 1), (1, 1)]), Pushed::Taken);
    // The first run is a sibling in the wrong order. The second run has no parent on the path. The third run is a root
    // that is not at position 0.
    assert_eq!(push(2, 3, "y", &[(0, 1)]), Pushed::Unheld);
    assert_eq!(push(4, 4, "y", &[(0, 1)]), Pushed::Unheld);
    assert_eq!(push(1, 1, "y", &[(0, 1)]), Pushed::Unheld);
    let chunks = read(&encoder.finish(), 2).unwrap();
    let b = Some(SequenceHash(u64::from(b'b')));
    assert_eq!(
        had(&chunks),
        [
            (0, 0, None, hashes("ab")),
            (0, 2, b, hashes("z")),
            (1, 0, None, hashes("a")),
        ]
    );
}

/// Returns the error of reading a forest frame with these flags and the bytes `rest`.
fn refused(flags: u8, rest: &[u8]) -> ForestError {
    let payload = [&[flags], rest].concat();
    ForestReader::default().read(&payload, 3).unwrap_err()
}

#[test]
fn frames_that_lie_are_refused() {
    let out_of_range = |error| matches!(error, ForestError::OutOfRange { .. });
    assert_eq!(ForestReader::default().read(&[], 3), Err(ForestError::Cut));
    for flags in [0, 2, 4, 7] {
        assert_eq!(refused(flags, &[0, 0]), ForestError::Flags { flags });
    }
    // The frame has more holders than the file has listed, or a holder with a number that the file has not listed.
    assert!(out_of_range(refused(3, &[4])));
    assert!(out_of_range(refused(3, &[1, 3, 0])));
    assert!(out_of_range(refused(3, &[2, 2, 0, 0])));
    // The frame has more runs than bytes. Then a number does not end.
    assert_eq!(refused(3, &[1, 0, 0xff, 0xff, 0x03]), ForestError::Cut);
    assert_eq!(
        refused(3, &[&[1, 0][..], &[0xff; 11]].concat()),
        ForestError::NumberTooLarge
    );
    // Faults of a run with one block: more changes than candidates; a change of a candidate that does not exist; a
    // listed candidate that has no block. With two holders, again a change of a candidate that does not exist.
    let run = |columns: &[u8]| refused(3, &[&[1, 0, 1, 0][..], columns].concat());
    assert!(out_of_range(run(&[4])));
    assert!(out_of_range(run(&[3, 1, 0])));
    assert!(out_of_range(run(&[3, 0, 1])));
    assert!(out_of_range(refused(3, &[2, 0, 0, 1, 0, 5, 1, 0, 0, 0])));
    // No holder has the run.
    assert_eq!(run(&[1, 1]), ForestError::Unheld);
    assert_eq!(run(&[2, 0, 0, 1]), ForestError::Unheld);
    // No holder has the second block of the run.
    assert_eq!(refused(3, &[1, 0, 1, 1, 2, 0, 0, 1]), ForestError::Unheld);
    // The pops lead beyond the roots; the last pops leave a level open; hashes are missing, or are too many.
    assert!(out_of_range(run(&[0, 2])));
    assert_eq!(
        run(&[&[0, 0][..], &[9; 8]].concat()),
        ForestError::Unfinished { open: 1 }
    );
    for bytes in [0, 7, 9, 16] {
        let short = run(&[&[0, 1][..], &vec![9; bytes]].concat());
        assert_eq!(short, ForestError::Hashes { blocks: 1, bytes });
    }
    // The run branches off before the first block of its parent.
    assert!(out_of_range(refused(3, &[1, 0, 2, 0, 0, 0, 1, 0, 0, 1])));
}

#[test]
fn a_forest_begins_once_and_ends_once() {
    let mut frames = example();
    let payload = &mut frames[0].payload;
    payload[0] = BEGINS;
    let mut reader = ForestReader::default();
    reader.read(payload, 3).unwrap();
    assert!(reader.is_open());
    assert_eq!(reader.read(payload, 3), Err(ForestError::Flags { flags: BEGINS }));
}

#[test]
fn a_path_that_no_reader_takes_is_not_written() {
    let holders: Vec<u32> = (0..60_000).collect();
    let all: Vec<HolderPart> = holders
        .iter()
        .map(|holder| HolderPart {
            holder: *holder,
            blocks: 1,
        })
        .collect();
    let mut encoder = ForestEncoder::new(holders);
    let mut frames = Vec::new();
    let mut depth = 1;
    loop {
        let run = walked(depth, depth - 1, hashes("a"));
        let pushed = encoder.push(&run, &all);
        frames.extend(encoder.take_frame());
        if pushed == Pushed::TooWide {
            break;
        }
        assert_eq!(pushed, Pushed::Taken);
        depth += 1;
    }
    assert_eq!(depth, PATH_ENTRIES_MAX / 60_001 + 1);
    frames.extend(encoder.finish());
    assert!(frames.len() > 1, "parts of holders are bounded in a frame");
    read(&frames, 60_000).unwrap();
    // With one more run of the same kind, the path would have too many entries.
    let last = frames.len() - 1;
    frames[last].payload[0] &= !ENDS;
    let mut reader = ForestReader::default();
    for frame in &mut frames {
        // After the last run, one more can follow as its child.
        let pops_at = frame.payload.len() - 8 * usize::try_from(frame.blocks).unwrap();
        let pops = frame.payload[..pops_at].to_vec();
        if frame.payload[0] & ENDS == 0 && pops.ends_with(&[0x8b, 0x01]) {
            frame.payload.splice(pops_at - 2..pops_at, [0]);
        }
        reader.read(&frame.payload, 60_000).unwrap();
    }
    let more = [&[0, 1, 0, 0, 0, 0][..], &[0; 8]].concat();
    assert_eq!(reader.read(&more, 60_000), Err(ForestError::TooWide));
}

/// A run, the number of its leading blocks that each of the three holders has, and its child runs. A child run comes
/// with the offset of the block from which it branches off.
#[derive(Debug, Clone)]
struct Tree {
    hashes: Vec<u64>,
    held: [u16; 3],
    children: Vec<(usize, Tree)>,
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = (vec(any::<u64>(), 1..5), any::<[u16; 3]>());
    let plain = leaf.prop_map(|(hashes, held)| Tree {
        held: held.map(|held| held % (u16::try_from(hashes.len()).unwrap() + 1)),
        hashes,
        children: Vec::new(),
    });
    plain.prop_recursive(5, 40, 4, |inner| {
        (
            vec(any::<u64>(), 1..5),
            any::<[u16; 3]>(),
            vec((any::<usize>(), inner), 0..4),
        )
            .prop_map(|(hashes, held, children)| {
                let len = hashes.len();
                let mut children: Vec<_> = children.into_iter().map(|(at, tree)| (at % len, tree)).collect();
                children.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
                Tree {
                    held: held.map(|held| held % (u16::try_from(len).unwrap() + 1)),
                    hashes,
                    children,
                }
            })
    })
}

const NUMBERS: [u32; 3] = [1, 4, 5];

impl Tree {
    /// Appends the runs to `into`, in depth-first order.
    fn walk(&self, depth: usize, position: usize, into: &mut Vec<(WalkedRun, Vec<HolderPart>)>) {
        let hashes = self.hashes.iter().copied().map(SequenceHash).collect();
        let held: Vec<(u32, u16)> = NUMBERS
            .into_iter()
            .zip(self.held)
            .filter(|(_, held)| *held > 0)
            .collect();
        into.push((walked(depth, position, hashes), parts(&held)));
        for (branch, child) in &self.children {
            child.walk(depth + 1, position + branch + 1, into);
        }
    }

    /// Appends to `into` the blocks of holder number `which`, run by run. A block counts only if the holder also has
    /// all blocks before it.
    fn had(&self, which: usize, position: usize, parent: Option<u64>, into: &mut Vec<Had>) {
        let held = usize::from(self.held[which]);
        if held == 0 {
            return;
        }
        let own = self.hashes[..held].iter().copied().map(SequenceHash).collect();
        into.push((NUMBERS[which], position, parent.map(SequenceHash), own));
        for (branch, child) in &self.children {
            if *branch < held {
                child.had(which, position + branch + 1, Some(self.hashes[*branch]), into);
            }
        }
    }
}

fn encode(trees: &[Tree], frame_bytes: usize) -> Vec<ForestFrame> {
    let mut runs = Vec::new();
    trees.iter().for_each(|tree| tree.walk(1, 0, &mut runs));
    let mut encoder = ForestEncoder::new(NUMBERS.to_vec());
    encoder.frame_bytes = frame_bytes;
    let mut frames = Vec::new();
    let mut skipped = usize::MAX;
    for (run, parts) in runs {
        if run.depth > skipped {
            continue;
        }
        skipped = match encoder.push(&run, &parts) {
            Pushed::Taken => usize::MAX,
            _ => run.depth,
        };
        frames.extend(encoder.take_frame());
    }
    frames.extend(encoder.finish());
    frames
}

proptest! {
    #[test]
    fn a_forest_reads_back_without_holes(trees in vec(tree(), 0..4), frame_bytes in 1..200_usize) {
        let frames = encode(&trees, frame_bytes);
        let mut expected = Vec::new();
        for which in 0..NUMBERS.len() {
            trees.iter().for_each(|tree| tree.had(which, 0, None, &mut expected));
        }
        let chunks = read(&frames, 6).unwrap();
        prop_assert_eq!(had(&chunks), expected);
        for (frame, chunk) in frames.iter().zip(&chunks) {
            prop_assert_eq!((frame.runs, frame.blocks), (chunk.runs() as u64, chunk.blocks() as u64));
        }
    }

    /// Checks that changed bytes are refused, or read as a forest without holes: each run of a holder follows a block
    /// that the same holder has.
    #[test]
    fn changed_bytes_are_refused_or_make_another_forest(
        trees in vec(tree(), 1..4),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut frames = encode(&trees, usize::MAX);
        let payload = &mut frames[0].payload;
        for (at, byte) in changes {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        let mut reader = ForestReader::default();
        if let Ok(chunk) = reader.read(payload, 6) {
            for (_, runs) in chunk.holders() {
                let mut blocks = std::collections::HashSet::new();
                for run in runs {
                    let position = u64::from(run.position);
                    prop_assert_eq!(run.parent.is_none(), position == 0);
                    prop_assert!(run.parent.is_none_or(|parent| blocks.contains(&(position - 1, parent))));
                    blocks.extend((position..).zip(run.hashes.iter().copied()));
                }
            }
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(payloads in vec(vec(prop_oneof![0..8_u8, any::<u8>()], 0..60), 0..3)) {
        let mut reader = ForestReader::default();
        for payload in payloads {
            // The read must return. Its result does not matter.
            let _ = reader.read(&payload, 4);
        }
    }
}
