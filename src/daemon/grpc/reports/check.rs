//! Checks of reports, and the errors of reports that are refused.

use tonic::{Code, Status};

use super::super::messages::{ExternalKvAction, ExternalKvActionType, TierHashes};
use super::blocks::{TierPlace, WorkerBlocks};

/// Maximum number of actions in one batch.
const ACTIONS_MAX: usize = 256;
/// Maximum number of hashes in one batch.
const HASHES_MAX: usize = 16_384;
/// Maximum length of a name, an address or an epoch, in bytes.
const TEXT_BYTES_MAX: usize = 256;
/// Maximum number of workers that can be reported.
pub(super) const WORKERS_MAX: usize = 4096;

/// Reason why a report about a worker's blocks is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum BlockReportError {
    /// Text is too long, or has control characters. The value is the text's name.
    #[error("{0} must have up to {TEXT_BYTES_MAX} bytes, and no control characters")]
    Text(&'static str),
    /// Required text is empty. The value is the text's name.
    #[error("{0} must not be empty")]
    Empty(&'static str),
    /// Number of the tier is unknown.
    #[error("tier {0} is none of HBM, DRAM and SSD")]
    Tier(i32),
    /// Number of the action is unknown.
    #[error("action type {0} is none of REPORT, REVOKE and CLEAR_ALL_AT_TIER")]
    Action(i32),
    /// List must be empty or have one entry for each hash, but has another length.
    #[error("{list} has {given} entries: none, or one for each of the {hashes} hashes")]
    Unaligned {
        /// Name of the list whose length is wrong.
        list: &'static str,
        /// Length of the list.
        given: usize,
        /// Number of hashes, which should be the length of the list.
        hashes: usize,
    },
    /// Batch has too many actions or hashes.
    #[error("a batch has up to {ACTIONS_MAX} actions and {HASHES_MAX} hashes; send a snapshot instead")]
    TooLarge,
    /// List of workers is too long. The value is its length.
    #[error("{0} workers are too many: {WORKERS_MAX} at most")]
    TooManyWorkers(usize),
    /// Worker was not named by `ConfigureExpectedWorkers`.
    #[error("the worker has not been configured: send ConfigureExpectedWorkers")]
    Unexpected,
    /// Batch does not ask for a check of its number. Without that check a lost batch would not be noticed.
    #[error(
        "a batch needs worker_epoch and enforce_sequence: without them nobody would notice that one is lost"
    )]
    Unnumbered,
    /// No snapshot has come for the worker's epoch.
    #[error("no snapshot of this epoch is here: send ReplaceExternalKvSnapshot")]
    NoSnapshot,
    /// Number of the batch is too high: at least one earlier batch is missing.
    #[error("batch {expected} is missing before {given}: send ReplaceExternalKvSnapshot")]
    Gap {
        /// Number of the batch that should have come next.
        expected: u64,
        /// Number of the batch that came.
        given: u64,
    },
    /// Worker's blocks do not fit into the memory for reports.
    #[error("reports take too much room (grpc.max_reported_bytes)")]
    NoRoom,
}

impl From<BlockReportError> for Status {
    fn from(error: BlockReportError) -> Self {
        use BlockReportError as Why;
        let code = match &error {
            Why::Text(_) | Why::Empty(_) | Why::Tier(_) | Why::Action(_) | Why::Unaligned { .. } => {
                Code::InvalidArgument
            }
            Why::TooLarge | Why::TooManyWorkers(_) | Why::NoRoom => Code::ResourceExhausted,
            Why::Unexpected | Why::Unnumbered | Why::NoSnapshot | Why::Gap { .. } => Code::FailedPrecondition,
        };
        Self::new(code, error.to_string())
    }
}

/// Checks a text that is allowed to be empty.
pub(super) fn check_text(name: &'static str, text: &str) -> Result<(), BlockReportError> {
    let is_sound = text.len() <= TEXT_BYTES_MAX && !text.contains(char::is_control);
    is_sound.then_some(()).ok_or(BlockReportError::Text(name))
}

/// Checks a text that must not be empty.
pub(super) fn check_name(name: &'static str, text: &str) -> Result<(), BlockReportError> {
    match text.is_empty() {
        true => Err(BlockReportError::Empty(name)),
        false => check_text(name, text),
    }
}

fn tier(number: i32) -> Result<TierPlace, BlockReportError> {
    TierPlace::of_wire(number).ok_or(BlockReportError::Tier(number))
}

