//! TensorRT-LLM: asks its server over HTTP for the events since the last question.
//!
//! The server removes the events that it puts into an answer. So only one client may ask, and the events of a lost
//! answer are lost. The server ends an answer when its engine has told no event for two seconds. So the answer of a
//! busy engine takes long.
//!
//! The server numbers the events of each rank from 0. So numbers that continue the earlier ones prove that nothing is
//! missing, and an answer that begins at 0 comes from another process. An engine that has served no request tells no
//! event, so an empty answer on a new connection may come from another process, too. The first event of a process tells
//! its attention windows.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use tokio::time::{MissedTickBehavior, timeout};

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{Rank, WorkerName};
use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, EventNumber, Format, Reason};

use kvatlas_telemetry::log_gated;

use super::holders::Holders;
use super::http::{HttpError, ServerAddress, ServerConnection};
use super::sources::{FollowedSource, FollowedSourceError, SourceTask};
use super::stalls::StallWatch;

/// Path at which the server gives its events, unless the endpoint has a path.
const EVENTS_PATH: &str = "/kv_cache_events";
/// Pause between two questions, whether or not the last answer had events.
const PAUSE: Duration = Duration::from_millis(100);
/// Minimum time for which the bridge waits for an answer. The server needs at least two seconds: it answers once the
/// engine has told no event for that time.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// Error that keeps the server from being asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum PollError {
    /// The connection, or HTTP on it, failed.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The server answered with this status instead of events.
    #[error("status {0}")]
    Status(u16),
    /// No answer came within this time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The endpoint is no HTTP address.
    #[error("{0} is not http://HOST:PORT")]
    Endpoint(String),
}

/// Parses the address of a server's events.
pub(super) fn parse_endpoint(endpoint: &str) -> Result<ServerAddress, PollError> {
    let address = ServerAddress::parse(endpoint).filter(|address| !address.is_secure);
    let mut address = address.ok_or_else(|| PollError::Endpoint(endpoint.to_owned()))?;
    if address.path == "/" {
        EVENTS_PATH.clone_into(&mut address.path);
    }
    Ok(address)
}

/// Client that asks one server for its events.
struct Poller {
    address: ServerAddress,
    /// Maximum time to connect.
    patience: Duration,
    connection: Option<ServerConnection>,
    /// Whether the last question opened a new connection. It may lead to another process than the connection before.
    has_connected: bool,
}

impl Poller {
    fn new(endpoint: &str, patience: Duration) -> Result<Self, PollError> {
        Ok(Self {
            address: parse_endpoint(endpoint)?,
            patience,
            connection: None,
            has_connected: false,
        })
    }

    /// Asks for the events since the last question, and returns the answer's body. After an error, the next call makes a new
    /// connection.
    async fn poll(&mut self) -> Result<Bytes, PollError> {
        // While a question is open, `self.connection` is empty. So a question that is given up leaves no connection on
        // which its late answer could be taken for the next answer.
        let connection = self
            .connection
            .take()
            .filter(|connection| !connection.is_closed());
        self.has_connected = connection.is_none();
        let mut connection = match connection {
            Some(connection) => connection,
            None => within(self.patience, ServerConnection::open(&self.address)).await?,
        };
        let question = connection.ask(Method::POST, &self.address.path);
        let (status, body) = within(self.patience.max(ANSWER_PATIENCE), question).await?;
        if !status.is_success() {
            return Err(PollError::Status(status.as_u16()));
        }
        self.connection = Some(connection);
        Ok(body)
    }
}

/// Runs `work` for at most `time`.
async fn within<T>(time: Duration, work: impl Future<Output = Result<T, HttpError>>) -> Result<T, PollError> {
    let done = timeout(time, work).await;
    Ok(done.map_err(|_| PollError::TimedOut(time))??)
}

/// Verdict on the numbers of an answer, for one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbers {
    /// The numbers continue the earlier numbers without a hole.
    Whole,
    /// Some numbers are missing.
    Holes,
    /// The numbers begin again at 0, without a hole.
    Restarted,
    /// The numbers begin again, and some are missing.
    RestartedWithHoles,
}

