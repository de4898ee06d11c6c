//! One holder's share of one run: intervals of blocks, each with its tiers.

use smallvec::SmallVec;

use crate::index::directory::HolderSlot;
use crate::index::runs::{Barred, RosterEntry, STEPS};
use crate::wire::{Resumable, Tier};

/// Attributes that all blocks of an interval have in common.
///
/// The low byte has one bit for each tier. The next three bits stand for three classes of tiers: the device, the host,
/// and all other tiers. A bit is set if the blocks are *barred* (not resumable) in that class. It is 0 if no tier of
/// the class has the blocks.
///
/// The remaining high bits are the *note*. The share stores the note for its owner and does not interpret it. The note
/// is 0 if there is nothing to record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attributes(u16);

const BARRED_SHIFT: u32 = 8;
const BARRED: u16 = 0b111 << BARRED_SHIFT;
const NOTE_SHIFT: u32 = 11;

/// Returns the classes of `tiers`, one bit for each class: the device, the host, all others.
pub(crate) fn classes(tiers: u8) -> u8 {
    tiers & 0b11 | u8::from(tiers > 0b11) << 2
}

impl Attributes {
    pub(crate) fn new(tiers: u8, note: u8) -> Self {
        Self(u16::from(tiers)).with_note(note)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the low byte is meant")]
    pub(crate) fn tiers(self) -> u8 {
        self.0 as u8
    }

    /// Returns the note, whose meaning only the share's owner knows.
    #[allow(clippy::cast_possible_truncation, reason = "five bits are left")]
    pub(crate) fn note(self) -> u8 {
        (self.0 >> NOTE_SHIFT) as u8
    }

    /// Returns the same attributes with the note `note`, which has five bits.
    pub(crate) fn with_note(self, note: u8) -> Self {
        Self(self.0 & ((1 << NOTE_SHIFT) - 1) | u16::from(note) << NOTE_SHIFT)
    }

    pub(crate) fn with_tiers(self, tiers: u8) -> Self {
        let next = Self(self.0 & !0xff | u16::from(tiers));
        next.with_barred(self.barred() & classes(tiers))
    }

    pub(crate) fn with_more(self, tiers: u8) -> Self {
        Self(self.0 | u16::from(tiers))
    }

    /// Returns the classes of tiers in which the blocks are not resumable.
    #[allow(clippy::cast_possible_truncation, reason = "three bits are left")]
    pub(crate) fn barred(self) -> u8 {
        (self.0 >> BARRED_SHIFT) as u8 & 0b111
    }

    pub(crate) fn with_barred(self, classes: u8) -> Self {
        Self(self.0 & !BARRED | u16::from(classes) << BARRED_SHIFT)
    }

    /// Returns these attributes with the blocks marked in `tier`: as not resumable if `is_barred`, otherwise as
    /// resumable.
    pub(crate) fn marked(self, tier: Tier, is_barred: bool) -> Self {
        self.with_barred(marked(self.barred(), tier, is_barred))
    }

    /// Returns, for each step of tiers, whether a request cannot continue after these blocks in the tiers of the step.
    /// That is so if some of these tiers have the blocks, and the blocks are barred (not resumable) in the classes of
    /// all these tiers.
    fn barred_steps(self) -> [bool; STEPS] {
        let held = classes(self.tiers());
        [0b1, 0b11, 0b111].map(|step| held & step & !self.barred() == 0 && self.barred() & step != 0)
    }
}

/// Returns the classes of tiers in which a block is barred after an event. Barred means that no request can continue
/// after the block. The event says whether the block is barred in `tier`. `barred` are the classes in which it was
/// barred before the event.
pub(crate) fn marked(barred: u8, tier: Tier, is_barred: bool) -> u8 {
    let class = classes(tier_bit(tier));
    barred & !class | if is_barred { class } else { 0 }
}

pub(crate) fn tier_bit(tier: Tier) -> u8 {
    1 << tier.as_u8()
}

/// Interval: consecutive blocks with the same attributes, from the offset `from` up to the offset `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) from: u16,
    pub(crate) to: u16,
    pub(crate) attributes: Attributes,
}

