//! The micro service protocol of NATS (`$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`). With it, `nats micro` lists the
//! daemons and the number of requests that each has answered. Bridges are listed, too, although they take no requests.
//!
//! NATS's ADR-32 defines the protocol. The client library's own implementation also makes the subscriptions for queries
//! and status requests. kvatlas makes these itself, because a daemon must be able to leave its queue group without
//! losing a request. So this module implements only the answers to `$SRV` requests.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{Client, Message, Subject};
use futures_util::StreamExt;
use futures_util::stream::select_all;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use kvatlas_client::{rfc3339, unix_time_us};
use kvatlas_core::wire::{Subjects, WireError};

use crate::broker::{LastingSubscription, RefusedSubscriptions, SubscribeError};
use crate::{BRIDGE, instance_name};

/// Name of the service. Every daemon, gateway and bridge is one instance of it.
const NAME: &str = "kvatlas";
const DESCRIPTION: &str = "Who holds which prefix of a prompt in its KV cache";
/// Largest number of characters of an error's text that statistics show.
const ERROR_CHARACTERS_MAX: usize = 512;

/// Counts of one endpoint's requests since the start.
#[derive(Debug, Default)]
struct EndpointCounts {
    requests: AtomicU64,
    errors: AtomicU64,
    nanoseconds: AtomicU64,
    last_error: Mutex<String>,
}

/// Kinds of requests, one for each endpoint.
#[derive(Debug, Clone, Copy)]
pub enum Asked {
    /// A query, which asks for the holders of a prompt's leading blocks.
    Query,
    /// A status request, which asks for the state of holders.
    Status,
}

/// Counts of a process's requests, over all its connections.
#[derive(Debug)]
pub struct ServiceCounts {
    queries: EndpointCounts,
    statuses: EndpointCounts,
    started_us: u64,
}

impl Default for ServiceCounts {
    /// Makes counts of zero, whose period begins now.
    fn default() -> Self {
        Self {
            queries: EndpointCounts::default(),
            statuses: EndpointCounts::default(),
            started_us: unix_time_us(),
        }
    }
}

impl ServiceCounts {
    /// Counts a request that took the time `elapsed`. If the request failed, also counts and keeps its error.
    pub fn count(&self, asked: Asked, elapsed: Duration, error: Option<&WireError>) {
        let counts = match asked {
            Asked::Query => &self.queries,
            Asked::Status => &self.statuses,
        };
        let nanoseconds = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        counts.requests.fetch_add(1, Ordering::Relaxed);
        counts.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        if let Some(error) = error {
            counts.errors.fetch_add(1, Ordering::Relaxed);
            let text = format!("{}:{}", error.code.as_u16(), error.text);
            *counts.last_error.lock() = text.chars().take(ERROR_CHARACTERS_MAX).collect();
        }
    }
}

/// The requests that a process takes.
#[derive(Debug)]
pub struct Served {
    /// Subject on which the process receives queries.
    pub queries: String,
    /// Subject of questions about the state of holders.
    pub statuses: String,
    /// Queue group that shares queries and status requests among its members.
    pub queue_group: String,
    /// Counts of the queries and status requests.
    pub counts: Arc<ServiceCounts>,
}

impl Served {
    /// Returns the name, the subject and the counts of each endpoint.
    fn endpoints(&self) -> [(&'static str, &str, &EndpointCounts); 2] {
        [
            ("query", &self.queries, &self.counts.queries),
            ("status", &self.statuses, &self.counts.statuses),
        ]
    }
}

/// Facts by which tools tell processes apart and find their admin listeners.
#[derive(Debug)]
pub struct About<'a> {
    /// Name by which people tell the process from others.
    pub instance: String,
    /// Role of the process: `daemon`, `gateway` or `bridge`.
    pub role: &'a str,
    /// First part of the process's subjects.
    pub prefix: &'a str,
    /// Shard whose workers the process follows; `None` if it follows all workers.
    pub shard: Option<String>,
    /// Address at which others reach the process's admin listener, if there is one.
    pub admin: Option<String>,
}

