//! Mirrors. A mirror keeps the blocks that an engine holds on its device, with their tokens. It serves routers that
//! have an index of their own.
//!
//! Such a router follows vLLM's events, and has missed all events from before its start. A [`Mirror`] works together
//! with a [`Translator`]. The mirror takes the blocks' tokens from the engine's events. It learns from the
//! translator's events which blocks are held, so mirror and translator always agree on that. Routers receive events
//! of vLLM ([`EventList`]) from the mirror: either the changes since the last call, or all blocks. The mirror's
//! guarantees:
//!
//! 1. Each block that a router has learned from the mirror is held on the device by all groups of full attention, as
//!    far as the translator knows. Test: `mirror::a_router_has_what_the_device_has`.
//! 2. A router that is given all blocks at some moment knows the same blocks as a router that was given every change
//!    since the start. Test: the same.
//! 3. The events name blocks by the contract's sequence hashes, so two blocks with different content have different
//!    names.
//! 4. Memory is bounded by [`MirrorSettings::bytes_max`]. Blocks for which the memory has no room are left out and
//!    counted. A router then knows fewer blocks, but no wrong ones. Test: `mirror::a_full_mirror_takes_no_more`.
//!    The same holds for blocks with more than 4,096 combinations of salt and adapter at a time. Test:
//!    `mirror::blocks_with_too_many_salts_are_counted_for_themselves`.
//! 5. Once events may have been lost, earlier blocks no longer count as held. Only blocks that are stored afterwards
//!    count. If [`MirrorSettings::proves_ancestors`] is set, a stored block proves that the blocks before it are
//!    held, too. Test: `mirror::after_a_doubt_only_what_is_stored_again_is_held`.

mod list;
mod nodes;
mod saved;

use hashbrown::HashMap;

use kvatlas_core::hash::{BlockSize, HashSeed, SequenceHash, next_sequence_hash};
use kvatlas_core::wire::{BlockNames, Event, Tier};

use crate::batch::{Content, EngineBatch, EngineChange, EngineStored};
use crate::translator::{Translation, Translator, content_hashes};

use list::ListWriter;
use nodes::{BlockState, NoPlace, Nodes, Slot};

pub use list::EventList;
pub use saved::SavedMirror;

/// The settings of a mirror.
#[derive(Debug, Clone)]
pub struct MirrorSettings {
    /// Tokens in a block.
    pub block_size: BlockSize,
    /// Maximum memory that the blocks take, in bytes.
    pub bytes_max: usize,
    /// Whether blocks with a salt, an adapter or an image are kept. A router that ignores salts, adapters and images
    /// takes such blocks for blocks of plain prompts.
    pub has_special: bool,
    /// Whether the engine stores a block on the device only while it holds all blocks before it there.
    pub proves_ancestors: bool,
}

/// Numbers of blocks that the mirror has left out, one number for each reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MirrorOmissions {
    /// Blocks for which the memory had no room.
    pub full: u64,
    /// Blocks whose salt or adapter was one too many: the mirror tells 4,096 combinations apart at a time.
    pub salts: u64,
    /// Blocks that have a salt, an adapter or an image.
    pub special: u64,
    /// Blocks whose own tokens are unknown, or for which the tokens of an earlier block of the sequence are unknown.
    pub unknown: u64,
}

/// A block from a stored event of the current batch, with the engine's name for it.
#[derive(Debug, Clone, Copy)]
struct NamedSlot {
    name: u64,
    slot: Slot,
    /// True if the block is the first one of its stored event.
    is_first: bool,
}

/// The blocks of one holder, with their tokens.
#[derive(Debug)]
pub struct Mirror {
    settings: MirrorSettings,
    nodes: Nodes,
    /// The blocks of all stored events in the current batch.
    named: Vec<NamedSlot>,
    names: HashMap<u64, SequenceHash>,
    /// Blocks that may have changed since the last [`Self::take_changes`].
    touched: Vec<Slot>,
    /// True if everything was cleared since the last [`Self::take_changes`].
    has_cleared: bool,
    /// True if [`Self::take_changes`] must next return `None`: routers then need all blocks, because the changes
    /// since the last call would not be enough.
    is_all_due: bool,
    /// True if some blocks may be [`BlockState::Unseen`]: the engine held them before it became silent or before some
    /// of its events went missing.
    has_unseen: bool,
    omissions: MirrorOmissions,
}

