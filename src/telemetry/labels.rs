//! Label values as enums, so that no free text becomes a label.
//!
//! Dashboards and alerts rely on the spelling of the values: add values freely, but don't rename them.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use kvatlas_core::index::RejectReason;
use kvatlas_core::snapshot::SnapshotError;
use kvatlas_core::wire::{DegradedReason, ErrorCode};

/// Namespace label of messages without an admitted namespace, such as messages with a malformed subject. A real name is
/// a token of a subject and has no brackets, so the label is never a namespace's name.
pub const UNATTRIBUTED_NAMESPACE: &str = "(none)";

/// Namespace label that all further namespaces share when [`NAMESPACE_LABELS_MAX`] namespaces have labels of their own.
pub const OTHER_NAMESPACES: &str = "(others)";
/// Maximum number of namespaces whose names become labels while the process lives. The number is bounded, because a series stays
/// until the process ends, even if its namespace is gone.
pub const NAMESPACE_LABELS_MAX: usize = 4096;

/// Returns the label of an admitted namespace: its name, or [`OTHER_NAMESPACES`].
pub fn namespace_label(name: &str) -> &str {
    static LABELLED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut labelled = LABELLED.lock();
    if labelled.contains(name) {
        return name;
    }
    if labelled.len() >= NAMESPACE_LABELS_MAX {
        return OTHER_NAMESPACES;
    }
    labelled.insert(name.to_owned());
    name
}

/// A closed set of label values.
pub trait LabelValue: Copy + 'static {
    /// Key of the label.
    const KEY: &'static str;

    /// All values, in the order of [`LabelValue::index`].
    const ALL: &'static [Self];

    /// Returns the text that appears as the label's value.
    fn as_str(self) -> &'static str;

    /// Returns the meaning of this value, as its documentation says it.
    fn meaning(self) -> &'static str;

    /// Returns the position of this value in [`LabelValue::ALL`].
    fn index(self) -> usize;
}

/// Declares an enum of label values: the key of the label, then each variant with its spelling.
macro_rules! label_values {
    ($(#[$enum_attribute:meta])* $enum_name:ident: $key:literal {
        $($(#[doc = $doc:literal])* $variant:ident => $text:literal,)+
    }) => {
        $(#[$enum_attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $enum_name {
            $($(#[doc = $doc])* $variant,)+
        }

        impl LabelValue for $enum_name {
            const KEY: &'static str = $key;
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!($($doc),*),)+
                }
            }

            fn index(self) -> usize {
                self as usize
            }
        }

        impl std::fmt::Display for $enum_name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.as_str())
            }
        }
    };
}

mod dynamo;
mod grpc;
mod http;
mod redis;
mod told;

pub use dynamo::DynamoOutcome;
pub use grpc::{GrpcMethod, GrpcOutcome, ReportLoss, ReportState};
pub use http::{HttpOutcome, HttpRoute};
pub use redis::{GuessDrop, RedisCommand, RedisRefusal};
pub use told::{HintDrop, OutcomeRefusal};

label_values! {
    /// Reason why a whole batch was dropped without a change to the index.
    DropReason: "reason" {
        /// The sequence number was applied before: the message is a redelivery, or the publisher sent the batch again.
        Duplicate => "duplicate",
        /// The batch comes from an incarnation of the publisher that has been replaced by a newer one.
        StaleEpoch => "stale_epoch",
        /// The payload is not a valid batch.
        Undecodable => "undecodable",
        /// The payload is larger than the configured limit.
        Oversized => "oversized",
        /// The subject doesn't name a namespace and a worker.
        BadSubject => "bad_subject",
        /// The epoch of the batch lies further ahead of the daemon's clock than `events.max_epoch_ahead_seconds`
        /// allows.
        EpochAhead => "epoch_ahead",
        /// The namespace is new, and the configured number of namespaces has been reached.
        TooManyNamespaces => "too_many_namespaces",
        /// The namespace is new, and only those that the configuration names may exist.
        NamespaceNotNamed => "namespace_not_named",
        /// The worker is new, and the configured number of workers has been reached.
        TooManyWorkers => "too_many_workers",
        /// The data-parallel rank is new, and the configured number of ranks has been reached.
        TooManyRanks => "too_many_ranks",
        /// The batch has another block size than its holder's namespace. Or it is part of a snapshot that was written while the
        /// namespace had another hashing or block size.
        OtherSettings => "other_settings",
        /// The queue in front of the worker's lane (the thread that applies its events) was full.
        LaneFull => "lane_full",
        /// The lane (thread) that should apply the batch takes no more work.
        LaneStopped => "lane_stopped",
    }
}

