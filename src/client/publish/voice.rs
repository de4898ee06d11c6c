//! Voices let several publishers of one holder take turns. The publisher that has the lease speaks, that is, publishes.
//!
//! A publisher with a [`Voice`] is silent until its turn. Then it begins an epoch above all epochs that are known, and
//! skips the epoch's first number. So daemons see a gap before the batches that follow, and ask for the full state. A
//! silent publisher sends nothing and answers nobody.
//!
//! The lease normally keeps two publishers from speaking at the same time. If two speak nevertheless, daemons drop the
//! batches and answers of the lower epoch, so queries are still answered right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Term of a lease: the time until which the lease holds, even if the task that renews it hangs or ends. Clones share the term.
#[derive(Debug, Clone)]
pub struct Term {
    begun: Instant,
    until_us: Arc<AtomicU64>,
}

impl Default for Term {
    /// Makes a term that has already ended.
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            until_us: Arc::default(),
        }
    }
}

impl Term {
    /// Lets the lease hold until `until`. Has no effect if the lease already holds longer.
    pub fn extend(&self, until: Instant) {
        let until_us = self.us_at(until);
        self.until_us.fetch_max(until_us, Ordering::AcqRel);
    }

    /// Ends the lease now.
    pub fn end(&self) {
        self.until_us.store(0, Ordering::Release);
    }

    /// Whether the lease still holds at `now`.
    pub fn holds_at(&self, now: Instant) -> bool {
        self.us_at(now) < self.until_us.load(Ordering::Acquire)
    }

    fn us_at(&self, time: Instant) -> u64 {
        let since = time.saturating_duration_since(self.begun);
        // A term that was never extended is over from the start.
        u64::try_from(since.saturating_add(Duration::from_micros(1)).as_micros()).unwrap_or(u64::MAX)
    }
}

/// Tells one publisher when it may publish. Of several publishers of one holder, only the publisher that has the lease
/// may publish.
#[derive(Debug, Clone)]
pub struct Voice {
    /// Number that the publisher's epochs must exceed during its turn. `None` while it is not the publisher's turn to
    /// publish.
    pub turn: watch::Receiver<Option<u64>>,
    /// Term of the lease. After its end, the publisher must not publish.
    pub term: Term,
    /// The publisher's epoch. The publisher stores it here, so that publishers in later turns can choose higher epochs.
    pub epoch: Arc<AtomicU64>,
}

impl Voice {
    /// Returns the number that the publisher's epochs must exceed in the current turn. `None` if it is not the
    /// publisher's turn, or if the lease has ended.
    pub(super) fn turn(&self) -> Option<u64> {
        let turn = *self.turn.borrow();
        turn.filter(|_| self.term.holds_at(Instant::now()))
    }

    /// Waits until the publisher's turn begins or ends. Waits for ever if the sender of the turns has been dropped.
    pub(super) async fn changed(&mut self) {
        if self.turn.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_ends_with_its_term() {
        let (sender, turn) = watch::channel(Some(7));
        let voice = Voice {
            turn,
            term: Term::default(),
            epoch: Arc::default(),
        };
        assert_eq!(voice.turn(), None, "a term that was never extended");
        let later = Instant::now() + Duration::from_secs(60);
        voice.term.extend(later);
        voice.term.extend(Instant::now());
        assert_eq!(voice.turn(), Some(7));
        assert!(!voice.term.holds_at(later));
        sender.send_replace(None);
        assert_eq!(voice.turn(), None);
        sender.send_replace(Some(8));
        voice.term.end();
        assert_eq!(voice.turn(), None);
    }
}