/// One holder's share of one run: the intervals of blocks that the holder has there.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// Intervals in order. Two neighbouring intervals differ in their attributes or have a hole between them.
    intervals: SmallVec<[Interval; 2]>,
    /// End of the holder's blocks in the run, as last published to readers: one more than the offset of the last block.
    pub(crate) shown: u16,
    /// Likely place of the holder's entry in the run's roster.
    pub(crate) hint: u32,
}

/// Appends an interval. If it touches the last interval and has the same attributes, the two are merged. An empty
/// interval is not added.
fn push<A>(intervals: &mut SmallVec<A>, from: u16, to: u16, attributes: Attributes)
where
    A: smallvec::Array<Item = Interval>,
{
    match intervals.last_mut() {
        _ if from >= to => {}
        Some(last) if last.to == from && last.attributes == attributes => last.to = to,
        _ => intervals.push(Interval { from, to, attributes }),
    }
}

impl Part {
    /// One more than the offset of the last block; 0 if there is no block.
    pub(crate) fn end(&self) -> u16 {
        self.intervals.last().map_or(0, |last| last.to)
    }

    fn index_of(&self, offset: u16) -> usize {
        match self.intervals.as_slice() {
            [] => 0,
            [one] => usize::from(one.to <= offset),
            several => several.partition_point(|interval| interval.to <= offset),
        }
    }

    /// Returns the interval with the block at `offset`.
    pub(crate) fn interval_at(&self, offset: u16) -> Option<Interval> {
        let interval = *self.intervals.get(self.index_of(offset))?;
        (interval.from <= offset).then_some(interval)
    }

    pub(crate) fn get(&self, offset: u16) -> Option<Attributes> {
        Some(self.interval_at(offset)?.attributes)
    }

    /// Finds the stretch of blocks from `from` on that have the same attributes. Returns the end of the stretch, which
    /// is at most `to`, and the attributes. The attributes are `None` for a hole.
    pub(crate) fn extent(&self, from: u16, to: u16) -> (u16, Option<Attributes>) {
        match self.intervals.get(self.index_of(from)) {
            None => (to, None),
            Some(next) if next.from > from => (to.min(next.from), None),
            Some(own) => (to.min(own.to), Some(own.attributes)),
        }
    }

    /// Replaces the attributes of the blocks from `from` to `to`. `None` removes the blocks.
    pub(crate) fn set(&mut self, from: u16, to: u16, attributes: Option<Attributes>) {
        if from >= to {
            return;
        }
        if from >= self.end() {
            if let Some(own) = attributes {
                push(&mut self.intervals, from, to, own);
            }
            return;
        }
        // The window is the intervals that the change may touch, and one more on each side, which may be merged with
        // the new interval.
        let low = self.index_of(from).saturating_sub(1);
        let high = (self.index_of(to) + 1).min(self.intervals.len());
        let mut pieces: SmallVec<[Interval; 6]> = SmallVec::new();
        let window = &self.intervals[low..high];
        for old in window {
            push(&mut pieces, old.from, old.to.min(from), old.attributes);
        }
        if let Some(own) = attributes {
            push(&mut pieces, from, to, own);
        }
        for old in window {
            push(&mut pieces, old.from.max(to), old.to, old.attributes);
        }
        // The outer ends of the window are unchanged, so the pieces cannot be merged with intervals outside of the
        // window.
        self.intervals.drain(low..high);
        self.intervals.insert_from_slice(low, &pieces);
        if self.intervals.len() <= self.intervals.inline_size() {
            self.intervals.shrink_to_fit();
        }
    }

    /// Number of bytes that the intervals take beside the part itself. It is 0 without blocks.
    pub(crate) fn spilled_bytes(&self) -> usize {
        if self.intervals.spilled() {
            self.intervals.capacity() * size_of::<Interval>()
        } else {
            0
        }
    }

    /// Number of blocks from `from` to `to` that the holder has.
    pub(crate) fn held(&self, from: u16, to: u16) -> u16 {
        let behind = &self.intervals[self.index_of(from)..];
        let within = behind.iter().take_while(|interval| interval.from < to);
        within
            .map(|interval| interval.to.min(to) - interval.from.max(from))
            .sum()
    }

