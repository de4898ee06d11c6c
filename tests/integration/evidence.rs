//! Messages, stored events and clocks that contradict what a daemon has received before. The daemon must notice the
//! contradiction, or at least never mark a wrong answer exact.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use async_nats::{Message, Subscriber};
use futures_util::StreamExt;
use kvatlas_client::publish::{HolderPublisher, PublisherOptions};
use kvatlas_core::wire::{
    BatchCursor, Event, EventBatch, NamespaceName, ResyncAnswerKind, ResyncChunk, ResyncRequest, Tier,
    WireLimits,
};
use kvatlas_daemon::snapshots::SnapshotStartError;
use kvatlas_daemon::{Daemon, StartError};
use kvatlas_process::broker::embedded::EmbeddedBroker;
use kvatlas_process::broker::round_trip;
use kvatlas_process::storage::LockError;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::jetstream::{JETSTREAM, Restartable, broker_on_store, kept};
use crate::support::metrics::counter;
use crate::support::process::{Process, kvatlas, memory_peak};
use crate::support::publisher::Publisher;
use crate::support::{
    Client, PATIENCE, broker, config, daemon, engine, eventually, hashes, matches, namespace, reasons,
    server, snapshots_in, stored, subjects, worker,
};

/// Simulated publisher, for which the test makes every message.
struct Engine {
    client: Client,
    name: &'static str,
    questions: Subscriber,
}

impl Engine {
    async fn begin(url: &str, name: &'static str) -> Self {
        let client = Client::connect(url).await;
        let subject = subjects().resync(&namespace(), &worker(name), 0);
        let questions = client.nats.subscribe(subject).await.unwrap();
        client.nats.flush().await.unwrap();
        Self {
            client,
            name,
            questions,
        }
    }

    async fn say(&self, cursor: BatchCursor, time_us: Option<u64>, events: Vec<Event>) {
        self.send(batch(cursor, time_us, events).encode()).await;
    }

    async fn send(&self, payload: Vec<u8>) {
        let subject = subjects().events(&namespace(), &worker(self.name));
        self.client.nats.publish(subject, payload.into()).await.unwrap();
        self.client.nats.flush().await.unwrap();
    }

    /// Returns the daemon's next question.
    async fn asked(&mut self) -> (ResyncRequest, Message) {
        let question = tokio::time::timeout(PATIENCE, self.questions.next()).await;
        let question = question.expect("the daemon asks").unwrap();
        let request = ResyncRequest::decode(&question.payload, &WireLimits::default()).unwrap();
        (request, question)
    }

    async fn answer(
        &self,
        to: &Message,
        kind: ResyncAnswerKind,
        cursor: BatchCursor,
        batches: &[EventBatch],
    ) {
        self.reply(to, chunk(kind, cursor, batches).encode()).await;
    }

    /// Sends a payload as a part of an answer.
    async fn reply(&self, to: &Message, payload: Vec<u8>) {
        let reply = to.reply.clone().unwrap();
        self.client.nats.publish(reply, payload.into()).await.unwrap();
        self.client.nats.flush().await.unwrap();
    }

    /// Waits until the holder is exact. On a busy machine, the daemon may ask the publisher again meanwhile; each
    /// question is answered with `answer`.
    async fn answers_until_exact(&mut self, answer: &ResyncChunk) {
        let exact = self.client.exact(self.name, 0);
        tokio::pin!(exact);
        loop {
            let question = tokio::select! {
                _ = &mut exact => return,
                question = self.questions.next() => question.unwrap(),
            };
            let reply = question.reply.unwrap();
            self.client
                .nats
                .publish(reply, answer.encode().into())
                .await
                .unwrap();
        }
    }

    async fn is_exact_with(&self, blocks: u64) {
        self.client.exact(self.name, 0).await;
        assert_eq!(self.client.holder(self.name, 0).await.unwrap().blocks, blocks);
    }

    async fn is_degraded(&self, reason: &str) {
        eventually(&format!("the holder is degraded: {reason}"), async || {
            let holder = self.client.holder(self.name, 0).await?;
            reasons(&holder).contains(&reason).then_some(())
        })
        .await;
    }
}

/// Returns the only chunk of an answer.
fn chunk(kind: ResyncAnswerKind, cursor: BatchCursor, batches: &[EventBatch]) -> ResyncChunk {
    ResyncChunk {
        rank: 0,
        cursor,
        kind,
        number: 0,
        is_last: true,
        time_us: None,
        recomputed_block_size: None,
        batches: batches.iter().map(EventBatch::encode).collect(),
    }
}

