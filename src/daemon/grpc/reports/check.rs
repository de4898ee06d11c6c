//! Reports as they come, and what is wrong with them.

use tonic::{Code, Status};

use super::super::messages::{ExternalKvAction, ExternalKvActionType, TierHashes};
use super::blocks::{Blocks, TierPlace};

/// Actions of one batch, at most.
const ACTIONS_MAX: usize = 256;
/// Hashes of one batch, at most.
const HASHES_MAX: usize = 16_384;
/// Bytes of a name, an address or an epoch, at most.
const TEXT_BYTES_MAX: usize = 256;
/// Workers that are reported, at most.
pub(super) const WORKERS_MAX: usize = 4096;

/// Why a report is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum ReportError {
    /// A text.
    #[error("{0} must have up to {TEXT_BYTES_MAX} bytes, and no control characters")]
    Text(&'static str),
    /// A text that is needed.
    #[error("{0} must not be empty")]
    Empty(&'static str),
    /// A tier.
    #[error("tier {0} is none of HBM, DRAM and SSD")]
    Tier(i32),
    /// An action.
    #[error("action type {0} is none of REPORT, REVOKE and CLEAR_ALL_AT_TIER")]
    Action(i32),
    /// A list beside the hashes.
    #[error("{list} has {given} entries: none, or one for each of the {hashes} hashes")]
    Unaligned {
        /// The list.
        list: &'static str,
        /// Its length.
        given: usize,
        /// The hashes.
        hashes: usize,
    },
    /// Too much in a batch.
    #[error("a batch has up to {ACTIONS_MAX} actions and {HASHES_MAX} hashes; send a snapshot instead")]
    TooLarge,
    /// Too many workers.
    #[error("{0} workers are too many: {WORKERS_MAX} at most")]
    TooManyWorkers(usize),
    /// A worker that nobody has announced.
    #[error("the worker has not been configured: send ConfigureExpectedWorkers")]
    Unexpected,
    /// A batch without a number that counts.
    #[error(
        "a batch needs worker_epoch and enforce_sequence: without them nobody would notice that one is lost"
    )]
    Unnumbered,
    /// No snapshot has come.
    #[error("no snapshot of this epoch is here: send ReplaceExternalKvSnapshot")]
    NoSnapshot,
    /// A batch is missing.
    #[error("batch {expected} is missing before {given}: send ReplaceExternalKvSnapshot")]
    Gap {
        /// The next number.
        expected: u64,
        /// The number that came.
        given: u64,
    },
    /// No room.
    #[error("reports take too much room (grpc.max_reported_bytes)")]
    NoRoom,
}

impl From<ReportError> for Status {
    fn from(error: ReportError) -> Self {
        use ReportError as Why;
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

/// Checks a text that may be empty.
pub(super) fn check_text(name: &'static str, text: &str) -> Result<(), ReportError> {
    let is_sound = text.len() <= TEXT_BYTES_MAX && !text.contains(char::is_control);
    is_sound.then_some(()).ok_or(ReportError::Text(name))
}

/// Checks a text that must be there.
pub(super) fn check_name(name: &'static str, text: &str) -> Result<(), ReportError> {
    match text.is_empty() {
        true => Err(ReportError::Empty(name)),
        false => check_text(name, text),
    }
}

fn tier(number: i32) -> Result<TierPlace, ReportError> {
    TierPlace::of_wire(number).ok_or(ReportError::Tier(number))
}

/// Blocks that a tier has.
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
    ) -> Result<Self, ReportError> {
        for (list, given) in [
            ("component_masks", components.len()),
            ("block_sizes", tokens.len()),
        ] {
            if given != 0 && given != hashes.len() {
                let hashes = hashes.len();
                return Err(ReportError::Unaligned { list, given, hashes });
            }
        }
        Ok(Self {
            tier: tier(number)?,
            hashes,
            components,
            tokens,
        })
    }

    /// The blocks of a tier in a snapshot.
    pub(super) fn of_snapshot(part: &'a TierHashes) -> Result<Self, ReportError> {
        Self::new(part.tier, &part.hashes, &part.component_masks, &part.block_sizes)
    }

    /// Stores the blocks in `range`.
    pub(super) fn store(&self, blocks: &mut Blocks, range: std::ops::Range<usize>) {
        for (place, hash) in range.clone().zip(self.hashes.get(range).unwrap_or_default()) {
            let of_list = |list: &[u32]| list.get(place).copied().unwrap_or_default();
            blocks.store(*hash, self.tier, of_list(self.components), of_list(self.tokens));
        }
    }
}

/// A change of a worker's blocks.
pub(super) enum Change<'a> {
    Store(Stored<'a>),
    Remove(TierPlace, &'a [i64]),
    Clear(TierPlace),
}

impl<'a> Change<'a> {
    /// The changes of a batch. All of it is checked before any of it is made.
    pub(super) fn all_of(actions: &'a [ExternalKvAction]) -> Result<Vec<Self>, ReportError> {
        let hashes: usize = actions.iter().map(|action| action.hashes.len()).sum();
        if actions.len() > ACTIONS_MAX || hashes > HASHES_MAX {
            return Err(ReportError::TooLarge);
        }
        actions.iter().map(Self::of).collect()
    }

    fn of(action: &'a ExternalKvAction) -> Result<Self, ReportError> {
        let hashes = &action.hashes;
        match ExternalKvActionType::try_from(action.r#type) {
            Ok(ExternalKvActionType::Report) => {
                let stored = Stored::new(action.tier, hashes, &action.component_masks, &action.block_sizes);
                Ok(Self::Store(stored?))
            }
            Ok(ExternalKvActionType::Revoke) => Ok(Self::Remove(tier(action.tier)?, hashes)),
            Ok(ExternalKvActionType::ClearAllAtTier) => Ok(Self::Clear(tier(action.tier)?)),
            Ok(ExternalKvActionType::Unknown) | Err(_) => Err(ReportError::Action(action.r#type)),
        }
    }

    /// Blocks that it may add.
    pub(super) fn further(&self) -> usize {
        match self {
            Self::Store(stored) => stored.hashes.len(),
            Self::Remove(..) | Self::Clear(_) => 0,
        }
    }

    pub(super) fn make(&self, blocks: &mut Blocks) {
        match self {
            Self::Store(stored) => stored.store(blocks, 0..stored.hashes.len()),
            Self::Remove(tier, hashes) => hashes.iter().for_each(|hash| blocks.remove(*hash, *tier)),
            Self::Clear(tier) => blocks.clear(*tier),
        }
    }
}