impl Numbers {
    /// Whether the numbers come from another process than the earlier numbers.
    fn is_restarted(&self) -> bool {
        matches!(self, Self::Restarted | Self::RestartedWithHoles)
    }

    /// Whether some numbers are missing.
    fn has_holes(&self) -> bool {
        matches!(self, Self::Holes | Self::RestartedWithHoles)
    }
}

/// Judges the `numbers` of an answer's events against `last`, the last number of earlier answers. All numbers are of one
/// rank and in order.
fn prove(last: Option<u64>, numbers: &[u64]) -> Numbers {
    let Some(first) = numbers.first().copied() else {
        return Numbers::Whole;
    };
    let has_holes = numbers
        .windows(2)
        .any(|pair| matches!(pair, [one, next] if *next != one.wrapping_add(1)));
    let due = last.map_or(0, |last| last.wrapping_add(1));
    match (first, has_holes) {
        (first, false) if first == due => Numbers::Whole,
        (first, _) if first >= due => Numbers::Holes,
        (0, false) => Numbers::Restarted,
        _ => Numbers::RestartedWithHoles,
    }
}

/// Reports the answers of one server to daemons.
pub(super) struct ServerEvents {
    worker: WorkerName,
    /// Rank of events that name no rank.
    rank: Rank,
    holders: Holders,
    decoder: Decoder,
    batch: EngineBatch,
    /// Number of the last event of each rank.
    last: BTreeMap<Rank, u64>,
    /// Ranks that are out of sight (not known for certain) until the numbers of their next events have come. An answer
    /// with their events may have been lost or may have gone to an earlier bridge, or the process may be another one.
    unproven: BTreeSet<Rank>,
    /// Whether a connection was made since the last answer with numbers. An answer with the first events of a new process may
    /// have been lost then.
    is_fresh: bool,
    /// Whether an answer could not be decoded since the last answer with numbers.
    is_unread: bool,
}

impl FollowedSource for ServerEvents {
    async fn follow(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> Result<Infallible, FollowedSourceError> {
        let mut poller =
            Poller::new(&task.engine.endpoint, task.options.patience).map_err(FollowedSourceError::broken)?;
        let mut stalls = task.stall_watch();
        loop {
            let look = stalls.look();
            let answer = self.answer(&mut poller, task, &mut stalls).await?;
            *failures = 0;
            if poller.has_connected {
                self.doubt_all();
            }
            // An answer takes the events out of the server. So it is applied even when it no longer proves that the server lives.
            let is_news = stalls.is_news(look);
            let seen_for = is_news.then(|| task.options.look_interval_max());
            self.apply(&answer, seen_for).await?;
            let trouble = self.holders.trouble();
            task.note_followed(trouble.is_none(), trouble.as_deref());
            tokio::time::sleep(PAUSE).await;
            if stalls.has_stalled() {
                self.holders.lost().await?;
            }
        }
    }

    async fn disconnected(&mut self, _: &SourceTask) -> Result<(), FollowedSourceError> {
        Ok(self.holders.lost().await?)
    }

    async fn end(self, _: &SourceTask, says_goodbye: bool) -> Result<(), FollowedSourceError> {
        Ok(self.holders.end(says_goodbye).await?)
    }
}

impl ServerEvents {
    pub(super) fn new(worker: WorkerName, rank: Rank, holders: Holders) -> Self {
        Self {
            worker,
            rank,
            holders,
            decoder: decoder(),
            batch: EngineBatch::default(),
            last: BTreeMap::new(),
            unproven: BTreeSet::from([rank]),
            is_fresh: true,
            is_unread: false,
        }
    }

    /// Puts all ranks out of sight until their next events, because the connection is a new one. An answer may have been lost
    /// with the old one, and the process may be another one.
    fn doubt_all(&mut self) {
        let ranks = self.holders.all().map(|(_, rank, _)| rank);
        self.unproven.extend(ranks);
        self.is_fresh = true;
    }

