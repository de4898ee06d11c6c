//! The form into which all engines' payloads are decoded.
//!
//! One batch is made once and filled with one payload after another. All its events share lists of hashes, tokens and
//! objects, and each event refers to spans of these lists. Once the lists have grown, decoding a block or an event allocates
//! nothing.

use std::fmt::Write;

use kvatlas_core::hash::Token;
use kvatlas_core::wire::{Rank, Tier};
use serde::{Deserialize, Serialize};

pub(crate) use crate::facts::GroupKind;
use crate::reason::{Reason, ReasonCounts};

/// A part of one of the lists of an [`EngineBatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span {
    start: usize,
    end: usize,
}

impl Span {
    pub(crate) fn new(start: usize, end: usize) -> Self {
        Self { start, end }
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// Whether the span has no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub(crate) fn of<T>(self, list: &[T]) -> &[T] {
        list.get(self.start..self.end).unwrap_or_default()
    }
}

/// The group of layers that an event is about. Engines with several kinds of attention keep one cache for each group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Group {
    /// Number of the group of layers; `None` if the event gives no group number.
    pub index: Option<u32>,
    /// The kind of the group; `None` if the event doesn't tell it.
    pub kind: Option<GroupKind>,
}

impl Group {
    /// Whether the event says that the group of layers is not main attention. The group is then a window, a state, or
    /// a group of a kind that kvatlas does not know.
    pub fn is_beside_main(self) -> bool {
        self.kind.is_some_and(|kind| kind != GroupKind::Main)
    }
}

/// A component of SGLang's cache: SGLang's name for a group of layers. Its events don't tell the size of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// Main attention: layers of which a request needs all blocks of a prefix.
    Full,
    /// Sliding windows. The settings state their size in tokens.
    Window,
    /// Recurrent states.
    State,
    /// A component that kvatlas does not know.
    Other,
}

impl Component {
    /// Group number of the first component. Engines give their groups smaller numbers, so the numbers of components
    /// and groups never collide.
    const FIRST: u32 = u32::MAX - 16;

    /// The component as a group of layers.
    pub fn group(self) -> Group {
        let kind = match self {
            Self::Full => Some(GroupKind::Main),
            Self::Window => None,
            Self::State => Some(GroupKind::State),
            Self::Other => Some(GroupKind::Other),
        };
        Group {
            index: Some(Self::FIRST + self as u32),
            kind,
        }
    }

    /// The component that `group` stands for; `None` if the group is no component.
    pub fn of(group: Group) -> Option<Self> {
        match group.index?.checked_sub(Self::FIRST)? {
            0 => Some(Self::Full),
            1 => Some(Self::Window),
            2 => Some(Self::State),
            3 => Some(Self::Other),
            _ => None,
        }
    }
}

/// An image, or prompt embeddings, in a block. Two blocks with the same tokens and different objects are different
/// blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockObject {
    /// Index of the block within its event.
    pub block: u32,
    /// The hash that enters the block hash.
    pub hash: u64,
}

/// The content of stored blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Tokens of the blocks. Block number i has the `window` tokens from token i × `step` on.
    Tokens {
        /// The tokens of all blocks.
        tokens: Span,
        /// Number of tokens from the first token of a block to the first token of the next block.
        step: usize,
        /// Number of tokens that enter the hash of a block. This is the block size, or more if the engine's hash of a
        /// block also covers tokens after the block.
        window: usize,
    },
    /// Block hash of each block, as a span of the batch's list of hashes.
    BlockHashes(Span),
    /// No content: the event has neither tokens nor block hashes. The translator accepts this in three cases: the
    /// event's names are the contract's hashes, other events may tell the content of the blocks, or the group of
    /// layers is not main attention.
    Absent,
    /// Tokens that don't fit the blocks: their number is not block size × number of blocks. A window or a state may
    /// have such events, because it keeps only some blocks of a sequence. From main attention, such an event is a
    /// mistake of the engine.
    Misfit,
}

/// Consecutive blocks of one sequence that an engine has stored. A block's name is the engine's own hash or number for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStored {
    /// The engine's names for the blocks.
    pub names: Span,
    /// The engine's name for the block before the first; `None` at position 0.
    pub parent: Option<u64>,
    /// Position of the first block; `None` if the event doesn't tell it.
    pub position: Option<u64>,
    /// Tokens in a block; `None` if the event doesn't tell it.
    pub block_size: Option<u64>,
    /// The content of the blocks.
    pub content: Content,
    /// The tier in which the blocks lie.
    pub tier: Tier,
    /// The group of layers that stores the blocks.
    pub group: Group,
    /// Name of the LoRA adapter to which the blocks belong; `None` if the event names no adapter.
    pub lora_name: Option<Span>,
    /// Number of the LoRA adapter, for engines that don't tell its name.
    pub lora_id: Option<u64>,
    /// Salt of the sequence. Requests with different salts share no blocks. Some engines tell the salt only in the
    /// event that has the first block of the sequence.
    pub cache_salt: Option<Span>,
    /// Objects of the blocks, ascending by block.
    pub objects: Span,
}

