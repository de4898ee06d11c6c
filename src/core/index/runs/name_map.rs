//! From a name to places, for writers: 8 bytes a slot.
//!
//! A slot is a tag of 26 bits and a place of 38. Whoever looks verifies the whole name at the place. The tag alone says where a slot
//! belongs, so growing, splitting and removing read no names:
//!
//! - A map is cut into segments by the highest bits of the tag; the others give the slot within the segment.
//! - The slots of a segment are in the order of their tags, each at its home or as little behind it as that allows (linear probing in
//!   order: O. Amble and D. E. Knuth, "Ordered hash tables", 1974). So growing and splitting are one pass over memory.
//! - A segment grows by half; beyond [`SEGMENT_MAX`] slots it is cut in two. So no step takes long.
//!
//! The tag is taken from a hash under a secret key: nobody can plan collisions.

use super::{SPOT_BITS, Spot, fold, prefetch, random_key};

const TAG_BITS: u32 = 64 - SPOT_BITS;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
const HOMES_MIN: usize = 8;
/// Slots beyond which a segment is cut in two, as long as tags tell the halves apart.
const SEGMENT_MAX: usize = 8192;
/// Most bits of the tag that tell segments apart.
const DEPTH_MAX: u32 = 12;

/// The map.
#[derive(Debug)]
pub(crate) struct NameMap {
    keys: [u64; 2],
    /// The segment of each value of the tag's highest `depth` bits.
    directory: Vec<u32>,
    depth: u32,
    segments: Vec<Segment>,
    len: usize,
    /// Slots of all segments.
    slots: usize,
}

#[derive(Debug, Default)]
struct Segment {
    /// Those behind the last home take what does not fit before. The last one is empty.
    slots: Vec<u64>,
    /// How many slots are some tag's home.
    homes: usize,
    len: usize,
    /// How many of the tag's highest bits all its names have in common.
    depth: u32,
}

impl Default for NameMap {
    fn default() -> Self {
        Self {
            keys: [random_key(1), random_key(2)],
            directory: Vec::new(),
            depth: 0,
            segments: Vec::new(),
            len: 0,
            slots: 0,
        }
    }
}

