//! Silent holders. They become stale, and are removed later. A goodbye removes a holder at once. Time in which no
//! message could arrive does not count as silence.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use tokio::sync::{Mutex, watch};

use crate::support::jetstream::{JETSTREAM, Restartable, followed, servers};
use crate::support::metrics::{counter, metric};
use crate::support::process::{Process, kvatlas};
use crate::support::{
    Client, PATIENCE, broker, daemon, engine, eventually, hashes, matches, reasons, stored, subjects,
};
use kvatlas_client::publish::{
    FullState, HolderPublisher, PublishedHolder, PublisherOptions, SharedState, Term, Voice,
};
use kvatlas_core::wire::{
    DegradedReason, DegradedReasons, Event, EventBatch, NamespaceName, Tier, WireLimits, WorkerName,
};

const GPU: &str = "gpu-0";

async fn publisher(url: &str, heartbeat_interval: Duration) -> HolderPublisher {
    let nats = async_nats::connect(url).await.unwrap();
    let options = PublisherOptions {
        heartbeat_interval,
        ..PublisherOptions::default()
    };
    engine(nats, &subjects(), GPU, options).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_holder_is_stale_and_heartbeats_make_it_exact_again() {
    let broker = broker().await;
    let settings = [
        ("namespace_defaults.stale_after_ms", "1"),
        ("namespace_defaults.remove_after_ms", "0"),
    ];
    let daemon = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let mut silent = client.publisher(GPU, 0);
    client.tell(&mut silent, GPU, 0, vec![stored(hashes(1, 4))]).await;
    let status = eventually("the holder is stale", async || {
        client.holder(GPU, 0).await.filter(|holder| !holder.exact)
    })
    .await;
    assert_eq!(reasons(&status), ["stale"]);
    assert_eq!(
        matches(&client.ask(hashes(1, 4)).await),
        [(GPU.to_owned(), 0, 4, false)],
        "it is not removed, and answers say what it is"
    );
    assert_eq!(metric(&daemon, "kvatlas_stale_holders{namespace=\"llama\"}"), 1);
    // The holder was only silent, so a heartbeat makes it exact again.
    eventually("the holder is exact again", async || {
        Some(client.tell(&mut silent, GPU, 0, Vec::new()).await).filter(|status| status.exact)
    })
    .await;
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_is_silent_for_too_long_is_removed_and_may_come_back() {
    let broker = broker().await;
    let settings = [
        ("namespace_defaults.stale_after_ms", "1"),
        ("namespace_defaults.remove_after_ms", "2"),
    ];
    let daemon = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let engine = publisher(broker.url(), Duration::from_secs(3600)).await;
    engine
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    engine.flush().await.unwrap();
    eventually("the holder is there, and then it is not", async || {
        let is_counted = counter(&daemon, "kvatlas_holders_removed_total{namespace=\"llama\"}") > 0;
        (is_counted && client.holder(GPU, 0).await.is_none()).then_some(())
    })
    .await;
    assert_eq!(matches(&client.ask(hashes(1, 4)).await), []);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_removed_is_learned_again_from_its_next_heartbeat() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("resync.retry_max_ms", "500")]).await;
    let client = Client::connect(broker.url()).await;
    let engine = publisher(broker.url(), Duration::from_millis(50)).await;
    engine
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    client.exact(GPU, 0).await;
    // As an operator would, a client removes the holder in a later epoch. The engine does not know.
    let mut operator = client
        .publisher(GPU, 0)
        .resuming(kvatlas_core::wire::BatchCursor {
            epoch: u64::MAX,
            seq: 0,
        });
    operator
        .publish(Tier::DEVICE, vec![kvatlas_core::wire::Event::Goodbye])
        .await
        .unwrap();
    eventually("the holder is back, with all that it has", async || {
        let reply = client.ask(hashes(1, 4)).await;
        let counters = engine.counters();
        let was_asked = counters.answers_full + counters.answers_missing > 0;
        let is_back = matches(&reply) == [(GPU.to_owned(), 0, 4, true)];
        (is_back && was_asked && counters.heartbeats_sent > 0).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_of_the_publisher_removes_the_holder_at_once() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let engine = publisher(broker.url(), Duration::from_millis(20)).await;
    engine
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    client.exact(GPU, 0).await;
    engine.say_goodbye().await.unwrap();
    eventually("the holder is gone", async || {
        client.holder(GPU, 0).await.is_none().then_some(())
    })
    .await;
    daemon.stop().await;
}

/// A publisher is silent while the daemon restarts, and the daemon gets the publisher's events from a stream or a
/// snapshot. The daemon must call the holder stale, because neither source shows whether the publisher is still there.
#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_fell_silent_while_the_daemon_was_away_is_stale() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let folder = tempfile::tempdir().unwrap();
        let settings = [
            JETSTREAM,
            ("snapshots.directory", folder.path().to_str().unwrap()),
            ("namespace_defaults.stale_after_ms", "1"),
            ("namespace_defaults.remove_after_ms", "0"),
        ];
        let client = Client::connect(broker.url()).await;
        let mut silent = client.publisher(GPU, 0);
        for start in 0..3 {
            let daemon = Process::start(broker.url(), &settings);
            followed(&client.nats).await;
            if start == 0 {
                client.tell(&mut silent, GPU, 0, vec![stored(hashes(1, 4))]).await;
            }
            let status = eventually("the daemon answers", async || client.holder(GPU, 0).await).await;
            assert_eq!(status.blocks, 4);
            assert!(start == 0 || reasons(&status).contains(&"stale"), "{status:?}");
            eventually("the next batch shows that the publisher is alive", async || {
                Some(client.tell(&mut silent, GPU, 0, Vec::new()).await).filter(|status| status.exact)
            })
            .await;
            // Once the state comes from the stream, and once from a snapshot.
            if start == 0 {
                daemon.kill();
            } else {
                daemon.stop();
            }
        }
    }
}