impl Mirror {
    /// A mirror of a holder without blocks.
    pub fn new(settings: MirrorSettings) -> Self {
        Self {
            nodes: Nodes::new(settings.block_size, settings.bytes_max),
            settings,
            named: Vec::new(),
            names: HashMap::new(),
            touched: Vec::new(),
            has_cleared: false,
            is_all_due: false,
            has_unseen: false,
            omissions: MirrorOmissions::default(),
        }
    }

    /// Returns the memory that the blocks take, in bytes.
    pub fn bytes(&self) -> usize {
        self.nodes.bytes()
    }

    /// Returns how many blocks were left out since the last call of this method, for each reason.
    pub fn take_omissions(&mut self) -> MirrorOmissions {
        std::mem::take(&mut self.omissions)
    }

    /// Translates `batch` with `translator`, as [`Translator::translate`] does, and applies the result to the mirror.
    pub fn translate(&mut self, translator: &mut Translator, batch: &EngineBatch, output: &mut Translation) {
        self.named.clear();
        self.names.clear();
        for event in batch.events() {
            if let EngineChange::Stored(stored) = &event.change {
                self.learn(translator, batch, stored);
            }
        }
        // From here on, the translator puts blocks into new events. So the events of this call can be told from earlier
        // ones.
        output.seal();
        let mark = output.mark();
        translator.translate(batch, output);
        for (tier, events) in output.parts_since(mark) {
            events.iter().for_each(|event| self.follow(tier, event));
        }
        self.confirm(translator);
        // An unread part may have been a removal. If the translator leaves out events for other reasons, the mirror
        // knows fewer blocks, but no wrong ones.
        let hides_events = batch.doubts().iter().any(|doubt| doubt.tier.is_none());
        if hides_events && translator.lasting_doubt().is_some() {
            self.doubt();
        }
    }

    /// Adds the blocks of a stored event to the mirror, with their tokens. At this time, the translator has not
    /// accepted the event yet. If it refuses the event, the blocks stay marked as not held, and are dropped later.
    fn learn(&mut self, translator: &Translator, batch: &EngineBatch, stored: &EngineStored) {
        if stored.tier != Tier::DEVICE || !translator.counts(stored.group) {
            return;
        }
        let blocks = batch.hashes(stored.names).len() as u64;
        let size = self.settings.block_size.as_usize();
        let tokens = match stored.content {
            Content::Tokens { tokens, step, window } if step == size && window == size => tokens,
            _ => return self.omissions.unknown += blocks,
        };
        let Some((parent, seed)) = self.start_of(translator, batch, stored) else {
            return;
        };
        let Ok(hashes) = content_hashes(batch, stored, seed) else {
            return self.omissions.unknown += blocks;
        };
        let first_object = batch
            .objects(stored.objects)
            .first()
            .map(|object| object.block as usize);
        let count = match first_object.filter(|_| !self.settings.has_special) {
            Some(first) => first.min(hashes.len()),
            None => hashes.len(),
        };
        self.omissions.special += (hashes.len() - count) as u64;
        let lora = translator.lora_name(batch, stored).unwrap_or_default();
        let mut at = parent;
        let tokens = batch.tokens(tokens).chunks_exact(size);
        let names = batch.hashes(stored.names).iter();
        for (place, ((hash, tokens), name)) in hashes.iter().zip(tokens).zip(names).take(count).enumerate() {
            let before = at.and_then(|slot| self.nodes.sequence(slot));
            let sequence = next_sequence_hash(before, *hash);
            let slot = match self.nodes.find_or_insert(sequence, at, seed, lora, tokens) {
                Ok(slot) => slot,
                Err(NoPlace::Full) => return self.omissions.full += (count - place) as u64,
                Err(NoPlace::Salts) => return self.omissions.salts += (count - place) as u64,
            };
            self.names.insert(*name, sequence);
            let (name, is_first) = (*name, place == 0);
            self.named.push(NamedSlot { name, slot, is_first });
            self.touched.push(slot);
            at = Some(slot);
        }
    }

