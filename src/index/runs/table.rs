//! Hash → place, as words of 8 bytes that readers load without a lock.
//!
//! Open addressing over buckets of eight words (a cache line), in segments of 512 buckets, found through a directory by the
//! hash's top bits: extendible hashing (Fagin et al., *Extendible hashing — a fast access method for dynamic files*, 1979).
//! A full segment is split in two, or two sparse ones are joined: a few thousand words at a time, so no operation ever waits
//! for a whole table to grow. Each word carries the hash bits that a split goes by, so a split touches no other memory.
//!
//! ```text
//!  63        46 45        44 43    32 31     0
//! | tag: top 18 | distance  | offset | run    |      0: empty, 1: was taken
//! | bits of hash| from home |        |        |
//! ```
//!
//! An entry lies in its home bucket or one of the three that follow. A bucket with an empty word has never been full since its
//! segment was made, so a search ends there; in a bucket without one, a removal leaves a mark behind.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_epoch::{Atomic, Guard, Owned, Shared};

use super::run::COMMON_MASK;
use super::slab::RunId;
use super::{Spot, prefetch};

const BUCKET: usize = 8;
const BUCKETS: usize = 512;
/// Words in use, marks included, at which a segment is split or cleaned, at most.
const USED_MAX: u32 = 3500;
/// As hashes are spread evenly, all segments would be full at about the same time, and one event would split many. So each is
/// split at a number of its own, this much apart.
const USED_SPREAD: u32 = 900;
/// Two neighbours whose entries together are fewer than this are joined.
const JOINED_MAX: u32 = 1400;
/// Whether that can be done is looked at whenever so many more have gone.
const JOINED_EVERY: u32 = 32;
/// How far from home an entry may lie, in buckets.
const DISTANCES: usize = 4;
const TAG_BITS: u32 = 18;
/// The directory has at most one segment a tag.
const DEPTH_MAX: u32 = TAG_BITS;

/// How many hashes ahead the memory is asked for.
const AHEAD: usize = 16;

/// Two to the power of 64 over the golden ratio (Knuth, *The Art of Computer Programming* 6.4).
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

const EMPTY: u64 = 0;
const TAKEN_BEFORE: u64 = 1;
const DISTANCE_SHIFT: u32 = 44;
const OFFSET_SHIFT: u32 = 32;

/// A hash as the table sees it, mixed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mixed(u64);

impl Mixed {
    #[inline]
    fn tag(self) -> u64 {
        self.0 >> (64 - TAG_BITS)
    }

    #[inline]
    fn bucket(self) -> usize {
        low(self.0) % BUCKETS
    }

    /// How much earlier than others the segment for the first `depth` bits is split.
    fn spread(self, depth: u32) -> u32 {
        let prefix = (self.0 >> 1) >> (63 - depth);
        let mixed = (prefix + u64::from(depth)).wrapping_mul(GOLDEN_RATIO) >> 32;
        u32::try_from(mixed).unwrap_or_default() % USED_SPREAD
    }
}

#[inline]
#[allow(
    clippy::cast_possible_truncation,
    reason = "the low bits choose a place; a conversion that can fail costs in the innermost loop"
)]
fn low(bits: u64) -> usize {
    // The table is for 64-bit machines only, see `run`.
    bits as usize
}

#[inline]
fn word_of(tag: u64, distance: usize, spot: Spot) -> u64 {
    tag << (64 - TAG_BITS)
        | (distance as u64) << DISTANCE_SHIFT
        | u64::from(spot.offset) << OFFSET_SHIFT
        | u64::from(spot.run.bits())
}

#[inline]
fn tag_of(word: u64) -> u64 {
    word >> (64 - TAG_BITS)
}

#[inline]
fn distance_of(word: u64) -> usize {
    low(word >> DISTANCE_SHIFT) % DISTANCES
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "cuts fields out of a word")]
fn spot_of(word: u64) -> Spot {
    Spot {
        run: RunId::from_bits(word as u32),
        offset: (word >> OFFSET_SHIFT) as u16 & 0xfff,
    }
}

/// Changes a count that only the one writer changes, which takes no locked instruction; says what it is now.
#[inline]
fn change(count: &AtomicU32, by: i32) -> u32 {
    let now = count.load(Ordering::Relaxed).wrapping_add_signed(by);
    count.store(now, Ordering::Relaxed);
    now
}

#[inline]
fn is_entry(word: u64) -> bool {
    word > TAKEN_BEFORE
}

