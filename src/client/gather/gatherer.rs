//! Gatherer: sends a request to all shards, and merges their replies into one answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, StatusCode};
use bytes::Bytes;

use kvatlas_core::wire::{
    BatchReply, ErrorCode, Gathered, NamespaceName, NamespacesReply, PROTOCOL_VERSION, QueryOptions,
    QueryReply, ReportReply, SHARD_HEADER, Shard, SingleQuery, StatusReply, Subjects, WireError,
};

use super::super::error::ClientError;
use super::super::query::refusal;
use super::collection::{Collection, Division, ReplyUse};
use super::inbox::{Replies, ReplyInbox};
use super::merge::{ShardAnswer, merge_replies, merge_results, merge_statuses, sort_out};
use super::sending::{Resends, ShardRequest};

/// Maximum total size, in bytes, of the replies to one request that are kept.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// A merged answer or refusal, with the shards that it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged<T> {
    /// The merged answer. An error if the shards refuse the request, if their answers cannot be merged, or if a missing shard
    /// may know a namespace that the others do not know.
    pub reply: Result<T, WireError>,
    /// Shards that gave the answer, and shards that are missing.
    pub gathered: Gathered,
    /// Error texts of shards that replied with a refusal, by the shard's index. Such a shard also counts as missing.
    pub refused: BTreeMap<u32, String>,
}

/// Sends requests to all shards, and merges their replies. Cheap to clone; several requests can run at the same time.
#[derive(Debug, Clone)]
pub struct Gatherer {
    nats: Client,
    /// The subjects of the shards.
    subjects: Subjects,
    inbox: ReplyInbox,
    /// Number of shards of the division (way to divide the workers) that gave the last whole answer; 0 if there is
    /// none.
    answered_last: Arc<AtomicU32>,
    /// Whether a request is sent again in these cases: the connection was made anew, half of the patience has passed,
    /// or no daemon listens.
    is_sent_again: bool,
}

impl Gatherer {
    /// Makes a gatherer on the connection `nats`, for the prefix of `subjects`.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection is closed.
    pub async fn new(nats: Client, subjects: &Subjects) -> Result<Self, ClientError> {
        let inbox = ReplyInbox::open(&nats).await?;
        Ok(Self {
            nats,
            subjects: subjects.of_shards(),
            inbox,
            answered_last: Arc::default(),
            is_sent_again: false,
        })
    }

    /// Lets each request be sent again in the cases that [`QueryClient`](crate::QueryClient) describes. Shards may then
    /// receive a request twice, so this must not be used for reports: they would count twice.
    pub(crate) fn sending_again(self) -> Self {
        Self {
            is_sent_again: true,
            ..self
        }
    }

    /// Sends an encoded query (`payload`) to all shards, with `headers`, and merges the answers. `options` must be the
    /// options of that query, because merging depends on them. Waits for `patience` at most.
    ///
    /// # Errors
    ///
    /// [`ClientError::NoDaemon`] and [`ClientError::TimedOut`] if no shard answered.
    pub async fn query(
        &self,
        namespace: &NamespaceName,
        options: &QueryOptions,
        payload: Bytes,
        headers: HeaderMap,
        patience: Duration,
    ) -> Result<Merged<QueryReply>, ClientError> {
        let subject = self.subjects.query(namespace);
        let division = self.gather(subject, payload, headers, patience).await?;
        Ok(merge(division, QueryReply::decode, |replies, gathered| {
            merge_replies(replies, options, gathered)
        }))
    }

    /// Sends an encoded batch of queries (`payload`) to all shards, with `headers`, and merges the answers. `queries`
    /// must be the queries in `payload`. Waits for `patience` at most.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::query`].
    pub async fn query_batch(
        &self,
        namespace: &NamespaceName,
        queries: &[SingleQuery],
        payload: Bytes,
        headers: HeaderMap,
        patience: Duration,
    ) -> Result<Merged<BatchReply>, ClientError> {
        let subject = self.subjects.query(namespace);
        let division = self.gather(subject, payload, headers, patience).await?;
        Ok(merge(division, BatchReply::decode, |replies, gathered| {
            let lists = replies.into_iter().map(|reply| reply.results).collect();
            Ok(BatchReply {
                v: PROTOCOL_VERSION,
                results: merge_results(lists, queries, gathered)?,
            })
        }))
    }

