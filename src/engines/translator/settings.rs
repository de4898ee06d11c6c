//! Settings of a translator, which depend on the engine.

use std::collections::HashMap;

use kvatlas_core::hash::{BlockSize, SchemeChains};
use kvatlas_core::wire::Tier;

use crate::facts::GroupFacts;
use crate::format::Format;

/// The hashes by which a holder's blocks are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HashMode {
    /// The contract's hashes are computed from the content of each block.
    #[default]
    Recompute,
    /// The engine's names are the contract's sequence hashes. One block in every `sample` is checked against its content, if the
    /// event has content; 0 checks none.
    Trust {
        /// One block in this many is checked; 0 checks none.
        sample: u32,
    },
}

/// The settings of a translator: facts about its engine.
#[derive(Debug, Clone)]
pub struct TranslatorSettings {
    /// Tokens in a block.
    pub block_size: BlockSize,
    /// The hashes by which blocks are published.
    pub mode: HashMode,
    /// Hash scheme by which sequence hashes are computed (see [`SchemeChains`]); `None` for the contract's.
    pub chains: Option<SchemeChains>,
    /// Maximum number of block names that are kept. With several groups of layers, a block has a name in each group.
    pub blocks_max: usize,
    /// Names of adapters by their number, for engines that tell only the number.
    pub lora_names: HashMap<u64, String>,
    /// Whether each removal event removes one copy of a block. If not, it removes all copies.
    pub counts_copies: bool,
    /// Whether a KV connector reports blocks in tiers beyond the device. The connector's events give the tokens of
    /// blocks, but no other fact by which blocks differ. Each event is about a chunk: several blocks that can be
    /// loaded only together.
    pub has_connector: bool,
    /// Whether the engine may send stored events about blocks that it already has. vLLM does so when a request asks
    /// for such a report.
    pub has_reports: bool,
    /// Whether a stored block on the device proves that all blocks before it are on the device, too.
    pub proves_ancestors: bool,
    /// The farthest tier that a clear certainly empties. The clear also empties all nearer tiers.
    pub clears_up_to: Tier,
    /// Whether a KV connector may report clears of its own pool. Such a clear comes after the device's events of the
    /// same batch, and does not tell its tier.
    pub has_pool_clears: bool,
    /// Whether the engine numbers its groups of layers from 0, and tells of group 0 first, then of group 1, and so
    /// on.
    pub numbers_groups: bool,
    /// Whether the engine's blocks differ by something that its events do not tell. If so, the holder's blocks are
    /// always in doubt.
    pub is_untold: bool,
    /// Whether no request to the engine has a salt or an adapter. LMCache's events don't tell them.
    pub has_no_salts: bool,
    /// Whether the events about tiers beyond the device tell each removal, and tell which blocks can be loaded alone.
    /// If not, each tier beyond the device is in doubt while it has blocks.
    pub tells_beyond: bool,
    /// Whether a servicer (gRPC front end) of vLLM passes the events on. It leaves out all groups of layers but main
    /// attention, and stored events without tokens, and nothing shows that it has done so. So it is unknown how much a
    /// request can reuse if the engine numbers its groups, unless [`Self::groups`] states that main attention is all there
    /// is. And each tier beyond the device is in doubt, unless its events [tell all](Self::tells_beyond).
    pub is_relayed: bool,
    /// Minimum number of tokens that a request loads from a tier beyond the device. If fewer are there, it loads none.
    pub loaded_tokens_min: u32,
    /// Facts about the engine's groups of layers that its events don't tell.
    pub groups: GroupFacts,
}

impl Default for TranslatorSettings {
    fn default() -> Self {
        Self {
            block_size: BlockSize::DEFAULT,
            mode: HashMode::default(),
            chains: None,
            blocks_max: 1 << 22,
            lora_names: HashMap::new(),
            counts_copies: true,
            has_connector: false,
            has_reports: false,
            proves_ancestors: false,
            clears_up_to: Tier::EXTERNAL,
            has_pool_clears: false,
            numbers_groups: false,
            is_untold: false,
            has_no_salts: false,
            tells_beyond: true,
            is_relayed: false,
            loaded_tokens_min: 0,
            groups: GroupFacts::default(),
        }
    }
}

impl TranslatorSettings {
    /// The settings for an engine that speaks `format`, of which nothing else is known.
    pub fn for_format(format: Format) -> Self {
        Self {
            counts_copies: format.counts_copies(),
            has_connector: format.has_connector(),
            has_reports: format == Format::Vllm,
            proves_ancestors: format.proves_ancestors(),
            clears_up_to: format.clears_up_to(),
            has_pool_clears: format == Format::Vllm,
            tells_beyond: format.tells_beyond(),
            loaded_tokens_min: format.loaded_tokens_min(),
            numbers_groups: format == Format::Vllm,
            ..Self::default()
        }
    }

    /// The settings for an engine that speaks `format`, and whose server passes the events on over gRPC. TensorRT-LLM's
    /// frames leave out groups of layers, and moves of blocks between tiers.
    pub fn for_server(format: Format) -> Self {
        let is_relayed = format == Format::Vllm;
        let settings = Self::for_format(format);
        Self {
            is_relayed,
            is_untold: format == Format::TensorRt,
            tells_beyond: settings.tells_beyond && !is_relayed,
            ..settings
        }
    }
}
