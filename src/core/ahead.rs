//! Prefetching: asks the processor to load memory before the code uses it.

/// Number of items between the item in use and the item whose memory is prefetched.
pub(crate) const AHEAD: usize = 16;

/// Asks the processor to load the cache line of `place`, which a later step will need.
#[inline]
pub(crate) fn prefetch<T: ?Sized>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    #[allow(
        unsafe_code,
        reason = "a hint without an effect on memory; probing without it costs a cache miss per block stored"
    )]
    // SAFETY: a prefetch does not access memory as far as the program can see; any address is allowed.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
