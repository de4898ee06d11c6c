//! One holder's share of one run: intervals, each with its tiers, and the engine's names.

use smallvec::SmallVec;

use super::copies::{Aliases, Copies};
use super::orphans::Alias;

use crate::index::directory::HolderSlot;
use crate::index::runs::{Barred, Entry, STEPS};
use crate::wire::{Resumable, Tier};

/// The attributes that all blocks of an interval have in common.
///
/// The low byte has one bit for each tier. Above it stand the form in which the engine names the blocks, and whether
/// their whole hashes are known. The highest bits tell in which classes of tiers the blocks are *barred*, which means
/// not resumable. The classes are the device, the host, and all other tiers. The bit of a class in which the blocks do
/// not lie is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes(u16);

/// How the engine names a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// By its lineage hash alone.
    Nameless,
    /// By its sequence hash.
    Hash,
    /// By one name of its own, which is kept in the part.
    Own,
    /// By several names.
    Many,
}

const FORM_SHIFT: u32 = 8;
/// Bit that tells that the holder knows the whole sequence hash.
const WHOLE: u16 = 1 << 10;
const BARRED_SHIFT: u32 = 11;
const BARRED: u16 = 0b111 << BARRED_SHIFT;

/// Returns the classes of these tiers, one bit each: the device, the host, all others.
pub(super) fn classes(tiers: u8) -> u8 {
    tiers & 0b11 | u8::from(tiers > 0b11) << 2
}

impl Attributes {
    pub(super) fn new(tiers: u8, form: Form, is_whole: bool) -> Self {
        let whole = if is_whole { WHOLE } else { 0 };
        Self(u16::from(tiers) | (form as u16) << FORM_SHIFT | whole)
    }

    #[allow(clippy::cast_possible_truncation, reason = "the low byte is meant")]
    pub(super) fn tiers(self) -> u8 {
        self.0 as u8
    }

    pub(super) fn form(self) -> Form {
        match self.0 >> FORM_SHIFT & 3 {
            0 => Form::Nameless,
            1 => Form::Hash,
            2 => Form::Own,
            _ => Form::Many,
        }
    }

    pub(super) fn is_whole(self) -> bool {
        self.0 & WHOLE != 0
    }

    pub(super) fn with_tiers(self, tiers: u8) -> Self {
        let next = Self(self.0 & !0xff | u16::from(tiers));
        next.with_barred(self.barred() & classes(tiers))
    }

    pub(super) fn with_more(self, tiers: u8) -> Self {
        Self(self.0 | u16::from(tiers))
    }

    pub(super) fn with_whole(self, is_whole: bool) -> Self {
        Self(self.0 | if is_whole { WHOLE } else { 0 })
    }

    pub(super) fn with_form(self, form: Form) -> Self {
        Self(self.0 & !(0b11 << FORM_SHIFT) | (form as u16) << FORM_SHIFT)
    }

    /// Returns the classes of tiers in which the blocks are not resumable.
    #[allow(clippy::cast_possible_truncation, reason = "three bits are left")]
    pub(super) fn barred(self) -> u8 {
        (self.0 >> BARRED_SHIFT) as u8 & 0b111
    }

    pub(super) fn with_barred(self, classes: u8) -> Self {
        Self(self.0 & !BARRED | u16::from(classes) << BARRED_SHIFT)
    }

    /// Returns the attributes after the blocks have been barred, or freed, in one of their tiers.
    pub(super) fn marked(self, tier: Tier, is_barred: bool) -> Self {
        self.with_barred(marked(self.barred(), tier, is_barred))
    }

    /// Returns for each step of tiers whether the blocks are not resumable in it: they are barred in all its classes in
    /// which they lie. For a step in whose tiers the blocks do not lie it is false.
    fn barred_steps(self) -> [bool; STEPS] {
        let held = classes(self.tiers());
        [0b1, 0b11, 0b111].map(|step| held & step & !self.barred() == 0 && self.barred() & step != 0)
    }
}

/// Returns the classes of `barred` after an event that tells whether blocks are barred in `tier`.
pub(super) fn marked(barred: u8, tier: Tier, is_barred: bool) -> u8 {
    let class = classes(tier_bit(tier));
    barred & !class | if is_barred { class } else { 0 }
}

