//! From a name to places, for writers: 8 bytes a slot.
//!
//! A slot is a tag of 26 bits and a place of 38. Whoever looks verifies the whole name at the place. The tag alone says where a slot
//! belongs, so growing, splitting and removing read no names:
//!
//! - A map is cut into segments by the highest bits of the tag; the others give the bucket within the segment.
//! - A bucket is a cache line of 8 slots. A slot lies in its tag's home bucket, or behind it where all from there on are full. So a search
//!   ends at the first bucket with room. After a removal from a full bucket, a later slot may come nearer to its home.
//! - A segment grows by three quarters; beyond [`SEGMENT_MAX`] buckets it is cut in two. So no step takes long.
//!
//! A bucket is looked at as a whole, without a branch for each slot: what cannot be predicted costs more than what is not needed.
//!
//! The tag is taken from a hash under a secret key: nobody can plan collisions.

use super::{SPOT_BITS, Spot, fold, prefetch, random_key};

const TAG_BITS: u32 = 64 - SPOT_BITS;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
/// Slots of a bucket.
const WIDTH: usize = 8;
/// Buckets beyond which a segment is cut in two, as long as tags tell the halves apart.
const SEGMENT_MAX: usize = 1024;
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
    /// Buckets of all segments.
    buckets: usize,
}

/// Slots that come into the processor's cache together; an empty one is 0.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket([u64; WIDTH]);

