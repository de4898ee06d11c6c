//! Full state that a caller lends to a publisher, because the caller keeps all of a holder's blocks anyway.

use std::sync::Arc;

use kvatlas_core::wire::{Event, Tier};
use tokio::sync::Mutex;

/// A source of all blocks of a holder, in place of the publisher's own table.
pub trait FullState: Send {
    /// Returns all blocks that the holder has after all events so far, as stored events. Parents come before children.
    fn full_state(&mut self) -> Vec<(Tier, Event)>;
}

/// A [`FullState`] that its keeper (the caller that maintains it) shares with a publisher.
///
/// The keeper changes the state only while it holds the lock. It releases the lock only after
/// [`publish`](super::HolderPublisher::publish) has taken the events of all its changes. So when a publisher holds the
/// lock, the state includes exactly the events that [`publish`](super::HolderPublisher::publish) has taken. A publisher
/// that waits for the lock still takes events, so that the keeper is not blocked.
pub type SharedState = Arc<Mutex<dyn FullState>>;
