//! One run, in the form that readers use.
//!
//! ```text
//! run 2, from position 0   a b c d e f g      w1 has 7 blocks of it, w2 has 7, w3 has 3
//! run 3, after c                 x y z        w3 has 3
//! run 4, after g                         h i  w2 has 2
//! ```
//!
//! A run is an array of the sequence hashes of consecutive blocks; each block is the child of the previous block. A
//! run begins at position 0, or branches off a block of another run. In the second case the run *follows* that block,
//! and is a child of the other run. So the place of a block determines its whole prefix, whatever the hashes are.
//!
//! Every field is a word that can be read at any time. When a reader reads a field, the run's number may already
//! belong to another run. Then the reader gets wrong values, but no answer contains them; the documentation of the
//! index explains why.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::epoch::Guard;

use super::bars::Bars;
use super::entry::RosterEntry;
use super::header::{Header, Version};
use super::print::CHUNK;
use super::roster::Roster;
use super::{Spot, Wanted, is_same_at};
use crate::ahead::prefetch;
use crate::words::{Words, copy, word_at};

/// Number of holders whose entries fit into the run itself, without another allocation.
pub(super) const INLINE_ENTRIES: usize = 2;

/// Number of consecutive blocks that have one mark in common. A mark is the lowest byte of the hash of the last of
/// these blocks.
const MARKED: usize = 64;
const MARKS: usize = 20;

/// One run: an array of consecutive blocks, with the holders of these blocks. Its first cache line has the fields that
/// readers need.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Run {
    /// Block that the run branches off, as the number that [`Spot::bits`] returns; 0 if the run begins at position 0.
    pub(super) parent: AtomicU64,
    /// Hash of the first block.
    pub(super) first: AtomicU64,
    pub(super) header: Header,
    /// Hash of the last block, or the fragment of it that is known. It changes before the length does.
    pub(super) last: AtomicU64,
    /// Fingerprints of hashes, then fingerprints of content, then the hashes; see [`Column`].
    pub(super) column: Words,
    pub(super) entries: [AtomicU64; INLINE_ENTRIES],
    /// Roster entries that have no room in the run itself: the list of a [`Roster`].
    pub(super) more: Words,
    /// Tick of the recency clock in which the run was last used. Valid only if the index has a capacity.
    pub(crate) used: AtomicU32,
    /// Bars: which blocks are not resumable for which holders, as an array of [`Bars`]. Empty if all blocks are
    /// resumable.
    pub(super) bars: Words,
    /// One bit for each block: set if only a fragment of the block's hash is known. Empty if all hashes are whole.
    pub(super) short: Words,
    /// Number of twins that branch off blocks of the run. See [`Self::is_twin`].
    pub(super) twins: AtomicU32,
    /// Number of holders that have the last block of the run.
    pub(super) tops: AtomicU32,
    /// Number of holders that are storing blocks of this run and have released the lock on the runs. While it is above
    /// 0, no blocks are cut off the run.
    pub(super) pins: AtomicU32,
    /// Serial number of the run among all runs that the index has made; it wraps around. It distinguishes the run
    /// from other runs that had the same number earlier.
    pub(crate) birth: AtomicU32,
    /// Whether the run is a twin: when the run was made, the block before it already had another child with the same
    /// hash fragment.
    pub(super) is_twin: AtomicBool,
    /// Marks: the lowest byte of every 64th hash. There are as many as fit in the run's two cache lines. A query
    /// compares the marks first, to find where its blocks begin to differ from the blocks of the run.
    marks: [AtomicU8; MARKS],
}

/// Hashes of a run and their fingerprints, in one array. When the run grows, it gets another array.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column<'g> {
    prints: &'g [AtomicU64],
    contents: &'g [AtomicU64],
    hashes: &'g [AtomicU64],
    run: &'g Run,
}

/// Number of words of a [`Column`] with room for `blocks` blocks.
pub(super) fn column_words(blocks: usize) -> usize {
    blocks + blocks / CHUNK * 2
}

impl<'g> Column<'g> {
    /// Makes a column from the words of a run's array of hashes and fingerprints.
    #[inline]
    pub(super) fn of(run: &'g Run, words: &'g [AtomicU64]) -> Self {
        // There are n blocks and n / 32 fingerprints of each kind.
        let chunks = words.len() / (CHUNK + 2);
        let (prints, rest) = words.split_at(chunks);
        let (contents, hashes) = rest.split_at(chunks);
        Self {
            prints,
            contents,
            hashes,
            run,
        }
    }

    /// Copies the first `blocks` hashes to `other`. Also copies the fingerprints, as many as `other` has room for.
    pub(super) fn copy_to(self, other: Column<'_>, blocks: usize) {
        copy(self.prints, other.prints);
        copy(self.contents, other.contents);
        copy(&self.hashes[..blocks.min(self.hashes.len())], other.hashes);
    }

