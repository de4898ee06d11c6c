//! Giving names to blocks, and taking names away. Each name of a block has the tiers that hold the block under that
//! name. A block is held as long as it has a name with a tier. A block without a name is held as long as it has a
//! tier.

use crate::index::runs::{RunId, RunWriter, Spot};
use crate::index::share::tier_bit;
use crate::wire::Tier;

use super::alias::{Aliases, add_name, withdraw_from};
use super::applied::RejectReason;
use super::find::FoundBlock;
use super::form::{Form, NameNotes};
use super::state::{HolderState, Work};

impl HolderState {
    /// Removes a name from a block. A block that loses its last name is removed.
    pub(super) fn drop_name(&mut self, found: FoundBlock, name: u64) {
        match found {
            FoundBlock::Orphan(key) => {
                self.orphans.withdraw(key, Some(name), u8::MAX);
            }
            FoundBlock::Placed(spot) => {
                if self.withdraw_many(spot, Some(name), u8::MAX).is_none() {
                    self.erase(spot.run, spot.offset, spot.offset + 1, |_| true);
                }
            }
        }
    }

    /// Adds tiers to a block that has a place. The tiers hold the block under `name`, which becomes a name of the block
    /// if it was not one. Without `name`, they hold it under its first name, or without a name if it has none. Returns
    /// `false` if the block has too many names.
    pub(super) fn name_again(
        &mut self,
        spot: Spot,
        name: Option<u64>,
        tiers: u8,
        runs: &RunWriter<'_>,
    ) -> bool {
        let Some(held) = self.attributes(spot) else {
            return false;
        };
        let mut names = self.names_of(spot, runs);
        let form = match name.or_else(|| names.first().map(|alias| alias.name)) {
            None => Form::Nameless,
            Some(name) => {
                let is_first = names.is_empty();
                // Tiers that held the block without a name now hold it under its first name.
                let taken = if is_first { held.tiers() } else { 0 };
                if !add_name(&mut names, name, tiers | taken) {
                    return false;
                }
                match names.len() {
                    1 if is_first => self.form_of(spot, name, held.is_whole(), runs),
                    1 => held.form(),
                    _ => Form::Many,
                }
            }
        };
        let before = self.own_names(spot);
        if matches!(form, Form::Own | Form::Many) {
            self.names.replace(spot, &before, &names);
        }
        let next = held.with_more(tiers).with_form(form);
        self.share.set(spot, spot.offset + 1, Some(next));
        true
    }

    /// Returns the names of a block that are in the holder's table of names.
    fn own_names(&self, spot: Spot) -> Aliases {
        let held = self.attributes(spot);
        match held.map(|held| (held.form(), held.tiers())) {
            Some((Form::Own | Form::Many, tiers)) => self.names.of(spot, tiers),
            _ => Aliases::new(),
        }
    }

    /// Returns the [`Form`] of a block with the single name `name`. The form tells how the engine names the block, and
    /// so where the name is stored.
    pub(super) fn form_of(&self, spot: Spot, name: u64, is_whole: bool, runs: &RunWriter<'_>) -> Form {
        match is_whole && runs.hash(spot) == name && runs.is_placed(spot) {
            true => Form::Hash,
            false => Form::Own,
        }
    }

    /// Removes tiers from one name of a block, or from all its names if `name` is `None`. Handles only blocks with
    /// several names; returns `None` for others. Otherwise returns whether the block was in any of these tiers.
    pub(super) fn withdraw_many(&mut self, spot: Spot, name: Option<u64>, tiers: u8) -> Option<bool> {
        if !self.names.has_several() {
            return None;
        }
        let held = self.attributes(spot).filter(|held| held.form() == Form::Many)?;
        let before = self.names.of(spot, held.tiers());
        let mut names = before.clone();
        let withdrawn = withdraw_from(&mut names, name, tiers, |_| {});
        self.names.replace(spot, &before, &names);
        let left = names.iter().fold(0, |left, alias| left | alias.tiers);
        let form = if names.len() == 1 { Form::Own } else { Form::Many };
        let next = held.with_tiers(left).with_form(form);
        match names.is_empty() {
            true => self.lose(spot, spot.offset + 1),
            false if next != held => self.share.set(spot, spot.offset + 1, Some(next)),
            false => {}
        }
        Some(withdrawn != 0)
    }

    /// Removes blocks of a run from the holder: those at the offsets `from` to `to` whose form (how the engine names
    /// the block) satisfies `is_it`. Removes their names from the tables, too.
    pub(super) fn erase(&mut self, run: RunId, from: u16, to: u16, is_it: impl Fn(Form) -> bool) {
        let mut at = from;
        while at < to {
            let Some(part) = self.share.part(run) else { return };
            let (mut end, held) = part.extent(at, to);
            match held.map(NameNotes::form).filter(|form| is_it(*form)) {
                None => {}
                Some(Form::Many) => {
                    self.withdraw_many(Spot { run, offset: at }, None, u8::MAX);
                    end = at + 1;
                }
                Some(form) => self.erase_uniform(run, at, end, form),
            }
            at = end;
        }
    }

    /// Removes the blocks at the offsets `from` to `to` from the holder. The engine names all of these blocks in the
    /// same form, which is not [`Form::Many`].
    pub(super) fn erase_uniform(&mut self, run: RunId, from: u16, to: u16, form: Form) {
        if form == Form::Own {
            self.names.remove(run, from, to);
        }
        self.lose(Spot { run, offset: from }, to);
    }

    /// Stores a block again that the holder already has at the place `at`. The block may get an additional tier, an
    /// additional name or its whole hash.
    pub(super) fn extend(
        &mut self,
        at: Spot,
        name: Option<u64>,
        is_whole: bool,
        is_barred: bool,
        work: &mut Work<'_>,
    ) {
        if let Some(name) = name
            && let Some(other) = self.find_other(name, at, Form::Many, &work.runs)
        {
            work.applied.reject(RejectReason::Moved, 1);
            self.drop_name(other, name);
        }
        let Some(held) = self.attributes(at) else { return };
        self.share.set(at, at.offset + 1, Some(held.with_whole(is_whole)));
        match self.name_again(at, name, tier_bit(work.tier), &work.runs) {
            true => {
                self.mark(FoundBlock::Placed(at), work.tier, is_barred);
                work.applied.stored += 1;
            }
            false => work.reject_full(1),
        }
    }

    /// Marks a block as barred (not resumable) or not barred in a tier. Returns `false` if the block is not in that
    /// tier.
    pub(super) fn mark(&mut self, found: FoundBlock, tier: Tier, is_barred: bool) -> bool {
        match found {
            FoundBlock::Placed(spot) => self.share.mark(spot, tier, is_barred),
            FoundBlock::Orphan(key) => self.orphans.mark(key, tier, is_barred),
        }
    }
}