label_values! {
    /// Reason why a resync did not make a holder exact.
    ResyncFailure: "reason" {
        /// The holder's resync subject has no subscriber: its publisher is gone, or does not know the protocol of resyncs.
        NoResponder => "no_responder",
        /// The publisher said that it can't answer now.
        Refused => "refused",
        /// The publisher's answer was not complete within `resync.timeout_ms`.
        TimedOut => "timed_out",
        /// The connection broke, or lost messages.
        Disconnected => "disconnected",
        /// A chunk of the answer, or a batch in a chunk, cannot be decoded.
        Undecodable => "undecodable",
        /// A chunk is about a rank that was not asked for.
        WrongRank => "wrong_rank",
        /// Only outdated incarnations of the publisher answered.
        StaleEpoch => "stale_epoch",
        /// The publisher's answer ends at an earlier batch than the last one that the daemon had received when it
        /// asked.
        CursorBehind => "cursor_behind",
        /// The epoch of the publisher's answer lies further ahead of the daemon's clock than
        /// `events.max_epoch_ahead_seconds` allows.
        EpochAhead => "epoch_ahead",
        /// A chunk is missing, or came twice or out of order.
        OutOfOrder => "out_of_order",
        /// Two chunks of the publisher's answer contradict each other, or a chunk contradicts the daemon's request.
        Contradiction => "contradiction",
        /// The answer does not have the missing batches in their order. Or the answer is a full state, and has events
        /// of another kind than stored blocks and doubted blocks.
        WrongBatches => "wrong_batches",
        /// The blocks in the answer are named by hashes of another scheme than the namespace uses.
        OtherSettings => "other_settings",
        /// The answer has more chunks or bytes than allowed.
        TooLarge => "too_large",
        /// More new batches came during the resync than the lane (the thread that applies events) may hold back. Or
        /// something other than this resync replaced the holder's state.
        Superseded => "superseded",
        /// The daemon applied the publisher's answer, but the holder is still not exact: further batches are missing,
        /// or blocks were rejected.
        Incomplete => "incomplete",
    }
}

label_values! {
    /// Reason why a snapshot was not written.
    SnapshotFailure: "reason" {
        /// There is no room on the disk.
        DiskFull => "disk_full",
        /// The directory cannot be used, or a file cannot be made there.
        Directory => "directory",
        /// The content of the snapshot could not be written to the file.
        Write => "write",
        /// The file or the directory could not be flushed to the disk.
        Sync => "sync",
        /// The file could not be renamed to its final name.
        Rename => "rename",
        /// Another snapshot is being written.
        Busy => "busy",
        /// A lane (thread that applies events), which dumps its holders, takes no more work.
        LaneStopped => "lane_stopped",
        /// The task that writes the snapshot ended before the snapshot was complete.
        Interrupted => "interrupted",
    }
}

label_values! {
    /// Reason why a snapshot that was found at start was not loaded.
    SnapshotRejection: "reason" {
        /// The file cannot be read.
        Unreadable => "unreadable",
        /// The file is no snapshot, or has a version that this build does not know.
        Unknown => "unknown",
        /// The file ends before its content is complete.
        Truncated => "truncated",
        /// The content of the file is not as it was written, or contradicts itself.
        Damaged => "damaged",
        /// The file is larger than the limit.
        TooLarge => "too_large",
    }
}

impl From<&SnapshotError> for SnapshotRejection {
    fn from(error: &SnapshotError) -> Self {
        match error {
            SnapshotError::Io(_) => Self::Unreadable,
            SnapshotError::NotASnapshot | SnapshotError::Version { .. } => Self::Unknown,
            SnapshotError::Truncated { .. } => Self::Truncated,
            SnapshotError::TooLong | SnapshotError::FrameTooLong { .. } => Self::TooLarge,
            SnapshotError::HeaderChecksum
            | SnapshotError::Compression { .. }
            | SnapshotError::MisplacedStream { .. }
            | SnapshotError::FrameChecksum { .. }
            | SnapshotError::UnknownKind { .. }
            | SnapshotError::Undecodable { .. }
            | SnapshotError::Forest { .. }
            | SnapshotError::MisplacedForest { .. }
            | SnapshotError::BatchWithoutHolder { .. }
            | SnapshotError::Totals { .. }
            | SnapshotError::TrailingBytes => Self::Damaged,
        }
    }
}

label_values! {
    /// Reason why a bridge ended a connection to an engine.
    FrameFault: "reason" {
        /// A frame is longer than 32 MiB.
        FrameTooLong => "frame_too_long",
        /// The frames of a message are longer than 64 MiB together.
        MessageTooLong => "message_too_long",
        /// A message has more than 16 frames.
        TooManyFrames => "too_many_frames",
        /// A command of the protocol is longer than 4 KiB.
        CommandTooLong => "command_too_long",
    }
}