impl EngineStored {
    /// Returns the event without its first `count` blocks. Only for events without objects, because objects refer to blocks by
    /// their index.
    pub(crate) fn without_first(self, count: usize) -> Self {
        let rest =
            |span: Span, count: usize| Span::new(span.start.saturating_add(count).min(span.end), span.end);
        let content = match self.content {
            Content::Tokens { tokens, step, window } => Content::Tokens {
                tokens: rest(tokens, count.saturating_mul(step)),
                step,
                window,
            },
            Content::BlockHashes(hashes) => Content::BlockHashes(rest(hashes, count)),
            other => other,
        };
        Self {
            names: rest(self.names, count),
            content,
            ..self
        }
    }
}

/// Blocks that an engine has removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineRemoved {
    /// The engine's names for the blocks.
    pub names: Span,
    /// The tier from which the blocks were removed; `None` stands for every tier.
    pub tier: Option<Tier>,
    /// The group of layers that removes the blocks.
    pub group: Group,
    /// For each block, the number of its copies that are left after the removal, as a span of the batch's list of
    /// hashes. `None` if the event doesn't tell it.
    pub left: Option<Span>,
}

/// One change, in the engine's own terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineChange {
    /// A group of layers begins to have blocks. From this event on, a block counts as held only if this group has it,
    /// too.
    Created(Group),
    /// Blocks were stored.
    Stored(EngineStored),
    /// One copy of each named block was removed.
    Removed(EngineRemoved),
    /// A block has gone from one tier to another.
    Moved {
        /// The engine's name for the block.
        name: u64,
        /// The tier in which the block lay.
        from: Tier,
        /// The tier in which the block lies now.
        to: Tier,
        /// The group of layers to which the block belongs.
        group: Group,
    },
    /// All blocks were removed, from every tier.
    Cleared,
}

/// One change, and the holder that it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineEvent {
    /// The worker or the pool that has the blocks, for formats that name it in each event.
    pub owner: Option<Span>,
    /// The rank, for formats that name it in each event. If it is `None`, the batch's rank applies.
    pub rank: Option<Rank>,
    /// The engine's number of the event, for formats that number events.
    pub id: Option<u64>,
    /// The change that the event reports.
    pub change: EngineChange,
}

/// The envelope that Dynamo's event plane puts around events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Envelope {
    /// The publisher of the events.
    pub publisher: u64,
    /// The publisher's number of the envelope.
    pub sequence: u64,
}

/// The number of one event of a payload. Events that were left out of the batch have numbers, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventNumber {
    /// The rank whose events are numbered; `None` if the event doesn't tell it.
    pub rank: Option<Rank>,
    /// The event's number.
    pub id: u64,
}

/// Facts that the events of a stream cannot tell, because their format has no field for them. Two blocks with the
/// same tokens are different blocks if they differ in such a fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Untold {
    /// True if the events cannot tell the salts of blocks.
    pub salts: bool,
    /// True if the events cannot tell the names of blocks' adapters.
    pub adapters: bool,
}

impl Untold {
    /// Returns the union: each fact that `self` or `other` or both mark as untold.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            salts: self.salts || other.salts,
            adapters: self.adapters || other.adapters,
        }
    }
}

/// A doubt about the holders' blocks that begins at a place among the events of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedDoubt {
    /// Place of the doubt: the number of the batch's events that come before it.
    pub events_before: usize,
    /// Reason for the doubt. If several parts of the payload raise a doubt about the same tiers at this place, it is
    /// the first reason.
    pub reason: Reason,
    /// The only tier in doubt: host, disk or remote storage. `None` if all tiers are in doubt.
    pub tier: Option<Tier>,
}

/// Memory of a batch that is kept for the next payload in any case, in bytes. A decoder's buffers are kept up to this
/// size.
pub(crate) const KEPT_BYTES_MAX: usize = 4 << 20;
/// Maximum memory that a batch keeps for a payload, as a multiple of the payload's size.
const KEPT_TIMES_MAX: usize = 64;

