//! Reader of a forest from an untrusted file.

use crate::hash::{Position, SequenceHash};
use crate::index::{HolderPart, RestoredRun};

use super::bytes::Bytes;
use super::{BEGINS, CANDIDATES_MAX, ENDS, ForestError, ONLY, PARTS_MAX, PATH_ENTRIES_MAX, RUN_BLOCKS_MAX};

/// The runs of one frame, after all checks, and for each run how many of its blocks each holder has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ForestChunk {
    runs: Vec<ForestRun>,
    hashes: Vec<SequenceHash>,
    /// Parts of the runs, sorted by holder. The parts of each holder are in the order of the runs.
    parts: Vec<RunPart>,
    /// Number of candidates (holders of the block before a run) that were checked for all runs of the frame.
    candidates: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ForestRun {
    position: u32,
    parent: Option<SequenceHash>,
    /// Index of the run's first hash in the chunk's `hashes`.
    first: usize,
    len: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RunPart {
    holder: u32,
    run: u32,
    blocks: u16,
}

impl ForestChunk {
    /// Number of runs in the chunk.
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Number of distinct blocks in the chunk.
    pub fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Returns the runs of each holder, with the holder's number in the file. Parents come before children.
    pub fn holders(&self) -> impl Iterator<Item = (u32, impl Iterator<Item = RestoredRun<'_>>)> {
        let by_holder = self.parts.chunk_by(|one, other| one.holder == other.holder);
        by_holder.filter_map(|parts| {
            let number = parts.first()?.holder;
            Some((number, parts.iter().filter_map(|part| self.restored(*part))))
        })
    }

    fn restored(&self, part: RunPart) -> Option<RestoredRun<'_>> {
        let run = self.runs.get(part.run as usize)?;
        let end = run.first + usize::from(part.blocks);
        Some(RestoredRun {
            position: run.position,
            parent: run.parent,
            hashes: self.hashes.get(run.first..end)?,
        })
    }
}

/// Reader of the forests of one file, frame by frame.
#[derive(Debug, Default)]
pub(in super::super) struct ForestReader {
    forest: Option<Forest>,
}

/// Forest of blocks whose first frame has been read, and whose last frame has not.
#[derive(Debug)]
struct Forest {
    /// Numbers of the holders, sorted.
    holders: Vec<u32>,
    levels: Vec<ReaderLevel>,
    /// Number of runs in `levels`, plus the number of their holders.
    path_entries: usize,
    /// Hashes of the blocks from position 0 to the end of the last run.
    path: Vec<SequenceHash>,
}

/// A run from which the next run may branch off, or an ancestor of such a run.
#[derive(Debug)]
struct ReaderLevel {
    start: usize,
    /// Number of the run's leading blocks from which a child may still branch off. Each child must branch off at an
    /// earlier block than the child before it, or at the same block.
    len: usize,
    parts: Vec<HolderPart>,
}

impl ForestReader {
    /// Whether the first frame of a forest has been read, and its last frame has not.
    pub(in super::super) fn is_open(&self) -> bool {
        self.forest.is_some()
    }

    /// Reads a frame's payload. `holders` is a number of holder frames that have been read so far: those of holders whose
    /// blocks are written as a forest, not as events.
    pub(in super::super) fn read(
        &mut self,
        payload: &[u8],
        holders: u32,
    ) -> Result<ForestChunk, ForestError> {
        let mut bytes = Bytes(payload);
        let flags = bytes.byte()?;
        let begins = flags & BEGINS != 0;
        if flags & !(BEGINS | ENDS) != 0 || begins == self.is_open() {
            return Err(ForestError::Flags { flags });
        }
        let mut forest = match self.forest.take() {
            Some(forest) => forest,
            None => Forest::begin(&mut bytes, holders)?,
        };
        let chunk = forest.read(&mut bytes)?;
        let open = forest.levels.len();
        if flags & ENDS == 0 {
            self.forest = Some(forest);
        } else if open > 0 {
            return Err(ForestError::Unfinished { open });
        }
        Ok(chunk)
    }
}

impl Forest {
    fn begin(bytes: &mut Bytes<'_>, known: u32) -> Result<Self, ForestError> {
        let known = known as usize;
        let count = bytes.at_most(known, "the number of holders")?;
        let mut holders = Vec::new();
        let mut next = 0;
        for _ in 0..count {
            let most = known.saturating_sub(next + 1);
            let number = next + bytes.at_most(most, "the distance between holders")?;
            if number >= known {
                return Err(ForestError::OutOfRange {
                    what: "the number of a holder",
                    number: number as u64,
                    most,
                });
            }
            // The number is below `known`, so it fits.
            holders.push(u32::try_from(number).unwrap_or(u32::MAX));
            next = number + 1;
        }
        Ok(Self {
            holders,
            levels: Vec::new(),
            path_entries: 0,
            path: Vec::new(),
        })
    }