/// State of a holder without blocks, from which the publisher under test reads the full state.
struct NoBlocks;

impl FullState for NoBlocks {
    fn full_state(&mut self) -> Vec<(Tier, Event)> {
        Vec::new()
    }
}

/// Starts a publisher that publishes in turns. Returns its turns and its term, which has not begun, too.
async fn publisher_in_turn(
    nats: async_nats::Client,
    heartbeat_interval: Duration,
) -> (watch::Sender<Option<u64>>, Term, HolderPublisher) {
    let (turns, turn) = watch::channel(None);
    let term = Term::default();
    let voice = Voice {
        turn,
        term: term.clone(),
        epoch: Arc::default(),
    };
    let holder = PublishedHolder {
        namespace: NamespaceName::new("llama").unwrap(),
        worker: WorkerName::new(GPU).unwrap(),
        rank: 0,
    };
    let options = PublisherOptions {
        heartbeat_interval,
        ..PublisherOptions::default()
    };
    let state: SharedState = Arc::new(Mutex::new(NoBlocks));
    let publisher = HolderPublisher::start_in_turn(nats, &subjects(), holder, options, state, voice)
        .await
        .unwrap();
    (turns, term, publisher)
}

/// A publisher has the right to publish (its turn) only for a time, which ends early when the broker cannot be reached.
/// When a turn has ended so, the publisher must report its holder in doubt, because batches that still wait in the
/// client could arrive late.
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_lapses_ends_in_doubt() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let mut told = nats.subscribe(subjects().all_events()).await.unwrap();
    let mut next = async || {
        let message = tokio::time::timeout(PATIENCE, told.next())
            .await
            .unwrap()
            .unwrap();
        EventBatch::decode(&message.payload, &WireLimits::default()).unwrap()
    };
    let (turns, term, publisher) = publisher_in_turn(nats, Duration::from_secs(3600)).await;
    let in_an_hour = Instant::now() + Duration::from_secs(3600);
    for (turn, has_lapsed) in [(1, false), (2, true), (3, false)] {
        term.extend(in_an_hour);
        turns.send_replace(Some(turn));
        let first = next().await;
        assert_eq!(first.events, []);
        let event = stored(hashes(1, 4));
        publisher.publish(Tier::DEVICE, vec![event]).await.unwrap();
        assert_eq!((next().await.events.len(), first.seq), (1, 2));
        if has_lapsed {
            term.end();
        }
        turns.send_replace(None);
        if has_lapsed {
            let last = next().await;
            let doubts = DegradedReasons::of(DegradedReason::UpstreamLost);
            assert_eq!(
                (last.epoch, last.events),
                (first.epoch, vec![Event::Doubted(doubts)])
            );
        }
    }
    turns.send_replace(Some(4));
    assert_eq!(next().await.events, []);
}

/// A bridge extends its term when its beat comes back. A publisher that hears of its turn while the term is over must
/// still begin to publish once the term is extended, because nothing else wakes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_begins_while_the_term_is_over_is_taken_when_the_term_goes_on() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let mut told = nats.subscribe(subjects().all_events()).await.unwrap();
    nats.flush().await.unwrap();
    let (turns, term, publisher) = publisher_in_turn(nats, Duration::from_millis(10)).await;
    turns.send_replace(Some(7));
    // The publisher hears of its turn before it has answered these.
    for _ in 0..16 {
        publisher.flush().await.unwrap();
    }
    term.extend(Instant::now() + Duration::from_secs(3600));
    let message = tokio::time::timeout(PATIENCE, told.next())
        .await
        .unwrap()
        .unwrap();
    let batch = EventBatch::decode(&message.payload, &WireLimits::default()).unwrap();
    assert_eq!(batch.epoch, publisher.cursor().epoch);
}

/// Two publishers of one name contest the holder. `kvatlas publish` becomes the second one only if that is meant.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_replaces_a_publisher_that_is_alive_by_force_only() {
    let broker = broker().await;
    let settings = [("namespace_defaults.stale_after_ms", "3000")];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let living = publisher(broker.url(), Duration::from_millis(100)).await;
    living
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    client.exact(GPU, 0).await;
    let command = async |more: &'static [&'static str]| {
        let url = broker.url().to_owned();
        let running = tokio::task::spawn_blocking(move || {
            let arguments = [
                "publish",
                "--namespace",
                "llama",
                "--worker",
                GPU,
                "--nats-url",
                &url,
            ];
            let mut command = kvatlas(&arguments);
            command.args(more).stdin(Stdio::null()).output().unwrap()
        });
        let output = running.await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    let (code, said) = command(&[]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("--force"), "{said}");
    assert_eq!(command(&["--force"]).await, (Some(0), String::new()));
    drop(living);
    eventually("the holder is stale", async || {
        let holder = client.holder(GPU, 0).await?;
        reasons(&holder).contains(&"stale").then_some(())
    })
    .await;
    assert_eq!(command(&[]).await, (Some(0), String::new()));
    daemon.stop().await;
}
