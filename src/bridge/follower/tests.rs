//! Following without sockets: what is saved of an engine after a stop.

use bytes::Bytes;
use futures_util::poll;
use kvatlas_engines::{Format, Translator, TranslatorSettings};
use serde_json::json;

use super::super::kin::Kin;
use super::super::relay::tests::{started, way};
use super::super::stalls::BridgeClock;
use super::*;
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

/// Returns the batch `seq`. It clears the cache, so that daemons are told of it at once, and stores a block.
fn batch(seq: u64) -> Numbered {
    let tokens: Vec<u32> = (0..16).collect();
    let stored = json!(["BlockStored", [seq], null, tokens, 16, null, "GPU", null, null]);
    let payload = rmp_serde::to_vec(&json!([1.5, [["AllBlocksCleared"], stored], 0]));
    Numbered {
        seq,
        payload: payload.unwrap().into(),
        topic: Bytes::new(),
    }
}

/// Follows an engine that has published one batch. The publisher's queue has room for one message.
async fn follower() -> (EmbeddedBroker, Follower) {
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start(&server).await.unwrap();
    let mut way = way(&broker, "gpu-0", Kin::default()).await;
    way.options.queue_batches_max = 1;
    let blocks = Translator::new(TranslatorSettings::for_format(Format::Vllm));
    let relay = started(blocks, way).await;
    let options = FollowOptions::default();
    let stalls = StallWatch::new(BridgeClock::default(), &options);
    let mut follower = Follower::new(relay, "", None, options, stalls);
    follower.published(batch(0)).await.unwrap();
    follower.relay.seen(Duration::from_secs(60)).await.unwrap();
    follower.flush().await.unwrap();
    (broker, follower)
}

/// Fills the publisher's queue, so that a step that begins now waits for room. The publisher has no turn on the test's
/// only thread before the test itself waits.
async fn fill_queue(follower: &mut Follower) {
    follower.relay.seen(Duration::from_secs(60)).await.unwrap();
}

async fn last_kept(follower: &mut Follower) -> Option<Option<u64>> {
    let kept = follower.keep("c").await.unwrap();
    kept.map(|kept| kept.continuity.last())
}

/// A batch whose blocks are applied, but whose number is not noted, would be applied again by the next bridge.
#[tokio::test]
async fn nothing_is_saved_when_a_stop_cuts_a_batch_off() {
    let (_broker, mut follower) = follower().await;
    assert_eq!(last_kept(&mut follower).await, Some(Some(0)));
    follower.published(batch(1)).await.unwrap();
    follower.flush().await.unwrap();
    assert_eq!(last_kept(&mut follower).await, Some(Some(1)));
    fill_queue(&mut follower).await;
    assert!(poll!(std::pin::pin!(follower.published(batch(2)))).is_pending());
    assert_eq!(last_kept(&mut follower).await, None);
}

/// Without its blocks, but with its old numbers, a process would be exact and empty in the next bridge.
#[tokio::test]
async fn nothing_is_saved_when_a_stop_cuts_a_restart_off() {
    let (_broker, mut follower) = follower().await;
    follower.restart(None).await.unwrap();
    follower.flush().await.unwrap();
    assert_eq!(last_kept(&mut follower).await, Some(None));
    fill_queue(&mut follower).await;
    assert!(poll!(std::pin::pin!(follower.restart(None))).is_pending());
    assert_eq!(last_kept(&mut follower).await, None);
    let (_broker, mut follower) = self::follower().await;
    fill_queue(&mut follower).await;
    assert!(poll!(std::pin::pin!(follower.restart_behind_a_gap())).is_pending());
    assert_eq!(last_kept(&mut follower).await, None);
}

/// The file does not have the doubt about another process's blocks until that doubt is noted behind its batches.
#[tokio::test]
async fn a_process_that_may_be_another_engine_is_saved_with_its_doubt_or_not_at_all() {
    let (_broker, mut follower) = follower().await;
    follower.was_long_silent(Duration::from_secs(3600));
    follower.restart(None).await.unwrap();
    follower.apply(&batch(0), false).await.unwrap();
    assert_eq!(follower.relay.doubt(), None, "the batch's clear has ended it");
    assert_eq!(last_kept(&mut follower).await, None);
    follower.settle_identity().await.unwrap();
    assert_eq!(last_kept(&mut follower).await, Some(Some(0)));
    assert_eq!(follower.relay.doubt(), Some(Reason::OtherEngine));
}
