//! Heavy requests, which take long, and the order in which they get their turns.
//!
//! A request of a few hundred bytes can ask for the blocks of thousands of holders, many times over. So the time that a
//! request may take is estimated from its *work*: the number of looks at holders that it costs the index. The length of
//! the request says little:
//!
//! | a request that looks at | is answered |
//! |---|---|
//! | up to [`HEAVY_WORK`] | immediately, on the connection on which it has come |
//! | more | in pieces, after the earlier heavy requests of its namespace. Between two pieces other requests are answered |
//! | so many that the waiting work of its namespace would exceed [`WAITING_WORK_MAX`], while others wait | not at all: error 429 |
//!
//! So the heavy requests of a namespace take one processor at most, and delay other requests by no more than a piece's
//! time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use kvatlas_core::wire::{ErrorCode, NamespaceName, WireError};

/// Maximum work of a request that is answered immediately. Work is the number of looks at holders. This maximum takes
/// some milliseconds.
const HEAVY_WORK: u64 = 16_384;
/// Maximum work of one namespace's requests that may wait. Work is the number of looks at holders. This maximum takes
/// about a second.
const WAITING_WORK_MAX: u64 = 4 << 20;
/// Time after which a piece of a heavy request ends. A query in progress is finished first.
pub(super) const PIECE: Duration = Duration::from_millis(1);

/// Queues of heavy requests (requests that take long), one for each namespace. NATS, HTTP and gRPC share them; the
/// listener of llm-d's routers has none, as it makes its replies in pieces as its clients take them.
#[derive(Debug, Default)]
pub(crate) struct HeavyTurns(Mutex<HashMap<NamespaceName, HeavyQueue>>);

/// Queue of the heavy requests (requests that take long) of one namespace.
#[derive(Debug)]
struct HeavyQueue {
    turn: Arc<Semaphore>,
    /// Work of the requests that wait, and of the request that has its turn, in looks at holders.
    work: u64,
}

/// Heavy request (one that takes long) that waits for its turn or has it. Dropping this value removes its share of the
/// waiting work.
#[derive(Debug)]
pub(crate) struct HeavyRequest {
    turns: Arc<HeavyTurns>,
    namespace: NamespaceName,
    turn: Arc<Semaphore>,
    work: u64,
}

impl HeavyTurns {
    /// Registers a request to wait for its turn, if its `work` makes it heavy. Returns `None` if it is not heavy.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::enter`].
    pub(crate) fn enter_if_heavy(
        self: &Arc<Self>,
        namespace: &NamespaceName,
        work: u64,
    ) -> Result<Option<HeavyRequest>, WireError> {
        match work > HEAVY_WORK {
            true => self.enter(namespace, work).map(Some),
            false => Ok(None),
        }
    }

    /// Registers a request of this `work` to wait for its turn.
    ///
    /// # Errors
    ///
    /// [`ErrorCode::TooManyRequests`] if too much work of this namespace waits. A request that alone exceeds the bound
    /// is taken if no other request waits.
    fn enter(self: &Arc<Self>, namespace: &NamespaceName, work: u64) -> Result<HeavyRequest, WireError> {
        let mut namespaces = self.0.lock();
        let waiting = namespaces.entry(namespace.clone()).or_insert_with(|| HeavyQueue {
            turn: Arc::new(Semaphore::new(1)),
            work: 0,
        });
        if waiting.work > 0 && waiting.work.saturating_add(work) > WAITING_WORK_MAX {
            let text = format!(
                "requests that look at {} holders wait in this namespace already, at most {WAITING_WORK_MAX} may; ask again later, or \
                 for less at once: this one has queries times holders of {work}",
                waiting.work
            );
            return Err(WireError::new(ErrorCode::TooManyRequests, text));
        }
        waiting.work = waiting.work.saturating_add(work);
        Ok(HeavyRequest {
            turns: Arc::clone(self),
            namespace: namespace.clone(),
            turn: Arc::clone(&waiting.turn),
            work,
        })
    }
}

impl HeavyRequest {
    /// Waits for the turn of this request. The turn lasts as long as the returned permit. During the turn, no other
    /// heavy request of the namespace has a turn.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.turn.acquire().await.ok()
    }
}

impl Drop for HeavyRequest {
    fn drop(&mut self) {
        let mut namespaces = self.turns.0.lock();
        if let Some(waiting) = namespaces.get_mut(&self.namespace) {
            waiting.work = waiting.work.saturating_sub(self.work);
            if waiting.work == 0 {
                namespaces.remove(&self.namespace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> NamespaceName {
        NamespaceName::new(text).unwrap()
    }

    #[tokio::test]
    async fn heavy_requests_of_a_namespace_take_turns_and_give_their_room_back() {
        let turns = Arc::new(HeavyTurns::default());
        let first = turns.enter(&name("a"), WAITING_WORK_MAX * 3).unwrap();
        let refused = turns.enter(&name("a"), HEAVY_WORK).unwrap_err();
        assert_eq!(refused.code, ErrorCode::TooManyRequests);
        // Another namespace has turns of its own.
        let other = turns.enter(&name("b"), WAITING_WORK_MAX - 1).unwrap();
        let _turn = other.turn().await;
        let second = turns.enter(&name("b"), 1).unwrap();
        assert!(turns.enter(&name("b"), 1).is_err());
        assert!(second.turn.try_acquire().is_err(), "it waits for the first");
        drop(first);
        assert!(turns.enter(&name("a"), HEAVY_WORK).is_ok());
        drop(_turn);
        drop((other, second));
        assert!(turns.0.lock().is_empty(), "what is not used is forgotten");
    }
}
