//! Known chunks: what hashing 64 blocks of a prompt has given before, so that a prompt whose beginning is known is hashed once.
//!
//! A chain is 64 dependent steps a chunk. Here one look-up gives the sequence hashes of its blocks 32 and 64, and the fingerprints of both
//! halves, which say whether a run has the same blocks. All of that depends on nothing but the prompt and the index's secret words: so
//! an entry is never out of date, and losing one costs time alone.
//!
//! A chunk is found by a digest of the whole prompt up to its end, of 128 bits: NH ([`super::print`]) of 64 words at a time, and NH of these
//! sums. Under secret words two different prompts have the same with a probability of about 2^-63.
//!
//! A prompt that comes for the first time mostly never comes again. So of what is new only one chunk is digested and kept, marked as the
//! last. When a prompt goes on after such a chunk, it has come before, and the rest is kept, too.
//!
//! The table is a lockless one (R. Hyatt and T. Mann, "A lock-less transposition-table implementation for parallel search", 2002): a
//! line's key is stored mixed with a sum of its content, so that half of one entry and half of another make no entry.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_epoch::Guard;
use parking_lot::Mutex;

use crate::hash::{BlockHash, Token};

use super::words::Words;
use super::{fold, prefetch, random_key};

/// Blocks of a chunk.
pub(crate) const CHUNK_BLOCKS: usize = 64;
/// Words that a sum of NH is of, at most.
const SUM_WORDS: usize = 64;
/// Most lines: 4 MiB.
const LINES_MAX: u64 = 1 << 16;
/// A line for so many blocks of the index: four for a chunk, so that few have to give way to others.
const LINE_BLOCKS: u64 = 16;
/// Words of a line, which is a cache line.
const LINE_WORDS: usize = 8;
/// Lines among which an entry has a choice.
const WAYS: usize = 2;

/// What is known of a chunk, one of each half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KnownChunk {
    /// Sequence hashes of the last blocks.
    pub(crate) ends: [u64; 2],
    /// Fingerprints of all hashes.
    pub(crate) prints: [u64; 2],
    /// Whether nothing has been kept yet of what came after it.
    pub(crate) is_last: bool,
}

/// The digest of a prompt up to some place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest {
    sum: u128,
    /// Of how many sums of NH it is.
    sums: u64,
}

/// The known chunks of an index.
#[derive(Debug)]
pub(crate) struct KnownChunks {
    sums: [u64; SUM_WORDS],
    places: [u64; 4],
    beginning: [u64; 2],
    check: [u64; 4],
    table: Words,
    /// Held by whoever replaces the table.
    resizing: Mutex<()>,
}

impl KnownChunks {
    pub(super) fn new() -> Self {
        Self {
            sums: std::array::from_fn(|number| random_key(number as u64)),
            places: std::array::from_fn(|number| random_key(number as u64)),
            beginning: std::array::from_fn(|number| random_key(number as u64)),
            check: std::array::from_fn(|number| random_key(number as u64)),
            table: Words::new(),
            resizing: Mutex::new(()),
        }
    }

    /// The digest of nothing, of a kind of prompts with a seed.
    pub(crate) fn beginning(&self, kind: u64, seed: u64) -> Digest {
        let [one, other] = self.beginning;
        Digest {
            sum: u128::from(fold(kind ^ one, other)) << 64 | u128::from(fold(seed ^ other, one)),
            sums: 0,
        }
    }

    /// The digest of a prompt that goes on with these blocks.
    #[inline]
    pub(crate) fn extend_by_hashes(&self, digest: Digest, blocks: &[BlockHash]) -> Digest {
        self.extend_by(digest, blocks, |block| block.0)
    }

    /// The digest of a prompt that goes on with these tokens, an even number of them.
    #[inline]
    pub(crate) fn extend_by_tokens(&self, digest: Digest, tokens: &[Token]) -> Digest {
        let (pairs, _) = tokens.as_chunks::<2>();
        self.extend_by(digest, pairs, |[low, high]| {
            u64::from(*low) | u64::from(*high) << 32
        })
    }

