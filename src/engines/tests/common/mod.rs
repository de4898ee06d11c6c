//! Payloads as engines write them, and a naive index that events of the contract are applied to.

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "each test uses a part of this, and stops at the first surprise"
)]

pub(crate) mod allocations;
pub(crate) mod mutation;

use std::collections::{BTreeMap, BTreeSet};

use kvatlas_core::hash::{BlockSize, HashSeed, SequenceHash, block_hashes, sequence_hashes};
use kvatlas_core::wire::{BlockNames, Event, EventBatch, WireLimits};
use kvatlas_engines::{
    DecodeLimits, Decoder, EngineBatch, Format, SavedTranslator, Translation, Translator, TranslatorSettings,
};
use rmp::encode;

/// How an engine writes events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Map,
    /// Arrays. A stored event has this number of elements.
    Array(u32),
}

/// Encoding of block names in an engine's events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    Unsigned,
    Signed,
    Bytes,
}

/// A stored event, before it is encoded in an engine's format.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(crate) names: Vec<u64>,
    pub(crate) parent: Option<u64>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) block_size: u32,
    pub(crate) medium: Option<&'static str>,
    pub(crate) lora_id: Option<u64>,
    pub(crate) lora_name: Option<String>,
    /// Salt among the extra keys of the first block.
    pub(crate) salt_key: Option<String>,
    /// Salt in a field of its own.
    pub(crate) cache_salt: Option<String>,
    /// Images of the blocks: for each image the index of its block in the event, from 0, and its identifier.
    pub(crate) images: Vec<(usize, String)>,
    pub(crate) group: Option<(u32, Option<&'static str>)>,
    /// Length of the group's sliding window, in tokens; `None` for other groups.
    pub(crate) window: Option<u32>,
    /// The token after the last block, of an engine whose names cover the token after each block, too.
    pub(crate) ahead: Option<u32>,
}

impl Store {
    pub(crate) fn new(names: &[u64], parent: Option<u64>, tokens: &[u32], block_size: u32) -> Self {
        Self {
            names: names.to_vec(),
            parent,
            tokens: tokens.to_vec(),
            block_size,
            medium: Some("GPU"),
            lora_id: None,
            lora_name: None,
            salt_key: None,
            cache_salt: None,
            images: Vec::new(),
            group: None,
            window: None,
            ahead: None,
        }
    }
}

/// One event, before it is encoded in an engine's format.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Store(Store),
    Remove {
        names: Vec<u64>,
        medium: Option<&'static str>,
        group: Option<u32>,
    },
    Clear,
}

/// Form in which an engine writes its batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Engine {
    pub(crate) shape: Shape,
    pub(crate) names: Names,
}

impl Engine {
    pub(crate) const PLAIN: Self = Self {
        shape: Shape::Map,
        names: Names::Unsigned,
    };

    pub(crate) fn payload(self, changes: &[Change]) -> Vec<u8> {
        let mut out = Vec::new();
        encode::write_array_len(&mut out, 3).unwrap();
        encode::write_f64(&mut out, 1.5).unwrap();
        encode::write_array_len(&mut out, u32::try_from(changes.len()).unwrap()).unwrap();
        for change in changes {
            self.write_change(change, &mut out);
        }
        encode::write_uint(&mut out, 0).unwrap();
        out
    }

    fn write_change(self, change: &Change, out: &mut Vec<u8>) {
        match change {
            Change::Store(store) => match self.shape {
                Shape::Map => self.write_store_map(store, out),
                Shape::Array(slots) => self.write_store_array(store, slots, out),
            },
            Change::Remove { names, medium, group } => {
                let count = 3 + u32::from(group.is_some());
                let keys = match self.shape {
                    Shape::Map => {
                        encode::write_map_len(out, count).unwrap();
                        ["type", "block_hashes", "medium", "group_idx"]
                    }
                    Shape::Array(_) => {
                        encode::write_array_len(out, count).unwrap();
                        [""; 4]
                    }
                };
                let key = |out: &mut Vec<u8>, key: &str| {
                    if !key.is_empty() {
                        encode::write_str(out, key).unwrap();
                    }
                };
                key(out, keys[0]);
                encode::write_str(out, "BlockRemoved").unwrap();
                key(out, keys[1]);
                self.write_names(names, out);
                key(out, keys[2]);
                write_text(*medium, out);
                if let Some(group) = group {
                    key(out, keys[3]);
                    encode::write_uint(out, u64::from(*group)).unwrap();
                }
            }
            Change::Clear => {
                if self.shape == Shape::Map {
                    encode::write_map_len(out, 1).unwrap();
                    encode::write_str(out, "type").unwrap();
                } else {
                    encode::write_array_len(out, 1).unwrap();
                }
                encode::write_str(out, "AllBlocksCleared").unwrap();
            }
        }
    }

