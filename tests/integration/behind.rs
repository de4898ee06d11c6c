//! Answers about blocks that have changed, while the daemon does not yet know it: events wait for the daemon, the
//! daemon is stopped, or it is still applying a batch. Then no answer may be called exact and be wrong.

use std::time::Duration;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{BatchCursor, DegradedReason, Event, HolderMatch, Tier};
use rustix::process::Signal;
use serde_json::json;

use crate::support::http::HttpClient;
use crate::support::jetstream::{JETSTREAM, kept, last_message};
use crate::support::metrics::{counter, metric};
use crate::support::process::Process;
use crate::support::publisher::Publisher;
use crate::support::{
    Client, PATIENCE, broker, daemon, eventually, hashes, namespace, removed, server, stored, stored_after,
};
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use kvatlas_process::broker::round_trip;

/// Time for which a test stops the daemon. It exceeds `events.behind_after_ms`, the longest time that events may wait
/// while answers are still exact.
const STOPPED_FOR: Duration = Duration::from_millis(600);

async fn publish(publisher: &mut Publisher, events: Vec<Event>) -> BatchCursor {
    publisher.publish(Tier::DEVICE, events).await.unwrap()
}

/// Returns the worker's entry in the reply to a query; `None` if the reply does not name the worker. The query's time
/// limit is longer than the daemon is stopped.
async fn found(client: &Client, chain: &[SequenceHash], worker: &str) -> Option<HolderMatch> {
    let reply = client.ask(chain.to_vec()).await;
    reply
        .holders
        .into_iter()
        .find(|holder| holder.worker.as_str() == worker)
}

/// Returns the hashes of a chain of blocks. Chains with different numbers share no block.
fn chain(number: u64, blocks: u64) -> Vec<SequenceHash> {
    hashes(1 + number * 1_000_000, blocks)
}

