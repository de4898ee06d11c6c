//! Waiting until a daemon has applied the published batches, or has dropped some of them.

use std::time::Duration;

use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::{
    BatchCursor, DegradedReason, DegradedReasons, ErrorCode, Gathered, HolderStatusReply, NamespaceName,
    Rank, WorkerName,
};
use tokio::time::Instant;

use super::connect::NatsConnection;
use super::failure::Failure;
use super::status_report::describe_state;
use super::text::counted;

/// Pause between two questions to the daemon about its progress.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Observes how many batches of one worker's rank a daemon has applied.
pub(super) struct DaemonWatch {
    client: QueryClient,
    namespace: NamespaceName,
    worker: WorkerName,
    rank: Rank,
    patience: Duration,
    /// Reasons for doubt that the daemon may report even if it applies every batch of this command: see
    /// [`earlier_doubts`].
    earlier: DegradedReasons,
}

impl DaemonWatch {
    /// Begins to observe, before the batch at `first` is published. Asks the daemon once for the reasons why it already
    /// doubts the holder. `patience` is the longest time for each question, and for the later wait. Fails if the server
    /// refuses the question.
    pub(super) async fn begin(
        connection: &NatsConnection,
        (namespace, worker, rank): (NamespaceName, WorkerName, Rank),
        first: BatchCursor,
        patience: Duration,
    ) -> Result<Self, Failure> {
        let subject = connection.subjects.status(&namespace);
        let client = QueryClient::new(connection.nats.clone(), connection.subjects.clone());
        let mut watch = Self {
            client: client.with_patience(patience),
            namespace,
            worker,
            rank,
            patience,
            earlier: DegradedReasons::default(),
        };
        // If the daemon does not answer now, the later wait asks again, and fails if the daemon still does not answer.
        let before = connection.unless_refused(&subject, watch.find_holder()).await;
        let before = before.map_err(|refused| {
            Failure::failed(format_args!(
                "nothing was published, because --wait has to ask: {refused}"
            ))
        })?;
        let before = before.ok().and_then(KnownHolder::into_status);
        watch.earlier = earlier_doubts(before.as_ref(), first);
        Ok(watch)
    }

    /// Asks the daemon again and again until it has applied the batch at `cursor`. Returns a text about the blocks that
    /// the rank then holds.
    pub(super) async fn wait_until_applied(
        &self,
        cursor: BatchCursor,
        has_said_goodbye: bool,
    ) -> Result<String, Failure> {
        let deadline = Instant::now() + self.patience;
        loop {
            let known = self.find_holder().await?;
            let is_late = Instant::now() >= deadline;
            match progress(&known, cursor, self.earlier, has_said_goodbye) {
                DaemonProgress::Applied(text) => return Ok(text),
                DaemonProgress::Ignored(text) => return Err(Failure::failed(text)),
                DaemonProgress::Waiting(state) if is_late => return Err(self.not_applied(cursor, &state)),
                DaemonProgress::Dropped(state) if is_late => return Err(dropped(&state)),
                // Dropped batches may still be applied, because the daemon asks the publisher for them.
                DaemonProgress::Waiting(_) | DaemonProgress::Dropped(_) => {
                    tokio::time::sleep(POLL_INTERVAL).await
                }
            }
        }
    }

    fn not_applied(&self, BatchCursor { epoch, seq }: BatchCursor, state: &str) -> Failure {
        let patience = self.patience;
        Failure::failed(format_args!(
            "epoch {epoch}, seq {seq} was not applied within {patience:?}: the daemon {state}; see its log for the reason, or raise \
             --timeout"
        ))
    }

