//! The part of a bucket of the name map that one look takes in: a few bits of each tag, and how much lies behind it.

/// Bits of a tag that are compared first.
pub(super) const PRINT_BITS: u32 = 7;
pub(super) const PRINT_MASK: u64 = (1 << PRINT_BITS) - 1;

/// The lowest 7 bits of the tag of each slot of a bucket, one byte each, 0 where it is empty. The highest bits of the bytes are a number: how
/// many slots lie behind the bucket that belong there or before; all of them where there were ever so many.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct BucketPrints(u64);

/// The lowest bit of each byte, and the highest one.
const LANES: u64 = 0x0101_0101_0101_0101;
const TOPS: u64 = LANES << PRINT_BITS;
/// As many slots behind a bucket are no longer counted.
const BEHIND_MAX: u64 = 0xff;

impl BucketPrints {
    /// The print of a slot.
    #[inline]
    pub(super) fn get(self, index: usize) -> u64 {
        self.0 >> (index * 8) & PRINT_MASK
    }

    /// Fills a slot that is empty.
    #[inline]
    pub(super) fn put(&mut self, index: usize, print: u64) {
        self.0 |= print << (index * 8);
    }

    /// Empties a slot.
    #[inline]
    pub(super) fn clear(&mut self, index: usize) {
        self.0 &= !(PRINT_MASK << (index * 8));
    }

    /// The slots that have this print: the highest bit of each.
    #[inline]
    pub(super) fn with_print(self, print: u64) -> u64 {
        let differs = (self.0 ^ (LANES * print)) & !TOPS;
        !(differs + (TOPS - LANES)) & TOPS
    }

    /// Whether a slot with this print can be here or behind.
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

    /// Whether slots lie behind the bucket that belong there or before.
    #[inline]
    pub(super) fn has_behind(self) -> bool {
        self.0 & TOPS != 0
    }

    /// How many slots lie behind the bucket that belong there or before; or more, where this is [`BEHIND_MAX`].
    #[inline]
    fn behind(self) -> u64 {
        // The bits, moved to the lowest byte by as many shifts at once.
        ((self.0 & TOPS) >> PRINT_BITS).wrapping_mul(0x0102_0408_1020_4080) >> 56
    }

    /// One slot more lies behind the bucket, or one less.
    #[inline]
    pub(super) fn count_behind(&mut self, is_more: bool) {
        let behind = self.behind();
        if behind < BEHIND_MAX {
            let next = if is_more { behind + 1 } else { behind - 1 };
            // Each bit, in a byte of its own, moved to the top.
            let bits = (next * LANES) & 0x8040_2010_0804_0201;
            let tops = ((bits & !TOPS) + (TOPS - LANES)) | bits;
            self.0 = self.0 & !TOPS | tops & TOPS;
        }
    }
}

/// The slots of a mask.
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
        // It no longer knows.
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