/// One decoded payload.
#[derive(Debug, Clone, Default)]
pub struct EngineBatch {
    /// The data-parallel rank; `None` if the payload doesn't tell it.
    pub rank: Option<Rank>,
    /// The envelope, if there was one.
    pub envelope: Option<Envelope>,
    /// Reasons why parts of the payload are not among the events, each with the number of such parts.
    pub reasons: ReasonCounts,
    /// The numbers of all events that could be read, in the order of the payload. Filled only for formats in which
    /// each event has a number, so that a missing event leaves a gap (TensorRT-LLM and Dynamo); else empty.
    pub numbers: Vec<EventNumber>,
    /// The facts that the stored events cannot tell, because their format has no field for them.
    pub untold: Untold,
    events: Vec<EngineEvent>,
    doubts: Vec<PlacedDoubt>,
    pub(crate) hashes: Vec<u64>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) objects: Vec<BlockObject>,
    /// The identifier of each object. Within a block, identifiers stand in the order of their places in the prompt; `objects`
    /// is sorted by hash.
    identifiers: Vec<Span>,
    pub(crate) text: String,
}

/// Lengths of a batch's lists before an event is read. If the event can't be used, the lists are cut back to these lengths.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark {
    events: usize,
    doubts: usize,
    pub(crate) hashes: usize,
    pub(crate) tokens: usize,
    pub(crate) objects: usize,
    text: usize,
}

impl EngineBatch {
    /// The events, in order.
    pub fn events(&self) -> &[EngineEvent] {
        &self.events
    }

    /// Returns the doubts about holders' blocks, in order. A doubt begins where a part of the payload could not be
    /// read. A later clear in the payload ends a doubt, but does not remove it from this list.
    pub fn doubts(&self) -> &[PlacedDoubt] {
        &self.doubts
    }

    /// The names or block hashes of a span.
    pub fn hashes(&self, span: Span) -> &[u64] {
        span.of(&self.hashes)
    }

    /// The tokens of a span.
    pub fn tokens(&self, span: Span) -> &[Token] {
        span.of(&self.tokens)
    }

    /// The objects of a span.
    pub fn objects(&self, span: Span) -> &[BlockObject] {
        span.of(&self.objects)
    }

    /// The identifiers of the objects of a span, in the order in which the objects stand in the prompt. If the engine
    /// gave an object no identifier, the text `object:` with the object's hash takes its place.
    pub fn identifiers(&self, span: Span) -> impl Iterator<Item = &str> {
        span.of(&self.identifiers)
            .iter()
            .map(|identifier| self.text(*identifier))
    }

    /// The text of a span.
    pub fn text(&self, span: Span) -> &str {
        self.text.get(span.start..span.end).unwrap_or_default()
    }

    /// Bytes of memory that the batch keeps for the next payloads.
    pub fn capacity_bytes(&self) -> usize {
        self.events.capacity() * size_of::<EngineEvent>()
            + self.doubts.capacity() * size_of::<PlacedDoubt>()
            + self.numbers.capacity() * size_of::<EventNumber>()
            + self.hashes.capacity() * size_of::<u64>()
            + self.tokens.capacity() * size_of::<Token>()
            + self.objects.capacity() * size_of::<BlockObject>()
            + self.identifiers.capacity() * size_of::<Span>()
            + self.text.capacity()
    }

    /// Empties the batch for a payload of `payload_bytes` bytes. Its memory is kept, unless it is far more than this
    /// payload needs. So one large payload does not take memory for ever.
    pub(crate) fn begin(&mut self, payload_bytes: impl FnOnce() -> usize) {
        let kept = self.capacity_bytes();
        if kept > KEPT_BYTES_MAX && kept / KEPT_TIMES_MAX > payload_bytes() {
            *self = Self::default();
        }
        self.clear();
    }

    /// Empties the batch. Its memory is kept.
    pub fn clear(&mut self) {
        self.rank = None;
        self.envelope = None;
        self.reasons = ReasonCounts::default();
        self.numbers.clear();
        self.untold = Untold::default();
        self.events.clear();
        self.doubts.clear();
        self.hashes.clear();
        self.tokens.clear();
        self.objects.clear();
        self.identifiers.clear();
        self.text.clear();
    }

    pub(crate) fn mark(&self) -> Mark {
        Mark {
            events: self.events.len(),
            doubts: self.doubts.len(),
            hashes: self.hashes.len(),
            tokens: self.tokens.len(),
            objects: self.objects.len(),
            text: self.text.len(),
        }
    }

    pub(crate) fn rewind(&mut self, mark: Mark) {
        self.events.truncate(mark.events);
        self.doubts.truncate(mark.doubts);
        self.hashes.truncate(mark.hashes);
        self.tokens.truncate(mark.tokens);
        self.truncate_objects(mark.objects);
        self.text.truncate(mark.text);
    }

    pub(crate) fn push(&mut self, event: EngineEvent) {
        self.events.push(event);
    }

