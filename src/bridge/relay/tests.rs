use futures_util::StreamExt;
use kvatlas_core::wire::{
    BatchCursor, Event, EventBatch, LAYERS_LABEL, NamespaceName, ResyncChunk, ResyncRequest, WireLimits,
    WorkerName,
};
use kvatlas_engines::TranslatorSettings;
use serde_json::json;

use super::*;
use crate::holders::Holders;
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};
use kvatlas_telemetry::rendered;

async fn relay(broker: &EmbeddedBroker) -> Relay {
    relay_of(broker, "gpu-0", Kin::default()).await
}

pub(crate) async fn way(broker: &EmbeddedBroker, worker: &str, kin: Kin) -> Way {
    Way {
        nats: async_nats::connect(broker.url()).await.unwrap().into(),
        subjects: Subjects::new("kvatlas").unwrap(),
        holder: PublishedHolder {
            namespace: NamespaceName::new("m").unwrap(),
            worker: WorkerName::new(worker).unwrap(),
            rank: 0,
        },
        options: PublisherOptions {
            batch_delay: Duration::ZERO,
            ..PublisherOptions::default()
        },
        lease: None,
        kin,
        farewells: Farewells::default(),
        profiles: watch::channel(Profile::default()).1,
    }
}

async fn relay_of(broker: &EmbeddedBroker, worker: &str, kin: Kin) -> Relay {
    let way = way(broker, worker, kin).await;
    started(Translator::new(TranslatorSettings::for_format(Format::Vllm)), way).await
}

pub(crate) async fn started(blocks: Translator, way: Way) -> Relay {
    let metrics = Arc::new(BridgeMetrics::new());
    let starting = Relay::start(Format::Vllm, "gpu-0/0", blocks, None, way, metrics);
    starting.await.unwrap()
}

/// Returns holders whose relays publish on `broker` what an engine of `format` tells.
pub(crate) fn holders(broker: EmbeddedBroker, format: Format) -> Holders {
    let broker = Arc::new(broker);
    Holders::new(Box::new(move |worker, _| {
        let broker = Arc::clone(&broker);
        Box::pin(async move {
            let way = way(&broker, worker.as_str(), Kin::default()).await;
            let blocks = Translator::new(TranslatorSettings::for_format(format));
            Ok(started(blocks, way).await)
        })
    }))
}

/// A NATS server, and a subscription to the messages that a relay publishes there.
pub(crate) async fn heard() -> (EmbeddedBroker, async_nats::Subscriber) {
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start(&server).await.unwrap();
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let batches = nats.subscribe("kvatlas.v1.events.m.gpu-0").await.unwrap();
    nats.flush().await.unwrap();
    (broker, batches)
}

/// A relay that has just been started, and a subscription to the messages that it publishes.
async fn new_relay() -> (EmbeddedBroker, Relay, async_nats::Subscriber) {
    let (broker, batches) = heard().await;
    let relay = relay(&broker).await;
    (broker, relay, batches)
}

/// A relay whose engine is in sight, and a subscription to the messages that it publishes from now on.
async fn heard_relay() -> (EmbeddedBroker, Relay, async_nats::Subscriber) {
    let (broker, mut relay, mut batches) = new_relay().await;
    relay.seen(Duration::from_secs(60)).await.unwrap();
    let in_sight = [Event::Doubted(DegradedReasons::default())];
    while next_batch(&mut batches).await.events != in_sight {}
    (broker, relay, batches)
}

pub(crate) async fn next_batch(batches: &mut async_nats::Subscriber) -> EventBatch {
    let message = batches.next().await.unwrap();
    EventBatch::decode(&message.payload, &WireLimits::default()).unwrap()
}

/// Waits until a relay has told daemons that its engine is in sight, and then that it is out of sight.
pub(crate) async fn told_lost(batches: &mut async_nats::Subscriber) {
    for doubts in [
        DegradedReasons::default(),
        DegradedReasons::of(DegradedReason::UpstreamLost),
    ] {
        while next_batch(batches).await.events != [Event::Doubted(doubts)] {}
    }
}

#[tokio::test]
async fn nothing_is_kept_back_when_the_engine_goes_out_of_sight() {
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start(&server).await.unwrap();
    let mut relay = relay(&broker).await;
    let tokens: Vec<u32> = (0..16).collect();
    let stored = json!([
        1.5,
        [["BlockStored", [1], null, tokens, 16, null, "GPU", null, null]],
        0
    ]);
    let payload = rmp_serde::to_vec(&stored).unwrap();
    relay.lost().await.unwrap();
    relay.apply(&payload).await.unwrap();
    assert!(relay.has_untold());
    // The connection breaks again. The next attempt to connect may take long, so events are not held back until then.
    relay.lost().await.unwrap();
    assert!(!relay.has_untold());
    assert!(relay.blocks.try_lock().is_ok(), "daemons that ask are answered");
}

