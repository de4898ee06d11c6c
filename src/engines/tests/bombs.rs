//! The bounds on the memory that payloads take. A small payload that claims to be large takes none. A large payload takes at
//! most a fixed multiple of its size. Decoding a block allocates nothing.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, Format, Reason, Translation};

use common::allocations::{Counting, taken_by};
use common::mutation::payloads;
use common::{Change, Engine, Store, translator};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Maximum memory, in bytes, that a decoder may take for a payload of `bytes` bytes. While a list grows, its old and
/// its new memory may exist at once.
fn bound(bytes: usize) -> usize {
    50 * bytes + (1 << 16)
}

fn peak_of(format: Format, payload: &[u8]) -> usize {
    let work = || {
        let mut batch = EngineBatch::default();
        let mut decoder = Decoder::new(format, DecodeLimits::default());
        let _ = decoder.decode(payload, &mut batch);
        batch.capacity_bytes()
    };
    let (kept, taken) = taken_by(work);
    assert!(kept <= bound(payload.len()));
    taken.peak
}

/// A payload of about `size` bytes with the shortest events of SGLang that list all components. Each event makes five.
fn of_all_components(size: usize) -> Vec<u8> {
    let head = [&[0x98, 0xa6][..], b"stored", &[0x91, 0xcf]].concat();
    let event = [
        &head[..],
        &(1_u64 << 63).to_be_bytes(),
        &[0xc0, 0x91, 1, 1, 0xc0, 0xc0, 0x7f],
    ]
    .concat();
    let count = size / event.len();
    let claimed = u32::try_from(count).unwrap().to_be_bytes();
    [&[0x93, 1, 0xdd][..], &claimed, &event.repeat(count), &[0]].concat()
}

/// The bytes of a batch `[1, [EVENT], 0]`, where `EVENT` is the encoded event.
fn in_batch(event: &[u8]) -> Vec<u8> {
    [&[0x93, 1, 0x91], event, &[0]].concat()
}

