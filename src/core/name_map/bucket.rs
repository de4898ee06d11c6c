//! Prints: one word for each bucket of the name map, which a search reads first. The word has a few bits of each slot's
//! tag (the fingerprint of a name), and the bucket's overflow count.

/// Number of bits in a slot's print: the lowest bits of its tag, which is the fingerprint of a name. A search compares
/// the prints first.
pub(super) const PRINT_BITS: u32 = 7;
pub(super) const PRINT_MASK: u64 = (1 << PRINT_BITS) - 1;

/// Prints of a bucket's 8 slots, one byte each, and the bucket's overflow count.
///
/// The lowest 7 bits of a byte are the print: the lowest 7 bits of the slot's tag, or 0 if the slot is empty. The
/// highest bits of all bytes together are the overflow count. It is the number of slots in later buckets that belong
/// to this bucket or to an earlier one. A count that has reached [`BEHIND_MAX`] stays there.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BucketPrints(u64);

/// Mask of the lowest bit of each byte. [`TOPS`] is the mask of the highest bits.
const LANES: u64 = 0x0101_0101_0101_0101;
const TOPS: u64 = LANES << PRINT_BITS;
/// Maximum overflow count. A count that has reached it stays there, because it is no longer the true number.
const BEHIND_MAX: u64 = 0xff;

impl BucketPrints {
    /// Returns the print (the lowest bits of the tag) of a slot; 0 if it is empty.
    #[inline]
    pub(super) fn get(self, index: usize) -> u64 {
        self.0 >> (index * 8) & PRINT_MASK
    }

    /// Fills an empty slot of the bucket with a print (the lowest bits of a tag).
    #[inline]
    pub(super) fn put(&mut self, index: usize, print: u64) {
        self.0 |= print << (index * 8);
    }

    /// Empties a slot.
    #[inline]
    pub(super) fn clear(&mut self, index: usize) {
        self.0 &= !(PRINT_MASK << (index * 8));
    }

    /// Returns a mask of the slots that have this print (the lowest bits of a tag): the highest bit of each slot's
    /// byte.
    #[inline]
    pub(super) fn with_print(self, print: u64) -> u64 {
        let differs = (self.0 ^ (LANES * print)) & !TOPS;
        !(differs + (TOPS - LANES)) & TOPS
    }

    /// Whether a slot with this print (the lowest bits of a tag) can be in this bucket or in a later one.
    #[inline]
    pub(super) fn may_have(self, print: u64) -> bool {
        (self.with_print(print) | self.0 & TOPS) != 0
    }

    #[inline]
    pub(super) fn empty(self) -> u64 {
        self.with_print(0)
    }

    #[inline]
    pub(super) fn taken(self) -> u64 {
        !self.empty() & TOPS
    }

    /// Whether later buckets have slots that belong to this bucket or to an earlier one.
    #[inline]
    pub(super) fn has_behind(self) -> bool {
        self.0 & TOPS != 0
    }

    /// Returns the overflow count: the number of slots in later buckets that belong to this bucket or to an earlier
    /// one. At [`BEHIND_MAX`] the true number is not known.
    #[inline]
    fn behind(self) -> u64 {
        // One multiplication gathers the 8 bits in the highest byte; the shift moves them down.
        ((self.0 & TOPS) >> PRINT_BITS).wrapping_mul(0x0102_0408_1020_4080) >> 56
    }

    /// Adjusts the overflow count when a slot is put into a later bucket (`is_more` is true) or removed from one
    /// (`is_more` is false). Does nothing if the count is [`BEHIND_MAX`].
    #[inline]
    pub(super) fn count_behind(&mut self, is_more: bool) {
        let behind = self.behind();
        if behind < BEHIND_MAX {
            let next = if is_more { behind + 1 } else { behind - 1 };
            // Each bit of the count is in a byte of its own, and is then moved to the top of that byte.
            let bits = (next * LANES) & 0x8040_2010_0804_0201;
            let tops = ((bits & !TOPS) + (TOPS - LANES)) | bits;
            self.0 = self.0 & !TOPS | tops & TOPS;
        }
    }
}

/// Returns the numbers of the slots in a mask.
#[inline]
pub(super) fn indexes(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let index = (mask != 0).then(|| mask.trailing_zeros() as usize / 8)?;
        mask &= mask - 1;
        Some(index)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_counts_what_lies_behind_it() {
        let mut prints = BucketPrints(LANES * 0x55);
        for count in (0..BEHIND_MAX).chain([BEHIND_MAX; 2]) {
            assert_eq!((prints.behind(), prints.has_behind()), (count, count > 0));
            prints.count_behind(true);
        }
        // At the maximum, the true count is not known, so it stays.
        prints.count_behind(false);
        assert_eq!(prints.behind(), BEHIND_MAX);
        prints.0 = LANES * 0x55;
        (0..200).for_each(|_| prints.count_behind(true));
        for count in (0..200).rev() {
            prints.count_behind(false);
            assert_eq!((prints.behind(), prints.0 & !TOPS), (count, LANES * 0x55));
        }
    }
}
