//! Segment of a map: its buckets, and the slots in them.

use crate::ahead::prefetch;

use super::bucket::{BucketPrints, PRINT_BITS, PRINT_MASK, indexes};

/// Number of bits of a place.
const PLACE_BITS: u32 = 38;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;
pub(super) const TAG_BITS: u32 = 33;
/// Number of upper bits of a tag, the fingerprint of a name. They decide where a slot belongs.
pub(super) const UPPER_BITS: u32 = TAG_BITS - PRINT_BITS;
/// Number of slots in a bucket.
const WIDTH: usize = 8;
/// Number of buckets ahead that are prefetched when all buckets are read.
const READ_AHEAD: usize = 16;

/// Home of a name: the name's tag, its segment, and the bucket where its slot belongs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Home {
    pub(super) tag: u64,
    /// Number of the segment in the map.
    pub(super) number: usize,
    pub(super) bucket: usize,
}

/// A tag (fingerprint of a name) and a place, in the form in which a bucket stores them.
#[derive(Debug, Clone, Copy)]
pub(super) struct BucketSlot {
    /// The lowest bits of the tag.
    print: u64,
    /// The upper bits of the tag (fingerprint of a name), and the place.
    rest: u64,
}

#[inline]
pub(super) fn upper(tag: u64) -> u64 {
    tag >> PRINT_BITS
}

impl BucketSlot {
    #[inline]
    pub(super) fn new(tag: u64, place: u64) -> Self {
        Self {
            print: tag & PRINT_MASK,
            rest: upper(tag) << PLACE_BITS | place & PLACE_MASK,
        }
    }

    /// Reads the slot at `index` of a bucket.
    #[inline]
    fn of(prints: BucketPrints, row: &BucketRow, index: usize) -> Self {
        Self {
            print: prints.get(index),
            rest: row.0[index],
        }
    }

    #[inline]
    pub(super) fn place(self) -> u64 {
        self.rest & PLACE_MASK
    }

    /// The upper bits of the tag.
    #[inline]
    pub(super) fn upper(self) -> u64 {
        self.rest >> PLACE_BITS
    }
}

/// Row of a bucket: the upper tag bits and the places of its slots, in one cache line.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
pub(super) struct BucketRow([u64; WIDTH]);

/// Segment of a map: the buckets of all tags that begin with the same bits.
#[derive(Debug, Default)]
pub(super) struct Segment {
    /// Prints (lowest tag bits) of the slots in each bucket. Slots belong in the first `homes` buckets. The later
    /// buckets take slots for which those buckets have no room.
    pub(super) prints: Vec<BucketPrints>,
    /// The row of each bucket.
    pub(super) rows: Vec<BucketRow>,
    /// Number of buckets that are the home of some tag.
    pub(super) homes: usize,
    len: usize,
    /// Number of highest bits in which the tags (fingerprints) of all names in the segment agree.
    pub(super) depth: u32,
}

impl Segment {
    fn new(homes: usize, depth: u32) -> Self {
        Self {
            prints: vec![BucketPrints::default(); homes],
            rows: vec![BucketRow::default(); homes],
            homes,
            len: 0,
            depth,
        }
    }

    /// Distributes all slots of this segment over new segments with `homes` home buckets each. `choose` returns the
    /// number of the new segment for a slot.
    #[inline]
    pub(super) fn spread<const COUNT: usize>(
        &self,
        homes: [usize; COUNT],
        depth: u32,
        choose: impl Fn(BucketSlot) -> usize,
    ) -> [Self; COUNT] {
        let mut segments = homes.map(|homes| Self::new(homes, depth));
        // Slots of neighbouring buckets mostly go to the same new bucket, and each insertion would wait for the one
        // before. So the loop alternates between the two halves of the buckets.
        let half = self.prints.len().div_ceil(2);
        for place in (0..half).flat_map(|place| [place, place + half]) {
            let (Some(prints), Some(row)) = (self.prints.get(place), self.rows.get(place)) else {
                continue;
            };
            self.rows.get(place + READ_AHEAD).into_iter().for_each(prefetch);
            for index in indexes(prints.taken()) {
                let slot = BucketSlot::of(*prints, row, index);
                let segment = &mut segments[choose(slot)];
                segment.put(segment.home(slot.upper()), slot);
            }
        }
        segments
    }