#[derive(Debug, Default)]
struct Segment {
    /// Those behind the last home take what does not fit before.
    buckets: Vec<Bucket>,
    /// How many buckets are some tag's home.
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
            buckets: 0,
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
        let buckets = self.buckets * size_of::<Bucket>();
        (buckets + self.directory.len() * 4 + self.segments.len() * size_of::<Segment>()) as u64
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
            && let Some(bucket) = segment.buckets.get(segment.home(tag))
        {
            prefetch(bucket);
        }
    }

    /// The first place that may have `name` for which `check` gives something.
    #[inline]
    pub(crate) fn find<T>(&self, name: u64, mut check: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let tag = self.tag(name);
        let segment = self.segments.get(self.segment_of(tag))?;
        for bucket in segment.buckets.get(segment.home(tag)..)? {
            let (empty, mut same) = bucket.masks(tag);
            while same != 0 {
                let found = check(Spot::from_bits(bucket.0[same.trailing_zeros() as usize]));
                if found.is_some() {
                    return found;
                }
                same &= same - 1;
            }
            if empty != 0 {
                break;
            }
        }
        None
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
        let (mut place, mut equal) = (segment.home(tag), 0);
        loop {
            if place == segment.buckets.len() {
                segment.buckets.push(Bucket::default());
                self.buckets += 1;
            }
            let bucket = &mut segment.buckets[place];
            let (empty, mut same) = bucket.masks(tag);
            while same != 0 {
                equal += usize::from(is_equal(Spot::from_bits(
                    bucket.0[same.trailing_zeros() as usize],
                )));
                same &= same - 1;
            }
            if empty != 0 {
                if equal < equal_max {
                    bucket.0[empty.trailing_zeros() as usize] = tag << SPOT_BITS | spot.bits();
                    segment.len += 1;
                    self.len += 1;
                }
                return equal;
            }
            place += 1;
        }
    }

    /// The number of the segment where the tag belongs, with room for one more.
    #[inline]
    fn roomy_segment(&mut self, tag: u64) -> usize {
        loop {
            let number = self.segment_of(tag);
            if let Some(segment) = self.segments.get(number)
                && !segment.is_full()
            {
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
        if !segment.take(tag, tag << SPOT_BITS | spot.bits()) {
            return false;
        }
        self.len -= 1;
        let before = segment.buckets.len();
        if self.len == 0 {
            let keys = self.keys;
            *self = Self {
                keys,
                ..Self::default()
            };
        } else if segment.homes > 1 && segment.len * 4 < segment.homes * WIDTH {
            segment.resize(segment.homes / 2);
            self.buckets = self.buckets + segment.buckets.len() - before;
        }
        true
    }

    /// Makes room in a segment.
    #[cold]
    fn grow(&mut self, number: usize) {
        let Some(segment) = self.segments.get_mut(number) else {
            self.directory = vec![0];
            self.segments.push(Segment::of([].into_iter(), 1, 0));
            self.buckets = 1;
            return;
        };
        let before = segment.buckets.len();
        let roomy = |homes: usize| homes + homes * 3 / 4 + 1;
        if segment.homes < SEGMENT_MAX || segment.depth == DEPTH_MAX {
            segment.resize(roomy(segment.homes));
            self.buckets = self.buckets + segment.buckets.len() - before;
            return;
        }
        if segment.depth == self.depth {
            self.depth += 1;
            self.directory = self.directory.iter().flat_map(|segment| [*segment; 2]).collect();
        }
        let segment = &mut self.segments[number];
        let (depth, homes) = (segment.depth + 1, roomy(segment.homes / 2));
        let old = std::mem::take(&mut segment.buckets);
        let bit = 1 << (u64::BITS - depth);
        let [lower, upper] = [0, bit].map(|half| {
            let slots = old.iter().flat_map(|bucket| bucket.0);
            Segment::of(slots.filter(move |slot| slot & bit == half), homes, depth)
        });
        self.buckets = self.buckets - before + lower.buckets.len() + upper.buckets.len();
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

impl Bucket {
    /// Which slots are empty, and which others have this tag: one bit each.
    #[inline]
    fn masks(&self, tag: u64) -> (u32, u32) {
        let (mut empty, mut same) = (0, 0);
        for (index, slot) in self.0.iter().enumerate() {
            empty |= u32::from(*slot == 0) << index;
            same |= u32::from(slot >> SPOT_BITS == tag) << index;
        }
        (empty, same & !empty)
    }

    /// Which slots are empty, and which are this one.
    #[inline]
    fn places(&self, wanted: u64) -> (u32, u32) {
        let (mut empty, mut same) = (0, 0);
        for (index, slot) in self.0.iter().enumerate() {
            empty |= u32::from(*slot == 0) << index;
            same |= u32::from(*slot == wanted) << index;
        }
        (empty, same)
    }
}

impl Segment {
    /// A segment with `homes` homes and those of `slots` that are not empty.
    fn of(slots: impl Iterator<Item = u64>, homes: usize, depth: u32) -> Self {
        let homes = homes.max(1);
        let mut segment = Self {
            buckets: vec![Bucket::default(); homes],
            homes,
            len: 0,
            depth,
        };
        let mut filled = vec![0_u8; homes];
        let mut rest = Vec::new();
        for slot in slots.filter(|slot| *slot != 0) {
            let home = segment.home(slot >> SPOT_BITS);
            let next = usize::from(filled[home]);
            if let Some(place) = segment.buckets[home].0.get_mut(next) {
                *place = slot;
                filled[home] += 1;
                segment.len += 1;
            } else {
                rest.push((home, slot));
            }
        }
        for (home, slot) in rest {
            segment.put_behind(home, slot);
        }
        segment
    }

    /// Puts a slot into the first bucket from `home` on that has room.
    fn put_behind(&mut self, home: usize, slot: u64) {
        let behind = self.buckets[home..].iter_mut();
        let place = behind.flat_map(|bucket| &mut bucket.0).find(|place| **place == 0);
        match place {
            Some(place) => *place = slot,
            None => {
                let mut bucket = Bucket::default();
                bucket.0[0] = slot;
                self.buckets.push(bucket);
            }
        }
        self.len += 1;
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.len * 5 >= self.homes * WIDTH * 4
    }

    /// The bucket where a tag belongs.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "below the number of buckets")]
    fn home(&self, tag: u64) -> usize {
        let own = tag << self.depth & TAG_MASK;
        ((own * self.homes as u64) >> TAG_BITS) as usize
    }

    /// Takes a slot out.
    #[inline]
    fn take(&mut self, tag: u64, wanted: u64) -> bool {
        let mut place = self.home(tag);
        while let Some(bucket) = self.buckets.get_mut(place) {
            let (empty, same) = bucket.places(wanted);
            if same != 0 {
                bucket.0[same.trailing_zeros() as usize] = 0;
                self.len -= 1;
                if empty == 0 {
                    self.fill(place);
                }
                return true;
            }
            if empty != 0 {
                return false;
            }
            place += 1;
        }
        false
    }

    /// A bucket that was full has room now: takes a slot there that belongs there or before, from a later one, and so on.
    fn fill(&mut self, place: usize) {
        let mut open = place;
        for from in place + 1..self.buckets.len() {
            let bucket = self.buckets[from];
            let is_full = bucket.0.iter().all(|slot| *slot != 0);
            let belongs = |slot: &u64| *slot != 0 && self.home(*slot >> SPOT_BITS) <= open;
            if let Some(index) = bucket.0.iter().position(belongs) {
                let room = self.buckets[open].0.iter_mut().find(|slot| **slot == 0);
                if let Some(room) = room {
                    *room = bucket.0[index];
                }
                self.buckets[from].0[index] = 0;
                open = from;
            }
            if !is_full {
                break;
            }
        }
    }

    fn resize(&mut self, homes: usize) {
        let old = std::mem::take(&mut self.buckets);
        *self = Self::of(old.iter().flat_map(|bucket| bucket.0), homes, self.depth);
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
