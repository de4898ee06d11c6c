//! A daemon that can reach no NATS server: whether it is ready, and which answers it gives. Also a publisher whose
//! server is silent.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::connection::State;
use kvatlas_client::publish::{HolderPublisher, PublishConnection, PublisherError, PublisherOptions};
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::{ErrorCode, Outcome, Tier};
use serde_json::{Value, json};

use crate::support::http::HttpClient;
use crate::support::jetstream::Restartable;
use crate::support::metrics::metric;
use crate::support::process::Process;
use crate::support::proxy::{Direction, Network, Proxy};
use crate::support::way::Way;
use crate::support::{
    Client, PATIENCE, broker, daemon, engine, eventually, hashes, http_get, namespace, server, stored,
    subjects, worker,
};

async fn readyz(address: SocketAddr) -> (u16, Value) {
    let asked = tokio::task::spawn_blocking(move || http_get(address, "/readyz"));
    let (code, body) = asked.await.unwrap();
    (code, serde_json::from_str(&body).unwrap())
}

async fn outage(way: Way) {
    let mut broker = Restartable::start(&server()).await;
    let daemon = daemon(broker.url(), &way.settings(&[("http.listen", "127.0.0.1:0")])).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    client.exact("gpu-0", 0).await;
    let admin = daemon.admin_address().unwrap();
    assert_eq!(readyz(admin).await.0, 200);

    broker.kill();
    let report = eventually("the daemon is not ready", async || {
        let (code, report) = readyz(admin).await;
        (code == 503).then_some(report)
    })
    .await;
    assert_eq!(report["latches"]["connected"], json!(false), "{report}");
    let reasons = report["reasons"].as_array().unwrap();
    assert!(
        reasons.contains(&json!("waiting for a NATS server to be reached")),
        "{report}"
    );

    // A query over HTTP is answered, and the answer calls no holder exact.
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    let query = json!({ "namespace": namespace().as_str(), "sequence_hashes": [1, 2, 3, 4] });
    let answer = http.post("/v1/query", &query).await;
    assert_eq!(answer.status, 200, "{:?}", String::from_utf8_lossy(&answer.body));
    assert!(!answer.is_exact());
    assert_eq!(http.get("/health").await.status, 503);

    broker.restart().await;
    eventually("the daemon is ready again", async || {
        (readyz(admin).await.0 == 200).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_a_server_is_not_ready() {
    outage(Way::Core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_a_server_for_its_stream_is_not_ready() {
    outage(Way::Stream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_waits_for_its_bucket_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().display().to_string();
    // No server listens at this address. The daemon waits for the bucket before its other connections.
    let mut daemon = Process::logged(&[
        "--nats-url",
        "nats://127.0.0.1:1",
        "--snapshots-directory",
        &directory,
        "--snapshots-object-store",
        "warm",
    ]);
    let line = daemon.wait_for_line(|line| line["message"] == "admin listener started");
    let address: SocketAddr = line["local_addr"].as_str().unwrap().parse().unwrap();
    eventually("the reason is there", async || {
        let reasons = readyz(address).await.1["reasons"].to_string();
        let why = ["newest snapshot", "NATS: cannot connect to 127.0.0.1:1"];
        why.iter().all(|why| reasons.contains(why)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_server_nobody_waits_to_take_leave_of_it() {
    let mut broker = Restartable::start(&server()).await;
    let engine = [
        "--engine",
        "gpu-0=tcp://127.0.0.1:1",
        "--model",
        "m",
        "--block-size",
        "4",
    ];
    let processes = [
        Process::serve(broker.url(), &[]),
        Process::bridge(broker.url(), &engine),
        Process::up(broker.url(), &engine),
    ];
    for process in &processes {
        eventually("it is ready, for probes and for metrics", async || {
            let is_ready = readyz(process.admin_address()).await.0 == 200;
            let is_told = ["kvatlas_ready", "kvatlas_connected"]
                .iter()
                .all(|name| metric(process, name) == 1);
            (is_ready && is_told).then_some(())
        })
        .await;
    }
    broker.kill();
    for process in processes {
        eventually("it is not ready, and says that it is not connected", async || {
            let is_ready = readyz(process.admin_address()).await.0 == 200;
            (!is_ready && metric(&process, "kvatlas_connected") == 0).then_some(())
        })
        .await;
        let (code, log) = process.stop();
        assert_eq!(code, Some(0), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_a_moment_for_daemons_that_change_their_server() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let queries = QueryClient::new(nats.clone(), subjects()).with_patience(10 * PATIENCE);
    let asking = tokio::spawn(async move { queries.status(&namespace()).await });
    let statistics = nats.statistics();
    eventually("the server says that nobody listens", async || {
        (statistics.in_messages.load(Ordering::Relaxed) > 0).then_some(())
    })
    .await;
    let daemon = daemon(broker.url(), &[]).await;
    let answer = asking.await.unwrap();
    assert!(
        matches!(
            &answer,
            Err(ClientError::Refused(error))
                if matches!(error.code, ErrorCode::UnknownNamespace | ErrorCode::Unavailable)
        ),
        "{answer:?}"
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_fails_while_the_server_is_silent() {
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let connection = PublishConnection::connect(async_nats::ConnectOptions::new(), proxy.url())
        .await
        .unwrap();
    let publisher = engine(connection, &subjects(), "gpu-0", PublisherOptions::default()).await;
    publisher.flush().await.unwrap();

    let silent = Direction {
        is_silent: true,
        ..Direction::default()
    };
    proxy.set(Network {
        to_broker: silent,
        ..Network::default()
    });
    let events = vec![stored(hashes(1, 3))];
    publisher.publish(Tier::DEVICE, events).await.unwrap();
    let unanswered = publisher.flush().await.unwrap_err();
    assert!(
        matches!(&unanswered, PublisherError::Unanswered { .. }),
        "{unanswered}"
    );
    proxy.heal();
    publisher.flush().await.unwrap();
}

/// Starts a publisher without a delay, whose connection has room for one message. Returns the connection, too.
async fn narrow_publisher(proxy: &Proxy, options: PublisherOptions) -> (async_nats::Client, HolderPublisher) {
    let connecting = async_nats::ConnectOptions::new().client_capacity(1);
    let nats = connecting.connect(proxy.url()).await.unwrap();
    let options = PublisherOptions {
        batch_delay: Duration::ZERO,
        ..options
    };
    let publisher = engine(nats.clone(), &subjects(), "gpu-0", options).await;
    publisher.flush().await.unwrap();
    (nats, publisher)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_bounded_in_bytes() {
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let options = PublisherOptions {
        queue_bytes_max: 10_000,
        ..PublisherOptions::default()
    };
    let (nats, publisher) = narrow_publisher(&proxy, options).await;
    proxy.set(Network {
        is_cut: true,
        ..Network::default()
    });
    eventually("the connection is lost", async || {
        (nats.connection_state() == State::Disconnected).then_some(())
    })
    .await;
    let large = || vec![stored(hashes(1, 500))];
    let (mut taken, mut refused_in_a_row) = (0, 0);
    eventually("the queue stays full", async || {
        match publisher.try_publish(Tier::DEVICE, large()) {
            Ok(()) => (taken, refused_in_a_row) = (taken + 1, 0),
            Err(_) => refused_in_a_row += 1,
        }
        (refused_in_a_row >= 20).then_some(())
    })
    .await;
    // Few have left the queue, for the connection.
    assert!(taken < 100, "{taken}");
    let counted = publisher.counters();
    assert!(
        counted.queue_refusals >= 20 && counted.queue_waits == 0,
        "{counted:?}"
    );
    let (sent, ()) = tokio::join!(publisher.publish(Tier::DEVICE, large()), async {
        proxy.set(Network::default());
    });
    sent.unwrap();
    assert_eq!(publisher.counters().queue_waits, 1);
    publisher.flush().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_and_a_report_end_while_the_connection_takes_nothing() {
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let options = PublisherOptions {
        queue_batches_max: 1,
        patience: Duration::from_millis(200),
        ..PublisherOptions::default()
    };
    let (nats, publisher) = narrow_publisher(&proxy, options).await;

    proxy.set(Network {
        is_cut: true,
        ..Network::default()
    });
    eventually("the connection is lost, and the queue is full", async || {
        let is_lost = nats.connection_state() == State::Disconnected;
        let refused = publisher.try_publish(Tier::DEVICE, vec![stored(hashes(1, 3))]);
        (is_lost && matches!(refused, Err(PublisherError::QueueFull { .. }))).then_some(())
    })
    .await;
    let unsent = publisher.flush().await.unwrap_err();
    assert!(matches!(&unsent, PublisherError::Unanswered { .. }), "{unsent}");
    let unsent = publisher.say_goodbye().await.unwrap_err();
    assert!(matches!(&unsent, PublisherError::Unanswered { .. }), "{unsent}");

    let outcome = Outcome {
        worker: worker("gpu-0"),
        rank: 0,
        promised_blocks: 1,
        found_tokens: 0,
        prompt_tokens: None,
        exact: true,
    };
    let queries = QueryClient::new(nats, subjects()).with_patience(Duration::from_millis(200));
    let untold = queries
        .tell_outcomes(&namespace(), vec![outcome])
        .await
        .unwrap_err();
    assert!(matches!(&untold, ClientError::Connection(_)), "{untold}");
}