/// Blocks to store in one tier. Each of `components` and `tokens` has one entry for each hash, or is empty.
pub(super) struct Stored<'a> {
    tier: TierPlace,
    pub(super) hashes: &'a [i64],
    components: &'a [u32],
    tokens: &'a [u32],
}

impl<'a> Stored<'a> {
    fn new(
        number: i32,
        hashes: &'a [i64],
        components: &'a [u32],
        tokens: &'a [u32],
    ) -> Result<Self, BlockReportError> {
        for (list, given) in [
            ("component_masks", components.len()),
            ("block_sizes", tokens.len()),
        ] {
            if given != 0 && given != hashes.len() {
                let hashes = hashes.len();
                return Err(BlockReportError::Unaligned { list, given, hashes });
            }
        }
        Ok(Self {
            tier: tier(number)?,
            hashes,
            components,
            tokens,
        })
    }

    /// Checks and returns the blocks that a snapshot has in one tier.
    pub(super) fn of_snapshot(part: &'a TierHashes) -> Result<Self, BlockReportError> {
        Self::new(part.tier, &part.hashes, &part.component_masks, &part.block_sizes)
    }

    /// Adds a part of these blocks to a worker's `blocks`. `range` selects them by their positions in the list.
    pub(super) fn store(&self, blocks: &mut WorkerBlocks, range: std::ops::Range<usize>) {
        for (place, hash) in range.clone().zip(self.hashes.get(range).unwrap_or_default()) {
            let of_list = |list: &[u32]| list.get(place).copied().unwrap_or_default();
            blocks.store(*hash, self.tier, of_list(self.components), of_list(self.tokens));
        }
    }
}

/// A change of a worker's blocks, from one action of a batch.
pub(super) enum BlockChange<'a> {
    Store(Stored<'a>),
    Remove(TierPlace, &'a [i64]),
    Clear(TierPlace),
}

impl<'a> BlockChange<'a> {
    /// Returns the changes of a batch. All actions are checked before any change is made.
    pub(super) fn all_of(actions: &'a [ExternalKvAction]) -> Result<Vec<Self>, BlockReportError> {
        let hashes: usize = actions.iter().map(|action| action.hashes.len()).sum();
        if actions.len() > ACTIONS_MAX || hashes > HASHES_MAX {
            return Err(BlockReportError::TooLarge);
        }
        actions.iter().map(Self::of).collect()
    }

    fn of(action: &'a ExternalKvAction) -> Result<Self, BlockReportError> {
        let hashes = &action.hashes;
        match ExternalKvActionType::try_from(action.r#type) {
            Ok(ExternalKvActionType::Report) => {
                let stored = Stored::new(action.tier, hashes, &action.component_masks, &action.block_sizes);
                Ok(Self::Store(stored?))
            }
            Ok(ExternalKvActionType::Revoke) => Ok(Self::Remove(tier(action.tier)?, hashes)),
            Ok(ExternalKvActionType::ClearAllAtTier) => Ok(Self::Clear(tier(action.tier)?)),
            Ok(ExternalKvActionType::Unknown) | Err(_) => Err(BlockReportError::Action(action.r#type)),
        }
    }

    /// Returns the maximum number of blocks that this change can add.
    pub(super) fn further(&self) -> usize {
        match self {
            Self::Store(stored) => stored.hashes.len(),
            Self::Remove(..) | Self::Clear(_) => 0,
        }
    }

    /// Makes the changes of a batch, in their order. All blocks are walked over once for each tier at most, however often
    /// the batch clears the tier.
    pub(super) fn make_all(changes: &[Self], blocks: &mut WorkerBlocks) {
        for (place, change) in changes.iter().enumerate() {
            match change {
                Self::Store(stored) => stored.store(blocks, 0..stored.hashes.len()),
                Self::Remove(tier, hashes) => hashes.iter().for_each(|hash| blocks.remove(*hash, *tier)),
                Self::Clear(tier) => Self::clear(*tier, changes.get(..place).unwrap_or_default(), blocks),
            }
        }
    }

    /// Removes all blocks from a tier. `before` has the changes of the same batch that have been made already.
    fn clear(tier: TierPlace, before: &[Self], blocks: &mut WorkerBlocks) {
        let is_clear = |change: &Self| matches!(change, Self::Clear(other) if *other == tier);
        let Some(last) = before.iter().rposition(is_clear) else {
            return blocks.clear(tier);
        };
        // The tier has no other blocks than those that the batch has stored since it cleared the tier.
        for change in before.iter().skip(last) {
            if let Self::Store(stored) = change
                && stored.tier == tier
            {
                stored.hashes.iter().for_each(|hash| blocks.remove(*hash, tier));
            }
        }
    }
}