    #[inline]
    fn extend_by<W>(&self, digest: Digest, items: &[W], word: impl Fn(&W) -> u64) -> Digest {
        let Digest {
            mut sum,
            sums: mut place,
        } = digest;
        for items in items.chunks(SUM_WORDS) {
            // Two sums, so that neither waits for the other.
            let mut sums = [0_u128; 2];
            let of = |item: &W, key: &u64| word(item).wrapping_add(*key);
            let keys = &self.sums[..items.len()];
            let (items, rest) = items.as_chunks::<4>();
            let (keys, rest_keys) = keys.as_chunks::<4>();
            for (item, key) in items.iter().zip(keys) {
                let product = |one: usize, other: usize| {
                    u128::from(of(&item[one], &key[one])) * u128::from(of(&item[other], &key[other]))
                };
                sums[0] = sums[0].wrapping_add(product(0, 1));
                sums[1] = sums[1].wrapping_add(product(2, 3));
            }
            for (item, key) in rest.chunks(2).zip(rest_keys.chunks(2)) {
                let factor = |number: usize| {
                    item.get(number)
                        .zip(key.get(number))
                        .map_or(1, |(item, key)| of(item, key))
                };
                sums[0] = sums[0].wrapping_add(u128::from(factor(0)) * u128::from(factor(1)));
            }
            let [low, high] = halves(sums[0].wrapping_add(sums[1]));
            let own = self.places;
            let low = low.wrapping_add(fold(place ^ own[0], own[1]));
            let high = high.wrapping_add(fold(place ^ own[2], own[3]));
            sum = sum.wrapping_add(u128::from(low) * u128::from(high));
            place += 1;
        }
        Digest { sum, sums: place }
    }

    /// Where the chunk is kept that ends a prompt with this digest; asks for that memory.
    #[inline]
    pub(crate) fn prefetch(&self, digest: Digest, guard: &Guard) -> usize {
        let lines = self.table(guard);
        let place = self.place(digest, lines.len());
        lines
            .get(place..place + WAYS)
            .into_iter()
            .flatten()
            .for_each(prefetch);
        place
    }

    /// What is known of the chunk that ends a prompt with this digest, where [`Self::prefetch`] has said.
    #[inline]
    pub(crate) fn find(&self, digest: Digest, place: usize, guard: &Guard) -> Option<KnownChunk> {
        let lines = self.table(guard).get(place..place + WAYS)?;
        lines.iter().find_map(|line| self.read(line, digest))
    }

    /// Keeps what is known of a chunk, in place of another one where there are too many. The index has `blocks()` blocks. Says by how many
    /// bytes the table has grown.
    pub(super) fn insert(
        &self,
        digest: Digest,
        chunk: &KnownChunk,
        blocks: impl Fn() -> u64,
        guard: &Guard,
    ) -> i64 {
        let grown = self.fit(blocks, guard);
        let table = self.table(guard);
        let place = self.place(digest, table.len());
        let mut lines = table.get(place..place + WAYS).unwrap_or_default().iter();
        let own = lines
            .clone()
            .find_map(|line| self.read(line, digest).map(|known| (line, known)));
        if own.is_some_and(|(_, known)| known == *chunk) {
            return grown;
        }
        let is_free = |line: &&[AtomicU64; LINE_WORDS]| line[1].load(Ordering::Relaxed) == 0;
        // Mostly the other one is free; else either may go.
        let free = lines.clone().find(is_free);
        let any = lines.nth(usize::from(chunk.ends[1] & 1 == 1));
        if let Some(line) = own.map(|(line, _)| line).or(free).or(any) {
            let [one, two] = chunk.ends;
            let words = [
                one,
                two,
                chunk.prints[0],
                chunk.prints[1],
                u64::from(chunk.is_last),
            ];
            let [low, high] = halves(digest.sum);
            for (place, word) in line
                .iter()
                .zip([low ^ self.sum(words), high].into_iter().chain(words))
            {
                place.store(word, Ordering::Relaxed);
            }
        }
        grown
    }

