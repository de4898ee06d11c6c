//! The subjects of the contract, under a configurable prefix, and the names that are tokens in subjects: namespaces
//! and workers. A worker and a rank together name a holder.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::admin::AdminCommand;

/// Reason why a text cannot be a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error("a name must not be empty; use 1 to {max} characters out of A-Z a-z 0-9 _ -")]
    Empty {
        /// Maximum length of a name, in bytes.
        max: usize,
    },
    /// The text is longer than allowed.
    #[error("a name of {bytes} bytes is too long; use at most {max}")]
    TooLong {
        /// Length of the text, in bytes.
        bytes: usize,
        /// Maximum length of a name, in bytes.
        max: usize,
    },
    /// The text has a character outside `[A-Za-z0-9_-]`.
    #[error("a name may only have the characters A-Z a-z 0-9 _ -; byte {offset} is another")]
    Character {
        /// Offset in bytes of the first character that is not allowed.
        offset: usize,
    },
}

/// Maximum length of a name under any configuration, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Name of the namespace that `kvatlas doctor` uses to probe a deployment, and of the worker in it. A daemon forgets
/// the namespace as soon as it is empty. The limits on namespaces do not count it, and it has small bounds of its own.
pub const PROBE_NAME: &str = "kvatlas-doctor";

fn check(text: &str, max: usize) -> Result<(), NameError> {
    let max = max.min(NAME_BYTES_MAX);
    if text.is_empty() {
        return Err(NameError::Empty { max });
    }
    if text.len() > max {
        return Err(NameError::TooLong {
            bytes: text.len(),
            max,
        });
    }
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    match text.bytes().position(|byte| !is_allowed(byte)) {
        Some(offset) => Err(NameError::Character { offset }),
        None => Ok(()),
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `text` and makes it a name: 1 to 64 characters out of `[A-Za-z0-9_-]`.
            pub fn new(text: &str) -> Result<Self, NameError> {
                Self::bounded(text, NAME_BYTES_MAX)
            }

            /// Checks a text as [`Self::new`] does, but allows at most `bytes_max` bytes.
            pub fn bounded(text: &str, bytes_max: usize) -> Result<Self, NameError> {
                check(text, bytes_max)?;
                Ok(Self(Arc::from(text)))
            }

            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "{:?}", &*self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                Self::new(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

name_type! {
    /// A namespace: one pool of compatible caches (same model, block size and hash contract).
    NamespaceName
}

name_type! {
    /// A worker: one inference server. A worker and a data-parallel rank together name a holder.
    WorkerName
}

/// Data-parallel rank within a worker.
pub type Rank = u32;

/// Holder of blocks: a worker and one of its data-parallel ranks.
///
/// Ordered by worker, then by rank. Replies use this order for ties.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderId {
    /// Name of the worker.
    pub worker: WorkerName,
    /// Data-parallel rank. 0 if the engine has only one.
    pub rank: Rank,
}

impl fmt::Display for HolderId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.worker, self.rank)
    }
}

/// Reason why a subject or a prefix does not fit the contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    /// The subject does not have the contract's shape.
    #[error("subject {subject:?} is not {expected}")]
    Shape {
        /// The subject as received.
        subject: String,
        /// The shape that was expected.
        expected: String,
    },
    /// A token of the subject is not a name.
    #[error("subject {subject:?}: {source}")]
    Name {
        /// The subject as received.
        subject: String,
        /// Reason why the token is not a name.
        source: NameError,
    },
    /// The prefix cannot be part of a subject.
    #[error("prefix {prefix:?} must be tokens out of A-Z a-z 0-9 _ - joined by dots, at most 64 bytes")]
    Prefix {
        /// The prefix as configured.
        prefix: String,
    },
}

/// Builds and parses the subjects under one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subjects {
    root: String,
    events: String,
    query: String,
    status: String,
    resync: String,
    outcome: String,
    hint: String,
}

/// Token that stands for all namespaces. It is not a valid name, so no namespace can have it as its name.
const ALL_NAMESPACES: &str = "~all";

impl Subjects {
    /// Makes the subjects under `prefix`. The prefix consists of tokens of the characters `[A-Za-z0-9_-]` joined by
    /// dots, at most 64 bytes in all.
    pub fn new(prefix: &str) -> Result<Self, SubjectError> {
        let is_sound = prefix.len() <= 64 && prefix.split('.').all(|token| NamespaceName::new(token).is_ok());
        if !is_sound {
            return Err(SubjectError::Prefix {
                prefix: prefix.to_owned(),
            });
        }
        Ok(Self {
            root: format!("{prefix}.v1."),
            events: format!("{prefix}.v1.events."),
            query: format!("{prefix}.v1.query."),
            status: format!("{prefix}.v1.status."),
            resync: format!("{prefix}.v1.resync."),
            outcome: format!("{prefix}.v1.outcome."),
            hint: format!("{prefix}.v1.hint."),
        })
    }

