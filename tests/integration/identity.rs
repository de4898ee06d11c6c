//! Ways in which the daemon and the NATS server prove their identity: certificates, NKeys, credentials files, TLS
//! first.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::ConnectOptions;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kvatlas_client::publish::PublisherOptions;
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::Tier;
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use nkeys::KeyPair;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::certificates::{Authority, Certificate, text};
use crate::support::process::kvatlas;
use crate::support::{
    Client, PATIENCE, by_sequence, config, engine, eventually, hashes, matches, namespace, server, stored,
    subjects,
};

const UNAVAILABLE: i32 = 69;

async fn broker(lines: String) -> EmbeddedBroker {
    let options = BrokerOptions {
        config_lines: vec![lines],
        ..crate::support::own_port()
    };
    EmbeddedBroker::start_with(&server(), options).await.unwrap()
}

/// Starts a server that shows a certificate of `authority`, and demands a client's certificate. `more` are further
/// lines of its TLS settings.
async fn broker_with_tls(authority: &Authority, more: &str) -> EmbeddedBroker {
    let Certificate { certificate, key } = authority.issue("server");
    broker(format!(
        "tls {{ cert_file: {certificate:?}, key_file: {key:?}, ca_file: {:?}, timeout: 10\n{more} }}\n\
         authorization {{ users: [{{ user: \"CN=daemon\" }}, {{ user: \"CN=router\" }}] }}",
        authority.certificate()
    ))
    .await
}

async fn daemon(url: &str, settings: &[(&str, &str)]) -> Daemon {
    Daemon::start(config(url, settings)).await.unwrap()
}

async fn becomes_ready(daemon: &Daemon) {
    tokio::time::timeout(PATIENCE, daemon.ready())
        .await
        .expect("the daemon becomes ready");
}

/// Waits until the daemon answers a client with `options`; or until it does not answer, if `expected` is false.
async fn is_connected(url: &str, options: ConnectOptions, expected: bool) {
    // While the server reads its configuration again, it may refuse clients.
    let nats = eventually("the router is let in", async || {
        options.clone().connect(url).await.ok()
    })
    .await;
    let queries = QueryClient::new(nats, subjects());
    eventually(
        &format!("that the daemon is connected is {expected}"),
        async || {
            let connected = match queries.status(&namespace()).await {
                Ok(_) | Err(ClientError::Refused(_)) => Some(true),
                Err(ClientError::NoDaemon { .. }) => Some(false),
                Err(_) => None,
            };
            (connected == Some(expected)).then_some(())
        },
    )
    .await;
}

/// Checks that a worker can publish and a router can query, with these options.
async fn is_of_use(url: &str, options: ConnectOptions) {
    let nats = options.connect(url).await.unwrap();
    let client = Client {
        queries: QueryClient::new(nats.clone(), subjects()).with_patience(PATIENCE),
        nats,
    };
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let publisher = engine(client.nats.clone(), &subjects(), "gpu-0", options).await;
    let events = vec![stored(hashes(1, 3))];
    publisher.publish(Tier::DEVICE, events).await.unwrap();
    let expected = [("gpu-0".to_owned(), 0, 3, true)];
    eventually("the router is told exactly", async || {
        let asked = client.ask_with(by_sequence(&hashes(1, 3))).await.ok()?;
        (matches(&asked) == expected).then_some(())
    })
    .await;
}

