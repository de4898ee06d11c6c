//! Bridge that follows several engines, but may publish the events of only one of them. It is a process of its own, or
//! part of `kvatlas up`.

use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::{ErrorCode, WireError};
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use serde_json::Value;

use super::{USERS, broker, inbox_prefix, password};
use crate::support::metrics::metric;
use crate::support::process::{Process, message};
use crate::support::{eventually, http_get, own_port, server, subjects};

/// Starts a bridge with the rights of gpu-0's publisher, for engines that do not exist.
fn bridge(url: &str, engines: &[&str]) -> Process {
    let (password, prefix) = (password("gpu-0"), inbox_prefix("gpu-0"));
    let variables = [
        ("KVATLAS_NATS_USER", "gpu-0"),
        ("KVATLAS_NATS_PASSWORD", &password),
        ("KVATLAS_NATS_INBOX_PREFIX", &prefix),
    ];
    let engines = engines.iter().flat_map(|engine| ["--engine", engine]);
    let arguments: Vec<&str> = ["--model", "llama"].into_iter().chain(engines).collect();
    Process::bridge_in(url, &arguments, &variables)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_is_ready_only_while_the_server_takes_what_it_reports() {
    let broker = broker(USERS).await;
    let (own, other) = ("gpu-0=tcp://127.0.0.1:1", "gpu-9=tcp://127.0.0.1:2");
    let refused = bridge(broker.url(), &[own, other]);
    let admin = refused.admin_address();
    eventually("the refusal is a reason", async || {
        let (status, body) = http_get(admin, "/readyz");
        (status == 503 && body.contains("kvatlas.v1.events.llama.gpu-9")).then_some(())
    })
    .await;
    let workers: Value = serde_json::from_str(&http_get(admin, "/workers").1).unwrap();
    let is_refused = |engine: &Value| engine["last_error"].to_string().contains("Permissions Violation");
    let engines = workers["engines"].as_array().unwrap();
    let named: Vec<&Value> = engines.iter().filter(|engine| is_refused(engine)).collect();
    assert!(named.len() == 1 && named[0]["instance"] == "gpu-9", "{workers}");

    let allowed = bridge(broker.url(), &[own]);
    eventually("the bridge is ready", async || {
        (http_get(allowed.admin_address(), "/readyz").0 == 200).then_some(())
    })
    .await;
    for used in [
        "kvatlas_process_resident_memory_bytes",
        "kvatlas_process_open_file_descriptors",
        "kvatlas_process_allowed_file_descriptors",
    ] {
        assert_ne!(metric(&allowed, used), 0, "{used}");
    }
    // At its end it asks the server whether everything was taken.
    let (_, log) = allowed.stop();
    assert!(!log.contains("refuses what the bridge needs"), "{log}");
    assert!(!log.contains("refuses this publisher"), "{log}");
}

/// A test that `up` tells what the server refuses its bridge: no answer is exact without the worker that is not heard of.
#[tokio::test(flavor = "multi_thread")]
async fn up_is_not_ready_and_doubts_while_the_server_refuses_what_it_reports() {
    let user = r#"authorization { users: [
        { user: "site", password: "s", permissions: { publish: { deny: ["kvatlas.v1.events.*.gpu-9"] } } }
    ] }
    no_auth_user: "site""#;
    let options = BrokerOptions {
        config_lines: vec![user.to_owned()],
        ..own_port()
    };
    let broker = EmbeddedBroker::start_with(&server(), options).await.unwrap();
    let (own, other) = ("gpu-0=tcp://127.0.0.1:1", "gpu-9=tcp://127.0.0.1:2");
    let mut up = Process::up(
        broker.url(),
        &["--model", "llama", "--engine", own, "--engine", other],
    );
    let said = up.wait_for_line(|line| message(line) == "the NATS server refuses what the bridge needs");
    assert!(
        said.to_string().contains("kvatlas.v1.events.llama.gpu-9"),
        "{said}"
    );
    // The wait for the list of publishers ends without one.
    up.wait_for_line(|line| message(line).starts_with("it is not known yet who publishes"));
    let (status, body) = http_get(up.admin_address(), "/readyz");
    assert!(
        status == 503 && body.contains("kvatlas.v1.events.llama.gpu-9"),
        "{body}"
    );
    let queries = QueryClient::new(async_nats::connect(broker.url()).await.unwrap(), subjects());
    let unknown = queries.status(&"nobody".parse().unwrap()).await.unwrap_err();
    let is_doubted = |error: &WireError| {
        error.code == ErrorCode::Unavailable && error.text.contains("refuses events of engines")
    };
    assert!(
        matches!(&unknown, ClientError::Refused(error) if is_doubted(error)),
        "{unknown}"
    );
}
