//! Several publishers of one holder, of which one at a time speaks: whoever has the lease.
//!
//! A publisher with a [`Voice`] is silent until its turn. Then it begins an epoch above all that were heard of, whose first number it skips: daemons see
//! that there is more than what follows, and ask for the full state. A silent publisher sends nothing and answers nobody.
//!
//! The lease keeps two from speaking at once most of the time. What keeps answers right is the epoch: batches and answers of a lower one are dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Until when a lease holds, whatever happens to the task that renews it. Clones share it.
#[derive(Debug, Clone)]
pub struct Term {
    begun: Instant,
    until_us: Arc<AtomicU64>,
}

impl Default for Term {
    /// One that is over.
    fn default() -> Self {
        Self {
            begun: Instant::now(),
            until_us: Arc::default(),
        }
    }
}

impl Term {
    /// Has it last until `until`, if that is later than before.
    pub fn extend(&self, until: Instant) {
        let until_us = self.us_at(until);
        self.until_us.fetch_max(until_us, Ordering::AcqRel);
    }

    /// Ends it now.
    pub fn end(&self) {
        self.until_us.store(0, Ordering::Release);
    }

    /// Whether it is not over at `now`.
    pub fn holds_at(&self, now: Instant) -> bool {
        self.us_at(now) < self.until_us.load(Ordering::Acquire)
    }

    fn us_at(&self, time: Instant) -> u64 {
        let since = time.saturating_duration_since(self.begun);
        // A term that was never extended is over from the start.
        u64::try_from(since.saturating_add(Duration::from_micros(1)).as_micros()).unwrap_or(u64::MAX)
    }
}

/// A publisher's part of a lease.
#[derive(Debug, Clone)]
pub struct Voice {
    /// The number above which its epochs are; none while it is not its turn.
    pub turn: watch::Receiver<Option<u64>>,
    /// For how long a turn holds at most.
    pub term: Term,
    /// The publisher notes its epoch here, for those that speak after it.
    pub epoch: Arc<AtomicU64>,
}

impl Voice {
    /// The turn that it has now.
    pub(super) fn turn(&self) -> Option<u64> {
        let turn = *self.turn.borrow();
        turn.filter(|_| self.term.holds_at(Instant::now()))
    }

    /// Waits until the turn has changed; for ever where nobody decides any more.
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
