//! Rolling hashes of other systems, for namespaces that use them instead of the contract's hash. Each such hash is
//! called a scheme.
//!
//! | scheme | one step of the chain | before the first block |
//! |---|---|---|
//! | `llm-d-xxh64` | XXH64 of parent, tokens and extra texts | a step from XXH64 of the seed, with the model's name as text |
//! | `llm-d-cbor-fnv` | FNV-64a of CBOR of `[parent, tokens, texts]` | a step from FNV-64a of the seed, with the model's name |
//! | `sglang` | first 8 bytes of SHA-256 of the parent's digest and the tokens | nothing; with a salt, the salt's digest |
//! | `vllm-sha256-cbor` | last 8 bytes of SHA-256 of CBOR of `[parent's digest, tokens, extras]` | SHA-256 of the seed's CBOR |
//!
//! A digest is all 32 bytes of SHA-256. The CBOR is canonical.
//!
//! The first two are the block keys of llm-d's router. They depend on its settings `hashAlgorithm` and `hashSeed` and
//! on the model name in a request. For a request with an adapter, the name of the adapter replaces the name of the
//! model. The extra texts of a block are the identifiers of its images, in order. For the first block, the salt is
//! appended.
//!
//! The last two are the block names in engines' events. SGLang's events name pages, and its router asks by the same
//! names. vLLM's events name blocks, with `sha256_cbor`. A step needs the parent's whole digest, of which an event
//! has only 8 bytes. So such a chain cannot be continued from one of its hashes, and the daemon uses the names that
//! the engine sends.
//!
//! An event does not tell all that the hashes of blocks with an adapter depend on: SGLang adds a key, and vLLM the path
//! of the adapter. An SGLang engine that guesses several tokens ahead (EAGLE) hashes pairs of tokens.
//!
//! A chain of a scheme has no block hashes: a step takes the tokens themselves. The tests
//! `schemes_meet_the_vectors_of_llm_d`, `schemes_meet_the_vectors_of_sglang` and `schemes_meet_the_vectors_of_vllm`
//! compare with values that the other systems' own code computed.

mod cbor;
mod llmd;
mod sglang;
mod vllm;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::block::{BlockSize, Token};
use super::sequence::SequenceHash;
use crate::worded;

worded! {
    /// Algorithm of a scheme's hashes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    pub enum SchemeAlgorithm {
        /// XXH64, as with `hashAlgorithm: xxh64` of llm-d.
        LlmdXxh64 => "llm-d-xxh64",
        /// FNV-64a over CBOR, as with `hashAlgorithm: cbor-fnv` of llm-d, which is llm-d's default.
        LlmdCborFnv => "llm-d-cbor-fnv",
        /// Hashes of SGLang's pages.
        Sglang => "sglang",
        /// Hashes of vLLM's blocks with `--prefix-caching-hash-algo sha256_cbor`.
        VllmSha256Cbor => "vllm-sha256-cbor",
    }
}

impl SchemeAlgorithm {
    /// Whether llm-d's router uses the algorithm.
    pub fn is_of_llmd(self) -> bool {
        matches!(self, Self::LlmdXxh64 | Self::LlmdCborFnv)
    }
}

/// Rolling hash that a namespace uses in place of the contract's hash. Its text is the algorithm's word, such as
/// `llm-d-xxh64`, or with a seed `llm-d-xxh64:SEED`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Scheme {
    /// The algorithm of the scheme's hashes.
    pub algorithm: SchemeAlgorithm,
    /// The seed, a text. Empty if there is none.
    pub seed: String,
}

/// A text that names no scheme.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no scheme; known are llm-d-xxh64 and llm-d-cbor-fnv, with :SEED behind it where llm-d has a hashSeed, sglang, and vllm-sha256-cbor, with :SEED where \
     vLLM has a PYTHONHASHSEED"
)]
pub struct UnknownScheme;

impl FromStr for Scheme {
    type Err = UnknownScheme;

    fn from_str(text: &str) -> Result<Self, UnknownScheme> {
        let (word, seed) = match text.split_once(':') {
            // Each scheme has exactly one text: no seed means no colon.
            Some((_, "")) => return Err(UnknownScheme),
            Some((word, seed)) => (word, seed),
            None => (text, ""),
        };
        let algorithm = SchemeAlgorithm::of_word(word).ok_or(UnknownScheme)?;
        if !seed.is_empty() && algorithm == SchemeAlgorithm::Sglang {
            return Err(UnknownScheme);
        }
        Ok(Self {
            algorithm,
            seed: seed.to_owned(),
        })
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.algorithm.as_str())?;
        match self.seed.is_empty() {
            true => Ok(()),
            false => write!(formatter, ":{}", self.seed),
        }
    }
}

/// The hash chains of one model in a scheme.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemeChains {
    scheme: Scheme,
    model: String,
}

impl SchemeChains {
    /// Returns the chains of `model`, the model name that requests contain.
    pub fn new(scheme: Scheme, model: impl Into<String>) -> Self {
        Self {
            scheme,
            model: model.into(),
        }
    }

    /// The algorithm of the hashes.
    pub fn algorithm(&self) -> SchemeAlgorithm {
        self.scheme.algorithm
    }