impl NameMap {
    /// How many names there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// What it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.slots * 8 + self.directory.len() * 4 + self.segments.len() * size_of::<Segment>()) as u64
    }

    #[inline]
    fn tag(&self, name: u64) -> u64 {
        fold(name ^ self.keys[0], self.keys[1]) >> (64 - TAG_BITS)
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "a tag has few bits")]
    fn segment_of(&self, tag: u64) -> usize {
        let place = (tag >> (TAG_BITS - self.depth)) as usize;
        self.directory.get(place).map_or(0, |segment| *segment as usize)
    }

    /// Asks for the memory that a search for `name` looks at first.
    #[inline]
    pub(crate) fn prefetch(&self, name: u64) {
        let tag = self.tag(name);
        if let Some(segment) = self.segments.get(self.segment_of(tag))
            && let Some(slot) = segment.slots.get(segment.home(tag))
        {
            prefetch(slot);
        }
    }

    /// The first place that may have `name` for which `check` gives something.
    #[inline]
    pub(crate) fn find<T>(&self, name: u64, mut check: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let tag = self.tag(name);
        let segment = self.segments.get(self.segment_of(tag))?;
        let slots = segment.slots.get(segment.first(tag)..)?;
        let mut equal = slots
            .iter()
            .take_while(|slot| **slot >> SPOT_BITS == tag && **slot != 0);
        equal.find_map(|slot| check(Spot::from_bits(*slot)))
    }

    /// Adds a place for `name`.
    pub(crate) fn insert(&mut self, name: u64, spot: Spot) {
        self.insert_unless(name, spot, usize::MAX, |_| false);
    }

    /// Adds a place for `name`, unless as many as `equal_max` places for which `is_equal` holds are there; says how many of those there
    /// were.
    #[inline]
    pub(crate) fn insert_unless(
        &mut self,
        name: u64,
        spot: Spot,
        equal_max: usize,
        is_equal: impl Fn(Spot) -> bool,
    ) -> usize {
        let tag = self.tag(name);
        let number = self.roomy_segment(tag);
        let segment = &mut self.segments[number];
        let (mut place, mut equal) = (segment.first(tag), 0);
        while segment.slots[place] >> SPOT_BITS == tag && segment.slots[place] != 0 {
            equal += usize::from(is_equal(Spot::from_bits(segment.slots[place])));
            place += 1;
        }
        if equal < equal_max {
            self.slots += segment.put(place, tag << SPOT_BITS | spot.bits());
            self.len += 1;
        }
        equal
    }

    /// The number of the segment where the tag belongs, with room for one more.
    #[inline]
    fn roomy_segment(&mut self, tag: u64) -> usize {
        if self.segments.is_empty() {
            self.directory = vec![0];
            self.segments.push(Segment::default());
        }
        loop {
            let number = self.segment_of(tag);
            if !self.segments[number].is_full() {
                return number;
            }
            self.grow(number);
        }
    }

    /// Takes the place of `name` out; says whether it was there.
    pub(crate) fn remove(&mut self, name: u64, spot: Spot) -> bool {
        let tag = self.tag(name);
        let number = self.segment_of(tag);
        let Some(segment) = self.segments.get_mut(number) else {
            return false;
        };
        if !segment.take(tag << SPOT_BITS | spot.bits()) {
            return false;
        }
        self.len -= 1;
        let slots = segment.slots.len();
        if self.len == 0 {
            let keys = self.keys;
            *self = Self {
                keys,
                ..Self::default()
            };
        } else if segment.homes > HOMES_MIN && segment.len * 4 < segment.homes {
            segment.resize(segment.homes / 2);
            self.slots = self.slots + segment.slots.len() - slots;
        }
        true
    }

    /// Makes room in a segment.
    fn grow(&mut self, number: usize) {
        let segment = &mut self.segments[number];
        let slots = segment.slots.len();
        if slots < SEGMENT_MAX || segment.depth == DEPTH_MAX {
            segment.resize(segment.homes + segment.homes / 2);
            self.slots += segment.slots.len() - slots;
            return;
        }
        if segment.depth == self.depth {
            self.depth += 1;
            self.directory = self.directory.iter().flat_map(|segment| [*segment; 2]).collect();
        }
        let segment = &mut self.segments[number];
        let depth = segment.depth + 1;
        let old = std::mem::take(&mut segment.slots);
        let bit = 1 << (u64::BITS - depth);
        let is_upper = |slot: &u64| slot & bit != 0;
        let middle = old.iter().position(is_upper).unwrap_or(old.len());
        let (lower, upper) = old.split_at(middle);
        let [lower, upper] = [lower, upper].map(|half| {
            let len = half.iter().filter(|slot| **slot != 0).count();
            Segment::of(half, len + len * 3 / 4, depth)
        });
        self.slots = self.slots - slots + lower.slots.len() + upper.slots.len();
        self.segments[number] = lower;
        let new = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segments.push(upper);
        let shift = self.depth - depth;
        for (place, segment) in self.directory.iter_mut().enumerate() {
            if *segment as usize == number && (place >> shift) & 1 == 1 {
                *segment = new;
            }
        }
    }
}

impl Segment {
    /// A segment with `homes` homes and those of `slots` that are not empty, which are in order.
    fn of(slots: &[u64], homes: usize, depth: u32) -> Self {
        let homes = homes.max(HOMES_MIN);
        let mut segment = Self {
            slots: vec![0; homes + homes / 64 + 4],
            homes,
            len: 0,
            depth,
        };
        let mut next = 0;
        for slot in slots {
            // An empty one is written, too, where nothing is yet: that costs less than to ask.
            next = segment.home(slot >> SPOT_BITS).max(next);
            if next + 1 >= segment.slots.len() {
                segment.slots.push(0);
            }
            segment.slots[next] = *slot;
            next += usize::from(*slot != 0);
            segment.len += usize::from(*slot != 0);
        }
        segment
    }

    fn is_full(&self) -> bool {
        self.len * 10 >= self.homes * 7
    }

