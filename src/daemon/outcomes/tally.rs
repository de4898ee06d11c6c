//! Sums of outcomes over the last one to two minutes.

use std::time::{Duration, Instant};

use serde::Serialize;

use kvatlas_telemetry::CountedOutcome;

/// Length of one span of counting. Sums cover the last one to two spans.
const SPAN: Duration = Duration::from_secs(60);

/// Sums over requests: the blocks that exact answers promised, and the blocks that the requests found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct PromiseTally {
    /// Number of requests for which an outcome was reported.
    pub(crate) requests: u64,
    /// Number of blocks that answers had promised to the counted requests.
    pub(crate) promised_blocks: u64,
    /// Number of promised blocks that the requests did not find.
    pub(crate) missing_blocks: u64,
    /// Number of blocks that the requests found beyond the promised ones.
    pub(crate) unpromised_blocks: u64,
}

/// Minimum number of promised blocks for a judgement on a holder. A smaller number says little, because a block or two
/// may always be evicted between an answer and its request.
const TOLD_BLOCKS_MIN: u64 = 100;
/// Share of the promised blocks that may be missing, as a divisor: 20 stands for one twentieth. If more are missing,
/// the holder breaks its promises.
const BROKEN_SHARE: u64 = 20;

impl PromiseTally {
    /// Whether more than a twentieth of the promised blocks were not found. False if too few blocks were promised.
    pub(super) fn is_broken(self) -> bool {
        self.promised_blocks >= TOLD_BLOCKS_MIN
            && self.missing_blocks.saturating_mul(BROKEN_SHARE) > self.promised_blocks
    }

    /// Returns the share of the promised blocks that were not found, in millionths.
    pub(super) fn missing_millionths(self) -> u64 {
        self.missing_blocks.saturating_mul(1_000_000) / self.promised_blocks.max(1)
    }

    fn add(&mut self, outcome: CountedOutcome) {
        self.requests += 1;
        self.promised_blocks = self.promised_blocks.saturating_add(outcome.promised_blocks);
        self.missing_blocks = self.missing_blocks.saturating_add(outcome.missing_blocks);
        self.unpromised_blocks = self.unpromised_blocks.saturating_add(outcome.unpromised_blocks);
    }

    fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            promised_blocks: self.promised_blocks.saturating_add(other.promised_blocks),
            missing_blocks: self.missing_blocks.saturating_add(other.missing_blocks),
            unpromised_blocks: self.unpromised_blocks.saturating_add(other.unpromised_blocks),
        }
    }
}

/// Sums of outcomes over the last one to two minutes. The present minute and the minute before it have a sum each.
#[derive(Debug)]
pub(super) struct Window {
    begun_at: Instant,
    current: PromiseTally,
    before: PromiseTally,
}

impl Window {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            begun_at: now,
            current: PromiseTally::default(),
            before: PromiseTally::default(),
        }
    }

    pub(super) fn add(&mut self, outcome: CountedOutcome, now: Instant) {
        self.move_to(now);
        self.current.add(outcome);
    }

    /// Returns the sums over both spans of the window.
    pub(super) fn sum(&mut self, now: Instant) -> PromiseTally {
        self.move_to(now);
        self.current.plus(self.before)
    }

    fn move_to(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.begun_at);
        if age < SPAN {
            return;
        }
        self.before = match age < SPAN * 2 {
            true => self.current,
            false => PromiseTally::default(),
        };
        self.current = PromiseTally::default();
        self.begun_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_forgets_what_is_older_than_two_spans() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let outcome = CountedOutcome {
            promised_blocks: 10,
            missing_blocks: 2,
            unpromised_blocks: 0,
            is_exact: true,
        };
        let mut window = Window::new(begun);
        window.add(outcome, after(0));
        window.add(outcome, after(59));
        assert_eq!(window.sum(after(59)).promised_blocks, 20);
        window.add(outcome, after(61));
        let sum = window.sum(after(119));
        assert_eq!(
            (sum.requests, sum.promised_blocks, sum.missing_blocks),
            (3, 30, 6)
        );
        assert_eq!(window.sum(after(122)).requests, 1);
        assert_eq!(window.sum(after(300)), PromiseTally::default());
    }
}