    fn write_store_map(self, store: &Store, out: &mut Vec<u8>) {
        let optional = [
            store.cache_salt.is_some(),
            has_extra_keys(store),
            store.group.is_some(),
            store.group.is_some_and(|(_, kind)| kind.is_some()),
            store.window.is_some(),
            store.ahead.is_some(),
        ];
        let entries = 8 + optional.into_iter().map(u32::from).sum::<u32>();
        encode::write_map_len(out, entries).unwrap();
        let text = |text: &str, out: &mut Vec<u8>| encode::write_str(out, text).unwrap();
        text("type", out);
        text("BlockStored", out);
        text("block_hashes", out);
        self.write_names(&store.names, out);
        text("parent_block_hash", out);
        self.write_parent(store.parent, out);
        text("token_ids", out);
        write_tokens(&store.tokens, out);
        text("block_size", out);
        encode::write_uint(out, u64::from(store.block_size)).unwrap();
        text("lora_id", out);
        write_number(store.lora_id, out);
        text("medium", out);
        write_text(store.medium, out);
        text("lora_name", out);
        write_text(store.lora_name.as_deref(), out);
        if let Some(salt) = &store.cache_salt {
            text("cache_salt", out);
            text(salt, out);
        }
        if has_extra_keys(store) {
            text("extra_keys", out);
            write_extra_keys(store, out);
        }
        if let Some((group, kind)) = store.group {
            text("group_idx", out);
            encode::write_uint(out, u64::from(group)).unwrap();
            if let Some(kind) = kind {
                text("kv_cache_spec_kind", out);
                text(kind, out);
            }
        }
        if let Some(window) = store.window {
            text("kv_cache_spec_sliding_window", out);
            encode::write_uint(out, u64::from(window)).unwrap();
        }
        if let Some(last) = store.ahead {
            text("lookahead_token_ids", out);
            let later = store.tokens.chunks(store.block_size as usize).skip(1);
            let ahead: Vec<_> = later.map(|block| block[0]).chain([last]).collect();
            let names = store.names.len();
            encode::write_array_len(out, u32::try_from(names).unwrap()).unwrap();
            let own = &ahead[ahead.len() - names..];
            own.chunks(1).for_each(|ahead| write_tokens(ahead, out));
        }
    }

    fn write_store_array(self, store: &Store, slots: u32, out: &mut Vec<u8>) {
        encode::write_array_len(out, slots).unwrap();
        for slot in 0..slots {
            match slot {
                0 => encode::write_str(out, "BlockStored").unwrap(),
                1 => self.write_names(&store.names, out),
                2 => self.write_parent(store.parent, out),
                3 => write_tokens(&store.tokens, out),
                4 => {
                    encode::write_uint(out, u64::from(store.block_size)).unwrap();
                }
                5 => write_number(store.lora_id, out),
                6 => write_text(store.medium, out),
                7 => write_text(store.lora_name.as_deref(), out),
                8 => write_extra_keys(store, out),
                9 => write_number(store.group.map(|(group, _)| u64::from(group)), out),
                10 => write_text(store.group.and_then(|(_, kind)| kind), out),
                11 => write_number(store.window.map(u64::from), out),
                _ => encode::write_nil(out).unwrap(),
            }
        }
    }

    fn write_parent(self, parent: Option<u64>, out: &mut Vec<u8>) {
        match parent {
            Some(parent) => self.write_name(parent, out),
            None => encode::write_nil(out).unwrap(),
        }
    }

