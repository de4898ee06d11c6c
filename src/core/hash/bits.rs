//! Bit-field helpers shared by the packed 128-bit hashes.

/// The low `bits` bits of `value`. `bits` is below 64: no field of a packed hash is wider.
#[inline]
pub(super) const fn low_bits(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

/// Returns the low 64 bits of a packed hash.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "dropping the high half is what this function is for"
)]
pub(super) const fn low_half(packed: u128) -> u64 {
    packed as u64
}

/// Returns the high 64 bits of a packed hash.
#[inline]
pub(super) const fn high_half(packed: u128) -> u64 {
    low_half(packed >> 64)
}