    /// Forgets all; says by how many bytes the table has grown, a negative number.
    pub(super) fn clear(&self, guard: &Guard) -> i64 {
        let _resizing = self.resizing.lock();
        self.resize(0, guard)
    }

    /// Makes a new table where the index has outgrown this one, or the other way round. What was known is learned again.
    fn fit(&self, blocks: impl Fn() -> u64, guard: &Guard) -> i64 {
        let is_fit = |lines: usize| {
            let (lines, wanted) = (lines as u64, lines_for(blocks()));
            wanted <= lines && lines <= wanted.saturating_mul(4)
        };
        if is_fit(self.table.get(guard).len() / LINE_WORDS) {
            return 0;
        }
        let Some(_resizing) = self.resizing.try_lock() else {
            return 0;
        };
        let lines = self.table.get(guard).len() / LINE_WORDS;
        if is_fit(lines) {
            return 0;
        }
        self.resize(usize::try_from(lines_for(blocks())).unwrap_or(0), guard)
    }

    fn resize(&self, lines: usize, guard: &Guard) -> i64 {
        // One more, so that the others can begin where a cache line does.
        let words = if lines == 0 { 0 } else { (lines + 1) * LINE_WORDS };
        let before = self.table.replace(words, |_| 0, guard);
        let bytes = |words: usize| i64::try_from(words * 8).unwrap_or(i64::MAX);
        bytes(words) - bytes(before)
    }

    /// The lines, each a cache line.
    #[inline]
    fn table<'g>(&self, guard: &'g Guard) -> &'g [[AtomicU64; LINE_WORDS]] {
        let words = self.table.get(guard);
        // The one line more leaves room to begin where a cache line does.
        let skipped = (words.as_ptr().addr().wrapping_neg() / size_of::<u64>()) % LINE_WORDS;
        let Some(words) = words.get(skipped..) else {
            return &[];
        };
        let lines = ((words.len() + skipped) / LINE_WORDS).saturating_sub(1);
        words.as_chunks().0.get(..lines).unwrap_or_default()
    }

    /// The first of the lines that can have an entry, of so many.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to the number of lines")]
    fn place(&self, digest: Digest, lines: usize) -> usize {
        let ([low, high], [one, other]) = (halves(digest.sum), self.beginning);
        // There are none, or a power of two.
        let ways = lines / WAYS;
        (fold(low ^ one, high ^ other) as usize & ways.saturating_sub(1)) * WAYS
    }

    #[inline]
    fn read(&self, line: &[AtomicU64; LINE_WORDS], digest: Digest) -> Option<KnownChunk> {
        let word = |number: usize| line[number].load(Ordering::Relaxed);
        let [low, high] = halves(digest.sum);
        if word(1) != high {
            return None;
        }
        let words = [word(2), word(3), word(4), word(5), word(6)];
        (word(0) ^ self.sum(words) == low).then_some(KnownChunk {
            ends: [words[0], words[1]],
            prints: [words[2], words[3]],
            is_last: words[4] != 0,
        })
    }

    #[inline]
    fn sum(&self, words: [u64; 5]) -> u64 {
        let [one, two, three, four, five] = words;
        let keys = self.check;
        let sum = fold(one ^ keys[0], two.wrapping_add(keys[1]))
            ^ fold(three ^ keys[2], four.wrapping_add(keys[3]));
        sum.wrapping_add(five)
    }
}

/// How many lines are good for so many blocks: a power of two, or none.
fn lines_for(blocks: u64) -> u64 {
    let lines = (blocks / LINE_BLOCKS).min(LINES_MAX);
    if lines < WAYS as u64 {
        0
    } else {
        1 << lines.ilog2()
    }
}

