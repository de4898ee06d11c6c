//! Meaning of an event, in words that both sides share.

/// Effect of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    /// Blocks are stored: name and block hash of each.
    Stored {
        /// The tier's number.
        tier: u8,
        /// The name of the block before the first.
        parent: Option<u64>,
        /// Name and block hash of each block.
        blocks: Vec<(u64, u64)>,
    },
    /// Blocks are removed.
    Removed {
        /// The tier's number.
        tier: u8,
        /// Their names.
        names: Vec<u64>,
    },
    /// All blocks are removed.
    Cleared,
    /// Nothing, for a reason that is this side's own word.
    Nothing(&'static str),
    /// The event can't be read, and its batch is lost with it.
    BatchLost,
}

impl Meaning {
    /// Whether nothing changes.
    pub fn is_nothing(&self) -> bool {
        match self {
            Self::Nothing(_) | Self::BatchLost => true,
            Self::Stored { blocks, .. } => blocks.is_empty(),
            Self::Removed { names, .. } => names.is_empty(),
            Self::Cleared => false,
        }
    }
}

/// Traits of an event that one of the sides is known to treat in its own way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traits {
    /// Images or prompt embeddings among the extra keys.
    pub has_objects: bool,
    /// A salt that came among the extra keys.
    pub has_salt_key: bool,
    /// Tokens that the engine looks ahead to.
    pub looks_ahead: bool,
    /// An array, whose slots have no names.
    pub is_array: bool,
    /// A name that came as bytes.
    pub has_byte_names: bool,
}