    /// Whether the block at `offset`, whose position is `position`, has the `wanted` hash. Only the bits that are
    /// known of both hashes are compared.
    #[inline]
    pub(crate) fn is(&self, offset: usize, position: u32, wanted: Wanted, guard: &Guard) -> bool {
        let own = self.hash(offset);
        own == wanted.hash
            || is_same_at(position, own, wanted.hash)
                && (!wanted.is_whole || self.is_completed_by(offset, position, wanted.hash, guard))
    }

    /// Whether the block at `offset` can have the whole hash `whole`. The caller has found that the bits that a lineage
    /// hash keeps are equal. If the run knows only a fragment of the hash, the result is `true`. If a writer has
    /// completed the hash since the caller's comparison, all bits are compared.
    #[cold]
    fn is_completed_by(&self, offset: usize, position: u32, whole: u64, guard: &Guard) -> bool {
        if self.run.is_short(offset, guard) {
            return is_same_at(position, self.hash(offset), whole);
        }
        // The hash may have been completed after the caller's comparison, perhaps in a newer array than this one.
        self.run.column(guard).hash(offset) == whole
    }

    /// Number of blocks for whose hashes the column has room.
    #[inline]
    pub(crate) fn capacity(&self) -> usize {
        self.hashes.len()
    }

    /// The hash of the block at `offset` in the run; 0 beyond the column.
    #[inline]
    pub(crate) fn hash(&self, offset: usize) -> u64 {
        word_at(self.hashes, offset)
    }

    pub(super) fn set_hash(&self, offset: usize, hash: u64) {
        if let Some(word) = self.hashes.get(offset) {
            word.store(hash, Ordering::Relaxed);
        }
    }

    /// Returns the fingerprint of the hashes in the chunk with this number. Chunk 0 begins at [`Run::chunks_from`].
    #[inline]
    pub(crate) fn print(&self, chunk: usize) -> u64 {
        word_at(self.prints, chunk)
    }

    pub(super) fn set_print(&self, chunk: usize, print: u64) {
        if let Some(word) = self.prints.get(chunk) {
            word.store(print, Ordering::Relaxed);
        }
    }

    /// Returns the fingerprint of the block hashes of a chunk (32 blocks), mixed by XOR with the fingerprint of the
    /// chunk's sequence hashes ([`Self::print`]). The block hashes come from a query that agreed with the chunk.
    #[inline]
    pub(crate) fn content(&self, chunk: usize) -> u64 {
        word_at(self.contents, chunk)
    }

    pub(crate) fn set_content(&self, chunk: usize, content: u64) {
        if let Some(word) = self.contents.get(chunk) {
            word.store(content, Ordering::Relaxed);
        }
    }

    /// Prefetches the hash at `offset`.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize) {
        self.hashes.get(offset).into_iter().for_each(prefetch);
    }

    /// Prefetches the first hash and the first `count` fingerprints of hashes. If `with_content` is true, also
    /// prefetches the fingerprints of content.
    #[inline]
    pub(crate) fn prefetch_prints(&self, count: usize, with_content: bool) {
        let prints = self.prints.iter().take(count).step_by(8);
        let contents = self.contents.iter().take(if with_content { count } else { 0 });
        let all = prints.chain(contents.step_by(8));
        all.chain(self.hashes.first()).for_each(prefetch);
    }
}

impl Run {
    /// Position of the run's first block.
    #[inline]
    pub(crate) fn start(&self) -> u32 {
        self.header.start()
    }

    /// Value of the run's change counter; see [`Header`].
    #[inline]
    pub(crate) fn version(&self) -> Version {
        self.header.version()
    }

    /// Whether no step has changed the run's entries since `version` was read; see [`Header::is_still`].
    #[inline]
    pub(crate) fn is_still(&self, version: Version) -> bool {
        self.header.is_still(version)
    }

    /// Whether the run has children. Becomes true before readers can find the first child. Becomes false only after
    /// readers can find no child any more.
    #[inline]
    pub(crate) fn is_followed(&self) -> bool {
        self.header.is_followed()
    }

    /// Whether twins branch off blocks of the run: several children of one block may have the same hash fragment.
    #[inline]
    pub(crate) fn has_twins(&self) -> bool {
        self.twins.load(Ordering::Acquire) > 0
    }

    /// Offset of the first block whose position is a multiple of 32. Blocks from this offset on have fingerprints.
    #[inline]
    pub(crate) fn chunks_from(&self) -> usize {
        (self.start() as usize).next_multiple_of(CHUNK) - self.start() as usize
    }

    /// Number of blocks of the run, never more than [`super::RUN_BLOCKS_MAX`].
    #[inline]
    pub(crate) fn len(&self) -> u16 {
        self.header.len()
    }