label_values! {
    /// Reason why blocks of an engine are not republished for routers.
    RepublishOmission: "reason" {
        /// The memory for an engine's blocks is full.
        Full => "full",
        /// The engine's blocks have more than 4,096 combinations of salt and adapter at a time.
        Salts => "salts",
        /// The prompt of the blocks has a salt, an adapter or an image, so they differ from the blocks of a plain prompt.
        Special => "special",
        /// The tokens of the blocks, or of a block before them, are not known.
        Unknown => "unknown",
    }
}

label_values! {
    /// Reason why a bridge ended the connection of a router that subscribes to the republished events of an engine.
    RepublishCut: "reason" {
        /// The router reads too slowly.
        Slow => "slow",
        /// The router sends more than subscriptions and questions need.
        TooMuch => "too_much",
        /// The router does not speak ZMTP 3 as a subscriber does.
        Protocol => "protocol",
        /// There are too many connections.
        TooMany => "too_many",
    }
}

label_values! {
    /// Kind of source in which a bridge looks for engines.
    EngineSource: "source" {
        /// The addresses of a DNS name.
        Dns => "dns",
        /// Files that list engines.
        File => "file",
        /// Records that Dynamo's workers write.
        Dynamo => "dynamo",
        /// Pods, pools or endpoint slices of Kubernetes.
        Kubernetes => "kubernetes",
    }
}

label_values! {
    /// Reason why the consumer of the events stream was made anew.
    ConsumerReset: "reason" {
        /// The connection to the server broke.
        Connection => "connection",
        /// The server was silent for too long, or an error came instead of messages.
        Delivery => "delivery",
        /// A message was skipped on its way to the daemon.
        Skipped => "skipped",
        /// The stream is gone or was changed, or another stream has taken its place.
        Stream => "stream",
        /// The stream has another leader, or none: messages that came meanwhile may not be in it.
        Leader => "leader",
    }
}

label_values! {
    /// Whether the index knows a holder's blocks exactly.
    HolderState: "state" {
        /// Every batch of the holder was applied.
        Exact => "exact",
        /// The known blocks may be wrong or incomplete: see [`DegradedReason`].
        Degraded => "degraded",
    }
}

label_values! {
    /// Form in which a query names a prompt, or `Status` for a question about a namespace.
    QueryKind: "kind" {
        /// The tokens of the prompt.
        Tokens => "tokens",
        /// The block hashes of the prompt.
        BlockHashes => "block_hashes",
        /// The sequence hashes of the prompt.
        SequenceHashes => "sequence_hashes",
        /// The lineage hashes of the prompt.
        LineageHashes => "lineage_hashes",
        /// No prompt: the query asks for the status of a namespace.
        Status => "status",
    }
}

label_values! {
    /// Certainty of an answer.
    AnswerState: "state" {
        /// Every holder in the answer is exact, and no other holder may have more blocks than is known.
        Exact => "exact",
        /// A holder in the answer is degraded. Or a holder that is not in the answer is in doubt: it may have more
        /// blocks than is known, or this form of query cannot find it.
        Degraded => "degraded",
        /// Certainly no holder has any block of the prompt.
        Empty => "empty",
    }
}

impl AnswerState {
    /// Returns the state of an answer. `is_exact` tells whether the answer is certain, and `is_empty` whether it names no holder.
    pub fn of(is_exact: bool, is_empty: bool) -> Self {
        match (is_exact, is_empty) {
            (false, _) => Self::Degraded,
            (true, false) => Self::Exact,
            (true, true) => Self::Empty,
        }
    }
}

label_values! {
    /// Reason why the reply to a query was not sent.
    ReplyDropReason: "reason" {
        /// The request names no reply subject.
        NoReplySubject => "no_reply_subject",
        /// The reply subject is a subject of kvatlas or of the NATS server, so a reply would reach others than the
        /// client.
        ForbiddenReplySubject => "forbidden_reply_subject",
        /// The connection did not take the reply.
        PublishFailed => "publish_failed",
    }
}

label_values! {
    /// Outcome of a gathering: a gateway asks all shards, and merges their replies.
    GatherOutcome: "outcome" {
        /// Every shard answered.
        Complete => "complete",
        /// Some shards did not answer in time; the gateway's answer names them.
        Partial => "partial",
        /// The shards answered with an error, or with answers that don't fit together.
        Refused => "refused",
        /// No shard answered.
        Unanswered => "unanswered",
        /// Too many gatherings were under way, so this one was not begun.
        Overloaded => "overloaded",
    }
}

label_values! {
    /// Reason why a span did not reach a collector.
    SpanDropReason: "reason" {
        /// Too many other spans waited to be sent.
        QueueFull => "queue_full",
        /// The collector did not take the span.
        ExportFailed => "export_failed",
    }
}

