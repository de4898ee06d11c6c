//! Requests that a daemon receives. If the server refuses a subscription, it is made again. When the daemon leaves its
//! queue group, no request is lost.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Message};
use tokio::sync::watch;
use tokio::task::coop::has_budget_remaining;
use tokio_util::sync::CancellationToken;

use kvatlas_client::Backoff;
use kvatlas_core::wire::{Shard, Subjects};
use kvatlas_process::broker::{Intake, LastingSubscription, SubscribeError, is_confirmed};
pub(crate) use kvatlas_process::presence::Asked;

use super::member::QueueMember;
use super::turns::Connected;

/// Pauses before the next try after the server has refused a subscription.
const RETRIES: Backoff = Backoff {
    pause_min: Duration::from_millis(100),
    pause_max: Duration::from_secs(2),
};

/// Requests that a daemon answers, described by their subjects and the queue group that shares them.
#[derive(Debug, Clone)]
pub(super) struct ServedRequests {
    subjects: Subjects,
    queue_group: String,
    shard: Option<Shard>,
}

impl ServedRequests {
    /// Describes the requests on `subjects`, of which each goes to one member of `queue_group`.
    ///
    /// With a `shard`, describes the requests on the shards' subjects, of which each goes to one replica of that
    /// shard. Each shard has its own queue group, so every shard gets every request.
    pub(super) fn new(subjects: &Subjects, queue_group: &str, shard: Option<Shard>) -> Self {
        match shard {
            None => Self {
                subjects: subjects.clone(),
                queue_group: queue_group.to_owned(),
                shard,
            },
            Some(of) => Self {
                subjects: subjects.of_shards(),
                queue_group: format!("{queue_group}-{}-of-{}", of.index(), of.count()),
                shard,
            },
        }
    }

    /// Returns the queue group that shares the requests.
    pub(super) fn queue_group(&self) -> &str {
        &self.queue_group
    }

    /// Returns the subjects of the requests.
    pub(super) fn subjects(&self) -> &Subjects {
        &self.subjects
    }

    /// Returns the shard whose workers the daemon knows. `None` means all workers.
    pub(super) fn shard(&self) -> Option<Shard> {
        self.shard
    }

    /// Returns the subject on which replicas ask each other for their rosters (lists of known holders). Replicas that
    /// answer the same requests share this subject.
    pub(super) fn roster_subject(&self) -> String {
        self.subjects.roster(&self.queue_group)
    }

    /// Returns the subjects of the subscriptions through which requests arrive.
    pub(super) fn subscriptions(&self) -> [String; 2] {
        [self.subjects.all_queries(), self.subjects.all_statuses()]
    }

    /// Joins the queue group, and waits until the server has confirmed the subscriptions. If the server refuses, tries
    /// again without end, since rights can be restored.
    ///
    /// `refusals` must change whenever the server refuses a subscription. `intake` counts the bytes that `client` has
    /// received and that have not been taken.
    pub(super) async fn join_confirmed(
        &self,
        client: &Client,
        refusals: &watch::Receiver<u64>,
        intake: &Intake,
    ) -> Result<Requests, SubscribeError> {
        let mut failures = 0_u32;
        loop {
            let before = *refusals.borrow();
            let requests = self.join(client).await?;
            if !is_confirmed(client, intake, "queries").await {
                requests.discard(intake).await;
                continue;
            }
            if *refusals.borrow() == before {
                return Ok(requests);
            }
            failures = failures.saturating_add(1);
            tokio::time::sleep(RETRIES.pause(failures)).await;
        }
    }

    /// Joins the queue group for queries and for status requests.
    async fn join(&self, client: &Client) -> Result<Requests, SubscribeError> {
        let subjects = &self.subjects;
        let join = |subject, filler| QueueMember::join(client, subject, Some(filler), &self.queue_group);
        Ok(Requests {
            queries: join(subjects.all_queries(), subjects.query_filler()).await?,
            statuses: join(subjects.all_statuses(), subjects.status_filler()).await?,
            is_status_first: false,
        })
    }

    /// Subscribes to the roster requests of replicas that compare which holders they know.
    pub(super) async fn subscribe_roster(
        &self,
        connected: &Connected,
    ) -> Result<LastingSubscription, SubscribeError> {
        let (client, group) = (connected.client.clone(), Some(self.queue_group.clone()));
        LastingSubscription::new(client, self.roster_subject(), group, &connected.refused).await
    }
}

/// Requests that the server sends to one connection.
pub(super) struct Requests {
    queries: QueueMember,
    statuses: QueueMember,
    is_status_first: bool,
}