    /// Asks one daemon of every shard for the status of a namespace, and merges the answers. The status tells for each
    /// holder how far the daemon has applied its batches. The request has the `headers`. Waits for `patience` at most.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::query`].
    pub async fn status(
        &self,
        namespace: &NamespaceName,
        headers: HeaderMap,
        patience: Duration,
    ) -> Result<Merged<StatusReply>, ClientError> {
        let subject = self.subjects.status(namespace);
        let division = self.gather(subject, Bytes::new(), headers, patience).await?;
        Ok(merge(division, StatusReply::decode, merge_statuses))
    }

    /// Asks one daemon of every shard for the names of the namespaces that it knows, and merges the answers, see
    /// [`NamespacesReply::merged`]. If a shard is missing, so may be names. Waits for `patience` at most.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::query`].
    pub async fn namespaces(&self, patience: Duration) -> Result<Merged<NamespacesReply>, ClientError> {
        let subject = self.subjects.namespaces();
        let division = self
            .gather(subject, Bytes::new(), HeaderMap::new(), patience)
            .await?;
        Ok(merge(division, NamespacesReply::decode, |replies, gathered| {
            let mut reply = NamespacesReply::merged(&replies);
            if !gathered.missing.is_empty() {
                (reply.complete, reply.unused) = (Some(false), None);
            }
            Ok(reply)
        }))
    }

    /// Sends a router's encoded report (`payload`) to every shard, on `subject`. Returns the total number of entries
    /// that the shards have accepted. Waits for `patience` at most. If several replicas of a shard reply, the first
    /// reply counts. A shard that refuses its own entries refuses the report only if no shard has accepted any.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::query`].
    pub async fn report(
        &self,
        subject: String,
        payload: Bytes,
        patience: Duration,
    ) -> Result<Merged<u64>, ClientError> {
        let division = self.gather(subject, payload, HeaderMap::new(), patience).await?;
        Ok(merge_reports(division))
    }

    /// Returns the length of the longest request that the server takes, in bytes.
    pub fn request_bytes_max(&self) -> usize {
        match self.nats.max_payload() {
            0 => usize::MAX,
            bytes_max => bytes_max,
        }
    }

    /// Returns the number of late replies since the last call. A reply is late if its request no longer waits for it.
    pub fn take_late_replies(&self) -> u64 {
        self.inbox.take_late()
    }

    /// Returns the number of bytes of the replies that have come since the last call, in time or late.
    pub fn take_reply_bytes(&self) -> u64 {
        self.inbox.take_bytes()
    }

    async fn gather(
        &self,
        subject: String,
        payload: Bytes,
        headers: HeaderMap,
        patience: Duration,
    ) -> Result<Division<Message>, ClientError> {
        let replies = self.inbox.expect();
        let request = ShardRequest {
            subject,
            reply_to: replies.reply_to.clone(),
            payload,
            headers,
        };
        let expected = self.answered_last.load(Ordering::Relaxed);
        let mut collection = Collection::within(REPLY_BYTES_MAX, (expected > 0).then_some(expected));
        let asking = self.ask(&request, replies, patience, &mut collection);
        if let Ok(asked) = tokio::time::timeout(patience, asking).await {
            asked?;
        } else if collection.is_empty() {
            self.inbox.subscribe_again();
        }
        let answered = collection.expected_next().unwrap_or_default();
        self.answered_last.store(answered, Ordering::Relaxed);
        let subject = request.subject;
        let division = collection
            .into_best()
            .ok_or(ClientError::TimedOut { subject, patience })?;
        match refused_otherwise(&division) {
            Some(error) => Err(error),
            None => Ok(division),
        }
    }

