//! Gatherer: sends a request to all shards, and merges their replies into one answer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, StatusCode};
use bytes::Bytes;
use tokio::time::Instant;

use kvatlas_core::wire::{
    BatchReply, ErrorCode, Gathered, NamespaceName, NamespacesReply, PROTOCOL_VERSION, QueryOptions,
    QueryReply, ReportReply, SHARD_HEADER, Shard, SingleQuery, StatusReply, Subjects, WireError,
};

use super::super::error::ClientError;
use super::super::query::refusal;
use super::collection::{Collection, Division};
use super::inbox::{Replies, ReplyInbox};
use super::merge::{ShardAnswer, merge_replies, merge_results, merge_statuses, sort_out};

/// Maximum total size, in bytes, of the replies to one request that are kept.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// A merged answer, with the shards that it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged<T> {
    /// The merged answer.
    pub reply: T,
    /// Shards that gave the answer, and shards that are missing.
    pub gathered: Gathered,
    /// Refusals of missing shards that did reply, in words, by the shard's index.
    pub refused: BTreeMap<u32, String>,
}

/// Sends requests to all shards, and merges their replies. Cheap to clone; several requests can run at the same time.
#[derive(Debug, Clone)]
pub struct Gatherer {
    nats: Client,
    /// The subjects of the shards.
    subjects: Subjects,
    inbox: ReplyInbox,
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
        })
    }

    /// Sends an encoded query (`payload`) to all shards, with `headers`, and merges the answers. `options` must be the
    /// options of that query, because merging depends on them. Waits for `patience` at most.
    ///
    /// # Errors
    ///
    /// [`ClientError::NoDaemon`] and [`ClientError::TimedOut`] if no shard answered. [`ClientError::Refused`] if the shards
    /// refused, or if their answers cannot be merged.
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
        merge(division, QueryReply::decode, |replies, gathered| {
            merge_replies(replies, options, gathered)
        })
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
        merge(division, BatchReply::decode, |replies, gathered| {
            let lists = replies.into_iter().map(|reply| reply.results).collect();
            Ok(BatchReply {
                v: PROTOCOL_VERSION,
                results: merge_results(lists, queries, gathered)?,
            })
        })
    }

    /// Asks one daemon of every shard for the status of a namespace, and merges the answers. The status tells how far that daemon
    /// has followed each holder. The request has the `headers`. Waits for `patience` at most.
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
        merge(division, StatusReply::decode, merge_statuses)
    }

    /// Asks one daemon of every shard for the names of the namespaces that it knows. Waits for `patience` at most. The same name
    /// may occur several times in the answer.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::query`].
    pub async fn namespaces(&self, patience: Duration) -> Result<Merged<NamespacesReply>, ClientError> {
        let subject = self.subjects.namespaces();
        let division = self
            .gather(subject, Bytes::new(), HeaderMap::new(), patience)
            .await?;
        merge(division, NamespacesReply::decode, |replies, _| {
            Ok(NamespacesReply {
                v: PROTOCOL_VERSION,
                namespaces: replies.into_iter().flat_map(|reply| reply.namespaces).collect(),
            })
        })
    }

    /// Sends a router's encoded report (`payload`) to every shard, on `subject`. Returns the total number of entries
    /// that the shards have accepted. Waits for `patience` at most. If several replicas of a shard reply, the first
    /// reply counts.
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
        merge(division, ReportReply::decode, |replies, _| {
            Ok(replies
                .iter()
                .map(|reply| reply.taken)
                .fold(0, u64::saturating_add))
        })
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

    async fn gather(
        &self,
        subject: String,
        payload: Bytes,
        headers: HeaderMap,
        patience: Duration,
    ) -> Result<Division<Message>, ClientError> {
        let deadline = Instant::now() + patience;
        let replies = self.inbox.expect();
        let (reply_to, asked) = (replies.reply_to.clone(), subject.clone());
        // Empty headers would still be sent, as a message with headers.
        let sent = match headers.is_empty() {
            true => self.nats.publish_with_reply(asked, reply_to, payload).await,
            false => {
                let sent = self
                    .nats
                    .publish_with_reply_and_headers(asked, reply_to, headers, payload);
                sent.await
            }
        };
        sent.map_err(|error| ClientError::Connection(error.to_string()))?;
        match collect(replies, deadline).await {
            Some(collection) => collection
                .into_best()
                .ok_or(ClientError::TimedOut { subject, patience }),
            None => Err(ClientError::NoDaemon { subject }),
        }
    }
}

/// Collects replies until all shards of one division (way to divide the workers) have replied, or until `deadline`.
/// `None` if no daemon is subscribed.
async fn collect(mut replies: Replies, deadline: Instant) -> Option<Collection<Message>> {
    let mut collection = Collection::within(REPLY_BYTES_MAX);
    while let Ok(Some(reply)) = tokio::time::timeout_at(deadline, replies.next()).await {
        if reply.status == Some(StatusCode::NO_RESPONDERS) {
            return None;
        }
        let Some(shard) = shard_of(&reply) else {
            tracing::debug!(subject = %reply.subject, "a reply names no shard");
            continue;
        };
        let bytes = reply.payload.len();
        if collection.add(shard, reply, bytes) {
            break;
        }
    }
    Some(collection)
}

/// Returns the shard that a reply's header names; `None` if it names none.
fn shard_of(reply: &Message) -> Option<Shard> {
    let header = reply.headers.as_ref()?.get(SHARD_HEADER)?;
    header.as_str().parse().ok()
}

/// Decodes the replies of one division (way to divide the workers into shards), and merges them. A shard counts as
/// missing if it could not answer, or if its reply cannot be decoded.
fn merge<Reply, Whole>(
    division: Division<Message>,
    decode: impl Fn(&[u8]) -> Result<Reply, rmp_serde::decode::Error>,
    merge: impl FnOnce(Vec<Reply>, &Gathered) -> Result<Whole, WireError>,
) -> Result<Merged<Whole>, ClientError> {
    let mut missing: BTreeSet<u32> = (0..division.shards).collect();
    let mut refused = BTreeMap::new();
    let mut answers: Vec<ShardAnswer<Reply>> = Vec::with_capacity(division.replies.len());
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
    let replies = sort_out(answers, &gathered, &refused)?;
    let reply = merge(replies, &gathered)?;
    Ok(Merged {
        reply,
        gathered,
        refused,
    })
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
        Some(ClientError::Refused(error))
            if !matches!(error.code, ErrorCode::Unavailable | ErrorCode::TooManyRequests) =>
        {
            Ok(Err(error))
        }
        Some(ClientError::Refused(error)) => Err(error.text),
        Some(error) => Err(error.to_string()),
    }
}
