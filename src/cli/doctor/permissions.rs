//! Checks of the permissions that the NATS server gives this connection.
//!
//! The server does not list permissions. A client learns whether it may subscribe or publish only by doing so. So the
//! checks subscribe and publish. The messages have no effect on their receivers, and the subscriptions end immediately.

use kvatlas_config::Config;
use kvatlas_core::wire::{NamespaceName, Subjects};
#[cfg(feature = "dynamo")]
use kvatlas_daemon::dynamo_subjects;
use kvatlas_process::broker::Refused;
use kvatlas_process::setup::Setup;

use super::broker::{DoctorConnection, PASSING_ON};
use super::report::Check;
use super::{DoctorArguments, NatsRole};

/// Returns a check of the permissions of each chosen role.
pub(super) async fn check(
    arguments: &DoctorArguments,
    config: &Config,
    subjects: &Subjects,
    connected: &DoctorConnection,
    setup: &Setup,
) -> Vec<Check> {
    let inbox = connected.nats.new_inbox();
    let mut checks = Vec::new();
    for role in [NatsRole::Daemon, NatsRole::Publisher, NatsRole::Router] {
        if arguments.role.includes(role) {
            let mut needs = Needs::of(role, arguments, config, subjects);
            needs.add_inbox(role, &inbox, setup);
            let mend = |refused: &[Refused]| mend(refused, &inbox, &arguments.namespace);
            let whose = match role {
                NatsRole::Daemon if config.gateway.enabled => "gateway".to_owned(),
                role => format!("{role:?}").to_lowercase(),
            };
            checks.push(needs.check(&whose, connected, mend).await);
        }
    }
    checks
}

#[cfg(not(feature = "dynamo"))]
fn dynamo_subjects(_config: &Config) -> Vec<String> {
    Vec::new()
}

/// Subjects on which a role (a daemon, a publisher or a router) publishes and subscribes.
struct Needs {
    subscribe: Vec<String>,
    /// Subjects on which the role publishes. On each of them, an empty message has no effect.
    publish: Vec<String>,
}

impl Needs {
    fn of(role: NatsRole, arguments: &DoctorArguments, config: &Config, subjects: &Subjects) -> Self {
        let (namespace, worker) = (&arguments.namespace, &arguments.worker);
        match role {
            NatsRole::Daemon | NatsRole::All if config.gateway.enabled => {
                Self::of_gateway(namespace, config, subjects)
            }
            NatsRole::Daemon | NatsRole::All => Self::of_daemon(arguments, config, subjects),
            // The round trip shows whether events may be published: an empty event would not be without effect.
            NatsRole::Publisher => Self {
                subscribe: vec![subjects.resync(namespace, worker, 0)],
                publish: Vec::new(),
            },
            // Daemons pass over an empty message that wants no reply.
            NatsRole::Router => Self {
                subscribe: Vec::new(),
                publish: vec![subjects.query(namespace), subjects.status(namespace)],
            },
        }
    }

    /// Returns the needs of a daemon with the configuration `config`.
    fn of_daemon(arguments: &DoctorArguments, config: &Config, subjects: &Subjects) -> Self {
        let asked = match config.sharding.shard {
            Some(_) => subjects.of_shards(),
            None => subjects.clone(),
        };
        let roster = subjects.roster(&config.queries.queue_group);
        let mut subscribe = vec![
            subjects.all_events(),
            asked.all_queries(),
            asked.all_statuses(),
            roster.clone(),
            subjects.all_outcomes(),
        ];
        subscribe.extend(config.hints.time_to_live.map(|_| subjects.all_hints()));
        let publish = vec![
            subjects.resync(&arguments.namespace, &arguments.worker, 0),
            roster,
            asked.query_filler(),
            asked.status_filler(),
        ];
        Self { subscribe, publish }.and_of_any(config, subjects)
    }

