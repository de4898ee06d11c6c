//! Marks of a stored event: they tell which blocks of the event are resumable, for the blocks that are not stored yet.
//! A request can continue after a resumable block. A block that is not resumable is *barred*.

use crate::wire::Resumable;

/// Run lengths for the blocks not yet stored: stretches of resumable and of barred (not resumable) blocks alternate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks<'a> {
    /// Run lengths after the current one. Blocks after the last run are barred (not resumable).
    runs: &'a [u32],
    /// Whether the next block is not resumable.
    pub(super) is_barred: bool,
    /// Lower bound on the number of blocks, from the next block on, that are all resumable or all not resumable.
    pub(super) alike: usize,
}

impl<'a> Marks<'a> {
    /// Marks according to which all blocks are resumable.
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

    /// Skips the next `blocks` blocks.
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

    /// Returns for each remaining block whether it is barred (not resumable). The iterator has no end.
    pub(super) fn flags(mut self) -> impl Iterator<Item = bool> + use<'a> {
        std::iter::from_fn(move || {
            let is_barred = self.is_barred;
            self.skip(1);
            Some(is_barred)
        })
    }
}