impl Requests {
    /// Waits for the next request. Returns `None` when the client is closed.
    async fn next(&mut self) -> Option<(Asked, Message)> {
        tokio::select! {
            Some(message) = self.statuses.next() => Some((Asked::Status, message)),
            message = self.queries.next() => message.map(|message| (Asked::Query, message)),
        }
    }

    /// Returns the next request that has been received already, if any. Tells `intake`, the count of waiting bytes,
    /// which messages were taken.
    fn next_received(&mut self, intake: &Intake) -> Option<(Asked, Message)> {
        let received = intake.received();
        // If the task has used up its tokio budget, every buffer looks empty, so this call cannot tell that all is
        // taken.
        let can_tell = has_budget_remaining();
        let mut queries = || Some((Asked::Query, self.queries.next_received()?));
        let mut statuses = || Some((Asked::Status, self.statuses.next_received()?));
        // The two kinds take turns, so that a flood of one does not delay the other.
        self.is_status_first = !self.is_status_first;
        let request = match self.is_status_first {
            true => statuses().or_else(queries),
            false => queries().or_else(statuses),
        };
        match &request {
            Some((_, message)) => intake.took(message),
            None if can_tell => intake.took_all(received),
            None => {}
        }
        request
    }

    /// Waits for the next request as [`Self::next`] does. Tells `intake`, the count of waiting bytes, which messages
    /// were taken.
    async fn next_counted(&mut self, intake: &Intake) -> Option<(Asked, Message)> {
        loop {
            if let Some(request) = self.next_received(intake) {
                return Some(request);
            }
            tokio::select! {
                request = self.next() => return request.inspect(|(_, message)| intake.took(message)),
                () = intake.asked() => {}
            }
        }
    }

    /// Leaves the queue group without answering the requests that have come.
    async fn discard(self, intake: &Intake) {
        intake.discard(self.queries.messages).await;
        intake.discard(self.statuses.messages).await;
    }

    /// Ends these subscriptions, because new ones have replaced them. Returns the requests that still came on them.
    async fn replaced(self) -> VecDeque<(Asked, Message)> {
        let (queries, statuses) = tokio::join!(self.queries.ended(), self.statuses.ended());
        let queries = queries.into_iter().map(|message| (Asked::Query, message));
        let statuses = statuses.into_iter().map(|message| (Asked::Status, message));
        queries.chain(statuses).collect()
    }

    /// Returns the next request while the daemon leaves the queue group. Returns `None` once there is no further
    /// request that the server has sent.
    async fn next_until_left(&mut self) -> Option<(Asked, Message)> {
        if let Some(message) = self.queries.next_until_left().await {
            return Some((Asked::Query, message));
        }
        let message = self.statuses.next_until_left().await?;
        Some((Asked::Status, message))
    }
}

/// Requests of one connection. If the server withdraws the right to subscribe and restores it later, makes new
/// subscriptions.
pub(super) struct LastingRequests {
    client: Client,
    served: ServedRequests,
    refusals: watch::Receiver<u64>,
    intake: Arc<Intake>,
    current: Requests,
    /// Requests that came on subscriptions that have been replaced by new ones.
    left: VecDeque<(Asked, Message)>,
    /// Subscriptions that are being made anew.
    rejoining: Option<Ongoing<Result<Requests, SubscribeError>>>,
    /// Subscriptions that have been replaced, and of which the last requests are awaited.
    ending: Option<Ongoing<VecDeque<(Asked, Message)>>>,
}

/// Work that goes on over several calls of [`LastingRequests::next`].
type Ongoing<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Result of [`LastingRequests::next`].
pub(super) enum NextRequest {
    /// Request that came, with its kind.
    Request(Asked, Message),
    /// Notice that the server has confirmed the subscriptions again.
    Rejoined,
    /// Notice that the client is closed.
    Closed,
}

impl LastingRequests {
    /// Joins the queue group, and waits until the server has confirmed the subscriptions. Returns `None` if `stop` was
    /// cancelled first.
    pub(super) async fn join(
        connected: &Connected,
        served: ServedRequests,
        stop: &CancellationToken,
    ) -> Result<Option<Self>, SubscribeError> {
        let Connected {
            client,
            refusals,
            intake,
            ..
        } = connected;
        let joining = stop.run_until_cancelled(served.join_confirmed(client, refusals, intake));
        let Some(joined) = joining.await else {
            return Ok(None);
        };
        Ok(Some(Self {
            client: client.clone(),
            served,
            refusals: refusals.clone(),
            intake: Arc::clone(intake),
            current: joined?,
            left: VecDeque::new(),
            rejoining: None,
            ending: None,
        }))
    }

