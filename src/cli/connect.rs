//! NATS connections of commands that end by themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::Client;
use clap::Args;
use kvatlas_client::publish::{PublisherError, Refusals};
use kvatlas_config::{AUTHENTICATION, Config, ReachFlags, Setting, process_environment};
use kvatlas_core::wire::Subjects;
use kvatlas_process::broker::{ConnectPatience, ConnectionNotice, Refusal, Refused, connect};

use super::failure::Failure;
use super::nats_context::Surroundings;
use super::output::say;
use super::text::printable;

/// Maximum number of messages that may wait in one subscription. The messages are replies to this command's own
/// requests, one from each shard.
const SUBSCRIPTION_CAPACITY: usize = 1024;

/// NATS servers and subjects at which a daemon is to be found.
#[derive(Debug, Args)]
pub(super) struct DaemonArguments {
    /// NATS servers to connect to, joined by commas [default: nats://127.0.0.1:4222] [environment: KVATLAS_NATS_URL].
    ///
    /// Authentication and trusted certificates come from flags and KVATLAS_NATS_… variables that are the daemon's, too
    /// (see --help).
    #[arg(long = "nats-url", visible_alias = "nats", value_name = "URLS")]
    urls: Option<String>,
    /// Prefix of every NATS subject [default: kvatlas] [environment: KVATLAS_SUBJECTS_PREFIX].
    #[arg(long = "subjects-prefix", visible_alias = "prefix", value_name = "PREFIX")]
    prefix: Option<String>,
    /// Context of the nats command line that says how to reach NATS [default: the chosen one, unless --nats-url or a
    /// KVATLAS_NATS_… variable is given] [environment: NATS_CONTEXT].
    #[arg(long, value_name = "NAME", conflicts_with = "urls")]
    context: Option<String>,
    #[command(flatten)]
    reach: ReachFlags,
}

impl DaemonArguments {
    /// Loads the settings by which a client reaches a daemon. Flags override the environment, which overrides the
    /// chosen context, which overrides the defaults.
    pub(super) fn load(&self, environment: Variables) -> Result<Config, Failure> {
        self.load_among(environment, &Surroundings::of_process())
    }

    fn load_among(&self, environment: Variables, surroundings: &Surroundings) -> Result<Config, Failure> {
        let (environment, flags) = self.sources(false, environment, surroundings)?;
        Ok(Config::load_for_client(flags, environment.into_iter())?)
    }

    /// Returns the environment, and the given flags as texts, by the keys of their settings. Settings of a context of
    /// the `nats` command line (from `surroundings`) are added to the flags in two cases:
    ///
    /// - A flag names the context. Then the `KVATLAS_NATS_…` variables are removed from the environment. Other flags
    ///   override the context.
    /// - No flag names a server, and no variable says how to reach NATS. Then the context is the one that the environment
    ///   names, or else the one that `nats context select` has chosen. Other flags override it.
    ///
    /// Flags with credentials replace other kinds of credentials, of the context and of the environment.
    ///
    /// `is_given` says whether a flag that `self` does not have says how to reach NATS.
    pub(super) fn sources(
        &self,
        is_given: bool,
        mut environment: Variables,
        surroundings: &Surroundings,
    ) -> Result<(Variables, BTreeMap<String, String>), Failure> {
        let is_about_nats = |variable: &(String, String)| variable.0.starts_with("KVATLAS_NATS_");
        if self.context.is_some() {
            environment.retain(|variable| !is_about_nats(variable));
        }
        let is_told = self.context.is_none()
            && (is_given || self.urls.is_some() || environment.iter().any(is_about_nats));
        let mut flags = match is_told {
            true => BTreeMap::new(),
            false => surroundings.settings(self.context.as_deref())?,
        };
        let given = [("nats.url", &self.urls), ("subjects.prefix", &self.prefix)];
        flags.extend(given_flags(given));
        let reach = self.reach.given();
        for key in other_credentials(reach) {
            flags.remove(key);
            environment
                .retain(|(name, _)| Setting::find(key).is_none_or(|setting| setting.variable != *name));
        }
        flags.extend(reach.clone());
        Ok((environment, flags))
    }

    /// Returns the prefix of subjects that the flag gives; `None` without the flag.
    pub(super) fn prefix(&self) -> Option<&str> {
        self.prefix.as_deref()
    }
}

/// Returns the keys of the settings whose credentials those of the given flags replace: all, or all others if the flags
/// have a user or password only.
fn other_credentials(reach: &BTreeMap<String, String>) -> impl Iterator<Item = &'static str> {
    const LOGIN: [&str; 2] = ["nats.user", "nats.password"];
    let keys = AUTHENTICATION.into_iter().chain([LOGIN[1]]);
    let given: Vec<_> = keys.clone().filter(|key| reach.contains_key(*key)).collect();
    let keeps_login = given.iter().all(|key| LOGIN.contains(key));
    keys.filter(move |key| !(given.is_empty() || keeps_login && LOGIN.contains(key)))
}

