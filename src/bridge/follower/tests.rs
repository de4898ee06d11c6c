//! Following without sockets: what is saved of an engine after a stop.

use bytes::Bytes;
use futures_util::poll;
use kvatlas_engines::{Format, Translator, TranslatorSettings};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::super::kin::Kin;
use super::super::relay::tests::{started, way};
use super::super::stalls::BridgeClock;
use super::super::zmtp::{MessageOrCommand, PeerConnection, Role, push_message};
use super::*;
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

/// Returns the batch `seq`. It clears the cache, so that daemons are told of it at once, and stores a block.
fn batch(seq: u64) -> Numbered {
    batch_of(seq, &[json!(["AllBlocksCleared"]), stored(seq)])
}

fn stored(seq: u64) -> Value {
    let tokens: Vec<u64> = (16 * seq..16 * (seq + 1)).collect();
    json!(["BlockStored", [seq], null, tokens, 16, null, "GPU", null, null])
}

fn batch_of(seq: u64, events: &[Value]) -> Numbered {
    let payload = rmp_serde::to_vec(&json!([1.5, events, 0]));
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

/// Starts a replay socket that has `batches`. It breaks off its answers to the questions with the numbers `broken`,
/// counted from 1. Returns the socket's endpoint.
async fn replay_socket(batches: Vec<Numbered>, broken: &'static [u32]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut questions = 0;
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let mut asker = PeerConnection::open(stream, Role::Replay).await.unwrap();
            while let Ok(MessageOrCommand::Message(question)) = asker.next().await {
                questions += 1;
                let first = u64::from_be_bytes(question[1].as_ref().try_into().unwrap());
                let mut answer = Vec::new();
                for Numbered { seq, payload, .. } in batches.iter().filter(|batch| batch.seq >= first) {
                    push_message(&mut answer, &[b"", &seq.to_be_bytes(), payload]);
                }
                if !broken.contains(&questions) {
                    push_message(&mut answer, &[b"", &u64::MAX.to_be_bytes(), b""]);
                }
                asker.send(&answer).await.unwrap();
                if broken.contains(&questions) {
                    break;
                }
            }
        }
    });
    endpoint
}

/// The bridge asks for everything once the socket answers again. If the socket breaks that answer off, the bridge asks
/// for everything later. The connection to the publisher stays.
#[tokio::test]
async fn what_was_lost_is_made_up_for_after_an_answer_that_breaks() {
    let (_broker, mut follower) = follower().await;
    let later = [1, 2].map(|seq| batch_of(seq, &[stored(seq)]));
    let batches = [vec![batch(0)], later.to_vec()].concat();
    follower.replay_endpoint = Some(replay_socket(batches, &[2, 5]).await);
    follower.follow_without_replay(&SocketError::Closed, Duration::from_secs(3600));
    let [_, last] = later;
    follower.published(last).await.unwrap();
    assert_eq!(follower.relay.doubt(), Some(Reason::LostBatches));
    // The first answer that breaks is the one that shows whether all batches are there. The second one has begun to
    // replace the blocks.
    for broken_answers in 1..=2 {
        follower.replay_state.ask_at(Instant::now());
        follower.look().await.unwrap();
        assert!(!follower.can_ask());
        assert_eq!(follower.relay.doubt(), Some(Reason::LostBatches));
        assert_eq!(follower.broken_answers, broken_answers);
        let endpoint = follower.replay_endpoint.replace("tcp://127.0.0.1:1".to_owned());
        follower.replay_state.ask_at(Instant::now());
        follower.look().await.unwrap();
        assert!(!follower.can_ask(), "no connection could be made");
        follower.replay_endpoint = endpoint;
    }
    follower.replay_state.ask_at(Instant::now());
    follower.look().await.unwrap();
    assert_eq!((follower.can_ask(), follower.relay.doubt()), (true, None));
    assert_eq!(follower.broken_answers, 0);
}

