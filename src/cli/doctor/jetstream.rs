//! Check of JetStream: whether it answers, and whether the events stream is there.

use async_nats::jetstream::context::{Context, RequestError, RequestErrorKind};
use async_nats::jetstream::response::Response;
use async_nats::jetstream::{self, Error as ApiError, ErrorCode, stream};
use kvatlas_client::Refusal;
use kvatlas_core::wire::Subjects;
use kvatlas_daemon::check_config;
use kvatlas_process::setup::Setup;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::broker::DoctorConnection;
use super::report::Check;
use super::{DoctorArguments, NatsRole};

const NAME: &str = "JetStream";
/// Beginning of all subjects on which JetStream takes requests.
const API: &str = "$JS.API";

/// Reason why a request to JetStream has no usable answer.
#[derive(Debug)]
enum Unanswered {
    /// The server refused the request: these credentials may not send it.
    Refused(Refusal),
    /// No answer came, or it could not be read.
    Lost(RequestError),
    /// The answer is an error.
    Denied(ApiError),
}

/// Returns the check of JetStream. The check is skipped if no daemon needs JetStream, or if the server refuses the
/// request and the credentials are not for daemons. `is_followed` says whether a daemon runs.
pub(super) async fn check(
    connected: &DoctorConnection,
    setup: &Setup,
    arguments: &DoctorArguments,
    subjects: &Subjects,
    is_followed: bool,
) -> Check {
    let role = arguments.role;
    if setup.stream.is_none() && !setup.has_object_store {
        return Check::skipped(
            NAME,
            "not needed: events.transport is core, and there is no snapshots.object_store",
        );
    }
    let mut context = jetstream::new(connected.nats.clone());
    context.set_timeout(arguments.timeout);
    let Some(name) = &setup.stream else {
        return match ask::<IgnoredAny>(connected, &context, "INFO").await {
            Ok(_) => Check::fine(NAME, "it answers"),
            Err(why) => trouble(why, role),
        };
    };
    match ask::<stream::Info>(connected, &context, &format!("STREAM.INFO.{name}")).await {
        Ok(info) => judge(&info, &subjects.all_events()),
        Err(Unanswered::Denied(error)) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            missing(name, is_followed)
        }
        Err(why) => trouble(why, role),
    }
}

/// Sends a request to JetStream, and returns its answer. Stops waiting if the server refuses the request.
async fn ask<T: DeserializeOwned>(
    connected: &DoctorConnection,
    context: &Context,
    request: &str,
) -> Result<T, Unanswered> {
    let subject = format!("{API}.{request}");
    let asked = context.request::<_, _, Response<T>>(request.to_owned(), &());
    let answered = connected.unless_refused(&[&subject], asked).await;
    match answered.map_err(Unanswered::Refused)?.map_err(Unanswered::Lost)? {
        Response::Ok(answer) => Ok(answer),
        Response::Err { error } => Err(Unanswered::Denied(error)),
    }
}

/// Returns the check of a stream that exists. It must have the one subject `expected`, and keep all messages on it.
fn judge(info: &stream::Info, expected: &str) -> Check {
    let stream::Config {
        name, num_replicas, ..
    } = &info.config;
    if let Err(error) = check_config(&info.config, expected) {
        return Check::failed(NAME, error, "correct the stream: until then no daemon is ready");
    }
    let found = format!(
        "the stream {name} keeps {} messages on {num_replicas} replicas",
        info.state.messages
    );
    if *num_replicas < 2 {
        let mend =
            "on a cluster, set events.stream_replicas to 3, so that the loss of a server loses no event";
        return Check::warning(NAME, found, mend);
    }
    Check::fine(NAME, found)
}

fn missing(name: &str, is_followed: bool) -> Check {
    let found = format!("there is no stream {name}");
    let mend = match is_followed {
        true => {
            "the daemon creates it unless events.stream_create is off: its log and /readyz say why it cannot; see \
             events.stream_max_bytes and events.stream_replicas"
        }
        false => "start the daemon, which creates it unless events.stream_create is off",
    };
    Check::failed(NAME, found, mend)
}

