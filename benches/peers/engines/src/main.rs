//! Compares how kvatlas and `dynamo_kv_router::zmq_wire` 1.6.1 read the events of vLLM and SGLang, for every recorded
//! payload and a million damaged payloads.
//!
//! ```sh
//! cargo run --release --package kvatlas-peers-engines -- [ROUNDS] [SEED]
//! ```
//!
//! The events of a payload are compared one by one, each in a batch of its own. Each side gives the meaning of an
//! event: the stored blocks with names and block hashes, the removed blocks, a clear, or nothing. Every difference must
//! be of an explained class. Any other difference is printed, and the run fails.

mod meaning;
mod ours;
mod report;
mod theirs;

// The tests of kvatlas-engines give the recorded payloads, and damage them.
#[allow(
    dead_code,
    clippy::all,
    reason = "the tests' helpers, of which a part is used here"
)]
#[path = "../../../../src/engines/tests/common/mod.rs"]
mod common;

use std::path::Path;
use std::process::ExitCode;

use kvatlas_core::wire::{Reader, Value};
use kvatlas_engines::Format;

use common::mutation::{mutate, payloads};
use report::Report;

/// Number of tokens in a block of the payloads that are made here.
const MADE_BLOCK_SIZE: u32 = 2;

/// A payload of an engine, with the number of tokens in the engine's blocks.
struct Sample {
    format: Format,
    block_size: u32,
    bytes: Vec<u8>,
}

fn main() -> ExitCode {
    let numbers: Vec<u64> = std::env::args()
        .skip(1)
        .filter_map(|text| text.parse().ok())
        .collect();
    let rounds = numbers.first().copied().unwrap_or(1_000_000);
    let seed = numbers.get(1).copied().unwrap_or(1);
    let mut samples = recorded();
    println!(
        "{} recorded payloads; {rounds} damaged ones, seed {seed}",
        samples.len()
    );
    samples.extend(made());
    let mut report = Report::default();
    for sample in &samples {
        compare(sample, &sample.bytes, &mut report);
    }
    report.print("undamaged payloads");
    let good: Vec<_> = samples
        .iter()
        .map(|sample| (sample.format, sample.bytes.clone()))
        .collect();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut damaged = Report::default();
    for _ in 0..rounds {
        let sample = &samples[random.usize(..samples.len())];
        let mut bytes = sample.bytes.clone();
        mutate(&mut bytes, &good, &mut random);
        compare(sample, &bytes, &mut damaged);
    }
    damaged.print("damaged payloads");
    if report.unexplained() + damaged.unexplained() > 0 {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Returns the recorded payloads of vLLM and SGLang, the engines that kvatlas and Dynamo both support. Empty if the
/// folder of recorded payloads is missing.
fn recorded() -> Vec<Sample> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/fixtures/engines");
    let Ok(entries) = std::fs::read_dir(&folder) else {
        eprintln!(
            "SKIPPED: {} is missing, so no recorded payload is compared",
            folder.display()
        );
        return Vec::new();
    };
    let mut samples = Vec::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let (format, block_size) = match name.as_str() {
            name if name.starts_with("vllm") => (Format::Vllm, 16),
            name if name.starts_with("sglang") => (Format::Sglang, 64),
            _ => continue,
        };
        if let Ok(bytes) = std::fs::read(entry.path()) {
            samples.push(Sample {
                format,
                block_size,
                bytes,
            });
        }
    }
    samples
}

fn made() -> impl Iterator<Item = Sample> {
    payloads()
        .into_iter()
        .filter(|(format, _)| matches!(format, Format::Vllm | Format::Sglang))
        .map(|(format, bytes)| Sample {
            format,
            block_size: MADE_BLOCK_SIZE,
            bytes,
        })
}

/// Compares a payload as a whole, and then event by event.
fn compare(sample: &Sample, bytes: &[u8], report: &mut Report) {
    report.count_batch(ours::reads(sample.format, bytes), theirs::reads(bytes));
    for event in events_of(bytes).unwrap_or_default() {
        // This batch has only this event.
        let single = [&[0x93, 1, 0x91][..], event, &[0]].concat();
        let ours = ours::meaning(sample.format, sample.block_size, &single);
        let theirs = theirs::meaning(sample.block_size, &single);
        report.compare(&ours, &theirs, event);
    }
}

/// Returns the bytes of each event in a batch; `None` if the batch itself cannot be read down to its list of events.
fn events_of(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut reader = Reader::new(bytes, usize::MAX).ok()?;
    let Value::Array(2..) = reader.value().ok()? else {
        return None;
    };
    reader.skip().ok()?;
    let Value::Array(count) = reader.value().ok()? else {
        return None;
    };
    let mut events = Vec::new();
    for _ in 0..count {
        let start = reader.offset();
        reader.skip().ok()?;
        events.push(bytes.get(start..reader.offset())?);
    }
    Some(events)
}

/// Returns the traits of an event that can explain a difference between kvatlas and Dynamo.
fn traits_of(event: &[u8]) -> meaning::Traits {
    ours::traits(event)
}
