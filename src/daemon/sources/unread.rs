//! Record of the unread messages in the events stream. It tells how long the oldest of them may have waited.

use std::collections::VecDeque;

use super::stream_end::StreamLook;

/// Maximum number of remembered *sightings*. A sighting is a moment at which the daemon learned that the stream has
/// more unread messages than it knew before. It has the number of the stream's last message.
const SIGHTINGS_MAX: usize = 64;
/// Minimum time between two sightings, in microseconds. If the daemon learns of further messages earlier, they are
/// added to the last sighting.
const SIGHTING_INTERVAL_US: u64 = 10_000;

/// Unread messages of the stream, as a list of sightings (see [`SIGHTINGS_MAX`]).
#[derive(Debug)]
pub(super) struct Unread {
    /// Sightings, the oldest first. Each is a pair: the number of the stream's last message, and a time in
    /// microseconds. The messages that this sighting added came to the stream at that time or later.
    sightings: VecDeque<(u64, u64)>,
    /// Time in microseconds at which the daemon last knew the whole stream: it had read every message, or had noted
    /// it in a sighting.
    known_us: u64,
}

impl Unread {
    /// Makes the record of a stream without unread messages. The daemon knew the whole stream at `known_us`.
    pub(super) fn since(known_us: u64) -> Self {
        Self {
            sightings: VecDeque::new(),
            known_us,
        }
    }

    /// Returns the number of the last unread message that is known. `None` if no unread message is known.
    pub(super) fn last(&self) -> Option<u64> {
        self.sightings.back().map(|(last, _)| *last)
    }

    /// Returns the time in microseconds at which the daemon last knew every message of the stream, read or unread.
    pub(super) fn known_us(&self) -> u64 {
        self.known_us
    }

    /// Notes that message `sequence` was read at `now_us`, and that `waiting` more messages follow it in the stream.
    /// Returns the earliest time at which the oldest unread message can have come, in microseconds. 0 if there is
    /// none.
    pub(super) fn note(&mut self, sequence: u64, waiting: u64, now_us: u64) -> u64 {
        self.see(sequence, sequence + waiting, now_us, now_us)
    }

    /// Notes a report of the server about the end of the stream. `sequence` is the number of the last read message.
    /// Returns the same as [`Self::note`].
    ///
    /// A message of which the daemon has not known may have come just after the daemon last knew the whole stream. So
    /// its waiting time is counted from then.
    pub(super) fn note_end(&mut self, sequence: u64, look: StreamLook) -> u64 {
        let since_us = self.known_us.min(look.asked_us);
        self.see(sequence, look.last, since_us, look.asked_us)
    }

    /// Notes two facts: message `sequence` has been read, and `last` was the stream's last message at `at_us`. If
    /// message `last` was not known before, it came at `since_us` or later. Returns the same as [`Self::note`].
    fn see(&mut self, sequence: u64, last: u64, since_us: u64, at_us: u64) -> u64 {
        while self.sightings.front().is_some_and(|(last, _)| *last <= sequence) {
            self.sightings.pop_front();
        }
        let is_new = last > sequence.max(self.last().unwrap_or_default());
        let has_room = self.sightings.len() < SIGHTINGS_MAX;
        match self.sightings.back_mut() {
            _ if !is_new => {}
            // The last sighting is recent enough to count as the same time.
            Some((back, at)) if since_us.saturating_sub(*at) < SIGHTING_INTERVAL_US => *back = last,
            _ if has_room => self.sightings.push_back((last, since_us)),
            // The message is later than all sightings, of which only the oldest counts.
            _ => return self.oldest_us(),
        }
        self.known_us = self.known_us.max(at_us);
        self.oldest_us()
    }

    fn oldest_us(&self) -> u64 {
        self.sightings.front().map_or(0, |(_, at)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_message_is_known_since_the_end_behind_it_was_seen() {
        let mut unread = Unread::since(50);
        assert_eq!(unread.note(1, 0, 100), 0);
        assert_eq!(unread.note(2, 8, 200), 200);
        let later = 200 + SIGHTING_INTERVAL_US;
        assert_eq!(unread.note(3, 20, later), 200);
        // At the first sighting, message 10 was the last one.
        assert_eq!(unread.note(9, 14, later + 1), 200);
        assert_eq!(unread.note(10, 13, later + 2), later);
        assert_eq!(unread.note(23, 0, later + 3), 0);
    }

    #[test]
    fn a_message_that_a_look_finds_waits_since_the_look_before() {
        let look = |last, asked_us| StreamLook { last, asked_us };
        // The consumer has delivered all messages that it counts, but the stream has more.
        let mut paused = Unread::since(50);
        assert_eq!((paused.note_end(0, look(3, 60)), paused.known_us()), (50, 60));
        assert_eq!((paused.note(7, 0, 100), paused.known_us()), (0, 100));
        assert_eq!((paused.note_end(7, look(7, 200)), paused.known_us()), (0, 200));
        assert_eq!(
            (paused.note_end(7, look(9, 300_000)), paused.known_us()),
            (200, 300_000)
        );
        // More messages have come since then, but the oldest unread one counts.
        assert_eq!(paused.note_end(7, look(11, 400_000)), 200);
        assert_eq!((paused.last(), paused.note(9, 2, 500_000)), (Some(11), 300_000));
        assert_eq!(paused.note(11, 0, 600_000), 0);
        // The answer to a question from before the last message says nothing of later messages.
        assert_eq!(
            (paused.note_end(11, look(12, 550_000)), paused.known_us()),
            (550_000, 600_000)
        );
    }

    #[test]
    fn a_message_that_is_not_remembered_is_not_known() {
        let mut unread = Unread::since(0);
        let sightings = SIGHTINGS_MAX as u64;
        for number in 1..=sightings {
            assert_eq!(
                unread.note(0, number, number * SIGHTING_INTERVAL_US),
                SIGHTING_INTERVAL_US
            );
        }
        let known_us = unread.known_us();
        assert_eq!(known_us, sightings * SIGHTING_INTERVAL_US);
        let look = StreamLook {
            last: sightings + 1,
            asked_us: known_us + 5 * SIGHTING_INTERVAL_US,
        };
        // There is no room for a later sighting. A message that was seen at the last sighting's time is merged into it.
        assert_eq!(unread.note(0, sightings + 1, look.asked_us), SIGHTING_INTERVAL_US);
        assert_eq!((unread.known_us(), unread.last()), (known_us, Some(sightings)));
        assert_eq!(unread.note_end(0, look), SIGHTING_INTERVAL_US);
        assert_eq!(
            (unread.known_us(), unread.last()),
            (look.asked_us, Some(sightings + 1))
        );
    }
}