    /// Puts a slot into the first bucket with room, searching from the slot's home on. Returns the number of buckets
    /// added to the segment.
    #[inline]
    pub(super) fn put(&mut self, home: usize, slot: BucketSlot) -> usize {
        self.len += 1;
        if self.put_into(home, slot) {
            return 0;
        }
        self.put_behind(home, slot)
    }

    /// Puts a slot whose home is full into the next bucket with room. Returns the number of buckets added to the
    /// segment.
    #[inline(never)]
    fn put_behind(&mut self, home: usize, slot: BucketSlot) -> usize {
        let (buckets, mut place) = (self.prints.len(), home);
        loop {
            self.prints[place].count_behind(true);
            place += 1;
            if place == self.prints.len() {
                // Only few buckets are added, so no memory is reserved for more.
                self.prints.reserve_exact(1);
                self.rows.reserve_exact(1);
                self.prints.push(BucketPrints::default());
                self.rows.push(BucketRow::default());
            }
            if self.put_into(place, slot) {
                return self.prints.len() - buckets;
            }
        }
    }

    /// Puts a slot into a bucket. Returns `false` if the bucket is full.
    #[inline]
    fn put_into(&mut self, place: usize, slot: BucketSlot) -> bool {
        let prints = &mut self.prints[place];
        let Some(index) = indexes(prints.empty()).next() else {
            return false;
        };
        prints.put(index, slot.print);
        self.rows[place].0[index] = slot.rest;
        true
    }

    /// Whether the segment is so full that it must grow. Full buckets make insertions and removals slow, but free room
    /// costs memory. So segments of a small map grow earlier than those of a large map.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        let eighths = if self.depth < 5 { 6 } else { 7 };
        self.len * 8 >= self.homes * WIDTH * eighths
    }

    /// Whether the segment is so sparse that it should shrink. The bound is low. So few names are moved, even if all
    /// names are removed one after another.
    #[inline]
    pub(super) fn is_sparse(&self) -> bool {
        self.len * 6 < self.homes * WIDTH && (self.homes > 1 || self.len == 0)
    }

    /// Returns the home bucket of a tag with these upper bits.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "below the number of buckets")]
    pub(super) fn home(&self, upper: u64) -> usize {
        let own = upper << self.depth & ((1 << UPPER_BITS) - 1);
        ((own * self.homes as u64) >> UPPER_BITS) as usize
    }

    /// Calls `check` with each slot that has the print of `tag`, from the bucket `place` on, until `check` returns
    /// `Some`. Returns this value. `check` gets the slot, the number of its bucket, and its place in the bucket.
    #[inline]
    pub(super) fn find<T>(
        &self,
        tag: u64,
        mut place: usize,
        mut check: impl FnMut(BucketSlot, usize, usize) -> Option<T>,
    ) -> Option<T> {
        loop {
            let prints = *self.prints.get(place)?;
            for index in indexes(prints.with_print(tag & PRINT_MASK)) {
                let slot = BucketSlot::of(prints, &self.rows[place], index);
                if let Some(found) = check(slot, place, index) {
                    return Some(found);
                }
            }
            if !prints.has_behind() {
                return None;
            }
            place += 1;
        }
    }

    /// Removes a slot of this segment: the slot with the tag of `home` and the place `place`. Returns whether the
    /// segment had such a slot.
    #[inline]
    pub(super) fn remove(&mut self, home: Home, place: u64) -> bool {
        let wanted = BucketSlot::new(home.tag, place);
        let is_it = |slot: BucketSlot, place, index| (slot.rest == wanted.rest).then_some((place, index));
        let Some((place, index)) = self.find(home.tag, home.bucket, is_it) else {
            return false;
        };
        self.prints[place].clear(index);
        for prints in &mut self.prints[home.bucket..place] {
            prints.count_behind(false);
        }
        self.len -= 1;
        true
    }
}
