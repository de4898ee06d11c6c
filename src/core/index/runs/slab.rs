//! Slab: the memory of all runs, by run number. The memory of a run keeps its address, even after the run is removed.
//! It can be reused for another run, and is freed when its chunk has no runs.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crossbeam_epoch::{Atomic, Owned, Shared};

use crate::epoch::Guard;

use super::RunId;
use super::run::Run;

/// Number of runs in a chunk of memory.
pub(super) const CHUNK_RUNS: usize = if cfg!(test) { 16 } else { 256 };
/// Number of chunks in a shelf, which is a list of pointers to chunks.
const SHELF_CHUNKS: usize = 1024;
const SHELVES: usize = RunId::END as usize / CHUNK_RUNS / SHELF_CHUNKS;

type Chunk = Vec<Run>;
type Shelf = Vec<Atomic<Chunk>>;

/// Memory of all runs of one index.
#[derive(Debug)]
pub(super) struct Slab {
    shelves: Vec<OnceLock<Shelf>>,
}

impl Slab {
    pub(super) fn new() -> Self {
        Self {
            shelves: (0..SHELVES).map(|_| OnceLock::new()).collect(),
        }
    }

    #[inline]
    fn chunk(&self, index: usize) -> Option<&Atomic<Chunk>> {
        let number = index / CHUNK_RUNS;
        self.shelves
            .get(number / SHELF_CHUNKS)?
            .get()?
            .get(number % SHELF_CHUNKS)
    }

    /// Returns the run `id`. `None` if its chunk has no memory: the chunk has not been made since it was last freed. If
    /// no run has had the number `id` yet, the result may be an empty run.
    #[inline]
    pub(super) fn get<'g>(&self, id: RunId, guard: &'g Guard) -> Option<&'g Run> {
        let chunk = self.chunk(id.index())?.load(Ordering::Acquire, guard.pinned());
        #[allow(
            unsafe_code,
            reason = "the one way to read what a pointer leads to without a lock"
        )]
        // SAFETY: a chunk comes from `Owned` in `make`. Only `free` frees it, after every guard that was held during
        // `free` is dropped. `guard` is held, and lives as long as the reference. All guards are of one collector.
        let chunk = unsafe { chunk.as_ref() }?;
        chunk.get(id.index() % CHUNK_RUNS)
    }

    /// Makes memory for the run `id`. Returns the growth of the slab in bytes. Only one writer at a time may call
    /// this.
    pub(super) fn make(&self, id: RunId, guard: &Guard) -> i64 {
        let shelf = self.shelves.get(id.index() / CHUNK_RUNS / SHELF_CHUNKS);
        shelf.map(|shelf| shelf.get_or_init(|| (0..SHELF_CHUNKS).map(|_| Atomic::null()).collect()));
        let is_missing = |chunk: &&Atomic<Chunk>| chunk.load(Ordering::Relaxed, guard.pinned()).is_null();
        let Some(chunk) = self.chunk(id.index()).filter(is_missing) else {
            return 0;
        };
        let runs: Chunk = (0..CHUNK_RUNS).map(|_| Run::default()).collect();
        chunk.store(Owned::new(runs), Ordering::Release);
        (CHUNK_RUNS * size_of::<Run>()) as i64
    }

    /// Frees the chunk with this number, which must have no runs, and returns its number of bytes. Only one writer at a
    /// time may call this.
    ///
    /// A reader that has found a run of the chunk before keeps its memory, in which the run stays as it was last: without
    /// blocks and holders. Its change counter tells of the step that took them.
    pub(super) fn release(&self, chunk: usize, guard: &Guard) -> usize {
        self.chunk(chunk * CHUNK_RUNS)
            .map_or(0, |chunk| free(chunk, guard))
    }

    /// Frees all chunks, and returns their number of bytes. Only one writer at a time may call this, and only when
    /// there are no runs.
    pub(super) fn clear(&self, guard: &Guard) -> usize {
        let chunks = self.shelves.iter().filter_map(OnceLock::get).flatten();
        chunks.map(|chunk| free(chunk, guard)).sum()
    }
}

/// Frees a chunk, and returns its number of bytes; 0 if it has no memory.
fn free(chunk: &Atomic<Chunk>, guard: &Guard) -> usize {
    let before = chunk.swap(Shared::null(), Ordering::AcqRel, guard.pinned());
    if before.is_null() {
        return 0;
    }
    #[allow(unsafe_code, reason = "frees what `make` allocated")]
    // SAFETY: the swap has taken `before` out of the only place that led to it. So new readers cannot find it any
    // more, and present readers hold a guard.
    unsafe {
        guard.defer_destroy(before);
    }
    CHUNK_RUNS * size_of::<Run>()
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.clear(&crate::epoch::pin());
    }
}
