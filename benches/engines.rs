//! Cost of a block on the way from an engine's bytes to kvatlas's events, by format.
//!
//! ```sh
//! cargo bench --package kvatlas-engines --bench engines
//! cargo bench --package kvatlas-engines --bench engines -- gpt-oss    # rows with this in their name
//! ```
//!
//! | row | work |
//! |---|---|
//! | walk | pass over every value of the payloads, which is the least that a decoder can do |
//! | serde | decode with `rmp-serde` or `serde_json` into owned structs |
//! | decode | decode with the decoder of `kvatlas-engines` |
//! | and translate | decode, and translate to events: hashes, names, copies |
//! | and send | decode, translate, and encode in kvatlas's wire format |
//!
//! Each figure is the median of the rounds in nanoseconds for each block, with the least and the greatest. Blocks have
//! 16 tokens.
//!
//! - `long` has events that store 64 blocks.
//! - `single` has events that store one block.
//! - `removed` removes all blocks of `long` and `single`, one block in each event, as vLLM does.
//! - `gpt-oss` has the events of all three for a model with windows of 128 tokens. For the window, vLLM
//!   keeps only the last 128 tokens of each long event. The figures count blocks of full attention.
//!
//! All rounds use the same decoder and translator. The last column counts the allocations in one further round.

#![allow(
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    dead_code,
    reason = "a bench fails by panicking, and what serde fills is not read"
)]

#[path = "../src/engines/tests/common/mod.rs"]
mod common;

use std::collections::HashSet;
use std::hint::black_box;
use std::time::Instant;

use kvatlas_core::wire::{EventBatch, Reader};
use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, Format, Translation, Translator};
use serde::Deserialize;
use serde_json::{Value, json};

use common::allocations::{Counting, taken_by};
use common::mutation::messagepack;
use common::{Change, Engine, Names, Shape, Store, translator};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: u32 = 16;
const CHATS: usize = 64;
const LONG_BLOCKS: usize = 64;
const LONG_EVENTS: usize = 4;
const SINGLE_EVENTS: usize = 64;
const ROUNDS: usize = 15;
/// Number of tokens of a window.
const WINDOW: u32 = 128;
/// Number of window blocks that a request needs.
const WINDOW_BLOCKS: usize = 8;
/// Number of events of one payload.
const BATCH: usize = 8;

/// Payloads of one kind, and the number of blocks that they name.
struct Part {
    name: &'static str,
    payloads: Vec<Vec<u8>>,
    blocks: usize,
}

fn main() {
    let changes = Changes::new();
    println!(
        "{:<34}{:<10}{:>22}{:>22}{:>22}{:>22}{:>22}{:>14}",
        "format", "events", "walk", "serde", "decode", "and translate", "and send", "allocations"
    );
    for (shape, names, name) in [
        (Shape::Map, Names::Unsigned, "vLLM, maps"),
        (Shape::Map, Names::Bytes, "vLLM, maps, names of 32 bytes"),
        (Shape::Array(9), Names::Unsigned, "vLLM, arrays of 9 slots"),
        (Shape::Map, Names::Signed, "SGLang, maps"),
        (Shape::Array(7), Names::Signed, "SGLang, arrays of 7 slots"),
    ] {
        let engine = Engine { shape, names };
        let format = if name.starts_with("vLLM") {
            Format::Vllm
        } else {
            Format::Sglang
        };
        let parts = changes.parts(|events| engine.payload(events));
        let serde = (shape == Shape::Map && names != Names::Bytes).then_some(serde_tagged as Serde);
        measure(name, format, &parts, serde);
    }
    let hybrid = changes
        .with_windows()
        .parts(|events| Engine::PLAIN.payload(events));
    measure("vLLM, maps, gpt-oss", Format::Vllm, &hybrid, None);
    let dynamo = changes.parts(|events| messagepack(&router_events(events)));
    measure("Dynamo, MessagePack", Format::Dynamo, &dynamo, Some(serde_dynamo));
    let dynamo = changes.parts(|events| router_events(events).to_string().into_bytes());
    measure("Dynamo, JSON", Format::Dynamo, &dynamo, Some(serde_dynamo_json));
    let tensorrt = changes.parts(|events| tensorrt_events(events).to_string().into_bytes());
    measure(
        "TensorRT-LLM, JSON",
        Format::TensorRt,
        &tensorrt,
        Some(serde_tensorrt),
    );
}

