//! Messages in their shortest form: a list is an array of numbers if that is shorter than a blob.

use kvatlas_core::wire::{BlockContent, BlockNames, Event, RemovedBlocks, StoredBlocks, Tier};

/// Encodes `events` as one batch.
pub(crate) fn encode(tier: Tier, events: &[Event]) -> Vec<u8> {
    let mut out = Vec::new();
    map(&mut out, 4);
    for (key, value) in [("epoch", 1), ("seq", 1), ("tier", u64::from(tier.as_u8()))] {
        text(&mut out, key);
        number(&mut out, value);
    }
    text(&mut out, "events");
    array(&mut out, events.len());
    for event in events {
        write(&mut out, event);
    }
    out
}

fn write(out: &mut Vec<u8>, event: &Event) {
    match event {
        Event::Stored(stored) => write_stored(out, stored),
        Event::Removed(removed) => write_removed(out, removed),
        Event::Cleared => {
            map(out, 1);
            kind(out, "cleared");
        }
        Event::Resumable(_) | Event::Doubted(_) | Event::Goodbye => unreachable!("no attack sends them"),
    }
}

fn write_stored(out: &mut Vec<u8>, stored: &StoredBlocks) {
    let (mut fields, mut own) = (1, Vec::new());
    match &stored.names {
        BlockNames::Sequence {
            parent,
            position,
            hashes,
        } => {
            let parent = parent.map(|parent| parent.as_u64());
            let position = position.map(|position| position.as_u64());
            for (key, value) in [("parent", parent), ("position", position)] {
                if let Some(value) = value {
                    fields += 1;
                    text(&mut own, key);
                    number(&mut own, value);
                }
            }
            text(&mut own, "sequence_hashes");
            numbers(&mut own, hashes.iter().map(|hash| hash.as_u64()));
        }
        BlockNames::Lineage(keys) => {
            text(&mut own, "lineage_hashes");
            lineages(&mut own, keys.iter().map(|key| key.to_be_bytes()));
        }
    }
    fields += 1;
    if let Some(names) = &stored.engine_hashes {
        fields += 1;
        text(&mut own, "engine_hashes");
        numbers(&mut own, names.iter().copied());
    }
    if let Some(BlockContent::Tokens { tokens, .. }) = &stored.content {
        fields += 1;
        text(&mut own, "tokens");
        array(&mut own, tokens.len());
        tokens
            .iter()
            .for_each(|token| number(&mut own, u64::from(*token)));
    }
    map(out, fields);
    kind(out, "stored");
    out.extend(own);
}

fn write_removed(out: &mut Vec<u8>, removed: &RemovedBlocks) {
    map(out, 3);
    kind(out, "removed");
    text(out, "sequence_hashes");
    numbers(out, removed.hashes.iter().map(|hash| hash.as_u64()));
    text(out, "lineage_hashes");
    lineages(out, removed.lineage_hashes.iter().map(|key| key.to_be_bytes()));
}

fn kind(out: &mut Vec<u8>, word: &str) {
    text(out, "type");
    text(out, word);
}

fn map(out: &mut Vec<u8>, fields: u8) {
    out.push(0x80 | fields);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xa0 | u8::try_from(text.len()).unwrap());
    out.extend(text.as_bytes());
}

fn array(out: &mut Vec<u8>, len: usize) {
    match u16::try_from(len) {
        Ok(len) if len < 16 => out.push(0x90 | u8::try_from(len).unwrap()),
        Ok(len) => {
            out.push(0xdc);
            out.extend(len.to_be_bytes());
        }
        Err(_) => {
            out.push(0xdd);
            out.extend(u32::try_from(len).unwrap().to_be_bytes());
        }
    }
}

fn blob(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(0xc6);
    out.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
    out.extend(bytes);
}

fn number(out: &mut Vec<u8>, number: u64) {
    let bytes = number.to_be_bytes();
    match number {
        0..0x80 => out.push(bytes[7]),
        0x80..0x100 => out.extend([0xcc, bytes[7]]),
        0x100..0x1_0000 => {
            out.push(0xcd);
            out.extend(&bytes[6..]);
        }
        0x1_0000..0x1_0000_0000 => {
            out.push(0xce);
            out.extend(&bytes[4..]);
        }
        _ => {
            out.push(0xcf);
            out.extend(bytes);
        }
    }
}

fn numbers(out: &mut Vec<u8>, list: impl Iterator<Item = u64> + Clone) {
    let mut short = Vec::new();
    array(&mut short, list.clone().count());
    list.clone().for_each(|hash| number(&mut short, hash));
    let long: Vec<u8> = list.flat_map(u64::to_le_bytes).collect();
    if short.len() <= long.len() {
        out.extend(short);
    } else {
        blob(out, &long);
    }
}

fn lineages(out: &mut Vec<u8>, keys: impl Iterator<Item = [u8; 16]>) {
    blob(out, &keys.flatten().collect::<Vec<u8>>());
}
