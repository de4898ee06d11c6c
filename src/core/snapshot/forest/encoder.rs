//! Encoder of a forest: turns the runs of an index, in depth-first order, into frames of a snapshot file.

use crate::hash::SequenceHash;
use crate::index::{HolderPart, WalkedRun};

use super::bytes::put;
use super::{
    BEGINS, CANDIDATES_MAX, ENDS, EXCEPT, FRAME_BYTES, ONLY, PARTS_MAX, PATH_ENTRIES_MAX, RUN_BLOCKS_MAX,
};

/// Outcome of adding a run of blocks to a forest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// The run was written.
    Taken,
    /// No holder has blocks of this run and also all blocks before it. The caller must leave out all runs that branch
    /// off this run, and their descendants.
    Unheld,
    /// The run was not written: the run and its ancestors have more blocks, runs and holders than a reader accepts. The
    /// caller must leave out all runs that branch off this run, and their descendants.
    TooWide,
}

/// Payload of a frame with a part of a forest, and the numbers of runs and blocks in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForestFrame {
    /// Encoded payload of the frame.
    pub payload: Vec<u8>,
    /// Number of runs in the frame.
    pub runs: u64,
    /// Number of blocks in the frame's runs.
    pub blocks: u64,
}

/// Encodes the runs of an index, in depth-first order, as frames. Takes memory for one frame, and for the last run with
/// its ancestors.
#[derive(Debug)]
pub struct ForestEncoder {
    /// Numbers of the holders, sorted.
    holders: Vec<u32>,
    path: Vec<Level>,
    /// The last run that was pushed. It is written only when the next run comes, because the next run determines how
    /// many levels to pop after this one.
    held: Option<Encoded>,
    /// Number of levels that have been popped since the last run.
    pops: usize,
    /// Number of runs in `path`, plus the number of their holders.
    path_entries: usize,
    frame: FrameBuffer,
    full: Option<ForestFrame>,
    is_begun: bool,
    /// Number of bytes at which a frame (a part of the snapshot file) is complete and the next frame begins.
    pub(super) frame_bytes: usize,
}

/// A run in the path: the last run or one of its ancestors.
#[derive(Debug)]
struct Level {
    start: usize,
    /// Number of the run's leading blocks from which a child may still branch off. Each child must branch off at an
    /// earlier block than the child before it, or at the same block.
    len: usize,
    /// Parts of the run that holders have, sorted by the holders' numbers.
    parts: Vec<HolderPart>,
}

/// An encoded run, without the number of levels to pop after it.
#[derive(Debug)]
struct Encoded {
    columns: Vec<u8>,
    hashes: Vec<SequenceHash>,
    parts: usize,
    candidates: usize,
}

#[derive(Debug, Default)]
struct FrameBuffer {
    columns: Vec<u8>,
    hashes: Vec<u8>,
    runs: u64,
    parts: usize,
    candidates: usize,
}

/// A candidate (holder of the block before the run): its index among the candidates, and the part of the run that it
/// has.
type CandidatePart = (usize, HolderPart);

impl ForestEncoder {
    /// Begins a forest of `holders`, which are given by their numbers in the file.
    pub fn new(mut holders: Vec<u32>) -> Self {
        holders.sort_unstable();
        holders.dedup();
        Self {
            holders,
            path: Vec::new(),
            held: None,
            pops: 0,
            path_entries: 0,
            frame: FrameBuffer::default(),
            full: None,
            is_begun: false,
            frame_bytes: FRAME_BYTES,
        }
    }

    /// Adds a run. `parts` are the holders' parts of the run, sorted by the holders' numbers. The run's parent is the
    /// last added run whose depth is smaller by one. Parts of holders that lack a block before the run are left out.
    ///
    /// The caller must call [`take_frame`](Self::take_frame) after each call.
    pub fn push(&mut self, run: &WalkedRun, parts: &[HolderPart]) -> Pushed {
        self.leave_to(run.depth.saturating_sub(1));
        let Some(branch) = self.branch(run) else {
            return Pushed::Unheld;
        };
        let (candidates, taken) = self.take_parts(branch, parts, run.hashes.len());
        let len = taken.iter().map(|(_, part)| usize::from(part.blocks)).max();
        let Some((len, hashes)) = len.and_then(|len| Some((len, run.hashes.get(..len)?))) else {
            return Pushed::Unheld;
        };
        if self.path_entries + 1 + taken.len() + run.position + len > PATH_ENTRIES_MAX {
            return Pushed::TooWide;
        }
        let mut columns = Vec::with_capacity(8);
        if let (Some(branch), Some(parent)) = (branch, self.path.last_mut()) {
            put(&mut columns, (parent.len - 1 - branch) as u64);
            parent.len = branch + 1;
        }
        put(&mut columns, len as u64 - 1);
        put_changes(&mut columns, len, candidates, &taken);
        let encoded = Encoded {
            columns,
            hashes: hashes.to_vec(),
            parts: taken.len(),
            candidates,
        };
        self.path_entries += 1 + taken.len();
        self.path.push(Level {
            start: run.position,
            len,
            parts: taken.into_iter().map(|(_, part)| part).collect(),
        });
        let pops = std::mem::take(&mut self.pops);
        if let Some(before) = self.held.replace(encoded) {
            self.append(&before, pops);
        }
        Pushed::Taken
    }

    /// Returns a complete frame, if there is one, and removes it from the encoder.
    pub fn take_frame(&mut self) -> Option<ForestFrame> {
        self.full.take()
    }