    /// Asks for the next answer, and waits for it. During the wait, the holders stay in sight, unless this process
    /// stands still.
    async fn answer(
        &mut self,
        poller: &mut Poller,
        task: &SourceTask,
        stalls: &mut StallWatch,
    ) -> Result<Bytes, FollowedSourceError> {
        let mut asking = Box::pin(poller.poll());
        let mut ticks = tokio::time::interval(task.options.poll_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let answered = tokio::select! {
                biased;
                answered = &mut asking => Some(answered),
                _ = ticks.tick() => None,
            };
            if stalls.has_stalled() {
                self.holders.lost().await?;
            }
            if let Some(answered) = answered {
                return answered.map_err(FollowedSourceError::broken);
            }
            for (_, _, relay) in self.holders.all().filter(|(_, _, relay)| relay.is_in_sight()) {
                relay.seen(task.options.look_interval_max()).await?;
            }
        }
    }

    /// Applies an answer. `seen_for` is the time for which daemons may count the engine as alive. `None` if this
    /// process has stalled before the answer came, so that the answer no longer shows that the engine is alive.
    async fn apply(&mut self, answer: &[u8], seen_for: Option<Duration>) -> Result<(), PublisherError> {
        // Before the first answer, the rank has no holder yet.
        self.holders.get(&self.worker, self.rank).await;
        if let Err(error) = self.decoder.decode(answer, &mut self.batch) {
            log_gated!(
                warn "an answer of an engine's server cannot be decoded";
                worker = %&self.worker, %error
            );
            // The events in an undecodable answer are lost.
            self.batch.clear();
            for (_, _, relay) in self.holders.all() {
                relay.lose(Reason::Malformed).await?;
            }
            // All ranks are now in doubt until a clear.
            self.unproven.clear();
            self.is_unread = true;
        }
        let proven = self.prove_all();
        if proven.values().any(Numbers::is_restarted) {
            // The attention windows of the old process no longer apply. So a new decoder reads the answer again.
            self.decoder = decoder();
            let _decoded_before = self.decoder.decode(answer, &mut self.batch);
        }
        self.judge_the_silent(&proven).await?;
        let batch = std::mem::take(&mut self.batch);
        let applied = self.apply_batch(&batch, &proven, seen_for).await;
        self.batch = batch;
        applied
    }

    /// Judges the event numbers in the batch, for each rank. All ranks of a server belong to one process. So if the
    /// numbers of one rank begin again, those of all ranks do.
    fn prove_all(&mut self) -> BTreeMap<Rank, Numbers> {
        let mut numbers: BTreeMap<Rank, Vec<u64>> = BTreeMap::new();
        for EventNumber { rank, id } in &self.batch.numbers {
            numbers.entry(rank.unwrap_or(self.rank)).or_default().push(*id);
        }
        let verdict =
            |(rank, numbers): (&Rank, &Vec<u64>)| (*rank, prove(self.last.get(rank).copied(), numbers));
        let mut proven: BTreeMap<Rank, Numbers> = numbers.iter().map(verdict).collect();
        if proven.values().any(Numbers::is_restarted) {
            for (rank, numbers) in &mut proven {
                if !numbers.is_restarted() && self.last.contains_key(rank) {
                    *numbers = Numbers::RestartedWithHoles;
                }
            }
        }
        for (rank, numbers) in numbers {
            self.last.extend(numbers.last().map(|last| (rank, *last)));
            self.unproven.remove(&rank);
        }
        proven
    }

    /// Judges the ranks that have no event in an answer, by the numbers of the other ranks. If those numbers begin
    /// again, the process is another one, and holds no block for the silent ranks either, unless the answer with these blocks
    /// was lost. If some of those numbers are missing, events of the silent ranks may be missing, too, because all ranks
    /// share one buffer in the server.
    async fn judge_the_silent(&mut self, proven: &BTreeMap<Rank, Numbers>) -> Result<(), PublisherError> {
        let is_restarted = proven.values().any(Numbers::is_restarted);
        let has_holes = proven.values().any(Numbers::has_holes);
        let silent = self
            .holders
            .all()
            .filter(|(_, rank, _)| !proven.contains_key(rank));
        for (_, rank, relay) in silent {
            if is_restarted {
                // The answer that could not be decoded may have been of the new process.
                let doubt = self.is_unread.then_some(Reason::Malformed);
                relay.restart(doubt).await?;
                self.last.remove(&rank);
                if !self.is_fresh {
                    self.unproven.remove(&rank);
                }
            }
            if has_holes {
                self.unproven.insert(rank);
            }
        }
        self.is_fresh &= proven.is_empty();
        self.is_unread &= proven.is_empty();
        Ok(())
    }