    fn write_names(self, names: &[u64], out: &mut Vec<u8>) {
        encode::write_array_len(out, u32::try_from(names.len()).unwrap()).unwrap();
        names.iter().for_each(|name| self.write_name(*name, out));
    }

    fn write_name(self, name: u64, out: &mut Vec<u8>) {
        match self.names {
            Names::Unsigned => {
                encode::write_uint(out, name).unwrap();
            }
            Names::Signed => {
                encode::write_sint(out, name.cast_signed()).unwrap();
            }
            Names::Bytes => {
                let mut bytes = [0x5a; 32];
                bytes[24..].copy_from_slice(&name.to_be_bytes());
                encode::write_bin(out, &bytes).unwrap();
            }
        }
    }
}

fn has_extra_keys(store: &Store) -> bool {
    store.salt_key.is_some() || !store.images.is_empty()
}

fn write_text(text: Option<&str>, out: &mut Vec<u8>) {
    match text {
        Some(text) => encode::write_str(out, text).unwrap(),
        None => encode::write_nil(out).unwrap(),
    }
}

fn write_number(number: Option<u64>, out: &mut Vec<u8>) {
    match number {
        Some(number) => {
            encode::write_uint(out, number).unwrap();
        }
        None => encode::write_nil(out).unwrap(),
    }
}

fn write_tokens(tokens: &[u32], out: &mut Vec<u8>) {
    encode::write_array_len(out, u32::try_from(tokens.len()).unwrap()).unwrap();
    for token in tokens {
        encode::write_uint(out, u64::from(*token)).unwrap();
    }
}

/// Writes the extra keys of each block in vLLM's order: the adapter, images with their offset, then the salt.
fn write_extra_keys(store: &Store, out: &mut Vec<u8>) {
    encode::write_array_len(out, u32::try_from(store.names.len()).unwrap()).unwrap();
    for block in 0..store.names.len() {
        let images: Vec<_> = store.images.iter().filter(|(at, _)| *at == block).collect();
        let salt = store.salt_key.as_deref().filter(|_| block == 0);
        let lora = store.lora_name.as_deref();
        let count = images.len() + usize::from(salt.is_some()) + usize::from(lora.is_some());
        if count == 0 {
            encode::write_nil(out).unwrap();
            continue;
        }
        encode::write_array_len(out, u32::try_from(count).unwrap()).unwrap();
        lora.into_iter()
            .for_each(|lora| encode::write_str(out, lora).unwrap());
        for (_, image) in images {
            encode::write_array_len(out, 2).unwrap();
            encode::write_str(out, image).unwrap();
            encode::write_sint(out, -3).unwrap();
        }
        salt.into_iter()
            .for_each(|salt| encode::write_str(out, salt).unwrap());
    }
}

/// A translator with a block size of `block_size` tokens.
pub(crate) fn translator(block_size: u32) -> Translator {
    Translator::new(settings(block_size))
}

/// The translator after a restart: it is saved, and restored from the saved form.
pub(crate) fn restarted(translator: &Translator, settings: TranslatorSettings) -> Translator {
    let written = rmp_serde::to_vec(&translator.save()).unwrap();
    let saved: SavedTranslator = rmp_serde::from_slice(&written).unwrap();
    assert_eq!(saved.names(), translator.names());
    let restored = Translator::restore(settings, saved).unwrap();
    assert_eq!(told(&restored), told(translator));
    restored
}

/// Returns all answers of a translator about its state as one text, to compare two translators.
fn told(translator: &Translator) -> String {
    let doubts: Vec<_> = translator.tier_doubts().collect();
    format!(
        "{:?} {doubts:?} {:?} {} {} {} {}",
        translator.doubt(),
        translator.untold(),
        translator.looks_ahead(),
        translator.hides_groups(),
        translator.blocks(),
        translator.names(),
    )
}

/// The settings of [`translator`].
pub(crate) fn settings(block_size: u32) -> TranslatorSettings {
    TranslatorSettings {
        block_size: BlockSize::new(block_size).unwrap(),
        ..TranslatorSettings::default()
    }
}