/// Changes of an engine's blocks. There are three kinds: stores of many blocks, stores of one block, and removals.
struct Changes {
    long: Vec<Change>,
    single: Vec<Change>,
    removed: Vec<Change>,
}

impl Changes {
    fn new() -> Self {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut long, mut single, mut removed) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..CHATS {
            let mut parent = None;
            let sizes = [LONG_BLOCKS; LONG_EVENTS].into_iter().chain([1; SINGLE_EVENTS]);
            let mut names = Vec::new();
            for blocks in sizes {
                let event: Vec<u64> = (0..blocks).map(|_| random.u64(..)).collect();
                let count = blocks * SIZE as usize;
                let tokens: Vec<u32> = (0..count).map(|_| random.u32(..128_000)).collect();
                let store = Change::Store(Store::new(&event, parent, &tokens, SIZE));
                if blocks == 1 {
                    single.push(store)
                } else {
                    long.push(store)
                }
                parent = event.last().copied();
                names.extend(event);
            }
            removed.extend(names.into_iter().rev().map(|name| Change::Remove {
                names: vec![name],
                medium: Some("GPU"),
                group: None,
            }));
        }
        Self {
            long,
            single,
            removed,
        }
    }

    /// Returns these changes as a model with windows makes them. For a block that a window keeps, the event of the
    /// window comes directly before the event of full attention.
    fn with_windows(&self) -> Self {
        let kept = |names: &[u64]| names[names.len().saturating_sub(WINDOW_BLOCKS)..].to_vec();
        let grouped = |change: &Change, has_window: bool| match change {
            Change::Store(store) => {
                let main = Store {
                    group: Some((0, Some("full_attention"))),
                    ..store.clone()
                };
                let window = Store {
                    names: kept(&store.names),
                    group: Some((1, Some("sliding_window"))),
                    window: Some(WINDOW),
                    ..store.clone()
                };
                let window = has_window.then_some(Change::Store(window));
                window.into_iter().chain([Change::Store(main)]).collect()
            }
            other => vec![other.clone()],
        };
        let long: Vec<Change> = self
            .long
            .iter()
            .flat_map(|change| grouped(change, true))
            .collect();
        let removal = |name: u64, group| Change::Remove {
            names: vec![name],
            medium: Some("GPU"),
            group: Some(group),
        };
        let mut windows = HashSet::new();
        for change in &self.long {
            if let Change::Store(store) = change {
                windows.extend(kept(&store.names));
            }
        }
        let removals = self.removed.iter().flat_map(|change| match change {
            Change::Remove { names, .. } => {
                let name = names[0];
                let window = windows.contains(&name).then(|| removal(name, 1));
                window.into_iter().chain([removal(name, 0)]).collect()
            }
            _ => Vec::new(),
        });
        Self {
            removed: removals.collect(),
            single: self
                .single
                .iter()
                .flat_map(|change| grouped(change, false))
                .collect(),
            long,
        }
    }

    fn parts(&self, encode: impl Fn(&[Change]) -> Vec<u8>) -> [Part; 3] {
        let blocks = |change: &Change| match change {
            Change::Store(Store { window: Some(_), .. }) | Change::Remove { group: Some(1), .. } => 0,
            Change::Store(store) => store.names.len(),
            Change::Remove { names, .. } => names.len(),
            Change::Clear => 0,
        };
        let part = |name, changes: &[Change]| Part {
            name,
            payloads: changes.chunks(BATCH).map(&encode).collect(),
            blocks: changes.iter().map(blocks).sum(),
        };
        [
            part("long", &self.long),
            part("single", &self.single),
            part("removed", &self.removed),
        ]
    }
}