#[derive(Debug)]
#[repr(align(64))]
struct Bucket([AtomicU64; BUCKET]);

/// Words whose tags begin alike. The buckets are in the segment itself: whoever knows where it is knows where they are.
#[derive(Debug)]
struct Segment {
    buckets: [Bucket; BUCKETS],
    /// How many leading bits of the tag they have in common.
    depth: u32,
    /// Words in use, marks included, at which it is split or cleaned.
    used_max: u32,
    /// Words that are not empty. Only the writer looks at it, and at the next.
    used: AtomicU32,
    entries: AtomicU32,
}

impl Segment {
    fn new(depth: u32) -> Self {
        Self {
            buckets: [const { Bucket([const { AtomicU64::new(EMPTY) }; BUCKET]) }; BUCKETS],
            depth,
            used_max: USED_MAX,
            used: AtomicU32::new(0),
            entries: AtomicU32::new(0),
        }
    }

    #[inline]
    fn bucket(&self, home: usize, distance: usize) -> &[AtomicU64; BUCKET] {
        &self.buckets[(home + distance) % BUCKETS].0
    }

    /// Takes the first free word at or after `home`, unless `is_same` says of another entry that it has the same hash.
    #[inline]
    fn place(&self, home: usize, tag: u64, spot: Spot, mut is_same: impl FnMut(Spot) -> bool) -> Inserted {
        let mut free = None;
        for distance in 0..DISTANCES {
            let start = word_of(tag, distance, SPOT_ZERO) >> DISTANCE_SHIFT;
            let bucket = self.bucket(home, distance);
            // A bit a word, and no branches: nobody can foresee how many words are taken.
            let (mut alike, mut unused, mut has_empty) = (0_u32, 0_u32, false);
            for (index, place) in bucket.iter().enumerate() {
                let word = place.load(Ordering::Relaxed);
                alike |= u32::from(word >> DISTANCE_SHIFT == start) << index;
                unused |= u32::from(!is_entry(word)) << index;
                has_empty |= word == EMPTY;
            }
            alike &= !unused;
            while alike != 0 {
                let word = bucket[alike.trailing_zeros() as usize % BUCKET].load(Ordering::Relaxed);
                if is_same(spot_of(word)) {
                    return Inserted::Same;
                }
                alike &= alike - 1;
            }
            if unused != 0 && free.is_none() {
                let place = &bucket[unused.trailing_zeros() as usize % BUCKET];
                free = Some((place, distance, place.load(Ordering::Relaxed)));
            }
            if has_empty {
                break;
            }
        }
        let Some((place, distance, word)) = free else {
            return Inserted::NoRoom;
        };
        if word == EMPTY {
            if self.used.load(Ordering::Relaxed) >= self.used_max {
                return Inserted::NoRoom;
            }
            change(&self.used, 1);
        }
        place.store(word_of(tag, distance, spot), Ordering::Release);
        change(&self.entries, 1);
        Inserted::Placed
    }

    fn entries_count(&self) -> u32 {
        self.entries.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Directory {
    /// The length is two to the power of `depth`.
    segments: Box<[Atomic<Segment>]>,
    depth: u32,
}

/// What became of an entry to be inserted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Inserted {
    /// It is there.
    Placed,
    /// Another entry of the same hash is there, and this one is not.
    Same,
    /// There is no room within reach of its home.
    NoRoom,
}

/// The table.
#[derive(Debug)]
pub(super) struct Table {
    directory: Atomic<Directory>,
    /// Drawn per table: a publisher cannot choose hashes that meet in one bucket.
    seeds: [u64; 2],
    segments: AtomicU64,
}

impl Table {
    pub(super) fn new() -> Self {
        let random = RandomState::new();
        let directory = Directory {
            segments: Box::new([Atomic::new(Segment::new(0))]),
            depth: 0,
        };
        Self {
            directory: Atomic::new(directory),
            seeds: [random.hash_one(1), random.hash_one(2) | 1],
            segments: AtomicU64::new(1),
        }
    }

    /// The first multiplication spreads every bit of the key over both halves of the product, in a way that nobody outside
    /// knows. It keeps the lattice of keys that are counted up, so that bucket and tag would go together; the second breaks that.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "folds a product of 128 bits")]
    fn mix(&self, hash: u64) -> Mixed {
        let product = u128::from((hash & COMMON_MASK) ^ self.seeds[0]) * u128::from(self.seeds[1]);
        let folded = (product as u64 ^ (product >> 64) as u64).wrapping_mul(GOLDEN_RATIO);
        Mixed(folded ^ folded >> 32)
    }

