//! Translates an [`EngineBatch`] into events of the contract, for one holder.
//!
//! A translator computes the contract's sequence hash of each block and remembers the engine's name for it. Its
//! events name blocks only by the contract's hashes, so a daemon needs no table of names for the holder.
//!
//! Words of this module:
//!
//! - *Name*: the engine's number for a block. *Copy*: an engine can store a block several times under one name, and
//!   each time adds a copy.
//! - *Group*: layers of a model that share a cache.
//! - *Main attention*: the groups of which a request needs all blocks of a prefix. The other groups are sliding
//!   windows and recurrent states: a request needs only their last blocks.
//! - *Lane*: the names and copies of one group of main attention.
//! - *Report*: a stored event about blocks that the engine held before, which adds no copies.
//! - *Tiers beyond the device*: host, disk and remote storage.
//!
//! A translator guarantees:
//!
//! 1. In each tier, its events add up to the same blocks as the engine's events. Copies are counted: an event stores
//!    a block when the first copy is added, and removes the block when the last copy goes. Test:
//!    `oracle::events_add_up_to_the_cache`.
//! 2. Its events never add a block that the engine's events don't add. An engine's event that contradicts itself or
//!    earlier events is left out as a whole, and counted. Test: `rules::contradictions_are_left_out`.
//! 3. The full state that it gives for a resync equals the sum of its events so far, with parents before children.
//!    Test: `oracle::events_add_up_to_the_cache`.
//! 4. Its memory is bounded by [`TranslatorSettings::blocks_max`]. Test: `rules::a_full_table_takes_no_more`.
//! 5. A translator that is saved and restored between any two batches emits the same events as one that is not.
//!    Tests: `oracle::events_add_up_to_the_cache`, `groups::what_a_request_reuses_is_what_all_groups_have`.

mod adapters;
mod beside;
mod beyond;
mod block;
mod chain;
mod clears;
mod content;
mod forms;
mod groups;
mod lane;
mod output;
mod past;
mod recalled;
mod removal;
mod resumable;
mod saved;
mod settings;
mod shape;
mod sizes;
mod spots;
mod start;
mod state;
mod tiers;
mod tree;
mod windows;

use kvatlas_core::hash::{HashSeed, Position, SchemeChains};
use kvatlas_core::wire::Tier;

use crate::batch::{Content, EngineBatch, EngineChange, EngineEvent, EngineStored, Group, Untold};
use crate::reason::{Reason, ReasonCounts};

use adapters::Adapters;
use beyond::Beyond;
use block::ChainSlot;
use chain::Chain;
use content::Contents;
use groups::{GroupLaneId, HolderGroups, STAND_IN};
use recalled::Recalled;
use resumable::Step;
use sizes::Sizes;
use start::StoredStart;
use tiers::TierIndex;
use windows::Windows;

pub use content::content_hashes;
pub use forms::SavedError;
pub use output::{Translation, TranslationPart};
pub use recalled::NamedBlocks;
pub use saved::SavedTranslator;
pub use settings::{HashMode, TranslatorSettings};

/// Translates the events of one holder: one engine's publisher and rank.
#[derive(Debug)]
pub struct Translator {
    settings: TranslatorSettings,
    chain: Chain,
    groups: HolderGroups,
    windows: Windows,
    step: Step,
    beyond: Beyond,
    recalled: Recalled,
    contents: Contents,
    sizes: Sizes,
    adapters: Adapters,
    untold: Untold,
    /// Number of tokens after a block that the engine's name for the block also covers. `None` until an event with
    /// tokens shows it.
    lookahead: Option<usize>,
    /// Whether the engine hashes overlapping pairs of tokens, so that each block shares a token with the next block.
    hashes_pairs: bool,
    slots: Vec<ChainSlot>,
    doubt: Option<Reason>,
    hides_groups: bool,
    unchecked: u32,
}

impl Translator {
    /// A translator of a holder without blocks.
    pub fn new(settings: TranslatorSettings) -> Self {
        Self {
            windows: Windows::new(settings.block_size.as_u32()),
            settings,
            chain: Chain::default(),
            groups: HolderGroups::default(),
            step: Step::default(),
            beyond: Beyond::default(),
            recalled: Recalled::default(),
            contents: Contents::default(),
            sizes: Sizes::default(),
            adapters: Adapters::default(),
            untold: Untold::default(),
            lookahead: None,
            hashes_pairs: false,
            slots: Vec::new(),
            doubt: None,
            hides_groups: false,
            unchecked: 0,
        }
    }