    /// Returns the same subjects, but with the shards' subjects for queries and status requests. A request on a shards'
    /// subject is answered by every shard. A request on any other subject is answered by one daemon.
    #[must_use]
    pub fn of_shards(&self) -> Self {
        Self {
            query: format!("{}shards.query.", self.root),
            status: format!("{}shards.status.", self.root),
            ..self.clone()
        }
    }

    /// Whether `subject` is a subject of queries or of status requests.
    pub fn is_of_requests(&self, subject: &str) -> bool {
        subject.starts_with(&self.query) || subject.starts_with(&self.status)
    }

    /// Whether a publisher needs `subject` for its reports: it is a subject of events, of resyncs, or of what bridges
    /// tell each other.
    pub fn is_of_publishers(&self, subject: &str) -> bool {
        let rest = subject.strip_prefix(&self.root);
        let kind = rest.and_then(|rest| rest.split_once('.'));
        kind.is_some_and(|(kind, _)| matches!(kind, "events" | "resync" | "bridges"))
    }

    /// Whether `subject` is a subject of events.
    pub fn is_of_events(&self, subject: &str) -> bool {
        subject.starts_with(&self.events)
    }

    /// Whether `subject` is a subject of the contract under this prefix, or a pattern of such subjects.
    pub fn has(&self, subject: &str) -> bool {
        subject.starts_with(&self.root)
    }

    /// Returns the subject on which daemons report their namespaces.
    pub fn namespaces(&self) -> String {
        format!("{}{ALL_NAMESPACES}", self.status)
    }

    /// Whether `subject` is a status subject that asks for the known namespaces.
    pub fn is_about_namespaces(&self, subject: &str) -> bool {
        subject.strip_prefix(&self.status) == Some(ALL_NAMESPACES)
    }

    /// Returns the subject of rosters, on which replicas that answer in `queue_group` report their holders.
    pub fn roster(&self, queue_group: &str) -> String {
        format!("{}roster.{queue_group}", self.root)
    }

    /// Returns the subject on which bridges of `group` report the holders for which they publish.
    pub fn bridges(&self, group: &str) -> String {
        format!("{}bridges.{group}", self.root)
    }

    /// Returns the subject to which operators send `command`.
    pub fn admin(&self, command: AdminCommand) -> String {
        format!("{}admin.{}", self.root, command.as_str())
    }

    /// Returns the pattern of all command subjects.
    pub fn all_admin(&self) -> String {
        format!("{}admin.*", self.root)
    }

    /// Returns the command of a command subject. `None` if `subject` is not a command subject.
    pub fn parse_admin(&self, subject: &str) -> Option<AdminCommand> {
        let token = subject.strip_prefix(&self.root)?.strip_prefix("admin.")?;
        AdminCommand::of_word(token)
    }

    /// Returns the subject on which `worker` publishes its batches for `namespace`.
    pub fn events(&self, namespace: &NamespaceName, worker: &WorkerName) -> String {
        format!("{}{namespace}.{worker}", self.events)
    }

    /// Returns the pattern of all events subjects.
    pub fn all_events(&self) -> String {
        format!("{}>", self.events)
    }

    /// Returns the subject on which a daemon asks the publisher of one rank of `worker` for missed batches.
    pub fn resync(&self, namespace: &NamespaceName, worker: &WorkerName, rank: Rank) -> String {
        format!("{}{namespace}.{worker}.{rank}", self.resync)
    }

    /// Returns the subject of queries about `namespace`.
    pub fn query(&self, namespace: &NamespaceName) -> String {
        format!("{}{namespace}", self.query)
    }

    /// Returns the subject on which routers report the outcomes of their requests in `namespace`.
    pub fn outcome(&self, namespace: &NamespaceName) -> String {
        format!("{}{namespace}", self.outcome)
    }

    /// Returns the pattern of all outcome subjects.
    pub fn all_outcomes(&self) -> String {
        format!("{}*", self.outcome)
    }

    /// Returns the namespace in an outcome subject.
    pub fn parse_outcome(&self, subject: &str, name_bytes_max: usize) -> Result<NamespaceName, SubjectError> {
        Self::parse_tail(&self.outcome, subject, name_bytes_max)
    }

    /// Returns the subject of hints in `namespace`, on which routers report the workers to which they have sent
    /// requests.
    pub fn hint(&self, namespace: &NamespaceName) -> String {
        format!("{}{namespace}", self.hint)
    }

    /// Returns the pattern of all hint subjects.
    pub fn all_hints(&self) -> String {
        format!("{}*", self.hint)
    }

    /// Returns the namespace in a hint subject.
    pub fn parse_hint(&self, subject: &str, name_bytes_max: usize) -> Result<NamespaceName, SubjectError> {
        Self::parse_tail(&self.hint, subject, name_bytes_max)
    }