/// Returns the address that others are told of a listener: the host `advertise` with the listener's port, or else the
/// address on which it listens. IPv6 addresses are in brackets.
pub fn advertised(advertise: Option<&str>, listens: SocketAddr) -> String {
    let Some(host) = advertise else {
        return listens.to_string();
    };
    match host.parse() {
        Ok(ip) => SocketAddr::new(ip, listens.port()).to_string(),
        Err(_) => format!("{host}:{}", listens.port()),
    }
}

impl About<'_> {
    fn metadata(self) -> BTreeMap<&'static str, String> {
        let mut metadata = BTreeMap::from([
            ("instance", self.instance),
            ("commit", kvatlas_telemetry::commit().to_owned()),
            ("role", self.role.to_owned()),
            ("subjects_prefix", self.prefix.to_owned()),
        ]);
        metadata.extend(self.shard.map(|shard| ("shard", shard)));
        metadata.extend(self.admin.map(|admin| ("admin", admin)));
        metadata
    }
}

/// Answers the protocol's questions on `client` for a bridge, until `stop` is cancelled. A bridge takes no requests. If NATS
/// refuses the bridge's subscriptions, tools do not find the bridge. `refused` must count these refusals.
pub async fn present_bridge(
    client: Client,
    prefix: &str,
    admin: Option<String>,
    contract: Subjects,
    stop: CancellationToken,
    refused: &RefusedSubscriptions,
) {
    let about = About {
        instance: instance_name(BRIDGE),
        role: "bridge",
        prefix,
        shard: None,
        admin,
    };
    let presence = Presence::new(client, about, None, contract);
    if let Err(error) = presence.run(stop, refused).await {
        tracing::debug!(%error, "nobody finds the bridge among the services any more");
    }
}

/// Answers the protocol's questions about one process.
#[derive(Debug)]
pub struct Presence {
    client: Client,
    /// Name that no other instance of the service has.
    id: String,
    metadata: BTreeMap<&'static str, String>,
    /// The requests that the process answers. `None` for a bridge, which answers no requests.
    served: Option<Served>,
    started_us: u64,
    /// The subjects that kvatlas itself uses. No reply may go to such a subject.
    contract: Subjects,
}

impl Presence {
    /// Makes a value that answers the protocol's questions on `client` for one process. `served` tells which requests
    /// the process takes, if any. No reply is sent to a subject in `contract`, the subjects that kvatlas itself uses.
    pub fn new(client: Client, about: About<'_>, served: Option<Served>, contract: Subjects) -> Self {
        let started_us = served.as_ref().map(|served| served.counts.started_us);
        // The id is as unique as the inboxes of clients must be.
        let inbox = client.new_inbox();
        Self {
            id: inbox.rsplit('.').next().unwrap_or_default().to_owned(),
            metadata: about.metadata(),
            client,
            served,
            started_us: started_us.unwrap_or_else(unix_time_us),
            contract,
        }
    }

