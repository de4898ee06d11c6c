//! Reading of events by kvatlas.

use kvatlas_core::hash::{BlockSize, HashSeed};
use kvatlas_core::wire::{Reader, Value};
use kvatlas_engines::{
    Content, DecodeLimits, Decoder, EngineBatch, EngineChange, EngineStored, Format, Reason, Translation,
    Translator, TranslatorSettings, content_hashes,
};

use crate::meaning::{Meaning, Traits};

fn decoded(format: Format, bytes: &[u8]) -> Option<EngineBatch> {
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(format, DecodeLimits::default());
    decoder.decode(bytes, &mut batch).ok().map(|()| batch)
}

/// Whether every event of the payload can be read; `None` if the payload is not a batch.
pub fn reads(format: Format, bytes: &[u8]) -> Option<bool> {
    decoded(format, bytes).map(|batch| batch.reasons.of(Reason::Malformed) == 0)
}

/// Returns the meaning that kvatlas gives to a batch with one event.
pub fn meaning(format: Format, block_size: u32, bytes: &[u8]) -> Meaning {
    let Some(batch) = decoded(format, bytes) else {
        return Meaning::BatchLost;
    };
    let Some(event) = batch.events().first() else {
        let reason = batch.reasons.iter().next();
        return Meaning::Nothing(reason.map_or("empty", |(reason, _)| reason.as_str()));
    };
    match &event.change {
        EngineChange::Stored(stored) => stored_meaning(&batch, stored, block_size),
        EngineChange::Removed(removed) => match removed.group.index {
            Some(1..) => Meaning::Nothing("unknown_group"),
            _ if removed.group.is_beside_main() => Meaning::Nothing("other_group"),
            _ => Meaning::Removed {
                tier: removed.tier.unwrap_or_default().as_u8(),
                names: batch.hashes(removed.names).to_vec(),
            },
        },
        EngineChange::Created(_) => Meaning::Nothing("created"),
        EngineChange::Moved { .. } => Meaning::Nothing("moved"),
        EngineChange::Cleared => Meaning::Cleared,
    }
}

/// Returns the meaning of stored blocks. The translator applies the rules only to a block without a parent, because it
/// does not know the parent of any other block. So this function applies the same rules to the other blocks.
fn stored_meaning(batch: &EngineBatch, stored: &EngineStored, block_size: u32) -> Meaning {
    let mut translator = Translator::new(TranslatorSettings {
        block_size: BlockSize::new(block_size).unwrap_or(BlockSize::DEFAULT),
        ..TranslatorSettings::default()
    });
    let mut output = Translation::default();
    translator.translate(batch, &mut output);
    let refused = output
        .reasons
        .iter()
        .map(|(reason, _)| reason)
        .find(|reason| *reason != Reason::UnknownParent);
    if let Some(reason) = refused {
        return Meaning::Nothing(reason.as_str());
    }
    let names = batch.hashes(stored.names);
    let comes_twice = |(place, name): (usize, &u64)| names.iter().take(place).any(|before| before == name);
    if names.iter().enumerate().any(comes_twice) {
        return Meaning::Nothing("name_conflict");
    }
    if let Content::Tokens { tokens, .. } = stored.content
        && tokens.is_empty()
    {
        return Meaning::Nothing("placeholder");
    }
    let text = |span: Option<kvatlas_engines::Span>| span.map(|span| batch.text(span));
    let seed = HashSeed::for_cache(text(stored.lora_name), text(stored.cache_salt));
    match content_hashes(batch, stored, seed) {
        Ok(hashes) => Meaning::Stored {
            tier: stored.tier.as_u8(),
            parent: stored.parent,
            blocks: names
                .iter()
                .copied()
                .zip(hashes.into_iter().map(|hash| hash.as_u64()))
                .collect(),
        },
        Err(reason) => Meaning::Nothing(reason.as_str()),
    }
}

/// Returns the traits of an event that can explain a difference between kvatlas and Dynamo. They come from the bytes,
/// and from what kvatlas's decoder reads.
pub fn traits(event: &[u8]) -> Traits {
    let single = [&[0x93, 1, 0x91][..], event, &[0]].concat();
    let mut traits = Traits {
        is_array: matches!(event.first(), Some(0x90..=0x9f | 0xdc | 0xdd)),
        has_byte_names: has_blob(event),
        ..Traits::default()
    };
    let Some(batch) = decoded(Format::Vllm, &single) else {
        return traits;
    };
    for event in batch.events() {
        let EngineChange::Stored(stored) = &event.change else {
            continue;
        };
        traits.has_objects |= !stored.objects.is_empty();
        traits.has_salt_key |= stored.cache_salt.is_some();
        if let Content::Tokens { step, window, .. } = stored.content {
            traits.looks_ahead |= step == window && stored.block_size != Some(step as u64);
        }
    }
    traits
}

/// Whether a blob is anywhere in the event.
fn has_blob(event: &[u8]) -> bool {
    let Ok(mut reader) = Reader::new(event, usize::MAX) else {
        return false;
    };
    while let Ok(value) = reader.value() {
        if matches!(value, Value::Blob(_)) {
            return true;
        }
    }
    false
}
