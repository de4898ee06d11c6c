//! From a message to its worker's lane.

use std::sync::Arc;

use async_nats::Message;

use crate::tracking::StreamGeneration;
use crate::wire::Subjects;

use super::pool::{LanePool, PoolError};

/// Brings messages on events subjects to the lanes, however they were received.
#[derive(Clone)]
pub struct Dispatcher {
    subjects: Subjects,
    name_bytes_max: usize,
    pool: Arc<LanePool>,
}

impl Dispatcher {
    /// A dispatcher to `pool`. Names longer than `name_bytes_max` are no names.
    pub fn new(subjects: Subjects, name_bytes_max: usize, pool: Arc<LanePool>) -> Self {
        Self {
            subjects,
            name_bytes_max,
            pool,
        }
    }

    /// All events subjects.
    pub(super) fn all_events(&self) -> String {
        self.subjects.all_events()
    }

    /// Brings a message that was received in `generation` to its lane; waits while the lane's queue is full.
    pub(super) async fn dispatch(&self, message: Message, generation: StreamGeneration) {
        match self.subjects.parse_events(&message.subject, self.name_bytes_max) {
            Err(error) => self.pool.drop_bad_subject(&message.subject, &error),
            Ok((namespace, worker)) => {
                let dispatched = self
                    .pool
                    .dispatch(&namespace, worker, message.payload, generation)
                    .await;
                if let Err(PoolError::LaneStopped) = dispatched {
                    tracing::error!("a lane has stopped; its workers' events are lost");
                }
            }
        }
    }

    /// Waits until all that was dispatched before has been applied.
    pub(super) async fn drain(&self) -> Result<(), PoolError> {
        self.pool.drain().await
    }
}
