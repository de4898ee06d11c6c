//! Recorded payloads of the engines, compared with their meaning.
//!
//! The recordings lie beside the repository and are not part of it. Without them the test says so and passes, unless `CI` is set.

use std::io::Write;
use std::path::{Path, PathBuf};

use kvatlas_core::hash::{BlockSize, HashSeed, SequenceHash, next_sequence_hash};
use kvatlas_core::wire::{BlockNames, Event};
use kvatlas_engines::{
    Content, DecodeLimits, Decoder, EngineBatch, EngineChange, EngineEvent, Format, Translation, Translator,
    TranslatorSettings,
};
use serde_json::Value;

/// The path of a folder that lies beside the repository. If it is missing, reports that the test is skipped, and
/// returns `None`. With `CI` set, panics instead.
pub(crate) fn shared_folder(path: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared")
        .join(path);
    if folder.is_dir() {
        return Some(folder);
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "{} is missing",
        folder.display()
    );
    say_skipped(&format!("there are no recorded payloads at {}", folder.display()));
    None
}

/// Reports that a test was skipped, in two places. One is standard error itself, because the test harness would hide
/// the output of `eprintln!`. The other is the file whose lines `deploy/test.sh` counts.
fn say_skipped(why: &str) {
    let line = format!("SKIPPED: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    if let Some(path) = std::env::var_os("KVATLAS_TEST_SKIPS") {
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}

struct Fixture {
    file: String,
    format: Format,
    payload: Vec<u8>,
    means: Value,
}

fn fixtures() -> Vec<Fixture> {
    let Some(folder) = shared_folder("fixtures/engines") else {
        return Vec::new();
    };
    let manifest = std::fs::read(folder.join("manifest.json")).unwrap();
    let manifest: Vec<Value> = serde_json::from_slice(&manifest).unwrap();
    let fixture = |entry: &Value| {
        let file = entry["file"].as_str().unwrap().to_owned();
        Fixture {
            format: Format::from_word(entry["format"].as_str().unwrap()).unwrap(),
            payload: std::fs::read(folder.join(&file)).unwrap(),
            means: entry["means"].clone(),
            file,
        }
    };
    manifest.iter().map(fixture).collect()
}

fn decoded(fixture: &Fixture) -> EngineBatch {
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(fixture.format, DecodeLimits::default());
    decoder.decode(&fixture.payload, &mut batch).unwrap();
    batch
}

fn numbers(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|number| number.as_u64().unwrap())
        .collect()
}

fn tier_of(word: &Value) -> Option<u8> {
    word.as_str().map(|word| match word {
        "device" => 0,
        "host" => 1,
        "disk" => 2,
        _ => 3,
    })
}

/// The rank of an event. If the event does not tell it, this is the rank of its batch.
fn rank_of(batch: &EngineBatch, event: &EngineEvent) -> Option<u64> {
    event.rank.or(batch.rank).map(u64::from)
}

#[test]
fn payloads_decode_to_what_they_mean() {
    for fixture in fixtures() {
        let batch = decoded(&fixture);
        let file = &fixture.file;
        let means = &fixture.means;
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        let (mut is_cleared, mut created) = (false, 0);
        for event in batch.events() {
            if let (Some(rank), Format::Vllm | Format::Sglang) = (means["rank"].as_u64(), fixture.format) {
                assert_eq!(rank_of(&batch, event), Some(rank), "{file}");
            }
            if let Some(worker) = means["worker"].as_str() {
                assert_eq!(event.owner.map(|owner| batch.text(owner)), Some(worker), "{file}");
            }
            match event.change {
                EngineChange::Stored(change) => stored.push(change),
                EngineChange::Removed(change) => removed.push(change),
                EngineChange::Cleared => is_cleared = true,
                EngineChange::Created(_) => created += 1,
                EngineChange::Moved { .. } => panic!("{file} moves nothing"),
            }
        }
        if let Some(events) = means["events"].as_u64() {
            assert_eq!(batch.events().len() as u64 - created, events, "{file}");
            continue;
        }
        let empty = Vec::new();
        let meant = means["stored"].as_array().unwrap_or(&empty);
        assert_eq!(
            stored.len(),
            meant.len()
                + usize::from(file.contains("sliding_window"))
                // A placeholder is kept, because an event about the device may tell which block has its name.
                + usize::from(file.contains("placeholder")),
            "{file}"
        );
        for (change, meant) in stored.iter().zip(meant) {
            assert_eq!(batch.hashes(change.names), numbers(&meant["hashes"]), "{file}");
            assert_eq!(change.parent, meant["parent"].as_u64(), "{file}");
            assert_eq!(
                change.lora_name.map(|name| batch.text(name)),
                meant["lora"].as_str(),
                "{file}"
            );
            assert_eq!(
                change.cache_salt.map(|salt| batch.text(salt)),
                meant["salt"].as_str(),
                "{file}"
            );
            if let Some(tier) = tier_of(&meant["tier"]) {
                assert_eq!(change.tier.as_u8(), tier, "{file}");
            }
        }
        let meant = means["removed"].as_array().unwrap_or(&empty);
        assert_eq!(removed.len(), meant.len(), "{file}");
        for (change, meant) in removed.iter().zip(meant) {
            assert_eq!(batch.hashes(change.names), numbers(&meant["hashes"]), "{file}");
            if let Some(tier) = tier_of(&meant["tier"]) {
                assert_eq!(change.tier.map(|tier| tier.as_u8()), Some(tier), "{file}");
            }
        }
        assert_eq!(
            is_cleared,
            means["cleared"].as_bool().unwrap_or_default(),
            "{file}"
        );
        assert_eq!(batch.reasons.doubt(), None, "{file}");
        if file.contains("placeholder") {
            assert_eq!(stored[0].content, Content::Absent, "{file}");
        }
    }
}

