//! Scenario C: resident bytes for each held block, each figure from a fresh process.
//!
//! The process fills an index sequence by sequence, so that hardly anything but the index is resident. Then it removes
//! everything, and fills the index again. Before each reading, the allocator returns free memory to the system. After
//! the removal, there is also a reading before the allocator returns free memory.

use std::process::{Command, Stdio};

use crate::contender::{
    self, Binary, ChainIndex, CompressedTree, Contender, Kvatlas, Positional, RadixTree, Run, SmgTree,
    Strided, Writer,
};
use crate::measure::{Timing, resident_bytes, trim_memory};
use crate::report::{Column, Ledger};
use crate::workload::{Layout, Sharing, shuffled};

use super::{Effort, progress, rotated};

const WORKERS: u32 = 128;
const DEPTH: u32 = 1024;
const MILLION: u32 = 1 << 20;

/// Times at which the process reads its size. A reading is in bytes, without the size that the process had before it
/// made the index.
const READINGS: [&str; 5] = ["empty", "loaded", "removed", "removed, trimmed", "reloaded"];

/// Layout of the child process that fills an index. Its command line gives both numbers.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// Number of distinct blocks, in millions.
    pub millions: u32,
    /// Number of holders of each block.
    pub holders: u32,
}

/// Layouts: one million blocks with one holder each, five million blocks with one holder each, and one million blocks
/// with eight holders each.
pub const FILLS: [Fill; 3] = [
    Fill {
        millions: 1,
        holders: 1,
    },
    Fill {
        millions: 5,
        holders: 1,
    },
    Fill {
        millions: 1,
        holders: 8,
    },
];

impl Fill {
    fn layout(self) -> Layout {
        Layout {
            name: "memory",
            blocks: self.millions * MILLION * self.holders,
            depth: DEPTH,
            workers: WORKERS,
            sharing: match self.holders {
                1 => Sharing::Distinct,
                _ => Sharing::EightShareAll,
            },
        }
    }

    fn name(self) -> String {
        format!("{}M blocks, holders each: {}", self.millions, self.holders)
    }

    /// Returns the name of a figure: bytes for each held block, at the time `reading`.
    pub fn figure(self, reading: &str) -> String {
        format!("memory, {}, {reading}", self.name())
    }
}

/// Figure: bytes for each further holder of a shared block.
pub const FURTHER: &str = "memory, each further holder";

type Measure = fn(&Layout) -> Vec<u64>;

const CONTENDERS: [Measure; 7] = [
    measure::<Kvatlas>,
    measure::<ChainIndex>,
    measure::<SmgTree>,
    measure::<CompressedTree>,
    measure::<Positional<Strided>>,
    measure::<Positional<Binary>>,
    measure::<RadixTree>,
];

/// Runs every contender in processes of its own.
pub fn run(effort: Effort, ledger: &mut Ledger) {
    let names = contender::names();
    for repetition in 0..effort.repetitions {
        for number in rotated(CONTENDERS.len(), repetition) {
            let fills = if effort.is_quick { &FILLS[..1] } else { &FILLS[..] };
            let mut loaded = Vec::new();
            for fill in fills {
                progress(&format!("memory: {}, {}", names[number], fill.name()));
                let readings = in_process(number, *fill);
                let blocks = f64::from(fill.layout().blocks);
                for (reading, bytes) in READINGS.iter().zip(&readings) {
                    ledger.record(&fill.figure(reading), &names[number], *bytes as f64 / blocks);
                }
                loaded.push(readings.get(1).copied().unwrap_or(0) as f64);
            }
            if let [one_holder, _, eight_holders] = loaded[..] {
                let further = (eight_holders - one_holder) / (7.0 * f64::from(MILLION));
                ledger.record(FURTHER, &names[number], further);
            }
        }
    }
}

/// Runs this executable as a child, for one contender and one layout.
fn in_process(contender: usize, fill: Fill) -> Vec<u64> {
    let executable = std::env::current_exe().expect("the process knows its executable");
    let output = Command::new(executable)
        .arg("--fill")
        .arg(format!("{contender},{},{}", fill.millions, fill.holders))
        .stderr(Stdio::inherit())
        .output()
        .expect("the executable can be started again");
    assert!(output.status.success(), "the process that measures memory failed");
    let text = String::from_utf8_lossy(&output.stdout);
    text.split_whitespace()
        .map(|word| word.parse().expect("the process prints numbers"))
        .collect()
}

/// Fills an index in a process that [`run`] has started, and prints the readings. `words` are the numbers of `--fill`.
pub fn fill(words: &[u32]) {
    let [contender, millions, holders] = words else {
        panic!("--fill takes a contender, millions of blocks and holders");
    };
    let fill = Fill {
        millions: *millions,
        holders: *holders,
    };
    for reading in CONTENDERS[*contender as usize](&fill.layout()) {
        println!("{reading}");
    }
}

fn measure<C: Contender>(layout: &Layout) -> Vec<u64> {
    let before = resident_bytes();
    let trimmed = || {
        trim_memory();
        resident_bytes().saturating_sub(before)
    };
    let (reader, mut writer) = C::build(layout.workers);
    let empty = trimmed();
    load::<C>(layout, &mut writer);
    let loaded = trimmed();
    for &number in &shuffled(layout.sequences() as usize, 7) {
        let number = u32::try_from(number).expect("sequences are numbered by 32 bits");
        let deepest_first: Vec<u64> = layout.prompt(number).sequence.into_iter().rev().collect();
        for holder in layout.holders(number) {
            writer.apply(vec![C::Writer::removed(holder, &deepest_first)], Timing::Whole);
        }
    }
    let removed = resident_bytes().saturating_sub(before);
    writer.upkeep();
    let removed_and_trimmed = trimmed();
    load::<C>(layout, &mut writer);
    let reloaded = trimmed();
    drop(reader);
    vec![empty, loaded, removed, removed_and_trimmed, reloaded]
}

fn load<C: Contender>(layout: &Layout, writer: &mut C::Writer) {
    for number in 0..layout.sequences() {
        let prompt = layout.prompt(number);
        for holder in layout.holders(number) {
            let run = Run {
                parent: None,
                position: 0,
                blocks: &prompt.blocks,
                sequence: &prompt.sequence,
            };
            writer.apply(vec![C::Writer::stored(holder, run)], Timing::Whole);
        }
    }
}

/// Prints a table for each layout.
pub fn print(ledger: &Ledger) {
    let names = contender::names();
    for fill in FILLS {
        let columns = READINGS.map(|reading| Column::new(reading, fill.figure(reading)));
        ledger.print(
            &format!("C. {}. Resident bytes a held block", fill.name()),
            &names,
            &columns,
        );
    }
    let columns = [Column::new("bytes", FURTHER)];
    ledger.print(
        "C. Each further holder of a block that is held already",
        &names,
        &columns,
    );
}
