//! `kvatlas doctor` with the credentials of each role.

use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use serde_json::Value;

use super::{ACCOUNTS, ROLES, USERS, broker, daemon, inbox_prefix, password};
use crate::support::doctor::check;
use crate::support::jetstream::{JETSTREAM, servers};

const OPERATING: &str = include_str!("../../../deploy/operating.md");

/// Runs `kvatlas doctor` in a role. Returns its exit code and its checks.
async fn doctor(url: &str, role: &str, more: &[&str]) -> (Option<i32>, Vec<Value>) {
    let variables = [
        ("KVATLAS_NATS_USER", role),
        ("KVATLAS_NATS_PASSWORD", &password(role)),
        ("KVATLAS_NATS_INBOX_PREFIX", &inbox_prefix(role)),
    ];
    crate::support::doctor::doctor(url, more, &variables).await
}

/// Returns the subjects of JetStream on which a daemon has to publish, as operating.md lists them.
fn documented_subjects() -> Vec<&'static str> {
    let (_, list) = OPERATING
        .split_once("The account that the daemon uses needs these subjects")
        .unwrap();
    let (list, _) = list.split_once("- to subscribe to").unwrap();
    let subjects: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
    assert!(
        subjects.iter().all(|subject| subject.starts_with("$JS.API.")),
        "{subjects:?}"
    );
    subjects
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough_for_jetstream() {
    let subjects = documented_subjects();
    let listed = subjects.iter().map(|subject| format!("\"{subject}\""));
    let listed = listed.collect::<Vec<_>>().join(", ");
    let all = r#""$JS.API.>", "$JS.ACK.>", "$O.>""#;
    assert!(USERS.contains(all));
    for server in servers() {
        let mut config_lines: Vec<String> = ROLES
            .iter()
            .map(|(role, variable)| format!("{variable}: \"{}\"", password(role)))
            .collect();
        config_lines.push(USERS.replace(all, &listed));
        let options = BrokerOptions {
            config_lines,
            with_jetstream: true,
            ..crate::support::own_port()
        };
        let broker = EmbeddedBroker::start_with(&server, options).await.unwrap();
        let size = ("events.stream_max_bytes", "16 MiB");
        let daemon = daemon(broker.url(), "daemon", &[JETSTREAM, size]).await;
        let (_, checks) = doctor(broker.url(), "daemon", &["--role", "daemon"]).await;
        let stream = check(&checks, "JetStream");
        assert_eq!(stream["outcome"], "warning", "one replica: {stream}");
        // An operator has no right to JetStream, and needs none.
        let (_, checks) = doctor(broker.url(), "operator", &["--role", "router"]).await;
        assert_eq!(check(&checks, "JetStream")["outcome"], "skipped", "{checks:?}");
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_that_is_refused_is_no_silent_daemon() {
    let broker = broker(USERS).await;
    // No daemon runs, but the check reports the refusal and not the missing daemon.
    let (code, checks) = doctor(broker.url(), "daemon", &[]).await;
    let probe = check(&checks, "round trip");
    assert_eq!((code, &probe["outcome"]), (Some(1), &"failed".into()), "{probe}");
    let found = probe["found"].as_str().unwrap();
    assert!(found.contains("Permissions Violation"), "{probe}");
    // Of the roles, only a publisher must be allowed to publish events.
    for (role, outcome) in [
        ("daemon", "skipped"),
        ("publisher", "failed"),
        ("router", "skipped"),
    ] {
        let (_, checks) = doctor(broker.url(), "daemon", &["--role", role]).await;
        assert_eq!(check(&checks, "round trip")["outcome"], outcome, "{checks:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_may_not_reply_is_not_said_to_answer() {
    let may_reply = r#"allow_responses: { max: 1, expires: "1m" }"#;
    let (_, of_gateway) = USERS.split_once(may_reply).unwrap();
    assert!(of_gateway.contains(may_reply));
    let broker = broker(&USERS.replacen(may_reply, "", 1)).await;
    let daemon = daemon(broker.url(), "daemon", &[]).await;
    let more = ["--role", "router", "--timeout", "1s"];
    let (code, checks) = doctor(broker.url(), "operator", &more).await;
    let probe = check(&checks, "round trip");
    assert_eq!((code, &probe["outcome"]), (Some(1), &"failed".into()), "{probe}");
    assert!(
        probe["found"].as_str().unwrap().starts_with("no answer on"),
        "{probe}"
    );
    assert!(
        probe["mend"].as_str().unwrap().contains("allow_responses"),
        "{probe}"
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rights_of_a_role_are_enough_for_it_with_either_configuration() {
    let roles = [
        ("daemon", "daemon", "llama"),
        ("gpu-0", "publisher", "llama"),
        ("router", "router", "llama"),
        ("operator", "router", "kvatlas-doctor"),
    ];
    for configuration in [USERS, ACCOUNTS] {
        let broker = broker(configuration).await;
        let daemon = daemon(broker.url(), "daemon", &[]).await;
        for (user, role, namespace) in roles {
            let worker = if user == "gpu-0" { user } else { "kvatlas-doctor" };
            let more = ["--role", role, "--namespace", namespace, "--worker", worker];
            let (code, checks) = doctor(broker.url(), user, &more).await;
            let rights = check(&checks, &format!("permissions of a {role}"));
            assert_eq!(rights["outcome"], "fine", "{user}: {rights}");
            let probe = check(&checks, "round trip");
            // In the configuration with accounts, the daemon's user has all rights.
            let may_probe = user == "operator" || user == "daemon" && configuration == ACCOUNTS;
            let expected = if may_probe { "fine" } else { "skipped" };
            assert_eq!(probe["outcome"], expected, "{user}: {probe}");
            if user == "router" {
                let search = check(&checks, "replicas");
                assert_eq!(search["outcome"], "warning", "{search}");
                assert!(search.to_string().contains("$SRV.PING.kvatlas"), "{search}");
            }
            if user == "operator" {
                assert_eq!(code, Some(0), "{checks:?}");
                let found = format!("replica {}", daemon.admin_address().unwrap());
                assert_eq!(check(&checks, &found)["outcome"], "fine");
            }
        }
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_needs_each_of_its_subscriptions() {
    for (subject, tried) in [
        ("kvatlas.v1.admin.>", "kvatlas.v1.admin.*"),
        ("kvatlas.v1.outcome.*", "kvatlas.v1.outcome.*"),
        ("kvatlas.v1.hint.*", "kvatlas.v1.hint.*"),
        ("$SRV.>", "$SRV.PING"),
        ("kvatlas.v1.shards.>", "kvatlas.v1.shards.query.>"),
    ] {
        // The daemon's entry is the first in the file that has the right, so only the daemon loses it.
        let right = format!("\"{subject}\",");
        assert!(USERS.contains(&right), "{right}");
        let broker = broker(&USERS.replacen(&right, "", 1)).await;
        let settings = tempfile::NamedTempFile::new().unwrap();
        let text = "[hints]\nttl_ms = 1000\n[sharding]\nshard = \"0/2\"\n";
        std::fs::write(settings.path(), text).unwrap();
        let config = settings.path().to_str().unwrap();
        let (_, checks) = doctor(broker.url(), "daemon", &["--role", "daemon", "--config", config]).await;
        let check = check(&checks, "permissions of a daemon");
        assert_eq!(check["outcome"], "failed", "{subject}: {check}");
        assert!(check["found"].as_str().unwrap().contains(tried), "{check}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_needs_its_own_rights_and_not_those_of_a_daemon() {
    let settings = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(settings.path(), "[gateway]\nenabled = true\n").unwrap();
    let config = settings.path().to_str().unwrap();
    let shards = r#""kvatlas.v1.shards.query.>", "kvatlas.v1.shards.status.>", "#;
    assert!(USERS.contains(shards));
    let without = USERS.replacen(shards, "", 1);
    for (configuration, outcome) in [(USERS, "fine"), (ACCOUNTS, "fine"), (without.as_str(), "failed")] {
        let broker = broker(configuration).await;
        let (_, checks) = doctor(broker.url(), "gateway", &["--role", "daemon", "--config", config]).await;
        let rights = check(&checks, "permissions of a gateway");
        assert_eq!(rights["outcome"], outcome, "{rights}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_with_which_a_role_cannot_work_fail() {
    for (user, role, worker, right, without, failed, found) in [
        (
            "gpu-0",
            "publisher",
            "gpu-0",
            r#"publish: { allow: ["kvatlas.v1.events.*.gpu-0", "_INBOX_gpu-0.>"] }"#,
            r#"publish: { deny: [">"] }"#,
            "round trip",
            "kvatlas.v1.events.llama.gpu-0",
        ),
        (
            "gpu-0",
            "publisher",
            "gpu-0",
            r#"publish: { allow: ["kvatlas.v1.events.*.gpu-0", "_INBOX_gpu-0.>"] }
        subscribe: { allow: ["kvatlas.v1.resync.*.gpu-0.*", "_INBOX_gpu-0.>"] }"#,
            r#"publish: { deny: [">"] }
        subscribe: { allow: ["kvatlas.v1.resync.*.gpu-0.*"] }"#,
            "round trip",
            "kvatlas.v1.events.llama.gpu-0",
        ),
        (
            "daemon",
            "daemon",
            "kvatlas-doctor",
            r#""_INBOX_DAEMON.>", "$SRV.PING.kvatlas""#,
            r#""$SRV.PING.kvatlas""#,
            "permissions of a daemon",
            "to publish to _INBOX_DAEMON.",
        ),
        (
            "operator",
            "router",
            "kvatlas-doctor",
            r#"subscribe: { allow: ["_INBOX_OPERATOR.>"] }"#,
            r#"subscribe: { allow: ["_INBOX_OTHER.>"] }"#,
            "permissions of a router",
            "to subscribe to _INBOX_OPERATOR.",
        ),
    ] {
        assert_eq!(USERS.matches(right).count(), 1, "{right}");
        let broker = broker(&USERS.replacen(right, without, 1)).await;
        let more = ["--role", role, "--namespace", "llama", "--worker", worker];
        let (code, checks) = doctor(broker.url(), user, &more).await;
        let failure = check(&checks, failed);
        assert_eq!(
            (code, &failure["outcome"]),
            (Some(1), &"failed".into()),
            "{failure}"
        );
        assert!(failure["found"].as_str().unwrap().contains(found), "{failure}");
        // The failure is of the credentials, and not of a daemon that does not reply.
        let probe = check(&checks, "round trip");
        assert!(!probe.to_string().contains("allow_responses"), "{probe}");
    }
}
