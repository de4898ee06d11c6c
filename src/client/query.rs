//! Queries to daemons, for routers.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Message, RequestError, RequestErrorKind};
use bytes::Bytes;

use kvatlas_core::wire::{
    BatchReply, ERROR_CODE_HEADER, ERROR_HEADER, ErrorCode, Hint, HintReport, NamespaceName, OUTCOMES_MAX,
    Outcome, OutcomeReport, QueryReply, QueryRequest, QueryResult, SingleQuery, StatusReply, Subjects,
    WireError,
};

use super::error::ClientError;
use super::gather::Gatherer;
use super::resend::{CONNECTIONS_MAX, LOOK_INTERVAL, NobodyPeriod, ended_too_often};

/// Longest wait of a request for its answer, unless the caller sets a different one.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks the daemons of one subject prefix. Cheap to clone; several requests can run at the same time.
///
/// NATS loses a request that is under way when a connection breaks, or when a daemon leaves a server of a cluster. So a request
/// is sent again on each new connection, and a second time after half of its patience. This is safe, because asking changes
/// nothing. If no daemon listens, the request is sent again for a twentieth of the patience, anew on each connection: a daemon
/// that has lost its server soon connects to another server.
///
/// ```no_run
/// use kvatlas_client::QueryClient;
/// use kvatlas_core::wire::{NamespaceName, QueryKey, SingleQuery, Subjects};
///
/// # async fn ask() -> Result<(), Box<dyn std::error::Error>> {
/// let nats = async_nats::connect("nats://127.0.0.1:4222").await?;
/// let client = QueryClient::new(nats, Subjects::new("kvatlas")?);
/// let tokens = (1..=64).collect();
/// let query = SingleQuery::new(QueryKey::Tokens { tokens, lora_name: None, cache_salt: None });
/// let reply = client.query(&NamespaceName::new("llama")?, query).await?;
/// for holder in &reply.holders {
///     println!("{} holds {} of {} blocks", holder.worker, holder.matched_blocks, reply.query_blocks);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct QueryClient {
    nats: Client,
    subjects: Subjects,
    patience: Duration,
    gatherer: Option<Gatherer>,
}

impl QueryClient {
    /// Makes a client on the connection `nats`.
    pub fn new(nats: Client, subjects: Subjects) -> Self {
        Self {
            nats,
            subjects,
            patience: PATIENCE,
            gatherer: None,
        }
    }

    /// Lets the client ask all shards instead of one daemon or gateway, and merge their answers into one. If some shards have not
    /// answered when the patience ends, the answer names them in `gathered`. Set a patience that a router can afford.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection is closed.
    pub async fn gathering(self) -> Result<Self, ClientError> {
        let gatherer = Gatherer::new(self.nats.clone(), &self.subjects).await?;
        Ok(Self {
            gatherer: Some(gatherer.sending_again()),
            ..self
        })
    }

    /// Sets the longest wait of a request for its answer.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Asks which holders have leading blocks of the query's prompt, and how many of them.
    pub async fn query(
        &self,
        namespace: &NamespaceName,
        query: SingleQuery,
    ) -> Result<QueryReply, ClientError> {
        let options = query.options.clone();
        let payload = QueryRequest::Single(query).encode();
        if let Some(gatherer) = &self.gatherer {
            let merged = gatherer.query(
                namespace,
                &options,
                payload.into(),
                HeaderMap::new(),
                self.patience,
            );
            return Ok(merged.await?.reply?);
        }
        let reply = self.request(self.subjects.query(namespace), payload).await?;
        Ok(QueryReply::decode(&reply.payload)?)
    }

    /// Asks several queries in one request. The answers come in the same order.
    pub async fn query_batch(
        &self,
        namespace: &NamespaceName,
        queries: Vec<SingleQuery>,
    ) -> Result<Vec<QueryResult>, ClientError> {
        let request = QueryRequest::Batch(queries);
        let payload = request.encode();
        if let (Some(gatherer), QueryRequest::Batch(queries)) = (&self.gatherer, &request) {
            let merged = gatherer.query_batch(
                namespace,
                queries,
                payload.into(),
                HeaderMap::new(),
                self.patience,
            );
            return Ok(merged.await?.reply?.results);
        }
        let reply = self.request(self.subjects.query(namespace), payload).await?;
        Ok(BatchReply::decode(&reply.payload)?.results)
    }

    /// Asks for the status of a namespace. The status tells for each holder how far a daemon has applied its batches.
    pub async fn status(&self, namespace: &NamespaceName) -> Result<StatusReply, ClientError> {
        if let Some(gatherer) = &self.gatherer {
            return Ok(gatherer
                .status(namespace, HeaderMap::new(), self.patience)
                .await?
                .reply?);
        }
        let reply = self.request(self.subjects.status(namespace), Vec::new()).await?;
        Ok(StatusReply::decode(&reply.payload)?)
    }

    /// Reports outcomes to daemons. An outcome tells how many blocks a request really found, and how many the answer had
    /// promised. Daemons do not reply, and the call returns when the report has been sent.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection does not take the report within the patience,
    /// [`ClientError::TooLarge`] if a part of the report is longer than the server allows.
    pub async fn tell_outcomes(
        &self,
        namespace: &NamespaceName,
        outcomes: Vec<Outcome>,
    ) -> Result<(), ClientError> {
        let subject = self.subjects.outcome(namespace);
        let reports = outcomes.chunks(OUTCOMES_MAX);
        self.publish(
            &subject,
            reports.map(|part| OutcomeReport::new(part.to_vec()).encode()),
        )
        .await
    }