/// Returns the check for a request that has no usable answer. If the server refuses the request, the check fails only
/// for credentials of a daemon, and else is skipped.
fn trouble(why: Unanswered, role: NatsRole) -> Check {
    let turn_on = "turn it on in the server's configuration (jetstream { store_dir: … }) and for the account; at a leaf node, run the \
         doctor where the daemon connects";
    let see_servers =
        "see the logs of the NATS servers: in a cluster, more than half of those with JetStream must run";
    match why {
        Unanswered::Refused(refusal) if role.includes(NatsRole::Daemon) => Check::failed(
            NAME,
            refusal,
            "let the daemon do so: deploy/operating.md names the subjects that JetStream needs",
        ),
        Unanswered::Refused(refusal) => Check::skipped(NAME, refusal),
        Unanswered::Lost(error) => match error.kind() {
            RequestErrorKind::NoResponders => {
                Check::failed(NAME, "nobody answers: it is off at this server", turn_on)
            }
            RequestErrorKind::TimedOut => Check::failed(NAME, "no answer came in time", see_servers),
            _ => Check::failed(NAME, error, "see the log of the NATS server"),
        },
        Unanswered::Denied(error) => match error.error_code() {
            ErrorCode::JETSTREAM_NOT_ENABLED | ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
                Check::failed(NAME, error, turn_on)
            }
            ErrorCode::CLUSTER_NOT_AVAILABLE => Check::failed(NAME, error, see_servers),
            _ => Check::failed(NAME, error, "see the log of the NATS server"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::CheckOutcome;
    use super::*;

    #[test]
    fn only_a_daemons_credentials_need_jetstream() {
        let refused = || {
            let words = r#"nats: Permissions Violation for Publish to "$JS.API.STREAM.INFO.A""#;
            Unanswered::Refused(Refusal::parse(words).unwrap())
        };
        for role in [NatsRole::Daemon, NatsRole::All] {
            let check = trouble(refused(), role);
            assert_eq!(check.outcome(), CheckOutcome::Failed);
            assert!(check.found().contains("$JS.API.STREAM.INFO.A"), "{check:?}");
            assert!(!check.mend().contains("turn it on"), "{check:?}");
        }
        assert_eq!(
            trouble(refused(), NatsRole::Router).outcome(),
            CheckOutcome::Skipped
        );
    }

    #[test]
    fn only_jetstream_that_is_off_is_to_be_turned_on() {
        let lost = |kind| trouble(Unanswered::Lost(RequestError::new(kind)), NatsRole::Daemon);
        let denied = |code: u64| {
            let error = serde_json::json!({"code": 503, "err_code": code, "description": "words"});
            let error = serde_json::from_value(error).unwrap();
            trouble(Unanswered::Denied(error), NatsRole::Daemon)
        };
        for off in [lost(RequestErrorKind::NoResponders), denied(10076), denied(10039)] {
            assert!(off.mend().starts_with("turn it on"), "{off:?}");
        }
        for on in [
            lost(RequestErrorKind::TimedOut),
            lost(RequestErrorKind::Other),
            denied(10008),
            denied(10001),
        ] {
            assert_eq!(on.outcome(), CheckOutcome::Failed);
            assert!(!on.mend().contains("turn it on"), "{on:?}");
        }
        assert!(denied(10008).mend().contains("more than half"));
    }

    #[test]
    fn a_stream_that_no_daemon_reads_fails() {
        let judged = |max_message_size: i32| {
            let info = serde_json::json!({
                "config": {
                    "name": "E", "subjects": ["e.>"], "retention": "limits", "max_consumers": -1, "max_msgs": -1, "max_bytes": -1,
                    "discard": "old", "max_age": 0, "storage": "file", "num_replicas": 3, "max_msg_size": max_message_size
                },
                "created": "2026-01-01T00:00:00Z",
                "state": {
                    "messages": 0, "bytes": 0, "consumer_count": 0, "first_seq": 1, "last_seq": 0,
                    "first_ts": "0001-01-01T00:00:00Z", "last_ts": "0001-01-01T00:00:00Z"
                }
            });
            judge(&serde_json::from_value(info).unwrap(), "e.>")
        };
        assert_eq!(judged(-1).outcome(), CheckOutcome::Fine);
        let failed = judged(300);
        assert_eq!(failed.outcome(), CheckOutcome::Failed);
        assert!(failed.found().contains("max_msg_size"), "{failed:?}");
    }

    #[test]
    fn a_daemon_that_runs_is_not_to_be_started() {
        assert!(missing("A", false).mend().starts_with("start the daemon"));
        assert!(!missing("A", true).mend().contains("start"));
    }
}