    /// Returns the needs of a gateway with the configuration `config`, but for the right to pass on reports: shards
    /// would count an empty one as dropped. Shards pass over an empty question that wants no reply.
    fn of_gateway(namespace: &NamespaceName, config: &Config, subjects: &Subjects) -> Self {
        let shards = subjects.of_shards();
        let needs = Self {
            subscribe: vec![subjects.all_queries(), subjects.all_statuses()],
            publish: vec![
                shards.query(namespace),
                shards.status(namespace),
                subjects.query_filler(),
                subjects.status_filler(),
            ],
        };
        needs.and_of_any(config, subjects)
    }

    /// Adds what daemons and gateways need alike: to hear commands, searches for services, and Dynamo's routers.
    fn and_of_any(mut self, config: &Config, subjects: &Subjects) -> Self {
        let optional = [
            (config.admin.commands, subjects.all_admin()),
            (config.queries.discovery, "$SRV.PING".to_owned()),
        ];
        let needed = optional.into_iter().filter(|(is_needed, _)| *is_needed);
        self.subscribe.extend(needed.map(|(_, subject)| subject));
        self.subscribe.extend(dynamo_subjects(config));
        self.publish.extend(dynamo_subjects(config));
        self
    }

    /// Adds the role's rights to its inbox. A publisher receives only acknowledgements there, of events that a stream
    /// keeps. A daemon also sends messages to itself.
    fn add_inbox(&mut self, role: NatsRole, inbox: &str, setup: &Setup) {
        if role != NatsRole::Publisher || setup.stream.is_some() {
            self.subscribe.push(inbox.to_owned());
        }
        if role.includes(NatsRole::Daemon) {
            self.publish.push(inbox.to_owned());
        }
    }

    async fn check(
        self,
        whose: &str,
        connected: &DoctorConnection,
        mend: impl Fn(&[Refused]) -> String,
    ) -> Check {
        let name = format!("permissions of a {whose}");
        let refused = match self.try_all(connected).await {
            Ok(refused) => refused,
            Err(error) => return Check::failed(&name, error, "see the log of the NATS server"),
        };
        if refused.is_empty() {
            return Check::fine(&name, self.describe_allowed());
        }
        let named: Vec<String> = refused.iter().map(describe).collect();
        Check::failed(
            &name,
            format!("the server refuses {}", named.join(", ")),
            mend(&refused),
        )
    }

    /// Returns a text that lists each tested subject, and what is allowed on it.
    fn describe_allowed(&self) -> String {
        let tried = [("subscribe", &self.subscribe), ("publish", &self.publish)];
        let tried = tried.iter().filter(|(_, subjects)| !subjects.is_empty());
        let allowed: Vec<String> = tried
            .map(|(what, subjects)| format!("to {what} to {}", subjects.join(", ")))
            .collect();
        format!("the server allows {}", allowed.join("; "))
    }

    async fn try_all(&self, connected: &DoctorConnection) -> Result<Vec<Refused>, async_nats::Error> {
        let nats = &connected.nats;
        let mut subscriptions = Vec::new();
        for subject in &self.subscribe {
            subscriptions.push(nats.subscribe(subject.clone()).await?);
        }
        for subject in &self.publish {
            nats.publish(subject.clone(), bytes::Bytes::new()).await?;
        }
        nats.flush().await?;
        for mut subscription in subscriptions {
            subscription.unsubscribe().await?;
        }
        let mut refusals = connected.refusals.lock().await;
        let mut refused = Vec::new();
        while let Ok(Some(refusal)) = tokio::time::timeout(PASSING_ON, refusals.recv()).await {
            // An earlier check may have been refused something else.
            if !self.concerns(&refusal.refused) {
                continue;
            }
            refused.push(refusal.refused);
        }
        Ok(refused)
    }

    /// Whether the server refused a subscription or a message that is among these needs.
    fn concerns(&self, refused: &Refused) -> bool {
        match refused {
            Refused::Subscription(Some(subject)) => self.subscribe.contains(subject),
            Refused::Subscription(None) => !self.subscribe.is_empty(),
            Refused::Message(subject) => self.publish.contains(subject),
        }
    }
}