/// Environment variables: pairs of name and value.
type Variables = Vec<(String, String)>;

/// Returns the flags that are given, each with the key of its setting.
pub(super) fn given_flags<'a>(
    flags: impl IntoIterator<Item = (&'a str, &'a Option<String>)>,
) -> impl Iterator<Item = (String, String)> {
    let flags = flags.into_iter();
    flags.filter_map(|(key, text)| Some((key.to_owned(), text.clone()?)))
}

/// Connection to a daemon, and the longest wait for it.
#[derive(Debug, Args)]
pub(super) struct ConnectionArguments {
    #[command(flatten)]
    daemon: DaemonArguments,
    /// How long to wait for the server and for an answer: 5, 2.5s or 500ms.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    pub(super) timeout: Duration,
}

/// Connection to NATS, with the subjects that the command uses on it.
#[derive(Debug)]
pub(super) struct NatsConnection {
    pub(super) nats: Client,
    pub(super) subjects: Subjects,
    /// Subscriptions and messages that the server has refused.
    pub(super) refusals: Refusals,
}

impl NatsConnection {
    /// Waits for the answer `asked` to a message on `subject`. Fails immediately if the server refuses the message.
    pub(super) async fn unless_refused<T>(
        &self,
        subject: &str,
        asked: impl Future<Output = T>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            words = self.refusals.of_message(subject) => Err(PublisherError::Refused { words }.into()),
            answer = asked => Ok(answer),
        }
    }
}

impl ConnectionArguments {
    /// Connects to NATS. Fails after the time of `--timeout`.
    pub(super) async fn connect(&self) -> Result<NatsConnection, Failure> {
        let config = self.daemon.load(process_environment())?;
        let subjects = Subjects::new(&config.subjects.prefix).map_err(Failure::usage)?;
        let refusals = Refusals::default();
        let hearing = refusals.clone();
        let inboxes = format!("{}.", config.nats.inbox_prefix);
        let warn = move |notice| {
            // A server reports a refused subject here and nowhere else.
            if let ConnectionNotice::Refused(refusal) = &notice {
                // If a part of the program watches for this refusal, that part reports it.
                if hearing.note(refusal) {
                    return;
                }
                if matches!(&refusal.refused, Refused::Message(subject) if subject.starts_with(&inboxes)) {
                    return;
                }
            }
            let is_inbox = |subject: &String| subject.starts_with(&inboxes);
            let hint = match &notice {
                ConnectionNotice::Refused(Refusal {
                    refused: Refused::Subscription(Some(subject)),
                    ..
                }) if is_inbox(subject) => {
                    "; no answer can come: name the prefix that the server allows with --nats-inbox-prefix"
                }
                _ => "",
            };
            if let ConnectionNotice::Error(_) | ConnectionNotice::LameDuck | ConnectionNotice::Refused(_) =
                notice
            {
                say(format_args!(
                    "warning: NATS: {}{hint}\n",
                    printable(&notice.to_string())
                ));
            }
        };
        let connecting = connect(
            &config.nats,
            "command",
            SUBSCRIPTION_CAPACITY,
            ConnectPatience::FailFast,
            warn,
        );
        let nats = tokio::time::timeout(self.timeout, connecting)
            .await
            .map_err(|_| {
                let patience = self.timeout;
                Failure::unavailable(format_args!(
                    "no NATS server answered within {patience:?}; check the address given with --nats-url"
                ))
            })??;
        Ok(NatsConnection {
            nats,
            subjects,
            refusals,
        })
    }
}

/// Parses a time such as `5` (seconds), `2.5s` or `500ms`.
pub(super) fn parse_time(text: &str) -> Result<Duration, String> {
    let (number, seconds_per_unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let seconds = number
        .parse::<f64>()
        .ok()
        .filter(|_| is_plain)
        .map(|number| number * seconds_per_unit);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|time| (MINIMUM..=MAXIMUM).contains(time))
        .ok_or_else(|| "write a time from 1ms to 1 day, such as 5, 2.5s or 500ms".to_owned())
}

