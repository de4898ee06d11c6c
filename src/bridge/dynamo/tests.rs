//! The event plane's messages, and what their numbers prove.

use std::sync::Arc;

use kvatlas_client::publish::{PublishedHolder, PublisherOptions};
use kvatlas_core::wire::{NamespaceName, Profile, Subjects};
use kvatlas_engines::{Translator, TranslatorSettings};
use serde_json::json;

use super::super::holders::StartRelay;
use super::super::relay::tests::{next_batch, told_lost};
use super::super::relay::{Relay, Way};
use super::super::stalls::{BridgeClock, StallWatch};
use super::answers::AnswerError;
use super::course::Course;
use super::records::{SourceRecord, Target};
use super::*;
use crate::farewells::Farewells;
use crate::kin::Kin;
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};
use kvatlas_telemetry::BridgeMetrics;

/// An event plane without discovery.
fn plane(start: StartRelay) -> PlaneEvents {
    let address = PlaneAddress {
        endpoint: "nats://h:1".to_owned(),
        topic: "t".to_owned(),
    };
    PlaneEvents::new(Holders::new(start), address, &FollowOptions::default())
}

fn frames(frames: &[&[u8]]) -> Vec<Bytes> {
    frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect()
}

#[test]
fn an_envelope_has_a_head() {
    let message = frames(&[b"kv", &[0; 8], &[0; 8], b"\x01\0\0\0\x02ab"]);
    assert_eq!(parse_plane_message(&message), Ok(Bytes::from_static(b"ab")));
    for bad in [
        &b"\x02\0\0\0\x02ab"[..],
        b"\x01\0\0\0\x03ab",
        b"\x01\0\0\0\x01ab",
        b"\x01\0",
        b"",
    ] {
        let message = frames(&[b"kv", &[0; 8], &[0; 8], bad]);
        assert_eq!(parse_plane_message(&message), Err(PlaneFrameError::Head));
    }
    assert_eq!(
        parse_plane_message(&frames(&[b"kv"])),
        Err(PlaneFrameError::Count(1))
    );
}

#[test]
fn a_publishers_count_proves_what_is_missing() {
    let mut publisher = Publisher::default();
    assert_eq!(publisher.note(0, 10), MessageOrder::Next);
    assert_eq!(publisher.note(0, 10), MessageOrder::Duplicate);
    assert_eq!(publisher.note(1, 11), MessageOrder::Next);
    assert_eq!(publisher.note(1, 11), MessageOrder::Duplicate);
    assert_eq!(publisher.note(3, 13), MessageOrder::Hole);
    assert_eq!(publisher.note(2, 12), MessageOrder::Backwards);
    assert_eq!(publisher.note(4, 14), MessageOrder::Next);
    assert_eq!(publisher.note(4, 15), MessageOrder::Backwards);
    assert_eq!(Publisher::default().note(5, 15), MessageOrder::Hole);
    assert_eq!(publisher.note(0, 20), MessageOrder::Anew);
    assert_eq!(publisher.note(1, 21), MessageOrder::Next);
}

/// Returns a message of a publisher in which each of `workers` has stored a block.
fn message(publisher: u64, sequence: u64, workers: std::ops::Range<u64>) -> Bytes {
    let block = json!({"block_hash": 1, "tokens_hash": 2});
    let stored = json!({"stored": {"parent_hash": null, "blocks": [block]}});
    let event = json!({"event_id": 0, "data": stored, "dp_rank": 0});
    let events: Vec<_> = workers
        .map(|worker| json!({"worker_id": worker, "event": event}))
        .collect();
    let payload = serde_json::to_vec(&events).unwrap();
    let envelope = json!({"publisher_id": publisher, "sequence": sequence, "payload": payload});
    serde_json::to_vec(&envelope).unwrap().into()
}

/// A message of the plane is a part of a large read buffer.
#[test]
fn a_message_that_waits_keeps_no_read_buffer() {
    let start: StartRelay = Box::new(|_, _| Box::pin(std::future::ready(Err("not here".to_owned()))));
    let mut events = plane(start);
    let record = SourceRecord {
        subject: "t".to_owned(),
        id: 7,
        worker: WorkerName::new("7").unwrap(),
        rank: 0,
        target: Target::Nats("ask".to_owned()),
    };
    events.courses.all.insert(1, Course::new(record));
    let buffer = Bytes::from(vec![7; 64 << 10]);
    events.courses.wait(1, &buffer.slice(100..300));
    let waiting = &events.courses.all[&1].waiting;
    assert_eq!(waiting[0], vec![7; 200]);
    assert!(!buffer.as_ptr_range().contains(&waiting[0].as_ptr()));
}