    /// Waits for the next request, or for another case of [`NextRequest`]. If the future is dropped, nothing is lost.
    /// Test: `a_dropped_call_loses_no_request`.
    pub(super) async fn next(&mut self) -> Result<NextRequest, SubscribeError> {
        loop {
            if let Some((asked, message)) = self.left.pop_front() {
                return Ok(NextRequest::Request(asked, message));
            }
            let is_whole = self.rejoining.is_none() && self.ending.is_none();
            tokio::select! {
                // If `refusals` is closed, so is the connection, and `next_counted` returns `None`.
                Ok(()) = self.refusals.changed(), if is_whole => self.rejoin(),
                joined = settled(&mut self.rejoining) => {
                    let old = std::mem::replace(&mut self.current, joined?);
                    self.ending = Some(Box::pin(old.replaced()));
                }
                left = settled(&mut self.ending) => {
                    self.left = left;
                    return Ok(NextRequest::Rejoined);
                }
                request = self.current.next_counted(&self.intake) => {
                    return Ok(request.map_or(NextRequest::Closed, |(asked, message)| {
                        NextRequest::Request(asked, message)
                    }));
                }
            }
        }
    }

    /// Returns the next request that has been received already. Returns `None` if there is none, or if the client is
    /// closed.
    pub(super) fn next_received(&mut self) -> Option<(Asked, Message)> {
        let left = self.left.pop_front();
        left.or_else(|| self.current.next_received(&self.intake))
    }

    /// Returns the next request while the daemon leaves the queue group. Returns `None` once there is no further
    /// request that the server has sent.
    pub(super) async fn next_until_left(&mut self) -> Option<(Asked, Message)> {
        self.rejoining = None;
        if self.ending.is_some() {
            let left = settled(&mut self.ending).await;
            self.left.extend(left);
        }
        match self.left.pop_front() {
            Some(request) => Some(request),
            None => self.current.next_until_left().await,
        }
    }

    fn rejoin(&mut self) {
        let (client, served, refusals) = (self.client.clone(), self.served.clone(), self.refusals.clone());
        let intake = Arc::clone(&self.intake);
        self.rejoining = Some(Box::pin(async move {
            tokio::time::sleep(RETRIES.pause_min).await;
            served.join_confirmed(&client, &refusals, &intake).await
        }));
    }
}

/// Waits for the end of `work`, and leaves none then. Waits for ever if there is none.
async fn settled<T>(work: &mut Option<Ongoing<T>>) -> T {
    let done = match work {
        Some(ongoing) => ongoing.await,
        None => std::future::pending().await,
    };
    *work = None;
    done
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures_util::{FutureExt, StreamExt};
    use kvatlas_process::broker::Buffer;
    use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

    use super::*;

    #[tokio::test]
    async fn a_dropped_call_loses_no_request() {
        let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
            .await
            .unwrap();
        let client = async_nats::connect(broker.url()).await.unwrap();
        let subjects = Subjects::new("kvatlas").unwrap();
        let served = ServedRequests::new(&subjects, "kvatlas", None);
        let (old, new) = (
            served.join(&client).await.unwrap(),
            served.join(&client).await.unwrap(),
        );
        // A connection's messages come in order. So both subscriptions have all of their requests behind this one.
        let mut last = client.subscribe("last").await.unwrap();
        for number in 0..64_u8 {
            let subject = format!("{}.m", subjects.all_queries().trim_end_matches(".>"));
            let payload = Bytes::from(vec![number]);
            client.publish(subject, payload).await.unwrap();
        }
        client.publish("last", Bytes::new()).await.unwrap();
        last.next().await.unwrap();
        let (_refusals, refusals) = watch::channel(0);
        let (_, intake) = Buffer::of_bytes(1024, 1 << 20);
        let mut requests = LastingRequests {
            client,
            served,
            refusals,
            intake,
            current: old,
            left: VecDeque::new(),
            rejoining: Some(Box::pin(std::future::ready(Ok(new)))),
            ending: None,
        };
        let (mut numbers, mut rejoined) = (Vec::new(), 0);
        let all = async {
            while numbers.len() < 64 || rejoined < 1 {
                // A call that waits is dropped, as in a `select!`.
                match requests.next().now_or_never().transpose().unwrap() {
                    Some(NextRequest::Request(_, message)) => numbers.push(message.payload[0]),
                    Some(NextRequest::Rejoined) => rejoined += 1,
                    Some(NextRequest::Closed) => panic!("the client is open"),
                    None => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), all).await.unwrap();
        numbers.sort_unstable();
        assert_eq!((numbers, rejoined), ((0..64).collect::<Vec<u8>>(), 1));
    }
}