#[tokio::test]
async fn the_first_batch_of_an_epoch_says_what_is_doubted_of_it() {
    let (_broker, mut relay, mut batches) = new_relay().await;
    let (lost, gap) = (DegradedReason::UpstreamLost, DegradedReason::UpstreamGap);
    // The engine goes out of sight, comes in sight, and then its first batches are lost.
    relay.lost().await.unwrap();
    relay.restart(None).await.unwrap();
    relay.seen(Duration::ZERO).await.unwrap();
    relay.restart(Some(Reason::LostBatches)).await.unwrap();
    relay.flush().await.unwrap();
    let mut firsts = Vec::new();
    while firsts.len() < 3 {
        let batch = next_batch(&mut batches).await;
        if batch.seq == 1 {
            firsts.push(batch.events);
        }
    }
    let doubted = |reason| vec![Event::Doubted(DegradedReasons::of(reason))];
    assert_eq!(firsts, [doubted(lost), doubted(lost), doubted(gap)]);
}

#[tokio::test]
async fn the_layers_that_an_engine_tells_of_are_a_label() {
    let (_broker, mut relay, mut batches) = heard_relay().await;
    let tokens: Vec<u32> = (0..16).collect();
    let stored = |group: u32, kind: &str, window: Option<u32>| {
        json!({
            "type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": tokens, "block_size": 16, "medium": "GPU",
            "group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window,
        })
    };
    let full = stored(0, "full_attention", None);
    let mut labels = Vec::new();
    for events in [
        vec![full.clone()],
        vec![stored(1, "sliding_window", Some(32)), full.clone()],
        vec![stored(2, "mamba", None), full],
    ] {
        let payload = rmp_serde::to_vec(&json!([1.5, events, 0])).unwrap();
        relay.apply(&payload).await.unwrap();
        relay.tell().await.unwrap();
        relay.flush().await.unwrap();
        let told = relay.told_added.layers;
        // The test may first read batches from before the change, and heartbeats, which repeat the profile.
        let profile = loop {
            let profile = next_batch(&mut batches).await.profile;
            if profile
                .as_ref()
                .and_then(|profile| profile.labels.get(LAYERS_LABEL))
                == told
            {
                break profile;
            }
        };
        labels.push(profile.map(|profile| profile.labels.to_string()));
    }
    let layers = |layers: &str| Some(format!("kvatlas/layers={layers}"));
    assert_eq!(labels, [None, layers("windows"), layers("windows+states")]);
}

/// A bridge may take long between the start of a relay and the first connection to the engine. Until then, daemons must
/// not call the engine exact, whether they hear of the relay or ask it.
#[tokio::test]
async fn kept_blocks_are_told_with_a_doubt_from_the_start() {
    let (broker, mut batches) = heard().await;
    let tokens: Vec<u32> = (0..16).collect();
    let stored = json!(["BlockStored", [1], null, tokens, 16, null, "GPU", null, null]);
    let payload = rmp_serde::to_vec(&json!([1.5, [stored], 0])).unwrap();
    let mut batch = EngineBatch::default();
    let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
    decoder.decode(&payload, &mut batch).unwrap();
    let mut blocks = Translator::new(TranslatorSettings::for_format(Format::Vllm));
    blocks.translate(&batch, &mut Translation::default());
    let mut way = way(&broker, "gpu-0", Kin::default()).await;
    way.options.beginning = Beginning::Above(5);
    let relay = started(blocks, way).await;
    assert!(!relay.is_exact());
    let first = next_batch(&mut batches).await;
    let lost = Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamLost));
    assert_eq!((first.seq, first.events), (2, vec![lost.clone()]));
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let request = ResyncRequest {
        rank: 0,
        cursor: BatchCursor { epoch: 5, seq: 9 },
        full: false,
    };
    let asked = nats.request("kvatlas.v1.resync.m.gpu-0.0", request.encode().into());
    let chunk = ResyncChunk::decode(&asked.await.unwrap().payload, &WireLimits::default()).unwrap();
    let answered = chunk.decode_batches(&WireLimits::default()).unwrap();
    let answered: Vec<Event> = answered.into_iter().flat_map(|batch| batch.events).collect();
    assert!(
        matches!(&answered[..], [Event::Stored(_), doubted] if *doubted == lost),
        "{answered:?}"
    );
}