label_values! {
    /// The kinds of work on which a lane (a thread that applies events) spends its time.
    LaneWork: "work" {
        /// Decoding and applying event batches.
        Events => "events",
        /// Work for resyncs (requests to publishers for missing batches): holding batches back, and applying the
        /// publishers' answers.
        Resync => "resync",
        /// Work for snapshots: dumping the lane's holders, and restoring them.
        Snapshot => "snapshot",
        /// Regular checks for batches that have waited too long, and for holders that have been silent too long. Also the
        /// commands of operators.
        Upkeep => "upkeep",
    }
}

label_values! {
    /// Connections to the message broker, by purpose.
    Connection: "connection" {
        /// The connection that receives events.
        Events => "events",
        /// The connection that receives queries and sends replies.
        Queries => "queries",
        /// The connection that asks publishers for missing batches.
        Resync => "resync",
        /// The connection that sends snapshots to the Object Store and fetches them.
        Snapshots => "snapshots",
        /// The connection that receives commands of operators.
        Admin => "admin",
        /// The connection that receives outcomes from routers: how many blocks requests really found.
        Outcomes => "outcomes",
        /// The connection that receives hints from routers: where they have sent requests.
        Hints => "hints",
    }
}

label_values! {
    /// An event of a connection.
    ConnectionEvent: "event" {
        /// The connection is established, for the first time or again.
        Connected => "connected",
        /// The connection to the broker was lost.
        Disconnected => "disconnected",
        /// Messages were discarded because this program took them too slowly.
        SlowConsumer => "slow_consumer",
        /// The server refused a subscription or a message, or withdrew the right to a subscription.
        Refused => "refused",
        /// The server or the client library reported an error.
        Error => "error",
    }
}

/// Implements [`LabelValue`] for an enum of another crate. The discriminants of such an enum may have gaps, so the
/// index of a value is its position in `ALL`.
macro_rules! label_of {
    ($enum_name:ident: $key:literal) => {
        impl $crate::labels::LabelValue for $enum_name {
            const KEY: &'static str = $key;
            const ALL: &'static [Self] = &Self::ALL;

            fn as_str(self) -> &'static str {
                self.as_str()
            }

            fn meaning(self) -> &'static str {
                Self::MEANINGS
                    .get(self.index())
                    .copied()
                    .unwrap_or_default()
            }

            fn index(self) -> usize {
                let is_same = |value: &Self| *value == self;
                Self::ALL.iter().position(is_same).unwrap_or_default()
            }
        }
    };
}
pub(super) use label_of;

label_of!(RejectReason: "reason");
label_of!(DegradedReason: "reason");
label_of!(ErrorCode: "code");

/// One metric handle for each value of a label, looked up by the value's index.
pub struct PerLabel<L, M> {
    handles: Box<[M]>,
    label: std::marker::PhantomData<fn(L)>,
}

impl<L: LabelValue, M> PerLabel<L, M> {
    /// Makes one handle for every value of the label.
    pub fn new(make: impl FnMut(L) -> M) -> Self {
        Self {
            handles: L::ALL.iter().copied().map(make).collect(),
            label: std::marker::PhantomData,
        }
    }

    /// Returns the metric handle for one value of the label.
    pub fn get(&self, label: L) -> &M {
        // In range by construction: `new` made one handle for each value, in the order of the indices.
        &self.handles[label.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<L: LabelValue>() {
        let mut texts = std::collections::BTreeSet::new();
        for (index, value) in L::ALL.iter().enumerate() {
            assert_eq!(value.index(), index);
            let text = value.as_str();
            assert!(
                text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'),
                "{text}"
            );
            assert!(texts.insert(text), "{text} twice");
        }
        let per_label = PerLabel::<L, &str>::new(L::as_str);
        assert!(
            L::ALL
                .iter()
                .all(|&value| *per_label.get(value) == value.as_str())
        );
    }

    #[test]
    fn values_are_distinct_lower_snake_case_and_indexed_in_order() {
        check::<DropReason>();
        check::<ResyncFailure>();
        check::<SnapshotFailure>();
        check::<SnapshotRejection>();
        check::<FrameFault>();
        check::<RepublishOmission>();
        check::<RepublishCut>();
        check::<EngineSource>();
        check::<ConsumerReset>();
        check::<RejectReason>();
        check::<DegradedReason>();
        check::<HolderState>();
        check::<QueryKind>();
        check::<AnswerState>();
        check::<ErrorCode>();
        check::<ReplyDropReason>();
        check::<GatherOutcome>();
        check::<SpanDropReason>();
        check::<RedisCommand>();
        check::<RedisRefusal>();
        check::<GuessDrop>();
        check::<HintDrop>();
        check::<OutcomeRefusal>();
        check::<LaneWork>();
        check::<Connection>();
        check::<ConnectionEvent>();
    }
}