#[tokio::test]
async fn holders_that_are_not_followed_take_no_room() {
    let start: StartRelay = Box::new(|_, _| Box::pin(std::future::ready(Err("not here".to_owned()))));
    let mut events = plane(start);
    events.apply(&message(1, 0, 0..5), false).await.unwrap();
    assert_eq!(events.publishers.len(), 1);
    let kept = events.publishers.values().map(|known| known.holders.len());
    assert_eq!(kept.sum::<usize>(), 0);
}

/// Returns an event plane without discovery whose holders are reported over `broker`.
async fn reported_plane(broker: &EmbeddedBroker) -> PlaneEvents {
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let metrics = Arc::new(BridgeMetrics::new());
    plane(Box::new(move |worker, rank| {
        let way = Way {
            nats: nats.clone().into(),
            subjects: Subjects::new("kvatlas").unwrap(),
            holder: PublishedHolder {
                namespace: NamespaceName::new("m").unwrap(),
                worker,
                rank,
            },
            options: PublisherOptions::default(),
            profiles: tokio::sync::watch::channel(Profile::default()).1,
            lease: None,
            kin: Kin::default(),
            farewells: Farewells::default(),
        };
        let (settings, metrics) = (TranslatorSettings::default(), Arc::clone(&metrics));
        Box::pin(Relay::start(
            Format::Dynamo,
            "w",
            Translator::new(settings),
            None,
            way,
            metrics,
        ))
    }))
}

async fn broker() -> EmbeddedBroker {
    let server = find_nats_server(None).unwrap();
    EmbeddedBroker::start(&server).await.unwrap()
}

/// Without an envelope, nothing proves that no message was missed while the connection was broken. A clear before the
/// break has ended the doubt about earlier messages.
#[tokio::test]
async fn a_message_without_an_envelope_leaves_its_worker_in_doubt_after_a_break_too() {
    let broker = broker().await;
    let mut events = reported_plane(&broker).await;
    let event = |data: serde_json::Value| {
        let event = json!({"event_id": 0, "data": data, "dp_rank": 0});
        let events = json!([{"worker_id": 7, "event": event}]);
        Bytes::from(serde_json::to_vec(&events).unwrap())
    };
    let block = json!({"block_hash": 1, "tokens_hash": 2});
    let stored = json!({"stored": {"parent_hash": null, "blocks": [block]}});
    events.apply(&event(json!("cleared")), false).await.unwrap();
    assert_eq!(events.holders.trouble(), None);
    events.lost().await.unwrap();
    events.apply(&event(stored), false).await.unwrap();
    assert_eq!(events.holders.trouble().as_deref(), Some("lost_batches"));
}

#[tokio::test]
async fn who_is_told_of_by_a_publisher_that_is_not_followed_is_in_doubt() {
    let broker = broker().await;
    let mut events = reported_plane(&broker).await;
    events.apply(&message(1, 0, 0..1), false).await.unwrap();
    assert_eq!(events.holders.trouble(), None);
    // The table of publishers is full. All of them report a holder, so none makes room for another.
    let worker = WorkerName::new("other").unwrap();
    for number in 2..=PUBLISHERS_MAX as u64 {
        let other = events.publishers.entry(number).or_default();
        other.holders.insert((worker.clone(), 0));
    }
    // The worker is another process now.
    events.apply(&message(9_999, 0, 0..1), false).await.unwrap();
    assert_eq!(events.holders.trouble().as_deref(), Some("lost_batches"));
}

/// The worker can be heard, and cannot be asked.
#[tokio::test]
async fn a_worker_that_does_not_answer_is_told_of_while_its_record_stands() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let mut batches = nats.subscribe("kvatlas.v1.events.>").await.unwrap();
    nats.flush().await.unwrap();
    let mut events = reported_plane(&broker).await;
    let worker = WorkerName::new("0").unwrap();
    let record = SourceRecord {
        subject: "t".to_owned(),
        id: 0,
        worker: worker.clone(),
        rank: 0,
        target: Target::Nats("ask".to_owned()),
    };
    let records = Records {
        is_known: true,
        sources: [(1, record)].into(),
        ..Records::default()
    };
    events.take_records(Arc::new(records)).await.unwrap();
    let look = StallWatch::new(BridgeClock::default(), &FollowOptions::default()).look();
    for attempt in 0..3 {
        let relay = events.holders.get(&worker, 0).await.unwrap();
        relay.seen(Duration::ZERO).await.unwrap();
        relay.lost().await.unwrap();
        told_lost(&mut batches).await;
        match attempt {
            0 => events.apply(&message(1, 7, 0..1), false).await.unwrap(),
            1 => {
                let asked = events.question(look).unwrap();
                let failed = Err(AnswerError::TooFast);
                events.answered(asked, failed, |_| true).await.unwrap();
            }
            _ => events.told_recorded().await.unwrap(),
        }
        let heartbeat = tokio::time::timeout(Duration::from_secs(60), next_batch(&mut batches));
        assert!(heartbeat.await.unwrap().events.is_empty(), "attempt {attempt}");
    }
}