    /// Ends the forest, and returns the frames that have not been taken. The last frame has the flag that ends the
    /// forest.
    pub fn finish(mut self) -> Vec<ForestFrame> {
        if let Some(last) = self.held.take() {
            self.append(&last, self.pops + self.path.len());
        }
        let mut frames: Vec<ForestFrame> = self.full.take().into_iter().collect();
        frames.push(self.close(ENDS));
        frames
    }

    /// Returns the offset, in the parent run, of the block after which a run branches off. Returns `Some(None)` for a
    /// run at position 0, and `None` if the parent has no such block.
    fn branch(&self, run: &WalkedRun) -> Option<Option<usize>> {
        match self.path.last() {
            _ if self.path.len() + 1 != run.depth => None,
            None => (run.position == 0).then_some(None),
            Some(parent) => {
                let branch = run.position.checked_sub(parent.start + 1)?;
                (branch < parent.len).then_some(Some(branch))
            }
        }
    }

    /// Returns the number of candidates (holders of the block before the run), and the parts of those candidates that
    /// have blocks of the run.
    fn take_parts(
        &self,
        branch: Option<usize>,
        parts: &[HolderPart],
        len: usize,
    ) -> (usize, Vec<CandidatePart>) {
        let mut candidates = 0;
        let mut taken = Vec::new();
        let mut parts = parts.iter().peekable();
        let mut consider = |number: u32| {
            while parts.next_if(|part| part.holder < number).is_some() {}
            if let Some(part) = parts.next_if(|part| part.holder == number) {
                // A part is not longer than its run, and not longer than a frame can express.
                let most = u16::try_from(len.min(RUN_BLOCKS_MAX)).unwrap_or(u16::MAX);
                let blocks = part.blocks.min(most);
                if blocks > 0 {
                    let holder = number;
                    taken.push((candidates, HolderPart { holder, blocks }));
                }
            }
            candidates += 1;
        };
        match (branch, self.path.last()) {
            (Some(branch), Some(parent)) => {
                let has_branch = |part: &&HolderPart| usize::from(part.blocks) > branch;
                let above = parent.parts.iter().filter(has_branch);
                above.for_each(|part| consider(part.holder));
            }
            _ => self.holders.iter().for_each(|number| consider(*number)),
        }
        (candidates, taken)
    }

    fn leave_to(&mut self, depth: usize) {
        while self.path.len() > depth {
            if let Some(level) = self.path.pop() {
                self.path_entries -= 1 + level.parts.len();
            }
            self.pops += 1;
        }
    }

    fn append(&mut self, run: &Encoded, pops: usize) {
        if self.frame.bytes() >= self.frame_bytes || self.frame.has_no_room_for(run) {
            self.full = Some(self.close(0));
        }
        let frame = &mut self.frame;
        frame.columns.extend_from_slice(&run.columns);
        put(&mut frame.columns, pops as u64);
        let hashes = run.hashes.iter().map(|hash| hash.as_u64().to_le_bytes());
        frame.hashes.extend(hashes.flatten());
        frame.runs += 1;
        frame.parts += run.parts;
        frame.candidates += run.candidates;
    }

    fn close(&mut self, flags: u8) -> ForestFrame {
        let frame = std::mem::take(&mut self.frame);
        let begins = !std::mem::replace(&mut self.is_begun, true);
        let mut payload = Vec::with_capacity(frame.bytes() + 16);
        payload.push(flags | if begins { BEGINS } else { 0 });
        if begins {
            put(&mut payload, self.holders.len() as u64);
            let mut next = 0;
            for number in &self.holders {
                put(&mut payload, u64::from(*number) - next);
                next = u64::from(*number) + 1;
            }
        }
        put(&mut payload, frame.runs);
        payload.extend_from_slice(&frame.columns);
        payload.extend_from_slice(&frame.hashes);
        ForestFrame {
            payload,
            runs: frame.runs,
            blocks: frame.hashes.len() as u64 / 8,
        }
    }
}

impl FrameBuffer {
    fn bytes(&self) -> usize {
        self.columns.len() + self.hashes.len()
    }

    fn has_no_room_for(&self, run: &Encoded) -> bool {
        self.parts + run.parts > PARTS_MAX || self.candidates + run.candidates > CANDIDATES_MAX
    }
}

/// Writes how many blocks of a run each candidate (holder of the block before the run) has. The list names either the
/// candidates that lack blocks (*except*) or those that have blocks (*only*), whichever list is shorter.
fn put_changes(columns: &mut Vec<u8>, len: usize, candidates: usize, taken: &[CandidatePart]) {
    let lacks = |part: &HolderPart| (len - usize::from(part.blocks)) as u64;
    let whole = taken.iter().filter(|(_, part)| lacks(part) == 0).count();
    let mut next = 0;
    let mut put_change = |columns: &mut Vec<u8>, place: usize, lacks: u64| {
        put(columns, (place - next) as u64);
        put(columns, lacks);
        next = place + 1;
    };
    if candidates - whole > taken.len() {
        put(columns, (taken.len() as u64) << 1 | ONLY);
        for (place, part) in taken {
            put_change(columns, *place, lacks(part));
        }
        return;
    }
    put(columns, ((candidates - whole) as u64) << 1 | EXCEPT);
    let mut taken = taken.iter().peekable();
    for place in 0..candidates {
        let own = taken.next_if(|(own, _)| *own == place);
        let lacking = own.map_or(len as u64, |(_, part)| lacks(part));
        if lacking > 0 {
            put_change(columns, place, lacking - 1);
        }
    }
}