    /// Leaves an event out of the batch: takes back everything that was appended since `mark`, and counts `reason`.
    /// `tier` is the tier that the event is about; `None` if the tier is not known or does not matter.
    pub(crate) fn leave_out(&mut self, reason: Reason, tier: Option<Tier>, mark: Mark) {
        self.rewind(mark);
        match tier {
            Some(tier) => self.note_of(tier, reason),
            None => self.note(reason),
        }
    }

    /// Counts a part of the payload that is left out after the events so far. If `reason` leaves the holder's state in doubt
    /// ([`Reason::degrades`]), a doubt begins at this place.
    pub(crate) fn note(&mut self, reason: Reason) {
        self.reasons.count(reason);
        if reason.degrades() {
            self.doubt(None, reason);
        }
    }

    /// Counts `reason` for a part of the payload that is about `tier` and is left out. A part about the device may
    /// put the blocks of all tiers in doubt. A part about another tier puts at most the blocks of that tier in doubt.
    pub(crate) fn note_of(&mut self, tier: Tier, reason: Reason) {
        if tier == Tier::DEVICE {
            return self.note(reason);
        }
        self.reasons.count(reason);
        if reason.hides_tier() {
            self.doubt(Some(tier), reason);
        }
    }

    /// Notes that the holder's blocks are in doubt after the events so far. If `tier` is given, only the blocks in
    /// this tier are in doubt.
    pub(crate) fn doubt(&mut self, tier: Option<Tier>, reason: Reason) {
        let events_before = self.events.len();
        // Of several doubts about one tier at one place, the first stays.
        let is_known = |last: &PlacedDoubt| last.events_before == events_before && last.tier == tier;
        if !self.doubts.last().is_some_and(is_known) {
            self.doubts.push(PlacedDoubt {
                events_before,
                reason,
                tier,
            });
        }
    }

    /// Appends a multimodal object, which belongs to block number `block` of its event.
    pub(crate) fn push_object(&mut self, block: u32, hash: u64, identifier: Option<&str>) {
        let start = self.text.len();
        match identifier {
            Some(identifier) => self.text.push_str(identifier),
            // Writing to a text cannot fail.
            None => _ = write!(self.text, "object:{hash:016x}"),
        }
        self.objects.push(BlockObject { block, hash });
        self.identifiers.push(Span::new(start, self.text.len()));
    }

    /// Drops all objects from number `start` on.
    pub(crate) fn truncate_objects(&mut self, start: usize) {
        self.objects.truncate(start);
        self.identifiers.truncate(start);
    }

    /// Sorts the objects of one event, from number `start` on, by block and hash. Their identifiers are sorted by block
    /// only: those of one block stay in the order of the prompt.
    pub(crate) fn sort_objects(&mut self, start: usize) {
        let objects = self.objects.get_mut(start..).unwrap_or_default();
        let identifiers = self.identifiers.get_mut(start..).unwrap_or_default();
        if !objects.is_sorted_by_key(|object| object.block) {
            let mut by_block: Vec<_> = objects
                .iter()
                .map(|object| object.block)
                .zip(&*identifiers)
                .collect();
            by_block.sort_by_key(|(block, _)| *block);
            let sorted: Vec<Span> = by_block.into_iter().map(|(_, identifier)| *identifier).collect();
            identifiers.copy_from_slice(&sorted);
        }
        objects.sort_unstable();
    }

    pub(crate) fn push_text(&mut self, text: &str) -> Span {
        let start = self.text.len();
        self.text.push_str(text);
        Span::new(start, self.text.len())
    }

    /// Appends a number in decimal.
    pub(crate) fn push_number(&mut self, number: u64) -> Span {
        let start = self.text.len();
        // Writing to memory cannot fail.
        let _ = write!(self.text, "{number}");
        Span::new(start, self.text.len())
    }

    /// The hashes from `start` to the end of the list.
    pub(crate) fn hashes_since(&self, start: usize) -> Span {
        Span::new(start, self.hashes.len())
    }

    /// The tokens from `start` to the end of the list.
    pub(crate) fn tokens_since(&self, start: usize) -> Span {
        Span::new(start, self.tokens.len())
    }

    /// Appends the number 1 to the list of hashes, `count` times.
    pub(crate) fn push_ones(&mut self, count: usize) -> Span {
        let start = self.hashes.len();
        self.hashes.resize(start + count, 1);
        self.hashes_since(start)
    }

    /// The objects from `start` to the end of the list.
    pub(crate) fn objects_since(&self, start: usize) -> Span {
        Span::new(start, self.objects.len())
    }

    /// Copies `count` tokens of `span`, from its token number `from` on, to the end of the list of tokens.
    pub(crate) fn extend_tokens_from(&mut self, span: Span, from: usize, count: usize) {
        let start = span.start + from;
        let end = (start + count).min(span.end);
        if start < end && end <= self.tokens.len() {
            self.tokens.extend_from_within(start..end);
        }
    }
}
