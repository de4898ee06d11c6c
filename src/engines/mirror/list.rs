//! Lists of events in the form that vLLM writes. Each list is small enough for one batch.

use kvatlas_core::hash::{BlockSize, SequenceHash, Token};
use rmp::encode;

/// Maximum number of events in a list. vLLM's router takes 4,096 in a batch.
const EVENTS_MAX: u32 = 4000;
/// Size from which on a list takes no further event, in bytes. vLLM's router takes 16 MiB in a batch.
const BYTES_MAX: usize = 8 << 20;
/// Maximum number of blocks in an event.
const BLOCKS_MAX: usize = 2000;
/// Maximum number of tokens in a stored event. A single block that has more tokens gets an event of its own.
const TOKENS_MAX: usize = 32_000;

/// A block, with the fields that vLLM's stored event tells of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct MirrorBlock<'a> {
    pub(super) sequence: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    pub(super) tokens: &'a [Token],
    pub(super) lora_name: Option<&'a str>,
}

/// Encoded events of vLLM, for one batch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EventList {
    count: u32,
    bytes: Vec<u8>,
}

impl EventList {
    /// The list whose only event is a clear: all blocks are gone.
    pub fn cleared() -> Self {
        let mut list = Self::default();
        list.begin(1, "AllBlocksCleared");
        list
    }

    /// Begins an event that has `fields` fields.
    fn begin(&mut self, fields: u32, kind: &str) -> &mut Vec<u8> {
        self.count += 1;
        let _ = encode::write_map_len(&mut self.bytes, fields);
        key(&mut self.bytes, "type");
        let _ = encode::write_str(&mut self.bytes, kind);
        &mut self.bytes
    }

    /// The payload of a batch with these events, with its `time`, in seconds since the Unix epoch, and its `rank`.
    pub fn payload(&self, time: f64, rank: u32) -> Vec<u8> {
        let mut payload = Vec::with_capacity(self.bytes.len() + 32);
        // Writing to memory cannot fail, here and below.
        let _ = encode::write_array_len(&mut payload, 3);
        let _ = encode::write_f64(&mut payload, time);
        let _ = encode::write_array_len(&mut payload, self.count);
        payload.extend_from_slice(&self.bytes);
        let _ = encode::write_uint(&mut payload, u64::from(rank));
        payload
    }
}

/// The blocks of the stored event that is being collected.
#[derive(Debug, Default)]
struct ListRun {
    parent: Option<SequenceHash>,
    names: Vec<SequenceHash>,
    tokens: Vec<Token>,
    lora_name: Option<String>,
}

/// Writes events into lists.
#[derive(Debug)]
pub(super) struct ListWriter {
    block_size: BlockSize,
    finished: Vec<EventList>,
    list: EventList,
    run: ListRun,
    removed: Vec<SequenceHash>,
}

impl ListWriter {
    pub(super) fn new(block_size: BlockSize) -> Self {
        Self {
            block_size,
            finished: Vec::new(),
            list: EventList::default(),
            run: ListRun::default(),
            removed: Vec::new(),
        }
    }

    /// Returns all lists, in the order in which they were written. The result is empty if no event was written.
    pub(super) fn finish(mut self) -> Vec<EventList> {
        self.end_run();
        self.end_removal();
        if self.list.count > 0 {
            self.finished.push(self.list);
        }
        self.finished
    }

    /// Appends a clear: an event by which all blocks are gone.
    pub(super) fn clear(&mut self) {
        self.begin(1, "AllBlocksCleared");
    }

    /// Appends a block: to the current stored event if the block continues it, else to a new event.
    pub(super) fn store(&mut self, block: &MirrorBlock<'_>) {
        self.end_removal();
        let run = &self.run;
        let continues = run.names.last().is_some_and(|last| block.parent == Some(*last))
            && run.lora_name.as_deref() == block.lora_name
            && run.names.len() < BLOCKS_MAX
            && run.tokens.len() + block.tokens.len() <= TOKENS_MAX;
        if !continues {
            self.end_run();
            self.run.parent = block.parent;
            self.run.lora_name = block.lora_name.map(str::to_owned);
        }
        self.run.names.push(block.sequence);
        self.run.tokens.extend_from_slice(block.tokens);
    }

    /// Appends the removal of the block with the hash `sequence`. If the hash is `None`, does nothing except end the
    /// current stored event.
    pub(super) fn remove(&mut self, sequence: Option<SequenceHash>) {
        self.end_run();
        self.removed.extend(sequence);
        if self.removed.len() >= BLOCKS_MAX {
            self.end_removal();
        }
    }

    fn end_run(&mut self) {
        if self.run.names.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.run);
        let block_size = u64::from(self.block_size.as_u32());
        let out = self.begin(8, "BlockStored");
        write_names(out, &run.names);
        key(out, "parent_block_hash");
        let _ = match run.parent {
            Some(parent) => encode::write_uint(out, parent.0).map(drop),
            None => return_nil(out),
        };
        key(out, "token_ids");
        let _ = encode::write_array_len(out, length(run.tokens.len()));
        for token in &run.tokens {
            let _ = encode::write_uint(out, u64::from(*token));
        }
        key(out, "block_size");
        let _ = encode::write_uint(out, block_size);
        key(out, "lora_id");
        let _ = return_nil(out);
        write_medium(out);
        key(out, "lora_name");
        let _ = match &run.lora_name {
            Some(name) => encode::write_str(out, name),
            None => return_nil(out),
        };
    }

    fn end_removal(&mut self) {
        if self.removed.is_empty() {
            return;
        }
        let names = std::mem::take(&mut self.removed);
        let out = self.begin(3, "BlockRemoved");
        write_names(out, &names);
        write_medium(out);
    }

    /// Begins an event of type `kind` with `fields` fields. The event goes into the current list, or into a new list
    /// if the current one is full.
    fn begin(&mut self, fields: u32, kind: &str) -> &mut Vec<u8> {
        if self.list.count >= EVENTS_MAX || self.list.bytes.len() >= BYTES_MAX {
            self.finished.push(std::mem::take(&mut self.list));
        }
        self.list.begin(fields, kind)
    }
}

fn return_nil(out: &mut Vec<u8>) -> Result<(), encode::ValueWriteError> {
    encode::write_nil(out).map_err(encode::ValueWriteError::InvalidMarkerWrite)
}

fn length(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

fn key(out: &mut Vec<u8>, key: &str) {
    let _ = encode::write_str(out, key);
}

fn write_names(out: &mut Vec<u8>, names: &[SequenceHash]) {
    key(out, "block_hashes");
    let _ = encode::write_array_len(out, length(names.len()));
    for name in names {
        let _ = encode::write_uint(out, name.0);
    }
}

fn write_medium(out: &mut Vec<u8>) {
    key(out, "medium");
    let _ = encode::write_str(out, "GPU");
}