    fn read(&mut self, bytes: &mut Bytes<'_>) -> Result<ForestChunk, ForestError> {
        let mut chunk = ForestChunk::default();
        let mut blocks = 0;
        let count = bytes.number()?;
        for run in 0..count {
            // A run takes several bytes of the payload, which is too short for 2^32 runs.
            let number = u32::try_from(run).map_err(|_| ForestError::Cut)?;
            let len = self.read_run(bytes, number, blocks, &mut chunk)?;
            blocks += len;
        }
        if bytes.0.len() != blocks * 8 {
            let bytes = bytes.0.len();
            return Err(ForestError::Hashes { blocks, bytes });
        }
        let (hashes, _) = bytes.0.as_chunks::<8>();
        chunk
            .hashes
            .extend(hashes.iter().map(|hash| SequenceHash(u64::from_le_bytes(*hash))));
        self.find_parents(&mut chunk);
        // The sort is stable, so each holder's parts stay in the order of the runs.
        chunk.parts.sort_by_key(|part| part.holder);
        Ok(chunk)
    }

    /// Reads the fields of a run, and returns the run's length in blocks.
    fn read_run(
        &mut self,
        bytes: &mut Bytes<'_>,
        number: u32,
        first: usize,
        chunk: &mut ForestChunk,
    ) -> Result<usize, ForestError> {
        let (start, candidates) = self.candidates(bytes)?;
        let len = 1 + bytes.at_most(RUN_BLOCKS_MAX - 1, "the length of a run")?;
        let position = u32::try_from(start).map_err(|_| ForestError::Position)?;
        if (start + len) as u64 > Position::MAX.as_u64() + 1 {
            return Err(ForestError::Position);
        }
        let parts = read_changes(bytes, len, &candidates)?;
        chunk.candidates += candidates.len();
        if chunk.parts.len() + parts.len() > PARTS_MAX || chunk.candidates > CANDIDATES_MAX {
            return Err(ForestError::TooManyParts);
        }
        let entries = self.path_entries + 1 + parts.len();
        if entries + start + len > PATH_ENTRIES_MAX {
            return Err(ForestError::TooWide);
        }
        chunk.runs.push(ForestRun {
            position,
            parent: None,
            first,
            // The length is at most `RUN_BLOCKS_MAX`, so it fits.
            len: u16::try_from(len).unwrap_or(u16::MAX),
        });
        chunk.parts.extend(parts.iter().map(|part| RunPart {
            holder: part.holder,
            run: number,
            blocks: part.blocks,
        }));
        self.path_entries = entries;
        self.levels.push(ReaderLevel { start, len, parts });
        let pops = bytes.at_most(self.levels.len(), "the number of levels to pop")?;
        for level in self.levels.drain(self.levels.len() - pops..) {
            self.path_entries -= 1 + level.parts.len();
        }
        Ok(len)
    }

    /// Reads where the next run branches off. Returns the run's position, and its candidates: the holders that can
    /// have blocks of the run.
    fn candidates(&mut self, bytes: &mut Bytes<'_>) -> Result<(usize, Vec<u32>), ForestError> {
        let Some(parent) = self.levels.last_mut() else {
            return Ok((0, self.holders.clone()));
        };
        let behind = bytes.at_most(parent.len - 1, "the distance of a branch from its parent's end")?;
        let branch = parent.len - 1 - behind;
        parent.len = branch + 1;
        let has_branch = |part: &&HolderPart| usize::from(part.blocks) > branch;
        let candidates = parent.parts.iter().filter(has_branch).map(|part| part.holder);
        Ok((parent.start + branch + 1, candidates.collect()))
    }

    /// Finds the parent hash of each run: the hash of the last block on the path before the run.
    fn find_parents(&mut self, chunk: &mut ForestChunk) {
        for run in &mut chunk.runs {
            self.path.truncate(run.position as usize);
            run.parent = self.path.last().copied();
            let own = chunk.hashes.get(run.first..run.first + usize::from(run.len));
            self.path.extend_from_slice(own.unwrap_or_default());
        }
    }
}

/// Reads a run's changes (a list of candidates, with the number of blocks that each lacks), and returns how many of its
/// `len` blocks each holder has. Candidates that have no block of the run are left out.
fn read_changes(
    bytes: &mut Bytes<'_>,
    len: usize,
    candidates: &[u32],
) -> Result<Vec<HolderPart>, ForestError> {
    let most = candidates.len().saturating_mul(2) + 1;
    let head = bytes.at_most(most, "the number of changes")?;
    let is_only = (head & 1) as u64 == ONLY;
    let mut parts = Vec::new();
    let mut rest = candidates;
    for _ in 0..head >> 1 {
        let most = rest.len().checked_sub(1).ok_or(ForestError::OutOfRange {
            what: "the number of changes",
            number: head as u64 >> 1,
            most: candidates.len(),
        })?;
        let gap = bytes.at_most(most, "the distance between changes")?;
        let lacks = bytes.at_most(len - 1, "what a holder lacks")?;
        let (passed, from) = rest.split_at(gap);
        if !is_only {
            parts.extend(passed.iter().filter_map(|holder| part(*holder, len)));
        }
        let Some((holder, after)) = from.split_first() else {
            return Err(ForestError::Cut);
        };
        let lacks = if is_only { lacks } else { lacks + 1 };
        parts.extend(part(*holder, len - lacks));
        rest = after;
    }
    if !is_only {
        parts.extend(rest.iter().filter_map(|holder| part(*holder, len)));
    }
    if parts.iter().any(|part| usize::from(part.blocks) == len) {
        Ok(parts)
    } else {
        Err(ForestError::Unheld)
    }
}

fn part(holder: u32, blocks: usize) -> Option<HolderPart> {
    let blocks = u16::try_from(blocks).ok().filter(|blocks| *blocks > 0)?;
    Some(HolderPart { holder, blocks })
}