#[test]
fn dynamo_events_name_their_worker_and_rank() {
    for fixture in fixtures()
        .iter()
        .filter(|fixture| fixture.file == "dynamo_envelope.msgpack")
    {
        let batch = decoded(fixture);
        let envelope = batch.envelope.unwrap();
        assert_eq!((envelope.publisher, envelope.sequence), (7, 5));
        let ranks: Vec<_> = batch.events().iter().map(|event| event.rank).collect();
        assert_eq!(ranks, [Some(0), Some(0), Some(1)]);
        let ids: Vec<_> = batch.events().iter().map(|event| event.id).collect();
        assert_eq!(ids, [Some(1), Some(2), Some(3)]);
        let [stored, removed, cleared] = batch.events() else {
            panic!("three events")
        };
        let EngineChange::Stored(stored) = stored.change else {
            panic!("stored")
        };
        let EngineChange::Removed(removed) = removed.change else {
            panic!("removed")
        };
        assert_eq!(
            batch.hashes(stored.names).last(),
            batch.hashes(removed.names).first()
        );
        assert_eq!(cleared.change, EngineChange::Cleared);
    }
}

/// The sequence hashes of consecutive blocks with the block hashes `blocks`. The first block follows `parent`.
fn chain(parent: Option<SequenceHash>, blocks: &[u64]) -> Vec<SequenceHash> {
    let step = |before: &mut Option<SequenceHash>, block: &u64| {
        let hash = next_sequence_hash(*before, (*block).into());
        *before = Some(hash);
        Some(hash)
    };
    blocks.iter().scan(parent, step).collect()
}

fn size_of_blocks(fixture: &Fixture) -> u32 {
    match fixture.file.as_str() {
        file if file.starts_with("sglang") => 64,
        file if file.starts_with("trtllm") => 32,
        _ => 16,
    }
}

/// Translates the fixtures of each engine one after another, with one translator for each format.
#[test]
fn translation_gives_the_hashes_of_the_manifest() {
    let mut engines: Vec<(Format, u32, Translator)> = Vec::new();
    for fixture in fixtures() {
        let size = size_of_blocks(&fixture);
        let place = engines.iter().position(|(format, ..)| *format == fixture.format);
        let place = place.unwrap_or_else(|| {
            let settings = TranslatorSettings {
                block_size: BlockSize::new(size).unwrap(),
                ..TranslatorSettings::default()
            };
            engines.push((fixture.format, size, Translator::new(settings)));
            engines.len() - 1
        });
        let (_, _, translator) = &mut engines[place];
        let batch = decoded(&fixture);
        let mut output = Translation::default();
        translator.translate(&batch, &mut output);
        assert_eq!(translator.doubt(), None, "{}", fixture.file);
        check_stored(&fixture, &output);
    }
}

fn check_stored(fixture: &Fixture, output: &Translation) {
    let file = &fixture.file;
    let Some(meant) = fixture.means["stored"].as_array() else {
        return;
    };
    let events = output
        .parts
        .iter()
        .flat_map(|part| part.events.iter().map(move |event| (part.tier, event)));
    let stored: Vec<_> = events
        .filter_map(|(tier, event)| match event {
            Event::Stored(stored) => Some((tier, stored)),
            _ => None,
        })
        .collect();
    assert_eq!(stored.len(), meant.len(), "{file}");
    for ((tier, stored), meant) in stored.iter().zip(meant) {
        let BlockNames::Sequence {
            parent,
            position,
            hashes,
        } = &stored.names
        else {
            panic!("{file}: by sequence hashes");
        };
        if let Some(meant) = tier_of(&meant["tier"]) {
            assert_eq!(tier.as_u8(), meant, "{file}");
        }
        if let Some(at) = meant["position"].as_u64() {
            assert_eq!(position.map(|position| position.as_u64()), Some(at), "{file}");
        }
        if meant["block_hashes"].is_array() {
            assert_eq!(
                *hashes,
                chain(*parent, &numbers(&meant["block_hashes"])),
                "{file}"
            );
        }
        assert_eq!(parent.is_none(), meant["parent"].is_null(), "{file}");
    }
}

#[test]
fn a_seed_for_another_cache_gives_other_hashes() {
    // If an adapter and a salt gave the same seed, the hashes of the manifest could not show that each is used.
    assert_ne!(
        HashSeed::for_cache(Some("my-lora"), None),
        HashSeed::for_cache(None, Some("tenant-a"))
    );
}

#[test]
fn router_events_of_dynamo_are_no_batches_of_vllm() {
    for fixture in fixtures() {
        if fixture.format != Format::Dynamo {
            continue;
        }
        let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
        let mut batch = EngineBatch::default();
        let decoded = decoder.decode(&fixture.payload, &mut batch);
        assert!(decoded.is_err() || !batch.doubts().is_empty(), "{}", fixture.file);
    }
}
