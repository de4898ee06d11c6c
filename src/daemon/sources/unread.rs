//! Record of unread messages in the events stream, with the times since which the daemon has known of them.

use std::collections::VecDeque;

/// Maximum number of *sightings* that are remembered. A sighting is the number of the stream's last message at a time
/// when messages were unread.
const SIGHTINGS_MAX: usize = 64;
/// Minimum time between two sightings, in microseconds.
const SIGHTING_INTERVAL_US: u64 = 10_000;

/// Sightings of unread messages in the stream. A sighting is the number of the stream's last message at one time.
#[derive(Debug, Default)]
pub(super) struct Unread {
    /// Sightings in the order of time. Each is the number of the stream's last message, and the time in microseconds at
    /// which the server reported it.
    sightings: VecDeque<(u64, u64)>,
}

impl Unread {
    /// Returns the number of the last message that the stream is known to have. `None` if no sighting is remembered.
    pub(super) fn last(&self) -> Option<u64> {
        self.sightings.back().map(|(last, _)| *last)
    }

    /// Notes that message `sequence` was read at `now_us`, with `waiting` messages after it. Returns the time since
    /// which the next unread message has been known, in microseconds, or 0 if there is none.
    pub(super) fn note(&mut self, sequence: u64, waiting: u64, now_us: u64) -> u64 {
        self.note_end(sequence, sequence + waiting, now_us)
    }

    /// Notes the same as [`Self::note`], but is given the number `last` of the stream's last message.
    pub(super) fn note_end(&mut self, sequence: u64, last: u64, now_us: u64) -> u64 {
        while self.sightings.front().is_some_and(|(last, _)| *last <= sequence) {
            self.sightings.pop_front();
        }
        let is_due = self
            .sightings
            .back()
            .is_none_or(|(_, at)| now_us.saturating_sub(*at) >= SIGHTING_INTERVAL_US);
        if last > sequence && is_due && self.sightings.len() < SIGHTINGS_MAX {
            self.sightings.push_back((last, now_us));
        }
        self.sightings.front().map_or(0, |(_, at)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_message_is_known_since_the_end_behind_it_was_seen() {
        let mut unread = Unread::default();
        assert_eq!(unread.note(1, 0, 100), 0);
        assert_eq!(unread.note(2, 8, 200), 200);
        // The consumer has delivered all that it counts, and the stream has more.
        let mut paused = Unread::default();
        assert_eq!(paused.note(7, 0, 100), 0);
        assert_eq!(paused.note_end(7, 7, 200), 0);
        assert_eq!(paused.note_end(7, 9, 300), 300);
        assert_eq!((paused.last(), paused.note(9, 0, 400)), (Some(9), 0));
        let later = 200 + SIGHTING_INTERVAL_US;
        assert_eq!(unread.note(3, 20, later), 200);
        // Message 10 was the last one seen at first.
        assert_eq!(unread.note(9, 14, later + 1), 200);
        assert_eq!(unread.note(10, 13, later + 2), later);
        assert_eq!(unread.note(23, 0, later + 3), 0);
    }
}