/// A question without an answer does not show that what was kept is of no use.
#[tokio::test]
async fn only_an_answer_shows_that_the_replay_does_not_reach_back() {
    let (_broker, mut follower) = follower().await;
    let last = |seq| HeardBatch::new(seq, &batch_of(seq, &[stored(seq)]).payload);
    assert_eq!(
        follower.can_go_on_after(last(0)).await.unwrap(),
        Some(false),
        "no socket"
    );
    follower.replay_endpoint = Some("tcp://127.0.0.1:1".to_owned());
    assert_eq!(
        follower.can_go_on_after(last(0)).await.unwrap(),
        None,
        "no connection"
    );
    let batches = [0, 1].map(|seq| batch_of(seq, &[stored(seq)])).to_vec();
    follower.replay_endpoint = Some(replay_socket(batches, &[1]).await);
    assert_eq!(
        follower.can_go_on_after(last(1)).await.unwrap(),
        None,
        "a broken answer"
    );
    assert_eq!(follower.can_go_on_after(last(1)).await.unwrap(), Some(true));
    assert_eq!(follower.can_go_on_after(last(2)).await.unwrap(), Some(false));
    let of_another = HeardBatch::new(1, b"of another process");
    assert_eq!(follower.can_go_on_after(of_another).await.unwrap(), Some(false));
    follower.follow_without_replay(&SocketError::Closed, Duration::from_secs(3600));
    assert_eq!(
        follower.can_go_on_after(last(1)).await.unwrap(),
        None,
        "it is silent"
    );
}

/// Follows an engine whose replay socket has been proven to be its own. Then another process answers at the socket's
/// address, while the connection to the old one stands.
async fn replaced() -> (EmbeddedBroker, Follower) {
    let (broker, mut follower) = follower().await;
    follower.replay_endpoint = Some(replay_socket(vec![batch(0)], &[]).await);
    follower.look().await.unwrap();
    assert_eq!(follower.connection, ConnectionState::Proven);
    let process = vec![batch_of(0, &[stored(7)]), batch_of(1, &[stored(8)])];
    follower.replay_endpoint = Some(replay_socket(process, &[]).await);
    follower.replay = None;
    follower.look().await.unwrap();
    assert!(matches!(follower.replay_state, ReplayState::Contradicting(_)));
    assert!(!follower.relay.is_in_sight());
    (broker, follower)
}

/// Batches of the old process may still have been unread when the new one answered.
#[tokio::test]
async fn another_process_is_taken_when_the_connection_to_the_old_one_has_ended() {
    for unread in [None, Some(batch(1))] {
        let (_broker, mut follower) = replaced().await;
        if let Some(unread) = unread {
            follower.published(unread).await.unwrap();
        }
        follower.lost().await.unwrap();
        follower.connected().await.unwrap();
        assert!(follower.can_ask() && follower.relay.is_in_sight());
        assert_eq!(
            (follower.relay.doubt(), follower.continuity.last()),
            (None, Some(1))
        );
    }
}

/// The engine keeps no batches for replays since its restart, and the connection to it breaks. Another empty answer does not
/// show that the engine has no block.
#[tokio::test]
async fn a_socket_that_keeps_no_batches_any_more_drops_no_blocks() {
    let (_broker, mut follower) = follower().await;
    follower.replay_endpoint = Some(replay_socket(vec![batch(0)], &[]).await);
    follower.look().await.unwrap();
    assert_eq!(follower.connection, ConnectionState::Proven);
    follower.replay_endpoint = Some(replay_socket(Vec::new(), &[]).await);
    follower.lost().await.unwrap();
    follower.connected().await.unwrap();
    follower.published(batch_of(0, &[stored(7)])).await.unwrap();
    while follower.can_ask() {
        follower.look().await.unwrap();
    }
    assert!(matches!(follower.replay_state, ReplayState::Contradicting(_)));
    follower.lost().await.unwrap();
    follower.connected().await.unwrap();
    assert!(!follower.relay.is_in_sight());
    assert_eq!(follower.continuity.last(), Some(0));
}
