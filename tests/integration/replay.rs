//! `kvatlas replay` and `kvatlas demo`: the real binary, a real broker, and every reply compared with the truth.

use std::fmt::Write as _;
use std::num::{NonZeroU32, NonZeroUsize};
use std::process::Output;
use std::time::Duration;

use kvatlas_client::ClientError;
use kvatlas_client::publish::Transport;
use kvatlas_core::wire::{ErrorCode, NamespaceName};
use kvatlas_daemon::Daemon;
use kvatlas_simulation::{FleetSize, SteadyFleet, SteadyOptions};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::support::{Client, broker, by_sequence, config, daemon, eventually, hashes, process, skipped};

const FAILED: i32 = 1;
const USAGE: i32 = 64;

/// Runs the binary, without the settings of the person who runs the tests.
fn kvatlas(arguments: &[&str]) -> Output {
    kvatlas_with(&[], arguments)
}

/// Runs the binary as [`kvatlas`] does, with further environment variables.
fn kvatlas_with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    process::kvatlas(arguments)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

/// Reads the standard output of a command as one JSON object.
fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn count(report: &Value, key: &str) -> u64 {
    report[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no count {key} in {report}"))
}

/// Makes a trace of conversations. All share their first block, and each one grows from turn to turn while requests of
/// other conversations come between. So blocks are found again, evicted, and stored again.
fn trace(requests: u64) -> NamedTempFile {
    let mut text = String::new();
    for number in 0..requests {
        let (conversation, turn) = (number * 7 % 23, number / 23 % 6);
        let mut ids = vec![0];
        ids.extend((0..4 + turn * 3).map(|block| 1 + conversation * 1000 + block));
        // Some requests have a block that no other request has.
        ids.extend((number % 5 == 0).then_some(1_000_000 + number));
        let ids = ids.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        writeln!(
            text,
            r#"{{"timestamp": {}, "input_length": 1, "output_length": 20, "hash_ids": [{ids}]}}"#,
            number * 40
        )
        .unwrap();
    }
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

/// Runs a replay of `trace` on a small fleet, with `more` arguments.
fn replay(trace: &NamedTempFile, more: &[&str]) -> Output {
    let path = trace.path().to_str().unwrap();
    let always = [
        "replay",
        "--trace",
        path,
        "--workers",
        "5",
        "--blocks-per-worker",
        "60",
        "--json",
    ];
    let arguments: Vec<_> = always.iter().chain(more).copied().collect();
    kvatlas(&arguments)
}

#[test]
fn every_reply_about_a_small_fleet_is_right() {
    let output = replay(&trace(600), &["--embedded", "--checkpoint-requests", "50"]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(
        (count(&report, "requests"), count(&report, "wrong_replies")),
        (600, 0)
    );
    // There are twelve checkpoints with a sample each, and a check of every distinct prompt at the end.
    assert!(count(&report, "checked_replies") > 12 * 50, "{report}");
    let hit_rate = report["hit_rate"].as_f64().unwrap();
    assert!(hit_rate > 0.1 && hit_rate < 1.0, "{report}");
    assert!(hit_rate > report["random_hit_rate"].as_f64().unwrap(), "{report}");
    // More blocks were stored than there is room for, so blocks were removed, too.
    assert!(count(&report, "blocks") > 2 * 5 * 60, "{report}");
    assert!(count(&report, "indexed_blocks") <= 5 * 60, "{report}");
    let latency = &report["query_us"];
    let percentiles = ["p50", "p99", "p999", "max"].map(|key| count(latency, key));
    assert!(percentiles.is_sorted() && percentiles[0] > 0, "{report}");
}

#[test]
fn every_reply_about_a_fleet_that_publishes_through_a_stream_is_right() {
    let output = replay(&trace(200), &["--embedded", "--transport", "jetstream"]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(
        (count(&report, "requests"), count(&report, "wrong_replies")),
        (200, 0)
    );
    // The number of replies with a momentary doubt depends on how busy the machine is.
    assert_eq!(count(&report, "degraded_replies"), 0, "{report}");
}

#[test]
fn with_a_checkpoint_after_each_request_a_seed_repeats_the_run() {
    let trace = trace(120);
    let run = |seed: &str| {
        let more = [
            "--embedded",
            "--checkpoint-requests",
            "1",
            "--in-flight",
            "1",
            "--seed",
            seed,
        ];
        let report = report(&replay(&trace, &more));
        let keys = ["requests", "events", "blocks", "hit_rate", "wrong_replies"];
        keys.map(|key| report[key].to_string())
    };
    assert_eq!(run("7"), run("7"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_runs_already_is_left_as_it_was() {
    let broker = crate::support::broker().await;
    let daemon = crate::support::daemon(broker.url(), &[]).await;
    let trace = trace(100);
    let namespace = NamespaceName::new("replay").unwrap();
    let client = crate::support::Client::connect(broker.url()).await;
    let holders = async || {
        let status = client.queries.status(&namespace).await.unwrap();
        status.holders.len()
    };

    let output = replay(&trace, &["--nats", broker.url()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(holders().await, 0);

    let output = replay(&trace, &["--nats", broker.url(), "--no-cleanup"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(holders().await, 5);

    // The namespace now has workers of another client, and they stay.
    let output = replay(&trace, &["--nats", broker.url()]);
    assert_eq!(output.status.code(), Some(USAGE), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("--namespace"));
    assert_eq!(holders().await, 5);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_daemons_environment_it_is_found_without_a_flag() {
    let broker = crate::support::broker().await;
    let daemon = crate::support::daemon(broker.url(), &[("subjects.prefix", "site")]).await;
    let trace = trace(20);
    let path = trace.path().to_str().unwrap();
    let variables = [
        ("KVATLAS_NATS_URL", broker.url()),
        ("KVATLAS_SUBJECTS_PREFIX", "site"),
    ];
    let output = kvatlas_with(&variables, &["replay", "--trace", path, "--json"]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(count(&report, "wrong_replies"), 0, "{report}");
    // The replay has left the namespace empty. A query with the same variables finds it.
    let status = ["query", "--namespace", "replay", "--status", "--json"];
    let output = kvatlas_with(&variables, &status);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_replies_fail_the_command() {
    let broker = crate::support::broker().await;
    // This daemon needs the content of blocks, which a trace does not have. It rejects the events, and the replay
    // reports that.
    let daemon = crate::support::daemon(broker.url(), &[("namespace_defaults.hashing", "recompute")]).await;
    let output = replay(&trace(50), &["--nats", broker.url()]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(FAILED), "{report}");
    assert!(count(&report, "wrong_replies") > 0, "{report}");
    assert!(!report["differences"].as_array().unwrap().is_empty(), "{report}");
    daemon.stop().await;
}

#[test]
fn a_mistake_in_the_trace_is_shown_before_anything_starts() {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "{\"timestamp\": 0, \"hash_ids\": [1]}\n{\"timestamp\": 0}\n",
    )
    .unwrap();
    let output = replay(&file, &["--embedded"]);
    assert_eq!(output.status.code(), Some(USAGE));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("line 2") && text.contains("hash_ids"), "{text}");
}

#[test]
fn the_demo_beats_chance_and_is_right() {
    let output = kvatlas(&["demo", "--requests", "1000", "--seconds", "60", "--json"]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(
        (count(&report, "requests"), count(&report, "wrong_replies")),
        (1000, 0)
    );
    let rate = |key: &str| report[key].as_f64().unwrap();
    assert!(rate("hit_rate") > rate("random_hit_rate"), "{report}");
    assert!(
        !report["sample_holders"].as_array().unwrap().is_empty(),
        "{report}"
    );
}

#[test]
fn the_demo_is_readable_without_a_terminal() {
    let output = kvatlas(&["demo", "--requests", "300"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let (shown, said) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(said.contains("NATS server for development"), "{said}");
    assert!(!said.contains("WARN"), "{said}");
    assert!(
        shown.contains("Which worker holds how much of this prompt"),
        "{shown}"
    );
    assert!(shown.contains("of which wrong: 0"), "{shown}");
    assert!(
        !shown.contains('\u{1b}') && !said.contains('\u{1b}'),
        "{shown}{said}"
    );
}

#[test]
fn the_demo_says_how_to_get_a_server() {
    let output = process::kvatlas(&["demo"])
        .env("NATS_SERVER_BIN", "/nonexistent/nats-server")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(64));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("NATS_SERVER_BIN") && text.contains("/nonexistent"),
        "{text}"
    );
}

/// Replays the production trace of 12,031 requests. No reply may be wrong. The trace is in a directory next to the
/// checkout on the developers' machines. Where it is missing, the test reports that it was skipped, but in CI it fails.
#[test]
fn every_reply_about_a_real_trace_is_right() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/traces/conversation_trace.jsonl");
    if !path.exists() {
        assert!(std::env::var_os("CI").is_none(), "{} is missing", path.display());
        skipped(&format!("there is no trace at {}", path.display()));
        return;
    }
    for workers in ["16", "64", "256"] {
        let output = kvatlas(&[
            "replay",
            "--trace",
            path.to_str().unwrap(),
            "--workers",
            workers,
            "--embedded",
            "--json",
        ]);
        let report = report(&output);
        assert_eq!(count(&report, "wrong_replies"), 0, "{workers} workers: {report}");
        assert_eq!(count(&report, "requests"), 12_031);
        assert!(count(&report, "checked_replies") > 12_000, "{report}");
        assert!(output.status.success());
    }
}

/// One of two replicas refuses the fleet's namespace. Whoever asks that replica gets nothing to compare.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_does_not_know_the_namespace_is_no_right_answer() {
    let broker = broker().await;
    let knowing = daemon(broker.url(), &[]).await;
    let refusing = daemon(broker.url(), &[("limits.named_namespaces_only", "true")]).await;
    let url = broker.url().to_owned();
    // Each checkpoint asks either of the two.
    let often = ["--checkpoint-requests", "10"];
    let replaying = tokio::task::spawn_blocking(move || {
        replay(&trace(300), &[&often[..], &["--nats-url", &url]].concat())
    });
    let output = replaying.await.unwrap();
    let report = report(&output);
    assert_eq!(output.status.code(), Some(FAILED), "{report}");
    assert!(count(&report, "wrong_replies") > 0, "{report}");
    assert!(count(&report, "refused_queries") > 0, "{report}");
    knowing.stop().await;
    refusing.stop().await;
}

/// Both requests have as many blocks as a trace may have, and the second one evicts most of the first one's.
#[test]
fn the_longest_requests_of_a_trace_can_be_replayed() {
    let request = |first: u64| {
        let ids: Vec<_> = (first..first + 32_768).map(|id| id.to_string()).collect();
        format!("{{\"timestamp\": {first}, \"hash_ids\": [{}]}}\n", ids.join(","))
    };
    let trace = NamedTempFile::new().unwrap();
    std::fs::write(trace.path(), request(0) + &request(100_000)).unwrap();
    let more = ["--embedded", "--workers", "1", "--blocks-per-worker", "40000"];
    let path = trace.path().to_str().unwrap();
    let output = kvatlas(&[&["replay", "--trace", path, "--json"], &more[..]].concat());
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!(count(&report, "wrong_replies"), 0, "{report}");
    assert!(count(&report, "batches") > count(&report, "requests"), "{report}");
}

/// A gateway without shards refuses every query. The fleet goes on, and says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_counts_refusals_as_unanswered() {
    let broker = broker().await;
    let alone = config(broker.url(), &[("gateway.enabled", "true")]);
    let gateway = Daemon::start(alone).await.unwrap();
    let client = Client::connect(broker.url()).await;
    eventually("the gateway refuses queries", async || {
        let refused = client.ask_with(by_sequence(&hashes(1, 1))).await.unwrap_err();
        matches!(refused, ClientError::Refused(error) if error.code == ErrorCode::Unavailable).then_some(())
    })
    .await;
    let options = SteadyOptions {
        namespace: NamespaceName::new("steady").unwrap(),
        size: FleetSize {
            workers: NonZeroUsize::new(2).unwrap(),
            blocks_per_worker: NonZeroUsize::new(64).unwrap(),
        },
        rate: NonZeroU32::new(50).unwrap(),
        seed: 1,
        transport: Transport::Core,
    };
    let mut fleet = SteadyFleet::start(&config(broker.url(), &[]), options)
        .await
        .unwrap();
    eventually("a refused query is counted", async || {
        let tally = fleet.go_on(Duration::from_millis(100)).await.unwrap();
        (tally.unanswered > 0).then_some(())
    })
    .await;
    fleet.say_goodbye().await;
    gateway.stop().await;
}
