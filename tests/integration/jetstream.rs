//! Events through JetStream. A snapshot, with the later messages of the stream, gives the exact state, whichever
//! process was killed.
//!
//! `KVATLAS_TEST_KILLS=50 KVATLAS_TEST_SEED=7 cargo test --test integration jetstream` kills the daemon 50 times, at
//! times that the seed 7 decides.

use std::path::Path;
use std::time::Duration;

use crate::support::jetstream::{JETSTREAM, Restartable, STREAM, followed, kept, last_message, servers};
use crate::support::metrics::{counter, metric};
use crate::support::process::Process;
use crate::support::publisher::Publisher;
use crate::support::{
    Client, PATIENCE, config, daemon, embedded_daemon, engine, eventually, has_gap, hashes, http_get,
    matches, reasons, removed, server, stored, stored_after, subjects,
};
use async_nats::jetstream;
use futures_util::TryStreamExt;
use kvatlas_client::ClientError;
use kvatlas_client::publish::PublisherOptions;
use kvatlas_core::wire::{BatchCursor, ErrorCode, QueryKey, SingleQuery, Tier};
use kvatlas_daemon::Daemon;

fn path_text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_daemon_is_exact_again_without_a_word_from_the_publishers() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let folder = tempfile::tempdir().unwrap();
        let settings = [
            JETSTREAM,
            ("snapshots.directory", path_text(folder.path())),
            ("snapshots.interval_seconds", "1"),
        ];
        let client = Client::connect(broker.url()).await;
        let (mut silent, mut busy) = (client.publisher("silent", 0), client.publisher("busy", 0));

        let process = Process::start(broker.url(), &settings);
        // It has read the stream up to its end through this server.
        client.listed().await;
        for (publisher, name, blocks) in [(&mut silent, "silent", 5), (&mut busy, "busy", 2)] {
            let told = client
                .tell(publisher, name, 0, vec![stored(hashes(10, blocks))])
                .await;
            assert!(told.exact, "{name}");
        }
        // The first one may have been begun before.
        newer_snapshot(folder.path()).await;
        newer_snapshot(folder.path()).await;
        let mut blocks = 2;
        let mut process = Some(process);
        let mut random = kill_seed();
        for round in 0..kills() {
            // The daemon is killed while it applies batches, or while it writes a snapshot, at a different moment in
            // each round.
            if round % 3 == 2 {
                newer_snapshot(folder.path()).await;
            }
            let before = last_message(&client.nats).await.unwrap();
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let batches = 20 + (random >> 33) % 200;
            let kill_at = (random >> 17) % batches;
            for batch in 0..batches {
                if batch == kill_at {
                    client.nats.flush().await.unwrap();
                    process.take().unwrap().kill();
                }
                let more = vec![stored_after(9 + blocks, hashes(10 + blocks, 1))];
                busy.publish(Tier::DEVICE, more).await.unwrap();
                blocks += 1;
            }
            kept(&client.nats, before, batches).await;
            process = Some(Process::start(broker.url(), &settings));
            // The daemon answers only after it has caught up, so its first answer must be right.
            let status = eventually("the daemon answers", async || client.holder("busy", 0).await).await;
            assert_eq!(
                (status.blocks, reasons(&status)),
                (blocks, vec![]),
                "round {round}"
            );
            let expected = [
                ("busy".to_owned(), 0, u32::try_from(blocks).unwrap(), true),
                ("silent".to_owned(), 0, 5, true),
            ];
            let reply = client.ask(hashes(10, blocks + 20)).await;
            assert_eq!(matches(&reply), expected, "round {round}");
        }
    }
}

/// Returns the number of kills: `KVATLAS_TEST_KILLS`, or 6.
fn kills() -> u64 {
    std::env::var("KVATLAS_TEST_KILLS").map_or(6, |text| text.parse().unwrap())
}

/// Returns the seed that decides the times of the kills: `KVATLAS_TEST_SEED`, or 1.
fn kill_seed() -> u64 {
    let seed = std::env::var("KVATLAS_TEST_SEED").map_or(1, |text| text.parse().unwrap());
    println!("seed {seed}");
    seed
}

