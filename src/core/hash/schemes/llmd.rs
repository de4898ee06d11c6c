//! The hash chains of llm-d's router, as `pkg/kvcache/kvblock` of llm-d-router computes them.

use xxhash_rust::xxh64::{Xxh64, xxh64};

use super::super::block::Token;
use super::cbor::{Cbor, Sink};

/// Returns the hash that precedes the first block of every chain, computed by XXH64 from the seed and the model's
/// name.
pub(super) fn xxh64_root(seed: &[u8], model: &str) -> u64 {
    xxh64_step(xxh64(seed, 0), &[], &[model])
}

/// XXH64 over the parent, the tokens and the extra texts. Numbers are little-endian; each text comes after its length
/// as a u64.
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

/// Returns the hash that precedes the first block of every chain, computed by FNV-64a over CBOR from the seed and the
/// model's name.
pub(super) fn cbor_fnv_root(seed: &[u8], model: &str) -> u64 {
    let mut hasher = Fnv64a::default();
    hasher.take(seed);
    let mut payload = of_three(hasher.0);
    payload.nil();
    payload.text(model);
    payload.0.0
}

/// FNV-64a over the canonical CBOR of a list of three items: the parent, the tokens and the extra texts. Each text is
/// written as a map from `Hash` to the text. If there are no texts, the third item is nil.
pub(super) fn cbor_fnv_step(parent: u64, tokens: &[Token], extras: &[&str]) -> u64 {
    let mut payload = of_three(parent);
    payload.tokens(tokens);
    match extras {
        [] => payload.nil(),
        extras => {
            payload.list(extras.len());
            for extra in extras {
                payload.map(1);
                payload.text("Hash");
                payload.text(extra);
            }
        }
    }
    payload.0.0
}

/// Starts a CBOR list of three items and writes `parent` as the first item.
fn of_three(parent: u64) -> Cbor<Fnv64a> {
    let mut payload = Cbor(Fnv64a::default());
    payload.list(3);
    payload.unsigned(parent);
    payload
}

/// FNV-1a of 64 bits, computed byte by byte.
struct Fnv64a(u64);

impl Default for Fnv64a {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv64a {
    const PRIME: u64 = 0x0100_0000_01b3;
}

impl Sink for Fnv64a {
    fn take(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(Self::PRIME);
        }
    }
}
