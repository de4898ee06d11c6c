//! Who holds how much of one run.

use smallvec::SmallVec;

use super::super::holder_set::{HolderSet, HolderSlot, SlotBits, SlotSet, slots_of};
use super::few::{Few, Packed, Share};

/// The holders of a run that has several, by how much of it they have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Coverage {
    /// Deepest first; no two are alike, and none is empty. Many holders mostly have the same: a common prompt.
    levels: SmallVec<[Level; 2]>,
}

/// Holders that have the same number of blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Level {
    cutoff: u16,
    holders: HolderSet,
}

/// The holders of a run at one instant.
#[derive(Debug, Clone, Copy)]
pub(crate) enum View<'a> {
    /// So few that a word says it all. Nobody where the run is coming or going.
    Few(Few),
    /// More.
    Many(&'a Coverage),
}

/// As [`View`], owned.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cover {
    Few(Packed),
    Many(Box<Coverage>),
}

impl View<'_> {
    /// The largest cutoff: how long the run is.
    #[inline]
    pub(crate) fn len(&self) -> u16 {
        match self {
            Self::Few(few) => few.len(),
            Self::Many(coverage) => coverage.levels.first().map_or(0, |level| level.cutoff),
        }
    }

    /// How many blocks of the run `slot` has.
    pub(crate) fn cutoff(&self, slot: HolderSlot) -> u16 {
        match self {
            Self::Few(few) => few.cutoff(slot),
            Self::Many(coverage) => coverage.cutoff(slot),
        }
    }

    /// The different cutoffs, the largest first; one may come several times.
    #[inline]
    pub(crate) fn cutoffs(&self) -> impl Iterator<Item = u16> + '_ {
        let (few, levels) = match self {
            Self::Few(few) => (few.holders(), Default::default()),
            Self::Many(coverage) => (Default::default(), coverage.levels.as_slice()),
        };
        let few = few.iter().map(|holder| holder.cutoff);
        few.chain(levels.iter().map(|level| level.cutoff))
    }

    /// Gives every cutoff to `each`, the largest first, with the holders that have just so much, or those `among` them.
    #[inline]
    pub(crate) fn for_each_level<S: SlotBits>(&self, among: Option<&S>, mut each: impl FnMut(u16, S)) {
        match self {
            Self::Few(few) => {
                for level in few.holders().chunk_by(|one, other| one.cutoff == other.cutoff) {
                    let slots = level.iter().map(|holder| holder.slot);
                    let slots = slots.filter(|slot| among.is_none_or(|among| among.contains(*slot)));
                    each(level[0].cutoff, slots_of(slots));
                }
            }
            Self::Many(coverage) => {
                for level in &coverage.levels {
                    let holders = &level.holders;
                    let slots = among.map_or_else(|| holders.to_slots(), |among| holders.intersection(among));
                    each(level.cutoff, slots);
                }
            }
        }
    }

    /// How many holders have more than `offset` blocks.
    pub(crate) fn holders_beyond(&self, offset: u16) -> usize {
        match self {
            Self::Few(few) => {
                let holders = few.holders().iter();
                holders.take_while(|holder| holder.cutoff > offset).count()
            }
            Self::Many(coverage) => {
                let levels = coverage.levels.iter();
                let levels = levels.take_while(|level| level.cutoff > offset);
                levels.map(|level| level.holders.len()).sum()
            }
        }
    }

    /// The holders after `slot` has got the cutoff `cutoff` (0: it has left).
    pub(super) fn with(&self, slot: HolderSlot, cutoff: u16) -> Cover {
        let mut coverage = match self {
            Self::Few(few) => {
                let next = few.with(Share { cutoff, slot });
                if let Some(packed) = next.and_then(Few::pack) {
                    return Cover::Few(packed);
                }
                Coverage::from(few)
            }
            Self::Many(coverage) => Coverage::clone(coverage),
        };
        coverage.set(slot, cutoff);
        coverage.into_cover()
    }
}

impl From<&Few> for Coverage {
    fn from(few: &Few) -> Self {
        let mut coverage = Self::default();
        for holder in few.holders() {
            coverage.set(holder.slot, holder.cutoff);
        }
        coverage
    }
}

impl Coverage {
    fn cutoff(&self, slot: HolderSlot) -> u16 {
        let own = self.levels.iter().find(|level| level.holders.contains(slot));
        own.map_or(0, |level| level.cutoff)
    }

    fn set(&mut self, slot: HolderSlot, cutoff: u16) {
        let left = self
            .levels
            .iter_mut()
            .position(|level| level.holders.remove(slot));
        if let Some(left) = left
            && self.levels[left].holders.is_empty()
        {
            self.levels.remove(left);
        }
        if cutoff == 0 {
            return;
        }
        match self.levels.binary_search_by(|level| cutoff.cmp(&level.cutoff)) {
            Ok(place) => {
                self.levels[place].holders.insert(slot);
            }
            Err(place) => {
                let holders = HolderSet::single(slot);
                self.levels.insert(place, Level { cutoff, holders });
            }
        }
    }

    fn into_cover(self) -> Cover {
        let packed = self.to_few().and_then(Few::pack);
        packed.map_or_else(|| Cover::Many(Box::new(self)), Cover::Few)
    }

    fn to_few(&self) -> Option<Few> {
        let mut few = Few::default();
        for level in &self.levels {
            let cutoff = level.cutoff;
            for slot in level.holders.to_slots::<SlotSet>().iter() {
                few.push(Share { cutoff, slot })?;
            }
        }
        Some(few)
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
                Self::Few(packed) => View::Few(packed.unpack()),
                Self::Many(coverage) => View::Many(coverage),
            }
        }
    }

    proptest! {
        #[test]
        fn a_coverage_equals_a_map(
            holders in 1_usize..40,
            changes in proptest::collection::vec((0_usize..40, 0_u16..6), 0..200),
        ) {
            let mut model: BTreeMap<usize, u16> = BTreeMap::new();
            let mut cover = Cover::Few(Packed::NOBODY);
            for (index, cutoff) in changes {
                let index = index % holders;
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
                let mut levels = Vec::new();
                view.for_each_level::<SlotSet>(None, |cutoff, slots| {
                    assert!(slots.iter().all(|slot| view.cutoff(slot) == cutoff));
                    levels.push((cutoff, slots.len()));
                });
                prop_assert!(levels.windows(2).all(|pair| pair[0].0 > pair[1].0));
                prop_assert_eq!(levels.iter().map(|(_, holders)| holders).sum::<usize>(), model.len());
                let mut cutoffs: Vec<u16> = view.cutoffs().collect();
                cutoffs.dedup();
                prop_assert_eq!(cutoffs, levels.iter().map(|(cutoff, _)| *cutoff).collect::<Vec<_>>());
                let some: SlotSet = (0..20).filter_map(|index| HolderSlot::new(index * 7)).collect();
                view.for_each_level(Some(&some), |cutoff, slots| {
                    let among = model.iter().filter(|(index, own)| **index < 20 && **own == cutoff);
                    assert_eq!(slots.len(), among.count());
                });
            }
        }
    }
}