/// Decodes one batch.
pub(crate) fn decode(format: Format, payload: &[u8]) -> EngineBatch {
    let mut batch = EngineBatch::default();
    Decoder::new(format, DecodeLimits::default())
        .decode(payload, &mut batch)
        .unwrap();
    batch
}

/// Encodes `changes` as an engine does, decodes and translates them, and returns the translation.
pub(crate) fn feed(translator: &mut Translator, changes: &[Change]) -> Translation {
    let batch = decode(Format::Vllm, &Engine::PLAIN.payload(changes));
    let mut output = Translation::default();
    translator.translate(&batch, &mut output);
    output
}

/// The contract's chain of sequence hashes for all tokens, computed in one call.
pub(crate) fn contract_chain(
    tokens: &[u32],
    block_size: u32,
    lora_name: Option<&str>,
    salt: Option<&str>,
) -> Vec<SequenceHash> {
    let size = BlockSize::new(block_size).unwrap();
    let seed = HashSeed::for_cache(lora_name, salt);
    sequence_hashes(block_hashes(tokens, size, seed)).collect()
}

/// The place of a block, as its stored event says: the parent's hash, and the position.
pub(crate) type Place = (Option<SequenceHash>, u64);

/// A naive index of events, as a daemon would have it. Has, for each tier, the held blocks with their places, and the
/// held blocks after which no request can resume (`barred`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Naive {
    pub(crate) held: BTreeMap<u8, BTreeMap<SequenceHash, Place>>,
    pub(crate) barred: BTreeSet<(u8, SequenceHash)>,
}

impl Naive {
    /// Applies events, after encoding and decoding them as for the wire. Asserts that no held block is stored again,
    /// and that each removed block was held.
    pub(crate) fn apply(&mut self, output: &Translation) {
        for part in &output.parts {
            let sent = EventBatch {
                epoch: 1,
                seq: 1,
                rank: 0,
                time_us: None,
                tier: part.tier,
                block_size: None,
                profile: None,
                events: part.events.clone(),
            };
            let received = EventBatch::decode(&sent.encode(), &WireLimits::default()).unwrap();
            assert_eq!(received, sent);
            for event in &received.events {
                self.apply_event(part.tier.as_u8(), event);
            }
        }
        self.held.retain(|_, blocks| !blocks.is_empty());
    }

    fn apply_event(&mut self, tier: u8, event: &Event) {
        let held = self.held.entry(tier).or_default();
        match event {
            Event::Stored(stored) => {
                let BlockNames::Sequence {
                    parent,
                    position,
                    hashes,
                } = &stored.names
                else {
                    panic!("blocks are named by sequence hashes");
                };
                let mut parent = *parent;
                for (stretch, is_resumable) in stored.resumable.stretches(hashes.len()) {
                    let barred = hashes[stretch].iter().filter(|_| !is_resumable);
                    self.barred.extend(barred.map(|hash| (tier, *hash)));
                }
                for (at, hash) in (position.unwrap().as_u64()..).zip(hashes) {
                    assert_eq!(parent.is_none(), at == 0);
                    assert_eq!(held.insert(*hash, (parent, at)), None, "stored twice");
                    parent = Some(*hash);
                }
            }
            Event::Removed(removed) => {
                for hash in &removed.hashes {
                    assert!(held.remove(hash).is_some(), "removed, but not held");
                    self.barred.remove(&(tier, *hash));
                }
            }
            Event::Resumable(blocks) => {
                for hash in &blocks.hashes {
                    assert!(held.contains_key(hash), "resumable or not, but not held");
                    let has_changed = match blocks.resumable {
                        true => self.barred.remove(&(tier, *hash)),
                        false => self.barred.insert((tier, *hash)),
                    };
                    assert!(has_changed, "told again what is known");
                }
            }
            Event::Cleared => {
                self.held.clear();
                self.barred.clear();
            }
            Event::Doubted(_) | Event::Goodbye => panic!("a translator says neither"),
        }
    }

    /// The blocks that are held in a tier.
    pub(crate) fn blocks(&self, tier: u8) -> BTreeSet<SequenceHash> {
        self.held
            .get(&tier)
            .into_iter()
            .flatten()
            .map(|(hash, _)| *hash)
            .collect()
    }
}