    /// The reason why the holder's blocks are in doubt; `None` while they are certain. The first reason stays until the
    /// engine clears. Four doubts are different:
    ///
    /// - [`TranslatorSettings::is_untold`] is a doubt that never ends.
    /// - [`Reason::BlockSize`] ends with a block of the registered size.
    /// - [`Reason::HiddenKey`] ends when the device has no block that has had two names there.
    /// - [`Reason::Reported`] ends when each block on the device has a copy that is certain.
    pub fn doubt(&self) -> Option<Reason> {
        let when = |is_so: bool, reason| is_so.then_some(reason);
        self.doubt
            .or(when(self.settings.is_untold, Reason::Untold))
            .or(when(self.sizes.is_doubted(), Reason::BlockSize))
            .or(when(
                self.groups.mixed_in(TierIndex::DEVICE) > 0,
                Reason::HiddenKey,
            ))
            .or(when(self.groups.unclear() > 0, Reason::Reported))
    }

    /// Returns the facts that the engine's events cannot tell: salts, the names of adapters, or both. If a query
    /// depends on such a fact, the answer is never certain.
    pub fn untold(&self) -> Untold {
        self.untold.or(Untold {
            adapters: self.adapters.is_uncertain(),
            ..Untold::default()
        })
    }

    /// Whether the engine's hash of a block also covers tokens after the block.
    pub fn looks_ahead(&self) -> bool {
        self.lookahead.is_some_and(|tokens| tokens > 0)
    }

    /// Whether the engine hashes overlapping pairs of tokens. Such an engine computes the last two tokens of a prompt,
    /// and not only the last one.
    pub fn hashes_pairs(&self) -> bool {
        self.hashes_pairs
    }

    /// Whether it is unknown how much a request can reuse, though the blocks of main attention are known. The events
    /// then don't tell enough about the other groups of layers.
    pub fn hides_groups(&self) -> bool {
        let has_no_main = !self.windows.is_empty() && !self.groups.has_main();
        self.settings.groups.hide_hits()
            || self.hides_groups
            || self.groups.has_others()
            || has_no_main
            || self.windows.has_unlisted()
            || self.windows.has_inner_states()
            || self.may_lack_groups()
            || match self.settings.numbers_groups {
                true => self.groups.are_apart() || !self.knows_first_group(),
                false => self.groups.has_split(),
            }
    }

    /// Whether a server has passed on main attention only of an engine that may have more groups of layers.
    fn may_lack_groups(&self) -> bool {
        let (groups, is_numbered) = (&self.settings.groups, self.groups.has_numbered_main());
        self.settings.is_relayed && is_numbered && !groups.has_main_only()
    }

    /// Whether it is known which blocks of group 0 a request needs. It is known once an event has told of group 0.
    /// The result is also true if no numbered group of main attention is known, because the question does not arise
    /// then.
    fn knows_first_group(&self) -> bool {
        let is_known = || self.groups.knows(0) || self.windows.find(0).is_some();
        !self.groups.has_numbered_main() || is_known()
    }

