//! Tests that compare sets of holders with plain sets of slot numbers.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::index::directory::{HolderSlot, SlotBits, SlotGatherer, SlotSet};

fn indices(set: &SlotSet) -> BTreeSet<usize> {
    let bits = |(index, word): (usize, &u64)| {
        let word = *word;
        (0..64)
            .filter(move |bit| word >> bit & 1 == 1)
            .map(move |bit| index * 64 + bit)
    };
    set.words().iter().enumerate().flat_map(bits).collect()
}

proptest! {
    #[test]
    fn gathered_slots_are_a_set(slots in proptest::collection::vec(0_usize..300, 0..200)) {
        let members = || slots.iter().map(|index| HolderSlot::new(*index).unwrap());
        let gathered: SlotSet = members().collect();
        let model: BTreeSet<usize> = slots.iter().copied().collect();
        prop_assert_eq!(&indices(&gathered), &model);
        let mut small = SlotGatherer::<u64>::default();
        members().for_each(|slot| small.insert(slot));
        let expected = model.iter().take_while(|index| **index < 64).fold(0, |word, index| word | 1 << index);
        prop_assert_eq!(small.finish(), expected);
    }

    #[test]
    fn a_set_equals_a_model(changes in proptest::collection::vec((any::<bool>(), 0_usize..300), 0..200)) {
        let (mut model, mut set) = (BTreeSet::new(), SlotSet::default());
        for (insert, index) in changes {
            let slot = HolderSlot::new(index).unwrap();
            if insert {
                set.insert(slot);
                model.insert(index);
            } else {
                set.remove(slot);
                model.remove(&index);
            }
            prop_assert_eq!(set.is_empty(), model.is_empty());
            prop_assert_eq!(set.contains(slot), model.contains(&index));
            prop_assert_eq!(&indices(&set), &model);
        }
    }

    #[test]
    fn working_sets_intersect_and_subtract(
        ours in proptest::collection::btree_set(0_usize..200, 0..30),
        theirs in proptest::collection::btree_set(0_usize..200, 1..30),
        spread in 1_usize..4,
    ) {
        let slot = |member: &usize| HolderSlot::new(member * spread).unwrap();
        let slots = |members: &BTreeSet<usize>| members.iter().map(slot).collect::<SlotSet>();
        let indices = |set: &SlotSet| indices(set).iter().map(|index| index / spread).collect::<BTreeSet<_>>();
        let both: BTreeSet<usize> = &ours & &theirs;
        let mut set = slots(&ours);
        set.intersect(&slots(&theirs));
        prop_assert_eq!(indices(&set), both);
        let mut set = slots(&ours);
        set.subtract(&slots(&theirs));
        prop_assert_eq!(indices(&set), &ours - &theirs);
        let mut set = slots(&ours);
        set.unite(&slots(&theirs));
        prop_assert!(!set.is_empty());
        prop_assert_eq!(indices(&set), &ours | &theirs);
    }
}
