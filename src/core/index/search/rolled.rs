//! Sequence hashes of a query that gives tokens or block hashes. They are computed only for the blocks that a search
//! needs.
//!
//! The sequence hash of a block is computed from that of the previous block, so each computation depends on the one
//! before. A run that agrees with the query up to some block already has that block's hash. So a search takes the
//! previous hash of each block from the run, and the computations of a chunk are independent of each other.
//!
//! When 32 blocks of a query agree with a run for the first time, the run keeps a fingerprint of their block hashes
//! ([`Column::content`]). For the next query with these blocks, the search computes this fingerprint instead of 32
//! sequence hashes. The fingerprint is mixed with the fingerprints of the run's own hashes, and of the hashes before
//! them. The run may have other hashes later, or another run may get its number. In both cases the old fingerprint no
//! longer matches.

use crate::hash::{BlockHash, BlockSize, HashSeed, SequenceHash, Token, block_hash, next_sequence_hash};

use crate::index::hook::point;
use crate::index::runs::{CHUNK, Column, Prints, Wanted};

/// Tokens or block hashes from which sequence hashes are computed.
#[derive(Debug, Clone, Copy)]
pub(super) enum QueryContent<'a> {
    Blocks(&'a [BlockHash]),
    Tokens {
        tokens: &'a [Token],
        size: BlockSize,
        /// Number of tokens after a block that are hashed together with the block.
        ahead: usize,
        seed: HashSeed,
    },
}

impl QueryContent<'_> {
    /// Number of blocks of the query.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Blocks(blocks) => blocks.len(),
            Self::Tokens {
                tokens, size, ahead, ..
            } => tokens.len().saturating_sub(*ahead) / size.as_usize(),
        }
    }

    /// Returns the block hashes of the blocks from `from` to `to`. All of these blocks must exist, and there may be
    /// at most 32. Hashes that must be computed are written to `buffer`.
    #[inline]
    fn blocks<'b>(&'b self, from: usize, to: usize, buffer: &'b mut [BlockHash; CHUNK]) -> &'b [BlockHash] {
        match self {
            Self::Blocks(blocks) => &blocks[from..to],
            Self::Tokens {
                tokens,
                size,
                ahead,
                seed,
            } => {
                let size = size.as_usize();
                let tokens = &tokens[from * size..to * size + ahead];
                let tokens = tokens.windows(size + ahead).step_by(size);
                for (block, tokens) in buffer.iter_mut().zip(tokens) {
                    *block = block_hash(tokens, *seed);
                }
                &buffer[..to - from]
            }
        }
    }
}

/// Sequence hashes of one query that are computed step by step, with the number of leading blocks whose hashes are
/// already known.
#[derive(Debug)]
pub(super) struct Rolled<'a> {
    content: QueryContent<'a>,
    /// Number of leading blocks of the query whose sequence hashes are already known.
    done: usize,
    /// Sequence hash of the last block whose hash is known; `None` before the first.
    last: Option<SequenceHash>,
}

impl<'a> Rolled<'a> {
    pub(super) fn new(content: QueryContent<'a>) -> Self {
        Self {
            content,
            done: 0,
            last: None,
        }
    }

    /// Returns the sequence hash of the block at `index`, which must exist. The call is fast if exactly the hashes
    /// before this block are known.
    #[inline]
    pub(super) fn hash(&mut self, index: usize) -> SequenceHash {
        self.pass(index);
        self.next()
    }

    /// Computes sequence hashes until exactly those of the first `count` blocks are known. If more hashes are known
    /// already, starts again at the first block.
    #[inline]
    fn pass(&mut self, count: usize) {
        if count < self.done {
            *self = Self::new(self.content);
        }
        while self.done < count {
            self.step(self.next());
        }
    }

    /// Returns the sequence hash of the first block whose hash has not been computed yet.
    fn next(&self) -> SequenceHash {
        let mut buffer = [BlockHash(0); CHUNK];
        let blocks = self.content.blocks(self.done, self.done + 1, &mut buffer);
        next_sequence_hash(self.last, blocks[0])
    }