    /// The kinds of layers other than full attention, as far as events have told: `windows`, `states` or
    /// `windows+states`. `None` if there are none.
    pub fn layers(&self) -> Option<&'static str> {
        self.windows.layers()
    }

    /// Returns the number of tokens in the engine's blocks, if the blocks have another size than the registered one.
    /// `None` if they do not, or if their size is not known.
    pub fn other_block_size(&self) -> Option<u64> {
        self.sizes.other()
    }

    /// Notes the reason why the holder's blocks are in doubt, for example because events were lost. The doubt lasts
    /// until the engine clears. An earlier reason stays.
    pub fn note_doubt(&mut self, reason: Reason) {
        self.doubt.get_or_insert(reason);
    }

    /// Number of blocks that are held, in any tier.
    pub fn blocks(&self) -> usize {
        self.chain.len()
    }

    /// Number of the engine's names that are kept.
    pub fn names(&self) -> usize {
        self.groups.names() + self.windows.names()
    }

    /// Forgets all that the engine's events have told, as if the engine had just started. Emits no events.
    pub fn reset(&mut self) {
        self.chain = Chain::default();
        self.groups = HolderGroups::default();
        self.sizes = Sizes::default();
        self.adapters = Adapters::default();
        self.untold = Untold::default();
        (self.lookahead, self.hashes_pairs) = (None, false);
        self.windows = Windows::new(self.settings.block_size.as_u32());
        self.step = Step::default();
        self.beyond = Beyond::default();
        self.recalled = Recalled::default();
        (self.doubt, self.hides_groups) = (None, false);
    }

    /// Translates all events of `batch`, which must be about one holder, and appends their changes to `output`.
    pub fn translate(&mut self, batch: &EngineBatch, output: &mut Translation) {
        self.translate_some(batch, |_| true, output);
    }

    /// Translates those events of `batch` for which `is_ours` returns true, and appends their changes to `output`.
    /// All doubts of the batch apply to the holder, each at its place among the events, because the parts that could
    /// not be read may be about any holder.
    pub fn translate_some(
        &mut self,
        batch: &EngineBatch,
        is_ours: impl Fn(&EngineEvent) -> bool,
        output: &mut Translation,
    ) {
        output.reasons.merge(&batch.reasons);
        self.untold = self.untold.or(batch.untold);
        let begun = output.mark();
        self.learn_windows(batch.events().iter().filter(|event| is_ours(event)), output);
        let mut doubts = batch.doubts().iter().peekable();
        for (place, event) in batch.events().iter().enumerate() {
            while let Some(doubt) = doubts.next_if(|doubt| doubt.events_before <= place) {
                self.note_placed(*doubt);
            }
            if is_ours(event) {
                self.translate_event(batch, place, output);
            }
        }
        doubts.for_each(|doubt| self.note_placed(*doubt));
        self.settle(batch, output);
        self.finish_step(batch, begun, output);
        // The places of these reasons among the events are unknown, so a clear in the batch does not end them.
        self.hides_groups |= batch.reasons.iter().any(|(reason, _)| reason.hides_groups());
    }

    /// Counts the reasons of a batch whose events are not applied. If one of these reasons leaves the holder's state
    /// in doubt, the holder is in doubt from now on.
    pub fn note_reasons(&mut self, reasons: &ReasonCounts, output: &mut Translation) {
        output.reasons.merge(reasons);
        self.doubt = self.doubt.or(reasons.doubt());
        self.hides_groups |= reasons.iter().any(|(reason, _)| reason.hides_groups());
    }

    /// Translates the event at index `place` of `batch`, and appends its changes to `output`. Some events are only
    /// put aside here, because they need later events of the batch.
    fn translate_event(&mut self, batch: &EngineBatch, place: usize, output: &mut Translation) {
        let Some(event) = batch.events().get(place) else {
            return;
        };
        match self.defer(&event.change) {
            Ok(false) => {}
            Ok(true) => return,
            Err(reason) => return self.count(reason, output),
        }
        let outcome = match &event.change {
            EngineChange::Created(group) => self.lane_for(self.stated(*group), output).map(drop),
            EngineChange::Stored(stored) if stored.tier != Tier::DEVICE => {
                return self.store_beyond(batch, stored, output);
            }
            EngineChange::Stored(stored) => self.store(batch, stored, output),
            EngineChange::Removed(removed) => {
                self.remove(batch, removed, output);
                Ok(())
            }
            EngineChange::Moved {
                name,
                from,
                to,
                group,
            } => self.relocate(*name, *from, *to, *group, output),
            EngineChange::Cleared => {
                self.clear_at(batch, place, output);
                Ok(())
            }
        };
        if let Err(reason) = outcome {
            self.count(reason, output);
        }
    }

    fn count(&mut self, reason: Reason, output: &mut Translation) {
        output.reasons.count(reason);
        if reason.degrades() {
            self.note_doubt(reason);
        }
        self.hides_groups |= reason.hides_groups();
    }

    fn store(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        output: &mut Translation,
    ) -> Result<(), Reason> {
        let tier = TierIndex::of(stored.tier).ok_or(Reason::UnknownMedium)?;
        let group = self.stated(stored.group);
        if self.groups.counts(group) {
            // From a group's first block on, each block must be in this group to count as held. These checks come
            // before the group is learned, so that a group whose blocks are all left out has no such effect.
            self.check_block_size(stored)?;
            self.check_lookahead(stored, self.settings.block_size.as_u32().into())?;
            self.check_adapter(batch, stored)?;
        }
        self.beyond.note_keys(stored);
        let lane = self.lane_for(group, output)?;
        let names = batch.hashes(stored.names);
        if self.names() + names.len() > self.settings.blocks_max {
            return Err(Reason::TableFull);
        }
        let start = match (self.start_of(batch, stored, lane), stored.parent) {
            (Err(Reason::UnknownParent), Some(parent)) if self.recall(lane, parent, names.len(), output) => {
                self.start_of(batch, stored, lane)?
            }
            (start, _) => start?,
        };
        self.compute_chain(batch, stored, &start)?;
        let may_be_report = self.may_be_report(stored, names, lane);
        if self.insert(names, &start, lane, tier)? {
            output.reasons.count(Reason::HiddenKey);
        }
        if may_be_report {
            self.groups.doubt_copies(lane, names);
        }
        self.list_small_blocks(batch, stored, &start);
        if !self.settings.counts_copies {
            for name in names {
                self.groups.set_copies(lane, *name, tier, 1);
            }
        }
        self.publish_stored(tier, output);
        Ok(())
    }

    /// Whether a stored event may be a report that adds no copies. If a request asks for it, vLLM reports the whole
    /// prefix of the request as stored, although it holds the prefix already. An event that stores a held prefix
    /// again is otherwise rare, unless another group of layers lacks the prefix.
    fn may_be_report(&self, stored: &EngineStored, names: &[u64], lane: GroupLaneId) -> bool {
        let held_first = |name: &u64| self.groups.has_copy(lane, *name, TierIndex::DEVICE);
        let is_whole_prefix = stored.parent.is_none() && names.first().is_some_and(held_first);
        self.settings.has_reports && is_whole_prefix && self.windows.is_empty()
    }

    fn check_block_size(&mut self, stored: &EngineStored) -> Result<(), Reason> {
        let size = match (stored.block_size, stored.content) {
            (Some(size), _) => size,
            (None, Content::Tokens { step, .. }) => step as u64,
            (None, _) => return Ok(()),
        };
        let follows_unknown = stored.parent.is_some_and(|parent| !self.groups.has_name(parent));
        let registered = u64::from(self.settings.block_size.as_u32());
        self.sizes
            .judge(size, registered, stored.names.len(), follows_unknown)
    }

    /// Checks how many tokens after a block of `block_size` tokens the engine's name for the block covers. Refuses the
    /// event if queries cannot cover so many, or if the number differs from that of earlier events.
    fn check_lookahead(&mut self, stored: &EngineStored, block_size: u64) -> Result<(), Reason> {
        let Content::Tokens { step, window, .. } = stored.content else {
            return Ok(());
        };
        let size = usize::try_from(block_size).unwrap_or(usize::MAX);
        let ahead = window.saturating_sub(size);
        self.hashes_pairs |= step < window;
        let known = *self.lookahead.get_or_insert(ahead);
        // Most hash schemes cover a block's own tokens only.
        let chains = self.settings.chains.as_ref();
        let ahead_max = usize::from(chains.is_none_or(SchemeChains::may_look_ahead));
        match known == ahead && ahead <= ahead_max {
            true => Ok(()),
            false => Err(Reason::Lookahead),
        }
    }

    /// Notes the number of the blocks' adapter together with its name. Refuses blocks whose adapter has only a
    /// number, if no name is known for the number.
    fn check_adapter(&mut self, batch: &EngineBatch, stored: &EngineStored) -> Result<(), Reason> {
        let name = self.lora_name(batch, stored);
        match (name, stored.lora_id) {
            (Err(reason), _) => {
                self.adapters.note_unnamed();
                return Err(reason);
            }
            (Ok(Some(name)), Some(number)) => {
                let adapter = HashSeed::for_cache(Some(name), None);
                self.adapters.note(adapter, number);
            }
            _ => {}
        }
        Ok(())
    }

    /// The lane of a stored event's group, that is, the state of one group of main attention. The event may show for the
    /// first time that a group belongs to main attention, or that it does not. If so, emits the changes to the held blocks.
    fn lane_for(&mut self, group: Group, output: &mut Translation) -> Result<GroupLaneId, Reason> {
        let stood_in = group.index != Some(STAND_IN) && self.groups.drop_lane(STAND_IN, &mut self.chain);
        let (lane, changes_all) = self.groups.learn(group, &mut self.chain);
        if changes_all || stood_in {
            self.publish_all(output);
        }
        lane
    }

    /// The name of the adapter of a stored event's blocks; `None` if they have no adapter.
    pub(crate) fn lora_name<'a>(
        &'a self,
        batch: &'a EngineBatch,
        stored: &EngineStored,
    ) -> Result<Option<&'a str>, Reason> {
        match (stored.lora_name, stored.lora_id) {
            (Some(name), _) => Ok(Some(batch.text(name))),
            (None, None) => Ok(None),
            (None, Some(number)) => match (self.settings.lora_names.get(&number), number) {
                (Some(name), _) => Ok(Some(name)),
                // Number 0 stands for no adapter.
                (None, 0) => Ok(None),
                (None, _) => Err(Reason::UnnamedAdapter),
            },
        }
    }

    /// Finds the sequence hashes of the event's blocks. Depending on the settings, they are computed from the
    /// content, or taken from the engine's names.
    fn compute_chain(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        start: &StoredStart,
    ) -> Result<(), Reason> {
        let names = batch.hashes(stored.names);
        let last = u64::from(start.position) + (names.len() as u64).saturating_sub(1);
        Position::new(last).map_err(|_| Reason::OutOfRange)?;
        match self.settings.mode {
            HashMode::Recompute => self.compute_blocks(batch, stored, start, names.len()),
            HashMode::Trust { sample } => {
                let seed = start.seed;
                self.contents.take_names(names);
                let contents = &self.contents;
                contents.check(batch, stored, start.parent, seed, sample, &mut self.unchecked)
            }
        }
    }

    /// Computes the sequence hashes of the first `count` blocks of an event's content.
    fn compute_blocks(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        start: &StoredStart,
        count: usize,
    ) -> Result<(), Reason> {
        let Some(chains) = &self.settings.chains else {
            return self
                .contents
                .compute(batch, stored, start.parent, start.seed, count);
        };
        let Some(steps) = chains.steps() else {
            let begins = start.parent.is_none();
            return self.contents.take_in(chains, batch, stored, begins, count);
        };
        let before = match start.parent {
            Some(parent) => (parent, None),
            None => {
                let salt = stored.cache_salt.map(|salt| batch.text(salt));
                (steps.root(self.lora_name(batch, stored)?), salt)
            }
        };
        self.contents.compute_in(steps, batch, stored, before, count)
    }

    /// Adds a copy of each block. If a copy can't be added, takes back the copies added before and returns the
    /// reason. Otherwise returns whether at least one of the blocks is also held under another name.
    fn insert(
        &mut self,
        names: &[u64],
        start: &StoredStart,
        lane: GroupLaneId,
        tier: TierIndex,
    ) -> Result<bool, Reason> {
        self.slots.clear();
        let mut is_alias = false;
        for (name, block) in names.iter().zip(start.blocks(self.contents.chain())) {
            match self.groups.add(lane, *name, block, tier, &mut self.chain) {
                Ok(added) => {
                    is_alias |= added.is_alias;
                    self.slots.push(added.slot);
                }
                Err(reason) => {
                    let reason = self.explain(reason, *name, start, lane);
                    for name in names.iter().take(self.slots.len()).rev() {
                        self.groups.take(lane, *name, tier, &mut self.chain);
                    }
                    self.slots
                        .drain(..)
                        .rev()
                        .for_each(|slot| self.chain.free_unnamed(slot));
                    return Err(reason);
                }
            }
        }
        Ok(is_alias)
    }

    /// Returns a more exact reason why the name `name` could not be added, if there is one. A name conflict is in
    /// fact a cycle if the name already stands for a block before the event's first block.
    fn explain(&self, reason: Reason, name: u64, start: &StoredStart, lane: GroupLaneId) -> Reason {
        let known = self.groups.find(lane, name).and_then(|slot| self.chain.get(slot));
        match (reason, known, start.parent) {
            (Reason::NameConflict, Some(known), Some(parent)) if self.chain.has_ancestor(parent, known) => {
                Reason::Cycle
            }
            _ => reason,
        }
    }

    /// Emits the blocks in `slots` that are held in `tier` and were not published there before.
    fn publish_stored(&mut self, tier: TierIndex, output: &mut Translation) {
        for slot in self.slots.drain(..) {
            if self.groups.holds(slot, tier) {
                self.chain.publish(slot, tier, output);
            }
        }
    }

    /// Compares the held blocks with the published ones in all tiers, and emits every difference.
    fn publish_all(&mut self, output: &mut Translation) {
        for slot in self.chain.slots() {
            for tier in TierIndex::ALL {
                match self.groups.holds(slot, tier) {
                    true => self.chain.publish(slot, tier, output),
                    false => self.chain.withdraw(slot, tier, output),
                }
            }
            self.chain.free_unnamed(slot);
        }
    }
}
