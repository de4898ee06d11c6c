//! Who holds how much of one run.

use smallvec::SmallVec;

use super::super::holder_set::{HolderSet, HolderSlot, SlotSet};

/// A holder that has only a prefix of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Partial {
    /// How many blocks it has; at least 1, less than the run's length.
    pub(crate) cutoff: u16,
    pub(crate) slot: HolderSlot,
}

/// The holders of a run that has several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Coverage {
    /// The largest cutoff, which is the run's length; at least 1.
    len: u16,
    /// The holders of the whole run; never none.
    full: HolderSet,
    /// The others, deepest first.
    partial: SmallVec<[Partial; 4]>,
}

/// The holders of a run at one instant.
#[derive(Debug, Clone, Copy)]
pub(crate) enum View<'a> {
    /// Nobody: the run is coming or going.
    Nobody,
    /// One holder has all of it.
    One { slot: HolderSlot, len: u16 },
    /// Several.
    Many(&'a Coverage),
}

/// As [`View`], owned.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cover {
    Nobody,
    One { slot: HolderSlot, len: u16 },
    Many(Box<Coverage>),
}

impl View<'_> {
    /// The largest cutoff: how long the run is.
    pub(crate) fn len(&self) -> u16 {
        match self {
            Self::Nobody => 0,
            Self::One { len, .. } => *len,
            Self::Many(coverage) => coverage.len,
        }
    }

    /// How many blocks of the run `slot` has.
    pub(crate) fn cutoff(&self, slot: HolderSlot) -> u16 {
        match self {
            Self::Nobody => 0,
            Self::One { slot: only, len } => {
                if *only == slot {
                    *len
                } else {
                    0
                }
            }
            Self::Many(coverage) => coverage.cutoff(slot),
        }
    }

    /// The holders of the whole run, or those `among` them.
    pub(crate) fn full(&self, among: Option<&SlotSet>) -> SlotSet {
        match (self, among) {
            (Self::Nobody, _) => SlotSet::default(),
            (Self::One { slot, .. }, None) => SlotSet::from_iter([*slot]),
            (Self::One { slot, .. }, Some(among)) => {
                let is_among = among.contains(*slot);
                is_among.then_some(*slot).into_iter().collect()
            }
            (Self::Many(coverage), None) => coverage.full.to_slots(),
            (Self::Many(coverage), Some(among)) => coverage.full.intersection(among),
        }
    }

    /// The holders of a shorter prefix, deepest first.
    pub(crate) fn partial(&self) -> &[Partial] {
        match self {
            Self::Many(coverage) => &coverage.partial,
            _ => &[],
        }
    }

    /// How many holders have more than `offset` blocks.
    pub(crate) fn holders_beyond(&self, offset: u16) -> usize {
        if offset >= self.len() {
            return 0;
        }
        let full = match self {
            Self::Many(coverage) => coverage.full.len(),
            _ => 1,
        };
        full + self
            .partial()
            .iter()
            .take_while(|partial| partial.cutoff > offset)
            .count()
    }

    /// The holders after `slot` has got the cutoff `cutoff` (0: it has left).
    pub(super) fn with(&self, slot: HolderSlot, cutoff: u16) -> Cover {
        match self {
            Self::Nobody if cutoff == 0 => Cover::Nobody,
            Self::Nobody => Cover::One { slot, len: cutoff },
            Self::One { slot: only, .. } if *only == slot => View::Nobody.with(slot, cutoff),
            Self::One { slot: only, len } => {
                let mut coverage = Coverage {
                    len: *len,
                    full: HolderSet::single(*only),
                    partial: SmallVec::new(),
                };
                coverage.set(slot, cutoff);
                coverage.into_cover()
            }
            Self::Many(coverage) => {
                let mut coverage = Coverage::clone(coverage);
                coverage.set(slot, cutoff);
                coverage.into_cover()
            }
        }
    }
}

impl Coverage {
    fn cutoff(&self, slot: HolderSlot) -> u16 {
        if self.full.contains(slot) {
            return self.len;
        }
        let own = self.partial.iter().find(|partial| partial.slot == slot);
        own.map_or(0, |own| own.cutoff)
    }

    fn set(&mut self, slot: HolderSlot, cutoff: u16) {
        if !self.full.remove(slot) {
            self.partial.retain(|partial| partial.slot != slot);
        }
        if cutoff > self.len {
            self.demote_full();
            self.len = cutoff;
        }
        if cutoff == self.len {
            self.full.insert(slot);
        } else if cutoff > 0 {
            self.insert_partial(Partial { cutoff, slot });
        }
        if self.full.is_empty() {
            self.promote_deepest();
        }
    }

    fn insert_partial(&mut self, own: Partial) {
        let place = self
            .partial
            .partition_point(|partial| partial.cutoff >= own.cutoff);
        self.partial.insert(place, own);
    }

    /// The run becomes longer than all that had the whole of it.
    fn demote_full(&mut self) {
        let cutoff = self.len;
        let demoted = self.full.to_slots();
        let demoted = demoted.iter().map(|slot| Partial { cutoff, slot });
        self.partial.insert_many(0, demoted);
        self.full = HolderSet::default();
    }

    /// The run becomes as short as what the deepest of the others have.
    fn promote_deepest(&mut self) {
        self.len = self.partial.first().map_or(0, |deepest| deepest.cutoff);
        let count = self
            .partial
            .iter()
            .take_while(|partial| partial.cutoff == self.len)
            .count();
        for promoted in self.partial.drain(..count) {
            self.full.insert(promoted.slot);
        }
    }

    fn into_cover(self) -> Cover {
        match (self.full.only(), self.partial.is_empty()) {
            _ if self.len == 0 => Cover::Nobody,
            (Some(slot), true) => Cover::One { slot, len: self.len },
            _ => Cover::Many(Box::new(self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl Cover {
        fn view(&self) -> View<'_> {
            match self {
                Self::Nobody => View::Nobody,
                Self::One { slot, len } => View::One {
                    slot: *slot,
                    len: *len,
                },
                Self::Many(coverage) => View::Many(coverage),
            }
        }
    }

    proptest! {
        #[test]
        fn a_coverage_equals_a_map(changes in proptest::collection::vec((0_usize..40, 0_u16..6), 0..200)) {
            let mut model: BTreeMap<usize, u16> = BTreeMap::new();
            let mut cover = Cover::Nobody;
            for (index, cutoff) in changes {
                let slot = HolderSlot::new(index * 7).unwrap();
                cover = cover.view().with(slot, cutoff);
                model.insert(index, cutoff);
                model.retain(|_, cutoff| *cutoff > 0);
                let view = cover.view();
                prop_assert_eq!(view.len(), model.values().copied().max().unwrap_or(0));
                for index in 0..40 {
                    let slot = HolderSlot::new(index * 7).unwrap();
                    prop_assert_eq!(view.cutoff(slot), model.get(&index).copied().unwrap_or(0));
                }
                for offset in 0..7 {
                    let beyond = model.values().filter(|cutoff| **cutoff > offset).count();
                    prop_assert_eq!(view.holders_beyond(offset), beyond);
                }
                let deepest_first = view.partial().windows(2).all(|pair| pair[0].cutoff >= pair[1].cutoff);
                prop_assert!(deepest_first);
                prop_assert!(view.partial().iter().all(|partial| partial.cutoff < view.len()));
            }
        }
    }
}
