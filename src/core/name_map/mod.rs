//! Hash table from names to places. A place is a number below 2^38. A name can have several places. A slot takes 9
//! bytes.
//!
//! A slot has a tag of 33 bits, which is a fingerprint of the name, and a place of 38 bits. One other name in 8 billion
//! has the same tag, so the caller compares the whole name at the place. The tag alone decides where a slot belongs, so
//! growing, splitting and removing read no names:
//!
//! - The map is cut into segments by the highest bits of the tag. The other bits give the bucket within the segment.
//! - A bucket has 8 slots. The home of a tag is the bucket where its slot belongs. A slot lies in its home, or in a
//!   later bucket if all buckets from the home on were full. Each bucket has an overflow count: the number of slots
//!   in later buckets that belong to it or to an earlier bucket. A search ends at the first bucket whose count is 0
//!   (the overflow counts of Folly's F14).
//! - The lowest 7 bits of a tag are the slot's print. The prints of a bucket stand together in one word, a byte each,
//!   and are all compared in one operation. The bits that are left in the word are the overflow count. These words
//!   lie beside each other, and the rest of each bucket is in a cache line of its own. An insertion reads the words
//!   and only writes to the cache line, so it does not wait for the line.
//! - A full segment grows by about nine tenths, or is cut in two if it has [`SEGMENT_MAX`] or more home buckets. So no
//!   insertion takes long. The factor of growth differs from segment to segment: segments fill at the same rate, and
//!   with one factor all would grow again at nearly the same time.
//!
//! The tag comes from a hash under a secret key, so nobody can construct collisions.

mod bucket;
mod segment;

use crate::ahead::{AHEAD, prefetch};
use crate::mix::{fold, random_key};

use bucket::{BucketPrints, PRINT_MASK};
use segment::{BucketRow, BucketSlot, Home, Segment, TAG_BITS, UPPER_BITS, upper};

/// Number of home buckets at which a full segment is cut in two instead of growing. The exception is a segment that
/// [`DEPTH_MAX`] tag bits select: it always grows.
const SEGMENT_MAX: usize = 1024;
/// Maximum number of tag bits that select the segment.
const DEPTH_MAX: u32 = 12;

/// Map from names to places: a hash table that consists of segments.
#[derive(Debug)]
pub(crate) struct NameMap {
    keys: [u64; 2],
    /// Table that leads from the highest `depth` bits of a tag to the number of the tag's segment.
    directory: Vec<u32>,
    depth: u32,
    segments: Vec<Segment>,
    len: usize,
    /// Number of buckets in all segments.
    buckets: usize,
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
    /// Number of slots in use. A name counts once for each of its places.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Number of bytes that the map takes.
    pub(crate) fn bytes(&self) -> u64 {
        let buckets = self.buckets * (size_of::<BucketRow>() + size_of::<BucketPrints>());
        (buckets + self.directory.len() * 4 + self.segments.len() * size_of::<Segment>()) as u64
    }