/// For an engine that was never in sight, the bridge sends heartbeats, so that daemons that start later learn of the
/// engine. For an engine that was in sight and is lost, it sends none, unless the engine's server answers.
#[tokio::test]
async fn an_engine_out_of_sight_is_told_of_again_if_it_was_never_seen_or_its_server_answers() {
    let (_broker, mut relay, mut batches) = new_relay().await;
    relay.lost().await.unwrap();
    let lost = Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamLost));
    assert_eq!(next_batch(&mut batches).await.events, vec![lost.clone()]);
    let again = next_batch(&mut batches).await;
    assert_eq!((again.seq, again.events), (2, Vec::new()));
    relay.seen(Duration::from_secs(60)).await.unwrap();
    relay.lost().await.unwrap();
    let is_lost = |batch: &EventBatch| batch.events == [lost.clone()];
    while !is_lost(&next_batch(&mut batches).await) {}
    let silence = tokio::time::timeout(Duration::from_millis(2500), next_batch(&mut batches));
    assert!(silence.await.is_err());
    relay.told_alive().await.unwrap();
    assert!(next_batch(&mut batches).await.events.is_empty());
}

/// Two engines that have lost batches ask each other at the same time, and a third one knows the names.
#[tokio::test]
async fn names_that_were_lost_are_learnt_from_another_engine() {
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start(&server).await.unwrap();
    let kin = Kin::default();
    let mut knowing = relay_of(&broker, "gpu-0", kin.clone()).await;
    let mut first = relay_of(&broker, "gpu-1", kin.clone()).await;
    let mut second = relay_of(&broker, "gpu-2", kin.clone()).await;
    let tokens: Vec<u32> = (0..48).collect();
    let payload = |names: &[u64], parent: Option<u64>, tokens: &[u32]| {
        let stored = json!(["BlockStored", names, parent, tokens, 16, null, "GPU", null, null]);
        rmp_serde::to_vec(&json!([1.5, [stored], 0])).unwrap()
    };
    knowing
        .apply(&payload(&[1, 2], None, &tokens[..32]))
        .await
        .unwrap();
    knowing.tell().await.unwrap();
    let behind = payload(&[3], Some(2), &tokens[32..]);
    let blocks = async |relay: &mut Relay| {
        relay.lose(Reason::LostBatches).await.unwrap();
        relay.apply(&behind).await.unwrap();
        relay.tell().await.unwrap();
        assert!(!relay.is_exact());
        relay.blocks.lock().await.translator().blocks()
    };
    assert_eq!(tokio::join!(blocks(&mut first), blocks(&mut second)), (3, 3));
    let mut stranger = relay_of(&broker, "gpu-3", Kin::default()).await;
    assert_eq!(blocks(&mut stranger).await, 0);
}

fn cleared() -> Vec<u8> {
    rmp_serde::to_vec(&json!([1.5, [["AllBlocksCleared"]], 0])).unwrap()
}

#[tokio::test]
async fn what_another_rank_clears_is_not_cleared_and_is_in_doubt() {
    let (_broker, mut relay, mut batches) = heard_relay().await;
    let payload =
        |event: serde_json::Value, rank: u32| rmp_serde::to_vec(&json!([1.5, [event], rank])).unwrap();
    let tokens: Vec<u32> = (0..16).collect();
    let stored = json!(["BlockStored", [1], null, tokens, 16, null, "GPU", null, null]);
    relay.apply(&payload(stored, 3)).await.unwrap();
    relay
        .apply(&payload(json!(["AllBlocksCleared"]), 1))
        .await
        .unwrap();
    relay
        .apply(&payload(json!(["AllBlocksCleared"]), 3))
        .await
        .unwrap();
    relay.flush().await.unwrap();
    let mut told = Vec::new();
    while !told.contains(&Event::Cleared) {
        told.extend(next_batch(&mut batches).await.events);
    }
    let doubted = Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamGap));
    let [doubt, Event::Stored(_), Event::Cleared] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(*doubt, doubted);
}

/// The relay keeps the engine's rank when another process begins, if the rank came on the engine's own connection. A
/// rank from the replay socket is forgotten, because the socket may belong to another engine.
#[tokio::test]
async fn another_process_has_the_rank_that_was_published_before() {
    let (_broker, mut relay, _batches) = heard_relay().await;
    let tokens: Vec<u32> = (0..16).collect();
    let stored = json!(["BlockStored", [1], null, tokens, 16, null, "GPU", null, null]);
    let of_rank = |rank: u32| rmp_serde::to_vec(&json!([1.5, [stored], rank])).unwrap();
    relay.apply(&of_rank(3)).await.unwrap();
    relay.restart(None).await.unwrap();
    relay.apply(&of_rank(1)).await.unwrap();
    relay.note_published();
    relay.tell().await.unwrap();
    assert!(relay.is_exact());
    relay.restart(None).await.unwrap();
    relay.apply(&of_rank(3)).await.unwrap();
    relay.tell().await.unwrap();
    assert!(!relay.is_exact());
    assert_eq!(relay.blocks.lock().await.translator().blocks(), 0);
}

