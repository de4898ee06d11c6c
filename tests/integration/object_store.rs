//! Snapshots in the Object Store. A fresh replica on another machine starts with the state of a snapshot.

use std::path::Path;
use std::time::Duration;

use crate::support::jetstream::{JETSTREAM, Restartable, servers};
use crate::support::publisher::Publisher;
use crate::support::{
    Client, broker, config, daemon, eventually, hashes, matches, reasons, stored, stored_after,
};
use async_nats::jetstream::{self, object_store::ObjectStore};
use futures_util::StreamExt;
use kvatlas_daemon::snapshots::{ObjectStoreError, SnapshotStartError};
use kvatlas_daemon::{Daemon, StartError};
use tokio::io::AsyncReadExt;

const BUCKET: &str = "snapshots";

/// Longest time for listing the bucket.
const LIST_PATIENCE: Duration = Duration::from_secs(2);

fn settings(folder: &Path) -> Vec<(&'static str, String)> {
    vec![
        ("snapshots.directory", folder.display().to_string()),
        ("snapshots.interval_seconds", "1".to_owned()),
        ("snapshots.object_store", BUCKET.to_owned()),
        ("snapshots.object_store_interval_seconds", "1".to_owned()),
        ("snapshots.object_store_patience_seconds", "5".to_owned()),
        ("snapshots.keep", "2".to_owned()),
    ]
}

fn borrowed<'a>(settings: &'a [(&'static str, String)]) -> Vec<(&'static str, &'a str)> {
    settings
        .iter()
        .map(|(key, value)| (*key, value.as_str()))
        .collect()
}

async fn bucket(client: &Client) -> Option<ObjectStore> {
    let jetstream = jetstream::new(client.nats.clone());
    jetstream.get_object_store(BUCKET).await.ok()
}

/// Returns the names of the snapshots, oldest first. Empty if the list did not end in time.
async fn objects(client: &Client) -> Vec<String> {
    let Some(bucket) = bucket(client).await else {
        return Vec::new();
    };
    let Ok(list) = bucket.list().await else {
        return Vec::new();
    };
    // The list waits for objects that the daemon removes meanwhile.
    let names = list
        .filter_map(async |object| Some(object.ok()?.name))
        .collect::<Vec<String>>();
    let Ok(mut names) = tokio::time::timeout(LIST_PATIENCE, names).await else {
        return Vec::new();
    };
    names.retain(|name| name.starts_with("snapshot-") && !name.starts_with("snapshot-0999"));
    names.sort();
    names
}

/// Waits for an object that is newer than all of `before`.
async fn newer_object(client: &Client, before: &[String]) -> Vec<String> {
    eventually("a snapshot is in the bucket", async || {
        let now = objects(client).await;
        (now.last() > before.last()).then_some(now)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_replica_on_another_machine_starts_warm() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];

        let here = settings(folders[0].path());
        let mut here = borrowed(&here);
        here.push(JETSTREAM);
        let first = daemon(broker.url(), &here).await;
        let mut publisher = client.publisher("gpu-0", 0);
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 5))])
            .await;
        let seen = objects(&client).await;
        let seen = newer_object(&client, &seen).await;
        let seen = newer_object(&client, &seen).await;
        // A further snapshot shows that only `keep` snapshots stay.
        assert!(newer_object(&client, &seen).await.len() <= 3);
        first.stop().await;
        // The stream is emptied, so only the bucket has the holder's blocks.
        let jetstream = jetstream::new(client.nats.clone());
        let stream = jetstream
            .get_stream(crate::support::jetstream::STREAM)
            .await
            .unwrap();
        stream.purge().await.unwrap();

        let there = settings(folders[1].path());
        let mut there = borrowed(&there);
        there.push(JETSTREAM);
        let second = daemon(broker.url(), &there).await;
        // The message that was read last is gone, too. So the stream may be another one, and the holder is not exact
        // before its publisher's next batch.
        assert_eq!(
            matches(&client.ask(hashes(10, 5)).await),
            [("gpu-0".to_owned(), 0, 5, false)]
        );
        client.tell(&mut publisher, "gpu-0", 0, Vec::new()).await;
        assert_eq!(
            matches(&client.ask(hashes(10, 5)).await),
            [("gpu-0".to_owned(), 0, 5, true)]
        );
        second.stop().await;
    }
}