    #[inline]
    fn tag(&self, name: u64) -> u64 {
        let tag = fold(name ^ self.keys[0], self.keys[1]) >> (64 - TAG_BITS);
        // No tag may look like an empty slot, whose print is 0.
        tag | u64::from(tag & PRINT_MASK == 0)
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "a tag has few bits")]
    fn segment_of(&self, tag: u64) -> usize {
        let place = (tag >> (TAG_BITS - self.depth)) as usize;
        self.directory.get(place).map_or(0, |segment| *segment as usize)
    }

    /// Returns the home of `name`, and prefetches its memory.
    #[inline]
    fn home(&self, name: u64) -> Home {
        self.home_of(self.tag(name))
    }

    #[inline]
    fn home_of(&self, tag: u64) -> Home {
        let number = self.segment_of(tag);
        let bucket = self.segments.get(number).map_or(0, |segment| {
            let bucket = segment.home(upper(tag));
            segment.prints.get(bucket).into_iter().for_each(prefetch);
            segment.rows.get(bucket).into_iter().for_each(prefetch);
            bucket
        });
        Home { tag, number, bucket }
    }

    /// Prefetches the memory that a search for `name` reads first.
    #[inline]
    pub(crate) fn prefetch(&self, name: u64) {
        self.home(name);
    }

    /// Returns the homes of the next [`AHEAD`] names, and prefetches their memory.
    #[inline]
    fn next_homes(&self, names: &mut impl Iterator<Item = u64>) -> [Home; AHEAD] {
        let mut homes = [Home::default(); AHEAD];
        for (home, name) in homes.iter_mut().zip(names) {
            *home = self.home(name);
        }
        homes
    }

    /// Calls `check` with each place that has the tag of `name`, until `check` returns `Some`. Returns this value.
    /// Other names can have the same tag, so `check` must compare the name at the place.
    #[inline]
    pub(crate) fn find<T>(&self, name: u64, mut check: impl FnMut(u64) -> Option<T>) -> Option<T> {
        // The memory that is read last is prefetched together with the memory that is read first.
        let Home { tag, number, bucket } = self.home(name);
        self.segments.get(number)?.find(tag, bucket, |slot, _, _| {
            let is_it = slot.upper() == upper(tag);
            if is_it { check(slot.place()) } else { None }
        })
    }

    /// Adds a place for `name`.
    pub(crate) fn insert(&mut self, name: u64, place: u64) {
        let home = self.with_room(self.home(name));
        self.put(home, place);
    }

    /// Adds one place to each of `names`. The first name gets the place `first`, and each further name gets the next
    /// place. Stops at the first name that is not to be added, and returns the number of names added.
    ///
    /// `is_equal` gets the index of a name and a place, and tells whether the place belongs to this name. `is_new` gets
    /// the index of a name and its number of places, and tells whether to add one more. If the name's home bucket shows
    /// that the name is absent, neither is called.
    #[inline]
    pub(crate) fn insert_run(
        &mut self,
        mut names: impl ExactSizeIterator<Item = u64>,
        first: u64,
        is_equal: impl Fn(usize, u64) -> bool,
        mut is_new: impl FnMut(usize, usize) -> bool,
    ) -> usize {
        let len = names.len();
        let mut homes = self.next_homes(&mut names);
        for (index, place) in (0..len).zip(first..) {
            let mut home = homes[index % AHEAD];
            if let Some(ahead) = names.next() {
                homes[index % AHEAD] = self.home(ahead);
            }
            if self.segments.get(home.number).is_none_or(Segment::is_full) {
                home = self.with_room(home);
                homes = homes.map(|home| self.home_of(home.tag));
            }
            let equal = self.equal(home, |place| is_equal(index, place));
            if equal.is_some_and(|equal| !is_new(index, equal)) {
                return index;
            }
            self.put(home, place);
        }
        len
    }

    /// Makes room in the segment of `home` if that segment is full. Returns the home that the same tag then has.
    #[inline]
    fn with_room(&mut self, mut home: Home) -> Home {
        while self.segments.get(home.number).is_none_or(Segment::is_full) {
            self.grow(home.number);
            home = self.home_of(home.tag);
        }
        home
    }

    /// Number of places with the tag of `home` for which `is_equal` is true. `None` if the home bucket has no slot with
    /// the tag's print (its lowest bits) and no overflow.
    #[inline]
    fn equal(&self, home: Home, is_equal: impl Fn(u64) -> bool) -> Option<usize> {
        let (segment, tag) = (&self.segments[home.number], home.tag);
        segment.prints[home.bucket].may_have(tag & PRINT_MASK).then(|| {
            let mut equal = 0;
            segment.find(tag, home.bucket, |slot, _, _| {
                equal += usize::from(slot.upper() == upper(tag) && is_equal(slot.place()));
                None::<()>
            });
            equal
        })
    }

    #[inline]
    fn put(&mut self, home: Home, place: u64) {
        self.buckets += self.segments[home.number].put(home.bucket, BucketSlot::new(home.tag, place));
        self.len += 1;
    }

    /// Removes a place of `name`. Returns whether the place was in the map.
    pub(crate) fn remove(&mut self, name: u64, place: u64) -> bool {
        let before = self.len;
        self.remove_run(std::iter::once(name), place, |_, _| ());
        self.len < before
    }

    /// Removes one place of each of `names`: the place `first` of the first name, and the next place of each further
    /// name. Skips names that do not have their place. Calls `note` with the index of each other name, right after the
    /// removal of its place.
    pub(crate) fn remove_run(
        &mut self,
        mut names: impl ExactSizeIterator<Item = u64>,
        first: u64,
        mut note: impl FnMut(&Self, usize),
    ) {
        let len = names.len();
        let mut homes = self.next_homes(&mut names);
        for (index, place) in (0..len).zip(first..) {
            let home = homes[index % AHEAD];
            if let Some(ahead) = names.next() {
                homes[index % AHEAD] = self.home(ahead);
            }
            let Some(segment) = self.segments.get_mut(home.number) else {
                return;
            };
            if !segment.remove(home, place) {
                continue;
            }
            self.len -= 1;
            if segment.is_sparse() {
                self.shrink(home.number);
                homes = homes.map(|home| self.home_of(home.tag));
            }
            note(self, index);
        }
    }

    /// Shrinks a sparse segment. If no names are left, frees the whole map.
    #[cold]
    fn shrink(&mut self, number: usize) {
        if self.len == 0 {
            *self = Self::default();
        } else {
            self.resize(number, (self.segments[number].homes / 3).max(1));
        }
    }

    fn resize(&mut self, number: usize, homes: usize) {
        let old = std::mem::take(&mut self.segments[number]);
        let [new] = old.spread([homes], old.depth, |_| 0);
        self.buckets = self.buckets - old.prints.len() + new.prints.len();
        self.segments[number] = new;
    }

    /// Makes room in a segment: enlarges it, or cuts it in two.
    #[cold]
    fn grow(&mut self, number: usize) {
        if self.segments.is_empty() {
            self.directory = vec![0];
            self.segments.push(Segment::default());
        }
        let roomy = |homes: usize| homes + homes * (44 + number * 13 % 32) / 64 + 1;
        let segment = &self.segments[number];
        if segment.homes < SEGMENT_MAX || segment.depth == DEPTH_MAX {
            return self.resize(number, roomy(segment.homes));
        }
        if segment.depth == self.depth {
            self.depth += 1;
            self.directory = self.directory.iter().flat_map(|segment| [*segment; 2]).collect();
        }
        let old = std::mem::take(&mut self.segments[number]);
        let (depth, homes) = (old.depth + 1, roomy(old.homes / 2));
        let bit = 1 << (UPPER_BITS - depth);
        let [lower, upper] = old.spread([homes; 2], depth, |slot| usize::from(slot.upper() & bit != 0));
        self.buckets = self.buckets - old.prints.len() + lower.prints.len() + upper.prints.len();
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvatlas_lab::random::Random;

    use super::*;

    fn place(number: u64) -> u64 {
        number + (1 << 12)
    }

    /// Returns the places whose tag equals the tag of `name`. The map cannot compare whole names.
    fn places(map: &NameMap, name: u64) -> Vec<u64> {
        let mut places = Vec::new();
        map.find(name, |place| {
            places.push(place);
            None::<()>
        });
        places
    }

    #[test]
    fn a_map_equals_a_model_through_growth_and_removal() {
        let mut random = Random::new(7);
        let mut map = NameMap::default();
        let mut model: HashMap<u64, u64> = HashMap::new();
        let mut names: Vec<u64> = Vec::new();
        for step in 0..400_000_u64 {
            let grows = step % 200_000 < 120_000;
            if random.chance(if grows { 90 } else { 10 }) || names.is_empty() {
                let name = random.next();
                map.insert(name, place(step));
                model.insert(name, place(step));
                names.push(name);
            } else {
                let name = names.swap_remove(random.below(names.len()));
                let own = model.remove(&name).unwrap();
                assert!(map.remove(name, own));
                assert!(!map.remove(name, own));
            }
            assert_eq!(map.len(), model.len());
            let (bytes, len) = (map.bytes(), map.len() as u64);
            assert!(step % 200_000 != 119_999 || bytes < 20 * len, "{bytes} for {len}");
        }
        let (bytes, len) = (map.bytes(), map.len() as u64);
        assert!(bytes < 40 * len, "{bytes} for {len}");
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
            map.insert(42, place(number));
        }
        assert_eq!(places(&map, 42).len(), 100);
        assert!(map.remove(42, place(50)));
        assert!(!places(&map, 42).contains(&place(50)));
    }

    /// Checks that no insertion makes many segments grow at once. Names are spread evenly over the segments. If all
    /// segments grew by the same factor, most would become full at nearly the same time.
    #[test]
    fn segments_grow_one_after_the_other() {
        let mut random = Random::new(9);
        let mut map = NameMap::default();
        let (mut before, mut longest) = (0, 0);
        for step in 0..2_000_000_u64 {
            map.insert(random.next(), place(step));
            if step % 4096 == 0 {
                let homes: usize = map.segments.iter().map(|segment| segment.homes).sum();
                longest = longest.max(homes - before);
                before = homes;
            }
        }
        assert!(longest < before / 20, "{longest} of {before} buckets in a turn");
    }
}