/// Waits until a further snapshot is written.
async fn newer_snapshot(folder: &Path) {
    let newest = || {
        let paths = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"))
            .max()
    };
    let before = newest();
    eventually("a snapshot is written", async || {
        (newest() > before).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_daemon_reads_the_stream_before_it_is_ready() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let first = daemon(broker.url(), &[JETSTREAM]).await;
        let mut publisher = client.publisher("gpu-0", 0);
        publisher
            .publish(Tier::DEVICE, vec![stored(hashes(10, 1))])
            .await
            .unwrap();
        for number in 1..3000 {
            let more = vec![stored_after(9 + number, hashes(10 + number, 1))];
            publisher.publish(Tier::DEVICE, more).await.unwrap();
        }
        client.applied("gpu-0", 0, publisher.cursor()).await;
        assert!(first.stop().await.overran.is_empty());

        // With core NATS, a buffer of 16 messages would overflow. Here the other messages wait in the stream.
        let settings = [JETSTREAM, ("events.subscription_capacity", "16")];
        let second = Process::serve(broker.url(), &settings);
        let reply = client.ask(hashes(10, 3000)).await;
        // The daemon does not know what the publisher has to tell yet.
        assert_eq!(matches(&reply), [("gpu-0".to_owned(), 0, 3000, false)]);
        assert_eq!(metric(&second, "kvatlas_stream_sequence"), 3000);
        assert_eq!(metric(&second, "kvatlas_stream_lag_messages"), 0);
        assert!(client.tell(&mut publisher, "gpu-0", 0, Vec::new()).await.exact);
        second.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_without_the_last_second_is_not_taken_for_a_list_of_the_publishers() {
    let broker = Restartable::start(&server()).await;
    let client = Client::connect(broker.url()).await;
    let mut engines = Vec::new();
    for name in ["gpu-0", "gpu-1"] {
        let options = PublisherOptions::default();
        let engine = engine(client.nats.clone(), &subjects(), name, options).await;
        engine
            .publish(Tier::DEVICE, vec![stored(hashes(1, 3))])
            .await
            .unwrap();
        engine.flush().await.unwrap();
        engines.push(engine);
    }
    // The first daemon makes the stream. The second finds an empty one.
    for _ in 0..2 {
        let process = Process::serve(broker.url(), &[JETSTREAM]);
        let reply = eventually("the answer is certain", async || {
            let query = SingleQuery::new(QueryKey::SequenceHashes(hashes(1, 3)));
            match client.ask_with(query).await {
                Ok(reply) => (reply.doubtful_holders == 0).then_some(reply),
                Err(ClientError::Refused(error)) => {
                    assert_ne!(error.code, ErrorCode::UnknownNamespace, "two workers publish");
                    None
                }
                Err(_) => None,
            }
        })
        .await;
        let mut known: Vec<_> = matches(&reply).into_iter().map(|(name, ..)| name).collect();
        known.sort();
        assert_eq!(known, ["gpu-0", "gpu-1"]);
        process.stop();
        let stream = jetstream::new(client.nats.clone()).get_stream(STREAM).await;
        stream.unwrap().purge().await.unwrap();
    }
}

/// Returns the publishers of two workers, which have published three blocks each.
async fn of_three_blocks(client: &Client, names: [&str; 2]) -> [Publisher; 2] {
    let mut publishers = names.map(|name| client.publisher(name, 0));
    for (publisher, name) in publishers.iter_mut().zip(names) {
        let told = client.tell(publisher, name, 0, vec![stored(hashes(10, 3))]).await;
        assert!(told.exact);
    }
    publishers
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_comes_back_with_its_store_has_lost_nothing() {
    for server in servers() {
        let mut broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let daemon = Process::serve(broker.url(), &[JETSTREAM]);
        let [mut silent, mut busy] = of_three_blocks(&client, ["silent", "busy"]).await;
        for blocks in [4, 5] {
            broker.kill();
            broker.restart().await;
            let before = eventually("the broker is back", async || last_message(&client.nats).await).await;
            busy.publish(
                Tier::DEVICE,
                vec![stored_after(8 + blocks, hashes(9 + blocks, 1))],
            )
            .await
            .unwrap();
            kept(&client.nats, before, 1).await;
            assert!(client.applied("busy", 0, busy.cursor()).await.blocks == blocks);
            eventually(
                "a batch that came after the end of the stream was read",
                async || {
                    let told = client.tell(&mut busy, "busy", 0, Vec::new()).await;
                    told.exact.then_some(())
                },
            )
            .await;
            // Nobody knows what this publisher had to keep while there was no server.
            let status = client.holder("silent", 0).await.unwrap();
            assert_eq!(reasons(&status), ["unverified"]);
            client.tell(&mut silent, "silent", 0, Vec::new()).await;
            client.exact("silent", 0).await;
        }
        assert!(
            metric(
                &daemon,
                "kvatlas_stream_consumer_resets_total{reason=\"connection\"}"
            ) >= 1
        );
        daemon.stop();
    }
}

/// A consumer that goes while the connection stands went with its server, mostly with the stream's leader: the stream may
/// have taken nothing meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_goes_while_the_connection_stands_leaves_doubts_until_the_next_batch() {
    let broker = Restartable::start(&server()).await;
    let client = Client::connect(broker.url()).await;
    let daemon = Process::serve(broker.url(), &[JETSTREAM]);
    let [mut silent, mut busy] = of_three_blocks(&client, ["silent", "busy"]).await;
    let stream = jetstream::new(client.nats.clone())
        .get_stream(STREAM)
        .await
        .unwrap();
    let names: Vec<String> = stream.consumer_names().try_collect().await.unwrap();
    for name in &names {
        stream.delete_consumer(name).await.unwrap();
    }
    eventually("another consumer is made", async || {
        let present: Vec<String> = stream.consumer_names().try_collect().await.ok()?;
        present.iter().any(|name| !names.contains(name)).then_some(())
    })
    .await;
    eventually(
        "a batch that came after the end of the stream was read",
        async || {
            let told = client.tell(&mut busy, "busy", 0, Vec::new()).await;
            told.exact.then_some(())
        },
    )
    .await;
    let status = client.holder("silent", 0).await.unwrap();
    assert_eq!(reasons(&status), ["unverified"]);
    client.tell(&mut silent, "silent", 0, Vec::new()).await;
    client.exact("silent", 0).await;
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_comes_back_without_its_store_leaves_doubts_until_the_next_batch() {
    for server in servers() {
        let mut broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let daemon = Process::serve(broker.url(), &[JETSTREAM]);
        let [mut lucky, loser] = of_three_blocks(&client, ["lucky", "loser"]).await;
        broker.kill();
        // The batch gets a number, but the broker is down and the batch is lost.
        let mut loser = loser.resuming(BatchCursor { epoch: 1, seq: 2 });
        broker.forget_store();
        broker.restart().await;
        followed(&client.nats).await;
        let status = eventually("the daemon answers", async || client.holder("lucky", 0).await).await;
        assert_eq!(reasons(&status), ["unverified"]);
        eventually(
            "a batch that came after the end of the stream was read",
            async || {
                let told = client.tell(&mut lucky, "lucky", 0, Vec::new()).await;
                told.exact.then_some(())
            },
        )
        .await;
        let status = client.tell(&mut loser, "loser", 0, Vec::new()).await;
        assert!(has_gap(&status));
        assert!(metric(&daemon, "kvatlas_stream_consumer_resets_total{reason=\"stream\"}") >= 1);
        daemon.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_the_streams_limits_took_are_missed() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let folder = tempfile::tempdir().unwrap();
        let settings = [
            JETSTREAM,
            ("snapshots.directory", path_text(folder.path())),
            ("events.stream_max_messages", "4"),
        ];
        let client = Client::connect(broker.url()).await;
        let first = daemon(broker.url(), &settings).await;
        let [mut silent, mut busy] = of_three_blocks(&client, ["silent", "busy"]).await;
        first.stop().await;
        for _ in 0..10 {
            busy.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        }
        kept(&client.nats, 2, 10).await;

        let second = Process::serve(broker.url(), &settings);
        assert_eq!(
            reasons(&client.holder("silent", 0).await.unwrap()),
            ["unverified"]
        );
        assert!(has_gap(&client.holder("busy", 0).await.unwrap()));
        assert!(metric(&second, "kvatlas_stream_messages_lost_total") >= 6);
        assert!(
            client.tell(&mut silent, "silent", 0, Vec::new()).await.exact,
            "nothing of it was lost"
        );
        second.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_grew_too_old_in_the_stream_are_missed_and_asked_for() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let folder = tempfile::tempdir().unwrap();
        let settings = [
            JETSTREAM,
            ("snapshots.directory", path_text(folder.path())),
            ("events.stream_max_age_seconds", "1"),
        ];
        let client = Client::connect(broker.url()).await;
        let first = daemon(broker.url(), &settings).await;
        let options = PublisherOptions {
            batch_delay: Duration::ZERO,
            heartbeat_interval: Duration::from_secs(3600),
            ..PublisherOptions::default()
        };
        let engine = engine(client.nats.clone(), &subjects(), "gpu-0", options).await;
        let publish = async |events| engine.publish(Tier::DEVICE, events).await.unwrap();
        publish(vec![stored(hashes(1, 3))]).await;
        let known = engine.flush().await.unwrap();
        client.applied("gpu-0", 0, known).await;
        first.stop().await;
        // These batches are published while no daemon runs, and leave the stream before one does.
        publish(vec![removed(hashes(2, 2))]).await;
        publish(vec![stored_after(1, hashes(10, 2))]).await;
        let last = engine.flush().await.unwrap();
        kept(&client.nats, 1, 2).await;
        eventually("the messages are too old", async || {
            let stream = async_nats::jetstream::new(client.nats.clone());
            let stream = stream.get_stream(STREAM).await.ok()?;
            (stream.cached_info().state.messages == 0).then_some(())
        })
        .await;

        let second = Process::serve(broker.url(), &settings);
        assert!(metric(&second, "kvatlas_stream_messages_lost_total") >= 2);
        let chain = [hashes(1, 1), hashes(10, 2)].concat();
        let told = client.ask(chain.clone()).await;
        let is_exact = told.holders.iter().any(|holder| holder.exact);
        assert!(
            !is_exact || told.holders[0].matched_blocks == 3,
            "it cannot know: {told:?}"
        );
        // A holder that was silent is asked after its next message.
        publish(Vec::new()).await;
        client.applied("gpu-0", 0, last).await;
        client.exact("gpu-0", 0).await;
        let told = matches(&client.ask(chain).await);
        assert_eq!(told, [("gpu-0".to_owned(), 0, 3, true)]);
        second.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_removed_from_the_middle_of_the_stream_are_missed() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let first = daemon(broker.url(), &[JETSTREAM]).await;
        let (mut steady, mut holed) = (client.publisher("steady", 0), client.publisher("holed", 0));
        for _ in 0..3 {
            client.tell(&mut steady, "steady", 0, Vec::new()).await;
            client.tell(&mut holed, "holed", 0, Vec::new()).await;
        }
        first.stop().await;
        let stream = jetstream::new(client.nats.clone())
            .get_stream(STREAM)
            .await
            .unwrap();
        // This message is the second batch of the holder.
        stream.delete_message(4).await.unwrap();

        let second = Process::serve(broker.url(), &[JETSTREAM]);
        assert!(has_gap(&client.holder("holed", 0).await.unwrap()));
        let told = client.tell(&mut steady, "steady", 0, Vec::new()).await;
        assert!(told.exact, "its later batch proves it");
        assert!(metric(&second, "kvatlas_stream_messages_lost_total") >= 1);
        second.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_removed_from_the_end_of_the_stream_are_missed() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let folder = tempfile::tempdir().unwrap();
        let settings = [JETSTREAM, ("snapshots.directory", path_text(folder.path()))];
        let first = daemon(broker.url(), &settings).await;
        let [mut steady, mut holed] = of_three_blocks(&client, ["steady", "holed"]).await;
        first.stop().await;
        for _ in 0..2 {
            holed.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        }
        kept(&client.nats, 2, 2).await;
        let stream = jetstream::new(client.nats.clone())
            .get_stream(STREAM)
            .await
            .unwrap();
        for sequence in [3, 4] {
            stream.delete_message(sequence).await.unwrap();
        }

        // The daemon starts from the snapshot, and then from nothing. It does not wait for messages that are gone.
        for settings in [&settings[..], &[JETSTREAM]] {
            let second = Process::serve(broker.url(), settings);
            for name in ["steady", "holed"] {
                let status = client.holder(name, 0).await.unwrap();
                assert_eq!(
                    (status.blocks, reasons(&status)),
                    (3, vec!["unverified"]),
                    "{name}"
                );
            }
            assert_eq!(metric(&second, "kvatlas_stream_messages_lost_total"), 2);
            second.stop();
        }
        let third = Process::serve(broker.url(), &settings);
        assert!(client.tell(&mut steady, "steady", 0, Vec::new()).await.exact);
        holed.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        eventually("the next batch shows the hole", async || {
            let status = client.holder("holed", 0).await?;
            has_gap(&status).then_some(())
        })
        .await;
        third.stop();
    }
}

/// Nothing has come since the snapshot, and its last message is gone. There is nothing to read or to compare.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_message_that_was_read_may_be_gone() {
    let broker = Restartable::start(&server()).await;
    let client = Client::connect(broker.url()).await;
    let folder = tempfile::tempdir().unwrap();
    let settings = [JETSTREAM, ("snapshots.directory", path_text(folder.path()))];
    let first = daemon(broker.url(), &settings).await;
    let [mut steady, _other] = of_three_blocks(&client, ["steady", "other"]).await;
    first.stop().await;
    let stream = jetstream::new(client.nats.clone())
        .get_stream(STREAM)
        .await
        .unwrap();
    stream.delete_message(2).await.unwrap();
    let second = Process::serve(broker.url(), &settings);
    let status = client.holder("steady", 0).await.unwrap();
    assert_eq!((status.blocks, reasons(&status)), (3, vec!["unverified"]));
    assert!(client.tell(&mut steady, "steady", 0, Vec::new()).await.exact);
    second.stop();
}

/// Another client pauses the daemon's consumers of the stream, which then deliver nothing and report no waiting
/// messages. The daemon must notice this before its answers are too old to be exact, and read the stream through
/// another consumer.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_paused_consumer_keeps_back_is_noticed_in_time_and_read() {
    const BEHIND_AFTER: Duration = Duration::from_millis(250);
    let broker = Restartable::start(&server()).await;
    let daemon = Process::serve(broker.url(), &[JETSTREAM, ("events.behind_after_ms", "250")]);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 2))])
        .await;
    let stream = jetstream::new(client.nats.clone())
        .get_stream(STREAM)
        .await
        .unwrap();
    let names: Vec<String> = stream.consumer_names().try_collect().await.unwrap();
    assert!(!names.is_empty());
    for name in names {
        let subject = format!("$JS.API.CONSUMER.PAUSE.{STREAM}.{name}");
        let until = r#"{"pause_until":"2099-01-01T00:00:00Z"}"#;
        let paused = client.nats.request(subject, until.into()).await.unwrap();
        let paused: serde_json::Value = serde_json::from_slice(&paused.payload).unwrap();
        assert_eq!(paused["paused"], true, "{paused}");
    }
    let resets = "kvatlas_stream_consumer_resets_total{reason=\"delivery\"}";
    let before = counter(&daemon, resets);
    let last = last_message(&client.nats).await.unwrap();
    publisher
        .publish(Tier::DEVICE, vec![removed(hashes(2, 1))])
        .await
        .unwrap();
    kept(&client.nats, last, 1).await;
    let kept_at = std::time::Instant::now();
    eventually("the removal has been applied", async || {
        let waited = kept_at.elapsed();
        let reply = client.ask(hashes(1, 2)).await;
        // On any machine, the daemon must either know the age of its answer, or not call it exact.
        let is_old = matches(&reply) == [("gpu-0".to_owned(), 0, 2, true)];
        assert!(
            !is_old || waited <= BEHIND_AFTER,
            "exact without an event {waited:?} old: {reply:?}"
        );
        (matches(&reply) == [("gpu-0".to_owned(), 0, 1, true)]).then_some(())
    })
    .await;
    assert!(counter(&daemon, resets) > before, "by another consumer");
    daemon.stop();
}