    /// Where a tag belongs. Grows with the tag, so that growing keeps the order.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "below the number of slots")]
    fn home(&self, tag: u64) -> usize {
        let own = tag << self.depth & TAG_MASK;
        ((own * self.homes as u64) >> TAG_BITS) as usize
    }

    /// Where the first slot of this tag is or would be.
    #[inline]
    fn first(&self, tag: u64) -> usize {
        let (mut place, least) = (self.home(tag), (tag << SPOT_BITS).saturating_sub(1));
        // An empty slot is as one that comes after all others.
        while self.slots[place].wrapping_sub(1) < least {
            place += 1;
        }
        place
    }

    /// Puts a slot at `place`, and moves those that follow it up to the next that is empty. Says by how many slots the segment has grown.
    #[inline]
    fn put(&mut self, place: usize, word: u64) -> usize {
        let (mut place, mut word) = (place, word);
        while word != 0 {
            word = std::mem::replace(&mut self.slots[place], word);
            place += 1;
        }
        self.len += 1;
        // The last one stays empty: there every search ends.
        let is_last = place == self.slots.len();
        if is_last {
            self.slots.push(0);
        }
        usize::from(is_last)
    }

    /// Takes a slot out, and moves those behind it that are not at home one back.
    fn take(&mut self, word: u64) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        let tag = word >> SPOT_BITS;
        let mut place = self.first(tag);
        while self.slots[place] != word {
            if self.slots[place] == 0 || self.slots[place] >> SPOT_BITS != tag {
                return false;
            }
            place += 1;
        }
        loop {
            let next = self.slots[place + 1];
            if next == 0 || self.home(next >> SPOT_BITS) > place {
                break;
            }
            self.slots[place] = next;
            place += 1;
        }
        self.slots[place] = 0;
        self.len -= 1;
        true
    }

    fn resize(&mut self, homes: usize) {
        let old = std::mem::take(&mut self.slots);
        *self = Self::of(&old, homes, self.depth);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvatlas_lab::random::Random;

    use super::super::RunId;
    use super::*;

    fn spot(number: u64) -> Spot {
        Spot::from_bits(number + (1 << 12))
    }

    /// Finds all places of a name, as the map alone can: those with its tag.
    fn places(map: &NameMap, name: u64) -> Vec<Spot> {
        let mut places = Vec::new();
        map.find(name, |spot| {
            places.push(spot);
            None::<()>
        });
        places
    }

    #[test]
    fn a_map_equals_a_model_through_growth_and_removal() {
        let mut random = Random::new(7);
        let mut map = NameMap::default();
        let mut model: HashMap<u64, Spot> = HashMap::new();
        let mut names: Vec<u64> = Vec::new();
        for step in 0..400_000_u64 {
            let grows = step % 200_000 < 120_000;
            if random.chance(if grows { 90 } else { 10 }) || names.is_empty() {
                let name = random.next();
                map.insert(name, spot(step));
                model.insert(name, spot(step));
                names.push(name);
            } else {
                let name = names.swap_remove(random.below(names.len()));
                let place = model.remove(&name).unwrap();
                assert!(map.remove(name, place));
                assert!(!map.remove(name, place));
            }
            assert_eq!(map.len(), model.len());
            if step % 200_000 == 119_999 {
                assert!(
                    map.bytes() < 16 * map.len() as u64,
                    "{} for {}",
                    map.bytes(),
                    map.len()
                );
            }
        }
        assert!(
            map.bytes() < 40 * map.len() as u64,
            "{} for {}",
            map.bytes(),
            map.len()
        );
        for (name, place) in &model {
            assert!(places(&map, *name).contains(place));
        }
        for name in names {
            assert!(map.remove(name, model[&name]));
        }
        assert_eq!((map.len(), map.bytes()), (0, 0));
    }

    #[test]
    fn one_name_can_have_several_places() {
        let mut map = NameMap::default();
        for number in 0..100 {
            map.insert(42, spot(number));
        }
        assert_eq!(places(&map, 42).len(), 100);
        assert!(map.remove(42, spot(50)));
        assert!(!places(&map, 42).contains(&spot(50)));
        assert_eq!(spot(50).run, RunId(1));
    }
}
