//! Reasons why an event, or a part of an event, is not in the index.

use kvatlas_core::worded;
use serde::{Deserialize, Serialize};

worded! {
    /// The reason why a part of an engine's batch did not become an event of the contract.
    ///
    /// The words are label values of metrics. They must be kept stable.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[repr(usize)]
    pub enum Reason {
        /// A field has a type or a value that it can't have, or a required field is missing.
        Malformed => "malformed",
        /// An event of a type that kvatlas does not know. So it is unknown which blocks the event adds or removes.
        UnknownEvent => "unknown_event",
        /// The number of tokens is not block size × number of blocks.
        TokenCount => "token_count",
        /// A stored block is its own parent.
        SelfParent => "self_parent",
        /// A stored block is its own ancestor.
        Cycle => "cycle",
        /// A name stands for a block with other content already, or comes twice in one event.
        NameConflict => "name_conflict",
        /// A block with a new name has the content of a block that is held under another name. So the two blocks
        /// differ by something that the engine's events do not tell.
        HiddenKey => "hidden_key",
        /// The parent is not held, so the blocks' positions and sequence hashes are unknown.
        UnknownParent => "unknown_parent",
        /// The salt of a block differs from the salt of its parent.
        SaltConflict => "salt_conflict",
        /// The adapter of a block differs from the adapter of its parent.
        AdapterConflict => "adapter_conflict",
        /// The event has no content (tokens), but the blocks' sequence hashes must be computed from it.
        NoContent => "no_content",
        /// A block's name, checked by sampling, is not the contract's hash of the block's content, though the engine claims so.
        ForeignChain => "foreign_chain",
        /// The table of names is full.
        TableFull => "table_full",
        /// A number is too large: the block's position exceeds the range of a lineage hash, or the block has more
        /// copies than can be counted.
        OutOfRange => "out_of_range",
        /// The block size differs from the one that the engine was registered with.
        BlockSize => "block_size",
        /// The batch is about another rank than earlier batches on the same connection. It is unknown which rank has which
        /// blocks.
        OtherRank => "other_rank",
        /// The engine's hash of a block also covers tokens after the block, and their number does not fit. It is
        /// larger than the number that the hashes in queries cover, or it differs from the number in earlier events.
        Lookahead => "lookahead",
        /// Blocks with the same tokens differ by a fact that the event leaves out. Or the configuration says that all
        /// events of the engine leave out such a fact.
        Untold => "untold",
        /// Batches were lost on the way, and cannot be replayed.
        LostBatches => "lost_batches",
        /// The batch comes from another engine, or it is not certain that it comes from the same one. There are three
        /// signs: a batch with the same number but other bytes was received before; the topic is another; or another
        /// process answers after a long silence.
        OtherEngine => "other_engine",
        /// The engine may have reported a single copy of a block several times. Each report was counted as a copy, so
        /// it is unknown whether the engine still has the block.
        Reported => "reported",
        /// An incomplete block, at the end of a sequence.
        PartOfBlock => "part_of_block",
        /// An event about a group of layers of an unknown kind, or about a window or a state in a tier other than the device.
        OtherGroup => "other_group",
        /// An event about an unknown group of layers. No stored event has told the kind of the group, or the blocks
        /// of the group end at other places than the blocks of main attention. Group 0 counts as main attention until
        /// an event tells its kind.
        UnknownGroup => "unknown_group",
        /// A block of a window or a state whose place in its sequence cannot be found.
        UnplacedName => "unplaced_name",
        /// The event's locality says that the block is not local to the engine.
        Remote => "remote",
        /// The block is owned by another system than the engine.
        OtherOwner => "other_owner",
        /// The event names a medium (a kind of memory) for which kvatlas knows no tier.
        UnknownMedium => "unknown_medium",
        /// An offload event names a block without giving its tokens and size, and no other event has told which block
        /// has this name.
        Placeholder => "placeholder",
        /// A block of an adapter that has a number, but no known name.
        UnnamedAdapter => "unnamed_adapter",
        /// An event removes a block from a tier that did not hold it.
        NotHeld => "not_held",
        /// An event that changes no held block.
        Ignored => "ignored",
        /// A block of a connector or a store that doesn't report its removals.
        NoRemovals => "no_removals",
        /// A clear that may or may not empty this tier: the event doesn't tell.
        UnclearTier => "unclear_tier",
        /// Blocks of an offload, which is made in chunks of several blocks. The event names only the last block of
        /// each chunk, and the number of blocks in a chunk is unknown.
        UnknownChunk => "unknown_chunk",
        /// Blocks beyond the device that the engine loads only if there are enough of them. So how many of them a request
        /// loads depends on how many it finds on the device.
        LoadMinimum => "load_minimum",
        /// An object of a store that can't be matched to a block, or that has only a part of a block.
        Unjoined => "unjoined",
    }
}

