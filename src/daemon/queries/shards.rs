//! Requests to the shards, on behalf of a gateway's connections and listeners.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, HeaderMap};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use kvatlas_client::{ClientError, Gatherer, Merged, unix_time_us};
use kvatlas_config::Config;
use kvatlas_core::wire::{
    ErrorCode, Gathered, Hint, HintReport, NamespaceName, NamespacesReply, OutcomeReport, QueryOptions,
    QueryReply, QueryRequest, StatusReply, Subjects, WireError,
};
use kvatlas_telemetry::labels::GatherOutcome;
use kvatlas_telemetry::{GatherMetrics, QueryMetricsByNamespace};

use super::answer::AnyReply;
use super::missing::MissingShards;

/// Returns the maximum number of requests that one connection of a gateway sends to the shards at the same time. All
/// listeners together share one connection.
pub(super) fn gathers_max(config: &Config) -> usize {
    let has_listeners = config.http.listen.is_some()
        || config.grpc.listen.is_some()
        || config.redis.listen.is_some()
        || !config.dynamo.components.is_empty();
    let connections = config.queries.connections + usize::from(has_listeners);
    config.gateway.max_gathers.div_ceil(connections)
}

/// Interval between two tries of [`ShardAsker::try_rights`]. A refusal counts for longer.
const TRY_INTERVAL: Duration = Duration::from_secs(5);

/// Asker that sends requests to all shards, on one connection.
pub(crate) struct ShardAsker {
    gatherer: Gatherer,
    /// Gatherer for the shards' replies when a router has reported something. Late replies are not counted here: all
    /// replicas of a shard reply to hints, and only the first reply matters.
    reports: Gatherer,
    subjects: Subjects,
    permits: Arc<Semaphore>,
    gathers_max: usize,
    /// Maximum time to wait for the shards' answers.
    deadline: Duration,
    metrics: GatherMetrics,
    missing: Arc<MissingShards>,
    /// Query metrics of the namespaces that at least one shard knows or has known.
    pub(super) namespaces: QueryMetricsByNamespace,
}

impl ShardAsker {
    /// Makes an asker on the connection `nats`, with at most `gathers_max` requests at the same time. The asker notes
    /// in `missing` the shards that are missing from answers.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection is closed.
    pub(crate) async fn new(
        nats: Client,
        subjects: &Subjects,
        gathers_max: usize,
        deadline: Duration,
        missing: Arc<MissingShards>,
    ) -> Result<Self, ClientError> {
        Ok(Self {
            gatherer: Gatherer::new(nats.clone(), subjects).await?,
            reports: Gatherer::new(nats, subjects).await?,
            subjects: subjects.clone(),
            permits: Arc::new(Semaphore::new(gathers_max)),
            gathers_max,
            deadline,
            metrics: GatherMetrics::new(),
            missing,
            namespaces: QueryMetricsByNamespace::default(),
        })
    }

    /// Returns the number of requests that may be under way at the same time.
    #[cfg(feature = "redis")]
    pub(crate) fn gathers_max(&self) -> usize {
        self.gathers_max
    }

    /// Reserves one of the `gathers_max` places for requests. If no place is free, refuses immediately, because a
    /// router has no use for a late answer.
    ///
    /// # Errors
    ///
    /// [`ErrorCode::Unavailable`] if no place is free.
    pub(crate) fn enter(&self) -> Result<OwnedSemaphorePermit, WireError> {
        let late = self.gatherer.take_late_replies();
        self.metrics.replies_late.increment(late);
        Arc::clone(&self.permits).try_acquire_owned().map_err(|_| {
            self.metrics.gathered(GatherOutcome::Overloaded);
            let gathers = self.gathers_max;
            let text = format!(
                "the gateway has {gathers} requests under way; ask again, run another gateway, or raise gateway.max_gathers"
            );
            WireError::new(ErrorCode::Unavailable, text)
        })
    }

    /// Sends `request` to all shards, and returns their answers as one. `payload` is the encoded request. The
    /// `headers` go with it.
    ///
    /// # Errors
    ///
    /// The error with which the shards refuse the request. Another error if no shard has answered, or if the request
    /// is too long.
    pub(crate) async fn ask(
        &self,
        namespace: &NamespaceName,
        request: &QueryRequest,
        payload: Bytes,
        headers: HeaderMap,
    ) -> Result<AnyReply, WireError> {
        let queries = match request {
            QueryRequest::Single(query) => {
                let reply = self.ask_one(namespace, &query.options, payload, headers);
                return Ok(AnyReply::Single(reply.await?));
            }
            QueryRequest::Batch(queries) => queries,
        };
        self.check_size(&payload)?;
        let merged = self
            .gatherer
            .query_batch(namespace, queries, payload, headers, self.deadline);
        let merged = merged.await.map_err(|error| self.failed(&error))?;
        let mut reply = self.count(Some(namespace), merged)?;
        reply.say_profiles_once();
        Ok(AnyReply::Batch(reply))
    }