    /// Returns the pattern of all query subjects. It ends in `>`, so that a request on a malformed subject gets an
    /// error and not silence.
    pub fn all_queries(&self) -> String {
        format!("{}>", self.query)
    }

    /// Returns a subject that [`Self::all_queries`] covers, but on which no query can come: no namespace's name
    /// contains `~`. A daemon that leaves its queue group publishes filler messages on this subject. Daemons ignore
    /// these messages.
    pub fn query_filler(&self) -> String {
        format!("{}~", self.query)
    }

    /// Returns the subject of filler messages for status requests. It is to [`Self::all_statuses`] what
    /// [`Self::query_filler`] is to [`Self::all_queries`].
    pub fn status_filler(&self) -> String {
        format!("{}~", self.status)
    }

    /// Returns the subject of status requests about `namespace`.
    pub fn status(&self, namespace: &NamespaceName) -> String {
        format!("{}{namespace}", self.status)
    }

    /// Returns the pattern of all status subjects.
    pub fn all_statuses(&self) -> String {
        format!("{}>", self.status)
    }

    /// Whether a reply may be sent to `subject`, which the sender of the request has chosen. The answering process
    /// publishes the reply with its own permissions, and the sender of the request must not gain these. So two kinds of
    /// subjects are refused: those of this contract, and those of the server, which begin with `$`.
    pub fn may_reply_to(&self, subject: &str) -> bool {
        !subject.starts_with('$') && !self.has(subject)
    }

    /// Returns the namespace and the worker in an events subject.
    pub fn parse_events(
        &self,
        subject: &str,
        name_bytes_max: usize,
    ) -> Result<(NamespaceName, WorkerName), SubjectError> {
        let shape = || SubjectError::Shape {
            subject: subject.to_owned(),
            expected: format!("{}NAMESPACE.WORKER", self.events),
        };
        let (namespace, worker) = self.split_events(subject).ok_or_else(shape)?;
        let named = |source| SubjectError::Name {
            subject: subject.to_owned(),
            source,
        };
        Ok((
            NamespaceName::bounded(namespace, name_bytes_max).map_err(named)?,
            WorkerName::bounded(worker, name_bytes_max).map_err(named)?,
        ))
    }

