//! Return of memory to the operating system after the index has become much smaller.
//!
//! The index gives unneeded memory back to the allocator, which keeps it for later. Without this step, the process
//! would never take less memory than at its largest size.

/// Minimum number of bytes by which the indexes must have shrunk before memory is given back.
const SHRUNK_BYTES_MIN: u64 = 32 << 20;

/// Record of the size of all indexes together, which tells when memory is to be given back.
#[derive(Debug, Default)]
pub(super) struct ShrinkWatch {
    now: u64,
    /// Largest size of all indexes together, in bytes, since memory was last given back.
    most: u64,
    /// Size of all indexes together, in bytes, at the last call of [`Self::is_due`].
    asked: u64,
}

impl ShrinkWatch {
    /// Notes the present size of all indexes together, in bytes.
    pub(super) fn note(&mut self, bytes: u64) {
        self.now = bytes;
        self.most = self.most.max(bytes);
    }

    /// Whether memory is to be given back. Two conditions must hold:
    ///
    /// - The indexes have less than half of their largest size, and are at least [`SHRUNK_BYTES_MIN`] smaller than it.
    /// - The indexes have not shrunk since the last call.
    pub(super) fn is_due(&mut self) -> bool {
        let is_shrinking = self.now < self.asked;
        self.asked = self.now;
        let is_due = !is_shrinking && self.now < self.most / 2 && self.most - self.now >= SHRUNK_BYTES_MIN;
        if is_due {
            self.most = self.now;
        }
        is_due
    }
}

/// Gives all memory that the allocator keeps for later back to the operating system. Takes about 50 µs for each
/// megabyte. During this time, threads that allocate may have to wait.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(super) fn give_to_system() {
    #[allow(unsafe_code, reason = "the allocator has no other way to be told")]
    // SAFETY: the call takes no pointer, and may be made at any time, by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Does nothing, because other allocators give memory back by themselves, or never.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(super) fn give_to_system() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_once_where_much_has_gone() {
        const MB: u64 = 1 << 20;
        let mut watch = ShrinkWatch::default();
        let looks = [
            (100, false),
            (60, false),
            (60, false),
            (45, false),
            (20, false),
            // The size stays the same.
            (20, true),
            (20, false),
            (0, false),
            (0, false),
            (70, false),
            (30, false),
            (31, true),
        ];
        for (number, (megabytes, is_due)) in looks.into_iter().enumerate() {
            watch.note(megabytes * MB);
            assert_eq!(watch.is_due(), is_due, "look {number}");
        }
        // `is_due` is not called while the index is larger.
        watch.note(200 * MB);
        watch.note(31 * MB);
        assert!(watch.is_due() && !watch.is_due());
    }
}