type Serde = fn(&[u8]);

/// Decoder and translator, with all buffers that they reuse.
struct Pipeline {
    decoder: Decoder,
    batch: EngineBatch,
    translator: Translator,
    output: Translation,
}

impl Pipeline {
    fn decode(&mut self, payload: &[u8]) {
        self.decoder.decode(payload, &mut self.batch).unwrap();
        black_box(self.batch.events().len());
    }

    fn translate(&mut self, payload: &[u8]) {
        self.decode(payload);
        self.output.clear();
        self.translator.translate(&self.batch, &mut self.output);
        assert!(self.output.reasons.is_empty());
    }

    fn send(&mut self, payload: &[u8]) {
        self.translate(payload);
        for part in &mut self.output.parts {
            let batch = EventBatch {
                epoch: 1,
                seq: 1,
                rank: 0,
                time_us: Some(1),
                tier: part.tier,
                block_size: None,
                profile: None,
                events: std::mem::take(&mut part.events),
            };
            black_box(batch.encode());
            part.events = batch.events;
        }
    }
}

fn measure(name: &str, format: Format, parts: &[Part; 3], serde: Option<Serde>) {
    let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    if wanted.is_some_and(|wanted| !name.contains(&wanted)) {
        return;
    }
    let mut pipeline = Pipeline {
        decoder: Decoder::new(format, DecodeLimits::default()),
        batch: EngineBatch::default(),
        translator: translator(SIZE),
        output: Translation::default(),
    };
    let mut figures = vec![[const { Vec::new() }; 5]; parts.len()];
    for _ in 0..ROUNDS {
        for (part, figures) in parts.iter().zip(&mut figures) {
            let mut note = |place: usize, work: &mut dyn FnMut(&[u8])| {
                let begin = Instant::now();
                part.payloads.iter().for_each(|payload| work(payload));
                figures[place].push(begin.elapsed().as_nanos() as f64 / part.blocks as f64);
            };
            if !matches!(part.payloads[0].first(), Some(b'[')) {
                note(0, &mut walk);
            }
            if let Some(serde) = serde {
                note(1, &mut |payload| serde(payload));
            }
            note(2, &mut |payload| pipeline.decode(payload));
            note(3, &mut |payload| pipeline.translate(payload));
        }
        // All payloads are applied once more, because payloads that are stored and removed again would only change
        // copies.
        for (part, figures) in parts.iter().zip(&mut figures) {
            let begin = Instant::now();
            part.payloads.iter().for_each(|payload| pipeline.send(payload));
            figures[4].push(begin.elapsed().as_nanos() as f64 / part.blocks as f64);
        }
    }
    for (part, figures) in parts.iter().zip(&mut figures) {
        let work = || {
            part.payloads
                .iter()
                .for_each(|payload| pipeline.translate(payload))
        };
        let ((), taken) = taken_by(work);
        let columns: Vec<String> = figures.iter_mut().map(|rounds| spread(rounds)).collect();
        let allocations = format!("{} in {}", taken.count, part.blocks);
        print!("{name:<34}{:<10}", part.name);
        columns.iter().for_each(|column| print!("{column:>22}"));
        println!("{allocations:>14}");
    }
}

fn walk(payload: &[u8]) {
    let mut reader = Reader::new(payload, usize::MAX).unwrap();
    reader.skip().unwrap();
    black_box(reader);
}

fn spread(rounds: &mut [f64]) -> String {
    rounds.sort_by(f64::total_cmp);
    match (rounds.first(), rounds.get(rounds.len() / 2), rounds.last()) {
        (Some(least), Some(median), Some(most)) => format!("{median:.0} ({least:.0}–{most:.0})"),
        _ => "–".to_owned(),
    }
}