    async fn apply_batch(
        &mut self,
        batch: &EngineBatch,
        proven: &BTreeMap<Rank, Numbers>,
        seen_for: Option<Duration>,
    ) -> Result<(), PublisherError> {
        for (rank, numbers) in proven {
            let Some(relay) = self.holders.get(&self.worker, *rank).await else {
                continue;
            };
            if seen_for.is_none() {
                relay.lost().await?;
            }
            match numbers {
                Numbers::Whole => {}
                Numbers::Holes => relay.lose(Reason::LostBatches).await?,
                Numbers::Restarted => relay.restart(None).await?,
                Numbers::RestartedWithHoles => {
                    relay.restart(Some(Reason::LostBatches)).await?;
                    relay.lose(Reason::LostBatches).await?;
                }
            }
            let own_rank = self.rank;
            relay
                .apply_events(batch, |event| event.rank.unwrap_or(own_rank) == *rank)
                .await?;
        }
        // The server is alive, and so are its ranks without events in this answer. A rank of which this process has told no
        // event may be gone: the server may have been started anew with fewer ranks.
        for (_, rank, relay) in self.holders.all() {
            match seen_for {
                Some(time) if !self.unproven.contains(&rank) => relay.seen(time).await?,
                Some(_) if rank == self.rank || self.last.contains_key(&rank) => {
                    relay.lost().await?;
                    relay.told_alive().await?;
                }
                Some(_) => relay.unseen().await?,
                None => relay.lost().await?,
            }
        }
        Ok(())
    }
}

fn decoder() -> Decoder {
    Decoder::new(Format::TensorRt, DecodeLimits::default())
}

#[cfg(test)]
mod tests {
    use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

    use serde_json::json;

    use super::super::relay::tests::holders;
    use super::*;

    #[test]
    fn endpoints_are_servers() {
        let parsed = |endpoint| {
            let address = parse_endpoint(endpoint).ok()?;
            Some((address.authority(), address.path))
        };
        let events = |authority: &str, path: &str| Some((authority.to_owned(), path.to_owned()));
        assert_eq!(parsed("http://gpu-0:8000"), events("gpu-0:8000", EVENTS_PATH));
        assert_eq!(parsed("http://gpu-0/v2/events"), events("gpu-0:80", "/v2/events"));
        assert_eq!(parsed("http://[::1]:8000/"), events("[::1]:8000", EVENTS_PATH));
        for refused in [
            "https://gpu-0:8000",
            "tcp://gpu-0:8000",
            "gpu-0:8000",
            "http://a@b:1",
            "/x",
        ] {
            assert_eq!(parsed(refused), None, "{refused}");
        }
    }

    #[test]
    fn numbers_prove_what_is_missing() {
        assert_eq!(prove(None, &[]), Numbers::Whole);
        assert_eq!(prove(Some(7), &[]), Numbers::Whole);
        assert_eq!(prove(None, &[0, 1, 2]), Numbers::Whole);
        assert_eq!(prove(Some(2), &[3, 4]), Numbers::Whole);
        assert_eq!(prove(None, &[1, 2]), Numbers::Holes);
        assert_eq!(prove(Some(2), &[4]), Numbers::Holes);
        assert_eq!(prove(Some(2), &[3, 5]), Numbers::Holes);
        assert_eq!(prove(Some(2), &[0, 1]), Numbers::Restarted);
        assert_eq!(prove(Some(2), &[0, 2]), Numbers::RestartedWithHoles);
        assert_eq!(prove(Some(2), &[1]), Numbers::RestartedWithHoles);
        assert_eq!(prove(Some(u64::MAX), &[0]), Numbers::Whole);
    }