    fn step(&mut self, hash: SequenceHash) {
        (self.done, self.last) = (self.done + 1, Some(hash));
    }

    /// Returns how many of a run's first `len` blocks agree with the query's blocks from `start` on. Both query and run
    /// must have that many blocks. `is` compares the run's block at an offset with a hash. The run may know only a
    /// fragment of the block's hash; then `is` compares the fragments.
    pub(super) fn agreement(
        &mut self,
        column: Column<'_>,
        start: usize,
        len: usize,
        prints: &Prints,
        is: impl Fn(usize, Wanted) -> bool,
    ) -> usize {
        self.pass(start);
        let content = self.content;
        let mut buffer = [BlockHash(0); CHUNK];
        let mut agreed = 0;
        while agreed < len {
            point();
            let at = start + agreed;
            // Each fingerprint covers 32 blocks, from a position on that is a multiple of 32. `count` ends with such a
            // chunk, or with the query.
            let count = (CHUNK - at % CHUNK).min(len - agreed);
            let blocks = content.blocks(at, at + count, &mut buffer);
            let chunk = agreed / CHUNK;
            let print = self.content_print(column, agreed, blocks, prints);
            if print.is_some_and(|print| print ^ column.print(chunk) == column.content(chunk)) {
                agreed += CHUNK;
                continue;
            }
            self.pass_run(column, start, agreed);
            let (same, own) = self.follow(column, agreed, blocks);
            if let Some(print) = print.filter(|_| same == CHUNK) {
                // The fingerprint is bound to the hashes that were compared, even if the run has other hashes by now.
                column.set_content(chunk, print ^ prints.of(&own));
            }
            agreed += same;
            for block in &blocks[same..] {
                let hash = next_sequence_hash(self.last, *block);
                if !is(agreed, Wanted::whole(hash.0)) {
                    return agreed;
                }
                self.step(hash);
                agreed += 1;
            }
        }
        self.pass_run(column, start, agreed);
        agreed
    }

    /// Returns a fingerprint of the block hashes `blocks` and of the run's blocks before `offset`. `None` if `blocks`
    /// is not a whole chunk. When these blocks have agreed with the run, the run keeps the fingerprint, mixed with the
    /// fingerprint of its own hashes.
    #[inline]
    fn content_print(
        &self,
        column: Column<'_>,
        offset: usize,
        blocks: &[BlockHash],
        prints: &Prints,
    ) -> Option<u64> {
        let before = match (offset / CHUNK).checked_sub(1) {
            Some(before) => column.print(before),
            None => self.last.map_or(0, |last| last.0),
        };
        Some(prints.of_content(before, blocks.try_into().ok()?))
    }

    /// Records that the query's sequence hashes are known up to and including the first `agreed` blocks of a run. The
    /// run begins at the position `start`, and agrees with the query in these blocks. The query must have all of these
    /// blocks.
    #[inline]
    fn pass_run(&mut self, column: Column<'_>, start: usize, agreed: usize) {
        if self.done < start + agreed {
            self.done = start + agreed;
            self.last = Some(SequenceHash(column.hash(agreed - 1)));
        }
    }

    /// Compares `blocks` with the run's blocks from `offset` on. Returns how many leading ones agree, and the run's 32
    /// hashes from `offset` on. Records that the sequence hashes of the blocks that agree are known.
    fn follow(
        &mut self,
        column: Column<'_>,
        offset: usize,
        blocks: &[BlockHash],
    ) -> (usize, [SequenceHash; CHUNK]) {
        let own: [_; CHUNK] = std::array::from_fn(|index| SequenceHash(column.hash(offset + index)));
        // The run has the hash before each block, so no computation waits for the one before.
        let is_same = |index: &usize| {
            let before = index.checked_sub(1).map_or(self.last, |before| Some(own[before]));
            next_sequence_hash(before, blocks[*index]) == own[*index]
        };
        let same = (0..blocks.len()).take_while(is_same).count();
        if same > 0 {
            (self.done, self.last) = (self.done + same, Some(own[same - 1]));
        }
        (same, own)
    }
}
