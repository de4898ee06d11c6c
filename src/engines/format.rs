//! The formats of engines' events.

use kvatlas_core::wire::Tier;
use kvatlas_core::worded;
use serde::{Deserialize, Serialize};

worded! {
    /// The format of a publisher's payloads.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum Format {
        /// vLLM's `EventBatch`. Batches and events are encoded as arrays or maps, with every number of fields that a vLLM release
        /// has used.
        Vllm => "vllm",
        /// SGLang's `EventBatch`. It differs from the batch of vLLM in its salts and in its names of media (memories).
        Sglang => "sglang",
        /// Mooncake Store's batches of events.
        Mooncake => "mooncake",
        /// Dynamo's `RouterEvent`.
        Dynamo => "dynamo",
        /// TensorRT-LLM's event list.
        TensorRt => "tensorrt-llm",
        /// TokenSpeed's events, which its server passes on over gRPC only.
        TokenSpeed => "tokenspeed",
    }
}

impl Format {
    /// Whether each removal event removes one copy of a block. In other formats the producer counts copies itself, and a removal
    /// event removes the whole block.
    pub fn counts_copies(self) -> bool {
        !matches!(self, Self::Mooncake | Self::Dynamo)
    }

    /// Whether a KV connector reports the blocks beyond the device, that is, on host, disk or remote storage.
    pub fn has_connector(self) -> bool {
        matches!(self, Self::Vllm | Self::TokenSpeed)
    }

    /// Whether the events about tiers beyond the device (host, disk, remote storage) tell each removal, and tell
    /// which blocks can be loaded alone. Only Dynamo's events don't. In them, a store of vLLM that never reports
    /// removals looks like any other tier. A chunk (several blocks that load only together) looks like single blocks.
    pub fn tells_beyond(self) -> bool {
        self != Self::Dynamo
    }

    /// Minimum number of tokens that a request loads from a tier beyond the device; 0 if it loads any number. SGLang's
    /// HiCache computes fewer than 10 tokens anew instead of loading them.
    #[cfg(feature = "translate")]
    pub(crate) fn loaded_tokens_min(self) -> u32 {
        match self {
            Self::Sglang => 10,
            _ => 0,
        }
    }

    /// Whether a stored block on the device proves that all blocks before it are on the device, too. This is about groups of
    /// full attention. In vLLM, the request that computes a block holds the blocks before it. SGLang's trees evict leaves
    /// first, and load a block together with all blocks before it. TensorRT-LLM proves less: the parent of a new block may be
    /// an equal block that is on the host. The scenarios `evidence` of tests/engines compare each event with the caches.
    #[cfg(feature = "translate")]
    pub(crate) fn proves_ancestors(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }

    /// The farthest tier that a clear certainly empties. The clear also empties all nearer tiers. vLLM's clear
    /// empties the device, and perhaps the store of a connector, too. Dynamo's clear may stand for such a clear of
    /// vLLM. SGLang's clear empties device and host, but not SGLang's storage.
    pub fn clears_up_to(self) -> Tier {
        match self {
            Self::Vllm | Self::TokenSpeed | Self::Dynamo => Tier::DEVICE,
            Self::Sglang => Tier::HOST,
            Self::Mooncake | Self::TensorRt => Tier::EXTERNAL,
        }
    }

    /// Returns the largest number that a newly started engine process can give its first batch. It is 1 for Mooncake,
    /// which counts batches from 1, and 0 for all other formats.
    pub fn first_number_max(self) -> u64 {
        u64::from(self == Self::Mooncake)
    }

    /// The format with the word `word`, in any case.
    pub fn from_word(word: &str) -> Option<Self> {
        let named = |format: &Self| format.as_str().eq_ignore_ascii_case(word);
        match word {
            "trtllm" | "tensorrt" => Some(Self::TensorRt),
            _ => Self::ALL.into_iter().find(named),
        }
    }
}
