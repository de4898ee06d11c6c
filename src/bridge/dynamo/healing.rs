//! Open questions to workers of an event plane. The bridge waits for the answers and for the plane's messages at the
//! same time.

use std::sync::Arc;

use async_nats::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;

use kvatlas_client::publish::PublisherError;

use super::super::follower::FollowOptions;
use super::super::stalls::StallWatch;
use super::PlaneEvents;
use super::answers::{AnswerError, Caught, catch_up};
use super::courses::WorkerQuestion;
use super::questions::Asker;
use super::records::Records;

/// Maximum number of questions that are open at the same time.
const OPEN_MAX: usize = 16;

/// News for an event plane's task that does not come as a message of the plane: changed records, or an answer of a
/// worker.
pub(in super::super) enum News {
    /// Discovery's records have changed.
    Records(Arc<Records>),
    /// A question has been answered, or has failed.
    Answered(Box<Answered>),
}

/// A question, and its answer.
pub(in super::super) struct Answered {
    asked: WorkerQuestion,
    answer: Result<Caught, AnswerError>,
}

/// Questions to the workers of one event plane that are not answered yet. The value belongs to one connection to the
/// plane. Dropping it gives up the questions.
pub(in super::super) struct Healing {
    /// Records of discovery; `None` if no discovery is given, so that no worker can be asked.
    records: Option<watch::Receiver<Arc<Records>>>,
    asker: Asker,
    open: JoinSet<Box<Answered>>,
}

impl Healing {
    /// Makes a value without open questions. `nats` is the connection over which workers on NATS are asked.
    pub(in super::super) fn new(
        mut records: Option<watch::Receiver<Arc<Records>>>,
        nats: Client,
        options: &FollowOptions,
    ) -> Self {
        if let Some(records) = &mut records {
            // A new connection has to apply the records that are already known, too.
            records.mark_changed();
        }
        Self {
            records,
            asker: Asker::new(nats, options.patience, options.answer_ports.clone()),
            open: JoinSet::new(),
        }
    }

    /// Waits for changed records of discovery, or for a worker's answer. Nothing is lost if the wait is dropped.
    pub(in super::super) async fn news(&mut self) -> News {
        let changed = async {
            if let Some(records) = &mut self.records
                && records.changed().await.is_ok()
            {
                return Arc::clone(&records.borrow_and_update());
            }
            // The task that reads the records has ended, because the bridge stops.
            std::future::pending().await
        };
        tokio::select! {
            records = changed => News::Records(records),
            Some(Ok(answered)) = self.open.join_next() => News::Answered(answered),
        }
    }

    /// Applies `news` to the event plane: changed records, or a worker's answer.
    pub(in super::super) async fn take(
        &self,
        news: News,
        events: &mut PlaneEvents,
        stalls: &StallWatch,
    ) -> Result<(), PublisherError> {
        match news {
            News::Records(records) => events.take_records(records).await,
            News::Answered(answered) => {
                let Answered { asked, answer } = *answered;
                events.answered(asked, answer, |look| stalls.is_news(look)).await
            }
        }
    }

    /// Asks workers for their events, if it is time to ask them and fewer than [`OPEN_MAX`] questions are open.
    pub(in super::super) fn ask(&mut self, events: &mut PlaneEvents, stalls: &StallWatch) {
        while self.open.len() < OPEN_MAX
            && let Some(asked) = events.question(stalls.look())
        {
            let asker = self.asker.clone();
            self.open.spawn(async move {
                let answer = catch_up(&asker, &asked.record, asked.start).await;
                Box::new(Answered { asked, answer })
            });
        }
    }
}