/// Runs `kvatlas publish` without input, with these settings in its environment. Returns its exit code and its output.
async fn connect(url: &str, settings: &[(&str, &str)]) -> (Option<i32>, String) {
    let whose = ["--namespace", "llama", "--worker", "gpu-0"];
    let mut command = kvatlas(&["publish", "--nats-url", url, "--timeout", "3s"]);
    command.args(whose);
    for (key, value) in settings {
        let name = key.replace('.', "_").to_uppercase();
        command.env(format!("KVATLAS_{name}"), value);
    }
    let output = tokio::task::spawn_blocking(move || command.output().unwrap());
    let output = output.await.unwrap();
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// Checks that a daemon with `settings` can connect to a server that demands certificates, and that other clients
/// cannot.
async fn only_certificates_get_in(server_lines: &str, settings: &[(&str, &str)], router: ConnectOptions) {
    let Some(authority) = Authority::new() else {
        return;
    };
    let broker = broker_with_tls(&authority, &format!("verify_and_map: true\n{server_lines}")).await;
    let trusted = authority.certificate();
    let mut settings = settings.to_vec();
    settings.push(("nats.tls_ca_file", text(&trusted)));
    let (code, said) = connect(broker.url(), &settings).await;
    assert_eq!(code, Some(UNAVAILABLE), "without a certificate: {said}");
    let stranger = Authority::new().unwrap();
    let forged = stranger.issue("daemon");
    let (code, said) = connect(broker.url(), &[&settings[..], &forged.settings()].concat()).await;
    assert_eq!(
        code,
        Some(UNAVAILABLE),
        "with a certificate of somebody else's: {said}"
    );

    let ours = authority.issue("daemon");
    settings.extend(ours.settings());
    let daemon = daemon(broker.url(), &settings).await;
    becomes_ready(&daemon).await;
    let routers = authority.issue("router");
    let router = router
        .add_root_certificates(trusted.clone())
        .add_client_certificate(routers.certificate, routers.key);
    is_of_use(broker.url(), router).await;
    let (code, said) = connect(broker.url(), &settings).await;
    assert_eq!(code, Some(0), "{said}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_shown() {
    only_certificates_get_in("", &[], ConnectOptions::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_may_come_first() {
    let first = ConnectOptions::new().tls_first();
    only_certificates_get_in("handshake_first: true", &[("nats.tls_first", "true")], first).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_show_a_trusted_certificate_is_not_talked_to() {
    let Some(authority) = Authority::new() else {
        return;
    };
    let broker = broker_with_tls(&authority, "").await;
    let stranger = Authority::new().unwrap();
    let trusted = stranger.certificate();
    let settings = [("nats.tls_ca_file", text(&trusted))];
    let (code, said) = connect(broker.url(), &settings).await;
    assert_eq!(code, Some(UNAVAILABLE), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_nkey_in_its_file_is_used_for_the_next_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (rights, seed) = (folder.path().join("rights.conf"), folder.path().join("seed"));
    let give_rights = |key: &KeyPair| {
        let lines = format!(
            "authorization {{ users: [{{ nkey: {} }}, {{ user: router, password: secret }}] }}",
            key.public_key()
        );
        std::fs::write(&rights, lines).unwrap();
    };
    let (old, new) = (KeyPair::new_user(), KeyPair::new_user());
    give_rights(&old);
    std::fs::write(&seed, old.seed().unwrap()).unwrap();
    // The server takes every path as relative to its own directory.
    let name = folder.path().file_name().unwrap().to_str().unwrap();
    let broker = broker(format!("include \"../{name}/rights.conf\"")).await;
    let daemon = daemon(broker.url(), &[("nats.nkey_seed_file", text(&seed))]).await;
    becomes_ready(&daemon).await;

    give_rights(&new);
    let pid = Pid::from_raw(i32::try_from(broker.pid()).unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    let router = || ConnectOptions::new().user_and_password("router".into(), "secret".into());
    is_connected(broker.url(), router(), false).await;
    std::fs::write(&seed, new.seed().unwrap()).unwrap();
    is_connected(broker.url(), router(), true).await;
    is_of_use(broker.url(), router()).await;
    daemon.stop().await;
}

/// An operator and an account, which sign the tokens of users.
struct Site {
    operator: KeyPair,
    account: KeyPair,
}

impl Site {
    fn new() -> Self {
        Self {
            operator: KeyPair::new_operator(),
            account: KeyPair::new_account(),
        }
    }

    /// Returns the lines of the server's configuration.
    fn lines(&self) -> String {
        let unlimited = json!({"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1,
            "wildcards": true, "conn": -1, "leaf": -1});
        let operator = sign(&self.operator, &self.operator, "operator", json!({}), None);
        let account = json!({ "limits": unlimited });
        let signed = sign(&self.operator, &self.account, "account", account, None);
        let name = self.account.public_key();
        format!("operator: {operator}\nresolver: MEMORY\nresolver_preload: {{ {name}: {signed} }}")
    }

    /// Writes a credentials file with the token and the key of a new user. The token is valid until `expires_at`, in
    /// seconds since 1970; with `None`, for ever.
    fn write_credentials(&self, path: &Path, expires_at: Option<u64>) {
        let user = KeyPair::new_user();
        let unlimited = json!({"subs": -1, "data": -1, "payload": -1});
        let token = sign(&self.account, &user, "user", unlimited, expires_at);
        let seed = user.seed().unwrap();
        let text = format!(
            "-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n\
             -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        );
        // The file is replaced by a rename, so that no incomplete file is read.
        let new = path.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, path).unwrap();
    }
}

/// Returns a token about `subject`, signed by `issuer`.
fn sign(
    issuer: &KeyPair,
    subject: &KeyPair,
    kind: &str,
    mut rights: serde_json::Value,
    expires_at: Option<u64>,
) -> String {
    rights["type"] = json!(kind);
    rights["version"] = json!(2);
    let mut claims = json!({
        "jti": subject.public_key(), "iat": now(), "iss": issuer.public_key(), "name": kind,
        "sub": subject.public_key(), "nats": rights,
    });
    if let Some(expires_at) = expires_at {
        claims["exp"] = json!(expires_at);
    }
    let encode = |json: serde_json::Value| URL_SAFE_NO_PAD.encode(json.to_string());
    let head = encode(json!({"typ": "JWT", "alg": "ed25519-nkey"}));
    let signed = format!("{head}.{}", encode(claims));
    let signature = URL_SAFE_NO_PAD.encode(issuer.sign(signed.as_bytes()).unwrap());
    format!("{signed}.{signature}")
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_credentials_are_used_when_the_old_ones_expire() {
    const LIFE: Duration = Duration::from_secs(4);
    let site = Site::new();
    let folder = tempfile::tempdir().unwrap();
    let (ours, routers) = (
        folder.path().join("daemon.creds"),
        folder.path().join("router.creds"),
    );
    site.write_credentials(&routers, None);
    let broker = broker(site.lines()).await;
    site.write_credentials(&ours, Some(now() + LIFE.as_secs()));
    let daemon = daemon(broker.url(), &[("nats.credentials_file", text(&ours))]).await;
    becomes_ready(&daemon).await;
    let router = || ConnectOptions::with_credentials(&std::fs::read_to_string(&routers).unwrap()).unwrap();
    is_connected(broker.url(), router(), false).await;
    site.write_credentials(&ours, None);
    is_connected(broker.url(), router(), true).await;
    is_of_use(broker.url(), router()).await;
    daemon.stop().await;
}
