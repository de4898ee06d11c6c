//! Names of one block, each with the tiers that hold the block under that name. An engine may store a block under
//! several names.

use smallvec::SmallVec;

/// One of the names of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alias {
    pub(super) name: u64,
    /// Tiers that hold the block under this name, one bit each; at least one.
    pub(super) tiers: u8,
}

/// Names of a block that has a place in the runs, oldest first.
pub(super) type Aliases = SmallVec<[Alias; 4]>;

/// Maximum number of names of one block. The bound keeps the number of a holder's names in proportion to its blocks.
pub(super) const NAMES_MAX: usize = 16;

/// Adds tiers to a name of a block. If the block does not have the name, adds the name too. Returns `false` if the
/// block has too many names.
pub(super) fn add_name<A>(names: &mut SmallVec<A>, name: u64, tiers: u8) -> bool
where
    A: smallvec::Array<Item = Alias>,
{
    let is_full = names.len() >= NAMES_MAX;
    match names.iter_mut().find(|alias| alias.name == name) {
        Some(alias) => alias.tiers |= tiers,
        None if is_full => return false,
        None => names.push(Alias { name, tiers }),
    }
    true
}

/// Removes tiers from one name of a block, or from all its names if `name` is `None`. Returns the tiers that were
/// removed. If a name has no tiers left, removes the name and calls `let_go` with it.
pub(super) fn withdraw_from<A>(
    names: &mut SmallVec<A>,
    name: Option<u64>,
    tiers: u8,
    mut let_go: impl FnMut(u64),
) -> u8
where
    A: smallvec::Array<Item = Alias>,
{
    let mut withdrawn = 0;
    names.retain(|alias| {
        if name.is_none_or(|name| name == alias.name) {
            withdrawn |= alias.tiers & tiers;
            alias.tiers &= !tiers;
        }
        if alias.tiers == 0 {
            let_go(alias.name);
        }
        alias.tiers != 0
    });
    withdrawn
}