    /// Sends a request with one query to all shards, and returns their answers as one. `payload` is the encoded
    /// request, and `options` are the options of its query. The `headers` go with the request.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::ask`].
    pub(crate) async fn ask_one(
        &self,
        namespace: &NamespaceName,
        options: &QueryOptions,
        payload: Bytes,
        headers: HeaderMap,
    ) -> Result<QueryReply, WireError> {
        self.check_size(&payload)?;
        let merged = self
            .gatherer
            .query(namespace, options, payload, headers, self.deadline);
        let merged = merged.await.map_err(|error| self.failed(&error))?;
        self.count(Some(namespace), merged)
    }

    /// Asks the shards for the status of a namespace: facts about each holder, such as the last batch that has been
    /// applied. The `headers` go with the request.
    ///
    /// # Errors
    ///
    /// The error with which the shards refuse the request, and another error if no shard has answered.
    pub(crate) async fn status(
        &self,
        namespace: &NamespaceName,
        headers: HeaderMap,
    ) -> Result<StatusReply, WireError> {
        let merged = self.gatherer.status(namespace, headers, self.deadline).await;
        self.count(Some(namespace), merged.map_err(|error| self.failed(&error))?)
    }

    /// Passes hints of routers to the shards. Returns the total number of hints that the shards keep, and the shards that
    /// replied.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::ask`], and an error if no shard takes hints.
    pub(crate) async fn tell_hints(
        &self,
        namespace: &NamespaceName,
        hints: Vec<Hint>,
    ) -> Result<(u64, Gathered), WireError> {
        let payload = HintReport(hints).encode().into();
        self.report(self.subjects.hint(namespace), payload).await
    }

    /// Passes a report of outcomes from a router to the shards. An outcome tells how many blocks an answer promised
    /// for a request, and how many tokens the engine then found. Returns the total number of outcomes that the shards
    /// have counted, and the shards that replied.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::ask`].
    pub(crate) async fn tell_outcomes(
        &self,
        namespace: &NamespaceName,
        report: &OutcomeReport,
    ) -> Result<(u64, Gathered), WireError> {
        let payload = report.encode().into();
        self.report(self.subjects.outcome(namespace), payload).await
    }

    async fn report(&self, subject: String, payload: Bytes) -> Result<(u64, Gathered), WireError> {
        let _place = self.enter()?;
        self.check_size(&payload)?;
        let merged = self.reports.report(subject, payload, self.deadline).await;
        // Answers to queries do not lack a shard that takes no hints. So a shard without a reply is not counted as
        // missing, and a report that no shard takes is no outage. Only failures are counted.
        let Merged { reply, gathered, .. } = merged.map_err(|error| match error {
            ClientError::NoDaemon { .. } => {
                let text = "no shard takes this report; start the shards, for hints with hints.ttl_ms";
                WireError::new(ErrorCode::Unavailable, text)
            }
            error => self.unanswered(&error, || {
                format!(
                    "no shard answered this report: {error}; ask again, or see in the gateway's log whether the NATS server refuses it"
                )
            }),
        })?;
        let taken = reply.inspect_err(|_| self.metrics.gathered(GatherOutcome::Refused))?;
        Ok((taken, gathered))
    }

    /// Asks the shards for their namespaces, so that the gateway learns whether it may ask them. Asks again while it is
    /// not known whether the server lets it, and while the server refuses. Never returns.
    pub(super) async fn try_rights(&self) {
        let mut turns = tokio::time::interval(TRY_INTERVAL);
        let mut is_let = false;
        loop {
            turns.tick().await;
            if is_let && self.missing.refused(unix_time_us()).is_none() {
                continue;
            }
            let asked = self.reports.namespaces(self.deadline).await;
            is_let = matches!(asked, Ok(_) | Err(ClientError::NoDaemon { .. }));
        }
    }

    fn check_size(&self, payload: &Bytes) -> Result<(), WireError> {
        let (bytes, bytes_max) = (payload.len(), self.gatherer.request_bytes_max());
        if bytes <= bytes_max {
            return Ok(());
        }
        let text = format!(
            "the request has {bytes} bytes for the shards, the server takes {bytes_max}; send hashes, or less at once"
        );
        Err(WireError::new(ErrorCode::TooLarge, text))
    }

    /// Returns the status of every namespace that at least one shard knows.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::status`], and an error if a shard is missing, because that shard may know other
    /// namespaces.
    pub(crate) async fn statuses(&self) -> Result<Vec<(NamespaceName, StatusReply)>, WireError> {
        let names = self.names().await?.namespaces;
        let mut statuses = Vec::with_capacity(names.len());
        for name in names {
            match self.status(&name, HeaderMap::new()).await {
                Ok(status) => {
                    status
                        .gathered
                        .iter()
                        .try_for_each(|gathered| self.check_whole(gathered))?;
                    statuses.push((name, status));
                }
                // The namespace has been forgotten since.
                Err(error) if error.code == ErrorCode::UnknownNamespace => {}
                Err(error) => return Err(error),
            }
        }
        Ok(statuses)
    }