/// Makes a broker whose bucket has snapshots of a holder with five blocks. The daemon that has sent them is stopped.
/// Returns the broker, a client, and the publisher of the holder.
async fn left_in_bucket(server: &Path) -> (Restartable, Client, Publisher) {
    let broker = Restartable::start(server).await;
    let client = Client::connect(broker.url()).await;
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(folder.path());
    let daemon = daemon(broker.url(), &borrowed(&settings)).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 5))])
        .await;
    let mut seen = objects(&client).await;
    for _ in 0..2 {
        seen = newer_object(&client, &seen).await;
    }
    daemon.stop().await;
    (broker, client, publisher)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_object_is_passed_over() {
    for server in servers() {
        let (broker, client, mut publisher) = left_in_bucket(&server).await;
        let bucket = bucket(&client).await.unwrap();
        for (name, content) in [
            (
                "snapshot-09000000000000000001.kvs",
                &b"KVATLSNP and then nothing"[..],
            ),
            ("snapshot-09000000000000000000.kvs", &[0; 2 << 20]),
            ("notes.txt", b"none of ours"),
        ] {
            let mut content = content;
            bucket.put(name, &mut content).await.unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let there = settings(folder.path());
        let mut there = borrowed(&there);
        there.push(("snapshots.object_store_max_bytes", "1 MiB"));
        let second = daemon(broker.url(), &there).await;
        let status = client.holder("gpu-0", 0).await.unwrap();
        assert_eq!((status.blocks, reasons(&status)), (5, vec!["unverified"]));
        assert!(client.tell(&mut publisher, "gpu-0", 0, Vec::new()).await.exact);
        second.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_has_lost_its_pieces_is_passed_over() {
    for server in servers() {
        let (broker, client, _publisher) = left_in_bucket(&server).await;
        let object = bucket(&client)
            .await
            .unwrap()
            .put("snapshot-09000000000000000000.kvs", &mut &b"whatever"[..])
            .await
            .unwrap();
        let jetstream = jetstream::new(client.nats.clone());
        let stream = jetstream.get_stream(format!("OBJ_{BUCKET}")).await.unwrap();
        let pieces = format!("$O.{BUCKET}.C.{}", object.nuid);
        stream.purge().filter(pieces).await.unwrap();

        let folder = tempfile::tempdir().unwrap();
        let there = settings(folder.path());
        let second = daemon(broker.url(), &borrowed(&there)).await;
        let status = client.holder("gpu-0", 0).await.unwrap();
        assert_eq!((status.blocks, reasons(&status)), (5, vec!["unverified"]));
        second.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_without_jetstream_costs_the_bucket_and_nothing_else() {
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(folder.path());
    let daemon = daemon(broker.url(), &borrowed(&settings)).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 5))])
        .await;
    let report = daemon.stop().await;
    assert!(report.overran.is_empty(), "{report}");
    let is_snapshot = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        path.extension().is_some_and(|suffix| suffix == "kvs")
    };
    let written = std::fs::read_dir(folder.path())
        .unwrap()
        .filter_map(|entry| is_snapshot(entry).then_some(()))
        .count();
    assert!(written >= 1, "no snapshot in the directory");
}

