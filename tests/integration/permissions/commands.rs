//! `kvatlas publish` and `kvatlas query` with the credentials of each role.

use super::{
    ACCOUNTS, InRole, USERS, broker, daemon, holder, inbox_prefix, is_exact_with, of_three_blocks, password,
};
use crate::support::eventually;
use crate::support::process::kvatlas;

/// Runs a command with the credentials of a role. If `lines` is not empty, the command's last argument is a file with
/// this text. Returns the exit code and the text on standard error.
async fn command(url: &str, role: &str, arguments: &[&str], lines: &'static str) -> (Option<i32>, String) {
    let mut command = kvatlas(arguments);
    command
        .args(["--nats-url", url, "--namespace", "llama", "--timeout", "60s"])
        .env("KVATLAS_NATS_USER", role)
        .env("KVATLAS_NATS_PASSWORD", password(role))
        .env("KVATLAS_NATS_INBOX_PREFIX", inbox_prefix(role));
    let running = tokio::task::spawn_blocking(move || {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lines");
        if !lines.is_empty() {
            std::fs::write(&file, lines).unwrap();
            command.arg(&file);
        }
        command.output().unwrap()
    });
    let output = running.await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

const STORED: &str = "{\"type\":\"stored\",\"sequence_hashes\":[1,2,3]}\n";
const GOODBYE: &str = "{\"type\":\"goodbye\"}\n";

#[tokio::test(flavor = "multi_thread")]
async fn an_operators_goodbye_is_no_error_with_either_configuration() {
    for configuration in [USERS, ACCOUNTS] {
        let broker = broker(configuration).await;
        let daemon = daemon(broker.url(), "daemon", &[]).await;
        let queries = InRole::connect(broker.url(), "operator").await.queries();
        let publisher = of_three_blocks(broker.url()).await;
        is_exact_with(&queries, "gpu-0", 3).await;
        drop(publisher);
        let goodbye = ["publish", "--worker", "gpu-0", "--wait"];
        let (code, said) = command(broker.url(), "operator", &goodbye, GOODBYE).await;
        assert_eq!((code, said.as_str()), (Some(0), ""));
        eventually("the worker is forgotten", async || {
            holder(&queries, "gpu-0").await.is_none().then_some(())
        })
        .await;
        // If the worker sends no goodbye, daemons may ask its publisher for batches. This role may not subscribe to
        // such questions.
        let (code, said) = command(
            broker.url(),
            "operator",
            &["publish", "--worker", "gpu-0"],
            STORED,
        )
        .await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("resync"), "{said}");
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_may_not_ask_publishes_without_a_warning() {
    let broker = broker(USERS).await;
    let daemon = daemon(broker.url(), "daemon", &[]).await;
    let publish = ["publish", "--worker", "gpu-0"];
    let (code, said) = command(broker.url(), "gpu-0", &publish, STORED).await;
    assert_eq!((code, said.as_str()), (Some(0), ""));
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_is_refused_ends_with_the_refusal() {
    let broker = broker(USERS).await;
    let daemon = daemon(broker.url(), "daemon", &[]).await;
    let questions: [(&[&str], &str); 4] = [
        (&["query", "--status"], ""),
        (&["query", "--sequence-hashes", "0x1"], ""),
        (&["query", "--status", "--gather"], ""),
        (&["publish", "--worker", "gpu-0", "--wait"], STORED),
    ];
    for (arguments, lines) in questions {
        let (code, said) = command(broker.url(), "gpu-0", arguments, lines).await;
        assert_eq!(code, Some(1), "{arguments:?}: {said}");
        assert!(said.contains("Permissions Violation"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let queries = InRole::connect(broker.url(), "router").await.queries();
    assert!(
        holder(&queries, "gpu-0").await.is_none(),
        "something was published"
    );
    daemon.stop().await;
}
