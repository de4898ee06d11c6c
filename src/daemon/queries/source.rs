//! Source of answers for the listeners: the index of this process, or, in a gateway, the shards.

use std::sync::Arc;

use async_nats::HeaderMap;

use kvatlas_core::index::Namespace;
#[cfg(any(feature = "grpc", feature = "redis"))]
use kvatlas_core::wire::Address;
use kvatlas_core::wire::{
    ErrorCode, NamespaceName, NamespacesReply, QueryKey, QueryReply, QueryRequest, SingleQuery, StatusReply,
    WireError, WireLimits, WorkerName,
};

use crate::lanes::LanePool;
use kvatlas_client::ClientError;
use kvatlas_config::{Depth, Live};

use kvatlas_process::broker::ConnectError;

#[cfg(any(feature = "grpc", feature = "redis"))]
use super::answer::is_used;
use super::{Answerer, AnyReply, Found, ShardAsker, dialect_query};

/// Reason why a listener cannot get answers from the shards.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Connecting to NATS failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Connection to the shards cannot be used.
    #[error("the connection to the shards: {0}")]
    Shards(#[from] ClientError),
}

/// Refusal of a question that only a process with an index can answer.
#[derive(Debug, thiserror::Error)]
#[error("a gateway has no blocks of its own; ask each shard")]
pub(crate) struct NoIndex;

/// Source from which queries are answered.
pub(crate) enum Source {
    /// Index of this process.
    Here(Box<IndexHere>),
    /// Shards that this gateway asks. The process itself has none of their blocks.
    Shards(Box<Shards>),
}

/// Parts of a process that has an index.
pub(crate) struct IndexHere {
    /// Answerer of queries from the index.
    pub(crate) answerer: Answerer,
    /// Lanes (threads that apply events), for dumps and for the number of waiting messages.
    pub(crate) pool: Arc<LanePool>,
    /// Number of blocks that answers in other protocols (dialects) give: those that a request can reuse, or those
    /// that full attention has.
    pub(crate) dialect_depth: Depth,
}

/// Parts of a gateway, which asks the shards.
pub(crate) struct Shards {
    /// Asker that sends requests to the shards.
    pub(crate) asker: ShardAsker,
    /// Bounds on requests.
    pub(crate) limits: Live<WireLimits>,
    /// Number of blocks that answers in other protocols give, as in [`IndexHere::dialect_depth`].
    pub(crate) dialect_depth: Depth,
}

impl IndexHere {
    /// Whether the namespace `name` has a holder, or a publisher whose batches are dropped.
    #[cfg(any(feature = "grpc", feature = "redis"))]
    pub(super) fn is_used(&self, name: &NamespaceName) -> bool {
        let namespace = self.answerer.namespaces().get(name);
        namespace.is_some_and(|namespace| is_used(&namespace))
    }
}

impl Source {
    /// Returns the index of this process. Fails in a gateway.
    pub(crate) fn here(&self) -> Result<&IndexHere, NoIndex> {
        match self {
            Self::Here(index) => Ok(index),
            Self::Shards(_) => Err(NoIndex),
        }
    }

    /// Returns the bounds on requests.
    pub(crate) fn limits(&self) -> WireLimits {
        match self {
            Self::Here(index) => index.answerer.limits(),
            Self::Shards(shards) => WireLimits::clone(&shards.limits.now()),
        }
    }

    /// Answers a request about the namespace `name`. `bytes_max` is the maximum length of the reply.
    pub(crate) async fn answer(
        &self,
        name: &NamespaceName,
        request: &QueryRequest,
        bytes_max: usize,
    ) -> Result<AnyReply, WireError> {
        let answerer = match self {
            Self::Here(index) => &index.answerer,
            Self::Shards(shards) => return shards.ask(name, request).await,
        };
        match answerer.enter_if_heavy(name, request)? {
            None => answerer.answer_request(name, request, bytes_max),
            Some(heavy) => answerer.answer_in_pieces(name, request, bytes_max, &heavy).await,
        }
    }

    /// Returns the status of the namespace `name`: facts about each holder, such as the last batch that has been
    /// applied.
    pub(crate) async fn status(&self, name: &NamespaceName) -> Result<StatusReply, WireError> {
        match self {
            Self::Here(index) => {
                let namespace = index.answerer.namespace(name)?;
                Ok(index.answerer.status(&namespace, index.pool.messages_waiting()))
            }
            Self::Shards(shards) => {
                let _place = shards.asker.enter()?;
                shards.asker.status(name, HeaderMap::new()).await
            }
        }
    }

    /// Returns the status of every known namespace.
    pub(crate) async fn statuses(&self) -> Result<Vec<(NamespaceName, StatusReply)>, WireError> {
        match self {
            Self::Here(index) => {
                let waiting = index.pool.messages_waiting();
                let namespaces = index.answerer.namespaces().all();
                let status = |namespace: &Arc<Namespace>| {
                    (namespace.name.clone(), index.answerer.status(namespace, waiting))
                };
                Ok(namespaces.iter().map(status).collect())
            }
            Self::Shards(shards) => {
                let _place = shards.asker.enter()?;
                shards.asker.statuses().await
            }
        }
    }

