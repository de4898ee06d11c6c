//! Numbers of epochs: where a publisher's epoch begins, and which epochs of others it believes.

use kvatlas_core::wire::BatchCursor;

/// Time after its start for which a publisher counts as newly started, in microseconds. It is also the shortest time
/// between two epochs that [`Outbox::rise_above`](super::outbox::Outbox::rise_above) begins.
pub(super) const RISE_US: u64 = 60_000_000;
/// Largest tolerated difference between the clocks of two machines, in microseconds.
pub(super) const SKEW_US: u64 = 5_000_000;
/// Time by which an epoch may lie ahead of the clock, in microseconds: a day. By default, daemons drop batches of
/// epochs further ahead.
const AHEAD_US: u64 = 86_400_000_000;
/// Earliest time that a clock can show, in microseconds: the year 2026. An earlier clock has not been set, so nothing
/// is known to lie ahead of it.
const SET_US: u64 = 1_767_225_600_000_000;

/// Whether the epoch `known` lies so far ahead of the clock that daemons would drop the batches of an epoch above it.
pub(super) fn is_far_ahead(known: u64, unix_us: u64) -> bool {
    unix_us >= SET_US && known > unix_us.saturating_add(AHEAD_US)
}

/// Returns the cursor of batch number 1 in an epoch above `known`, of the number `least` or above. No such batch exists:
/// the first batch gets number 2. A `known` epoch does not count if it [is too far ahead](is_far_ahead) of `least`,
/// which is the present time or later.
pub(super) fn second_above(known: u64, least: u64) -> BatchCursor {
    let epoch = match is_far_ahead(known, least) {
        true => least,
        false => least.max(known.saturating_add(1)),
    };
    BatchCursor { epoch, seq: 1 }
}

/// Returns the cursor before the first batch of `epoch`.
pub(super) fn first_of(epoch: u64) -> BatchCursor {
    BatchCursor { epoch, seq: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_that_daemons_would_drop_is_not_exceeded() {
        let above = |known, unix_us| second_above(known, unix_us).epoch;
        let day_ahead = SET_US + AHEAD_US;
        assert_eq!(above(day_ahead, SET_US), day_ahead + 1);
        assert_eq!(above(day_ahead + 1, SET_US), SET_US);
        assert_eq!(above(u64::MAX, SET_US), SET_US);
        assert_eq!(above(SET_US - 1, SET_US), SET_US);
        // The clock has not been set yet.
        assert_eq!(above(day_ahead, 1), day_ahead + 1);
    }
}