    /// Answers questions until `stop` is cancelled. `refused` must count the refusals of the subscriptions to
    /// questions.
    ///
    /// # Errors
    ///
    /// [`SubscribeError`] if the connection is closed.
    pub async fn run(
        self,
        stop: CancellationToken,
        refused: &RefusedSubscriptions,
    ) -> Result<(), SubscribeError> {
        let mut questions = Vec::new();
        for verb in ["PING", "INFO", "STATS"] {
            for subject in [
                format!("$SRV.{verb}"),
                format!("$SRV.{verb}.{NAME}"),
                format!("$SRV.{verb}.{NAME}.{}", self.id),
            ] {
                let subscribed = LastingSubscription::new(self.client.clone(), subject, None, refused);
                questions.push(Box::pin(subscribed.await?.into_stream()));
            }
        }
        let mut questions = select_all(questions);
        loop {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                question = questions.next() => match question {
                    Some(question) => self.answer(question).await,
                    None => return Ok(()),
                },
            }
        }
    }

    async fn answer(&self, question: Message) {
        // The reply is sent with the daemon's permissions. So a client must not make a reply go to a subject that
        // kvatlas itself uses.
        let is_allowed = |subject: &Subject| self.contract.may_reply_to(subject);
        let Some(reply_to) = question.reply.filter(is_allowed) else {
            return;
        };
        let answer = match question.subject.split('.').nth(1) {
            Some("PING") => self.identified("ping"),
            Some("INFO") => self.info(),
            _ => self.stats(),
        };
        // An error means that the client is closed.
        let _ = self.client.publish(reply_to, answer.to_string().into()).await;
    }

    /// Returns the fields that all answers have: the type of the answer and the identity of the process. `answer` is
    /// the word that the type contains.
    fn identified(&self, answer: &str) -> Value {
        json!({
            "type": format!("io.nats.micro.v1.{answer}_response"),
            "name": NAME,
            "id": self.id,
            "version": env!("CARGO_PKG_VERSION"),
            "metadata": self.metadata,
        })
    }

    fn info(&self) -> Value {
        let endpoints = self.served.iter().flat_map(|served| {
            served.endpoints().map(|(name, subject, _)| {
                json!({
                    "name": name,
                    "subject": subject,
                    "queue_group": served.queue_group,
                    "metadata": { "format": "application/msgpack", "contract": "v1" },
                })
            })
        });
        let mut info = self.identified("info");
        info["description"] = DESCRIPTION.into();
        info["endpoints"] = endpoints.collect();
        info
    }

    fn stats(&self) -> Value {
        let endpoints = self.served.iter().flat_map(|served| {
            served.endpoints().map(|(name, subject, counts)| {
                let requests = counts.requests.load(Ordering::Relaxed);
                // The time of all requests, in nanoseconds.
                let time = counts.nanoseconds.load(Ordering::Relaxed);
                json!({
                    "name": name,
                    "subject": subject,
                    "queue_group": served.queue_group,
                    "num_requests": requests,
                    "num_errors": counts.errors.load(Ordering::Relaxed),
                    "last_error": *counts.last_error.lock(),
                    "processing_time": time,
                    "average_processing_time": time.checked_div(requests).unwrap_or_default(),
                })
            })
        });
        let mut stats = self.identified("stats");
        stats["started"] = rfc3339(self.started_us).into();
        stats["endpoints"] = endpoints.collect();
        stats
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::ErrorCode;

    use super::*;

    #[test]
    fn an_advertised_ipv6_address_is_in_brackets() {
        for (advertise, listens, told) in [
            (Some("2001:db8::7"), "0.0.0.0:9000", "[2001:db8::7]:9000"),
            (Some("[2001:db8::7]"), "0.0.0.0:9000", "[2001:db8::7]:9000"),
            (Some("10.0.0.7"), "[::]:9000", "10.0.0.7:9000"),
            (Some("kvatlas-0.llm"), "[::]:9000", "kvatlas-0.llm:9000"),
            (None, "[::1]:9000", "[::1]:9000"),
            (None, "127.0.0.1:9000", "127.0.0.1:9000"),
        ] {
            assert_eq!(advertised(advertise, listens.parse().unwrap()), told);
        }
    }

    #[test]
    fn requests_and_errors_are_counted_by_endpoint() {
        let counts = ServiceCounts::default();
        counts.count(Asked::Query, Duration::from_micros(3), None);
        let error = WireError::new(ErrorCode::TooLarge, "é".repeat(ERROR_CHARACTERS_MAX));
        counts.count(Asked::Query, Duration::from_micros(5), Some(&error));
        counts.count(Asked::Status, Duration::from_micros(1), None);
        let of = |counts: &EndpointCounts| {
            [&counts.requests, &counts.errors, &counts.nanoseconds].map(|count| count.load(Ordering::Relaxed))
        };
        assert_eq!(of(&counts.queries), [2, 1, 8000]);
        assert_eq!(of(&counts.statuses), [1, 0, 1000]);
        let last = counts.queries.last_error.lock();
        assert!(last.starts_with("413:é"), "{last}");
        assert_eq!(last.chars().count(), ERROR_CHARACTERS_MAX);
    }
}
