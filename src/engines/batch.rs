//! The form into which all engines' payloads are decoded.
//!
//! A batch is made once and filled again and again. Events refer to spans of lists that all events share. Once the lists have
//! grown, decoding a block or an event allocates nothing.

use std::fmt::Write;

use kvatlas_core::hash::Token;
use kvatlas_core::wire::{Rank, Tier};
use serde::{Deserialize, Serialize};

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

    /// How many elements it spans.
    pub fn len(self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// Whether it spans none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    pub(crate) fn of<T>(self, list: &[T]) -> &[T] {
        list.get(self.start..self.end).unwrap_or_default()
    }
}

/// Kinds of groups of layers, by what a request needs of their caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GroupKind {
    /// Main attention: all blocks of the prefix.
    Main,
    /// A sliding window of so many tokens: the blocks of the last ones.
    Window(u32),
    /// A recurrent state: the block that ends where the request goes on.
    State,
    /// A kind that nobody here knows.
    Other,
}

/// Which group of layers an event is about. Engines with several kinds of attention keep a cache for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Group {
    /// The number of the group, where the event has one.
    pub index: Option<u32>,
    /// The kind of the group, where the event tells it.
    pub kind: Option<GroupKind>,
}

impl Group {
    /// Whether the event says that the group is not main attention.
    pub fn is_beside_main(self) -> bool {
        self.kind.is_some_and(|kind| kind != GroupKind::Main)
    }
}

/// A part of SGLang's cache: a group by another name. Its events tell the size of no window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Component {
    /// Main attention.
    Full,
    /// Sliding windows, of as many tokens as somebody states.
    Window,
    /// Recurrent states.
    State,
    /// One that nobody here knows.
    Other,
}

impl Component {
    /// Above all numbers that engines give their groups.
    const FIRST: u32 = u32::MAX - 16;

    /// The group that it is.
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

    /// The component that a group is, if it is one.
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

/// An object that tells two blocks with the same tokens apart, beside adapter and salt: an image, or prompt embeddings.
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
    /// Tokens. Block number i has those from i × `step` on, `window` of them.
    Tokens {
        /// The tokens of all blocks.
        tokens: Span,
        /// From the first token of a block to that of the next.
        step: usize,
        /// How many tokens enter the hash of a block: more than its size where the engine looks ahead.
        window: usize,
    },
    /// The block hash of each block, among the hashes of the batch.
    BlockHashes(Span),
    /// Nothing is said: the names are the contract's own.
    Absent,
    /// The tokens are not block size × blocks. So it is with groups of layers that keep some blocks only; elsewhere it is a mistake.
    Misfit,
}

/// Blocks that an engine has stored: consecutive ones of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineStored {
    /// The engine's names for the blocks.
    pub names: Span,
    /// The engine's name for the block before the first; none at position 0.
    pub parent: Option<u64>,
    /// Position of the first block, where the event says so.
    pub position: Option<u64>,
    /// Tokens in a block, where the event says so.
    pub block_size: Option<u64>,
    /// The content of the blocks.
    pub content: Content,
    /// The tier in which they lie.
    pub tier: Tier,
    /// The group of layers.
    pub group: Group,
    /// Name of the LoRA adapter, if any.
    pub lora_name: Option<Span>,
    /// Number of the LoRA adapter, for engines that tell no name.
    pub lora_id: Option<u64>,
    /// Salt that keeps caches apart. Engines may tell it with the first block of a sequence only.
    pub cache_salt: Option<Span>,
    /// Objects, ascending by block.
    pub objects: Span,
}

impl EngineStored {
    /// The same without its first `count` blocks. For events without objects.
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
    /// The tier in which they lay; every tier where it is absent.
    pub tier: Option<Tier>,
    /// The group of layers.
    pub group: Group,
    /// How many copies of each block are left, among the hashes of the batch, where the event says so.
    pub left: Option<Span>,
}

/// One change, in the engine's own terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineChange {
    /// A group of layers begins to have blocks: what it lacks counts from now on.
    Created(Group),
    /// Blocks were stored.
    Stored(EngineStored),
    /// One copy of each of these blocks was removed.
    Removed(EngineRemoved),
    /// A block has gone from one tier to another.
    Moved {
        /// The engine's name for the block.
        name: u64,
        /// The tier in which it lay.
        from: Tier,
        /// The tier in which it lies.
        to: Tier,
        /// The group of layers.
        group: Group,
    },
    /// All blocks were removed, from every tier.
    Cleared,
}

/// One change, and whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineEvent {
    /// The worker or the pool, for formats that name it in each event.
    pub owner: Option<Span>,
    /// The rank, for formats that name it in each event; otherwise that of the batch counts.
    pub rank: Option<Rank>,
    /// The engine's number of the event, for formats that number events.
    pub id: Option<u64>,
    /// The change.
    pub change: EngineChange,
}

/// The envelope that Dynamo's event plane puts around events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Envelope {
    /// The publisher of the events.
    pub publisher: u64,
    /// The publisher's number of it.
    pub sequence: u64,
}

