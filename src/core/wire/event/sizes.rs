//! Sizes of events.

use super::{BlockContent, BlockNames, Event, StoredBlocks};

/// Maximum number of bytes that one run length takes. An event marks its resumable blocks by a list of run lengths.
pub const RUN_BYTES: usize = 5;

impl Event {
    /// Returns an upper estimate of the bytes that the event's lists and texts take, in memory and in a batch.
    pub fn list_bytes(&self) -> usize {
        match self {
            Self::Stored(stored) => stored.list_bytes(),
            Self::Removed(removed) => size_of_val(&*removed.hashes) + size_of_val(&*removed.lineage_hashes),
            Self::Resumable(blocks) => size_of_val(&*blocks.hashes) + size_of_val(&*blocks.lineage_hashes),
            Self::Cleared | Self::Doubted(_) | Self::Goodbye => 0,
        }
    }
}

impl StoredBlocks {
    fn list_bytes(&self) -> usize {
        let names = match &self.names {
            BlockNames::Sequence { hashes, .. } => size_of_val(&**hashes),
            BlockNames::Lineage(hashes) => size_of_val(&**hashes),
        };
        let content = match &self.content {
            None => 0,
            Some(BlockContent::BlockHashes(hashes)) => size_of_val(&**hashes),
            Some(BlockContent::Tokens { tokens, .. }) => size_of_val(&**tokens),
        };
        let engine_hashes = self.engine_hashes.as_deref().map_or(0, size_of_val);
        let runs = self.resumable.runs().map_or(0, |runs| RUN_BYTES * runs.len());
        names + content + self.text_bytes() + engine_hashes + runs
    }

    /// Returns the size of the event's texts in bytes: the adapter's name and the salt.
    pub fn text_bytes(&self) -> usize {
        match &self.content {
            Some(BlockContent::Tokens {
                lora_name,
                cache_salt,
                ..
            }) => [lora_name, cache_salt]
                .into_iter()
                .flatten()
                .map(String::len)
                .sum(),
            _ => 0,
        }
    }
}