    /// Finds the stretch of blocks from `from` on whose [`Attributes`] differ at most in whether the blocks are barred.
    /// Returns the end of the stretch, which is at most `to`, and the attributes at `from`. The attributes are `None`
    /// for a hole.
    pub(crate) fn extent_alike(&self, from: u16, to: u16) -> (u16, Option<Attributes>) {
        let (mut end, held) = self.extent(from, to);
        let is_alike = |next: Option<Attributes>| {
            let (held, next) = (held?, next?);
            (held.with_barred(0) == next.with_barred(0)).then_some(())
        };
        while end < to && is_alike(self.get(end)).is_some() {
            end = self.extent(end, to).0;
        }
        (end, held)
    }

    /// Returns which of the blocks from `from` to `to` are resumable in a tier. The holder must have all of these
    /// blocks.
    pub(crate) fn resumable(&self, from: u16, to: u16, tier: Tier) -> Resumable {
        let class = classes(tier_bit(tier));
        let held = self.intervals[self.index_of(from)..]
            .iter()
            .take_while(|interval| interval.from < to);
        Resumable::from_flags(held.flat_map(|interval| {
            let blocks = interval.from.max(from)..interval.to.min(to);
            let is_resumable = interval.attributes.barred() & class == 0;
            blocks.map(move |_| is_resumable)
        }))
    }

    /// Returns the stretches of blocks that are not resumable.
    pub(crate) fn barred(&self) -> impl Iterator<Item = Barred> + '_ {
        let barred = |interval: &Interval| {
            let steps = interval.attributes.barred_steps();
            let Interval { from, to, .. } = *interval;
            steps.contains(&true).then_some(Barred { from, to, steps })
        };
        self.intervals.iter().filter_map(barred)
    }

    /// Whether the part is empty or simple: only leading blocks, all resumable, all in one tier, with the note 0.
    pub(crate) fn is_simple(&self) -> bool {
        match self.intervals.as_slice() {
            [] => true,
            [one] if one.from == 0 => {
                let own = one.attributes;
                own.note() == 0 && own.tiers().is_power_of_two() && own.barred() == 0
            }
            _ => false,
        }
    }

    /// Number of leading blocks that lie in any of `tiers`.
    fn reach(&self, tiers: u8) -> u16 {
        let mut reach = 0;
        for interval in &self.intervals {
            if interval.from != reach || interval.attributes.tiers() & tiers == 0 {
                break;
            }
            reach = interval.to;
        }
        reach
    }

    /// Returns the roster entry by which readers see the holder's blocks of the run.
    pub(crate) fn entry(&self, slot: HolderSlot) -> RosterEntry {
        if self.intervals.is_empty() {
            return RosterEntry::default();
        }
        let reaches = [0b1, 0b11, u8::MAX].map(|tiers| self.reach(tiers));
        RosterEntry::new(slot, reaches, self.end())
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_lab::random::Random;

    use super::*;

    #[test]
    fn a_part_equals_an_array() {
        let mut random = Random::new(3);
        for _ in 0..200 {
            let mut part = Part::default();
            let mut model: [Option<Attributes>; 40] = [None; 40];
            for _ in 0..60 {
                let (one, other) = (random.below(41), random.below(41));
                let (from, to) = (one.min(other), one.max(other));
                let tiers = [0, 1, 2, 3][random.below(4)];
                let note = u8::from(random.chance(20));
                let attributes = (tiers > 0).then(|| Attributes::new(tiers, note));
                model[from..to].fill(attributes);
                part.set(
                    u16::try_from(from).unwrap(),
                    u16::try_from(to).unwrap(),
                    attributes,
                );
                for (offset, expected) in (0..).zip(&model) {
                    assert_eq!(part.get(offset), *expected);
                }
                let held = model[from..].iter().flatten().count();
                let from = u16::try_from(from).unwrap();
                assert_eq!(usize::from(part.held(from, u16::MAX)), held);
                let differs =
                    |pair: &[Interval]| pair[0].to < pair[1].from || pair[0].attributes != pair[1].attributes;
                assert!(part.intervals.windows(2).all(differs));
                let reach = |bits: u8| {
                    let has = |held: &&Option<Attributes>| held.is_some_and(|held| held.tiers() & bits != 0);
                    model.iter().take_while(has).count()
                };
                assert_eq!(
                    [1, 2, 255].map(|bits| usize::from(part.reach(bits))),
                    [1, 2, 255].map(reach)
                );
            }
        }
    }
}