    /// Returns a calculator of the next hash from the previous one. `None` if the previous hash alone does not
    /// determine the next hash, so that only the hashes sent by the engine can continue a chain.
    pub fn steps(&self) -> Option<SchemeSteps<'_>> {
        self.scheme
            .algorithm
            .is_of_llmd()
            .then_some(SchemeSteps { chains: self })
    }

    /// Whether kvatlas can compute the scheme's hashes of blocks that belong to an adapter.
    pub fn knows_adapters(&self) -> bool {
        self.steps().is_some()
    }

    /// Returns the hashes of the full blocks of a prompt without images. A tail that does not fill a block gets no
    /// hash.
    pub fn sequence_hashes(
        &self,
        tokens: &[Token],
        block_size: BlockSize,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> Vec<SequenceHash> {
        // An empty salt counts as no salt.
        let mut salt = cache_salt.filter(|salt| !salt.is_empty());
        let size = block_size.as_usize();
        let Some(steps) = self.steps() else {
            return match self.algorithm() {
                SchemeAlgorithm::VllmSha256Cbor => {
                    vllm::blocks(tokens, size, &self.scheme.seed, salt).collect()
                }
                _ => sglang::pages(tokens, size, 0, salt).collect(),
            };
        };
        let mut last = steps.root(lora_name);
        let blocks = tokens.chunks_exact(size);
        let step = |tokens| {
            // Only the first block is hashed with the salt.
            last = steps.next(last, tokens, salt.take().as_slice());
            last
        };
        blocks.map(step).collect()
    }

    /// Whether some engines of the scheme hash each token together with the next token.
    pub fn may_look_ahead(&self) -> bool {
        self.algorithm() == SchemeAlgorithm::Sglang
    }

    /// Returns the hashes of the full blocks of a prompt, for an engine that hashes each token together with the next
    /// token. `None` if the scheme has no such engines.
    pub fn hashes_ahead(
        &self,
        tokens: &[Token],
        block_size: BlockSize,
        cache_salt: Option<&str>,
    ) -> Option<Vec<SequenceHash>> {
        let salt = cache_salt.filter(|salt| !salt.is_empty());
        let pages = || sglang::pages(tokens, block_size.as_usize(), 1, salt).collect();
        self.may_look_ahead().then(pages)
    }
}

/// Hash chains of a scheme in which each hash can be computed from the previous one.
#[derive(Debug, Clone, Copy)]
pub struct SchemeSteps<'a> {
    chains: &'a SchemeChains,
}

impl SchemeSteps<'_> {
    /// Returns the hash that precedes the first block of every sequence. The hash is computed from the adapter's name
    /// if there is one, else from the model's name.
    pub fn root(&self, lora_name: Option<&str>) -> SequenceHash {
        let SchemeChains { scheme, model } = self.chains;
        let name = lora_name.filter(|name| !name.is_empty()).unwrap_or(model);
        let seed = scheme.seed.as_bytes();
        SequenceHash(match scheme.algorithm {
            SchemeAlgorithm::LlmdCborFnv => llmd::cbor_fnv_root(seed, name),
            _ => llmd::xxh64_root(seed, name),
        })
    }

    /// The hash of the block with `tokens` that follows the hash `before`. For the first block, `before` is
    /// [`Self::root`]. `extras` distinguish the block from other blocks with the same tokens.
    pub fn next(&self, before: SequenceHash, tokens: &[Token], extras: &[&str]) -> SequenceHash {
        SequenceHash(match self.chains.scheme.algorithm {
            SchemeAlgorithm::LlmdCborFnv => llmd::cbor_fnv_step(before.as_u64(), tokens, extras),
            _ => llmd::xxh64_step(before.as_u64(), tokens, extras),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_are_read_back() {
        for text in [
            "llm-d-xxh64",
            "llm-d-cbor-fnv",
            "llm-d-xxh64:42",
            "llm-d-cbor-fnv:a:b",
            "sglang",
            "vllm-sha256-cbor",
            "vllm-sha256-cbor:0",
        ] {
            assert_eq!(text.parse::<Scheme>().unwrap().to_string(), text);
        }
        for text in ["", "llm-d", "llm-d-xxh64:", "llm-d-XXH64", "contract", "sglang:1"] {
            assert_eq!(text.parse::<Scheme>(), Err(UnknownScheme), "{text:?}");
        }
    }

    #[test]
    fn adapters_and_salts_have_chains_of_their_own() {
        for algorithm in SchemeAlgorithm::ALL
            .into_iter()
            .filter(|known| known.is_of_llmd())
        {
            let seed = String::new();
            let chains = SchemeChains::new(Scheme { algorithm, seed }, "m");
            let tokens: Vec<Token> = (1..=9).collect();
            let size = BlockSize::new(4).unwrap();
            let hashes = |lora, salt| chains.sequence_hashes(&tokens, size, lora, salt);
            let plain = hashes(None, None);
            assert_eq!(plain.len(), 2);
            assert_eq!(hashes(Some(""), Some("")), plain, "an empty name is none");
            assert_eq!(hashes(Some("m"), None), plain, "the model's own name");
            let salted = hashes(None, Some("tenant"));
            let steps = chains.steps().unwrap();
            let first = steps.next(steps.root(None), &tokens[..4], &["tenant"]);
            let second = steps.next(first, &tokens[4..8], &[]);
            assert_eq!(salted, [first, second]);
            assert_ne!(salted[0], plain[0]);
            assert_ne!(hashes(Some("sql"), None)[0], plain[0]);
        }
    }
}
