//! Further names of the blocks of one run. If a block has several names, all names after its first name are further
//! names.
//!
//! Further names are kept in groups, one for each 32 blocks. A group without further names takes no memory. So a
//! second name takes little more memory than its own bytes, and a change moves the names of at most one group.

use super::alias::{Alias, Aliases, NAMES_MAX};

/// Number of consecutive blocks of a run that form one group. The further names of these blocks are stored together.
const GROUP: u16 = 32;

/// Further names of all blocks of one run.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Groups that have further names, in the order of the groups' numbers.
    groups: Vec<CopyGroup>,
    /// Bytes that the further names in all groups take.
    names: usize,
}

#[derive(Debug)]
struct CopyGroup {
    number: u16,
    /// Further names of the group's blocks, in the order of the blocks' offsets. The names of one block are in order of
    /// age, oldest first.
    names: Vec<Further>,
}

/// A name of a block other than its first name, stored without padding.
#[derive(Debug, Clone, Copy)]
struct Further {
    name: [u8; 8],
    offset: u16,
    tiers: u8,
    /// Tiers that hold the block under its first name.
    first: u8,
}

impl Further {
    fn new(offset: u16, alias: Alias, first: u8) -> Self {
        Self {
            name: alias.name.to_ne_bytes(),
            offset,
            tiers: alias.tiers,
            first,
        }
    }

    fn alias(&self) -> Alias {
        Alias {
            name: u64::from_ne_bytes(self.name),
            tiers: self.tiers,
        }
    }
}

impl Copies {
    /// Bytes that the further names take.
    pub(super) fn bytes(&self) -> usize {
        self.groups.capacity() * size_of::<CopyGroup>() + self.names
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    fn index_of(&self, number: u16) -> Result<usize, usize> {
        self.groups.binary_search_by_key(&number, |group| group.number)
    }

    fn of(&self, offset: u16) -> &[Further] {
        match self.index_of(offset / GROUP) {
            Ok(index) => &self.groups[index].names[self.groups[index].range(offset)],
            Err(_) => &[],
        }
    }

    /// Whether `name` is one of the further names of the block at `offset`.
    pub(super) fn has(&self, offset: u16, name: u64) -> bool {
        self.of(offset).iter().any(|further| further.alias().name == name)
    }

    /// Whether a block can have one more name.
    pub(super) fn has_room(&self, offset: u16) -> bool {
        self.of(offset).len() + 1 < NAMES_MAX
    }

    /// Appends the further names of a block to `names`, which contains its first name. Also sets the tiers of the
    /// first name.
    pub(super) fn add_to(&self, offset: u16, names: &mut Aliases) {
        for further in self.of(offset) {
            if let Some(first) = names.first_mut() {
                first.tiers = further.first;
            }
            names.push(further.alias());
        }
    }

    /// Replaces the names of a block. Stores the further names, and the tiers of the first name. The first name
    /// itself is stored elsewhere.
    pub(super) fn set(&mut self, offset: u16, names: &[Alias]) {
        let (first, rest) = names
            .split_first()
            .map_or((0, names), |(first, rest)| (first.tiers, rest));
        let index = match self.index_of(offset / GROUP) {
            Ok(index) => index,
            Err(_) if rest.is_empty() => return,
            Err(index) => {
                let (number, names) = (offset / GROUP, Vec::new());
                self.groups.insert(index, CopyGroup { number, names });
                index
            }
        };
        let group = &mut self.groups[index];
        self.names -= group.bytes();
        let range = group.range(offset);
        let more = rest.len().saturating_sub(range.len());
        if group.names.len() + more > group.names.capacity() {
            // The other blocks of the group will mostly get as many names, so the room is doubled.
            let room = group.names.len().max(8);
            group.names.reserve_exact(room.max(more));
        }
        let rest = rest.iter().map(|alias| Further::new(offset, *alias, first));
        group.names.splice(range, rest);
        self.names += group.bytes();
        if group.names.is_empty() {
            self.names -= group.bytes();
            self.groups.remove(index);
        }
    }
}

impl CopyGroup {
    fn bytes(&self) -> usize {
        self.names.capacity() * size_of::<Further>()
    }

    /// Returns the range of `names` that has the further names of the block at `offset`.
    fn range(&self, offset: u16) -> std::ops::Range<usize> {
        let from = match self.names.last() {
            Some(last) if last.offset < offset => self.names.len(),
            _ => self.names.partition_point(|further| further.offset < offset),
        };
        let is_own = |further: &&Further| further.offset == offset;
        from..from + self.names[from..].iter().take_while(is_own).count()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvatlas_lab::random::Random;

    use super::*;

    #[test]
    fn copies_equal_a_map_and_take_little() {
        let mut random = Random::new(5);
        let mut copies = Copies::default();
        let mut model: BTreeMap<u16, Vec<Alias>> = BTreeMap::new();
        for step in 0..50_000 {
            let offset = u16::try_from(random.below(200)).unwrap();
            let grows = step % 10_000 < 6000;
            let count = if random.chance(if grows { 80 } else { 5 }) {
                random.below(17)
            } else {
                0
            };
            let alias = |_| Alias {
                name: random.next(),
                tiers: 1 << random.below(3),
            };
            let names: Vec<Alias> = (0..count).map(alias).collect();
            copies.set(offset, &names);
            model.insert(offset, names);
            model.retain(|_, names| names.len() > 1);
            let first = Alias { name: 0, tiers: 7 };
            let mut own = Aliases::from_iter([first]);
            copies.add_to(offset, &mut own);
            let expected = model.get(&offset).map_or(&[][..], Vec::as_slice);
            assert_eq!(own.get(1..), expected.get(1..).or(Some(&[])));
            assert_eq!(own[0].tiers, expected.first().map_or(7, |first| first.tiers));
            assert!(own[1..].iter().all(|alias| copies.has(offset, alias.name)));
            let held: usize = copies.groups.iter().map(CopyGroup::bytes).sum();
            assert_eq!((copies.names, copies.is_empty()), (held, model.is_empty()));
        }
        let all: Vec<Alias> = (0..2).map(|name| Alias { name, tiers: 1 }).collect();
        (0..4032).for_each(|offset| copies.set(offset, &all));
        assert!(copies.bytes() < 16 * 4032, "{}", copies.bytes());
    }
}
