//! Why an event, or a part of one, is not in the index.

use serde::{Deserialize, Serialize};

/// Why something in an engine's batch did not become an event of the contract.
///
/// The words are label values of metrics. They must be kept stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(usize)]
pub enum Reason {
    /// A field has a type or a value that it can't have, or a required field is missing.
    Malformed,
    /// An event of a type that nobody here knows. What it changed is unknown.
    UnknownEvent,
    /// The tokens are not block size × blocks.
    TokenCount,
    /// A stored block is its own parent.
    SelfParent,
    /// A stored block is its own ancestor.
    Cycle,
    /// A name that stands for a block of other content already, or comes twice in one event.
    NameConflict,
    /// A block with content that is held already comes under another name: the engine knows of a difference that its events do not
    /// tell.
    HiddenKey,
    /// The parent is not held, so the position and the chain are unknown.
    UnknownParent,
    /// The salt of a block differs from the one of its parent.
    SaltConflict,
    /// The adapter of a block differs from the one of its parent.
    AdapterConflict,
    /// Content is needed to compute the chain, and the event has none.
    NoContent,
    /// A sampled name is not the contract's hash of its content, though the engine claims so.
    ForeignChain,
    /// The table of names is full.
    TableFull,
    /// The position is above what a lineage hash can carry, or a block has more copies than can be counted.
    OutOfRange,
    /// The block size is not the namespace's: the engine is configured otherwise than it was registered.
    BlockSize,
    /// The batch is of another rank than those before it on the same connection: which rank has what is unknown.
    OtherRank,
    /// The engine's hashes look further ahead than queries can, or some of them do and others don't.
    Lookahead,
    /// The configuration says that the engine's events leave out what tells blocks apart.
    Untold,
    /// Batches were lost on the way, and cannot be given back.
    LostBatches,
    /// The batch is another engine's: same number and other bytes, or another topic.
    OtherEngine,
    /// Copies of a block may be mere reports that it was used again: whether one is left is not known.
    Reported,
    /// A part of a block, at the end of a sequence.
    PartOfBlock,
    /// A group of layers of a kind that nobody here knows; or of a window or a state, in a tier other than the device.
    OtherGroup,
    /// A group of layers that no stored event has described, other than group 0, or whose blocks don't end where others do.
    UnknownGroup,
    /// A block of a window or a state, of which nobody can know where in a sequence it stands.
    UnplacedName,
    /// The block lies elsewhere: its locality is not local.
    Remote,
    /// The block is owned by another system than the engine.
    OtherOwner,
    /// The medium has no tier.
    UnknownMedium,
    /// A block without tokens and size, announced for an offload, under a name that nobody knows.
    Placeholder,
    /// A block of an adapter that has a number, but no known name.
    UnnamedAdapter,
    /// A removed block that was not held in that tier.
    NotHeld,
    /// An event that changes nothing that is held.
    Ignored,
    /// A block of a connector or a store that doesn't say what of it goes.
    NoRemovals,
    /// A clear that does not say whether it is one of this tier, too.
    UnclearTier,
    /// Blocks announced for an offload, by the last of each chunk only: how many a chunk has is not known.
    UnknownChunk,
    /// An object of a store of which nobody can tell which block it is, or which is a part of one only.
    Unjoined,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 36] = [
        Self::Malformed,
        Self::UnknownEvent,
        Self::TokenCount,
        Self::SelfParent,
        Self::Cycle,
        Self::NameConflict,
        Self::HiddenKey,
        Self::UnknownParent,
        Self::SaltConflict,
        Self::AdapterConflict,
        Self::NoContent,
        Self::ForeignChain,
        Self::TableFull,
        Self::OutOfRange,
        Self::BlockSize,
        Self::OtherRank,
        Self::Lookahead,
        Self::Untold,
        Self::LostBatches,
        Self::OtherEngine,
        Self::Reported,
        Self::PartOfBlock,
        Self::OtherGroup,
        Self::UnknownGroup,
        Self::UnplacedName,
        Self::Remote,
        Self::OtherOwner,
        Self::UnknownMedium,
        Self::Placeholder,
        Self::UnnamedAdapter,
        Self::NotHeld,
        Self::Ignored,
        Self::NoRemovals,
        Self::UnclearTier,
        Self::UnknownChunk,
        Self::Unjoined,
    ];

    /// Whether the holder's state is in doubt afterwards. The others are left out by design: the index knows less than the engine has,
    /// and never more.
    pub fn degrades(self) -> bool {
        self < Self::PartOfBlock
    }

    /// Whether what a tier beyond the device has is in doubt afterwards, where the reason is one of that tier. What nearer tiers have stays
    /// certain.
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

    /// Whether what a request can reuse is not known afterwards, though what main attention has is.
    pub fn hides_groups(self) -> bool {
        matches!(self, Self::OtherGroup | Self::UnknownGroup | Self::UnplacedName)
    }

    /// A stable word for metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnknownEvent => "unknown_event",
            Self::TokenCount => "token_count",
            Self::SelfParent => "self_parent",
            Self::Cycle => "cycle",
            Self::NameConflict => "name_conflict",
            Self::HiddenKey => "hidden_key",
            Self::UnknownParent => "unknown_parent",
            Self::SaltConflict => "salt_conflict",
            Self::AdapterConflict => "adapter_conflict",
            Self::NoContent => "no_content",
            Self::ForeignChain => "foreign_chain",
            Self::TableFull => "table_full",
            Self::OutOfRange => "out_of_range",
            Self::BlockSize => "block_size",
            Self::OtherRank => "other_rank",
            Self::Lookahead => "lookahead",
            Self::Untold => "untold",
            Self::LostBatches => "lost_batches",
            Self::OtherEngine => "other_engine",
            Self::Reported => "reported",
            Self::PartOfBlock => "part_of_block",
            Self::OtherGroup => "other_group",
            Self::UnknownGroup => "unknown_group",
            Self::UnplacedName => "unplaced_name",
            Self::Remote => "remote",
            Self::OtherOwner => "other_owner",
            Self::UnknownMedium => "unknown_medium",
            Self::Placeholder => "placeholder",
            Self::UnnamedAdapter => "unnamed_adapter",
            Self::NotHeld => "not_held",
            Self::Ignored => "ignored",
            Self::NoRemovals => "no_removals",
            Self::UnclearTier => "unclear_tier",
            Self::UnknownChunk => "unknown_chunk",
            Self::Unjoined => "unjoined",
        }
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

    /// Counts `reason` as often as `times` says.
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

    /// How often `reason` occurred.
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

    /// The first reason of [`Reason::ALL`] that occurred and leaves the holder's state in doubt.
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
