//! The full state from elsewhere: for who keeps all that a holder has anyway.

use std::sync::Arc;

use kvatlas_core::wire::{Event, Tier};
use tokio::sync::Mutex;

/// Knows all that a holder has, in place of the publisher's own table.
pub trait FullState: Send {
    /// The sum of all events so far, as stored events: parents before children.
    fn full_state(&mut self) -> Vec<(Tier, Event)>;
}

/// A [`FullState`] that its keeper shares with a publisher.
///
/// The keeper changes it only while it holds the lock. It lets the lock go when [`publish`](super::HolderPublisher::publish) has taken the
/// events of all changes. So whoever gets the lock finds a state that those events add up to. The publisher takes further events while it
/// waits for the lock.
pub type SharedState = Arc<Mutex<dyn FullState>>;
