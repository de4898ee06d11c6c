//! Up to three holders of a run, and the word that they fit into: mostly there are no more.

use super::super::holder_set::HolderSlot;

/// What a holder has of a run: a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Share {
    /// How many blocks it has; at least 1.
    pub(crate) cutoff: u16,
    pub(crate) slot: HolderSlot,
}

/// Up to three holders of a run, deepest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Few {
    /// Beyond `count`, all are nobody with nothing.
    holders: [Share; Few::MAX],
    count: u8,
}

/// [`Few`] holders as a word. Its lowest bits are 0 only where there are no holders, and then the word is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packed(u64);

/// Bits that say which fields follow.
const FORM_BITS: u32 = 3;
/// A run has at most 4096 blocks; a cutoff is packed less 1.
const CUTOFF_BITS: u32 = 12;
/// Any slot.
const SLOT_BITS: u32 = 16;
/// The first 4096 slots.
const LOW_SLOT_BITS: u32 = 12;

/// A cutoff and a slot.
const ONE: u64 = 1;
/// The same twice.
const TWO: u64 = 2;
/// One cutoff, three slots.
const THREE_ALIKE: u64 = 3;
/// Two cutoffs and three low slots; the first has the larger cutoff.
const ONE_BEFORE_TWO: u64 = 4;
/// Two cutoffs and three low slots; the last has the smaller cutoff.
const TWO_BEFORE_ONE: u64 = 5;

impl Few {
    /// Most holders that fit into a word.
    const MAX: usize = 3;

    /// The holders, deepest first.
    #[inline]
    pub(super) fn holders(&self) -> &[Share] {
        self.holders.get(..usize::from(self.count)).unwrap_or_default()
    }

    /// The largest cutoff; 0 without holders.
    #[inline]
    pub(super) fn len(&self) -> u16 {
        self.holders[0].cutoff
    }

    /// How much `slot` has.
    pub(super) fn cutoff(&self, slot: HolderSlot) -> u16 {
        let own = self.holders().iter().find(|holder| holder.slot == slot);
        own.map_or(0, |own| own.cutoff)
    }

    /// The holders after `own` has come, or got another cutoff, or has left (0); none if they are too many.
    pub(super) fn with(&self, own: Share) -> Option<Self> {
        let mut next = Self::default();
        let others = self.holders().iter().filter(|other| other.slot != own.slot);
        let mut own = (own.cutoff > 0).then_some(own);
        for other in others {
            if let Some(deeper) = own.take_if(|own| own.cutoff > other.cutoff) {
                next.push(deeper)?;
            }
            next.push(*other)?;
        }
        if let Some(own) = own {
            next.push(own)?;
        }
        Some(next)
    }

    /// Adds one that is not deeper than those before; none if they are too many.
    pub(super) fn push(&mut self, holder: Share) -> Option<()> {
        *self.holders.get_mut(usize::from(self.count))? = holder;
        self.count += 1;
        Some(())
    }

    /// As a word, if they fit.
    pub(super) fn pack(self) -> Option<Packed> {
        let [first, second, third] = self.holders;
        let mut fields = Fields::default();
        match self.count {
            0 => return Some(Packed(0)),
            1 => {
                fields.put(ONE, FORM_BITS);
                fields.put_cutoff(first);
                fields.put_slot(first, SLOT_BITS)?;
            }
            2 => {
                fields.put(TWO, FORM_BITS);
                for holder in [first, second] {
                    fields.put_cutoff(holder);
                    fields.put_slot(holder, SLOT_BITS)?;
                }
            }
            _ => {
                let (form, others, slot_bits) = if first.cutoff == third.cutoff {
                    (THREE_ALIKE, None, SLOT_BITS)
                } else if first.cutoff == second.cutoff {
                    (TWO_BEFORE_ONE, Some(third), LOW_SLOT_BITS)
                } else if second.cutoff == third.cutoff {
                    (ONE_BEFORE_TWO, Some(third), LOW_SLOT_BITS)
                } else {
                    return None;
                };
                fields.put(form, FORM_BITS);
                fields.put_cutoff(first);
                if let Some(other) = others {
                    fields.put_cutoff(other);
                }
                for holder in self.holders {
                    fields.put_slot(holder, slot_bits)?;
                }
            }
        }
        Some(Packed(fields.word))
    }
}

impl Packed {
    /// Nobody.
    pub(super) const NOBODY: Self = Self(0);

    /// A word, if it is not the address of something of at least 8 bytes' alignment.
    #[inline]
    pub(super) fn from_word(word: usize) -> Option<Self> {
        let word = word as u64;
        (word == 0 || !word.is_multiple_of(1 << FORM_BITS)).then_some(Self(word))
    }

