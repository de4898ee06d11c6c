//! The chains of llm-d's router, as `pkg/kvcache/kvblock` of llm-d-router has them.

use xxhash_rust::xxh64::{Xxh64, xxh64};

use super::super::block::Token;

/// The hash before the first block, by XXH64.
pub(super) fn xxh64_root(seed: &[u8], model: &str) -> u64 {
    xxh64_step(xxh64(seed, 0), &[], &[model])
}

/// XXH64 over the parent and the tokens, little-endian, and each text behind its length as little-endian u64.
pub(super) fn xxh64_step(parent: u64, tokens: &[Token], extras: &[&str]) -> u64 {
    let mut hasher = Xxh64::new(0);
    hasher.update(&parent.to_le_bytes());
    if cfg!(target_endian = "little") {
        hasher.update(bytemuck::cast_slice(tokens));
    } else {
        tokens
            .iter()
            .for_each(|token| hasher.update(&token.to_le_bytes()));
    }
    for extra in extras {
        hasher.update(&(extra.len() as u64).to_le_bytes());
        hasher.update(extra.as_bytes());
    }
    hasher.digest()
}

/// The hash before the first block, by FNV-64a over CBOR.
pub(super) fn cbor_fnv_root(seed: &[u8], model: &str) -> u64 {
    let mut hasher = Fnv64a::default();
    hasher.update(seed);
    let mut payload = Payload::of_three(hasher.0);
    payload.nil();
    payload.text(model);
    payload.0.0
}

/// FNV-64a over the canonical CBOR of the parent, the tokens, and nil or the texts, each a map of `Hash` to it.
pub(super) fn cbor_fnv_step(parent: u64, tokens: &[Token], extras: &[&str]) -> u64 {
    let mut payload = Payload::of_three(parent);
    payload.head(Payload::ARRAY, tokens.len() as u64);
    for token in tokens {
        payload.head(Payload::UNSIGNED, u64::from(*token));
    }
    match extras {
        [] => payload.nil(),
        extras => {
            payload.head(Payload::ARRAY, extras.len() as u64);
            for extra in extras {
                payload.head(Payload::MAP, 1);
                payload.text("Hash");
                payload.text(extra);
            }
        }
    }
    payload.0.0
}

/// FNV-1a of 64 bits, byte by byte.
struct Fnv64a(u64);

impl Default for Fnv64a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv64a {
    const PRIME: u64 = 0x0100_0000_01b3;

    fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(Self::PRIME);
        }
    }
}

/// Canonical CBOR (RFC 8949, 4.2), which is hashed as it is written.
struct Payload(Fnv64a);

impl Payload {
    /// Major types, in the upper three bits of an item's first byte.
    const UNSIGNED: u8 = 0 << 5;
    const TEXT: u8 = 3 << 5;
    const ARRAY: u8 = 4 << 5;
    const MAP: u8 = 5 << 5;
    const NIL: u8 = 0xf6;

    /// A list of three that begins with `parent`.
    fn of_three(parent: u64) -> Self {
        let mut payload = Self(Fnv64a::default());
        payload.head(Self::ARRAY, 3);
        payload.head(Self::UNSIGNED, parent);
        payload
    }

    /// The head of an item, as short as it can be.
    fn head(&mut self, major: u8, value: u64) {
        let bytes = value.to_be_bytes();
        let (additional, width) = match value {
            0..=23 => {
                let [.., small] = bytes;
                return self.0.update(&[major | small]);
            }
            24..=0xff => (24, 1),
            0x100..=0xffff => (25, 2),
            0x1_0000..=0xffff_ffff => (26, 4),
            _ => (27, 8),
        };
        self.0.update(&[major | additional]);
        self.0
            .update(bytes.get(bytes.len() - width..).unwrap_or_default());
    }

    fn text(&mut self, text: &str) {
        self.head(Self::TEXT, text.len() as u64);
        self.0.update(text.as_bytes());
    }

    fn nil(&mut self) {
        self.0.update(&[Self::NIL]);
    }
}
