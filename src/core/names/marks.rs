//! Marks of a stored event, which tell which blocks of the event are resumable. While the event is being stored, the
//! marks are those of the remaining blocks. A request can continue after a resumable block. A block that is not
//! resumable is *barred*.

use crate::wire::Resumable;

/// Marks of the blocks that remain to be stored, as lengths of stretches. Stretches of resumable and of barred (not
/// resumable) blocks alternate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks<'a> {
    /// Lengths of the stretches after the current one. Blocks after the last stretch are barred (not resumable).
    runs: &'a [u32],
    /// Whether the next block is not resumable.
    pub(super) is_barred: bool,
    /// Number of remaining blocks in the current stretch: they are all resumable, or all barred.
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
