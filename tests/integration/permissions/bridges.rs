//! Bridge that follows several engines, but may publish the events of only one of them.

use serde_json::Value;

use super::{USERS, broker, inbox_prefix, password};
use crate::support::process::Process;
use crate::support::{eventually, http_get};

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
}
