//! The formats of engines' events.

use kvatlas_core::wire::Tier;
use serde::{Deserialize, Serialize};

/// The format of a publisher's payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Format {
    /// vLLM's `EventBatch`, arrays and maps of every published length.
    Vllm,
    /// SGLang's `EventBatch`, which differs in media and salts.
    Sglang,
    /// Mooncake Store's batches of events.
    Mooncake,
    /// Dynamo's `RouterEvent`.
    Dynamo,
    /// TensorRT-LLM's event list.
    TensorRt,
    /// TokenSpeed's events, which its server hands on over gRPC only.
    TokenSpeed,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 6] = [
        Self::Vllm,
        Self::Sglang,
        Self::Mooncake,
        Self::Dynamo,
        Self::TensorRt,
        Self::TokenSpeed,
    ];

    /// A stable word for configuration, metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Mooncake => "mooncake",
            Self::Dynamo => "dynamo",
            Self::TensorRt => "tensorrt-llm",
            Self::TokenSpeed => "tokenspeed",
        }
    }

    /// Whether each removal is of one copy of a block. In other formats the producer counts copies itself, and a removal
    /// takes the block.
    pub fn counts_copies(self) -> bool {
        !matches!(self, Self::Mooncake | Self::Dynamo)
    }

    /// Whether a KV connector tells of the blocks beyond the device.
    pub fn has_connector(self) -> bool {
        matches!(self, Self::Vllm | Self::TokenSpeed)
    }

    /// Whether a block is stored on the device only while all blocks before it are there, in groups of full attention. vLLM's
    /// request that computes a block refers to those. SGLang's trees evict leaves first, and load a block with all before
    /// it. The scenarios `evidence` of tests/engines compare each event with the caches. TensorRT-LLM proves less: it puts a
    /// new block behind an equal one that may be on the host.
    #[cfg(feature = "translate")]
    pub(crate) fn proves_ancestors(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }

    /// The farthest tier that a clear is known to empty, with all nearer tiers. vLLM's clear empties the device; a connector
    /// may be cleared with it, or not. SGLang's clear empties device and host; blocks in its storage stay.
    pub fn clears_up_to(self) -> Tier {
        match self {
            Self::Vllm | Self::TokenSpeed => Tier::DEVICE,
            Self::Sglang => Tier::HOST,
            Self::Mooncake | Self::Dynamo | Self::TensorRt => Tier::EXTERNAL,
        }
    }

    /// The largest number that the first batch of a process can have: Mooncake counts from 1.
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
