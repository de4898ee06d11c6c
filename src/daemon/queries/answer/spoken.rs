//! Translation of queries into the hashes that their namespace uses.

use std::borrow::Cow;

use kvatlas_core::index::Namespace;
use kvatlas_core::wire::{ErrorCode, QueryKey, WireError};

/// Returns the key in the hashes that the namespace uses. A namespace can use the hashes of another *scheme* than the
/// contract's, for example those of an engine. For such a namespace, a key of tokens is hashed here.
///
/// # Errors
///
/// [`ErrorCode::BadRequest`] in two cases, both in a namespace with another scheme:
/// - The query has block hashes. Another scheme has no block hashes, and the contract's block hashes would find no
///   holder.
/// - The query has the tokens of an adapter, and it is not known how the scheme hashes these.
pub(super) fn spoken<'k>(namespace: &Namespace, key: &'k QueryKey) -> Result<Cow<'k, QueryKey>, WireError> {
    let Some(chains) = &namespace.chains else {
        return Ok(Cow::Borrowed(key));
    };
    match key {
        QueryKey::Tokens {
            tokens,
            lora_name,
            cache_salt,
        } => {
            if lora_name.as_ref().is_some_and(|name| !name.is_empty()) && !chains.knows_adapters() {
                let text = format!(
                    "how the blocks of adapters are hashed in namespace {:?} is not known; ask by its sequence hashes",
                    namespace.name
                );
                return Err(WireError::new(ErrorCode::BadRequest, text));
            }
            let size = namespace.indexer.settings().block_size;
            let hashes = chains.sequence_hashes(tokens, size, lora_name.as_deref(), cache_salt.as_deref());
            Ok(Cow::Owned(QueryKey::SequenceHashes(hashes)))
        }
        QueryKey::BlockHashes(_) => {
            let text = format!(
                "namespace {:?} speaks hashes of its own, which have no block hashes; ask by tokens or by its sequence hashes",
                namespace.name
            );
            Err(WireError::new(ErrorCode::BadRequest, text))
        }
        QueryKey::SequenceHashes(_) | QueryKey::LineageHashes(_) => Ok(Cow::Borrowed(key)),
    }
}