    /// Sends a request, and collects replies until collecting ends, see [`Collection::add`].
    async fn ask(
        &self,
        request: &ShardRequest,
        mut replies: Replies,
        patience: Duration,
        collection: &mut Collection<Message>,
    ) -> Result<(), ClientError> {
        let mut resends = self.is_sent_again.then(|| Resends::of(&self.nats, patience));
        request.send(&self.nats).await?;
        loop {
            tokio::select! {
                reply = replies.next() => match reply {
                    Some(reply) if reply.status == Some(StatusCode::NO_RESPONDERS) => {
                        let is_sent_again = match &mut resends {
                            Some(resends) => resends.next_for_nobody().await,
                            None => false,
                        };
                        if !is_sent_again && collection.is_empty() {
                            let subject = request.subject.clone();
                            return Err(ClientError::NoDaemon { subject });
                        }
                        if !is_sent_again {
                            return Ok(());
                        }
                        request.send(&self.nats).await?;
                    }
                    Some(reply) => {
                        if take(collection, reply) {
                            return Ok(());
                        }
                    }
                    None => return Ok(()),
                },
                again = next(&mut resends, request) => {
                    again?;
                    request.send(&self.nats).await?;
                }
            }
        }
    }
}

/// Waits until the request is to be sent again. Waits without end if it is sent only once.
async fn next(resends: &mut Option<Resends>, request: &ShardRequest) -> Result<(), ClientError> {
    match resends {
        Some(resends) => resends.next(request).await,
        None => std::future::pending().await,
    }
}

/// Adds a reply to the collection. Returns whether collecting ends.
fn take(collection: &mut Collection<Message>, reply: Message) -> bool {
    let Some(shard) = shard_of(&reply) else {
        tracing::debug!(subject = %reply.subject, "a reply names no shard");
        return false;
    };
    let (reply_use, bytes) = (use_of(&reply), reply.payload.len());
    collection.add(shard, reply_use, reply, bytes)
}

/// Returns the use of a reply, by its error code.
fn use_of(reply: &Message) -> ReplyUse {
    match refusal(reply) {
        Some(ClientError::Refused(error)) => match error.code {
            ErrorCode::UnknownNamespace => ReplyUse::Unknown,
            ErrorCode::Unavailable | ErrorCode::TooManyRequests => ReplyUse::Refusal,
            _ => ReplyUse::Answer,
        },
        _ => ReplyUse::Answer,
    }
}

/// Returns the error with a code that this client does not know, if a shard replied with one. An error that does not ask
/// for patience is about the request. So such an error is the answer.
fn refused_otherwise(division: &Division<Message>) -> Option<ClientError> {
    let mut errors = division.replies.values().filter_map(refusal);
    errors.find(|error| matches!(error, ClientError::RefusedOtherwise { .. }))
}

/// Returns the shard that a reply's header names; `None` if it names none.
fn shard_of(reply: &Message) -> Option<Shard> {
    let header = reply.headers.as_ref()?.get(SHARD_HEADER)?;
    header.as_str().parse().ok()
}

/// Merges the replies to a report. See [`Gatherer::report`].
fn merge_reports(division: Division<Message>) -> Merged<u64> {
    let ShardAnswers {
        mut answers,
        gathered,
        refused,
    } = ShardAnswers::of(division, ReportReply::decode);
    if answers.iter().flatten().any(|reply| reply.taken > 0) {
        let is_bad = |error: &WireError| error.code == ErrorCode::BadRequest;
        answers.retain(|answer| !answer.as_ref().is_err_and(is_bad));
    }
    let reply = sort_out(answers, &gathered, &refused).map(|replies| {
        let taken = replies.iter().map(|reply| reply.taken);
        taken.fold(0, u64::saturating_add)
    });
    Merged {
        reply,
        gathered,
        refused,
    }
}

/// Answers of the shards of one division (way to divide the workers into shards). A shard counts as missing if it could not
/// answer, or if its reply cannot be decoded.
struct ShardAnswers<T> {
    answers: Vec<ShardAnswer<T>>,
    gathered: Gathered,
    /// Reasons, in words, why replies are of no use, by the shard's index.
    refused: BTreeMap<u32, String>,
}

