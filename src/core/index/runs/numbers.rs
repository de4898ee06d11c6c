//! Numbers of runs: which of them are in use, and which of them are in a queue of runs to evict.
//!
//! The slab frees memory by chunks of [`CHUNK_RUNS`] consecutive numbers. So the lowest free number is given out first:
//! the runs that stay gather in few chunks, and the others become free as a whole.

use std::collections::BTreeSet;

use super::RunId;
use super::slab::CHUNK_RUNS;

/// Number of chunks that all run numbers make.
const CHUNKS: usize = RunId::END as usize / CHUNK_RUNS;

/// One bit for each run number of a chunk.
type Bits = [u64; CHUNK_RUNS.div_ceil(64)];

/// State of the run numbers of one chunk.
#[derive(Debug, Default)]
struct ChunkNumbers {
    used: Bits,
    /// Numbers that are in a queue of runs to evict. A number can be in a queue although its run has gone.
    queued: Bits,
    /// Number of bits that are set in `used`.
    count: usize,
}

/// Memory of the slab that nobody needs after a run has gone.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unneeded {
    Nothing,
    /// The chunk with this number.
    Chunk(usize),
    /// All chunks: no run is left.
    All,
}

/// All run numbers of one index.
#[derive(Debug, Default)]
pub(super) struct RunNumbers {
    chunks: Vec<ChunkNumbers>,
    /// Chunks that have memory and a free number.
    open: BTreeSet<usize>,
    /// Chunks whose memory has been freed.
    freed: BTreeSet<usize>,
    /// Chunk that had no run when it was last looked at. It keeps its memory, so that a few runs that come and go do
    /// not free and make a chunk each time.
    spare: Option<usize>,
    /// Number of runs in use.
    runs: usize,
}

/// Returns the word of a number in [`Bits`], and the bit in that word.
fn place_of(id: RunId) -> (usize, u64) {
    let offset = id.index() % CHUNK_RUNS;
    (offset / 64, 1 << (offset % 64))
}

impl RunNumbers {
    /// Returns a number that is not in use, and marks it as used. `None` if there is no such number.
    pub(super) fn take(&mut self) -> Option<RunId> {
        let chunk = match self.open.first() {
            Some(chunk) => *chunk,
            None => self.open_chunk()?,
        };
        let numbers = self.chunks.get_mut(chunk)?;
        let (at, word) = numbers
            .used
            .iter_mut()
            .enumerate()
            .find(|(_, word)| **word != u64::MAX)?;
        let bit = word.trailing_ones();
        *word |= 1 << bit;
        numbers.count += 1;
        if numbers.count == CHUNK_RUNS {
            self.open.remove(&chunk);
        }
        self.runs += 1;
        let number = u32::try_from(chunk * CHUNK_RUNS + at * 64).ok()? + bit;
        Some(RunId::new(number))
    }

    /// Adds a chunk without runs to the open ones, and returns its number.
    fn open_chunk(&mut self) -> Option<usize> {
        let chunk = self.freed.pop_first().unwrap_or(self.chunks.len());
        if chunk == CHUNKS {
            return None;
        }
        if chunk == self.chunks.len() {
            self.chunks.push(ChunkNumbers::default());
        }
        if let Some(first) = self.chunks.first_mut().filter(|_| chunk == 0) {
            // No run has the number 0.
            (first.used[0], first.count) = (1, 1);
        }
        self.open.insert(chunk);
        Some(chunk)
    }

    /// Marks the number of a run that has gone as free. Returns the memory that the caller must free.
    pub(super) fn give_back(&mut self, id: RunId) -> Unneeded {
        let (chunk, (word, bit)) = (id.index() / CHUNK_RUNS, place_of(id));
        let Some(numbers) = self.chunks.get_mut(chunk) else {
            return Unneeded::Nothing;
        };
        numbers.used[word] &= !bit;
        numbers.count -= 1;
        self.runs -= 1;
        if self.runs == 0 {
            *self = Self::default();
            return Unneeded::All;
        }
        let is_empty = numbers.count == 0;
        self.open.insert(chunk);
        if !is_empty {
            return Unneeded::Nothing;
        }
        let is_spare = |spare: &usize| self.chunks.get(*spare).is_some_and(|numbers| numbers.count == 0);
        let spare = self.spare.filter(is_spare).unwrap_or(chunk);
        self.spare = Some(spare.min(chunk));
        if spare == chunk {
            return Unneeded::Nothing;
        }
        let gone = spare.max(chunk);
        self.open.remove(&gone);
        self.freed.insert(gone);
        Unneeded::Chunk(gone)
    }

    /// Records whether a number is in a queue of runs to evict. Returns whether it was in one before.
    pub(super) fn set_queued(&mut self, id: RunId, is_queued: bool) -> bool {
        let (word, bit) = place_of(id);
        let Some(numbers) = self.chunks.get_mut(id.index() / CHUNK_RUNS) else {
            return false;
        };
        let was_queued = numbers.queued[word] & bit != 0;
        numbers.queued[word] = numbers.queued[word] & !bit | if is_queued { bit } else { 0 };
        was_queued
    }

    /// One more than the largest number that has been in use since there was last no run.
    pub(super) fn end(&self) -> u32 {
        u32::try_from(self.chunks.len() * CHUNK_RUNS).unwrap_or(RunId::END)
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.capacity() * size_of::<ChunkNumbers>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvatlas_lab::random::Random;

    use super::*;

    #[test]
    fn no_number_is_given_twice_and_chunks_without_runs_are_freed() {
        let (mut random, mut numbers) = (Random::new(8), RunNumbers::default());
        let (mut used, mut freed, mut chunks_freed) = (Vec::new(), BTreeSet::new(), 0);
        for step in 0..40_000 {
            let grows = step / 4_000 % 2 == 0;
            if random.chance(if grows { 60 } else { 40 }) || used.is_empty() {
                let id = numbers.take().unwrap();
                assert!(id.index() > 0 && !used.contains(&id) && id.0 < numbers.end());
                freed.remove(&(id.index() / CHUNK_RUNS));
                used.push(id);
            } else {
                let id = used.swap_remove(random.below(used.len()));
                match numbers.give_back(id) {
                    Unneeded::All => freed.clear(),
                    Unneeded::Chunk(chunk) => {
                        assert!(freed.insert(chunk));
                        chunks_freed += 1;
                    }
                    Unneeded::Nothing => {}
                }
            }
            let held: BTreeSet<usize> = used.iter().map(|id| id.index() / CHUNK_RUNS).collect();
            assert!(held.is_disjoint(&freed));
            let chunks = numbers.chunks.len() - freed.len();
            // Chunk 0 keeps its memory as long as there is any run; one further chunk is spared.
            assert!(chunks <= held.len() + 2, "{chunks} {held:?}");
        }
        assert!(chunks_freed > 100, "{chunks_freed}");
    }
}