    async fn server_events() -> ServerEvents {
        let server = find_nats_server(None).unwrap();
        let broker = EmbeddedBroker::start(&server).await.unwrap();
        let holders = holders(broker, Format::TensorRt);
        ServerEvents::new(WorkerName::new("gpu-0").unwrap(), 0, holders)
    }

    fn created(rank: Rank, id: u64) -> serde_json::Value {
        json!({"event_id": id, "data": {"type": "created", "num_blocks_per_cache_level": [9]}, "window_size": null,
            "attention_dp_rank": rank})
    }

    /// Applies an answer, which may have come over a new connection. Returns the ranks in sight.
    async fn in_sight(events: &mut ServerEvents, is_new: bool, answer: serde_json::Value) -> Vec<Rank> {
        if is_new {
            events.doubt_all();
        }
        let answer = answer.to_string();
        let seen_for = Some(Duration::from_secs(60));
        events.apply(answer.as_bytes(), seen_for).await.unwrap();
        let seen = events.holders.all().filter(|(_, _, relay)| relay.is_in_sight());
        seen.map(|(_, rank, _)| rank).collect()
    }

    /// After a restart of the process, a rank has had no event when the connection breaks. The answer that is lost with the
    /// connection may have had its first ones.
    #[tokio::test]
    async fn a_rank_without_an_event_is_unproven_behind_a_new_connection() {
        let mut events = server_events().await;
        let mut in_sight =
            async |is_new: bool, answer: serde_json::Value| in_sight(&mut events, is_new, answer).await;
        assert_eq!(
            in_sight(true, json!([created(0, 0), created(1, 0)])).await,
            [0, 1]
        );
        assert_eq!(
            in_sight(false, json!([created(0, 0)])).await,
            [0, 1],
            "it has restarted"
        );
        assert_eq!(in_sight(true, json!([created(0, 1)])).await, [0]);
        assert_eq!(in_sight(false, json!([created(1, 0)])).await, [0, 1]);
    }

    /// The answer that cannot be decoded may have had the first events of the silent ranks.
    #[tokio::test]
    async fn a_restart_behind_an_answer_that_cannot_be_decoded_leaves_silent_ranks_in_doubt() {
        let mut events = server_events().await;
        let all = json!([created(0, 0), created(1, 0)]);
        assert_eq!(in_sight(&mut events, true, all).await, [0, 1]);
        for (before, is_doubted) in [(json!([]), false), (json!("garbage"), true), (json!([]), false)] {
            in_sight(&mut events, false, before).await;
            in_sight(&mut events, false, json!([created(0, 0)])).await;
            let mut ranks = events.holders.all();
            let silent = ranks.find(|(_, rank, _)| *rank == 1);
            assert_eq!(!silent.unwrap().2.doubts().is_empty(), is_doubted);
        }
    }

    /// The answer that was lost with the connection may have had the first events of the silent ranks. The new process may
    /// also have fewer ranks.
    #[tokio::test]
    async fn a_restart_behind_a_new_connection_proves_nothing_of_the_silent_ranks() {
        let mut events = server_events().await;
        let all = json!([created(0, 0), created(1, 0), created(2, 0)]);
        assert_eq!(in_sight(&mut events, true, all).await, [0, 1, 2]);
        assert!(in_sight(&mut events, true, json!([])).await.is_empty());
        assert_eq!(in_sight(&mut events, false, json!([created(1, 0)])).await, [1]);
        assert_eq!(
            in_sight(&mut events, false, json!([created(0, 0), created(0, 1)])).await,
            [0, 1]
        );
        let ranks = events.holders.all();
        let seen: Vec<bool> = ranks.map(|(_, _, relay)| relay.was_seen()).collect();
        assert_eq!(
            seen,
            [true, true, false],
            "the last one is told of for a time only"
        );
        assert_eq!(
            in_sight(&mut events, false, json!([created(1, 0)])).await,
            [0, 1, 2],
            "no answer was lost before this restart"
        );
    }
}
