//! Meaning of an event: its effect on an index, in a form in which kvatlas's and Dynamo's readings can be compared.

/// Effect of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    /// Blocks are stored.
    Stored {
        /// Number of the tier.
        tier: u8,
        /// Name of the block before the first stored block; `None` if the first stored block begins a sequence.
        parent: Option<u64>,
        /// Name and block hash of each block.
        blocks: Vec<(u64, u64)>,
    },
    /// Blocks are removed.
    Removed {
        /// Number of the tier.
        tier: u8,
        /// Names of the blocks.
        names: Vec<u64>,
    },
    /// All blocks are removed.
    Cleared,
    /// Nothing changes, for the reason in the text. Each side has reasons of its own.
    Nothing(&'static str),
    /// The event cannot be read, so its whole batch is lost.
    BatchLost,
}

impl Meaning {
    /// Whether the event changes nothing.
    pub fn is_nothing(&self) -> bool {
        match self {
            Self::Nothing(_) | Self::BatchLost => true,
            Self::Stored { blocks, .. } => blocks.is_empty(),
            Self::Removed { names, .. } => names.is_empty(),
            Self::Cleared => false,
        }
    }
}

/// Traits of an event that can explain why kvatlas and Dynamo give it different meanings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traits {
    /// Whether the extra keys have images or prompt embeddings.
    pub has_objects: bool,
    /// Whether the extra keys have a salt.
    pub has_salt_key: bool,
    /// Whether the engine hashes tokens beyond the block.
    pub looks_ahead: bool,
    /// Whether the event is an array, whose values have no names.
    pub is_array: bool,
    /// Whether a name of a block is given as bytes.
    pub has_byte_names: bool,
}