    /// Returns the names of all known namespaces, and whether there may be others.
    pub(crate) async fn names(&self) -> Result<NamespacesReply, WireError> {
        match self {
            Self::Here(index) => Ok(index.answerer.known_namespaces(&index.pool)),
            Self::Shards(shards) => {
                let _place = shards.asker.enter()?;
                shards.asker.names().await
            }
        }
    }

    /// Whether every namespace is known of which events come. A process with an index knows them all under two
    /// conditions. Each publisher has had enough time to send a message, and no message may have waited unread for too long.
    /// A gateway always returns
    /// true: it cannot tell before [`Self::names`].
    pub(crate) fn knows_all_names(&self) -> bool {
        match self {
            Self::Here(index) => {
                let Answerer { trust, freshness, .. } = &index.answerer;
                trust.is_listed() && !freshness.is_everybody_behind()
            }
            Self::Shards(_) => true,
        }
    }

    /// Returns the addresses of all ranks of a worker that have told them. Empty in a gateway, which knows only the
    /// ranks that its shards have found.
    #[cfg(any(feature = "grpc", feature = "redis"))]
    pub(crate) fn addresses_of(&self, name: &NamespaceName, worker: &WorkerName) -> Vec<Address> {
        let Self::Here(index) = self else {
            return Vec::new();
        };
        let namespace = index.answerer.namespaces().get(name);
        let ranks = namespace.map(|namespace| namespace.indexer.holders_of(std::slice::from_ref(worker)));
        let ranks = ranks.into_iter().flatten();
        ranks.filter_map(|rank| rank.status.profile().address).collect()
    }

    /// Whether the namespace `name` has a holder of `worker`. A gateway cannot tell, so it always returns false.
    pub(crate) fn knows_worker(&self, name: &NamespaceName, worker: &WorkerName) -> bool {
        let has = |namespace: Arc<Namespace>| namespace.indexer.has_worker(worker);
        match self {
            Self::Here(index) => index.answerer.namespaces().get(name).is_some_and(has),
            Self::Shards(_) => false,
        }
    }

    /// Whether recent messages were dropped because their namespace does not exist. Only names that satisfy `is_meant`
    /// count, and names that are not remembered. A gateway cannot tell, so it always returns true.
    #[cfg(feature = "grpc")]
    pub(crate) fn lacks_any(&self, is_meant: impl Fn(&NamespaceName) -> bool) -> bool {
        match self {
            Self::Here(index) => index.pool.lacks_any(is_meant),
            Self::Shards(_) => true,
        }
    }

    /// Finds all holders of a prefix of `key` in the namespace `name`. With `workers`, finds only these workers' holders.
    pub(crate) async fn find(
        &self,
        name: &NamespaceName,
        key: &QueryKey,
        workers: Option<Vec<WorkerName>>,
    ) -> Result<Found, WireError> {
        let query = dialect_query(key, workers);
        let (reply, depth) = match self {
            Self::Here(index) => (index.answerer.answer_unsorted(name, &query)?, index.dialect_depth),
            Self::Shards(shards) => (shards.ask_one(name, query).await?, shards.dialect_depth),
        };
        Found::of_reply(reply, depth)
    }

    /// Finds holders as [`Self::find`] does, of all workers, but does not count the answer and takes no sample of it. In a
    /// gateway, the shards count it nevertheless.
    #[cfg(feature = "redis")]
    pub(crate) async fn find_uncounted(
        &self,
        name: &NamespaceName,
        key: &QueryKey,
    ) -> Result<Found, WireError> {
        let Self::Here(index) = self else {
            return self.find(name, key, None).await;
        };
        let reply = index
            .answerer
            .uncounted()
            .answer_unsorted(name, &dialect_query(key, None))?;
        Found::of_reply(reply, index.dialect_depth)
    }

    /// Whether no events for the namespace `name` have come. A gateway only knows the shards' answer: it returns true
    /// if `error` is "unknown namespace".
    pub(crate) fn is_unheard(&self, name: &NamespaceName, error: &WireError) -> bool {
        match self {
            Self::Here(index) => index.answerer.is_unheard(name),
            Self::Shards(_) => error.code == ErrorCode::UnknownNamespace,
        }
    }
}

impl Shards {
    async fn ask(&self, name: &NamespaceName, request: &QueryRequest) -> Result<AnyReply, WireError> {
        let _place = self.asker.enter()?;
        let payload = request.encode().into();
        self.asker.ask(name, request, payload, HeaderMap::new()).await
    }

    async fn ask_one(&self, name: &NamespaceName, query: SingleQuery) -> Result<QueryReply, WireError> {
        let _place = self.asker.enter()?;
        let (options, request) = (query.options.clone(), QueryRequest::Single(query));
        let payload = request.encode().into();
        self.asker
            .ask_one(name, &options, payload, HeaderMap::new())
            .await
    }
}