/// The number of an event of a payload, whether or not it is among the events of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventNumber {
    /// The rank whose events are numbered, where the event says so.
    pub rank: Option<Rank>,
    /// The number.
    pub id: u64,
}

/// The facts that the form of a stream has no room for, so that its events cannot tell them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Untold {
    /// The salts of blocks.
    pub salts: bool,
    /// The names of blocks' adapters.
    pub adapters: bool,
}

impl Untold {
    /// The facts that one of both has no room for.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            salts: self.salts || other.salts,
            adapters: self.adapters || other.adapters,
        }
    }
}

/// Why what the holders have is in doubt from a place among the events on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedDoubt {
    /// How many of the batch's events come before it.
    pub events_before: usize,
    /// The first reason there.
    pub reason: Reason,
    /// The tier beyond the device that alone is in doubt.
    pub tier: Option<Tier>,
}

/// One decoded payload.
#[derive(Debug, Clone, Default)]
pub struct EngineBatch {
    /// When the engine made it, in seconds since the Unix epoch.
    pub time: Option<f64>,
    /// The data-parallel rank, where the payload says so.
    pub rank: Option<Rank>,
    /// The envelope, if there was one.
    pub envelope: Option<Envelope>,
    /// Counts of the payload's parts that are not among the events, by reason.
    pub reasons: ReasonCounts,
    /// The numbers of all events that could be read, in order, for formats whose numbers prove that nothing is missing: TensorRT-LLM's, and
    /// Dynamo's.
    pub numbers: Vec<EventNumber>,
    /// The facts that the form of its stored events has no room for.
    pub untold: Untold,
    events: Vec<EngineEvent>,
    doubts: Vec<PlacedDoubt>,
    pub(crate) hashes: Vec<u64>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) objects: Vec<BlockObject>,
    /// The identifier of each object; those of one block in the order of their places, where the objects are sorted.
    identifiers: Vec<Span>,
    pub(crate) text: String,
}

/// How far the lists were filled before an event, so that an event that fails leaves nothing behind.
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

    /// The doubts that what could not be read leaves, in order. A clear behind one ends it.
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

    /// The identifier of each object of a span, in the order of their places in the prompt. One without any has a
    /// text that no prompt has.
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

    /// Empties the batch. Its memory is kept.
    pub fn clear(&mut self) {
        self.time = None;
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
        self.objects.truncate(mark.objects);
        self.identifiers.truncate(mark.objects);
        self.text.truncate(mark.text);
    }

    pub(crate) fn push(&mut self, event: EngineEvent) {
        self.events.push(event);
    }

    /// Leaves an event out; one about `tier` where that is known.
    pub(crate) fn leave_out(&mut self, reason: Reason, tier: Option<Tier>, mark: Mark) {
        self.rewind(mark);
        match tier {
            Some(tier) => self.note_of(tier, reason),
            None => self.note(reason),
        }
    }

    /// Notes that a part of the payload behind the events so far is not among them.
    pub(crate) fn note(&mut self, reason: Reason) {
        self.reasons.count(reason);
        if reason.degrades() {
            self.doubt(None, reason);
        }
    }

    /// Notes that a part of the payload about `tier` is not among the events.
    pub(crate) fn note_of(&mut self, tier: Tier, reason: Reason) {
        if tier == Tier::DEVICE {
            return self.note(reason);
        }
        self.reasons.count(reason);
        if reason.hides_tier() {
            self.doubt(Some(tier), reason);
        }
    }

    /// Notes a doubt from here on, of `tier` alone where that is given.
    pub(crate) fn doubt(&mut self, tier: Option<Tier>, reason: Reason) {
        let events_before = self.events.len();
        // Of several at one place, the first stays.
        let is_known = |last: &PlacedDoubt| last.events_before == events_before && last.tier == tier;
        if !self.doubts.last().is_some_and(is_known) {
            self.doubts.push(PlacedDoubt {
                events_before,
                reason,
                tier,
            });
        }
    }

    /// Appends an object of the block number `block` of its event.
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

    pub(crate) fn push_text(&mut self, text: &str) -> Span {
        let start = self.text.len();
        self.text.push_str(text);
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

    /// Appends so many ones to the hashes.
    pub(crate) fn push_ones(&mut self, count: usize) -> Span {
        let start = self.hashes.len();
        self.hashes.resize(start + count, 1);
        self.hashes_since(start)
    }

    /// The objects from `start` to the end of the list.
    pub(crate) fn objects_since(&self, start: usize) -> Span {
        Span::new(start, self.objects.len())
    }

    /// Appends `count` tokens of `span`, from its token number `from` on.
    pub(crate) fn extend_tokens_from(&mut self, span: Span, from: usize, count: usize) {
        let start = span.start + from;
        let end = (start + count).min(span.end);
        if start < end && end <= self.tokens.len() {
            self.tokens.extend_from_within(start..end);
        }
    }
}