/// Starts a broker, a daemon with these settings, and an engine that has published four blocks, with `time_us` as the
/// time of its batch. The caller must keep the broker, which stops when it is dropped.
async fn engine_with_blocks(
    settings: &[(&str, &str)],
    time_us: Option<u64>,
) -> (EmbeddedBroker, Daemon, Engine) {
    let broker = broker().await;
    let daemon = daemon(broker.url(), settings).await;
    let engine = Engine::begin(broker.url(), "gpu-0").await;
    engine.say(at(1), time_us, vec![stored(hashes(1, 4))]).await;
    engine.client.applied("gpu-0", 0, at(1)).await;
    (broker, daemon, engine)
}

fn at(seq: u64) -> BatchCursor {
    BatchCursor { epoch: 1, seq }
}

fn batch(cursor: BatchCursor, time_us: Option<u64>, events: Vec<Event>) -> EventBatch {
    EventBatch {
        epoch: cursor.epoch,
        seq: cursor.seq,
        rank: 0,
        time_us,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_does_not_forgive_what_came_after_the_question() {
    let (_broker, daemon, mut engine) = engine_with_blocks(&[], None).await;
    engine.say(at(3), None, vec![]).await;
    let (_, question) = engine.asked().await;
    // The daemon must not take the answer below as newer than this message, whatever this message was about.
    engine.send(b"garbage".to_vec()).await;
    engine.is_degraded("undecodable").await;
    let missing = [batch(at(2), None, vec![]), batch(at(3), None, vec![])];
    engine
        .answer(&question, ResyncAnswerKind::Missing, at(3), &missing)
        .await;
    // The answer did not settle the doubt, so the daemon asks again.
    let (_, question) = engine.asked().await;
    let holder = engine.client.holder("gpu-0", 0).await.unwrap();
    assert!(
        !holder.exact && reasons(&holder).contains(&"undecodable"),
        "{holder:?}"
    );
    let lost = [batch(at(4), None, vec![stored(hashes(1, 5))])];
    engine
        .answer(&question, ResyncAnswerKind::Missing, at(4), &lost)
        .await;
    engine.is_exact_with(5).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_ends_before_what_was_received_is_not_believed() {
    let (_broker, daemon, mut engine) = engine_with_blocks(&[("resync.retry_min_ms", "20")], Some(1)).await;
    // The daemon has received number 5, so a state at number 2 must be wrong.
    engine.say(at(5), Some(5), vec![stored(hashes(1, 9))]).await;
    let state = [batch(at(1), None, vec![stored(hashes(1, 2))])];
    for _ in 0..3 {
        let (_, question) = engine.asked().await;
        engine
            .answer(&question, ResyncAnswerKind::Full, at(2), &state)
            .await;
    }
    let (request, question) = engine.asked().await;
    assert!(request.full, "only the full state settles it");
    let holder = engine.client.holder("gpu-0", 0).await.unwrap();
    assert!(!holder.exact, "{holder:?}");
    let state = [batch(at(1), None, vec![stored(hashes(1, 9))])];
    engine
        .answer(&question, ResyncAnswerKind::Full, at(5), &state)
        .await;
    engine.is_exact_with(9).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_dies_between_the_question_and_its_answer_leaves_its_holder_degraded() {
    let (_broker, daemon, mut engine) = engine_with_blocks(&[("resync.timeout_ms", "200")], Some(1)).await;
    engine.say(at(3), Some(3), vec![stored(hashes(1, 6))]).await;
    let _ = engine.asked().await;
    engine.questions.unsubscribe().await.unwrap();
    engine.is_degraded("gap").await;
    // The batch is applied, and the holder stays in doubt.
    let holder = engine.client.applied("gpu-0", 0, at(3)).await;
    assert!(!holder.exact && holder.blocks == 6, "{holder:?}");
    // A new epoch replaces everything.
    let reborn = BatchCursor { epoch: 2, seq: 1 };
    engine.say(reborn, Some(4), vec![stored(hashes(1, 2))]).await;
    engine.is_exact_with(2).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn times_tell_a_restart_in_the_same_epoch_and_without_them_it_is_not_noticed() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let engine = Engine::begin(broker.url(), "gpu-0").await;
    for (epoch, time) in [(1, None), (2, Some(7))] {
        let at = |seq| BatchCursor { epoch, seq };
        for seq in 1..=3 {
            engine.say(at(seq), time, vec![stored(hashes(1, seq))]).await;
        }
        engine.client.applied("gpu-0", 0, at(3)).await;
        // The publisher begins its numbers again. Without times, or with a clock that stands still, its batches look
        // like repeated ones.
        for seq in 1..=3 {
            engine.say(at(seq), time, vec![stored(hashes(100, 1))]).await;
        }
        engine.say(at(4), time, vec![]).await;
        let holder = engine.client.applied("gpu-0", 0, at(4)).await;
        assert_eq!((holder.blocks, holder.exact), (3, true), "as the contract says");
        // Batches whose numbers continue may have lower times.
        engine
            .say(at(5), time.map(|time| time - 1), vec![stored(hashes(1, 5))])
            .await;
        assert!(engine.client.applied("gpu-0", 0, at(5)).await.exact);
    }
    // If the times grow, the first such batch shows the new beginning.
    let at = |seq| BatchCursor { epoch: 3, seq };
    for seq in 1..=3 {
        engine.say(at(seq), Some(seq), vec![stored(hashes(1, seq))]).await;
    }
    engine.client.applied("gpu-0", 0, at(3)).await;
    engine.say(at(1), Some(9), vec![stored(hashes(100, 1))]).await;
    engine.is_degraded("gap").await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_epoch_far_ahead_of_the_clock_is_not_believed() {
    let (_broker, daemon, mut engine) = engine_with_blocks(&[], None).await;
    let future = BatchCursor {
        epoch: u64::MAX,
        seq: 1,
    };
    engine.say(future, None, vec![Event::Cleared]).await;
    // If this epoch were right, the known blocks would be outdated. So the daemon asks the publisher, and checks the
    // epoch of the answer, too.
    let (_, question) = engine.asked().await;
    engine
        .answer(&question, ResyncAnswerKind::Full, future, &[])
        .await;
    let (_, question) = engine.asked().await;
    assert_eq!(engine.client.holder("gpu-0", 0).await.unwrap().epoch, 1);
    engine
        .answer(&question, ResyncAnswerKind::Missing, at(1), &[])
        .await;
    // The answer does not tell who made the other batch, so the daemon asks again.
    engine.asked().await;
    let holder = engine.client.holder("gpu-0", 0).await.unwrap();
    assert!(reasons(&holder).contains(&"contested"), "{holder:?}");
    assert_eq!((holder.epoch, holder.blocks), (1, 4));
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_resets_a_holder_whose_publisher_is_locked_out() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("events.max_epoch_ahead_seconds", "0")]).await;
    let engine = Engine::begin(broker.url(), "gpu-0").await;
    let future = BatchCursor {
        epoch: u64::MAX,
        seq: 1,
    };
    engine.say(future, None, vec![stored(hashes(1, 9))]).await;
    engine.client.applied("gpu-0", 0, future).await;
    let url = broker.url().to_owned();
    let forget = move || {
        kvatlas(&["admin", "forget", "llama", "gpu-0", "--nats-url", &url])
            .output()
            .unwrap()
    };
    let output = tokio::task::spawn_blocking(forget).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("forgot 1 holder"),
        "{said} {output:?}"
    );
    engine.say(at(1), None, vec![stored(hashes(1, 2))]).await;
    let holder = engine.client.applied("gpu-0", 0, at(1)).await;
    assert_eq!((holder.epoch, holder.blocks, holder.exact), (1, 2, true));
    daemon.stop().await;
}

/// A test that a command fails if a daemon is there and does not reply. The daemon that replies at once does not hide it.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_does_not_reply_to_an_operator_is_named() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let daemon = daemon(broker.url(), &[(key, &directory)]).await;
    let slow = async_nats::connect(broker.url()).await.unwrap();
    let mut questions = slow.subscribe("$SRV.PING.kvatlas").await.unwrap();
    slow.flush().await.unwrap();
    let url = broker.url().to_owned();
    let command = tokio::task::spawn_blocking(move || {
        kvatlas(&["admin", "snapshot", "--timeout", "1", "--nats-url", &url])
            .output()
            .unwrap()
    });
    let question = questions.next().await.unwrap();
    let metadata = json!({ "instance": "slow@host:1", "subjects_prefix": "kvatlas", "role": "daemon" });
    let present = json!({ "name": "kvatlas", "metadata": metadata }).to_string();
    slow.publish(question.reply.unwrap(), present.into())
        .await
        .unwrap();
    let output = command.await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said} {output:?}");
    assert!(said.contains("written") && said.contains("slow@host:1"), "{said}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_have_a_holder_resynchronised_a_snapshot_written_and_a_daemon_stopped() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (_, directory) = snapshots_in(folder.path());
    let mut process = Process::logged(&["--nats-url", broker.url(), "--snapshots-directory", &directory]);
    process.wait_for_line(|line| line["message"] == "ready");
    let mut engine = Engine::begin(broker.url(), "gpu-0").await;
    engine.say(at(1), None, vec![stored(hashes(1, 4))]).await;
    engine.client.applied("gpu-0", 0, at(1)).await;
    let url = broker.url().to_owned();
    let admin = move |arguments: &'static [&'static str]| {
        let url = url.clone();
        tokio::task::spawn_blocking(move || {
            let output = kvatlas(&["admin"])
                .args(arguments)
                .args(["--nats-url", &url])
                .output();
            output.unwrap()
        })
    };
    let asking = admin(&["resync", "llama", "gpu-0", "0"]);
    let (request, question) = engine.asked().await;
    assert!(request.full);
    let state = [batch(at(1), None, vec![stored(hashes(1, 3))])];
    engine
        .answer(&question, ResyncAnswerKind::Full, at(1), &state)
        .await;
    assert!(asking.await.unwrap().status.success());
    engine.is_exact_with(3).await;
    let nobody = admin(&["resync", "llama", "gpu-9"]).await.unwrap();
    assert_eq!(nobody.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("has gpu-9 of llama"));
    assert!(admin(&["snapshot"]).await.unwrap().status.success());
    let has_snapshot = |folder: &Path| {
        let names = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        names
            .into_iter()
            .any(|path| path.extension().is_some_and(|suffix| suffix == "kvs"))
    };
    assert!(has_snapshot(folder.path()));
    assert_eq!(admin(&["drain"]).await.unwrap().status.code(), Some(64));
    assert_eq!(
        admin(&["drain", "--instance", "nobody", "--timeout", "300ms"])
            .await
            .unwrap()
            .status
            .code(),
        Some(69)
    );
    assert!(admin(&["drain", "--all"]).await.unwrap().status.success());
    process.wait_for_line(|line| line["message"] == "stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_rolled_back_and_has_grown_again_is_noticed() {
    for restarts in [false, true] {
        let mut broker = Restartable::start(&server()).await;
        let folder = tempfile::tempdir().unwrap();
        let (key, directory) = snapshots_in(folder.path());
        let settings = [JETSTREAM, (key, directory.as_str())];
        let mut first = Some(daemon(broker.url(), &settings).await);
        let engine = Engine::begin(broker.url(), "gpu-0").await;
        engine.say(at(1), Some(1), vec![stored(hashes(1, 1))]).await;
        engine.client.applied("gpu-0", 0, at(1)).await;
        broker.kill();
        let copy = broker.copy_of_store();
        broker.restart().await;
        for seq in 2..=6 {
            engine.say(at(seq), Some(seq), vec![stored(hashes(1, seq))]).await;
        }
        engine.client.applied("gpu-0", 0, at(6)).await;
        if restarts {
            first.take().unwrap().stop().await;
        }
        broker.kill();
        // In the older copy of the store, new messages get the numbers of messages that the daemon has read, and
        // further numbers.
        let elsewhere = broker_on_store(&server(), copy.path()).await;
        let writer = Engine::begin(elsewhere.url(), "gpu-0").await;
        let reborn = |seq| BatchCursor { epoch: 2, seq };
        for seq in 1..=20 {
            writer
                .say(reborn(seq), Some(100 + seq), vec![stored(hashes(500, 2))])
                .await;
        }
        kept(&writer.client.nats, 1, 20).await;
        drop(elsewhere);
        broker.replace_store(copy);
        broker.restart().await;
        let second = match first {
            Some(first) => first,
            None => daemon(broker.url(), &settings).await,
        };
        let client = Client::connect(broker.url()).await;
        eventually("the daemon has what the stream has", async || {
            let holder = client.holder("gpu-0", 0).await?;
            let is_old = holder.epoch == 1;
            (!is_old && holder.seq == 20).then_some(())
        })
        .await;
        let last = Engine::begin(broker.url(), "gpu-0").await;
        last.say(reborn(21), Some(121), Vec::new()).await;
        client.exact("gpu-0", 0).await;
        let reply = client.ask(hashes(500, 2)).await;
        assert_eq!(matches(&reply), [("gpu-0".to_owned(), 0, 2, true)]);
        assert!(client.ask(hashes(1, 6)).await.holders.is_empty());
        second.stop().await;
    }
}

/// Starts the library's publisher, which has published four blocks.
async fn library_engine(client: &Client, name: &str) -> HolderPublisher {
    engine_with(client, name, PublisherOptions::default()).await
}

async fn engine_with(client: &Client, name: &str, options: PublisherOptions) -> HolderPublisher {
    let publisher = engine(client.nats.clone(), &subjects(), name, options).await;
    let blocks = vec![stored(hashes(1, 4))];
    publisher.publish(Tier::DEVICE, blocks).await.unwrap();
    publisher.flush().await.unwrap();
    publisher
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_with_another_default_of_a_guessed_block_size_says_so_and_asks() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let first = daemon(broker.url(), &[(key, directory.as_str())]).await;
    let client = Client::connect(broker.url()).await;
    let options = PublisherOptions {
        tells_block_size: false,
        ..PublisherOptions::default()
    };
    let publisher = engine_with(&client, "gpu-0", options).await;
    eventually("the blocks are known", async || {
        (client.holder("gpu-0", 0).await?.blocks == 4).then_some(())
    })
    .await;
    first.stop().await;
    let mut second = Process::logged(&[
        "--nats-url",
        broker.url(),
        "--snapshots-directory",
        &directory,
        "--namespace-defaults-block-size",
        "32",
    ]);
    second.wait_for_line(|line| line.to_string().contains("block_size 16, the namespace"));
    eventually("the publisher has told everything again", async || {
        let holder = client.holder("gpu-0", 0).await?;
        (holder.exact && holder.blocks == 4).then_some(())
    })
    .await;
    drop(publisher);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_publishers_do_not_hold_up_one_that_answers() {
    const SILENT: usize = 100;
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let mut silent = Vec::new();
    for number in 0..SILENT {
        // Several ranks belong to one worker, as with an engine whose publishers do not answer.
        let rank = u32::try_from(number % 50).unwrap();
        let name = format!("silent-{}", number / 50);
        let subject = subjects().resync(&namespace(), &worker(&name), rank);
        silent.push(client.nats.subscribe(subject).await.unwrap());
    }
    let _publisher = library_engine(&client, "answers").await;
    let patient = [("resync.concurrency", "2"), ("resync.timeout_ms", "600000")];
    let daemon = daemon(broker.url(), &patient).await;
    for number in 0..SILENT {
        let rank = u32::try_from(number % 50).unwrap();
        let mut publisher = client
            .publisher(&format!("silent-{}", number / 50), rank)
            .resuming(at(4));
        publisher.publish(Tier::DEVICE, vec![]).await.unwrap();
    }
    client.exact("answers", 0).await;
    assert_eq!(client.holder("answers", 0).await.unwrap().blocks, 4);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_nobody_uses_gives_its_place_back() {
    let broker = broker().await;
    let settings = [
        ("limits.max_namespaces", "1"),
        ("limits.empty_namespace_seconds", "1"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let junk = NamespaceName::new("junk").unwrap();
    let mut other = Publisher::new(client.nats.clone(), &subjects(), &junk, &worker("x"), 0);
    other
        .publish(Tier::DEVICE, vec![stored(hashes(1, 1))])
        .await
        .unwrap();
    eventually("the namespace is there", async || {
        let status = client.queries.status(&junk).await.ok()?;
        (status.holders.len() == 1).then_some(())
    })
    .await;
    other.publish(Tier::DEVICE, vec![Event::Goodbye]).await.unwrap();
    let mut publisher = client.publisher("gpu-0", 0);
    eventually("another namespace has its place", async || {
        publisher.publish(Tier::DEVICE, vec![]).await.unwrap();
        client.holder("gpu-0", 0).await.map(drop)
    })
    .await;
    assert!(client.queries.status(&junk).await.is_err());
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_daemon_is_told_who_has_the_snapshot_directory() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let first = daemon(broker.url(), &settings).await;
    let refused = Daemon::start(config(broker.url(), &settings)).await;
    let refused = refused.err().expect("the directory is in use");
    let is_told = matches!(
        &refused,
        StartError::Snapshots(SnapshotStartError::Lock(LockError::Taken { owner, .. })) if owner.starts_with("kvatlas@")
    );
    assert!(is_told, "{refused}");
    first.stop().await;
    daemon(broker.url(), &settings).await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspended_publisher_is_stale_and_comes_back_exact() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("namespace_defaults.stale_after_ms", "2500")]).await;
    let client = Client::connect(broker.url()).await;
    let mut process = kvatlas(&[
        "publish",
        "--namespace",
        "llama",
        "--worker",
        "gpu-0",
        "--nats-url",
        broker.url(),
    ])
    .stdin(Stdio::piped())
    .stdout(Stdio::null())
    .spawn()
    .unwrap();
    let mut lines = process.stdin.take().unwrap();
    lines
        .write_all(b"{\"type\":\"stored\",\"sequence_hashes\":[\"0x1\",\"0x2\"]}\n")
        .unwrap();
    lines.flush().unwrap();
    client.exact("gpu-0", 0).await;
    let pid = Pid::from_child(&process);
    kill_process(pid, Signal::STOP).unwrap();
    eventually("the holder is stale", async || {
        let holder = client.holder("gpu-0", 0).await?;
        reasons(&holder).contains(&"stale").then_some(())
    })
    .await;
    kill_process(pid, Signal::CONT).unwrap();
    client.exact("gpu-0", 0).await;
    drop(lines);
    process.wait().unwrap();
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_asked_before_the_connection_broke_is_asked_again_at_once() {
    let mut broker = Restartable::start(&server()).await;
    let daemon = daemon(broker.url(), &[("resync.timeout_ms", "600000")]).await;
    let mut engine = Engine::begin(broker.url(), "gpu-0").await;
    engine.say(at(2), None, vec![]).await;
    engine.asked().await;
    broker.kill();
    broker.restart().await;
    engine
        .answers_until_exact(&chunk(ResyncAnswerKind::Full, at(2), &[]))
        .await;
    daemon.stop().await;
}

/// A daemon that hears only one publisher at a time asks a first publisher, gets no answer, and asks a second one.
/// While the second one answers, the first one sends an answer without end. Its messages must wait within the memory
/// bound, and the daemon must then refuse the answer.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_end_that_waits_for_a_slot_takes_no_memory_beyond_the_bound() {
    const ENDLESS: usize = 500;
    let broker = broker().await;
    let settings = [
        ("resync.concurrency", "1"),
        ("resync.max_answer_bytes", "4 MiB"),
        ("resync.timeout_ms", "600000"),
    ];
    let process = Process::serve(broker.url(), &settings);
    let mut endless = Engine::begin(broker.url(), "endless").await;
    let mut slow = Engine::begin(broker.url(), "slow").await;
    // Both batches are in the middle of an epoch, so the daemon asks both publishers.
    endless.say(at(2), None, vec![]).await;
    let (_, question) = endless.asked().await;
    slow.say(at(2), None, vec![]).await;
    // The second publisher is asked only after the first one has lost the only slot. It begins its answer at once, and
    // keeps the slot.
    let (_, slowly) = slow.asked().await;
    let last = ResyncChunk {
        number: 1,
        ..chunk(ResyncAnswerKind::Full, at(2), &[])
    };
    let first = ResyncChunk {
        number: 0,
        is_last: false,
        ..last.clone()
    };
    slow.reply(&slowly, first.encode()).await;

    for _ in 0..ENDLESS {
        endless.reply(&question, vec![0xC1; 1_000_000]).await;
    }
    round_trip(&endless.client.nats, PATIENCE).await.unwrap();
    slow.reply(&slowly, last.encode()).await;
    slow.answers_until_exact(&chunk(ResyncAnswerKind::Full, at(2), &[]))
        .await;
    // The beginning of the endless answer waits for the slot.
    let failed = "kvatlas_resyncs_failed_total{namespace=\"llama\",reason=\"undecodable\"}";
    eventually("the answer without end is refused", async || {
        (counter(&process, failed) > 0).then_some(())
    })
    .await;
    match memory_peak(process.pid()) {
        Some(peak) => assert!(peak < 250 << 20, "{} MiB", peak >> 20),
        None => crate::support::skipped("this system does not say how much memory a process has had"),
    }
}