    #[inline]
    fn directory<'g>(&self, guard: &'g Guard) -> &'g Directory {
        let directory = self.directory.load(Ordering::Acquire, guard);
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: never null: `new` sets one, and `replace_directory` sets the next before it retires the last, deferred
        // until every guard held then is dropped; ours is held and lives as long as the reference.
        unsafe {
            directory.deref()
        }
    }

    #[inline]
    fn segment<'g>(&self, mixed: Mixed, guard: &'g Guard) -> &'g Segment {
        let directory = self.directory(guard);
        let index = low((mixed.0 >> 1) >> (63 - directory.depth));
        let segment = directory.segments[index].load(Ordering::Acquire, guard);
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: no place of a directory is ever null; a segment is retired only after every place of the current
        // directory leads elsewhere, deferred until every guard held then is dropped. A reader of an older directory
        // has held its guard since before that was retired.
        unsafe {
            segment.deref()
        }
    }

    /// What the segments take, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.load(Ordering::Relaxed) * size_of::<Segment>() as u64
    }

    /// Asks for the memory that a search for `hash` looks at first.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64, guard: &Guard) -> Mixed {
        let mixed = self.mix(hash);
        let segment = self.segment(mixed, guard);
        prefetch(segment.bucket(mixed.bucket(), 0));
        mixed
    }

    /// The hashes, one after the other, the memory of each asked for a few before its turn.
    pub(super) fn ahead<'t, H: Iterator<Item = u64>>(
        &'t self,
        mut hashes: H,
        guard: &'t Guard,
    ) -> Ahead<'t, H> {
        let mut waiting = [(0, Mixed::default()); AHEAD];
        let mut count = 0;
        for (place, hash) in waiting.iter_mut().zip(hashes.by_ref()) {
            *place = (hash, self.prefetch(hash, guard));
            count += 1;
        }
        Ahead {
            table: self,
            guard,
            hashes,
            waiting,
            next: 0,
            count,
        }
    }

    /// The first place of an entry that may be of `hash` for which `check` gives something.
    #[inline]
    pub(super) fn find<T>(
        &self,
        hash: u64,
        guard: &Guard,
        mut check: impl FnMut(Spot) -> Option<T>,
    ) -> Option<T> {
        let mixed = self.mix(hash);
        let segment = self.segment(mixed, guard);
        for distance in 0..DISTANCES {
            let start = word_of(mixed.tag(), distance, SPOT_ZERO) >> DISTANCE_SHIFT;
            let mut has_empty = false;
            for place in segment.bucket(mixed.bucket(), distance) {
                let word = place.load(Ordering::Acquire);
                has_empty |= word == EMPTY;
                if word >> DISTANCE_SHIFT == start
                    && is_entry(word)
                    && let Some(found) = check(spot_of(word))
                {
                    return Some(found);
                }
            }
            if has_empty {
                break;
            }
        }
        None
    }

    /// Adds an entry, unless `is_same` says of another one that it has the same hash. Only for the one writer, as all that
    /// follows.
    ///
    /// Entries for which there was no room when a segment was rebuilt are given to `spill`.
    pub(super) fn insert(
        &self,
        hash: u64,
        spot: Spot,
        guard: &Guard,
        is_same: impl FnMut(Spot) -> bool,
        spill: impl FnMut(Spot),
    ) -> Inserted {
        self.insert_mixed(self.mix(hash), spot, guard, is_same, spill)
    }

    /// As [`Self::insert`].
    #[inline]
    pub(super) fn insert_mixed(
        &self,
        mixed: Mixed,
        spot: Spot,
        guard: &Guard,
        mut is_same: impl FnMut(Spot) -> bool,
        mut spill: impl FnMut(Spot),
    ) -> Inserted {
        for _ in 0..=DEPTH_MAX {
            let segment = self.segment(mixed, guard);
            match segment.place(mixed.bucket(), mixed.tag(), spot, &mut is_same) {
                Inserted::NoRoom => {}
                placed_or_same => return placed_or_same,
            }
            if !self.make_room(mixed, guard, &mut spill) {
                break;
            }
        }
        Inserted::NoRoom
    }

    /// Takes an entry out; says whether it was there.
    pub(super) fn remove(&self, hash: u64, spot: Spot, guard: &Guard, spill: impl FnMut(Spot)) -> bool {
        self.remove_mixed(self.mix(hash), spot, guard, spill)
    }

    /// As [`Self::remove`].
    #[inline]
    pub(super) fn remove_mixed(
        &self,
        mixed: Mixed,
        spot: Spot,
        guard: &Guard,
        spill: impl FnMut(Spot),
    ) -> bool {
        let segment = self.segment(mixed, guard);
        for distance in 0..DISTANCES {
            let wanted = word_of(mixed.tag(), distance, spot);
            let mut has_empty = false;
            let mut found = None;
            for place in segment.bucket(mixed.bucket(), distance) {
                let word = place.load(Ordering::Relaxed);
                has_empty |= word == EMPTY;
                if word == wanted {
                    found = Some(place);
                }
            }
            if let Some(place) = found {
                if has_empty {
                    place.store(EMPTY, Ordering::Release);
                    change(&segment.used, -1);
                } else {
                    place.store(TAKEN_BEFORE, Ordering::Release);
                }
                let entries = change(&segment.entries, -1);
                if entries < JOINED_MAX / 2 && entries.is_multiple_of(JOINED_EVERY) {
                    self.join(mixed, guard, spill);
                }
                return true;
            }
            if has_empty {
                break;
            }
        }
        false
    }

    /// Splits the segment of `mixed`, or rebuilds it where marks fill it; says whether that was possible.
    fn make_room(&self, mixed: Mixed, guard: &Guard, spill: &mut impl FnMut(Spot)) -> bool {
        let segment = self.segment(mixed, guard);
        let depth = segment.depth;
        if segment.used.load(Ordering::Relaxed) - segment.entries_count() > segment.used_max / 4 {
            let mut rebuilt = Filling::new(depth);
            rebuilt.take(segment);
            self.publish(mixed, depth, rebuilt.finish(mixed.spread(depth), spill), guard);
            self.retire(segment, guard);
            return true;
        }
        if depth == DEPTH_MAX {
            return false;
        }
        if depth == self.directory(guard).depth {
            self.double_directory(guard);
        }
        let mut halves = [Filling::new(depth + 1), Filling::new(depth + 1)];
        for (index, bucket) in segment.buckets.iter().enumerate() {
            for place in &bucket.0 {
                let word = place.load(Ordering::Relaxed);
                let side = low(word >> (63 - depth)) % 2;
                halves[side].push(index, word);
            }
        }
        let bit = 1 << (63 - depth);
        for (half, bits) in halves.into_iter().zip([0, bit]) {
            let of_side = Mixed(mixed.0 & !bit | bits);
            let half = half.finish(of_side.spread(depth + 1), spill);
            self.publish(of_side, depth + 1, half, guard);
        }
        self.retire(segment, guard);
        true
    }

    /// Joins the segment of `mixed` with its neighbour, if that is sparse, too; and what becomes of them with its own neighbour.
    #[cold]
    fn join(&self, mixed: Mixed, guard: &Guard, mut spill: impl FnMut(Spot)) {
        loop {
            let segment = self.segment(mixed, guard);
            let depth = segment.depth;
            if depth == 0 {
                return;
            }
            let neighbour = self.segment(Mixed(mixed.0 ^ 1 << (64 - depth)), guard);
            if neighbour.depth != depth || segment.entries_count() + neighbour.entries_count() > JOINED_MAX {
                return;
            }
            let mut joined = Filling::new(depth - 1);
            joined.take(segment);
            joined.take(neighbour);
            let joined = joined.finish(mixed.spread(depth - 1), &mut spill);
            self.publish(mixed, depth - 1, joined, guard);
            self.retire(segment, guard);
            self.retire(neighbour, guard);
            if depth == self.directory(guard).depth {
                self.halve_directory(guard);
            }
        }
    }

    /// Puts `segment` into all places of the directory that begin like `mixed` for `depth` bits.
    fn publish(&self, mixed: Mixed, depth: u32, segment: Box<Segment>, guard: &Guard) {
        self.segments.fetch_add(1, Ordering::Relaxed);
        let directory = self.directory(guard);
        let segment = Owned::<Segment>::from(segment).into_shared(guard);
        let first = low((mixed.0 >> 1) >> (63 - depth)) << (directory.depth - depth);
        let count = 1 << (directory.depth - depth);
        for place in &directory.segments[first..first + count] {
            place.store(segment, Ordering::Release);
        }
    }

    fn retire(&self, segment: &Segment, guard: &Guard) {
        self.segments.fetch_sub(1, Ordering::Relaxed);
        #[allow(unsafe_code, reason = "frees what `publish` or `new` allocated")]
        // SAFETY: the callers have put other segments into every place of the directory that led to this one, and call
        // this once for each.
        unsafe {
            guard.defer_destroy(Shared::from(std::ptr::from_ref(segment)));
        }
    }

    fn double_directory(&self, guard: &Guard) {
        let old = self.directory(guard);
        let twice = old.segments.iter().flat_map(|place| {
            let segment = place.load(Ordering::Relaxed, guard);
            [Atomic::from(segment), Atomic::from(segment)]
        });
        self.replace_directory(twice.collect(), old.depth + 1, guard);
    }

    /// As often as no segment needs the last bit.
    fn halve_directory(&self, guard: &Guard) {
        loop {
            let old = self.directory(guard);
            let is_pair_alike = |pair: &[Atomic<Segment>]| {
                let one = pair.first().map(|place| place.load(Ordering::Relaxed, guard));
                one == pair.last().map(|place| place.load(Ordering::Relaxed, guard))
            };
            if old.depth == 0 || !old.segments.chunks(2).all(is_pair_alike) {
                return;
            }
            let half = old.segments.iter().step_by(2);
            let half = half.map(|place| Atomic::from(place.load(Ordering::Relaxed, guard)));
            self.replace_directory(half.collect(), old.depth - 1, guard);
        }
    }

    fn replace_directory(&self, segments: Box<[Atomic<Segment>]>, depth: u32, guard: &Guard) {
        let next = Owned::new(Directory { segments, depth });
        let before = self.directory.swap(next, Ordering::AcqRel, guard);
        #[allow(unsafe_code, reason = "frees what `new` or this allocated")]
        // SAFETY: the swap has taken it out of the one place that led to it. Dropping it drops no segment: its places
        // are pointers without ownership.
        unsafe {
            guard.defer_destroy(before);
        }
    }
}