/// Waits until the daemon is not ready, and names the subjects of the stream as the reason.
async fn is_the_reason(admin: std::net::SocketAddr) {
    eventually("the stream is the reason", async || {
        let (code, body) = http_get(admin, "/readyz");
        (code == 503 && body.contains("the stream KVATLAS_EVENTS has the subjects")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_something_else_is_not_taken_for_the_events() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let jetstream = jetstream::new(client.nats.clone());
        let foreign = jetstream::stream::Config {
            name: STREAM.to_owned(),
            subjects: vec!["kvatlas.v1.events.>".to_owned(), "other.>".to_owned()],
            ..jetstream::stream::Config::default()
        };
        jetstream.create_stream(foreign.clone()).await.unwrap();
        let daemon = Daemon::start(config(broker.url(), &[JETSTREAM])).await.unwrap();
        let admin = daemon.admin_address().unwrap();
        is_the_reason(admin).await;
        jetstream.delete_stream(STREAM).await.unwrap();
        tokio::time::timeout(PATIENCE, daemon.ready())
            .await
            .expect("ready with a stream of its own");
        jetstream.delete_stream(STREAM).await.unwrap();
        jetstream.create_stream(foreign).await.unwrap();
        is_the_reason(admin).await;
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_changed_is_noticed_and_what_was_lost_meanwhile_is_in_doubt() {
    let broker = Restartable::start(&server()).await;
    let client = Client::connect(broker.url()).await;
    let daemon = daemon(broker.url(), &[JETSTREAM]).await;
    let admin = daemon.admin_address().unwrap();
    let mut publisher = client.publisher("gpu-0", 0);
    assert!(
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 4))])
            .await
            .exact
    );

    let jetstream = jetstream::new(client.nats.clone());
    let right = jetstream
        .get_stream(STREAM)
        .await
        .unwrap()
        .cached_info()
        .config
        .clone();
    for (change, words) in [
        (
            jetstream::stream::Config {
                subjects: vec!["other.>".to_owned()],
                ..right.clone()
            },
            "other.>",
        ),
        (
            jetstream::stream::Config {
                discard: jetstream::stream::DiscardPolicy::New,
                max_messages: 1000,
                ..right.clone()
            },
            "discard = new",
        ),
    ] {
        jetstream.update_stream(change).await.unwrap();
        eventually("the stream is the reason", async || {
            let (code, body) = http_get(admin, "/readyz");
            (code == 503 && body.contains(words)).then_some(())
        })
        .await;
        assert!(!client.holder("gpu-0", 0).await.unwrap().exact);
        jetstream.update_stream(right.clone()).await.unwrap();
        tokio::time::timeout(PATIENCE, daemon.ready())
            .await
            .expect("ready again");
        // The stream's numbers do not show that a message was not kept.
        eventually("the stream is read", async || {
            let (code, _) = http_get(admin, "/readyz");
            (code == 200).then_some(())
        })
        .await;
        assert!(!client.holder("gpu-0", 0).await.unwrap().exact);
        let more = vec![stored(hashes(10, 4))];
        assert!(client.tell(&mut publisher, "gpu-0", 0, more).await.exact);
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_embedded_server_has_jetstream_where_it_is_needed() {
    let daemon = embedded_daemon(&[JETSTREAM]).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_missing_is_not_made_where_that_is_not_allowed() {
    let broker = Restartable::start(&servers()[0]).await;
    let client = Client::connect(broker.url()).await;
    let settings = [JETSTREAM, ("events.stream_create", "false")];
    let daemon = Daemon::start(config(broker.url(), &settings)).await.unwrap();
    let waited = tokio::time::timeout(std::time::Duration::from_secs(1), daemon.ready()).await;
    assert!(waited.is_err());
    assert_eq!(last_message(&client.nats).await, None);
    daemon.stop().await;
}