    /// Hash of the last block, or the fragment of it that is known. A writer changes this just before it changes
    /// [`Self::len`].
    #[inline]
    pub(crate) fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire)
    }

    /// Returns the block that the run branches off; `None` if the run begins at position 0.
    pub(crate) fn parent(&self) -> Option<Spot> {
        let bits = self.parent.load(Ordering::Acquire);
        (bits != 0).then(|| Spot::from_bits(bits))
    }

    #[inline]
    pub(crate) fn column<'g>(&'g self, guard: &'g Guard) -> Column<'g> {
        Column::of(self, self.column.get(guard))
    }

    /// Sets the marks (the lowest byte of every 64th hash) of blocks that have been added. Earlier blocks have their
    /// marks already.
    #[allow(clippy::cast_possible_truncation, reason = "a mark is the lowest byte")]
    pub(super) fn mark(&self, added: Range<usize>, hash: impl Fn(usize) -> u64) {
        let marks = self.marks.iter().enumerate();
        for (number, mark) in marks.take(added.end / MARKED).skip(added.start / MARKED) {
            mark.store(hash(number * MARKED + MARKED - 1) as u8, Ordering::Relaxed);
        }
    }

    /// Returns a range of offsets. The first difference between the query and the run is in the range or at its end, as
    /// far as the marks (bytes of some hashes) tell. `len` is the number of blocks that both have, and `wanted` gives
    /// the query's hash at an offset. Blocks before the range have equal marks, but may still differ. If the end of the
    /// range is below `len`, the block at the end surely differs.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "a mark is the lowest byte")]
    pub(crate) fn marked(&self, len: usize, mut wanted: impl FnMut(usize) -> u64) -> Range<usize> {
        let marks = self.marks.iter().enumerate().take(len / MARKED);
        // All marks are compared, without a branch, so that the reads of the query's hashes overlap.
        let differing = marks.fold(1 << (len / MARKED).min(MARKS), |differing, (number, mark)| {
            let is_other = mark.load(Ordering::Relaxed) != wanted(number * MARKED + MARKED - 1) as u8;
            differing | u32::from(is_other) << number
        });
        let same = differing.trailing_zeros() as usize * MARKED;
        let is_known = differing.count_ones() > 1;
        same..if is_known { same + MARKED - 1 } else { len }
    }

    /// Whether only a fragment of the hash at `offset` is known.
    pub(super) fn is_short(&self, offset: usize, guard: &Guard) -> bool {
        let word = self.short.get(guard).get(offset / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (offset % 64) & 1 == 1)
    }

    /// Whether the run branches off the block `parent` and begins with the `wanted` block. Only the bits that are
    /// known of both hashes are compared.
    #[inline]
    pub(crate) fn is_head(&self, parent: Option<Spot>, position: u32, wanted: Wanted, guard: &Guard) -> bool {
        let parent = parent.map_or(0, Spot::bits);
        let first = || self.first.load(Ordering::Acquire);
        self.parent.load(Ordering::Acquire) == parent
            && is_same_at(position, first(), wanted.hash)
            && (!wanted.is_whole
                || first() == wanted.hash
                || self.is_short(0, guard)
                || first() == wanted.hash)
            && self.len() > 0
    }

    /// Returns the roster of the run: its holders, and how many blocks of the run each of them has.
    #[inline]
    pub(crate) fn roster<'g>(&'g self, guard: &'g Guard) -> Roster<'g> {
        Roster::new(&self.entries, self.more.get(guard))
    }

    /// Returns the run's bars: which blocks are not resumable for which holders.
    #[inline]
    pub(crate) fn bars<'g>(&'g self, guard: &'g Guard) -> Bars<'g> {
        Bars::new(self.bars.get(guard))
    }

    /// Prefetches the pointer to the bars, which [`Self::prefetch_bars`] reads.
    #[inline]
    pub(crate) fn prefetch_bars_word(&self) {
        prefetch(&self.bars);
    }

    /// Prefetches the bars (marks of blocks that are not resumable) that a search needs after `agreed` leading blocks
    /// of the run agreed with the query. `agreed` is at least 1.
    #[inline]
    pub(crate) fn prefetch_bars(&self, agreed: usize, guard: &Guard) {
        let array = self.bars.get(guard);
        let guess = array.len() * (agreed - 1) / usize::from(self.len().max(1));
        let near = array.get(guess).or(array.last());
        array.first().into_iter().chain(near).for_each(prefetch);
    }

    /// Whether any block is not resumable for any holder. Reads nothing but the run itself.
    #[inline]
    pub(crate) fn has_bars(&self, guard: &Guard) -> bool {
        !self.bars.get(guard).is_empty()
    }

    /// Entries of all holders. Each entry is true at one instant, but different entries may be of different instants.
    #[inline]
    pub(crate) fn entries<'g>(&'g self, guard: &'g Guard) -> impl Iterator<Item = RosterEntry> + 'g {
        self.roster(guard).entries()
    }

    /// Records that the run was used in `tick` of the recency clock.
    #[inline]
    pub(crate) fn touch(&self, tick: u32) {
        // The tick is written once only, so that the readers of a much-used run don't all write to the run.
        if self.used.load(Ordering::Relaxed) != tick {
            self.used.store(tick, Ordering::Relaxed);
        }
    }
}
