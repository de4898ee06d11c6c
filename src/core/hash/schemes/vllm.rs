//! The hash chain of vLLM's blocks with `--prefix-caching-hash-algo sha256_cbor`, as `vllm/v1/core/kv_cache_utils.py`
//! of vLLM 0.33.0 computes it.

use sha2::{Digest, Sha256};

use super::super::block::Token;
use super::super::sequence::SequenceHash;
use super::cbor::{Cbor, Sink};

/// Text whose digest precedes the first block of every chain, unless `PYTHONHASHSEED` is set.
const SEED: &str = "vllm-none-hash";

impl Sink for Sha256 {
    fn take(&mut self, bytes: &[u8]) {
        self.update(bytes);
    }
}

/// Returns SHA-256 over the CBOR that `write` writes.
fn digest(write: impl FnOnce(&mut Cbor<Sha256>)) -> [u8; 32] {
    let mut cbor = Cbor(Sha256::new());
    write(&mut cbor);
    cbor.0.finalize().into()
}

/// Returns the hash of each full block of `tokens`, as engines' events name it: the last eight bytes of SHA-256 over
/// canonical CBOR. The CBOR contains the previous block's whole digest, the tokens and, for the first block, the
/// salt. An empty `seed` counts as no seed.
pub(super) fn blocks(
    tokens: &[Token],
    block_size: usize,
    seed: &str,
    mut salt: Option<&str>,
) -> impl Iterator<Item = SequenceHash> {
    let seed = if seed.is_empty() { SEED } else { seed };
    let mut before = digest(|cbor| cbor.text(seed));
    tokens.chunks_exact(block_size.max(1)).map(move |block| {
        before = digest(|cbor| {
            cbor.list(3);
            cbor.bytes(&before);
            cbor.tokens(block);
            match salt.take() {
                None => cbor.nil(),
                Some(salt) => {
                    cbor.list(1);
                    cbor.list(2);
                    cbor.text("cache_salt");
                    cbor.text(salt);
                }
            }
        });
        let (_, last) = before.split_at(24);
        SequenceHash(last.iter().fold(0, |hash, byte| (hash << 8) | u64::from(*byte)))
    })
}
