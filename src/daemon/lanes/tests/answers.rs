//! Answers from a pool of lanes: messages that have not been applied, or cannot be, leave no answer exact.

use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::ErrorCode;

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