#[tokio::test]
async fn a_doubt_stands_at_its_place_among_the_events_of_a_payload() {
    let (_broker, mut relay, mut batches) = heard_relay().await;
    let payload = |events: serde_json::Value| rmp_serde::to_vec(&json!([1.5, events, 0])).unwrap();
    let (clear, unknown) = (json!(["AllBlocksCleared"]), json!(["BlockForgotten"]));
    relay.apply(&payload(json!([unknown, clear]))).await.unwrap();
    relay.apply(&payload(json!([clear, unknown]))).await.unwrap();
    relay.flush().await.unwrap();
    let gap = || Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamGap));
    let mut told = Vec::new();
    while told.len() < 4 {
        told.extend(next_batch(&mut batches).await.events);
    }
    assert_eq!(told, [Event::Cleared, gap(), Event::Cleared, gap()]);
    assert!(!relay.is_exact());
}

/// An event in an old form has no fields for salts and adapters. Daemons are told of the missing fields before the
/// first block. The holder as a whole is not in doubt.
#[tokio::test]
async fn what_a_form_has_no_room_for_is_told_with_the_blocks() {
    let (_broker, mut relay, mut batches) = heard_relay().await;
    let tokens: Vec<u32> = (0..16).collect();
    let stored = json!(["BlockStored", [1], null, tokens, 16, null, "GPU"]);
    let payload = rmp_serde::to_vec(&json!([1.5, [stored, ["AllBlocksCleared"]], 0])).unwrap();
    relay.apply(&payload).await.unwrap();
    relay.flush().await.unwrap();
    let untold = DegradedReasons::of(DegradedReason::UntoldSalts).with(DegradedReason::UntoldAdapters);
    let mut told = Vec::new();
    while told.len() < 4 {
        told.extend(next_batch(&mut batches).await.events);
    }
    let [before, Event::Stored(_), Event::Cleared, after] = &told[..] else {
        panic!("{told:?}");
    };
    assert_eq!([before, after], [&Event::Doubted(untold); 2]);
    assert!(relay.is_exact());
}

#[tokio::test]
async fn who_clears_out_of_sight_is_out_of_sight_still() {
    let (_broker, mut relay, mut batches) = new_relay().await;
    relay.lost().await.unwrap();
    relay.apply(&cleared()).await.unwrap();
    relay.flush().await.unwrap();
    let lost = Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamLost));
    let mut told = Vec::new();
    while told.len() < 2 {
        let batch = next_batch(&mut batches).await;
        told.push(batch.events);
    }
    assert_eq!(told, [vec![lost.clone()], vec![Event::Cleared, lost]]);
}

#[test]
fn an_engine_that_clears_is_exact_in_metrics_too() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut kept = None;
    let page = rendered(|| {
        kept = Some(runtime.block_on(async {
            let server = find_nats_server(None).unwrap();
            let broker = EmbeddedBroker::start(&server).await.unwrap();
            let mut relay = relay(&broker).await;
            relay.seen(Duration::from_secs(60)).await.unwrap();
            relay.lose(Reason::LostBatches).await.unwrap();
            relay.apply(&cleared()).await.unwrap();
            relay.flush().await.unwrap();
            assert!(relay.is_exact());
            relay
        }));
    });
    drop(kept);
    let exact = "kvatlas_bridge_engine_exact{namespace=\"m\",engine=\"gpu-0/0\"} 1";
    assert!(page.lines().any(|line| line == exact), "{page}");
}

#[tokio::test]
async fn a_goodbye_that_no_server_can_take_is_an_error() {
    let (broker, _batches) = heard().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let begin = async || {
        let way = Way {
            nats: nats.clone().into(),
            ..way(&broker, "gpu-0", Kin::default()).await
        };
        let blocks = Translator::new(TranslatorSettings::for_format(Format::Vllm));
        started(blocks, way).await
    };
    let relay = begin().await;
    let of_source = parking_lot::Mutex::new(Some(begin().await));
    let mut holders = Holders::new(Box::new(move |_, _| {
        let relay = of_source.lock().take();
        Box::pin(async move { relay.ok_or_else(String::new) })
    }));
    let worker = WorkerName::new("gpu-0").unwrap();
    holders.get(&worker, 0).await.unwrap();
    nats.drain().await.unwrap();
    while nats.flush().await.is_ok() {}
    let said = relay.say_goodbye().await;
    assert!(
        matches!(said, Err(kvatlas_client::publish::PublisherError::Connection(_))),
        "{said:?}"
    );
    holders.forget(&worker, 0).await.expect("the source goes on");
}
