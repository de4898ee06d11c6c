//! Tests of hints: which of a report are kept, and which are counted as refused.

use std::time::{Duration, Instant};

use kvatlas_core::wire::{Hint, Shard};
use kvatlas_telemetry::rendered;

use super::*;

/// Returns a hint about `worker`. A bad one has positions, which hints must not have.
fn hint(worker: &str, is_bad: bool) -> Hint {
    let mut prompt = SingleQuery::new(prompt(&[1, 2, 3, 4], None, None));
    prompt.positions = is_bad.then(|| vec![Position::ZERO]);
    Hint {
        worker: WorkerName::new(worker).unwrap(),
        rank: 0,
        prompt,
    }
}

/// Runs `told` on an answerer that keeps hints about the workers of `shard`. Returns the numbers of hints that the
/// metrics count as undecodable, and as of an unknown namespace.
fn dropped(shard: Option<Shard>, told: impl FnOnce(&Answerer, &NamespaceName)) -> [u64; 2] {
    let page = rendered(|| {
        let mut scene = Scene::new();
        let hints = Arc::new(Hints::new(shard, Duration::from_secs(600), 1 << 20));
        scene.answerer.hints = Some(hints);
        told(&scene.answerer, &scene.namespace.name);
        // Dropping the scene would end its metric series.
        std::mem::forget(scene);
    });
    ["undecodable", "unknown_namespace"].map(|reason| {
        let series = format!("kvatlas_hints_dropped_total{{reason=\"{reason}\"}} ");
        let count = page.lines().find_map(|line| line.strip_prefix(&series));
        count.unwrap().parse().unwrap()
    })
}

#[test]
fn a_bad_hint_is_counted_and_those_behind_it_are_kept() {
    let now = Instant::now();
    let dropped = dropped(None, |answerer, name| {
        let bad = || hint("b", true);
        let report = [hint("a", false), bad(), bad(), hint("c", false)];
        assert_eq!(answerer.take_hints(name, &report, now), Ok(2));
        let alone = answerer.take_hints(name, &[bad()], now).unwrap_err();
        assert_eq!(alone.code, ErrorCode::BadRequest);
    });
    assert_eq!(dropped, [3, 0]);
}

#[test]
fn a_shard_counts_the_refused_hints_about_its_own_workers_alone() {
    let now = Instant::now();
    let counted = [0, 1].map(|index| {
        dropped(Shard::new(index, 2), |answerer, name| {
            let bad = ["a", "b", "c", "d"].map(|worker| hint(worker, true));
            let _ = answerer.take_hints(name, &bad, now);
            let nobody = NamespaceName::new("nobody").unwrap();
            let refused = answerer.take_hints(&nobody, &[hint("a", false)], now);
            assert_eq!(refused.unwrap_err().code, ErrorCode::UnknownNamespace);
        })
    });
    let [one, other] = counted;
    assert_eq!([one[0] + other[0], one[1] + other[1]], [4, 1]);
}
