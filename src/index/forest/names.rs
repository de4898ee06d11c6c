//! What the engine calls the blocks of a forest.
//!
//! A name names one block; a block can have several, where an engine tells apart what the contract does not. Each name holds
//! its block in tiers of its own, and the block is held as long as any of them does.

use crate::wire::Tier;

use super::{BlockNumber, Forest, NewBlock, Publication, Removed, Stored, tier_bit};

/// One of several names of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alias {
    pub(super) name: u64,
    /// The tiers that hold the block under this name; never none.
    pub(super) tiers: u8,
}

/// Most names of one block; keeps the names of a holder in proportion to its blocks.
pub(crate) const NAMES_PER_BLOCK_MAX: usize = 16;

impl Forest {
    /// A block that is there already gets a tier, and a name or sequence hash if it does not have that.
    pub(super) fn extend(&mut self, number: BlockNumber, block: &NewBlock, tier: Tier) -> Stored {
        let known = &mut self.blocks[number.index()];
        known.sequence_hash = known.sequence_hash.or(block.sequence_hash);
        let Some(first) = known.name else {
            // A first name takes over what was stored without one.
            known.name = block.name;
            known.tiers |= tier_bit(tier);
            self.by_name.extend(block.name.map(|name| (name, number)));
            return Stored::Known;
        };
        let name = block.name.unwrap_or(first);
        if name != first || self.aliases.contains_key(&number) {
            let tiers = known.tiers;
            let only = || vec![Alias { name: first, tiers }];
            let names = self.aliases.entry(number).or_insert_with(only);
            let is_full = names.len() == NAMES_PER_BLOCK_MAX;
            match names.iter_mut().find(|alias| alias.name == name) {
                Some(alias) => alias.tiers |= tier_bit(tier),
                None if is_full => return Stored::Full,
                None => {
                    let tiers = tier_bit(tier);
                    names.push(Alias { name, tiers });
                    self.by_name.insert(name, number);
                }
            }
        }
        known.tiers |= tier_bit(tier);
        Stored::Known
    }

    /// Removes the block that the engine calls `name` from `tier`.
    pub(crate) fn remove_name(
        &mut self,
        name: u64,
        tier: Tier,
        publication: &mut Publication<'_, '_>,
    ) -> Removed {
        let Some(number) = self.find_name(name) else {
            return Removed::Unknown;
        };
        if self.aliases.contains_key(&number) {
            let mut removed = Removed::Unknown;
            self.change_names(number, |alias| {
                if alias.name == name && alias.tiers & tier_bit(tier) != 0 {
                    alias.tiers &= !tier_bit(tier);
                    removed = Removed::Remains;
                }
            });
            return removed;
        }
        self.remove_tier(number, tier, publication)
    }

    /// Takes one name from a block; a block that loses its last name is removed.
    pub(crate) fn drop_name(
        &mut self,
        number: BlockNumber,
        name: u64,
        publication: &mut Publication<'_, '_>,
    ) {
        if !self.aliases.contains_key(&number) {
            self.erase(number, publication);
            return;
        }
        self.change_names(number, |alias| {
            if alias.name == name {
                alias.tiers = 0;
            }
        });
    }

    /// Removes the blocks that have no name; says how many.
    pub(crate) fn drop_nameless(&mut self, publication: &mut Publication<'_, '_>) -> usize {
        let numbers = self.by_place.iter().copied();
        let mut nameless: Vec<BlockNumber> = numbers
            .filter(|number| self.block(*number).name.is_none())
            .collect();
        // Children first.
        nameless.sort_unstable_by_key(|number| std::cmp::Reverse(self.block(*number).key));
        for number in &nameless {
            self.erase(*number, publication);
        }
        nameless.len()
    }

    /// Changes the names of a block that has several. One that no tier is left for is dropped.
    pub(super) fn change_names(&mut self, number: BlockNumber, change: impl FnMut(&mut Alias)) {
        let Some(names) = self.aliases.get_mut(&number) else {
            return;
        };
        names.iter_mut().for_each(change);
        for dropped in names.extract_if(.., |alias| alias.tiers == 0) {
            self.by_name.remove(&dropped.name);
        }
        let block = &mut self.blocks[number.index()];
        block.name = names.first().map(|alias| alias.name);
        block.tiers = names.iter().fold(0, |tiers, alias| tiers | alias.tiers);
        if names.len() < 2 {
            self.aliases.remove(&number);
        }
    }

    /// The first name of a block, if it has one, and the tiers that hold the block under it; one bit a tier.
    pub(crate) fn first_name(&self, number: BlockNumber) -> (Option<u64>, u8) {
        let block = self.block(number);
        let first = self.aliases.get(&number).and_then(|names| names.first());
        (block.name, first.map_or(block.tiers, |alias| alias.tiers))
    }

    /// Further names of a block, each with its tiers.
    pub(crate) fn further_names(&self, number: BlockNumber) -> impl Iterator<Item = (u64, u8)> + '_ {
        let names = self.aliases.get(&number).map_or(&[][..], Vec::as_slice);
        names.iter().skip(1).map(|alias| (alias.name, alias.tiers))
    }
}
