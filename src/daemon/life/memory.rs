//! Giving memory back to the system after much of the index has gone.
//!
//! The index gives what it no longer needs back to the allocator, which keeps it for later. Who looks at the process from outside would
//! find as much as there ever was.

/// By how much the index must have shrunk.
const SHRUNK_BYTES_MIN: u64 = 32 << 20;

/// Watches the size of all indexes together.
#[derive(Debug, Default)]
pub(super) struct ShrinkWatch {
    now: u64,
    /// The largest since memory was last given back.
    most: u64,
    /// The size when somebody last asked.
    asked: u64,
}

impl ShrinkWatch {
    /// Notes how many bytes they take.
    pub(super) fn note(&mut self, bytes: u64) {
        self.now = bytes;
        self.most = self.most.max(bytes);
    }

    /// Whether memory is to be given back: they have lost more than half, and none since somebody last asked.
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

/// Gives all memory back to the system that the allocator keeps for later: some 50 µs a megabyte, in which whoever allocates may wait.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(super) fn give_to_system() {
    #[allow(unsafe_code, reason = "the allocator has no other way to be told")]
    // SAFETY: the call takes no pointer, and may be made at any time, by any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Other allocators do it by themselves, or never.
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
            // It stays there.
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
        // Nobody asks while there is more.
        watch.note(200 * MB);
        watch.note(31 * MB);
        assert!(watch.is_due() && !watch.is_due());
    }
}