pub(super) fn tier_bit(tier: Tier) -> u8 {
    1 << tier.as_u8()
}

/// Blocks with the same attributes, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interval {
    pub(super) from: u16,
    pub(super) to: u16,
    pub(super) attributes: Attributes,
}

/// One holder's share of one run.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// Intervals in order. Neighbours differ in their attributes or have a hole between them.
    intervals: SmallVec<[Interval; 2]>,
    /// First names of blocks that have names of their own, from the offset `names_from` on. Entries of other blocks
    /// mean nothing.
    names: Vec<u64>,
    names_from: u16,
    /// Names after the first, of blocks that have several.
    copies: Option<Box<Copies>>,
    /// End of the blocks, as readers were last told.
    pub(super) shown: u16,
    /// Likely place of the holder's entry in the run's roster.
    pub(super) hint: u32,
}

/// Adds an interval at the end, which is joined to the last interval if that touches it and has the same attributes. An
/// empty interval is not added.
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
    /// One more than the offset of the last block; 0 where there is none.
    pub(super) fn end(&self) -> u16 {
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
    pub(super) fn interval_at(&self, offset: u16) -> Option<Interval> {
        let interval = *self.intervals.get(self.index_of(offset))?;
        (interval.from <= offset).then_some(interval)
    }

    pub(super) fn get(&self, offset: u16) -> Option<Attributes> {
        Some(self.interval_at(offset)?.attributes)
    }

    /// Returns the offset up to which the attributes are the same as at `from`, `to` at most, and these attributes.
    /// They are `None` for a hole.
    pub(super) fn extent(&self, from: u16, to: u16) -> (u16, Option<Attributes>) {
        match self.intervals.get(self.index_of(from)) {
            None => (to, None),
            Some(next) if next.from > from => (to.min(next.from), None),
            Some(own) => (to.min(own.to), Some(own.attributes)),
        }
    }

    /// Replaces the attributes of the blocks from `from` to `to`. `None` removes the blocks.
    pub(super) fn set(&mut self, from: u16, to: u16, attributes: Option<Attributes>) {
        if from >= to {
            return;
        }
        if from >= self.end() {
            if let Some(own) = attributes {
                push(&mut self.intervals, from, to, own);
            }
            return;
        }
        // The window has one more interval on each side, which may be joined to the new one.
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
        // Both ends of the window stay what they are, so nothing beyond it can become one with them.
        self.intervals.drain(low..high);
        self.intervals.insert_from_slice(low, &pieces);
        let kept = usize::from(self.end().saturating_sub(self.names_from));
        self.names.truncate(kept);
        if self.names.capacity() > 256 && self.names.len() < self.names.capacity() / 3 {
            self.names.shrink_to(self.names.len() * 3 / 2);
        }
    }

    /// Returns the first name of the block at `offset`, if it has names of its own. Otherwise the result means nothing.
    pub(super) fn name(&self, offset: u16) -> u64 {
        let index = usize::from(offset).wrapping_sub(usize::from(self.names_from));
        self.names.get(index).copied().unwrap_or(0)
    }

    /// Whether the block at `offset`, which has names of its own, has this name.
    #[inline]
    pub(super) fn has_name(&self, offset: u16, name: u64) -> bool {
        let copies = self.copies.as_ref();
        self.name(offset) == name || copies.is_some_and(|copies| copies.has(offset, name))
    }

    /// Returns the names of a block that has its own, oldest first. `tiers` are the tiers of the block.
    pub(super) fn aliases(&self, offset: u16, tiers: u8) -> Aliases {
        let name = self.name(offset);
        let mut names = Aliases::from_iter([Alias { name, tiers }]);
        if let Some(copies) = &self.copies {
            copies.add_to(offset, &mut names);
        }
        names
    }

    /// Whether a block with names of its own can get one more.
    pub(super) fn has_room(&self, offset: u16) -> bool {
        self.copies.as_ref().is_none_or(|copies| copies.has_room(offset))
    }

    /// Adds a further name to a block that has room for it and is in `tiers`.
    pub(super) fn add_name(&mut self, offset: u16, tiers: u8, alias: Alias) {
        let mut names = self.aliases(offset, tiers);
        names.push(alias);
        self.copies.get_or_insert_default().set(offset, &names);
    }

    /// Replaces the names of a block that has names of its own. `names` is empty if the block is gone.
    pub(super) fn set_aliases(&mut self, offset: u16, names: &[Alias]) {
        if let Some(first) = names.first() {
            self.set_names(offset, &[first.name]);
        }
        if names.len() > 1 || self.copies.is_some() {
            let copies = self.copies.get_or_insert_default();
            copies.set(offset, names);
            if copies.is_empty() {
                self.copies = None;
            }
        }
    }

    /// Bytes of the names after the first.
    pub(super) fn copies_bytes(&self) -> usize {
        let copies = self.copies.as_ref();
        copies.map_or(0, |copies| size_of::<Copies>() + copies.bytes())
    }

    pub(super) fn names(&self, from: u16, to: u16) -> &[u64] {
        let place = |offset: u16| usize::from(offset.saturating_sub(self.names_from));
        self.names.get(place(from)..place(to)).unwrap_or_default()
    }

    /// Sets the names of the blocks from `from` on.
    pub(super) fn set_names(&mut self, from: u16, names: &[u64]) {
        if self.names.is_empty() {
            self.names_from = from;
        }
        if from < self.names_from {
            let gap = usize::from(self.names_from - from);
            self.names.splice(0..0, std::iter::repeat_n(0, gap));
            self.names_from = from;
        }
        let first = usize::from(from - self.names_from);
        let end = first + names.len();
        if end > self.names.capacity() {
            // Names that grow once mostly grow again.
            let room = if self.names.is_empty() { end } else { end + end / 2 };
            // The new names are not put where the old ones were, which can be another thread's part of the allocator.
            let mut grown = Vec::with_capacity(room);
            grown.extend_from_slice(&self.names);
            self.names = grown;
        }
        self.names.resize(self.names.len().max(first), 0);
        let (known, new) = names.split_at(names.len().min(self.names.len() - first));
        self.names[first..first + known.len()].copy_from_slice(known);
        self.names.extend_from_slice(new);
    }

    /// Returns the offset up to which the attributes differ from those at `from` only in being resumable, `to` at most,
    /// and the attributes at `from`. They are `None` for a hole.
    pub(super) fn extent_alike(&self, from: u16, to: u16) -> (u16, Option<Attributes>) {
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

    /// Which of the blocks from `from` to `to`, all of them held, are resumable in a tier.
    pub(super) fn resumable(&self, from: u16, to: u16, tier: Tier) -> Resumable {
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
    pub(super) fn barred(&self) -> impl Iterator<Item = Barred> + '_ {
        let barred = |interval: &Interval| {
            let steps = interval.attributes.barred_steps();
            let Interval { from, to, .. } = *interval;
            steps.contains(&true).then_some(Barred { from, to, steps })
        };
        self.intervals.iter().filter_map(barred)
    }

    /// Whether the part is empty, or has nothing but leading blocks, all resumable, in one tier, and named by their
    /// hashes.
    pub(super) fn is_simple(&self) -> bool {
        match self.intervals.as_slice() {
            [] => true,
            [one] if one.from == 0 => {
                let own = one.attributes;
                own.form() == Form::Hash && own.tiers().is_power_of_two() && own.barred() == 0
            }
            _ => false,
        }
    }

    /// Number of leading blocks in any of `tiers`.
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

    /// Returns the entry that readers see.
    pub(super) fn entry(&self, slot: HolderSlot) -> Entry {
        if self.intervals.is_empty() {
            return Entry::default();
        }
        let reaches = [0b1, 0b11, u8::MAX].map(|tiers| self.reach(tiers));
        Entry::new(slot, reaches, self.end())
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
                let attributes = (tiers > 0).then(|| Attributes::new(tiers, Form::Hash, true));
                model[from..to].fill(attributes);
                part.set(
                    u16::try_from(from).unwrap(),
                    u16::try_from(to).unwrap(),
                    attributes,
                );
                for (offset, expected) in (0..).zip(&model) {
                    assert_eq!(part.get(offset), *expected);
                }
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