#[test]
fn a_claim_costs_nothing() {
    let heads: [&[u8]; 8] = [
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
        &[0xdb, 0xff, 0xff, 0xff, 0xff],
        &[0xc9, 0xff, 0xff, 0xff, 0xff],
        &[0xdc, 0xff, 0xff],
        &[0xde, 0xff, 0xff],
        &[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
    ];
    for (format, good) in payloads() {
        for head in heads {
            for at in 0..good.len() {
                let claiming = [&good[..at], head, &good[at..]].concat();
                let peak = peak_of(format, &claiming);
                assert!(peak <= 1 << 16, "{format:?}: {peak} bytes for a claim at {at}");
            }
        }
    }
}

#[test]
fn large_payloads_cost_a_multiple_of_their_size() {
    const SIZE: usize = 1 << 20;
    let stored = |field: &str, element: &[u8]| {
        let count = u32::try_from(SIZE / element.len()).unwrap();
        let mut event = vec![0x82, 0xa4];
        event.extend(b"type");
        event.push(0xab);
        event.extend(b"BlockStored");
        event.push(0xa0 | u8::try_from(field.len()).unwrap());
        event.extend(field.as_bytes());
        event.push(0xdd);
        event.extend(count.to_be_bytes());
        event.extend(element.repeat(count as usize));
        in_batch(&event)
    };
    let mut bombs = vec![
        vec![0x91; SIZE],
        vec![0x81; SIZE],
        [&[0x93, 1, 0xdc, 0xff, 0xff][..], &[0x90; 65_535], &[0]].concat(),
        [&[0x93, 1, 0xdc, 0xff, 0xff][..], &[0xa0; 65_535], &[0]].concat(),
        b"[".repeat(SIZE),
        [&b"["[..], &b"{},".repeat(SIZE / 3), b"{}]"].concat(),
        [&b"["[..], &b"1.,".repeat(SIZE / 3), b"1]"].concat(),
        [&b"["[..], &b"[],".repeat(SIZE / 3), b"1]"].concat(),
        [&b"{\"payload\":["[..], &b"1,".repeat(SIZE / 2), b"1]}"].concat(),
        stored("block_hashes", &[1]),
        stored("token_ids", &[1]),
        stored("token_ids", &[0x92, 1, 1]),
        stored("seq_hashes", &[1]),
        stored("extra_keys", &[0x91, 1]),
        stored("extra_keys", &[0x9f, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        stored("extra_keys", &[0x91, 0xa1, b'x']),
        stored("lookahead_token_ids", &[0x91, 1]),
    ];
    let cleared = [&[0x91, 0xb0][..], b"AllBlocksCleared"].concat();
    let clears = [&[0x93, 1, 0xdc, 0xf0, 0x00][..], &cleared.repeat(0xf000), &[0]].concat();
    bombs.push(clears);
    bombs.push(of_all_components(SIZE));
    for bomb in &bombs {
        for format in Format::ALL {
            let peak = peak_of(format, bomb);
            let begin = &bomb[..bomb.len().min(40)];
            assert!(
                peak <= bound(bomb.len()),
                "{format:?}: {peak} bytes for {} of {begin:?}",
                bomb.len()
            );
        }
    }
}

#[test]
fn the_memory_of_a_large_payload_is_bounded_where_its_events_list_components() {
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(Format::Sglang, DecodeLimits::default());
    decoder.decode(&of_all_components(4 << 20), &mut batch).unwrap();
    // Two events for every 24 bytes, and some room for growth.
    assert!(batch.capacity_bytes() < 144 << 20, "{}", batch.capacity_bytes());
    assert!(batch.events().len() > 300_000 && batch.reasons.of(Reason::Malformed) > 0);
}

#[test]
fn a_large_payload_takes_memory_only_until_the_next_small_one() {
    let removal = br#"{"type":"BlockRemoved","block_hashes":[1],"medium":"GPU"}"#;
    let json = |events: usize| {
        let events = vec![&removal[..]; events].join(&b","[..]);
        [&b"[1.5,["[..], &events, b"],0]"].concat()
    };
    for (format, large, small) in [
        (Format::Sglang, of_all_components(4 << 20), of_all_components(64)),
        (Format::Vllm, json(150_000), json(1)),
    ] {
        let (kept, taken) = taken_by(|| {
            let mut batch = EngineBatch::default();
            let mut decoder = Decoder::new(format, DecodeLimits::default());
            decoder.decode(&large, &mut batch).unwrap();
            decoder.decode(&small, &mut batch).unwrap();
            (decoder, batch)
        });
        assert!(!kept.1.events().is_empty());
        assert!(taken.held < 1 << 16, "{format:?}: {} bytes", taken.held);
    }
}

#[test]
fn a_block_costs_no_allocation() {
    const BLOCKS: u64 = 20_000;
    let names: Vec<u64> = (1..=BLOCKS)
        .map(|name| name.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .collect();
    let tokens: Vec<u32> = (0..u32::try_from(BLOCKS * 4).unwrap()).collect();
    // One long event, then one for each block, as engines write while they decode and evict.
    let long = Change::Store(Store::new(&names, None, &tokens, 4));
    let remove = |name: &u64| Change::Remove {
        names: vec![*name],
        medium: Some("GPU"),
        group: None,
    };
    let removals: Vec<Change> = names.iter().rev().map(remove).collect();
    let singly: Vec<Change> = names
        .iter()
        .enumerate()
        .map(|(place, name)| {
            let parent = place.checked_sub(1).map(|place| names[place]);
            Change::Store(Store::new(&[*name], parent, &tokens[place * 4..place * 4 + 4], 4))
        })
        .collect();
    let payloads = [
        Engine::PLAIN.payload(&[long]),
        Engine::PLAIN.payload(&removals),
        Engine::PLAIN.payload(&singly),
        Engine::PLAIN.payload(&removals),
    ];
    let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
    let (mut batch, mut output) = (EngineBatch::default(), Translation::default());
    let mut translator = translator(4);
    let mut round = || {
        for payload in &payloads {
            decoder.decode(payload, &mut batch).unwrap();
            output.clear();
            translator.translate(&batch, &mut output);
            assert!(output.reasons.is_empty());
        }
    };
    round();
    let ((), taken) = taken_by(&mut round);
    assert!(
        taken.count < 32,
        "{} allocations for {} blocks",
        taken.count,
        4 * BLOCKS
    );
}
