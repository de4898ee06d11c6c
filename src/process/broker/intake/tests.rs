//! Tests of the bound on waiting bytes. They need a `nats-server`, as the tests of the embedded broker do.

use std::collections::BTreeMap;
use std::time::Instant;

use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;

use super::*;
use crate::broker::embedded::{EmbeddedBroker, find_nats_server};
use crate::broker::nats::connect_with;
use crate::broker::{Buffer, ConnectPatience, ConnectionNotice, round_trip};
use kvatlas_config::Config;

const MESSAGE_BYTES: usize = 1 << 20;
const BYTES_MAX: usize = 16 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Makes a connection with a bound on waiting bytes. Returns the client, a channel that has the numbers of connects
/// and disconnects so far, and the intake that enforces the bound.
async fn bounded(url: &str) -> (Client, watch::Receiver<(u32, u32)>, Arc<Intake>) {
    let flags = BTreeMap::from([("nats.url".to_owned(), url.to_owned())]);
    let config = Config::load(flags, std::iter::empty(), None).unwrap();
    let (happened, incidents) = watch::channel((0, 0));
    let notice = move |notice: ConnectionNotice| {
        happened.send_modify(|(made, broken)| match notice {
            ConnectionNotice::Connected => *made += 1,
            ConnectionNotice::Disconnected => *broken += 1,
            _ => {}
        });
    };
    let (buffer, intake) = Buffer::of_bytes(8192, BYTES_MAX);
    let connecting = connect_with(&config.nats, "test", buffer, ConnectPatience::Forever, notice);
    let client = connecting.await.unwrap();
    (client, incidents, intake)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_takes_is_bounded_in_bytes() {
    let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
        .await
        .unwrap();
    let (client, incidents, intake) = bounded(broker.url()).await;
    let is_broken = || incidents.borrow().1 > 0;
    let mut stalled = client.subscribe("large").await.unwrap();
    round_trip(&client, PATIENCE).await.unwrap();
    tokio::spawn(Arc::clone(&intake).watch(client.clone()));
    let publisher = async_nats::connect(broker.url()).await.unwrap();
    let publish = async || {
        let payload = vec![0; MESSAGE_BYTES].into();
        publisher.publish("large", payload).await.unwrap();
        publisher.flush().await.unwrap();
    };
    let mut published = 0;
    while !is_broken() && published < 4 * BYTES_MAX {
        publish().await;
        published += MESSAGE_BYTES;
        let has_come = || intake.received() >= published as u64;
        eventually("a message comes", || has_come() || is_broken()).await;
        if intake.waiting() > BYTES_MAX as u64 {
            eventually("the connection ends", is_broken).await;
        }
    }
    assert!(is_broken(), "{} bytes wait", intake.waiting());
    let bound = (BYTES_MAX + 2 * MESSAGE_BYTES) as u64;
    assert!(intake.waiting() <= bound, "{} bytes wait", intake.waiting());
    // While the connection is down, the server has no client to send more messages to.
    for _ in 0..32 {
        publish().await;
    }
    round_trip(&publisher, PATIENCE).await.unwrap();
    assert!(intake.waiting() <= bound, "{} bytes wait", intake.waiting());
    assert_eq!(incidents.borrow().0, 1);
    // When the waiting messages are taken, a new connection is made, and brings further messages.
    while let Some(Some(message)) = stalled.next().now_or_never() {
        intake.took(&message);
    }
    eventually("another connection is made", || incidents.borrow().0 == 2).await;
    round_trip(&client, PATIENCE).await.unwrap();
    publish().await;
    let came = tokio::time::timeout(PATIENCE, stalled.next()).await.unwrap();
    assert_eq!(came.unwrap().payload.len(), MESSAGE_BYTES);
}
