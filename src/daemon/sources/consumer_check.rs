//! Checks that a stream still has the messages that were read from it. There are two reasons why it may not have
//! them. It may be another stream of the same name. Or its store may have been rolled back to an older copy, to which
//! new messages have been added.

use kvatlas_core::snapshot::StreamCursor;

use super::stream::StreamSpan;

/// Check with which a consumer begins: message `sequence` must have the same content as when it was read before.
pub(super) struct ConsumerCheck {
    /// Number of the last message that was read.
    pub(super) sequence: u64,
    /// Digest by which the message is recognized.
    pub(super) digest: u64,
    /// Position before the first message of the stream.
    pub(super) beginning: StreamCursor,
}

impl ConsumerCheck {
    /// Returns the check to make before the stream is read from `cursor` on. Returns `None` if the message at the
    /// cursor is not known, or is no longer there.
    pub(super) fn of(cursor: &StreamCursor, first: u64, beginning: StreamCursor) -> Option<Self> {
        let digest = cursor.digest.filter(|_| cursor.sequence >= first)?;
        Some(Self {
            sequence: cursor.sequence,
            digest,
            beginning,
        })
    }
}

/// Whether the position `last` belongs to the stream that begins at `beginning`. The stream must be the same, and
/// must have reached that position.
pub(super) fn is_continued(last: &StreamCursor, beginning: &StreamCursor, span: StreamSpan) -> bool {
    let is_same = last.stream == beginning.stream && last.created_us == beginning.created_us;
    is_same && last.sequence <= span.last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(created_us: u64, sequence: u64) -> StreamCursor {
        StreamCursor {
            stream: "EVENTS".to_owned(),
            created_us,
            sequence,
            digest: None,
            intake: None,
            has_all: true,
            server: None,
        }
    }

    #[test]
    fn a_message_that_is_known_and_there_is_compared() {
        let known = StreamCursor {
            digest: Some(77),
            ..cursor(7, 5)
        };
        assert!(ConsumerCheck::of(&known, 5, cursor(7, 4)).is_some_and(|check| check.digest == 77));
        assert!(ConsumerCheck::of(&known, 6, cursor(7, 5)).is_none());
        assert!(ConsumerCheck::of(&cursor(7, 5), 5, cursor(7, 4)).is_none());
    }

    #[test]
    fn a_position_counts_only_in_the_stream_it_was_taken_in() {
        let span = StreamSpan { first: 5, last: 9 };
        let beginning = cursor(7, 4);
        assert!(is_continued(&cursor(7, 9), &beginning, span));
        assert!(is_continued(&cursor(7, 0), &beginning, span));
        // The position is after the stream's end. So the stream has lost messages that were read, and reuses their
        // numbers.
        assert!(!is_continued(&cursor(7, 10), &beginning, span));
        assert!(!is_continued(&cursor(8, 9), &beginning, span));
    }
}