async fn a_daemon_that_was_stopped_calls_nothing_exact_that_it_has_not_read(
    broker: &EmbeddedBroker,
    transport: &[(&str, &str)],
) {
    let mut settings = vec![("events.behind_after_ms", "250")];
    settings.extend_from_slice(transport);
    let process = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let cursor = publish(&mut publisher, vec![stored(hashes(1, 1))]).await;
    client.applied("gpu-0", 0, cursor).await;
    client.exact("gpu-0", 0).await;
    let mut blocks = 1;
    for _ in 0..3 {
        process.freeze();
        let before = last_message(&client.nats).await;
        for _ in 0..500 {
            publish(&mut publisher, vec![stored_after(blocks, hashes(blocks + 1, 1))]).await;
            blocks += 1;
        }
        // Events wait only from the time at which the broker has read them, and a busy broker may read them late.
        round_trip(&client.nats, PATIENCE).await.unwrap();
        if let Some(before) = before {
            // An answer is exact for the events in the stream, and a busy server may take a while to put them there.
            kept(&client.nats, before, 500).await;
        }
        let asked = hashes(1, blocks);
        let questions: Vec<_> = (0..50).map(|_| found(&client, &asked, "gpu-0")).collect();
        let stopped = async {
            // This pause makes the events old; nothing is waited for.
            tokio::time::sleep(STOPPED_FOR).await;
            process.signal(Signal::CONT);
        };
        let (replies, ()) = tokio::join!(futures_util::future::join_all(questions), stopped);
        for holder in replies {
            let holder = holder.expect("the worker has had the first block all the time");
            assert!(
                !holder.exact || u64::from(holder.matched_blocks) == blocks,
                "{holder:?} is called exact, but has {blocks} blocks"
            );
        }
        client.exact("gpu-0", 0).await;
    }
    let (code, _) = process.stop();
    assert_eq!(code, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_daemon_with_core_nats() {
    let broker = broker().await;
    a_daemon_that_was_stopped_calls_nothing_exact_that_it_has_not_read(&broker, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_daemon_with_jetstream() {
    let options = BrokerOptions {
        with_jetstream: true,
        ..crate::support::own_port()
    };
    let broker = EmbeddedBroker::start_with(&server(), options).await.unwrap();
    a_daemon_that_was_stopped_calls_nothing_exact_that_it_has_not_read(&broker, &[JETSTREAM]).await;
}

/// One worker sends large batches faster than the daemon's only lane (the thread that applies events) can apply them.
/// The daemon must drop batches of this worker only, and must apply another worker's small batch without waiting for
/// the large ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_floods_its_lane_is_behind_and_loses_its_own_messages_alone() {
    const QUEUE_BYTES: u64 = 4 << 20;
    const BATCHES: u64 = 200;
    let broker = broker().await;
    let queue_bytes = QUEUE_BYTES.to_string();
    let settings = [
        ("events.lanes", "1"),
        ("events.lane_queue_bytes", queue_bytes.as_str()),
        ("resync.concurrency", "0"),
    ];
    let process = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let (mut flood, mut small) = (client.publisher("flood", 0), client.publisher("small", 0));
    let mine = chain(900, 1000);
    publish(&mut small, vec![stored(mine[..1].to_vec())]).await;
    client.exact("small", 0).await;

    for number in 0..BATCHES {
        publish(&mut flood, vec![stored(chain(number, 60_000))]).await;
    }
    let last = publish(&mut small, vec![stored(mine.clone())]).await;
    client.nats.flush().await.unwrap();
    // The small worker's batch does not wait for the flood, and none of its batches is lost.
    client.applied("small", 0, last).await;
    eventually("the messages of the flood have been dropped", async || {
        let dropped = counter(
            &process,
            "kvatlas_batches_dropped_total{namespace=\"llama\",reason=\"lane_full\"}",
        );
        let waiting = metric(&process, "kvatlas_lane_queue_bytes{lane=\"0\"}");
        // The bytes of the batch that is being applied count, too.
        assert!(waiting <= QUEUE_BYTES + (1 << 20), "{waiting} bytes wait");
        (dropped > 0 && waiting == 0).then_some(())
    })
    .await;
    let flooded = client.holder("flood", 0).await.unwrap();
    assert!(!flooded.exact, "{flooded:?} has lost batches");
    assert!(client.holder("small", 0).await.unwrap().exact);
    let memory = metric(&process, "kvatlas_process_resident_memory_bytes");
    assert!(memory < 1 << 30, "{memory} bytes of memory");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_longer_than_allowed_is_behind_and_replies_say_for_how_long() {
    let broker = broker().await;
    let settings = [("events.lanes", "1"), ("events.behind_after_ms", "1")];
    let process = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let prompt = chain(900, 4);
    publish(&mut publisher, vec![stored(prompt.clone())]).await;
    client.applied("gpu-0", 0, publisher.cursor()).await;
    let mut number = 0;
    eventually("the worker is behind", async || {
        for _ in 0..20 {
            publish(&mut publisher, vec![stored(chain(number % 800, 60_000))]).await;
            number += 1;
        }
        let reply = client.ask(prompt.clone()).await;
        let holder = reply.holders.first()?;
        let is_behind = holder.degraded.contains(DegradedReason::Behind);
        assert!(!is_behind || reply.behind_us > 1_000, "{reply:?}");
        assert!(!is_behind || !holder.exact, "{holder:?}");
        is_behind.then_some(())
    })
    .await;
    drop(process);
}

/// Replaces all blocks by the same blocks, many times. In every second round, one batch removes and stores them; in the
/// other rounds, a new epoch begins with them.
async fn replacing(client: &Client, mut publisher: Publisher, all: &[SequenceHash]) {
    const ROUNDS: u64 = 150;
    for round in 0..ROUNDS {
        let events = match round % 2 {
            0 => vec![removed(all.to_vec()), stored(all.to_vec())],
            _ => {
                let epoch = publisher.cursor().epoch + 1;
                publisher = client
                    .publisher("gpu-0", 0)
                    .resuming(BatchCursor { epoch, seq: 0 });
                vec![stored(all.to_vec())]
            }
        };
        let cursor = publish(&mut publisher, events).await;
        client.nats.flush().await.unwrap();
        // Waiting for each batch leaves time to query in the middle of most batches.
        client.applied("gpu-0", 0, cursor).await;
    }
}

/// One client replaces all blocks of a holder again and again, while another one queries them. Each reply must have all
/// blocks, or say that the holder is changing and not exact.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_seen_whole_or_as_a_change() {
    let broker = broker().await;
    let process = Process::serve(broker.url(), &[]);
    let client = Client::connect(broker.url()).await;
    let all = hashes(1, 5000);
    let mut publisher = client.publisher("gpu-0", 0);
    publish(&mut publisher, vec![stored(all.clone())]).await;
    client.applied("gpu-0", 0, publisher.cursor()).await;
    let publishing = replacing(&client, publisher, &all);
    let judged = std::cell::Cell::new(0_u64);
    let asking = async {
        while judged.get() < 20_000 {
            let reply = client.ask(all.clone()).await;
            let holder = reply.holders.first();
            let holder = holder.unwrap_or_else(|| panic!("the worker is absent: {reply:?}"));
            let is_whole = u64::from(holder.matched_blocks) == all.len() as u64;
            let is_changing = holder.degraded.contains(DegradedReason::Changing);
            assert!(is_whole || is_changing, "seen in parts: {holder:?}");
            assert!(!is_changing || !holder.exact);
            judged.set(judged.get() + 1);
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        () = publishing => {}
        () = asking => {}
    }
    assert!(judged.get() >= 20, "{} replies", judged.get());
    drop(process);
}

/// The same test as [`a_batch_is_seen_whole_or_as_a_change`], with queries over HTTP.
#[tokio::test(flavor = "multi_thread")]
async fn over_http_a_batch_is_seen_whole_or_the_answer_is_not_exact() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("http.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    // Replacing so many blocks takes long. A query about the first few can see that all of them are gone.
    let all = hashes(1, 60_000);
    let mut publisher = client.publisher("gpu-0", 0);
    publish(&mut publisher, vec![stored(all.clone())]).await;
    client.applied("gpu-0", 0, publisher.cursor()).await;
    let asked: Vec<u64> = all[..8].iter().map(|hash| hash.as_u64()).collect();
    let question = json!({"model": namespace().as_str(), "block_size": 16, "seq_hashes": asked});
    let publishing = replacing(&client, publisher, &all);
    let judged = std::cell::Cell::new(0_u64);
    let asking = async {
        loop {
            let answer = http.post("/query_by_hash", &question).await;
            let figures = answer.json()["default"]["gpu-0"].clone();
            let is_whole = figures["longest_matched"] == json!(16 * 8);
            assert!(is_whole || !answer.is_exact(), "seen in parts: {figures}");
            judged.set(judged.get() + 1);
        }
    };
    tokio::select! {
        () = publishing => {}
        () = asking => {}
    }
    assert!(judged.get() >= 20, "{} replies", judged.get());
    drop(daemon);
}
