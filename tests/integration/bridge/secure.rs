//! Servers of engines over TLS. A bridge in a process of its own asks them, once with an authority that it trusts and
//! once with another.

use serde_json::Value;
use tonic::transport::{Identity, Server, ServerTlsConfig};

use super::Site;
use super::subscribed::serve_three_blocks;
use crate::support::certificates::{Authority, text};
use crate::support::eventually;
use crate::support::http::HttpClient;
use crate::support::process::Process;

#[tokio::test(flavor = "multi_thread")]
async fn events_over_tls_come_from_a_server_that_the_machine_trusts() {
    let Some(authority) = Authority::new() else { return };
    let certificate = authority.issue("engine");
    let [shown, key] = [&certificate.certificate, &certificate.key].map(|path| std::fs::read(path).unwrap());
    let secure = ServerTlsConfig::new().identity(Identity::from_pem(shown, key));
    let server = Server::builder().tls_config(secure).unwrap();
    let (address, _serving) = serve_three_blocks(server).await;
    let site = Site::new(&[]).await;
    let engine = format!("gpu-0=grpcs://localhost:{}", address.port());
    let bridge = |trusted: &str| {
        let arguments = ["--engine", engine.as_str()];
        Process::bridge_in(site.broker.url(), &arguments, &[("SSL_CERT_FILE", trusted)])
    };
    // Another authority has the same name.
    let Some(other) = Authority::new() else { return };
    let doubtful = bridge(text(&other.certificate()));
    let mut http = HttpClient::connect(doubtful.admin_address()).await;
    eventually("it is not trusted", async || {
        let shown: Value = http.get("/workers").await.json();
        let error = shown["servers"][0]["last_error"].as_str()?;
        error.contains("certificate").then_some(())
    })
    .await;
    assert!(site.holder("gpu-0").await.is_none());
    drop(doubtful);
    let _bridge = bridge(text(&authority.certificate()));
    site.settles("gpu-0", 3, &[]).await;
    assert_eq!(site.depth(1, "gpu-0").await, 3);
}