/// See [`Table::ahead`].
pub(super) struct Ahead<'t, H> {
    table: &'t Table,
    guard: &'t Guard,
    hashes: H,
    waiting: [(u64, Mixed); AHEAD],
    /// Whose turn is next, of all so far.
    next: usize,
    /// How many wait.
    count: usize,
}

impl<H: Iterator<Item = u64>> Iterator for Ahead<'_, H> {
    type Item = (u64, Mixed);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.count == 0 {
            return None;
        }
        let place = &mut self.waiting[self.next % AHEAD];
        self.next += 1;
        let item = *place;
        match self.hashes.next() {
            Some(hash) => *place = (hash, self.table.prefetch(hash, self.guard)),
            None => self.count -= 1,
        }
        Some(item)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let guard = &crossbeam_epoch::pin();
        let directory = self.directory(guard);
        let mut last = Shared::null();
        for place in &directory.segments {
            let segment = place.load(Ordering::Relaxed, guard);
            // The places of one segment are neighbours.
            if segment != last {
                #[allow(unsafe_code, reason = "frees what `publish` or `new` allocated")]
                // SAFETY: nobody else can reach the table any more, and each segment is met once.
                unsafe {
                    guard.defer_destroy(segment);
                }
            }
            last = segment;
        }
        #[allow(unsafe_code, reason = "frees what `new` or `replace_directory` allocated")]
        // SAFETY: nobody else can reach the table any more.
        unsafe {
            guard.defer_destroy(self.directory.load(Ordering::Relaxed, guard));
        }
    }
}

