//! The real binary, used as a person or a script uses it.

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::Instant;

use serde_json::Value;
use tokio::net::TcpSocket;

use crate::support::process::{Process, kvatlas};
use crate::support::{PATIENCE, eventually, http_get};

const USAGE: i32 = 64;
const UNAVAILABLE: i32 = 69;

fn run(arguments: &[&str]) -> Output {
    kvatlas(arguments).output().unwrap()
}

fn run_with_input(arguments: &[&str], input: &str) -> Output {
    let mut command = kvatlas(arguments);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// A port at which no broker listens. A socket is bound to it, so that no other process gets the port.
struct DeadBroker {
    url: String,
    _bound: TcpSocket,
}

fn dead_broker() -> DeadBroker {
    let bound = TcpSocket::new_v4().unwrap();
    bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("nats://{}", bound.local_addr().unwrap());
    DeadBroker { url, _bound: bound }
}

#[test]
fn help_that_cannot_be_written_is_a_failure() {
    for arguments in [&["--help"][..], &["--version"], &["status", "--help"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let status = kvatlas(arguments).stdout(full).status().unwrap();
        assert_eq!(status.code(), Some(1), "{arguments:?}");
    }
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in [
        &["serve"][..],
        &["query"],
        &["publish"],
        &["snapshot", "inspect"],
        &["vocab", "mask"],
        &["demo"],
        &["replay"],
        &["compare"],
        &["explain"],
    ] {
        let output = run(&[command, &["--help"]].concat());
        assert_eq!(output.status.code(), Some(0), "{command:?}");
        let invocation = format!("kvatlas {}", command.join(" "));
        let help = stdout(&output);
        let (_, examples) = help
            .split_once("Examples:")
            .unwrap_or_else(|| panic!("{invocation}: {help}"));
        assert!(examples.contains(&invocation), "{help}");
    }
    let flag = run(&["explain", "--nats-url"]);
    assert!(stdout(&flag).starts_with("--nats-url ("), "{}", stderr(&flag));
    let output = run(&["--version"]);
    let version = stdout(&output);
    let commit = version
        .strip_prefix(concat!("kvatlas ", env!("CARGO_PKG_VERSION"), " ("))
        .and_then(|rest| rest.strip_suffix(")\n"));
    assert!(commit.is_some_and(|commit| !commit.is_empty()), "{version}");
}

#[test]
fn wrong_usage_has_a_number_of_its_own() {
    for arguments in [
        &[][..],
        &["serv"],
        &["serve", "--nats-urll", "nats://a"],
        &["query", "--namespace", "a"],
        &["query", "--namespace", "a b", "--status"],
        &["publish", "--namespace", "a", "--worker", "b", "--seq", "3"],
        &["query", "--namespace", "a", "--status", "--nats", "http://a"],
        &["publish", "no/such/file", "--namespace", "a", "--worker", "b"],
        &["snapshot", "inspect", "no/such/file"],
        &["vocab", "mask", "--vocab", "no/such/file", "--regex", "a"],
        &["vocab", "mask", "--vocab", "Cargo.toml", "--regex", "("],
    ] {
        let output = run(arguments);
        assert_eq!(
            output.status.code(),
            Some(USAGE),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(
            !stderr(&output).is_empty() && stdout(&output).is_empty(),
            "{arguments:?}"
        );
    }
}

#[tokio::test]
async fn a_demonstration_that_stays_has_a_fleet_and_ends_when_it_is_told() {
    use std::io::{BufRead, BufReader};
    let mut demo = kvatlas(&["demo", "--requests", "100", "--stay"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(demo.stderr.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let url = lines.find_map(|line| line.split_once("http://").map(|(_, url)| url.to_owned()));
    let address = url.unwrap().trim_end_matches('/').parse().unwrap();
    eventually("the fleet's workers are known", async || {
        let index: Value = serde_json::from_str(&http_get(address, "/index").1).ok()?;
        let namespaces = index["namespaces"].as_array()?;
        namespaces
            .iter()
            .find(|each| each["namespace"] == "stay" && each["holders"] == 8)
            .map(drop)
    })
    .await;
    // The output suggests commands that break the deployment. Each command does break it.
    let mut shown = |word: &str| {
        lines
            .find_map(|line| Some(line.split_once(word)?.1.to_owned()))
            .unwrap()
    };
    let forget = shown(" admin ");
    let arguments: Vec<&str> = std::iter::once("admin")
        .chain(forget.split_whitespace())
        .collect();
    let output = run(&arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    let broker = shown("kill -STOP ").split(';').next().unwrap().parse().unwrap();
    let broker = rustix::process::Pid::from_raw(broker).unwrap();
    let doubtful = || {
        let (_, workers) = http_get(address, "/workers?state=degraded");
        serde_json::from_str::<Value>(&workers).unwrap()["holders_total"].as_u64()
    };
    rustix::process::kill_process(broker, rustix::process::Signal::STOP).unwrap();
    eventually("the fleet is in doubt", async || {
        (doubtful() >= Some(8)).then_some(())
    })
    .await;
    rustix::process::kill_process(broker, rustix::process::Signal::CONT).unwrap();
    eventually("it is well again", async || (doubtful() == Some(0)).then_some(())).await;
    let pid = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(demo.wait().unwrap().success());
}

#[test]
fn nobody_to_read_a_message_is_no_reason_to_panic() {
    for (arguments, expected) in [
        (
            vec![
                "query",
                "--namespace",
                "a",
                "--status",
                "--nats",
                &dead_broker().url,
            ],
            UNAVAILABLE,
        ),
        (vec!["serve", "--admin-listen", "nowhere"], USAGE),
        (vec!["demo", "--requests", "1"], 0),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = kvatlas(&arguments).stdout(Stdio::null()).stderr(writer).status();
        assert_eq!(status.unwrap().code(), Some(expected), "{arguments:?}");
    }
}

#[test]
fn every_error_of_the_configuration_is_reported_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvatlas.toml");
    std::fs::write(&file, "[events]\nlanes = 1000\n[event]\n").unwrap();
    let mut command = kvatlas(&["serve", "--check-config", "--nats-url", "http://a"]);
    let output = command
        .env("KVATLAS_CONFIG", &file)
        .env("KVATLAS_SNAPSHOTS_KEEP", "none")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(USAGE));
    let report = stderr(&output);
    assert!(
        report.starts_with("error: 4 errors in the configuration:"),
        "{report}"
    );
    for part in [
        "line 2, key events.lanes",
        "key event:",
        "environment KVATLAS_SNAPSHOTS_KEEP",
        "flag --nats-url",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
}

#[test]
fn the_printed_configuration_loads_back() {
    let given = [
        "serve",
        "--print-config",
        "--events-lanes",
        "3",
        "--subjects-prefix",
        "site.kvatlas",
    ];
    let printed = run(&given);
    assert_eq!(printed.status.code(), Some(0), "{}", stderr(&printed));
    assert!(stdout(&printed).contains("lanes = 3"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvatlas.toml");
    std::fs::write(&file, stdout(&printed)).unwrap();
    let file = file.to_str().unwrap();
    let checked = run(&["serve", "--check-config", "--config", file]);
    assert_eq!(checked.status.code(), Some(0), "{}", stderr(&checked));
    let again = run(&["serve", "--print-config", "--config", file]);
    let settings = |output: &Output| -> Vec<String> {
        let lines = stdout(output).lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    };
    assert_eq!(settings(&again), settings(&printed));
}

#[test]
fn without_a_broker_the_error_says_what_to_change() {
    let dead = dead_broker();
    let url = dead.url.as_str();
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events.jsonl");
    std::fs::write(&events, "{\"events\":[]}\n").unwrap();
    for arguments in [
        &["query", "--namespace", "a", "--tokens", "1,2", "--nats", url][..],
        &["query", "--namespace", "a", "--status", "--nats", url],
        &[
            "publish",
            events.to_str().unwrap(),
            "--namespace",
            "a",
            "--worker",
            "b",
            "--nats",
            url,
        ],
    ] {
        let output = run(arguments);
        assert_eq!(
            output.status.code(),
            Some(UNAVAILABLE),
            "{arguments:?}: {}",
            stderr(&output)
        );
        let error = stderr(&output);
        assert!(error.starts_with("error: cannot connect to NATS"), "{error}");
        assert!(
            error.contains("--nats-url") && error.trim_end().lines().count() == 1,
            "{error}"
        );
    }
}

#[test]
fn a_bad_line_is_named_and_stops_the_publishing() {
    let always = ["publish", "--dry-run", "--namespace", "a", "--worker", "b"];
    let input = concat!(
        r#"{"type":"stored","sequence_hashes":["ea06fc71a5ee6e88"]}"#,
        "\n\n",
        r#"{"type":"stored","sequence_hashs":["ea06fc71a5ee6e88"]}"#,
        "\n",
        r#"{"type":"cleared"}"#,
        "\n"
    );
    let output = run_with_input(&always, input);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).starts_with("error: line 3: unknown field `sequence_hashs`"),
        "{}",
        stderr(&output)
    );
    assert_eq!(stdout(&output).lines().count(), 1);

    let output = run_with_input(&[&always[..], &["--keep-going"]].concat(), input);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output).lines().count(), 2);
    let report = stderr(&output);
    assert!(
        report.contains("line 3: ") && report.contains("checked 2 batches, 2 events, 1 block;"),
        "{report}"
    );
    // The printed batches can be published.
    let again = run_with_input(&always, stdout(&output));
    assert_eq!((again.status.code(), stdout(&again)), (Some(0), stdout(&output)));
}

#[test]
fn a_file_that_is_no_snapshot_is_told_from_one_that_is() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["inspect", "verify"] {
        let empty = run(&["snapshot", name, folder.path().to_str().unwrap()]);
        assert_eq!(empty.status.code(), Some(1));
        assert!(
            stderr(&empty).contains("there are no snapshots in "),
            "{}",
            stderr(&empty)
        );
    }
    let path = folder.path().join("snapshot-1.kvs");
    std::fs::write(&path, "KVATLSNQ").unwrap();
    let output = run(&["snapshot", "inspect", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("is not a kvatlas snapshot"),
        "{}",
        stderr(&output)
    );
    let output = run(&["snapshot", "inspect", "--json", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let json: Value = serde_json::from_str(stdout(&output)).unwrap();
    assert_eq!(json["snapshots"][0]["whole"], false);
}

#[test]
fn a_daemon_without_a_broker_waits_and_stops_when_told() {
    let broker = dead_broker();
    let mut served = Process::logged(&["--nats-url", &broker.url]);
    served.wait_for_line(|line| {
        line["message"]
            .as_str()
            .is_some_and(|text| text.starts_with("metrics and probes are at"))
    });
    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains("draining") && log.contains("stopped"), "{log}");
}

/// A running daemon with a broker of its own. It is killed when the value is dropped.
struct Served {
    daemon: Process,
    url: String,
}

impl Served {
    /// Starts the daemon, and waits until it is ready. Needs a nats-server: run `deploy/setup.sh` first.
    fn start(arguments: &[&str]) -> Self {
        let mut daemon = Process::logged(&[&["--embedded"], arguments].concat());
        let started = daemon.wait_for_line(|line| line["url"].is_string());
        let url = started["url"].as_str().unwrap().to_owned();
        daemon.wait_for_line(|line| line["message"] == "ready");
        Self { daemon, url }
    }

    /// Runs a command about namespace `llama` of this daemon.
    fn run(&self, arguments: &[&str], input: &str) -> Output {
        let (command, rest) = arguments.split_first().unwrap();
        let mut always = vec![*command, "--nats", &self.url, "--namespace", "llama"];
        if !rest.contains(&"--timeout") {
            always.extend(["--timeout", "30s"]);
        }
        run_with_input(&[&always, rest].concat(), input)
    }

    /// Runs a command as [`Self::run`] does, and repeats it as long as its output says that the daemon is asking a
    /// publisher (`resyncing`).
    fn run_settled(&self, rest: &[&str], input: &str) -> Output {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.run(rest, input);
            if !stdout(&output).contains("resyncing") || Instant::now() > deadline {
                return output;
            }
        }
    }

    /// Stops the daemon by a signal. Returns its exit code and the rest of its log.
    fn stop(self) -> (Option<i32>, String) {
        self.daemon.stop()
    }
}

/// Event that stores the tokens 1 to 32 in blocks of 16, by the test vectors of the hash contract.
const STORED: &str = r#"{"type":"stored","sequence_hashes":["ea06fc71a5ee6e88","ad01835a37dd294c"],"block_hashes":["ea06fc71a5ee6e88","1fbf39bd106be0b5"]}"#;

#[test]
fn what_is_published_is_found_and_outlives_the_daemon_in_a_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().to_str().unwrap();
    let served = Served::start(&["--snapshots-directory", directory]);

    // At first, the daemon does not know yet for which namespaces publishers publish.
    let unknown = loop {
        let unknown = served.run(&["query", "--status"], "");
        if !stderr(&unknown).contains("(error 503)") {
            break unknown;
        }
    };
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("(error 404)"), "{}", stderr(&unknown));

    let published = served.run(
        &["publish", "--worker", "gpu-0", "--epoch", "7", "--wait"],
        STORED,
    );
    assert_eq!(published.status.code(), Some(0), "{}", stderr(&published));
    let expected = "\
published 1 batch, 1 event, 2 blocks to kvatlas.v1.events.llama.gpu-0 (epoch 7, last seq 1)
applied: the worker's rank holds 2 blocks, exact
";
    assert_eq!(stdout(&published), expected);
    let one = r#"{"type":"stored","sequence_hashes":["ea06fc71a5ee6e88"]}"#;
    let published = served.run(
        &[
            "publish", "--worker", "gpu-1", "--epoch", "3", "--seq", "2", "--wait",
        ],
        one,
    );
    assert!(
        stdout(&published).contains("holds 1 block, degraded: gap"),
        "{}",
        stdout(&published)
    );

    let tokens: Vec<String> = (1..=32).map(|token| token.to_string()).collect();
    let found = served.run_settled(&["query", "--tokens-file", "-", "--explain"], &tokens.join(" "));
    let expected = "\
2 blocks asked for
WORKER  RANK  BLOCKS  OF QUERY  USABLE  STATE          LIMITED BY  DROPPED OUT
gpu-0      0       2     100 %       1  exact          last token  -
gpu-1      0       1      50 %       1  degraded: gap  last token  at block 1, which 1 other has (";
    assert!(
        stdout(&found).starts_with(expected),
        "{}{}",
        stdout(&found),
        stderr(&found)
    );

    let queries = "{\"sequence_hashes\":[\"ea06fc71a5ee6e88\"],\"workers\":[\"gpu-1\"]}\n{\"block_hashes\":[\"0x1\"]}\n";
    let found = served.run(&["query", "--file", "-", "--json"], queries);
    let json: Value = serde_json::from_str(stdout(&found)).unwrap();
    assert_eq!(json["results"][0]["reply"]["holders"][0]["worker"], "gpu-1");
    assert_eq!(json["results"][1]["reply"]["holders_total"], 0);

    let chain = "ea06fc71a5ee6e88,ad01835a37dd294c";
    let every = served.run(&["query", "--sequence-hashes", chain, "--every", "9"], "");
    assert!(
        stdout(&every).contains("gpu-0      0       2     100 %"),
        "{}",
        stdout(&every)
    );
    let chosen = [
        "query",
        "--sequence-hashes",
        "ea06fc71a5ee6e88,0x1",
        "--positions",
        "0,9",
    ];
    let found = served.run(&chosen, "");
    assert!(
        stdout(&found).starts_with("10 blocks asked for\n"),
        "{}",
        stderr(&found)
    );
    assert!(
        stdout(&found).contains("gpu-0      0     1–9"),
        "{}",
        stdout(&found)
    );

    let goodbye = r#"{"type":"goodbye"}"#;
    let published = served.run(&["publish", "--worker", "gpu-2", "--wait"], goodbye);
    assert_eq!(published.status.code(), Some(0), "{}", stderr(&published));

    let status = served.run(&["query", "--status", "--json"], "");
    let json: Value = serde_json::from_str(stdout(&status)).unwrap();
    assert_eq!(
        (&json["holders"][0]["blocks"], &json["holders"][0]["seq"]),
        (&2.into(), &1.into())
    );

    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");
    let inspected = run(&["snapshot", "inspect", "--json", directory]);
    assert_eq!(inspected.status.code(), Some(0), "{}", stderr(&inspected));
    let json: Value = serde_json::from_str(stdout(&inspected)).unwrap();
    assert_eq!(json["snapshots"][0]["totals"]["blocks"], 3, "{json}");

    let served = Served::start(&["--snapshots-directory", directory]);
    let status = served.run(&["query", "--status"], "");
    assert!(
        stdout(&status).contains("degraded: gap, unverified"),
        "{}",
        stdout(&status)
    );
}

#[test]
fn a_batch_that_the_daemon_drops_is_not_called_applied() {
    let served = Served::start(&["--events-max-blocks-per-event", "1"]);
    let publish = ["publish", "--worker", "gpu-0", "--wait", "--timeout", "3s"];
    let published = served.run(&publish, STORED);
    assert_eq!(published.status.code(), Some(1), "{}", stdout(&published));
    assert!(
        stderr(&published).contains("did not take every batch"),
        "{}",
        stderr(&published)
    );
}

#[test]
fn a_batch_that_the_server_does_not_take_is_not_counted() {
    let served = Served::start(&[]);
    let hashes: Vec<String> = (1..1_100_000).map(|hash| hash.to_string()).collect();
    let large = format!(r#"{{"type":"stored","sequence_hashes":[{}]}}"#, hashes.join(","));
    let published = served.run(
        &["publish", "--worker", "gpu-0", "--keep-going"],
        &format!("{large}\n{STORED}\n"),
    );
    assert_eq!(published.status.code(), Some(1), "{}", stdout(&published));
    assert!(
        stdout(&published).starts_with("published 1 batch, 1 event, 2 blocks"),
        "{}",
        stdout(&published)
    );
    assert!(
        stderr(&published).contains("line 1: ") && stderr(&published).contains("max_payload"),
        "{}",
        stderr(&published)
    );
}

#[test]
fn a_batch_that_is_published_through_a_stream_is_kept_or_it_is_an_error() {
    let through_stream = [
        "publish",
        "--worker",
        "gpu-0",
        "--transport",
        "jetstream",
        "--wait",
    ];
    let served = Served::start(&["--events-transport", "jetstream"]);
    let published = served.run(&through_stream, STORED);
    assert_eq!(published.status.code(), Some(0), "{}", stderr(&published));
    assert!(
        stdout(&published).contains("applied: the worker's rank holds 2 blocks, exact"),
        "{}",
        stdout(&published)
    );
    let (code, log) = served.stop();
    assert_eq!(code, Some(0), "{log}");

    // The daemon receives the batch, but no stream keeps it.
    let served = Served::start(&[]);
    let published = served.run(&[&through_stream[..], &["--timeout", "1s"]].concat(), STORED);
    assert_eq!(published.status.code(), Some(69), "{}", stdout(&published));
    assert_eq!(stdout(&published), "", "nothing has been kept");
    assert!(
        stderr(&published).contains("no events stream has acknowledged"),
        "{}",
        stderr(&published)
    );
}

#[test]
fn a_mask_says_which_tokens_may_follow() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("three.tiktoken");
    // "1", "23", " a"
    std::fs::write(&path, "MQ== 0\nMjM= 1\nIGE= 2\n").unwrap();
    let ask = |more: &[&str]| {
        let file = path.to_str().unwrap();
        run(&[&["vocab", "mask", "--vocab", file, "--regex", "[0-9]{1,3}"], more].concat())
    };
    assert_eq!(
        stdout(&ask(&["--prefix", "12"])),
        "tiktoken vocabulary of 3 tokens, 0 without text; 4 states of the expression\n\
         1 token allowed (33.33 %); the text may end here\n\
         TOKEN  TEXT\n    \
         0  \"1\"\n"
    );
    let answer: Value = serde_json::from_str(stdout(&ask(&["--json", "--sample", "1"]))).unwrap();
    assert_eq!(answer["allowed"], serde_json::json!([0, 1]));
    assert_eq!(
        answer["sample"],
        serde_json::json!([{"token": 0, "text": "\"1\""}])
    );
    assert_eq!(answer["text_may_end"], false);
    let refused = ask(&["--prefix", "a"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("no text that begins with \"a\""));
    assert_eq!(ask(&["--format", "tekken"]).status.code(), Some(1));
    assert_eq!(ask(&["--format", "other"]).status.code(), Some(USAGE));
}

#[test]
fn no_error_repeats_a_password_in_a_url() {
    for url in [
        "u:hunter2",
        "u:hunter2@host",
        "u:hunter2%40host",
        "http://u:hunter2@host",
        "nats://u:hunter2@host",
    ] {
        let publish = [
            "publish",
            "--namespace",
            "llama",
            "--worker",
            "gpu-0",
            "--nats-url",
            url,
        ];
        for arguments in [
            &["serve", "--nats-url", url][..],
            &publish,
            &["bridge", "--nats-url", url],
        ] {
            let output = run(arguments);
            assert_eq!(output.status.code(), Some(USAGE), "{arguments:?}");
            assert!(stderr(&output).contains("--nats-url"), "{}", stderr(&output));
            for said in [stdout(&output), stderr(&output)] {
                assert!(!said.contains("hunter2"), "{arguments:?}: {said}");
            }
        }
        let output = kvatlas(&["serve"]).env("KVATLAS_NATS_URL", url).output().unwrap();
        assert_eq!(output.status.code(), Some(USAGE));
        assert!(!stderr(&output).contains("hunter2"), "{}", stderr(&output));
    }
}

#[test]
fn cargo_hands_programs_nothing_that_looks_like_a_setting() {
    let mut check = kvatlas(&["serve", "--check-config"]);
    let handed = std::env::vars_os().find(|(name, _)| name == "KVATLAS_COMMIT");
    let output = check.envs(handed).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}