    /// Returns the names of all namespaces that at least one shard knows, in order.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::statuses`].
    pub(crate) async fn names(&self) -> Result<NamespacesReply, WireError> {
        let (names, gathered) = self.gather_names().await?;
        self.check_whole(&gathered)?;
        Ok(names)
    }

    /// Returns the names of all namespaces that the answering shards know. Some shards may not answer.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::status`].
    #[cfg(feature = "redis")]
    pub(crate) async fn names_so_far(&self) -> Result<NamespacesReply, WireError> {
        let (names, _) = self.gather_names().await?;
        Ok(names)
    }

    async fn gather_names(&self) -> Result<(NamespacesReply, Gathered), WireError> {
        let merged = self.gatherer.namespaces(self.deadline).await;
        let merged = merged.map_err(|error| self.failed(&error))?;
        let gathered = merged.gathered.clone();
        let reply = self.count(None, merged)?;
        Ok((reply, gathered))
    }

    fn check_whole(&self, gathered: &Gathered) -> Result<(), WireError> {
        if gathered.missing.is_empty() {
            return Ok(());
        }
        let missing = gathered.missing_in_words();
        let text = format!("{missing} did not answer, and may know other workers; ask again");
        Err(WireError::new(ErrorCode::Unavailable, text))
    }

    /// Counts an answer or a refusal of the shards, and returns it. `namespace` is the namespace that it is about; `None`
    /// if it is about all namespaces. Notes the shards that are missing from it: a shard that alone knows a namespace is
    /// missing from a refusal.
    fn count<T>(&self, namespace: Option<&NamespaceName>, merged: Merged<T>) -> Result<T, WireError> {
        let Merged {
            reply,
            gathered,
            refused,
        } = merged;
        let missing = &gathered.missing;
        self.missing.note(namespace, &gathered, &refused, unix_time_us());
        self.metrics.gathered(match reply {
            Err(_) => GatherOutcome::Refused,
            Ok(_) if missing.is_empty() => GatherOutcome::Complete,
            Ok(_) => GatherOutcome::Partial,
        });
        missing
            .iter()
            .for_each(|index| self.metrics.shard_missing(*index));
        reply
    }

    /// Counts a failed question to the shards, and returns the error for the client, see [`Self::unanswered`]. Notes an
    /// outage, except for a question that was refused or could not be sent.
    fn failed(&self, error: &ClientError) -> WireError {
        if let ClientError::NoDaemon { .. } | ClientError::TimedOut { .. } | ClientError::Connection(_) =
            error
        {
            self.missing.note_outage(&error.to_string(), unix_time_us());
        }
        self.unanswered(error, || match self.missing.refused(unix_time_us()) {
            Some(refusal) => format!(
                "the NATS server does not let the gateway ask the shards: {refusal}; give its user the rights of a gateway"
            ),
            None => format!("no shard answered the gateway: {error}; ask again, or start the shards"),
        })
    }

    /// Counts a failed request to the shards, and returns the error for the client. One shard has refused the request
    /// with a code of a later version, or none has answered it, which `unavailable` puts into words.
    fn unanswered(&self, error: &ClientError, unavailable: impl FnOnce() -> String) -> WireError {
        if let ClientError::RefusedOtherwise { .. } = error {
            self.metrics.gathered(GatherOutcome::Refused);
            let text = format!("a shard refuses the request: {error}");
            return WireError::new(ErrorCode::BadRequest, text);
        }
        self.metrics.gathered(GatherOutcome::Unanswered);
        WireError::new(ErrorCode::Unavailable, unavailable())
    }

    /// Returns the approximate number of bytes of the replies that have been taken from the connection since the last
    /// call.
    pub(super) fn take_reply_bytes(&self) -> u64 {
        self.gatherer.take_reply_bytes() + self.reports.take_reply_bytes()
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

    use super::*;

    #[tokio::test]
    async fn a_report_without_an_answer_is_no_outage() {
        let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
            .await
            .unwrap();
        let nats = async_nats::connect(broker.url()).await.unwrap();
        // The connection has a subscription to everything, and nobody answers.
        let _silent = nats.subscribe("kvatlas.>").await.unwrap();
        let (subjects, missing) = (
            Subjects::new("kvatlas").unwrap(),
            Arc::new(MissingShards::default()),
        );
        let deadline = Duration::from_millis(1);
        let asker = ShardAsker::new(nats, &subjects, 1, deadline, Arc::clone(&missing));
        let (asker, namespace) = (asker.await.unwrap(), NamespaceName::new("m").unwrap());
        let refused = asker.tell_hints(&namespace, Vec::new()).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unavailable);
        assert_eq!(missing.outage(unix_time_us()), None);
        asker.status(&namespace, HeaderMap::new()).await.unwrap_err();
        assert!(missing.outage(unix_time_us()).is_some());
    }
}