    /// See [`Self::from_word`].
    #[inline]
    #[allow(
        clippy::cast_possible_truncation,
        reason = "words have 64 bits, see `cover_word`"
    )]
    pub(super) fn as_word(self) -> usize {
        self.0 as usize
    }

    /// The holders.
    #[inline]
    pub(super) fn unpack(self) -> Few {
        let mut fields = Fields { word: self.0, end: 0 };
        let form = fields.take(FORM_BITS);
        if form == 0 {
            return Few::default();
        }
        let first = fields.take_cutoff();
        if form == ONE {
            let only = fields.take_holder(first, SLOT_BITS);
            return Few {
                holders: [only, Share::default(), Share::default()],
                count: 1,
            };
        }
        if form == TWO {
            let one = fields.take_holder(first, SLOT_BITS);
            let second = fields.take_cutoff();
            let other = fields.take_holder(second, SLOT_BITS);
            return Few {
                holders: [one, other, Share::default()],
                count: 2,
            };
        }
        let (cutoffs, slot_bits) = if form == THREE_ALIKE {
            ([first; Few::MAX], SLOT_BITS)
        } else {
            let last = fields.take_cutoff();
            let middle = if form == TWO_BEFORE_ONE { first } else { last };
            ([first, middle, last], LOW_SLOT_BITS)
        };
        Few {
            holders: cutoffs.map(|cutoff| fields.take_holder(cutoff, slot_bits)),
            count: 3,
        }
    }
}

/// A word that is written or read field by field.
#[derive(Debug, Default)]
struct Fields {
    word: u64,
    /// Where the next field begins.
    end: u32,
}

impl Fields {
    #[inline]
    fn put(&mut self, value: u64, bits: u32) {
        self.word |= value << self.end;
        self.end += bits;
    }

    #[inline]
    fn put_cutoff(&mut self, holder: Share) {
        self.put(u64::from(holder.cutoff.saturating_sub(1)), CUTOFF_BITS);
    }

    #[inline]
    fn put_slot(&mut self, holder: Share, bits: u32) -> Option<()> {
        let slot = holder.slot.index() as u64;
        if slot >> bits != 0 {
            return None;
        }
        self.put(slot, bits);
        Some(())
    }

    #[inline]
    fn take(&mut self, bits: u32) -> u64 {
        let value = self.word >> self.end & ((1 << bits) - 1);
        self.end += bits;
        value
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "fields have at most 16 bits")]
    fn take_cutoff(&mut self) -> u16 {
        self.take(CUTOFF_BITS) as u16 + 1
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "fields have at most 16 bits")]
    fn take_holder(&mut self, cutoff: u16, slot_bits: u32) -> Share {
        let slot = HolderSlot::from_bits(self.take(slot_bits) as u16);
        Share { cutoff, slot }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn few(cutoffs: &[(u16, usize)]) -> Few {
        let mut few = Few::default();
        for (cutoff, slot) in cutoffs {
            let slot = HolderSlot::new(*slot).unwrap();
            few = few
                .with(Share {
                    cutoff: *cutoff,
                    slot,
                })
                .unwrap();
        }
        few
    }

    #[test]
    fn what_fits_survives_packing() {
        let last = HolderSlot::COUNT_MAX - 1;
        for holders in [
            few(&[]),
            few(&[(4096, last)]),
            few(&[(1, last), (4096, 0)]),
            few(&[(4096, last), (4096, 0), (4096, 5)]),
            few(&[(4096, 4095), (4095, 0), (4095, 5)]),
            few(&[(4096, 4095), (4096, 0), (1, 5)]),
        ] {
            let packed = holders.pack().unwrap();
            assert_eq!(Packed::from_word(packed.as_word()), Some(packed));
            assert_eq!(packed.unpack(), holders);
        }
    }

    #[test]
    fn what_does_not_fit_is_not_packed() {
        assert_eq!(few(&[(3, 0), (2, 1), (1, 2)]).pack(), None);
        assert_eq!(few(&[(3, 0), (3, 1), (1, 4096)]).pack(), None);
        assert_eq!(
            few(&[(3, 0), (3, 1), (1, 2)]).with(Share {
                cutoff: 1,
                slot: HolderSlot::new(3).unwrap()
            }),
            None
        );
        assert_eq!(Packed::from_word(8), None);
    }

    proptest! {
        #[test]
        fn any_holders_survive_packing(cutoffs in proptest::collection::vec((1_u16..=4096, 0_usize..65_536), 0..3)) {
            let holders = few(&cutoffs);
            prop_assert_eq!(holders.pack().unwrap().unpack(), holders);
        }
    }
}
