//! The values that labels may take, as enums, so that no free text becomes a label.
//!
//! The spelling of a value is part of what dashboards and alerts rely on: add values freely, but don't rename them.

use crate::index::RejectReason;
use crate::snapshot::SnapshotError;
use crate::tracking::DegradedReason;
use crate::wire::ErrorCode;

/// Namespace label of whatever can't be attributed to an admitted namespace, such as a message with a malformed
/// subject. The brackets keep it apart from every real namespace, whose name is a subject token.
pub const UNATTRIBUTED_NAMESPACE: &str = "(none)";

/// A closed set of label values.
pub trait LabelValue: Copy + 'static {
    /// Every value, in the order of [`LabelValue::index`].
    const ALL: &'static [Self];

    /// The text that appears as the label's value.
    fn as_str(self) -> &'static str;

    /// The place of this value in [`LabelValue::ALL`].
    fn index(self) -> usize;
}

/// Declares an enum whose variants are label values, so that the variants, their spelling and their number can't part.
macro_rules! label_values {
    ($(#[$enum_attribute:meta])* $enum_name:ident {
        $($(#[$attribute:meta])* $variant:ident => $text:literal,)+
    }) => {
        $(#[$enum_attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $enum_name {
            $($(#[$attribute])* $variant,)+
        }

        impl $enum_name {
            /// How many values there are.
            pub const COUNT: usize = <Self as LabelValue>::ALL.len();
        }

        impl LabelValue for $enum_name {
            const ALL: &'static [Self] = &[$(Self::$variant,)+];

            fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
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

label_values! {
    /// Why a whole batch was dropped without a change to the index.
    DropReason {
        /// The sequence number was applied before: a redelivery, or a publisher that sent again.
        Duplicate => "duplicate",
        /// The batch is of an incarnation of the publisher that a newer one has replaced.
        StaleEpoch => "stale_epoch",
        /// The payload is not a valid batch.
        Undecodable => "undecodable",
        /// The payload is larger than the configured limit.
        Oversized => "oversized",
        /// The subject doesn't name a namespace and a worker.
        BadSubject => "bad_subject",
        /// The publisher says that it has published nothing with such a high number: left over, or forged.
        NeverPublished => "never_published",
        /// The namespace is new, and the configured number of namespaces is reached.
        TooManyNamespaces => "too_many_namespaces",
        /// The worker is new, and the configured number of workers is reached.
        TooManyWorkers => "too_many_workers",
        /// The data-parallel rank is new, and the configured number of ranks is reached.
        TooManyRanks => "too_many_ranks",
        /// Part of a snapshot that was written while the namespace had another hashing or block size.
        OtherSettings => "other_settings",
        /// The lane that has to apply the batch takes no more work.
        LaneStopped => "lane_stopped",
    }
}

label_values! {
    /// Why a resync did not make a holder exact.
    ResyncFailure {
        /// Nobody listens on the holder's resync subject: its publisher is gone, or does not know the protocol.
        NoResponder => "no_responder",
        /// The publisher said that it can't answer now.
        Refused => "refused",
        /// The answer was not whole in time.
        TimedOut => "timed_out",
        /// The connection was closed.
        Disconnected => "disconnected",
        /// A chunk, or a batch in it, can't be decoded.
        Undecodable => "undecodable",
        /// A chunk is about another rank than was asked for.
        WrongRank => "wrong_rank",
        /// Only incarnations of the publisher that had been replaced answered.
        StaleEpoch => "stale_epoch",
        /// The answer ends before what had been applied already.
        CursorBehind => "cursor_behind",
        /// A chunk is missing, or came twice or out of order.
        OutOfOrder => "out_of_order",
        /// The chunks contradict one another, or the request.
        Contradiction => "contradiction",
        /// The batches are not those that were missed, or not the stored blocks of a full state.
        WrongBatches => "wrong_batches",
        /// The full state is named by another chain of hashes than the namespace uses.
        OtherSettings => "other_settings",
        /// The answer has more chunks or bytes than allowed.
        TooLarge => "too_large",
        /// More live batches came meanwhile than may be held back, or the state was replaced otherwise.
        Superseded => "superseded",
        /// The answer was applied, but the holder is not exact.
        Incomplete => "incomplete",
    }
}

label_values! {
    /// Why a snapshot was not written.
    SnapshotFailure {
        /// There is no room on the disk.
        DiskFull => "disk_full",
        /// The directory cannot be used, or no file made in it.
        Directory => "directory",
        /// Writing failed.
        Write => "write",
        /// The file or the directory could not be brought to the disk.
        Sync => "sync",
        /// The file could not be given its name.
        Rename => "rename",
        /// Another snapshot is being written.
        Busy => "busy",
        /// A lane takes no more work.
        LaneStopped => "lane_stopped",
        /// The task was cut short.
        Interrupted => "interrupted",
    }
}

label_values! {
    /// Why a snapshot that was found at start was not loaded.
    SnapshotRejection {
        /// It cannot be read.
        Unreadable => "unreadable",
        /// It is no snapshot, or of a version that this build does not know.
        Unknown => "unknown",
        /// It ends too early.
        Truncated => "truncated",
        /// What it holds is not what was written.
        Damaged => "damaged",
        /// It is larger than it may be.
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
    /// Why the consumer of the events stream was made anew.
    ConsumerReset {
        /// The connection broke.
        Connection => "connection",
        /// The server was silent for too long, or an error came in the place of messages.
        Delivery => "delivery",
        /// A message was skipped on its way.
        Skipped => "skipped",
        /// The stream is another one than before, or gone.
        Stream => "stream",
    }
}

label_values! {
    /// How exactly the index knows what a holder has.
    HolderState {
        /// Every batch of the holder was applied.
        Exact => "exact",
        /// Something may be missing: see [`DegradedReason`].
        Degraded => "degraded",
    }
}

label_values! {
    /// What a query gives to look a prompt up by, or that it asks for the state of the daemon.
    QueryKind {
        /// The tokens of the prompt.
        Tokens => "tokens",
        /// The block hashes of the prompt.
        BlockHashes => "block_hashes",
        /// The sequence hashes of the prompt.
        SequenceHashes => "sequence_hashes",
        /// The lineage hashes of the prompt.
        LineageHashes => "lineage_hashes",
        /// Nothing: a question after the state of a namespace.
        Status => "status",
    }
}

label_values! {
    /// Why the reply to a query was not sent.
    ReplyDropReason {
        /// The request names no subject to reply to.
        NoReplySubject => "no_reply_subject",
        /// The connection did not take the reply.
        PublishFailed => "publish_failed",
    }
}

label_values! {
    /// How a gateway's gathering of the shards' replies ended.
    GatherOutcome {
        /// Every shard answered.
        Complete => "complete",
        /// Some shards did not answer in time; the answer names them.
        Partial => "partial",
        /// The shards answered with an error, or with answers that don't fit together.
        Refused => "refused",
        /// No shard answered.
        Unanswered => "unanswered",
        /// Too many others were under way, so that none was begun.
        Overloaded => "overloaded",
    }
}

label_values! {
    /// Which connection to the message broker.
    Connection {
        /// The one that receives events.
        Events => "events",
        /// The one that receives queries and sends replies.
        Queries => "queries",
        /// The one that asks publishers for what is missing.
        Resync => "resync",
        /// The one that sends snapshots to the Object Store and fetches them.
        Snapshots => "snapshots",
    }
}

label_values! {
    /// What happened to a connection.
    ConnectionEvent {
        /// It is established, for the first time or again.
        Connected => "connected",
        /// It was lost.
        Disconnected => "disconnected",
        /// Messages were discarded because this program took them too slowly.
        SlowConsumer => "slow_consumer",
        /// The server or the client library reported an error.
        Error => "error",
    }
}

impl LabelValue for RejectReason {
    const ALL: &'static [Self] = &Self::ALL;

    fn as_str(self) -> &'static str {
        self.as_str()
    }

    fn index(self) -> usize {
        self as usize
    }
}

impl LabelValue for DegradedReason {
    const ALL: &'static [Self] = &Self::ALL;

    fn as_str(self) -> &'static str {
        self.as_str()
    }

    fn index(self) -> usize {
        // Each reason is one bit, in the order of `ALL`.
        (self as u32).trailing_zeros() as usize
    }
}

impl LabelValue for ErrorCode {
    const ALL: &'static [Self] = &Self::ALL;

    fn as_str(self) -> &'static str {
        self.as_str()
    }

    fn index(self) -> usize {
        Self::ALL
            .iter()
            .position(|code| *code == self)
            .unwrap_or_default()
    }
}

/// One metric handle for each value of a label, looked up by the value's index.
pub(crate) struct PerLabel<L, M> {
    handles: Box<[M]>,
    label: std::marker::PhantomData<fn(L)>,
}

impl<L: LabelValue, M> PerLabel<L, M> {
    /// Makes the handle of every value.
    pub(crate) fn new(make: impl FnMut(L) -> M) -> Self {
        Self {
            handles: L::ALL.iter().copied().map(make).collect(),
            label: std::marker::PhantomData,
        }
    }

    /// The handle of one value.
    pub(crate) fn get(&self, label: L) -> &M {
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
        check::<ConsumerReset>();
        check::<RejectReason>();
        check::<DegradedReason>();
        check::<HolderState>();
        check::<QueryKind>();
        check::<ErrorCode>();
        check::<ReplyDropReason>();
        check::<GatherOutcome>();
        check::<Connection>();
        check::<ConnectionEvent>();
    }
}