fn router_events(changes: &[Change]) -> Value {
    let event = |change: &Change| {
        let data = match change {
            Change::Store(store) => {
                let block =
                    |name: &u64| json!({"block_hash": name, "tokens_hash": name ^ 1, "mm_extra_info": null});
                let blocks: Vec<Value> = store.names.iter().map(block).collect();
                json!({"stored": {"parent_hash": store.parent, "start_position": null, "blocks": blocks}})
            }
            Change::Remove { names, .. } => json!({"removed": {"block_hashes": names}}),
            Change::Clear => json!("cleared"),
        };
        json!({"worker_id": 7, "storage_tier": "device", "residency_domain": "worker",
            "event": {"event_id": 1, "data": data, "dp_rank": 0}})
    };
    Value::Array(changes.iter().map(event).collect())
}

fn tensorrt_events(changes: &[Change]) -> Value {
    let token = |token: &u32| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0});
    let event = |change: &Change| {
        let data = match change {
            Change::Store(store) => {
                let block = |(name, tokens): (&u64, &[u32])| {
                    let tokens: Vec<Value> = tokens.iter().map(token).collect();
                    json!({"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": 0, "priority": 35})
                };
                let blocks: Vec<Value> = store
                    .names
                    .iter()
                    .zip(store.tokens.chunks(SIZE as usize))
                    .map(block)
                    .collect();
                json!({"type": "stored", "parent_hash": store.parent, "blocks": blocks})
            }
            Change::Remove { names, .. } => json!({"type": "removed", "block_hashes": names}),
            Change::Clear => json!({"type": "created"}),
        };
        json!({"event_id": 1, "data": data, "window_size": null})
    };
    Value::Array(changes.iter().map(event).collect())
}

#[derive(Deserialize)]
struct TaggedEvent {
    r#type: String,
    block_hashes: Option<Vec<i128>>,
    parent_block_hash: Option<i128>,
    token_ids: Option<Vec<u32>>,
    block_size: Option<usize>,
    lora_id: Option<u64>,
    medium: Option<String>,
    lora_name: Option<String>,
}

fn serde_tagged(payload: &[u8]) {
    let batch: (f64, Vec<TaggedEvent>, Option<u32>) = rmp_serde::from_slice(payload).unwrap();
    black_box(batch);
}

#[derive(Deserialize)]
struct RouterEvent {
    worker_id: u64,
    storage_tier: String,
    event: CacheEvent,
}

#[derive(Deserialize)]
struct CacheEvent {
    event_id: u64,
    data: CacheData,
    dp_rank: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum CacheData {
    Stored {
        parent_hash: Option<u64>,
        start_position: Option<u32>,
        blocks: Vec<CacheBlock>,
    },
    Removed {
        block_hashes: Vec<u64>,
    },
    Cleared,
}

#[derive(Deserialize)]
struct CacheBlock {
    block_hash: u64,
    tokens_hash: u64,
}

fn serde_dynamo(payload: &[u8]) {
    let events: Vec<RouterEvent> = rmp_serde::from_slice(payload).unwrap();
    black_box(events);
}

fn serde_dynamo_json(payload: &[u8]) {
    let events: Vec<RouterEvent> = serde_json::from_slice(payload).unwrap();
    black_box(events);
}

#[derive(Deserialize)]
struct TensorRtEvent {
    event_id: u64,
    data: TensorRtData,
    window_size: Option<u64>,
}

#[derive(Deserialize)]
struct TensorRtData {
    r#type: String,
    parent_hash: Option<u64>,
    blocks: Option<Vec<TensorRtBlock>>,
    block_hashes: Option<Vec<u64>>,
}

#[derive(Deserialize)]
struct TensorRtBlock {
    block_hash: u64,
    tokens: Vec<TensorRtToken>,
    cache_level: u32,
}

#[derive(Deserialize)]
struct TensorRtToken {
    token_id: u32,
    token_extra_id: u64,
}

fn serde_tensorrt(payload: &[u8]) {
    let events: Vec<TensorRtEvent> = serde_json::from_slice(payload).unwrap();
    black_box(events);
}