#[allow(clippy::cast_possible_truncation, reason = "halves are meant")]
fn halves(number: u128) -> [u64; 2] {
    [number as u64, (number >> 64) as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(known: &KnownChunks, digest: Digest, guard: &Guard) -> Option<KnownChunk> {
        known.find(digest, known.prefetch(digest, guard), guard)
    }

    fn chunk(number: u64) -> KnownChunk {
        KnownChunk {
            ends: [number, number + 1],
            prints: [number + 2, number + 3],
            is_last: number % 2 == 1,
        }
    }

    #[test]
    fn digests_tell_prompts_apart_wherever_they_differ() {
        let known = KnownChunks::new();
        let words: Vec<BlockHash> = (0..150).map(BlockHash).collect();
        let start = known.beginning(0, 0);
        let whole = known.extend_by_hashes(start, &words);
        let half = known.extend_by_hashes(start, &words[..64]);
        assert_eq!(known.extend_by_hashes(half, &words[64..]), whole);
        for place in 0..words.len() {
            let mut other = words.clone();
            other[place].0 ^= 1 << (place % 64);
            assert_ne!(known.extend_by_hashes(start, &other), whole, "at {place}");
        }
        assert_ne!(known.extend_by_hashes(known.beginning(1, 0), &words), whole);
        assert_ne!(known.extend_by_hashes(known.beginning(0, 1), &words), whole);
        let tokens: Vec<Token> = (0..150).flat_map(|low| [low, 0]).collect();
        assert_eq!(known.extend_by_tokens(start, &tokens), whole);
    }

    #[test]
    fn a_table_of_any_size_gives_what_was_put_in_or_nothing() {
        let known = KnownChunks::new();
        let guard = &crossbeam_epoch::pin();
        for blocks in [0, 31, 32, 100, 5000, 200, 0] {
            let mut bytes = 0;
            let digest = |number: u64| known.extend_by_hashes(known.beginning(0, 0), &[BlockHash(number)]);
            for number in 0..1000 {
                bytes += known.insert(digest(number), &chunk(number), || blocks, guard);
                let found = find(&known, digest(number), guard);
                assert_eq!(
                    found,
                    (blocks >= 32).then(|| chunk(number)),
                    "{number} of {blocks}"
                );
            }
            let kept = (0..1000).filter_map(|number| find(&known, digest(number), guard).zip(Some(number)));
            let kept = kept
                .inspect(|(found, number)| assert_eq!(*found, chunk(*number)))
                .count() as u64;
            assert!(kept <= lines_for(blocks), "{kept}");
            let held = known.table.get(guard).len() * 8;
            assert!(
                held as u64 <= blocks * 16 + 64,
                "{held} bytes for {blocks} blocks"
            );
            assert!(bytes.unsigned_abs() <= 512 * 1024);
        }
        known.clear(guard);
        assert!(known.table.get(guard).is_empty());
    }

    #[test]
    fn entries_that_are_written_at_the_same_time_are_never_mixed() {
        let known = KnownChunks::new();
        let digest = |number: u64| known.extend_by_hashes(known.beginning(0, 0), &[BlockHash(number)]);
        std::thread::scope(|scope| {
            for writer in 0..3 {
                let (known, digest) = (&known, &digest);
                scope.spawn(move || {
                    let guard = &crossbeam_epoch::pin();
                    for step in 0..100_000_u64 {
                        let number = (step * 7 + writer) % 12;
                        known.insert(
                            digest(number),
                            &chunk(number * 1000),
                            || 32 + step / 30_000 * 32,
                            guard,
                        );
                        let number = (step + writer) % 12;
                        if let Some(found) = find(known, digest(number), guard) {
                            assert_eq!(found, chunk(number * 1000));
                        }
                    }
                });
            }
        });
    }
}
