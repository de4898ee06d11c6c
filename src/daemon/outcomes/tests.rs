use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::shared::unbounded;
use kvatlas_core::index::HolderWriter;
use kvatlas_core::wire::{HolderId, NamespaceName, OUTCOMES_MAX, Outcome, OutcomeReport, Shard, WorkerName};

use super::*;
use kvatlas_telemetry::rendered;

fn name() -> NamespaceName {
    NamespaceName::new("llama").unwrap()
}

fn holder(worker: &str) -> HolderId {
    HolderId {
        worker: WorkerName::new(worker).unwrap(),
        rank: 0,
    }
}

/// Makes an outcome store for one namespace with blocks of 16 tokens, and the writers of the namespace's holders.
fn outcomes(shard: Option<Shard>, workers: &[&str]) -> (Outcomes, Vec<HolderWriter>) {
    let namespaces = Arc::new(unbounded(4));
    let namespace = namespaces.get_or_create(&name(), None).unwrap();
    let register = |worker: &&str| namespace.indexer.register(&holder(worker)).unwrap();
    let writers = workers.iter().map(register).collect();
    (Outcomes::new(namespaces, shard), writers)
}

fn outcome(worker: &str, promised_blocks: u32, found_tokens: u32) -> Outcome {
    Outcome {
        worker: WorkerName::new(worker).unwrap(),
        rank: 0,
        promised_blocks,
        found_tokens,
        prompt_tokens: None,
        exact: true,
    }
}

#[test]
fn promised_and_found_are_compared_in_blocks() {
    let given = |promised, found, prompt| {
        let outcome = Outcome {
            prompt_tokens: prompt,
            ..outcome("a", promised, found)
        };
        let counted = counted(&outcome, 16);
        (
            counted.promised_blocks,
            counted.missing_blocks,
            counted.unpromised_blocks,
        )
    };
    assert_eq!(given(10, 160, None), (10, 0, 0));
    assert_eq!(given(10, 159, None), (10, 1, 0));
    assert_eq!(given(2, 64, None), (2, 0, 2));
    // The last token is always computed: of 160 tokens 9 blocks can be reused.
    assert_eq!(given(10, 144, Some(160)), (9, 0, 0));
    assert_eq!(given(10, 144, Some(161)), (10, 1, 0));
    assert_eq!(given(10, 0, Some(0)), (0, 0, 0));
}

#[test]
fn only_what_is_known_here_is_counted() {
    let now = Instant::now();
    let (outcomes, writers) = outcomes(None, &["a", "b"]);
    let report = OutcomeReport::new(vec![
        outcome("a", 10, 160),
        outcome("a", 10, 80),
        outcome("stranger", 10, 0),
        Outcome {
            exact: false,
            ..outcome("b", 10, 0)
        },
    ]);
    assert_eq!(outcomes.take(&name(), &report, now), Ok(3));
    let lately = outcomes.lately(&name(), &holder("a"), now).unwrap();
    assert_eq!(
        (lately.requests, lately.promised_blocks, lately.missing_blocks),
        (2, 20, 5)
    );
    // An answer that was not exact promised nothing.
    assert_eq!(outcomes.lately(&name(), &holder("b"), now), None);
    assert_eq!(
        outcomes.lately(&name(), &holder("a"), now + Duration::from_secs(200)),
        None
    );
    outcomes.take(&name(), &report, now).unwrap();
    assert!(outcomes.lately(&name(), &holder("a"), now).is_some());
    writers.into_iter().for_each(HolderWriter::retire);
    outcomes.forget_gone();
    assert_eq!(outcomes.lately(&name(), &holder("a"), now), None);
}

#[test]
fn a_shard_counts_its_own_workers_alone() {
    let (all, _all) = outcomes(None, &["a", "b", "c", "d"]);
    let workers = ["a", "b", "c", "d"];
    let report = OutcomeReport::new(workers.map(|worker| outcome(worker, 1, 16)).to_vec());
    let now = Instant::now();
    assert_eq!(all.take(&name(), &report, now), Ok(4));
    let counted = (0..2).map(|index| {
        let (part, _writers) = outcomes(Shard::new(index, 2), &workers);
        part.take(&name(), &report, now).unwrap()
    });
    assert_eq!(counted.sum::<usize>(), 4);
}

#[test]
fn reports_that_are_none_are_refused() {
    let now = Instant::now();
    let (outcomes, _writers) = outcomes(None, &["a"]);
    let many = OutcomeReport::new(vec![outcome("a", 1, 16); OUTCOMES_MAX + 1]);
    assert_eq!(
        outcomes.take(&name(), &many, now),
        Err(ReportError::TooMany(OUTCOMES_MAX + 1))
    );
    let other = NamespaceName::new("other").unwrap();
    let one = OutcomeReport::new(vec![outcome("a", 1, 16)]);
    let refused = outcomes.take(&other, &one, now);
    assert_eq!(refused, Err(ReportError::UnknownNamespace(other)));
    let later = OutcomeReport { v: 2, ..one };
    assert_eq!(outcomes.take(&name(), &later, now), Err(ReportError::Version(2)));
}

#[test]
fn a_namespace_without_workers_here_is_no_fault_of_a_report() {
    let page = rendered(|| {
        let other = NamespaceName::new("other").unwrap();
        let report = OutcomeReport::new(vec![outcome("a", 1, 16)]);
        for index in 0..2 {
            let (outcomes, _writers) = outcomes(Shard::new(index, 2), &[]);
            let refused = outcomes.take(&other, &report, Instant::now());
            assert_eq!(refused, Err(ReportError::UnknownNamespace(other.clone())));
            // Dropping these values would end their metric series.
            std::mem::forget(outcomes);
        }
    });
    let counted = "kvatlas_outcomes_refused_total{reason=\"unknown_namespace\"} 1";
    assert!(page.lines().any(|line| line == counted), "{page}");
}

