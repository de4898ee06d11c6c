//! Publisher that keeps no table of blocks. When a daemon asks it for the full state, it reads the state from the
//! object that owns it. The state in the answer must have all batches that were sent before the answer.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_client::publish::{FullState, HolderPublisher, PublishedHolder, PublisherOptions, SharedState};
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    BatchCursor, Event, EventBatch, ResyncAnswerKind, ResyncChunk, ResyncRequest, Tier, WireLimits,
};
use tokio::sync::Mutex;

use crate::support::{PATIENCE, broker, namespace, stored, subjects, worker};

struct Keeper(Vec<SequenceHash>);

impl FullState for Keeper {
    fn full_state(&mut self) -> Vec<(Tier, Event)> {
        vec![(Tier::DEVICE, stored(self.0.clone()))]
    }
}

fn blocks(batch: &EventBatch) -> usize {
    let blocks = |event: &Event| match event {
        Event::Stored(stored) => stored.names.len(),
        other => panic!("{other:?}"),
    };
    batch.events.iter().map(blocks).sum()
}

#[tokio::test]
async fn it_is_given_as_it_was_at_the_last_batch_that_was_sent() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let mut events = nats.subscribe(subjects().all_events()).await.unwrap();
    let keeper = Arc::new(Mutex::new(Keeper(Vec::new())));
    let state: SharedState = keeper.clone();
    let options = PublisherOptions {
        // With so small a queue, the owner of the state (keeper) waits for the publisher, and the publisher waits for
        // the state.
        queue_batches_max: 1,
        // Batches after the first one wait to be sent.
        batch_delay: Duration::from_secs(3600),
        ..PublisherOptions::default()
    };
    let holder = PublishedHolder {
        namespace: namespace(),
        worker: worker("gpu-0"),
        rank: 0,
    };
    let publisher = HolderPublisher::start_with_state(nats.clone(), &subjects(), holder, options, state)
        .await
        .unwrap();

    let mut locked = keeper.lock().await;
    let inbox = nats.new_inbox();
    let mut answers = nats.subscribe(inbox.clone()).await.unwrap();
    let question = ResyncRequest {
        rank: 0,
        cursor: BatchCursor { epoch: 0, seq: 0 },
        full: true,
    };
    let asked = subjects().resync(&namespace(), &worker("gpu-0"), 0);
    nats.publish_with_reply(asked, inbox, question.encode().into())
        .await
        .unwrap();
    nats.flush().await.unwrap();
    for number in 1..=50 {
        locked.0.push(SequenceHash(number));
        let published = publisher.publish(Tier::DEVICE, vec![stored(vec![SequenceHash(number)])]);
        tokio::time::timeout(PATIENCE, published)
            .await
            .expect("there is room, also while the state is asked for")
            .unwrap();
    }
    drop(locked);

    let answer = answers.next().await.unwrap();
    let chunk = ResyncChunk::decode(&answer.payload, &WireLimits::default()).unwrap();
    assert_eq!((chunk.kind, chunk.is_last), (ResyncAnswerKind::Full, true));
    let decode = |payload: &[u8]| EventBatch::decode(payload, &WireLimits::default()).unwrap();
    let given: usize = chunk.batches.iter().map(|batch| blocks(&decode(batch))).sum();
    assert_eq!(given, 50);
    // All blocks of the state had been sent before the answer.
    let mut sent = 0;
    while sent < 50 {
        let batch = decode(&events.next().await.unwrap().payload);
        sent += blocks(&batch);
        assert!(batch.seq <= chunk.cursor.seq, "{batch:?}");
    }
}
