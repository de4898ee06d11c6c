//! The sequence hashes of a query that gives tokens or block hashes: known from earlier searches, or computed where a search looks.

use crossbeam_epoch::Guard;

use crate::hash::{BlockHash, BlockSize, HashSeed, SequenceHash, Token, block_hash, next_sequence_hash};

use crate::index::runs::{CHUNK, CHUNK_BLOCKS, Digest, KnownChunk, RunStore};

/// What the hashes are computed from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Content<'a> {
    Blocks(&'a [BlockHash]),
    Tokens {
        tokens: &'a [Token],
        size: BlockSize,
        seed: HashSeed,
    },
}

impl Content<'_> {
    /// How many blocks there are.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Blocks(blocks) => blocks.len(),
            Self::Tokens { tokens, size, .. } => tokens.len() / size.as_usize(),
        }
    }

    /// The sequence hash of the first block, which must exist. It alone decides most misses.
    #[inline]
    pub(super) fn first(&self) -> SequenceHash {
        let mut first = [SequenceHash(0)];
        self.roll(0, 1, None, &mut first);
        first[0]
    }

    /// How many chunks are digested ahead, so that what is known of them is in the processor's cache when it is needed.
    #[inline]
    fn ahead(&self) -> usize {
        match self {
            Self::Blocks(_) => 6,
            // To digest one takes as long as to get what is known of it, and may be for nothing.
            Self::Tokens { .. } => 1,
        }
    }

    /// Adds the hashes of the blocks from `from` to `to` to `hashes`; `last` is the one before.
    fn roll(&self, from: usize, to: usize, last: Option<SequenceHash>, hashes: &mut [SequenceHash]) {
        let mut last = last;
        let mut next = |block: BlockHash| {
            let hash = next_sequence_hash(last, block);
            last = Some(hash);
            hash
        };
        match self {
            Self::Blocks(blocks) => {
                let blocks = blocks.get(from..to).unwrap_or_default();
                for (hash, block) in hashes.iter_mut().zip(blocks) {
                    *hash = next(*block);
                }
            }
            Self::Tokens { tokens, size, seed } => {
                let size = size.as_usize();
                let tokens = tokens.get(from * size..to * size).unwrap_or_default();
                // In one loop: while a step of the chain is waited for, the next blocks are hashed.
                for (hash, block) in hashes.iter_mut().zip(tokens.chunks_exact(size)) {
                    *hash = next(block_hash(block, *seed));
                }
            }
        }
    }
}

/// What earlier searches of an index have learned.
#[derive(Clone, Copy)]
pub(crate) struct Memory<'m> {
    pub(crate) store: &'m RunStore,
    pub(crate) guard: &'m Guard,
}

/// Blocks of a unit: half a known chunk, and what one fingerprint is of.
const UNIT: usize = CHUNK;

/// The blocks from a multiple of 32 on.
#[derive(Debug, Clone, Copy, Default)]
struct Unit {
    /// Where its hashes are, and how many of them have been computed.
    place: u32,
    computed: u32,
    end: Option<SequenceHash>,
    print: Option<u64>,
}

/// The hashes of one query, as far as a search has looked.
#[derive(Debug)]
pub(super) struct Rolled<'a> {
    content: Content<'a>,
    /// One after the other from position 0; the end of each but the last is known.
    units: Vec<Unit>,
    /// Those of units, in the order in which units needed any.
    hashes: Vec<SequenceHash>,
    /// Of the prompt up to the end of each chunk, and where that is kept.
    digests: Vec<(Digest, usize)>,
    /// How many chunks are digested at most, and kept.
    chunks: usize,
    /// How many chunks were known, one after the other, and whether nothing is kept of what came after the last of them.
    known: usize,
    has_last: bool,
    /// Whether the prompt has not come before, from the first chunk on that is not known.
    is_new: bool,
}

impl<'a> Rolled<'a> {
    pub(super) fn new(content: Content<'a>) -> Self {
        Self {
            content,
            units: Vec::new(),
            hashes: Vec::new(),
            digests: Vec::new(),
            chunks: content.len() / CHUNK_BLOCKS,
            known: 0,
            has_last: false,
            is_new: false,
        }
    }

    /// The sequence hash of the block at `index`, which must exist.
    #[inline]
    pub(super) fn hash(&mut self, index: usize, memory: Option<Memory<'_>>) -> SequenceHash {
        if index == 0 {
            return self.content.first();
        }
        let (unit, offset) = (index / UNIT, index % UNIT);
        self.open(unit, memory);
        if let Some(end) = self.units[unit].end
            && offset + 1 == UNIT
        {
            return end;
        }
        self.compute(unit, offset + 1);
        self.hashes[self.units[unit].place as usize + offset]
    }

    /// Fills `hashes` with those of the blocks from `from` on, all of one unit.
    pub(super) fn load(&mut self, from: usize, hashes: &mut [u64], memory: Option<Memory<'_>>) {
        let (unit, offset) = (from / UNIT, from % UNIT);
        self.open(unit, memory);
        let end = offset + hashes.len();
        self.compute(unit, end);
        let place = self.units[unit].place as usize;
        for (hash, own) in hashes.iter_mut().zip(&self.hashes[place + offset..place + end]) {
            *hash = own.0;
        }
    }

    /// The fingerprint of the 32 blocks from `from` on, where that is the beginning of a unit.
    #[inline]
    pub(super) fn print(&mut self, from: usize, memory: Memory<'_>) -> Option<u64> {
        let unit = from / UNIT;
        if !from.is_multiple_of(UNIT) || from + UNIT > self.content.len() {
            return None;
        }
        self.open(unit, Some(memory));
        if self.units[unit].print.is_none() {
            self.compute(unit, UNIT);
            let place = self.units[unit].place as usize;
            let hashes = self.hashes[place..].first_chunk()?;
            self.units[unit].print = Some(memory.store.prints.of(hashes));
        }
        self.units[unit].print
    }