    /// Returns the namespace in an events subject, and the text in the place of the worker's name. The text may be one
    /// that no worker can have as its name. `None` if the namespace cannot be read.
    pub fn events_of_any_worker<'s>(
        &self,
        subject: &'s str,
        name_bytes_max: usize,
    ) -> Option<(NamespaceName, &'s str)> {
        let (namespace, worker) = self.split_events(subject)?;
        let namespace = NamespaceName::bounded(namespace, name_bytes_max).ok()?;
        Some((namespace, worker))
    }

    fn split_events<'s>(&self, subject: &'s str) -> Option<(&'s str, &'s str)> {
        subject.strip_prefix(&self.events)?.split_once('.')
    }

    /// Returns the namespace in a query subject.
    pub fn parse_query(&self, subject: &str, name_bytes_max: usize) -> Result<NamespaceName, SubjectError> {
        Self::parse_tail(&self.query, subject, name_bytes_max)
    }

    /// Returns the namespace in the subject of a status request.
    pub fn parse_status(&self, subject: &str, name_bytes_max: usize) -> Result<NamespaceName, SubjectError> {
        Self::parse_tail(&self.status, subject, name_bytes_max)
    }

    fn parse_tail(head: &str, subject: &str, name_bytes_max: usize) -> Result<NamespaceName, SubjectError> {
        let tail = subject.strip_prefix(head).ok_or_else(|| SubjectError::Shape {
            subject: subject.to_owned(),
            expected: format!("{head}NAMESPACE"),
        })?;
        NamespaceName::bounded(tail, name_bytes_max).map_err(|source| SubjectError::Name {
            subject: subject.to_owned(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_parses_back() {
        let subjects = Subjects::new("site-1.kvatlas").unwrap();
        let namespace = NamespaceName::new("llama").unwrap();
        let worker = WorkerName::new("gpu-0").unwrap();
        let events = subjects.events(&namespace, &worker);
        assert_eq!(events, "site-1.kvatlas.v1.events.llama.gpu-0");
        assert_eq!(
            subjects.parse_events(&events, 64),
            Ok((namespace.clone(), worker))
        );
        assert_eq!(
            subjects.parse_query(&subjects.query(&namespace), 64),
            Ok(namespace.clone())
        );
        assert_eq!(
            subjects.parse_status(&subjects.status(&namespace), 64),
            Ok(namespace)
        );
    }

    #[test]
    fn shards_have_subjects_of_their_own() {
        let subjects = Subjects::new("site-1").unwrap();
        let shards = subjects.of_shards();
        let (namespace, worker) = (
            NamespaceName::new("llama").unwrap(),
            WorkerName::new("w").unwrap(),
        );
        assert_eq!(shards.query(&namespace), "site-1.v1.shards.query.llama");
        assert_eq!(shards.status(&namespace), "site-1.v1.shards.status.llama");
        assert_eq!(
            shards.events(&namespace, &worker),
            subjects.events(&namespace, &worker)
        );
        assert_eq!(
            shards.parse_query(&shards.query(&namespace), 64),
            Ok(namespace.clone())
        );
        assert!(subjects.parse_query(&shards.query(&namespace), 64).is_err());
        assert!(
            shards.is_of_requests(&shards.namespaces()) && shards.is_of_requests(&shards.query(&namespace))
        );
        assert!(
            !shards.is_of_requests(&subjects.status(&namespace))
                && !shards.is_of_requests(&shards.hint(&namespace))
        );
        assert_eq!(subjects.roster("kvatlas"), "site-1.v1.roster.kvatlas");
        assert_eq!(subjects.admin(AdminCommand::Drain), "site-1.v1.admin.drain");
        assert_eq!(
            subjects.parse_admin("site-1.v1.admin.drain"),
            Some(AdminCommand::Drain)
        );
        assert_eq!(subjects.parse_admin("site-1.v1.admin.x"), None);
    }

    #[test]
    fn publishers_have_subjects_that_clients_do_not_use() {
        let subjects = Subjects::new("site-1").unwrap();
        let (namespace, worker) = (
            NamespaceName::new("llama").unwrap(),
            WorkerName::new("w").unwrap(),
        );
        for needed in [
            subjects.events(&namespace, &worker),
            subjects.resync(&namespace, &worker, 0),
            subjects.bridges("pair"),
        ] {
            assert!(subjects.is_of_publishers(&needed), "{needed}");
        }
        for other in [
            subjects.query(&namespace),
            subjects.status(&namespace),
            subjects.of_shards().query(&namespace),
            subjects.admin(AdminCommand::Reset),
            "site-2.v1.events.llama.w".to_owned(),
        ] {
            assert!(!subjects.is_of_publishers(&other), "{other}");
        }
    }

    #[test]
    fn foreign_subjects_are_errors() {
        let subjects = Subjects::new("kvatlas").unwrap();
        for subject in [
            "kvatlas.v1.events.llama",
            "kvatlas.v1.events.a.b.c",
            "other.v1.events.a.b",
            "kvatlas.v1.events.a.",
        ] {
            assert!(subjects.parse_events(subject, 64).is_err(), "{subject}");
        }
        assert!(subjects.parse_query("kvatlas.v1.query.a.b", 64).is_err());
    }

    #[test]
    fn the_namespace_of_events_is_read_whatever_the_workers_name_is() {
        let subjects = Subjects::new("kvatlas").unwrap();
        let namespace = NamespaceName::new("llama").unwrap();
        for worker in ["gpu-0", "gpu:0", "a.b", "", &"x".repeat(65)] {
            let subject = format!("kvatlas.v1.events.llama.{worker}");
            let read = subjects.events_of_any_worker(&subject, 5);
            assert_eq!(read, Some((namespace.clone(), worker)));
            assert_eq!(subjects.events_of_any_worker(&subject, 4), None);
        }
        for subject in [
            "kvatlas.v1.events.llama",
            "kvatlas.v1.events.a:b.c",
            "other.v1.events.a.b",
        ] {
            assert_eq!(subjects.events_of_any_worker(subject, 64), None);
        }
    }

    #[test]
    fn a_prefix_is_checked() {
        for prefix in ["", ".", "a..b", "a.>", "a b", &"x".repeat(65)] {
            assert!(Subjects::new(prefix).is_err(), "{prefix:?}");
        }
    }

    #[test]
    fn names_are_subject_tokens() {
        assert!(WorkerName::new("gpu-07_A").is_ok());
        assert_eq!(WorkerName::new(""), Err(NameError::Empty { max: 64 }));
        assert_eq!(WorkerName::new("a.b"), Err(NameError::Character { offset: 1 }));
        assert_eq!(WorkerName::new("ab*"), Err(NameError::Character { offset: 2 }));
        assert_eq!(
            WorkerName::new(&"x".repeat(65)),
            Err(NameError::TooLong { bytes: 65, max: 64 })
        );
        assert_eq!(
            NamespaceName::bounded("abc", 2),
            Err(NameError::TooLong { bytes: 3, max: 2 })
        );
    }

    #[test]
    fn a_decoded_name_is_checked_like_any_other() {
        assert!(serde_json::from_str::<WorkerName>("\"w1\"").is_ok());
        assert!(serde_json::from_str::<WorkerName>("\"w 1\"").is_err());
    }
}
