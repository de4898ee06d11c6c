//! The questions to workers that are open, beside the subscription to their event plane.

use std::sync::Arc;

use async_nats::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;

use kvatlas_client::publish::PublisherError;

use super::super::follower::FollowOptions;
use super::super::stalls::StallWatch;
use super::PlaneEvents;
use super::answers::{AnswerError, Caught, catch_up};
use super::courses::Asked;
use super::questions::Asker;
use super::records::Records;

/// Questions that are open at the same time.
const OPEN_MAX: usize = 16;

/// The news that a plane's subscription does not bring.
pub(in super::super) enum News {
    /// Discovery has changed.
    Records(Arc<Records>),
    /// A question has an answer, or none.
    Answered(Box<Answered>),
}

/// A question, and its answer.
pub(in super::super) struct Answered {
    asked: Asked,
    answer: Result<Caught, AnswerError>,
}

/// The open questions of one connection to a plane. They end with this.
pub(in super::super) struct Healing {
    /// Absent where no discovery is given: nobody can be asked.
    records: Option<watch::Receiver<Arc<Records>>>,
    asker: Asker,
    open: JoinSet<Box<Answered>>,
}

impl Healing {
    /// Workers are asked through `nats`, where their request plane is NATS.
    pub(in super::super) fn new(
        mut records: Option<watch::Receiver<Arc<Records>>>,
        nats: Client,
        options: &FollowOptions,
    ) -> Self {
        if let Some(records) = &mut records {
            // Those that are known are news to a connection.
            records.mark_changed();
        }
        Self {
            records,
            asker: Asker::new(nats, options.patience, options.answer_ports.clone()),
            open: JoinSet::new(),
        }
    }

    /// Waits for news. Loses none where it is dropped.
    pub(in super::super) async fn news(&mut self) -> News {
        let changed = async {
            if let Some(records) = &mut self.records
                && records.changed().await.is_ok()
            {
                return Arc::clone(&records.borrow_and_update());
            }
            // Nobody looks any more: the bridge ends.
            std::future::pending().await
        };
        tokio::select! {
            records = changed => News::Records(records),
            Some(Ok(answered)) = self.open.join_next() => News::Answered(answered),
        }
    }

    /// Takes in what is new.
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

    /// Asks all workers that are due, as far as so many questions may be open.
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
