//! Which blocks of a stored event are resumable, as far as the event has been stored.

use crate::wire::Resumable;

/// Bars or frees the blocks to come, one run length after the other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks<'a> {
    /// The run lengths behind the current one; blocks behind the last are barred.
    runs: &'a [u32],
    /// Whether the next block is not resumable.
    pub(super) is_barred: bool,
    /// How many blocks from the next one on are alike, at least.
    pub(super) alike: usize,
}

impl<'a> Marks<'a> {
    /// All blocks are resumable.
    pub(super) const ALL: Self = Self {
        runs: &[],
        is_barred: false,
        alike: usize::MAX,
    };

    pub(super) fn of(resumable: &'a Resumable) -> Self {
        let Some(runs) = resumable.runs() else {
            return Self::ALL;
        };
        let mut marks = Self {
            runs,
            is_barred: false,
            alike: 0,
        };
        marks.skip(0);
        marks
    }

    /// Passes blocks.
    pub(super) fn skip(&mut self, mut blocks: usize) {
        while blocks >= self.alike {
            blocks -= self.alike;
            let next = self.runs.split_first();
            (self.is_barred, self.alike) = match next {
                Some((length, _)) => (!self.is_barred, *length as usize),
                None => (true, usize::MAX),
            };
            self.runs = next.map_or(&[], |(_, rest)| rest);
        }
        self.alike -= blocks;
    }

    /// Whether each block to come is barred; without an end.
    pub(super) fn flags(mut self) -> impl Iterator<Item = bool> + use<'a> {
        std::iter::from_fn(move || {
            let is_barred = self.is_barred;
            self.skip(1);
            Some(is_barred)
        })
    }
}