const MINIMUM: Duration = Duration::from_millis(1);
const MAXIMUM: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use kvatlas_config::Authentication;

    use super::*;

    fn arguments(urls: Option<&str>) -> DaemonArguments {
        DaemonArguments {
            urls: urls.map(str::to_owned),
            prefix: None,
            context: None,
            reach: ReachFlags::default(),
        }
    }

    fn variables(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect()
    }

    #[test]
    fn times_have_a_unit_or_are_seconds() {
        assert_eq!(parse_time("5"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_time("2.5s"), Ok(Duration::from_millis(2500)));
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        for text in [
            "",
            "0",
            "-1",
            "s",
            "ms",
            "1m",
            "inf",
            "nan",
            "1e3",
            "99999999999999999999",
        ] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_flag_covers_the_environment() {
        let environment = [
            ("KVATLAS_NATS_URL", "nats://one"),
            ("KVATLAS_SUBJECTS_PREFIX", "site"),
        ];
        let config = arguments(None)
            .load_among(variables(&environment), &Surroundings::default())
            .unwrap();
        assert_eq!(config.nats.urls[0].host(), "one");
        assert_eq!(config.subjects.prefix, "site");
        let config = arguments(Some("nats://two"))
            .load_among(variables(&environment), &Surroundings::default())
            .unwrap();
        assert_eq!(config.nats.urls[0].host(), "two");
    }

    /// Returns a home directory with the context `site`, which is not chosen.
    fn home_with_a_context() -> tempfile::TempDir {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join(".config/nats/context");
        std::fs::create_dir_all(&directory).unwrap();
        let context = r#"{"url":"nats://site","user":"me","password":"secret"}"#;
        std::fs::write(directory.join("site.json"), context).unwrap();
        home
    }

    #[test]
    fn a_context_says_how_to_reach_nats() {
        let home = home_with_a_context();
        let surroundings = Surroundings::in_home(home.path());
        let host = |arguments: &DaemonArguments, environment: &[(&str, &str)]| {
            let config = arguments.load_among(variables(environment), &surroundings);
            config.unwrap().nats.urls[0].host().to_owned()
        };
        let token = [("KVATLAS_NATS_TOKEN", "t"), ("KVATLAS_NATS_URL", "nats://env")];
        assert_eq!(host(&arguments(None), &[]), "127.0.0.1");
        // A context that the flag names overrides the environment.
        let named = DaemonArguments {
            context: Some("site".to_owned()),
            ..arguments(None)
        };
        assert_eq!(host(&named, &token), "site");
        // A context that was only chosen does not override the environment.
        std::fs::write(home.path().join(".config/nats/context.txt"), "site").unwrap();
        assert_eq!(host(&arguments(None), &[]), "site");
        assert_eq!(
            host(&arguments(None), &[("KVATLAS_SUBJECTS_PREFIX", "p")]),
            "site"
        );
        assert_eq!(host(&arguments(None), &token), "env");
        assert_eq!(host(&arguments(Some("nats://flag")), &[]), "flag");
    }

    #[derive(Debug, clap::Parser)]
    struct Flags {
        #[command(flatten)]
        daemon: DaemonArguments,
    }

    #[test]
    fn credentials_of_flags_go_over_the_environment_and_over_a_context() {
        let home = home_with_a_context();
        let surroundings = Surroundings::in_home(home.path());
        std::fs::write(home.path().join(".config/nats/context.txt"), "site").unwrap();
        let environment = [("KVATLAS_NATS_USER", "env"), ("KVATLAS_NATS_PASSWORD", "p")];
        let loaded = |flags: &[&str], environment: &[(&str, &str)]| {
            let flags = <Flags as clap::Parser>::parse_from([&["x"], flags].concat());
            let config = flags.daemon.load_among(variables(environment), &surroundings);
            let nats = config.unwrap().nats;
            let user = match &**nats.authentication.now() {
                Authentication::UserPassword { user, .. } => user.clone(),
                _ => String::new(),
            };
            (nats.urls[0].host().to_owned(), user)
        };
        let of = |host: &str, user: &str| (host.to_owned(), user.to_owned());
        let flags = ["--nats-user=flag", "--nats-password=p"];
        assert_eq!(loaded(&[], &[]), of("site", "me"));
        assert_eq!(loaded(&flags, &environment), of("127.0.0.1", "flag"));
        // A user is no other server, and neither is a prefix.
        assert_eq!(loaded(&flags, &[]), of("site", "flag"));
        assert_eq!(loaded(&["--nats-inbox-prefix=_INBOX_me"], &[]), of("site", "me"));
        // Another kind of credentials takes the place of those of the context and of the environment.
        for context in [&[][..], &["--context=site"]] {
            let token = [context, &["--nats-token=t"]].concat();
            assert_eq!(loaded(&token, &[]), of("site", ""));
        }
        let secret = [("KVATLAS_NATS_URL", "nats://env"), ("KVATLAS_NATS_TOKEN", "t")];
        assert_eq!(loaded(&flags, &secret), of("env", "flag"));
        let named = ["--context=site", "--nats-user=flag"];
        assert_eq!(loaded(&named, &environment), of("site", "flag"));
    }

    #[test]
    fn what_only_the_daemon_reads_does_not_matter() {
        let environment = [("KVATLAS_EVENTS_LANES", "x"), ("KVATLAS_NATS_EMBEDDED", "true")];
        let config = arguments(Some("nats://a"))
            .load_among(variables(&environment), &Surroundings::default())
            .unwrap();
        assert!(!config.nats.embedded);
        let failure = arguments(Some("http://a"))
            .load_among(Vec::new(), &Surroundings::default())
            .unwrap_err();
        assert!(failure.to_string().contains("--nats-url"), "{failure}");
    }
}