#[test]
fn figures_are_by_certainty_and_by_holder() {
    let page = rendered(|| {
        let (outcomes, writers) = outcomes(None, &["a", "b"]);
        let lie = Outcome {
            exact: false,
            ..outcome("b", 4, 0)
        };
        let report = OutcomeReport::new(vec![outcome("a", 10, 112), outcome("x", 1, 1), lie]);
        outcomes.take(&name(), &report, Instant::now()).unwrap();
        outcomes.undecodable(&"no report");
        // Dropping these values would end their metric series.
        std::mem::forget((outcomes, writers));
    });
    for line in [
        "kvatlas_outcomes_total{namespace=\"llama\",state=\"exact\"} 1",
        "kvatlas_outcome_promised_blocks_total{namespace=\"llama\",state=\"exact\"} 10",
        "kvatlas_outcome_missing_blocks_total{namespace=\"llama\",state=\"exact\"} 3",
        "kvatlas_outcome_missing_blocks_total{namespace=\"llama\",state=\"degraded\"} 4",
        "kvatlas_outcome_missing_ratio_count{namespace=\"llama\",state=\"exact\"} 1",
        "kvatlas_outcome_missing_ratio_count{namespace=\"llama\",state=\"degraded\"} 1",
        "kvatlas_holder_missing_blocks_total{namespace=\"llama\",holder=\"a/0\",state=\"exact\"} 3",
        "kvatlas_holder_promised_blocks_total{namespace=\"llama\",holder=\"b/0\",state=\"exact\"} 0",
        "kvatlas_holder_promised_blocks_total{namespace=\"llama\",holder=\"b/0\",state=\"degraded\"} 4",
        "kvatlas_outcomes_refused_total{reason=\"unknown_holder\"} 1",
        "kvatlas_outcomes_refused_total{reason=\"undecodable\"} 1",
    ] {
        assert!(page.lines().any(|each| each == line), "{line} in {page}");
    }
}

#[test]
fn holders_beyond_the_bound_wait_for_room() {
    let mut kept = KeptOutcomes::default();
    let begun = Instant::now();
    for number in 0..HOLDERS_MAX {
        assert!(
            kept.of_holder(&name(), holder(&format!("w{number}")), begun)
                .is_some()
        );
    }
    assert!(kept.of_holder(&name(), holder("late"), begun).is_none());
    assert!(kept.of_holder(&name(), holder("w1"), begun).is_some());
    assert!(
        kept.of_holder(&name(), holder("late"), begun + FORGOTTEN_AFTER)
            .is_some()
    );
    assert_eq!(kept.holder_count(), 1);
}

#[test]
fn all_who_promise_are_told_the_worst_first() {
    let now = Instant::now();
    let (outcomes, _writers) = outcomes(None, &["a", "b", "c", "d"]);
    assert_eq!(outcomes.promises(&name(), now), None);
    let doubtful = Outcome {
        exact: false,
        ..outcome("d", 10, 0)
    };
    let report = OutcomeReport::new(vec![
        outcome("a", 100, 16 * 99),
        outcome("b", 10, 16 * 5),
        outcome("c", 100, 16 * 120),
        doubtful,
    ]);
    outcomes.take(&name(), &report, now).unwrap();
    let told = serde_json::to_value(outcomes.promises(&name(), now)).unwrap();
    let row = |worker: &str, promised: u64, missing: u64, unpromised: u64| {
        serde_json::json!({
            "worker": worker, "rank": 0, "requests": 1,
            "promised_blocks": promised, "missing_blocks": missing, "unpromised_blocks": unpromised,
        })
    };
    let worst = [row("b", 10, 5, 0), row("a", 100, 1, 0), row("c", 100, 0, 20)];
    assert_eq!(told, serde_json::json!({ "holders": 3, "worst": worst }));
    assert_eq!(outcomes.promises(&name(), now + Duration::from_secs(180)), None);
}

#[test]
fn who_breaks_promises_is_named() {
    let now = Instant::now();
    let (outcomes, _writers) = outcomes(None, &["a", "b", "c"]);
    let report = OutcomeReport::new(vec![
        outcome("a", 200, 16 * 150),
        outcome("b", 200, 16 * 199),
        // Too few promised blocks for a judgement.
        outcome("c", 20, 0),
    ]);
    outcomes.take(&name(), &report, now).unwrap();
    let (total, broken) = outcomes.broken_promises(&name(), now);
    assert_eq!(total, 1);
    let named: Vec<_> = broken.iter().map(|broken| broken.worker.as_str()).collect();
    assert_eq!(named, ["a"]);
    let json = serde_json::to_value(&broken[0]).unwrap();
    assert_eq!(
        (&json["promised_blocks"], &json["missing_blocks"]),
        (&200.into(), &50.into())
    );
    let later = outcomes.broken_promises(&name(), now + Duration::from_secs(180));
    assert_eq!(later, (0, Vec::new()));
}

#[test]
fn all_who_break_promises_are_counted_and_the_worst_are_named() {
    let now = Instant::now();
    let workers: Vec<String> = (0..BROKEN_MAX + 4).map(|number| format!("w{number}")).collect();
    let names: Vec<&str> = workers.iter().map(String::as_str).collect();
    let (outcomes, _writers) = outcomes(None, &names);
    let report = OutcomeReport::new(names.iter().map(|worker| outcome(worker, 200, 0)).collect());
    outcomes.take(&name(), &report, now).unwrap();
    let (total, named) = outcomes.broken_promises(&name(), now);
    assert_eq!((total, named.len()), (BROKEN_MAX + 4, BROKEN_MAX));
}