impl Reason {
    /// Whether the reason leaves the holder's state in doubt. For all other reasons, events are left out by design: the
    /// index then lists fewer blocks than the engine has, but no wrong ones.
    pub fn degrades(self) -> bool {
        self < Self::PartOfBlock
    }

    /// Whether an event that is left out for this reason puts the blocks of its tier in doubt, if that tier is beyond the
    /// device. The blocks of nearer tiers stay certain.
    pub fn hides_tier(self) -> bool {
        let is_of_tiers = matches!(
            self,
            Self::Remote
                | Self::OtherOwner
                | Self::UnknownMedium
                | Self::Placeholder
                | Self::Unjoined
                | Self::Untold
        );
        let is_of_connectors = matches!(self, Self::NoRemovals | Self::UnclearTier | Self::UnknownChunk);
        self.degrades() || self.hides_groups() || is_of_tiers || is_of_connectors
    }

    /// Whether leaving out an event for this reason makes it unknown how much a request can reuse. The blocks of main
    /// attention stay known.
    pub fn hides_groups(self) -> bool {
        matches!(self, Self::OtherGroup | Self::UnknownGroup | Self::UnplacedName)
    }
}

/// How often each [`Reason`] occurred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasonCounts([u64; Reason::ALL.len()]);

impl Default for ReasonCounts {
    fn default() -> Self {
        Self([0; Reason::ALL.len()])
    }
}

impl ReasonCounts {
    /// Counts `reason` once.
    pub fn count(&mut self, reason: Reason) {
        self.add(reason, 1);
    }

    /// Counts `reason` `times` times.
    pub fn add(&mut self, reason: Reason, times: u64) {
        if let Some(count) = self.0.get_mut(reason as usize) {
            *count = count.saturating_add(times);
        }
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (reason, times) in other.iter() {
            self.add(reason, times);
        }
    }

    /// Number of times that `reason` occurred.
    pub fn of(&self, reason: Reason) -> u64 {
        self.0.get(reason as usize).copied().unwrap_or_default()
    }

    /// The reasons that occurred, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (Reason, u64)> + '_ {
        Reason::ALL
            .into_iter()
            .map(|reason| (reason, self.of(reason)))
            .filter(|(_, times)| *times > 0)
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|count| *count == 0)
    }

    /// The reason to give for the holder's doubt: the first of the counted reasons, in the order of [`Reason::ALL`],
    /// that leaves the holder's state in doubt. `None` if no counted reason does.
    pub fn doubt(&self) -> Option<Reason> {
        self.iter()
            .map(|(reason, _)| reason)
            .find(|reason| reason.degrades())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_reasons_have_their_own_place_and_word() {
        for (place, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place);
            let same = Reason::ALL
                .into_iter()
                .filter(|other| other.as_str() == reason.as_str());
            assert_eq!(same.count(), 1, "{reason:?}");
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }

    #[test]
    fn only_what_leaves_doubt_is_a_doubt() {
        let mut counts = ReasonCounts::default();
        assert!(counts.is_empty());
        counts.count(Reason::Placeholder);
        counts.count(Reason::PartOfBlock);
        assert_eq!(counts.doubt(), None);
        counts.add(Reason::UnknownParent, 2);
        counts.count(Reason::ForeignChain);
        assert_eq!(counts.doubt(), Some(Reason::UnknownParent));
        let mut sum = ReasonCounts::default();
        sum.merge(&counts);
        assert_eq!(sum, counts);
        assert_eq!(sum.iter().count(), 4);
    }
}