    /// Finds the start of a stored event's blocks. Returns the slot (index in [`Nodes`]) of the block before them and
    /// the hash seed of their sequence. The slot is `None` if the blocks begin the sequence. If no start can be
    /// found, or the mirror keeps no blocks with this seed, counts the blocks as left out and returns `None`.
    fn start_of(
        &mut self,
        translator: &Translator,
        batch: &EngineBatch,
        stored: &EngineStored,
    ) -> Option<(Option<Slot>, HashSeed)> {
        let blocks = batch.hashes(stored.names).len() as u64;
        let start = match stored.parent {
            None if stored.position.unwrap_or_default() > 0 => None,
            None => {
                let salt = stored.cache_salt.map(|salt| batch.text(salt));
                let lora = translator.lora_name(batch, stored).ok();
                lora.map(|lora| (None, HashSeed::for_cache(lora, salt)))
            }
            Some(parent) => {
                let named = self.names.get(&parent).copied();
                let sequence = named.or_else(|| translator.sequence_named(parent));
                let slot = sequence.and_then(|sequence| self.nodes.find(sequence));
                slot.and_then(|slot| Some((Some(slot), self.nodes.seed(slot)?)))
            }
        };
        let Some((parent, seed)) = start else {
            self.omissions.unknown += blocks;
            return None;
        };
        if seed != HashSeed::default() && !self.settings.has_special {
            self.omissions.special += blocks;
            return None;
        }
        Some((parent, seed))
    }

    /// Applies to the mirror an event that the translator has emitted.
    fn follow(&mut self, tier: Tier, event: &Event) {
        match event {
            Event::Cleared => self.clear(),
            _ if tier != Tier::DEVICE => {}
            Event::Stored(stored) => {
                if let BlockNames::Sequence { hashes, .. } = &stored.names {
                    hashes.iter().for_each(|hash| self.set(*hash, BlockState::Yes));
                }
            }
            Event::Removed(removed) => removed
                .hashes
                .iter()
                .for_each(|hash| self.set(*hash, BlockState::No)),
            _ => {}
        }
    }

    fn set(&mut self, sequence: SequenceHash, held: BlockState) {
        if let Some(slot) = self.nodes.find(sequence) {
            self.nodes.set_held(slot, held);
            self.touched.push(slot);
        }
    }

    /// Marks each block of the batch's stored events as held, if the translator holds it. [`Self::follow`] alone
    /// would miss a block that the translator held before, because the translator emits no event for such a block.
    ///
    /// If [`MirrorSettings::proves_ancestors`] is set, also marks the blocks before an event's first block as held,
    /// if they are in doubt.
    fn confirm(&mut self, translator: &Translator) {
        for NamedSlot { name, slot, is_first } in std::mem::take(&mut self.named) {
            let sequence = self.nodes.sequence(slot);
            if !sequence.is_some_and(|sequence| translator.holds_on_device(name, sequence)) {
                continue;
            }
            self.nodes.set_held(slot, BlockState::Yes);
            if !is_first || !self.settings.proves_ancestors {
                continue;
            }
            let mut at = self.nodes.parent(slot);
            while let Some(ancestor) = at.filter(|slot| self.nodes.held(*slot).is_doubted()) {
                self.nodes.set_held(ancestor, BlockState::Yes);
                self.touched.push(ancestor);
                at = self.nodes.parent(ancestor);
            }
        }
    }

    /// Notes that the holder has no blocks any more.
    pub fn clear(&mut self) {
        self.nodes.clear_held();
        (self.has_cleared, self.has_unseen) = (true, false);
    }

    /// Notes that events may have been lost: blocks that count as held may be gone from the device.
    pub fn doubt(&mut self) {
        self.is_all_due |= self.nodes.has_held();
        self.nodes.doubt_held();
        self.has_unseen = false;
    }

