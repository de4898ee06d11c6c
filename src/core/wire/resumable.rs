//! Marks on the blocks of an event that tell after which blocks a request can resume.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::hash::{PositionalLineageHash, SequenceHash};

use super::error::DecodeError;

/// Marks that tell which blocks of a list are resumable. A request can continue after a resumable block, because
/// every group of layers still has the state that is needed there.
///
/// By default all blocks are resumable. Otherwise the value is a list of run lengths. Runs alternate, and the first
/// run counts blocks that are not resumable. Blocks after the last run are not resumable. Examples for 1,000 blocks:
/// `[999, 1]` if only the last is resumable, and `[]` if none is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Resumable(Option<Vec<u32>>);

impl Resumable {
    /// Marks according to which all blocks are resumable.
    pub const ALL: Self = Self(None);

    /// Returns marks according to which no request can resume after any block.
    pub fn none() -> Self {
        Self(Some(Vec::new()))
    }

    /// Makes marks from the run lengths of a message. Together the runs must count at most `blocks` blocks, and only
    /// the first run may be 0.
    ///
    /// # Errors
    ///
    /// [`DecodeError::LengthMismatch`] if the runs count more blocks. [`DecodeError::Combination`] for an empty run
    /// after the first.
    pub fn from_runs(runs: Vec<u32>, blocks: usize) -> Result<Self, DecodeError> {
        if runs.iter().skip(1).any(|run| *run == 0) {
            return Err(DecodeError::Combination(
                "resumable has a run of no blocks; only the first may be 0",
            ));
        }
        let count = runs
            .iter()
            .fold(0_usize, |sum, run| sum.saturating_add(*run as usize));
        if count > blocks {
            let field = "resumable";
            return Err(DecodeError::LengthMismatch { field, count, blocks });
        }
        Ok(Self(Some(runs)))
    }

    /// Makes marks from one flag for each block, in the blocks' order.
    pub fn from_flags(flags: impl IntoIterator<Item = bool>) -> Self {
        let mut runs = Runs::default();
        flags.into_iter().for_each(|flag| runs.push(flag, 1));
        runs.finish()
    }

    /// Whether all blocks are resumable, for any number of blocks.
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the run lengths for a message. `None` if all blocks are resumable.
    pub fn runs(&self) -> Option<&[u32]> {
        self.0.as_deref()
    }

    /// Returns the blocks as ranges. In each range, either all blocks are resumable (flag `true`) or none is (`false`).
    /// The ranges cover `blocks` blocks, in order and without a gap.
    pub fn stretches(&self, blocks: usize) -> impl Iterator<Item = (Range<usize>, bool)> + '_ {
        let (mut runs, mut next, mut flag) = (self.0.as_deref().map(|runs| runs.iter()), 0, true);
        std::iter::from_fn(move || {
            while next < blocks {
                let length = match &mut runs {
                    None => blocks,
                    Some(runs) => {
                        flag = !flag;
                        let rest = |flag: &mut bool| {
                            *flag = false;
                            blocks
                        };
                        runs.next().map_or_else(|| rest(&mut flag), |run| *run as usize)
                    }
                };
                let end = next.saturating_add(length).min(blocks);
                let stretch = next..end;
                next = end;
                if !stretch.is_empty() {
                    return Some((stretch, flag));
                }
            }
            None
        })
    }

    /// Returns the marks for a part of the `blocks` blocks: those in the range `part`. In the result, the first block
    /// of the range is number 0.
    #[must_use]
    pub fn part(&self, part: Range<usize>, blocks: usize) -> Self {
        if self.is_all() {
            return Self::ALL;
        }
        let mut runs = Runs::default();
        for (stretch, flag) in self.stretches(blocks) {
            let common = stretch.start.max(part.start)..stretch.end.min(part.end);
            runs.push(flag, common.len());
        }
        runs.finish()
    }
}

/// Builder of run lengths, which tell which blocks of a list are resumable.
#[derive(Default)]
struct Runs {
    lengths: Vec<u32>,
    has_gap: bool,
}

impl Runs {
    fn push(&mut self, flag: bool, blocks: usize) {
        if blocks == 0 {
            return;
        }
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        self.has_gap |= !flag;
        // Runs at even indices are not resumable.
        let is_next = (self.lengths.len() % 2 == 1) == flag;
        match self.lengths.last_mut() {
            Some(last) if !is_next => *last = last.saturating_add(blocks),
            Some(_) => self.lengths.push(blocks),
            None if flag => self.lengths.extend([0, blocks]),
            None => self.lengths.push(blocks),
        }
    }

    fn finish(mut self) -> Resumable {
        if !self.has_gap {
            return Resumable::ALL;
        }
        // A last run of blocks that are not resumable need not be written.
        if self.lengths.len() % 2 == 1 {
            self.lengths.pop();
        }
        Resumable(Some(self.lengths))
    }
}

/// Blocks that became resumable, or stopped being resumable, in the batch's tier. Blocks that the holder does not
/// have in that tier are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResumableBlocks {
    /// Hashes of the blocks: engine hashes if the blocks were stored with engine hashes, otherwise sequence hashes.
    pub hashes: Vec<SequenceHash>,
    /// Lineage hashes of the blocks.
    pub lineage_hashes: Vec<PositionalLineageHash>,
    /// Whether the blocks are resumable from now on.
    pub resumable: bool,
}

impl ResumableBlocks {
    /// Returns an event's blocks that are named by sequence or engine hashes.
    pub fn by_sequence(hashes: Vec<SequenceHash>, resumable: bool) -> Self {
        Self {
            hashes,
            lineage_hashes: Vec::new(),
            resumable,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flags(resumable: &Resumable, blocks: usize) -> Vec<bool> {
        let stretches = resumable.stretches(blocks);
        stretches
            .flat_map(|(stretch, flag)| stretch.map(move |_| flag))
            .collect()
    }

    #[test]
    fn runs_alternate_and_the_rest_is_not_resumable() {
        let of = |runs: &[u32], blocks| Resumable::from_runs(runs.to_vec(), blocks).unwrap();
        assert_eq!(flags(&Resumable::ALL, 3), [true; 3]);
        assert_eq!(flags(&Resumable::none(), 3), [false; 3]);
        assert_eq!(flags(&of(&[2, 1], 4), 4), [false, false, true, false]);
        assert_eq!(flags(&of(&[0, 1, 1, 1], 3), 3), [true, false, true]);
        assert_eq!(Resumable::from_flags([false, false, true]), of(&[2, 1], 3));
        assert_eq!(Resumable::from_flags([true, true]), Resumable::ALL);
        assert!(Resumable::from_runs(vec![1, 0, 1], 9).is_err());
        assert!(Resumable::from_runs(vec![2, 1], 2).is_err());
        assert!(Resumable::from_runs(vec![u32::MAX; 3], 2).is_err());
    }

    proptest! {
        #[test]
        fn flags_and_their_parts_come_back(
            given in proptest::collection::vec(any::<bool>(), 0..40), from in 0_usize..40, length in 0_usize..40,
        ) {
            let resumable = Resumable::from_flags(given.iter().copied());
            prop_assert_eq!(&flags(&resumable, given.len()), &given);
            let runs = resumable.runs().unwrap_or_default().to_vec();
            prop_assert!(Resumable::from_runs(runs, given.len()).is_ok());
            let part = from.min(given.len())..from.saturating_add(length).min(given.len());
            let part = part.start..part.end.max(part.start);
            let cut = resumable.part(part.clone(), given.len());
            prop_assert_eq!(&flags(&cut, part.len()), &given[part]);
        }
    }
}