    /// Keeps for later searches what has been computed of the first `agreed` blocks, which somebody has.
    pub(super) fn learn(&mut self, agreed: usize, memory: Memory<'_>) {
        if self.hashes.is_empty() {
            return;
        }
        let kept = self.chunks.min(agreed / CHUNK_BLOCKS);
        if self.has_last && kept > self.known {
            // Now something is kept of what comes after it.
            self.keep(self.known - 1, false, memory);
        }
        for chunk in self.known..kept {
            self.keep(chunk, self.is_new, memory);
        }
    }

    /// Keeps a chunk of which all is known or has been computed.
    fn keep(&mut self, chunk: usize, is_last: bool, memory: Memory<'_>) {
        let first = chunk * CHUNK_BLOCKS;
        let Some((digest, _)) = self.digests.get(chunk).copied() else {
            return;
        };
        let mut halves = [(0, 0); 2];
        for (half, from) in halves.iter_mut().zip([first, first + UNIT]) {
            let print = self.print(from, memory);
            let end = self.units.get(from / UNIT).and_then(|unit| unit.end);
            let (Some(end), Some(print)) = (end, print) else {
                return;
            };
            *half = (end.as_u64(), print);
        }
        let chunk = KnownChunk {
            ends: halves.map(|half| half.0),
            prints: halves.map(|half| half.1),
            is_last,
        };
        memory.store.learn(digest, &chunk, memory.guard);
    }

    /// Makes a unit be there, and the ends of all before it.
    #[inline]
    fn open(&mut self, unit: usize, memory: Option<Memory<'_>>) {
        while self.units.len() <= unit {
            let next = self.units.len();
            if let Some(before) = next.checked_sub(1)
                && self.units[before].end.is_none()
            {
                self.compute(before, UNIT);
            }
            if next == 0 {
                self.units.reserve_exact(self.content.len().div_ceil(UNIT));
            }
            let known = memory
                .filter(|_| next.is_multiple_of(2))
                .and_then(|memory| self.recall(next / 2, memory));
            match known {
                Some(KnownChunk { ends, prints, .. }) => {
                    let unit = |(end, print): (u64, u64)| Unit {
                        end: Some(SequenceHash(end)),
                        print: Some(print),
                        ..Unit::default()
                    };
                    self.units.extend(ends.into_iter().zip(prints).map(unit));
                }
                None => self.units.push(Unit::default()),
            }
        }
    }

    /// What is known of a chunk.
    fn recall(&mut self, chunk: usize, memory: Memory<'_>) -> Option<KnownChunk> {
        if chunk >= self.chunks {
            return None;
        }
        if chunk == 0 {
            self.digests.reserve_exact(self.chunks);
        }
        self.digest(self.chunks.min(chunk + 1 + self.content.ahead()), memory);
        let find = |(digest, place): &(Digest, usize)| memory.store.known.find(*digest, *place, memory.guard);
        let found = find(&self.digests[chunk]);
        match found {
            Some(found) if self.known == chunk => {
                (self.known, self.has_last) = (chunk + 1, found.is_last);
            }
            // What is missing may have given way to something else, and what comes after it be known.
            None if self.known == chunk
                && !self.has_last
                && !self.digests[chunk + 1..]
                    .iter()
                    .any(|digest| find(digest).is_some()) =>
            {
                (self.chunks, self.is_new) = (chunk + 1, true);
            }
            _ => {}
        }
        found
    }

    /// Digests the first `chunks` chunks.
    fn digest(&mut self, chunks: usize, memory: Memory<'_>) {
        let known = &memory.store.known;
        for next in self.digests.len()..chunks {
            let blocks = next * CHUNK_BLOCKS..(next + 1) * CHUNK_BLOCKS;
            let before = self.digests.last().map(|(digest, _)| *digest);
            let digest = match self.content {
                Content::Blocks(hashes) => {
                    let before = before.unwrap_or_else(|| known.beginning(0, 0));
                    known.extend_by_hashes(before, &hashes[blocks])
                }
                Content::Tokens { tokens, size, seed } => {
                    let before = before.unwrap_or_else(|| known.beginning(1, seed.as_u64()));
                    let size = size.as_usize();
                    known.extend_by_tokens(before, &tokens[blocks.start * size..blocks.end * size])
                }
            };
            let place = known.prefetch(digest, memory.guard);
            self.digests.push((digest, place));
        }
    }

    /// Computes the first `count` hashes of a unit that is open; there are so many blocks.
    fn compute(&mut self, unit: usize, count: usize) {
        let Unit { place, computed, .. } = self.units[unit];
        let (place, computed) = (place as usize, computed as usize);
        if computed >= count {
            return;
        }
        let last = match (computed, unit) {
            (0, 0) => None,
            (0, _) => self.units[unit - 1].end,
            _ => Some(self.hashes[place + computed - 1]),
        };
        let place = if computed == 0 { self.hashes.len() } else { place };
        self.hashes
            .resize(self.hashes.len().max(place + UNIT), SequenceHash(0));
        let from = unit * UNIT;
        let hashes = &mut self.hashes[place + computed..place + count];
        self.content.roll(from + computed, from + count, last, hashes);
        let own = &mut self.units[unit];
        // Both are below 2^25: positions are.
        own.place = u32::try_from(place).unwrap_or(u32::MAX);
        own.computed = u32::try_from(count).unwrap_or(0);
        if count == UNIT {
            own.end = self.hashes.get(place + UNIT - 1).copied();
        }
    }
}