    /// Notes that the engine has been silent for long, or that some of its events are missing. It may no longer hold
    /// the blocks.
    pub fn lose_sight(&mut self) {
        if self.nodes.has_held() {
            self.nodes.lose_sight();
            (self.is_all_due, self.has_unseen) = (true, true);
        }
    }

    /// Notes that the engine is alive, and that all events since [`Self::lose_sight`] have been applied.
    pub fn regain_sight(&mut self) {
        if std::mem::take(&mut self.has_unseen) {
            self.nodes.regain_sight(&mut self.touched);
        }
    }

    /// Returns the changes since the last call of this method, for routers that were given all earlier changes.
    /// Returns `None` if the changes are not enough: routers then need [`Self::all`].
    pub fn take_changes(&mut self) -> Option<Vec<EventList>> {
        let is_all_due = std::mem::take(&mut self.is_all_due);
        let has_cleared = std::mem::take(&mut self.has_cleared);
        let mut touched = std::mem::take(&mut self.touched);
        let changes = (!is_all_due).then(|| self.differences(&touched, has_cleared));
        let forgets = self.nodes.is_nearly_full() && self.nodes.forget_doubted();
        if is_all_due || has_cleared || forgets {
            self.nodes.prune_all();
        } else {
            touched.iter().for_each(|slot| self.nodes.prune(*slot));
        }
        if is_all_due {
            self.nodes.note_all_told();
        }
        touched.clear();
        self.touched = touched;
        changes
    }

    /// Returns the events that tell routers of all changes since the last call. `touched` lists all blocks that may
    /// have changed.
    fn differences(&mut self, touched: &[Slot], has_cleared: bool) -> Vec<EventList> {
        let mut writer = ListWriter::new(self.settings.block_size);
        if has_cleared {
            writer.clear();
        }
        for slot in touched {
            if self.nodes.is_told(*slot) && self.nodes.held(*slot) != BlockState::Yes {
                self.nodes.note_told(*slot, false);
                writer.remove(self.nodes.sequence(*slot));
            }
        }
        let mut gone = Vec::new();
        for slot in touched {
            if self.nodes.held(*slot) == BlockState::Yes && !self.nodes.is_told(*slot) {
                self.tell(*slot, &mut gone, &mut writer);
            }
        }
        gone.into_iter().for_each(|sequence| writer.remove(sequence));
        writer.finish()
    }

    /// Writes a stored event for a held block. Before it, writes the earlier blocks of the block's prefix that
    /// routers don't know yet. Some of these earlier blocks may not be held: they are appended to `gone`, and the
    /// caller has to write their removals afterwards.
    fn tell(&mut self, slot: Slot, gone: &mut Vec<Option<SequenceHash>>, writer: &mut ListWriter) {
        let mut path = vec![slot];
        let mut at = self.nodes.parent(slot);
        while let Some(ancestor) = at.filter(|slot| !self.nodes.is_known(*slot)) {
            path.push(ancestor);
            at = self.nodes.parent(ancestor);
        }
        for slot in path.into_iter().rev() {
            let is_held = self.nodes.held(slot) == BlockState::Yes;
            if !is_held {
                gone.push(self.nodes.sequence(slot));
            }
            self.nodes.note_told(slot, is_held);
            if let Some(block) = self.nodes.block(slot) {
                writer.store(&block);
            }
        }
    }

    /// Returns events that give a router all held blocks: a clear, and then stored events. Needed for a router that
    /// knows no blocks, or outdated ones. May be called only when [`Self::take_changes`] has no changes left to
    /// return.
    ///
    /// A held block may follow blocks that are not held. Those blocks are stored, too, and removed at the end.
    pub fn all(&self) -> Vec<EventList> {
        let mut writer = ListWriter::new(self.settings.block_size);
        writer.clear();
        let mut gone = Vec::new();
        self.nodes.walk(|slot| {
            if let Some(block) = self.nodes.block(slot) {
                writer.store(&block);
            }
            if self.nodes.held(slot) != BlockState::Yes {
                gone.push(self.nodes.sequence(slot));
            }
        });
        gone.into_iter().for_each(|sequence| writer.remove(sequence));
        writer.finish()
    }
}
