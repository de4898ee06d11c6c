//! Answers from a pool of lanes: messages that have not been applied, or cannot be, leave no answer exact.

use std::sync::mpsc;

use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{ErrorCode, SingleQuery};
use kvatlas_telemetry::labels::LaneWork;

use super::*;
use crate::queries::Answerer;

/// Pool of lanes, with an answerer of queries. Every publisher counts as known.
struct World {
    pool: LanePool,
    trust: Arc<StreamTrust>,
    answerer: Answerer,
}

impl World {
    fn new(settings: &LaneSettings) -> Self {
        let pool = LanePool::start(settings, Arc::new(namespaces())).unwrap();
        let trust = Arc::new(StreamTrust::default());
        let answerer = Answerer::new(
            Arc::clone(&pool.namespaces),
            Arc::clone(&trust),
            pool.freshness(),
            pool.stray_names(),
            Subjects::new("kvatlas").unwrap(),
            WireLimits::default().into(),
        );
        Self {
            pool,
            trust,
            answerer,
        }
    }

    async fn hear(&self, namespace: &str, worker: &str, payload: &[u8]) {
        let (generation, worker) = (self.trust.generation(), WorkerName::new(worker).unwrap());
        let namespace = name(namespace);
        let dispatched = self.pool.dispatch(&namespace, worker, payload, generation);
        dispatched.await.unwrap();
    }

    /// Asks `namespace` for a block, of `workers` only if they are given. Returns whether the answer is exact.
    fn is_exact(&self, namespace: &str, workers: Option<&[&str]>) -> bool {
        let workers = workers.map(|workers| workers.iter().map(|name| WorkerName::new(name).unwrap()));
        let mut query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(10)]));
        query.options.workers = workers.map(Iterator::collect);
        self.answerer
            .answer_one(&name(namespace), &query)
            .unwrap()
            .is_exact()
    }

    /// Has the only lane wait until the returned value is dropped.
    fn block(&self) -> mpsc::Sender<()> {
        let (gate, opened) = mpsc::channel();
        let wait = move |_: &mut lane::Lane, _: &WorkerKey| _ = opened.recv();
        let sent = self.pool.on_worker_now(worker(0), LaneWork::Resync, wait);
        drop(sent.unwrap());
        gate
    }

    /// Returns the error for a namespace that does not exist.
    fn error(&self, namespace: &str) -> ErrorCode {
        self.answerer.namespace(&name(namespace)).unwrap_err().code
    }
}

fn name(name: &str) -> NamespaceName {
    NamespaceName::new(name).unwrap()
}

#[tokio::test]
async fn a_namespace_whose_publishers_cannot_be_read_is_not_unknown() {
    let world = World::new(&settings());
    assert_eq!(world.error("fresh"), ErrorCode::UnknownNamespace);
    world.hear("fresh", "w", b"garbage").await;
    assert_eq!(world.error("fresh"), ErrorCode::Unavailable);
    assert_eq!(world.error("other"), ErrorCode::UnknownNamespace);
    assert!(!world.answerer.is_unheard(&name("fresh")) && world.answerer.is_unheard(&name("other")));
    // Answers about all namespaces lack this one.
    assert!(world.pool.lacks_any(|stray| *stray == name("fresh")));
    assert!(!world.pool.lacks_any(|stray| *stray == name("other")));
    // Once names are no longer remembered, any name may be one of them.
    for number in 0..64 {
        world.hear(&format!("n{number}"), "w", b"garbage").await;
    }
    assert_eq!(world.error("other"), ErrorCode::Unavailable);
    world.hear("fresh", "w", &batch(1, Vec::new()).encode()).await;
    assert!(world.answerer.namespace(&name("fresh")).is_ok());
}

/// Waits until the clock shows another time.
fn pass_time() {
    let now = now_us();
    while now_us() <= now + 1 {
        std::hint::spin_loop();
    }
}

/// Returns the settings of one lane. A message that waits at all has waited for too long.
fn impatient() -> LaneSettings {
    LaneSettings {
        lanes: 1,
        behind_after: Some(Duration::ZERO),
        ..settings()
    }
}

#[tokio::test]
async fn the_first_batch_of_a_worker_that_waits_for_too_long_leaves_no_answer_exact() {
    let world = World::new(&impatient());
    let heartbeat = batch(1, Vec::new()).encode();
    world.hear("llama", "known", &heartbeat).await;
    world.pool.drain().await.unwrap();
    assert!(world.is_exact("llama", None));
    let gate = world.block();
    for first in ["llama", "fresh"] {
        world.hear(first, "new", &heartbeat).await;
    }
    pass_time();
    for namespace in ["llama", "fresh"] {
        assert!(!world.is_exact(namespace, None));
        assert!(!world.is_exact(namespace, Some(&["known", "new"])));
        // Nothing of this worker waits.
        assert!(world.is_exact(namespace, Some(&["known"])));
    }
    drop(gate);
    world.pool.drain().await.unwrap();
    assert!(world.is_exact("llama", None) && world.is_exact("fresh", Some(&["new"])));
}

#[tokio::test]
async fn while_everybody_is_behind_nobody_is_certain_to_have_nothing() {
    let world = World::new(&LaneSettings {
        behind_after: Some(Duration::from_secs(60)),
        ..settings()
    });
    drop(world.pool.namespaces.get_or_create(&name("empty"), None).unwrap());
    let freshness = world.pool.freshness();
    for (heard_us, is_behind) in [(now_us() - 61_000_000, true), (now_us(), false)] {
        freshness.heard(heard_us);
        assert_eq!(world.is_exact("empty", None), !is_behind);
        assert_eq!(world.is_exact("empty", Some(&["w"])), !is_behind);
        let expected = match is_behind {
            true => ErrorCode::Unavailable,
            false => ErrorCode::UnknownNamespace,
        };
        assert_eq!(world.error("other"), expected);
    }
}
