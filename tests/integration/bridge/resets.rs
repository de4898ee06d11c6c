//! `kvatlas admin reset`: a bridge makes an engine drop its prefix cache.

use kvatlas_core::wire::{AdminCommand, AdminReply, AdminRequest};
use serde_json::json;

use super::python::{Publishers, Spec, python};
use super::servers::{Answers, Server};
use super::{Site, follow_text, stored};
use crate::support::process::kvatlas;
use crate::support::subjects;

/// Asks the only bridge to reset an engine, and returns the bridge's reply.
pub(super) async fn reset(site: &Site, engine: &str) -> AdminReply {
    let request = AdminRequest {
        engine: Some(engine.to_owned()),
        ..AdminRequest::default()
    };
    let subject = subjects().admin(AdminCommand::Reset);
    let asked = site.client.nats.request(subject, request.encode().into()).await;
    AdminReply::decode(&asked.unwrap().payload).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_asked_to_drop_its_cache_where_it_is_followed() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    follow_text(&site.bridge, &format!("10.0.0.1:8000={}", server.url()));
    site.settles("10_d0_d0_d1_c8000", 2, &[]).await;
    // Outside development mode, vLLM does not have this endpoint.
    let error = reset(&site, "10.0.0.1:8000").await.error.unwrap();
    assert!(error.contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    server.answers.lock().reset = json!({"success": false});
    let error = reset(&site, "10.0.0.1:8000").await.error.unwrap();
    assert!(error.contains("while requests run"), "{error}");
    server.answers.lock().reset = json!({"success": true});
    for name in ["10.0.0.1:8000", "10_d0_d0_d1_c8000"] {
        let reply = reset(&site, name).await;
        assert_eq!((reply.holders, reply.error), (1, None), "{name}");
    }
    // The command line reports the same error. It also reports an engine that no bridge follows.
    let command = |engine: &str| {
        let arguments = [
            "admin",
            "reset",
            engine,
            "--nats-url",
            site.broker.url(),
            "--timeout",
            "1",
        ];
        let output = kvatlas(&arguments).output().unwrap();
        (output.status.code(), format!("{output:?}"))
    };
    let (status, said) = command("10.0.0.1:8000");
    assert!(
        status == Some(0) && said.contains("dropped the cache of 1 holder"),
        "{said}"
    );
    let (status, said) = command("gpu-7");
    assert!(
        status == Some(69) && said.contains("none follows an engine of that name"),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn only_addresses_that_were_given_are_asked() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    let server = Server::start(Answers::vllm(&publishers, &[0])).await;
    server.answers.lock().reset = json!({});
    for engine in 0..2 {
        publishers.publish(engine, &json!([stored(1, 0, 2)]));
    }
    site.follow(&publishers, 0, "gpu-0");
    site.settles("gpu-0", 2, &[]).await;
    let error = reset(&site, "gpu-0").await.error.unwrap();
    assert!(error.contains("address=HOST:PORT"), "{error}");
    // A client that registers an engine can give any address for requests.
    let registered = format!("{},address=192.0.2.1:8000", publishers.flag(1, "gpu-1"));
    follow_text(&site.bridge, &registered);
    site.settles("gpu-1", 2, &[]).await;
    let error = reset(&site, "gpu-1").await.error.unwrap();
    assert!(error.contains("--register-hosts"), "{error}");
}