/// Returns a text that says what the server refused.
fn describe(refused: &Refused) -> String {
    match refused {
        Refused::Subscription(Some(subject)) => format!("to subscribe to {subject}"),
        Refused::Subscription(None) => "a subscription".to_owned(),
        Refused::Message(subject) => format!("to publish to {subject}"),
    }
}

/// Returns the advice on what the server has refused to a client that is answered at `inbox` and asks about `namespace`.
fn mend(refused: &[Refused], inbox: &str, namespace: &NamespaceName) -> String {
    let subjects = || refused.iter().filter_map(Refused::subject);
    let mut mends = Vec::new();
    if subjects().any(|subject| subject == inbox) {
        mends
            .push("name the inbox prefix that the server allows for these credentials (--nats-inbox-prefix)");
    }
    if subjects().any(|subject| subject.split('.').any(|token| token == namespace.as_str())) {
        mends.push("name a namespace that these credentials are for (--namespace)");
    }
    mends.push(
        "allow it in the server's configuration, as deploy/nats does, or give the credentials of that role; \
         --role says which roles these credentials are for",
    );
    mends.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_counts_for_the_role_that_needs_the_subject() {
        let needs = Needs {
            subscribe: vec!["a.events".to_owned()],
            publish: vec!["a.query".to_owned()],
        };
        let subscription = |subject: &str| Refused::Subscription(Some(subject.to_owned()));
        let message = |subject: &str| Refused::Message(subject.to_owned());
        assert!(needs.concerns(&subscription("a.events")) && needs.concerns(&message("a.query")));
        assert!(needs.concerns(&Refused::Subscription(None)));
        for other in [
            message("$SRV.PING.kvatlas"),
            message("a.events"),
            subscription("a.query"),
        ] {
            assert!(!needs.concerns(&other), "{other:?}");
        }
    }

    #[test]
    fn an_inbox_is_needed_by_whoever_is_answered() {
        let rights = |role, stream: Option<&str>| {
            let mut needs = Needs {
                subscribe: Vec::new(),
                publish: Vec::new(),
            };
            let setup = Setup {
                max_message_bytes: 0,
                stream: stream.map(str::to_owned),
                has_object_store: false,
                snapshots: None,
            };
            needs.add_inbox(role, "_INBOX.a", &setup);
            (needs.subscribe.len(), needs.publish.len())
        };
        assert_eq!(rights(NatsRole::Daemon, None), (1, 1));
        assert_eq!(rights(NatsRole::Router, None), (1, 0));
        assert_eq!(rights(NatsRole::Publisher, None), (0, 0));
        assert_eq!(rights(NatsRole::Publisher, Some("EVENTS")), (1, 0));
    }

    #[test]
    fn what_is_allowed_says_what_for() {
        let needs = Needs {
            subscribe: vec!["a.roster".to_owned(), "a.b".to_owned()],
            publish: vec!["a.roster".to_owned()],
        };
        assert_eq!(
            needs.describe_allowed(),
            "the server allows to subscribe to a.roster, a.b; to publish to a.roster"
        );
    }

    #[test]
    fn the_advice_names_the_flag_that_helps() {
        let namespace = NamespaceName::new("llama").unwrap();
        let advice = |refused: &[Refused]| mend(refused, "_INBOX.a", &namespace);
        let inbox = Refused::Subscription(Some("_INBOX.a".to_owned()));
        let query = Refused::Message("kvatlas.v1.query.llama".to_owned());
        let events = Refused::Subscription(Some("kvatlas.v1.events.>".to_owned()));
        assert!(advice(&[events.clone(), inbox]).starts_with("name the inbox prefix"));
        assert!(advice(&[query]).starts_with("name a namespace"));
        assert!(advice(&[events, Refused::Subscription(None)]).starts_with("allow it"));
    }
}