    /// Tells daemons to which workers requests have been sent, before any event shows their blocks there. A daemon
    /// keeps these hints for the time that its setting `hints.ttl_ms` gives, if the setting is present. Queries with
    /// [`QueryOptions::predicted`](kvatlas_core::wire::QueryOptions::predicted) get the blocks that the hints predict.
    /// Daemons do not reply.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection does not take the hints within the patience,
    /// [`ClientError::TooLarge`] if a hint is longer than the server allows.
    pub async fn tell_hints(&self, namespace: &NamespaceName, hints: Vec<Hint>) -> Result<(), ClientError> {
        let subject = self.subjects.hint(namespace);
        // Each hint may be as long as a query, which may fill a message.
        let reports = hints.into_iter().map(|hint| HintReport(vec![hint]).encode());
        self.publish(&subject, reports).await
    }

    /// Publishes messages to which no daemon replies. Waits for the patience at most.
    async fn publish(
        &self,
        subject: &str,
        reports: impl Iterator<Item = Vec<u8>>,
    ) -> Result<(), ClientError> {
        let publishing = async {
            for payload in reports {
                let bytes = payload.len();
                let published = self.nats.publish(subject.to_owned(), payload.into()).await;
                published.map_err(|error| ClientError::unsent(&error, &self.nats, subject, bytes))?;
            }
            Ok(())
        };
        let published = tokio::time::timeout(self.patience, publishing).await;
        let late =
            |_| ClientError::Connection(format!("the server takes nothing within {:?}", self.patience));
        published.map_err(late)?
    }

    async fn request(&self, subject: String, payload: Vec<u8>) -> Result<Message, ClientError> {
        let bytes = payload.len();
        let asking = self.ask_twice(&subject, payload.into());
        let timed_out = |subject| ClientError::TimedOut {
            subject,
            patience: self.patience,
        };
        let Ok(reply) = tokio::time::timeout(self.patience, asking).await else {
            return Err(timed_out(subject));
        };
        let reply = reply.map_err(|error| match error.kind() {
            RequestErrorKind::NoResponders => ClientError::NoDaemon { subject },
            RequestErrorKind::TimedOut => timed_out(subject),
            RequestErrorKind::MaxPayloadExceeded => ClientError::too_large(&self.nats, &subject, bytes),
            _ => ClientError::Connection(error.to_string()),
        })?;
        match refusal(&reply) {
            Some(error) => Err(error),
            None => Ok(reply),
        }
    }
}

impl QueryClient {
    /// Sends the request. If there is no reply when half of the patience has passed, sends it a second time in parallel. Returns
    /// the first reply.
    async fn ask_twice(&self, subject: &str, payload: Bytes) -> Result<Message, RequestError> {
        let ask = || self.ask_on_each_connection(subject.to_owned(), payload.clone());
        let mut first = pin!(ask());
        tokio::select! {
            reply = &mut first => return reply,
            () = tokio::time::sleep(self.patience / 2) => {}
        }
        tokio::select! {
            reply = first => reply,
            reply = ask() => reply,
        }
    }

    /// Sends the request, and sends it again on each new connection. Also sends it again, for a short time, while no
    /// daemon listens.
    async fn ask_on_each_connection(&self, subject: String, payload: Bytes) -> Result<Message, RequestError> {
        let statistics = self.nats.statistics();
        let mut nobody = NobodyPeriod::of(self.patience);
        let mut connections = 0;
        while connections < CONNECTIONS_MAX {
            let connection = statistics.connects.load(Ordering::Relaxed);
            let request = async_nats::Request::new().payload(payload.clone()).timeout(None);
            let another = async {
                while statistics.connects.load(Ordering::Relaxed) == connection {
                    tokio::time::sleep(LOOK_INTERVAL).await;
                }
            };
            tokio::select! {
                reply = self.nats.send_request(subject.clone(), request) => match reply {
                    Err(error)
                        if error.kind() == RequestErrorKind::NoResponders
                            && nobody.lasts(statistics.connects.load(Ordering::Relaxed), Instant::now()) =>
                    {
                        tokio::time::sleep(LOOK_INTERVAL).await;
                    }
                    reply => return reply,
                },
                () = another => connections += 1,
            }
        }
        let text = ended_too_often(payload.len());
        Err(RequestError::with_source(RequestErrorKind::Other, text))
    }
}

/// Returns the error that a reply's headers carry; `None` if they carry none.
pub(super) fn refusal(reply: &Message) -> Option<ClientError> {
    let headers = reply.headers.as_ref()?;
    let code = headers.get(ERROR_CODE_HEADER)?.as_str();
    let text = headers
        .get(ERROR_HEADER)
        .map(|text| text.as_str().to_owned())
        .unwrap_or_default();
    let known = ErrorCode::ALL
        .into_iter()
        .find(|known| known.as_u16().to_string() == code);
    Some(match known {
        Some(code) => ClientError::Refused(WireError::new(code, text)),
        None => ClientError::RefusedOtherwise {
            code: code.to_owned(),
            text,
        },
    })
}
