//! The hash chain of SGLang's pages, as its radix cache and its router compute it.

use sha2::{Digest, Sha256};

use super::super::block::Token;
use super::super::sequence::SequenceHash;

/// Bytes that come before the salt in the input of SHA-256.
const SALT_DOMAIN: &[u8] = b"sglang-cache-salt-v1\0";

/// Returns the hash of each full page of `tokens`: the first 8 bytes of SHA-256 over the previous page's whole digest
/// and the page's tokens. If `ahead` is 1, each token is hashed together with the next token. Then the last token of
/// `tokens` only completes a pair and belongs to no page.
pub(super) fn pages(
    tokens: &[Token],
    page_size: usize,
    ahead: usize,
    salt: Option<&str>,
) -> impl Iterator<Item = SequenceHash> {
    let mut before = salt.map(|salt| {
        Sha256::new()
            .chain_update(SALT_DOMAIN)
            .chain_update(salt)
            .finalize()
    });
    let count = tokens.len().saturating_sub(ahead) / page_size.max(1);
    let pages = (0..count).filter_map(move |page| {
        let start = page.checked_mul(page_size)?;
        tokens.get(start..start.checked_add(page_size)?.checked_add(ahead)?)
    });
    pages.map(move |page| {
        let mut hasher = Sha256::new();
        if let Some(before) = &before {
            hasher.update(before);
        }
        for unit in page.windows(ahead + 1) {
            unit.iter().for_each(|token| hasher.update(token.to_le_bytes()));
        }
        let digest = hasher.finalize();
        let (first, _) = digest.split_at(8);
        let hash = first.iter().fold(0, |hash, byte| (hash << 8) | u64::from(*byte));
        before = Some(digest);
        SequenceHash(hash)
    })
}
