//! Memory for requests that wait.

use std::sync::Arc;

use async_nats::Message;
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use kvatlas_core::wire::{ErrorCode, WireError};

/// Size in bytes above which a request is *large*. For a query, its own length counts; for a status request, the
/// length of its reply. A daemon answers large requests one after the other, and small requests do not wait for them.
pub(super) const LARGE_BYTES: usize = 32 << 10;
/// Maximum length of a waiting request that is copied, in bytes. A request that is not copied keeps in memory
/// everything that the client library read together with it.
const COPIED_BYTES_MAX: usize = 256 << 10;
/// Number of bytes that one permit of the memory for large requests stands for. A permit cannot be a single byte,
/// because a semaphore counts permits in 32 bits.
const BYTES_PER_UNIT: usize = 1024;

/// Memory for requests that wait on one connection. Clones share the same memory.
#[derive(Clone)]
pub(super) struct RequestRoom {
    units: Arc<Semaphore>,
    bytes_max: usize,
}

impl RequestRoom {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self {
            units: Arc::new(Semaphore::new((bytes_max / BYTES_PER_UNIT).max(1))),
            bytes_max,
        }
    }

    /// Reserves memory for a request of `bytes` that waits. Fails if too many bytes wait already.
    pub(super) fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, WireError> {
        // A request that is larger than the room gets all of it when no other request waits.
        let units = bytes.min(self.bytes_max).div_ceil(BYTES_PER_UNIT);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        Arc::clone(&self.units).try_acquire_many_owned(units).map_err(|_| {
            let text = format!(
                "large requests of {} bytes wait on this connection already (queries.max_waiting_bytes); ask again later, \
                 or for less at once",
                self.bytes_max
            );
            WireError::new(ErrorCode::TooManyRequests, text)
        })
    }

    /// Reserves memory for a request of `bytes` that waits, if it is large. Fails as [`Self::take`] does.
    pub(super) fn take_if_large(&self, bytes: usize) -> Result<Option<OwnedSemaphorePermit>, WireError> {
        (bytes > LARGE_BYTES).then(|| self.take(bytes)).transpose()
    }
}

/// Copies the payload of a request that waits, unless it is very long. So the request does not keep in memory what the
/// client library has read together with it.
pub(super) fn keep_alone(message: &mut Message) {
    if message.payload.len() <= COPIED_BYTES_MAX {
        message.payload = Bytes::copy_from_slice(&message.payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_requests_are_refused_where_too_many_wait() {
        let large = RequestRoom::new(256 << 10);
        let first = large.take(100 << 10).unwrap();
        let second = large.take(100 << 10).unwrap();
        let refused = large.take(100 << 10).unwrap_err();
        assert_eq!(refused.code, ErrorCode::TooManyRequests);
        assert!(refused.text.contains("queries.max_waiting_bytes"), "{refused}");
        drop(first);
        let third = large.take(100 << 10).unwrap();
        drop((second, third));
        // A request that is larger than the whole room is answered alone.
        let alone = large.take(1 << 20).unwrap();
        assert!(large.take(1 << 10).is_err());
        drop(alone);
    }
}
