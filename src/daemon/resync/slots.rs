//! Slots: the bound on the number of publishers that answer at the same time.
//!
//! A slot stands for the memory that an answer takes. A silent publisher takes no memory. After 250 ms of silence,
//! the publisher's slot goes to another publisher. If an answer begins later, the attempt waits for a slot again. So
//! publishers that never answer do not delay the others.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Time for which a publisher may be silent before its slot (permission for one publisher to answer) goes to another
/// publisher.
const SILENCE_MAX: Duration = Duration::from_millis(250);
/// Maximum number of silent publishers for which attempts wait without a slot, for each slot that the daemon has. A
/// slot is the permission for one publisher to answer.
const SILENT_PER_SLOT: usize = 256;

/// All slots of a daemon. A slot lets one publisher answer.
#[derive(Debug, Clone)]
pub(super) struct ResyncSlots {
    answering: Arc<Semaphore>,
    silent: Arc<Semaphore>,
    count: usize,
}

/// Slot of one attempt to resync. A slot is the permission for one publisher to answer. While the publisher is
/// silent, the attempt can give up the slot, and keep only a permission to wait.
#[derive(Debug)]
pub(super) struct ResyncSlot {
    slots: ResyncSlots,
    answering: Option<OwnedSemaphorePermit>,
    silent: Option<OwnedSemaphorePermit>,
}

impl ResyncSlots {
    pub(super) fn new(count: usize) -> Self {
        Self {
            answering: Arc::new(Semaphore::new(count)),
            silent: Arc::new(Semaphore::new(count.saturating_mul(SILENT_PER_SLOT))),
            count,
        }
    }

    /// Returns a slot, if one is free.
    pub(super) fn take(&self) -> Option<ResyncSlot> {
        let permit = Arc::clone(&self.answering).try_acquire_owned().ok()?;
        Some(ResyncSlot {
            slots: self.clone(),
            answering: Some(permit),
            silent: None,
        })
    }

    /// Returns the number of slots in use.
    pub(super) fn taken(&self) -> usize {
        self.count.saturating_sub(self.answering.available_permits())
    }
}

impl ResyncSlot {
    /// Waits for the first message of a publisher's answer. If the message does not come in time, the attempt may
    /// give up its slot to another attempt. Once the message has come, the attempt waits for a slot again, and then
    /// returns.
    pub(super) async fn wait_for<T>(&mut self, first: impl Future<Output = T>) -> T {
        let mut first = pin!(first);
        if let Ok(came) = tokio::time::timeout(SILENCE_MAX, &mut first).await {
            return came;
        }
        if let Ok(permit) = Arc::clone(&self.slots.silent).try_acquire_owned() {
            self.silent = Some(permit);
            self.answering = None;
        }
        let came = first.await;
        if self.answering.is_none() {
            // The semaphore is never closed.
            self.answering = Arc::clone(&self.slots.answering).acquire_owned().await.ok();
            self.silent = None;
        }
        came
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn whoever_is_silent_gives_its_slot_up_until_it_speaks() {
        let slots = ResyncSlots::new(1);
        let mut slot = slots.take().unwrap();
        assert!(slots.take().is_none());
        let (speak, spoken) = tokio::sync::oneshot::channel();
        let mut waiting = tokio::spawn(async move {
            let said = slot.wait_for(spoken).await;
            (said, slot)
        });
        let other = loop {
            if let Some(other) = slots.take() {
                break other;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        speak.send(7).unwrap();
        let early = tokio::time::timeout(Duration::from_millis(20), &mut waiting).await;
        assert!(early.is_err(), "it waits for a slot");
        drop(other);
        let (said, slot) = waiting.await.unwrap();
        assert_eq!((said, slots.taken()), (Ok(7), 1));
        drop(slot);
        assert_eq!(slots.taken(), 0);
    }
}