const SPOT_ZERO: Spot = Spot {
    run: RunId::NONE,
    offset: 0,
};

/// A segment that is being made.
struct Filling {
    segment: Box<Segment>,
    /// How many words of each bucket are in use.
    counts: [u8; BUCKETS],
    /// What has no room in its home bucket; it is placed last, when it is known where there is some.
    overflow: Vec<(usize, u64)>,
}

impl Filling {
    fn new(depth: u32) -> Self {
        Self {
            segment: Box::new(Segment::new(depth)),
            counts: [0; BUCKETS],
            overflow: Vec::new(),
        }
    }

    /// Takes the entries of `segment`.
    fn take(&mut self, segment: &Segment) {
        for (index, bucket) in segment.buckets.iter().enumerate() {
            for place in &bucket.0 {
                self.push(index, place.load(Ordering::Relaxed));
            }
        }
    }

    /// Takes a word from the bucket `index` of another segment, if it is an entry.
    #[inline]
    fn push(&mut self, index: usize, word: u64) {
        if !is_entry(word) {
            return;
        }
        let home = (index + BUCKETS - distance_of(word)) % BUCKETS;
        let count = usize::from(self.counts[home]);
        let Some(place) = self.segment.buckets[home].0.get_mut(count) else {
            self.overflow.push((home, word));
            return;
        };
        *place.get_mut() = word_of(tag_of(word), 0, spot_of(word));
        self.counts[home] += 1;
    }