/// The deployment that has the bucket, the name of its daemon, and the deployment that is refused the bucket.
fn taken(refused: StartError) -> (String, String, String) {
    match refused {
        StartError::Snapshots(SnapshotStartError::ObjectStore(ObjectStoreError::Taken {
            deployment,
            instance,
            own,
            ..
        })) => (deployment, instance, own),
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_that_follow_other_workers_are_told_whose_the_bucket_is() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let folders: [_; 3] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let [here, there, elsewhere] = folders.each_ref().map(|folder| settings(folder.path()));
        let of_shard = |settings, shard| {
            let mut settings = borrowed(settings);
            settings.push(("sharding.shard", shard));
            settings
        };
        let first = daemon(broker.url(), &of_shard(&here, "0/2")).await;
        let mut prefixed = borrowed(&elsewhere);
        prefixed.push(("subjects.prefix", "other"));
        for (settings, own) in [
            (of_shard(&there, "1/2"), "shard 1/2 of kvatlas"),
            (borrowed(&elsewhere), "all workers of kvatlas"),
            (prefixed, "all workers of other"),
        ] {
            let refused = Daemon::start(config(broker.url(), &settings)).await;
            let (deployment, instance, refused) =
                taken(refused.err().expect("the bucket is another deployment's"));
            assert_eq!(
                (deployment.as_str(), refused.as_str()),
                ("shard 0/2 of kvatlas", own)
            );
            assert!(instance.starts_with("kvatlas@"), "{instance}");
        }
        // Two replicas of a deployment share the bucket, and both send their snapshots.
        let replica = daemon(broker.url(), &of_shard(&there, "0/2")).await;
        let seen = objects(&client).await;
        newer_object(&client, &seen).await;
        for daemon in [first, replica] {
            daemon.stop().await;
        }
        // Without the object that claims it, the bucket is free for another deployment.
        bucket(&client).await.unwrap().delete("deployment").await.unwrap();
        daemon(broker.url(), &of_shard(&elsewhere, "1/2"))
            .await
            .stop()
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_deployments_that_start_at_once_one_gets_the_bucket() {
    let broker = Restartable::start(&crate::support::server()).await;
    let folders: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let [one, other] = folders.each_ref().map(|folder| settings(folder.path()));
    let (one, mut other) = (borrowed(&one), borrowed(&other));
    other.push(("subjects.prefix", "other"));
    let started = tokio::join!(
        Daemon::start(config(broker.url(), &one)),
        Daemon::start(config(broker.url(), &other)),
    );
    match started {
        (Ok(daemon), Err(refused)) | (Err(refused), Ok(daemon)) => {
            let (deployment, _, own) = taken(refused);
            let of_all = |name: &str| name.starts_with("all workers of ");
            assert!(
                of_all(&deployment) && of_all(&own) && deployment != own,
                "{deployment}, {own}"
            );
            daemon.stop().await;
        }
        (one, other) => panic!("{:?} and {:?}", one.err(), other.err()),
    }
}

/// Another client puts two objects that cannot be read into the bucket of snapshots. The daemon must nevertheless send
/// its snapshots, remove old ones, and start from a good one.
#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_cannot_be_read_keeps_no_other_back() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let folders: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let [here, there] = folders.each_ref().map(|folder| settings(folder.path()));
        let first = daemon(broker.url(), &borrowed(&here)).await;
        newer_object(&client, &[]).await;
        // One object has no metadata. Another has the name of a future snapshot, and is a link to itself.
        let name = "snapshot-09999999999999999999.kvs";
        let link = serde_json::json!({
            "name": name,
            "bucket": BUCKET,
            "options": { "link": { "name": name, "bucket": BUCKET } },
        });
        let token = base64::Engine::encode(&base64::engine::general_purpose::URL_SAFE, name);
        for (token, payload) in [
            ("bm9uc2Vuc2U=", "nonsense".to_owned()),
            (&token, link.to_string()),
        ] {
            let subject = format!("$O.{BUCKET}.M.{token}");
            let jetstream = jetstream::new(client.nats.clone());
            let sent = jetstream.publish(subject, payload.into());
            sent.await.unwrap().await.unwrap();
        }
        let mut publisher = client.publisher("gpu-0", 0);
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 5))])
            .await;
        // Outdated snapshots are still removed, and new ones are sent.
        let seen = objects(&client).await;
        let now = newer_object(&client, &seen).await;
        assert!(now.len() <= 4, "{now:?}");
        first.stop().await;
        // Only the bucket has the holder's blocks.
        let second = daemon(broker.url(), &borrowed(&there)).await;
        let status = client.holder("gpu-0", 0).await.unwrap();
        assert_eq!(status.blocks, 5);
        second.stop().await;
    }
}

/// Name of a snapshot from a replica whose clock is far ahead. [`objects`] leaves it out.
const OF_THE_FUTURE: &str = "snapshot-09990000000000000000.kvs";

/// Returns the content of the newest snapshot in the bucket.
async fn newest_content(client: &Client) -> Vec<u8> {
    let bucket = bucket(client).await.unwrap();
    eventually("a snapshot has been read", async || {
        let name = objects(client).await.pop()?;
        let mut content = Vec::new();
        // The daemon may remove the object meanwhile.
        bucket
            .get(name)
            .await
            .ok()?
            .read_to_end(&mut content)
            .await
            .ok()?;
        Some(content)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_whose_clock_was_ahead_neither_replaces_nor_removes_what_others_send() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let client = Client::connect(broker.url()).await;
        let folders: [_; 3] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let [own, fresh, ahead] = folders.each_ref().map(|folder| settings(folder.path()));
        let first = daemon(broker.url(), &borrowed(&own)).await;
        let mut publisher = client.publisher("gpu-0", 0);
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 5))])
            .await;
        // The second of the two snapshots was begun after the batch.
        let seen = newer_object(&client, &objects(&client).await).await;
        newer_object(&client, &seen).await;
        let old = newest_content(&client).await;
        let bucket = bucket(&client).await.unwrap();
        for name in [OF_THE_FUTURE, "snapshot-09990000000000000001.kvs"] {
            bucket.put(name, &mut old.as_slice()).await.unwrap();
        }
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored_after(14, hashes(15, 3))])
            .await;
        eventually("those of the future are outdated", async || {
            let info = bucket.info(OF_THE_FUTURE).await;
            info.map_or(true, |info| info.deleted).then_some(())
        })
        .await;
        let seen = newer_object(&client, &objects(&client).await).await;
        newer_object(&client, &seen).await;
        first.stop().await;

        std::fs::write(folders[2].path().join(OF_THE_FUTURE), &old).unwrap();
        for settings in [own, fresh, ahead] {
            let restarted = daemon(broker.url(), &borrowed(&settings)).await;
            let status = client.holder("gpu-0", 0).await.unwrap();
            assert_eq!((status.blocks, reasons(&status)), (8, vec!["unverified"]));
            restarted.stop().await;
        }
    }
}