    /// Returns what the daemon knows of the holder.
    async fn find_holder(&self) -> Result<KnownHolder, Failure> {
        match self.client.status(&self.namespace).await {
            Ok(status) => {
                let mut holders = status.holders.into_iter();
                let found = holders.find(|holder| holder.worker == self.worker && holder.rank == self.rank);
                let absent = || KnownHolder::absent(status.gathered.as_ref());
                Ok(found.map_or_else(absent, KnownHolder::Status))
            }
            // A namespace does not exist before its first batch, and a daemon that has just started does not know all
            // namespaces yet.
            Err(ClientError::Refused(refusal))
                if matches!(refusal.code, ErrorCode::UnknownNamespace | ErrorCode::Unavailable) =>
            {
                Ok(match refusal.code {
                    ErrorCode::Unavailable => KnownHolder::Refused(refusal.text),
                    _ => KnownHolder::Unknown,
                })
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// State of a holder, as a daemon's answer tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum KnownHolder {
    Status(HolderStatusReply),
    Unknown,
    /// The daemon does not tell, and gives this explanation. For example, a shard is missing, or a limit keeps the
    /// namespace out.
    Refused(String),
}

impl KnownHolder {
    /// Returns the state of a holder that an answer does not list. A shard that is missing from the answer may have the
    /// holder.
    fn absent(gathered: Option<&Gathered>) -> Self {
        match gathered.filter(|gathered| !gathered.missing.is_empty()) {
            Some(gathered) => Self::Refused(format!("{} did not answer", gathered.missing_in_words())),
            None => Self::Unknown,
        }
    }

    fn into_status(self) -> Option<HolderStatusReply> {
        match self {
            Self::Status(status) => Some(status),
            Self::Unknown | Self::Refused(_) => None,
        }
    }
}

fn dropped(state: &str) -> Failure {
    Failure::failed(format_args!(
        "the daemon did not take every batch: the worker's rank is {state}; see its log for what it dropped and why, and its settings \
         events.max_blocks_per_event, events.max_events_per_batch and events.max_message_bytes"
    ))
}

/// Returns only those `reasons` that mean that a batch was dropped or lost.
fn of_dropped(reasons: DegradedReasons) -> DegradedReasons {
    reasons.filtered(|reason| matches!(reason, DegradedReason::Gap | DegradedReason::Undecodable))
}

/// Returns the reasons for doubt that the batches from `first` on do not cause. Some are already in `before`, the
/// daemon's status before these batches. Another one is a gap, if `first` does not have the next batch number.
fn earlier_doubts(before: Option<&HolderStatusReply>, first: BatchCursor) -> DegradedReasons {
    let degraded = before.map_or(DegradedReasons::default(), |holder| of_dropped(holder.degraded));
    let continued = before.filter(|holder| holder.epoch == first.epoch);
    let earlier = match continued {
        Some(_) => degraded,
        // A new epoch replaces the batches that were lost before. But a message that could not be decoded may belong to
        // the new epoch.
        None => degraded.without(DegradedReason::Gap),
    };
    let next = continued.map_or(1, |holder| holder.seq.saturating_add(1));
    match first.seq > next {
        true => earlier.with(DegradedReason::Gap),
        false => earlier,
    }
}

/// Progress of the daemon with the published batches, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
enum DaemonProgress {
    Applied(String),
    /// The daemon will never apply the last batch. The text says why.
    Ignored(String),
    Waiting(String),
    /// The daemon has reached the last batch's number, but has dropped some of the published batches.
    Dropped(String),
}

fn progress(
    known: &KnownHolder,
    cursor: BatchCursor,
    earlier: DegradedReasons,
    has_said_goodbye: bool,
) -> DaemonProgress {
    let holder = match known {
        KnownHolder::Status(holder) => holder,
        KnownHolder::Unknown if has_said_goodbye => {
            let text = "applied: the daemon does not know the worker's rank any more\n";
            return DaemonProgress::Applied(text.to_owned());
        }
        KnownHolder::Unknown => {
            return DaemonProgress::Waiting("has none of the worker's batches".to_owned());
        }
        KnownHolder::Refused(words) => return DaemonProgress::Waiting(format!("says: {words}")),
    };
    let BatchCursor { epoch, seq } = cursor;
    if holder.epoch > epoch {
        return DaemonProgress::Ignored(format!(
            "the daemon ignores epoch {epoch}, because epoch {} has replaced it; use a higher --epoch",
            holder.epoch
        ));
    }
    if has_said_goodbye || holder.epoch < epoch || holder.seq < seq {
        return DaemonProgress::Waiting(format!("is at epoch {}, seq {}", holder.epoch, holder.seq));
    }
    let state = describe_state(holder.exact, holder.degraded);
    if of_dropped(holder.degraded)
        .iter()
        .any(|reason| !earlier.contains(reason))
    {
        return DaemonProgress::Dropped(state);
    }
    let blocks = counted(holder.blocks, "block", "blocks");
    DaemonProgress::Applied(format!("applied: the worker's rank holds {blocks}, {state}\n"))
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::Labels;

    use super::*;

    const CURSOR: BatchCursor = BatchCursor { epoch: 7, seq: 2 };
    const NONE: DegradedReason = DegradedReason::Unverified;

    fn holder(epoch: u64, seq: u64) -> HolderStatusReply {
        HolderStatusReply {
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 0,
            epoch,
            seq,
            blocks: 1,
            parked_events: 0,
            foreign_chain: false,
            epoch_ahead_s: 0,
            exact: true,
            address: None,
            labels: Labels::NONE,
            degraded: DegradedReasons::default(),
            since_us: None,
        }
    }

    fn doubtful(epoch: u64, seq: u64, reason: DegradedReason) -> HolderStatusReply {
        HolderStatusReply {
            exact: false,
            degraded: DegradedReasons::of(reason),
            ..holder(epoch, seq)
        }
    }

    #[test]
    fn the_daemon_is_waited_for_until_it_is_there_or_never_will_be() {
        let progress = |holder: Option<HolderStatusReply>, goodbye| {
            let known = holder.map_or(KnownHolder::Unknown, KnownHolder::Status);
            progress(&known, CURSOR, DegradedReasons::default(), goodbye)
        };
        assert!(matches!(progress(None, false), DaemonProgress::Waiting(_)));
        for (epoch, seq) in [(6, 9), (7, 1)] {
            let found = progress(Some(holder(epoch, seq)), false);
            assert!(matches!(found, DaemonProgress::Waiting(_)), "{found:?}");
        }
        let applied = DaemonProgress::Applied("applied: the worker's rank holds 1 block, exact\n".to_owned());
        assert_eq!(progress(Some(holder(7, 2)), false), applied);
        assert!(matches!(
            progress(Some(holder(8, 1)), false),
            DaemonProgress::Ignored(_)
        ));
        // A goodbye is applied when the holder is gone, not before.
        assert!(matches!(
            progress(Some(holder(7, 2)), true),
            DaemonProgress::Waiting(_)
        ));
        assert!(matches!(progress(None, true), DaemonProgress::Applied(_)));
    }

    #[test]
    fn a_refusal_is_told_in_the_daemons_words() {
        let gathered = |missing| Gathered { shards: 2, missing };
        let refused = KnownHolder::absent(Some(&gathered(vec![1])));
        let waiting = DaemonProgress::Waiting("says: shard 1 of 2 did not answer".to_owned());
        for has_said_goodbye in [false, true] {
            let found = progress(&refused, CURSOR, DegradedReasons::default(), has_said_goodbye);
            assert_eq!(found, waiting);
        }
        let whole = KnownHolder::absent(Some(&gathered(Vec::new())));
        assert_eq!(whole, KnownHolder::Unknown);
    }

    /// A test that a dropped batch does not count as applied. The daemon's last batch number can still reach the number
    /// of the dropped batch, because of a later heartbeat.
    #[test]
    fn a_number_that_is_reached_over_a_gap_is_not_applied() {
        let after = |reason, earlier| {
            let holder = doubtful(7, 3, reason);
            progress(
                &KnownHolder::Status(holder),
                CURSOR,
                DegradedReasons::of(earlier),
                false,
            )
        };
        for reason in [DegradedReason::Gap, DegradedReason::Undecodable] {
            assert!(
                matches!(after(reason, NONE), DaemonProgress::Dropped(_)),
                "{reason:?}"
            );
            assert!(
                matches!(after(reason, reason), DaemonProgress::Applied(_)),
                "{reason:?}"
            );
        }
        assert!(matches!(
            after(DegradedReason::Capacity, NONE),
            DaemonProgress::Applied(_)
        ));
    }

    #[test]
    fn doubts_from_before_are_known_by_epoch_and_number() {
        let gap = DegradedReasons::of(DegradedReason::Gap);
        let undecodable = DegradedReasons::of(DegradedReason::Undecodable);
        let none = DegradedReasons::default();
        let earlier = |before: Option<HolderStatusReply>, seq| {
            earlier_doubts(before.as_ref(), BatchCursor { epoch: 7, seq })
        };
        assert_eq!(earlier(None, 1), none);
        assert_eq!(earlier(None, 2), gap, "whoever begins at 2 has skipped 1");
        assert_eq!(earlier(Some(holder(7, 1)), 2), none);
        assert_eq!(earlier(Some(holder(7, 1)), 3), gap);
        assert_eq!(earlier(Some(doubtful(7, 1, DegradedReason::Gap)), 2), gap);
        assert_eq!(earlier(Some(doubtful(6, 1, DegradedReason::Gap)), 1), none);
        assert_eq!(
            earlier(Some(doubtful(6, 1, DegradedReason::Undecodable)), 1),
            undecodable
        );
    }
}