impl<T> ShardAnswers<T> {
    /// Decodes the replies of a division.
    fn of(
        division: Division<Message>,
        decode: impl Fn(&[u8]) -> Result<T, rmp_serde::decode::Error>,
    ) -> Self {
        let mut missing: BTreeSet<u32> = (0..division.shards).collect();
        let mut refused = BTreeMap::new();
        let mut answers = Vec::with_capacity(division.replies.len());
        for (index, message) in division.replies {
            match answered(&message, &decode) {
                Ok(answer) => {
                    missing.remove(&index);
                    answers.push(answer);
                }
                Err(words) => {
                    tracing::debug!(shard = index, words, "a shard's reply is of no use");
                    refused.insert(index, words);
                }
            }
        }
        let gathered = Gathered {
            shards: division.shards,
            missing: missing.into_iter().collect(),
        };
        Self {
            answers,
            gathered,
            refused,
        }
    }
}

/// Decodes the replies of one division, and merges them.
fn merge<Reply, Whole>(
    division: Division<Message>,
    decode: impl Fn(&[u8]) -> Result<Reply, rmp_serde::decode::Error>,
    merge: impl FnOnce(Vec<Reply>, &Gathered) -> Result<Whole, WireError>,
) -> Merged<Whole> {
    let ShardAnswers {
        answers,
        gathered,
        refused,
    } = ShardAnswers::of(division, decode);
    let reply = sort_out(answers, &gathered, &refused).and_then(|replies| merge(replies, &gathered));
    Merged {
        reply,
        gathered,
        refused,
    }
}

/// Decodes the answer of a shard. Returns the reason in words if the shard refuses to answer now, or if the answer cannot be
/// decoded.
fn answered<Reply>(
    message: &Message,
    decode: impl Fn(&[u8]) -> Result<Reply, rmp_serde::decode::Error>,
) -> Result<ShardAnswer<Reply>, String> {
    match refusal(message) {
        None => decode(&message.payload)
            .map(Ok)
            .map_err(|error| ClientError::from(error).to_string()),
        Some(ClientError::Refused(error)) if use_of(message) != ReplyUse::Refusal => Ok(Err(error)),
        Some(ClientError::Refused(error)) => Err(error.text),
        Some(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::ERROR_CODE_HEADER;

    use super::*;

    fn reply(code: Option<&str>) -> Message {
        let mut headers = HeaderMap::new();
        if let Some(code) = code {
            headers.insert(ERROR_CODE_HEADER, code);
        }
        Message {
            subject: "inbox".into(),
            reply: None,
            payload: Bytes::new(),
            headers: Some(headers),
            status: None,
            description: None,
            length: 0,
        }
    }

    #[test]
    fn a_report_is_refused_where_no_shard_has_taken_any_of_it() {
        let taking = |taken| Message {
            payload: ReportReply { v: 1, taken }.encode().into(),
            ..reply(None)
        };
        let refusing = || Message {
            payload: Bytes::new(),
            ..reply(Some("400"))
        };
        let merged = |replies: [Message; 2]| {
            let division = Division {
                shards: 2,
                replies: (0..).zip(replies).collect(),
            };
            merge_reports(division)
        };
        let whole = merged([taking(3), refusing()]);
        assert_eq!((whole.reply, whole.gathered.missing), (Ok(3), Vec::new()));
        for none in [[taking(0), refusing()], [refusing(), refusing()]] {
            assert_eq!(merged(none).reply.unwrap_err().code, ErrorCode::BadRequest);
        }
    }

    #[test]
    fn an_error_of_a_later_version_is_the_answer() {
        let uses = [
            None,
            Some("799"),
            Some("413"),
            Some("404"),
            Some("429"),
            Some("503"),
        ]
        .map(|code| use_of(&reply(code)));
        let expected = [
            ReplyUse::Answer,
            ReplyUse::Answer,
            ReplyUse::Answer,
            ReplyUse::Unknown,
            ReplyUse::Refusal,
            ReplyUse::Refusal,
        ];
        assert_eq!(uses, expected);
        let division = |codes: [Option<&str>; 2]| Division {
            shards: 2,
            replies: (0..).zip(codes.map(reply)).collect(),
        };
        let refused = refused_otherwise(&division([None, Some("799")]));
        assert!(matches!(refused, Some(ClientError::RefusedOtherwise { code, .. }) if code == "799"));
        assert!(refused_otherwise(&division([Some("413"), Some("503")])).is_none());
    }
}