    /// The segment, which is split `spread` earlier than others; what finds no room near its home goes to `spill`.
    fn finish(self, spread: u32, spill: &mut impl FnMut(Spot)) -> Box<Segment> {
        let mut segment = self.segment;
        let entries = self.counts.iter().map(|count| u32::from(*count)).sum();
        *segment.used.get_mut() = entries;
        *segment.entries.get_mut() = entries;
        for (home, word) in self.overflow {
            if segment.place(home, tag_of(word), spot_of(word), |_| false) != Inserted::Placed {
                spill(spot_of(word));
            }
        }
        segment.used_max = USED_MAX - spread;
        segment
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn spot(number: u64) -> Spot {
        Spot {
            run: RunId::new(usize::try_from(number / 4096).unwrap()).unwrap(),
            offset: u16::try_from(number % 4096).unwrap(),
        }
    }

    fn insert(table: &Table, hash: u64, place: Spot, guard: &Guard) -> Inserted {
        table.insert(hash, place, guard, |_| false, |_| panic!("no room"))
    }

    fn finds(table: &Table, hash: u64, place: Spot, guard: &Guard) -> bool {
        table
            .find(hash, guard, |found| (found == place).then_some(()))
            .is_some()
    }

    #[test]
    fn many_entries_come_and_go() {
        let table = Table::new();
        let guard = &crossbeam_epoch::pin();
        let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let count = 100_000;
        for number in 0..count {
            assert_eq!(
                insert(&table, hash(number), spot(number), guard),
                Inserted::Placed
            );
        }
        assert!((0..count).all(|number| finds(&table, hash(number), spot(number), guard)));
        assert!(table.directory(guard).depth >= 5);
        for number in 0..count {
            assert!(table.remove(hash(number), spot(number), guard, |_| panic!("no room")));
            assert!(!finds(&table, hash(number), spot(number), guard));
        }
        assert_eq!(table.directory(guard).depth, 0);
        assert_eq!(table.segment(Mixed(0), guard).entries_count(), 0);
    }

    #[test]
    fn churn_at_one_size_does_not_grow_the_table() {
        let table = Table::new();
        let guard = &crossbeam_epoch::pin();
        let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for number in 0..200_000 {
            insert(&table, hash(number), spot(number), guard);
            if let Some(old) = number.checked_sub(1500) {
                assert!(table.remove(hash(old), spot(old), guard, |_| panic!("no room")));
            }
        }
        assert!(
            table.directory(guard).depth <= 1,
            "{}",
            table.directory(guard).depth
        );
    }

    #[test]
    fn the_same_hash_is_noticed() {
        let table = Table::new();
        let guard = &crossbeam_epoch::pin();
        assert_eq!(insert(&table, 5, spot(1), guard), Inserted::Placed);
        let again = table.insert(5, spot(2), guard, |other| other == spot(1), |_| {});
        assert_eq!(again, Inserted::Same);
        assert!(!finds(&table, 5, spot(2), guard));
    }

    /// The bits of a hash that some blocks don't keep must not lead to another place.
    #[test]
    fn only_the_common_bits_of_a_hash_count() {
        let table = Table::new();
        let guard = &crossbeam_epoch::pin();
        insert(&table, 77, spot(1), guard);
        assert!(finds(&table, 77 | 1 << 51 | 1 << 63, spot(1), guard));
    }

    proptest! {
        #[test]
        fn a_table_equals_a_map(changes in proptest::collection::vec((any::<bool>(), 0_u64..8000), 0..20_000)) {
            let table = Table::new();
            let guard = &crossbeam_epoch::pin();
            let mut model: HashMap<u64, Spot> = HashMap::new();
            for (insertion, hash) in changes {
                if insertion && !model.contains_key(&hash) {
                    prop_assert_eq!(insert(&table, hash, spot(hash), guard), Inserted::Placed);
                    model.insert(hash, spot(hash));
                } else if !insertion {
                    let was_in = table.remove(hash, spot(hash), guard, |_| panic!("no room"));
                    prop_assert_eq!(was_in, model.remove(&hash).is_some());
                }
            }
            for hash in 0..8000 {
                prop_assert_eq!(finds(&table, hash, spot(hash), guard), model.contains_key(&hash));
            }
        }
    }
}
