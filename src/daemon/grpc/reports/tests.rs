//! Tests of reports. They compare with a naive model, and try gaps, lack of room, and workers whose reports end.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::super::messages::{ExpectedWorker, ExternalKvAction, ExternalKvActionType, WorkerCacheSpec};
use super::*;

const NAMES: [&str; 3] = ["a", "b", "c"];
const PROMPT: [i64; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
const WINDOW_TOKENS: u32 = 40;

fn limits(bytes_max: usize) -> ReportLimits {
    ReportLimits {
        bytes_max,
        silence_max: Some(Duration::from_secs(60)),
    }
}

fn reports() -> BlockReports {
    BlockReports::new(limits(1 << 20))
}

fn expected(names: &[&str]) -> ConfigureExpectedWorkersRequest {
    let worker = |name: &&str| ExpectedWorker {
        worker_id: (*name).to_owned(),
        worker_address: format!("http://{name}:30000"),
        cache_spec: None,
    };
    ConfigureExpectedWorkersRequest {
        workers: names.iter().map(worker).collect(),
    }
}

fn action(kind: ExternalKvActionType, tier: i32, hashes: Vec<i64>) -> ExternalKvAction {
    ExternalKvAction {
        r#type: kind.into(),
        tier,
        hashes,
        ..ExternalKvAction::default()
    }
}

fn batch(name: &str, seq: u64, actions: Vec<ExternalKvAction>) -> ApplyExternalKvBatchRequest {
    ApplyExternalKvBatchRequest {
        worker_id: name.to_owned(),
        seq,
        actions,
        worker_address: format!("http://{name}:30000"),
        cache_spec: None,
        worker_epoch: "e".to_owned(),
        enforce_sequence: true,
    }
}

fn snapshot(name: &str, seq: u64, hashes: Vec<i64>) -> ReplaceExternalKvSnapshotRequest {
    let on_device = TierHashes {
        tier: 1,
        hashes,
        ..TierHashes::default()
    };
    ReplaceExternalKvSnapshotRequest {
        worker_id: name.to_owned(),
        worker_address: format!("http://{name}:30000"),
        worker_epoch: "e".to_owned(),
        applied_seq: seq,
        hashes_by_tier: vec![on_device],
        cache_spec: None,
    }
}

/// Returns the workers that have leading blocks of `PROMPT`, each with its depth. The flag tells whether the state of
/// all workers is certain.
async fn told(reports: &BlockReports, depth: Depth, now: Instant) -> (Vec<(String, u32)>, bool) {
    let (matches, coverage) = reports.prefixes(&PROMPT, depth, now).await;
    let found = matches.into_iter().map(|found| (found.worker, found.blocks));
    (found.collect(), coverage.is_exact)
}

/// A worker in the naive model: the tiers, components and tokens of each block.
#[derive(Default)]
struct Naive {
    spec: Option<WorkerCacheSpec>,
    placed: BTreeMap<(i32, i64), u32>,
    tokens: HashMap<i64, u32>,
    seq: Option<u64>,
}

impl Naive {
    fn act(&mut self, action: &ExternalKvAction) {
        for (place, hash) in action.hashes.iter().enumerate() {
            let key = (action.tier, *hash);
            if action.r#type == ExternalKvActionType::Report as i32 {
                let mask = action.component_masks.get(place).copied().unwrap_or_default();
                self.placed.insert(key, mask);
                let tokens = action.block_sizes.get(place).copied().unwrap_or_default();
                if tokens > 0 {
                    self.tokens.insert(*hash, tokens);
                }
            } else if action.r#type == ExternalKvActionType::Revoke as i32 {
                self.placed.remove(&key);
            }
        }
        if action.r#type == ExternalKvActionType::ClearAllAtTier as i32 {
            self.placed.retain(|(tier, _), _| *tier != action.tier);
        }
        let placed = &self.placed;
        self.tokens
            .retain(|hash, _| (1..=3).any(|tier| placed.contains_key(&(tier, *hash))));
    }

    /// Whether one of `tiers` (device or host) has this component of the block.
    fn has(&self, hash: i64, component: u32, tiers: u32) -> bool {
        (1..=2).any(|tier| {
            let mask = self.placed.get(&(tier, hash)).copied().unwrap_or_default();
            tiers & (1 << tier) != 0 && mask & component != 0
        })
    }

    fn is_whole(&self, count: usize) -> bool {
        let hashes = PROMPT.iter().take(count);
        let held = |hash: i64| (1..=3).any(|tier| self.placed.contains_key(&(tier, hash)));
        match &self.spec {
            None => hashes.copied().all(held) && self.placed.values().all(|mask| *mask == 0),
            Some(spec) => hashes.copied().all(|hash| self.has(hash, 1, spec.full_tier_mask)),
        }
    }

    /// Whether a request can reuse the first `count` blocks.
    fn is_usable(&self, count: usize) -> bool {
        let Some(spec) = &self.spec else {
            return self.is_whole(count);
        };
        let before: Vec<i64> = PROMPT.iter().take(count).copied().collect();
        let of_window = before.iter().rev();
        let run: Vec<i64> = of_window
            .take_while(|hash| self.has(**hash, 2, spec.swa_tier_mask))
            .copied()
            .collect();
        let tokens: u32 = run
            .iter()
            .map(|hash| self.tokens.get(hash).copied().unwrap_or_default())
            .sum();
        let has_window = run.len() == count || tokens >= spec.swa_window_tokens && !run.is_empty();
        let has_state = before
            .last()
            .is_some_and(|hash| self.has(*hash, 4, spec.mamba_tier_mask));
        self.is_whole(count)
            && (spec.components & 2 == 0 || has_window)
            && (spec.components & 4 == 0 || has_state)
    }

    /// Whether the components of the prompt's blocks can be judged.
    fn is_judged(&self) -> bool {
        let held = |hash: i64| (1..=3).any(|tier| self.placed.contains_key(&(tier, hash)));
        let has_window = |spec: &WorkerCacheSpec| spec.components & 2 != 0;
        match &self.spec {
            None => !held(PROMPT[0]) || self.placed.values().all(|mask| *mask == 0),
            Some(spec) if spec.components == 0 || has_window(spec) && spec.swa_window_tokens == 0 => {
                !held(PROMPT[0])
            }
            Some(spec) => (1..=PROMPT.len()).all(|count| {
                let before = PROMPT.iter().take(count).rev();
                let run: Vec<_> = before
                    .take_while(|hash| self.has(**hash, 2, spec.swa_tier_mask))
                    .collect();
                let tokens = run.iter().filter_map(|hash| self.tokens.get(hash));
                let (told, tokens) = (tokens.clone().count(), tokens.sum::<u32>());
                !has_window(spec)
                    || !self.is_whole(count)
                    || run.len() == count
                    || told == run.len()
                    || tokens >= spec.swa_window_tokens
            }),
        }
    }

    fn depth(&self, depth: Depth) -> u32 {
        let counts = (1..=PROMPT.len()).rev();
        let deepest = match depth {
            Depth::Usable => counts.into_iter().find(|count| self.is_usable(*count)),
            Depth::Matched => counts.into_iter().find(|count| self.is_whole(*count)),
        };
        u32::try_from(deepest.unwrap_or_default()).unwrap()
    }
}

fn random_spec(random: &mut fastrand::Rng) -> Option<WorkerCacheSpec> {
    let components = [0, 1, 3, 5, 7][random.usize(0..5)];
    (components > 0).then(|| WorkerCacheSpec {
        version: random.u32(0..2),
        components,
        swa_window_tokens: WINDOW_TOKENS,
        full_tier_mask: random.u32(1..16),
        swa_tier_mask: random.u32(1..16),
        mamba_tier_mask: random.u32(1..16),
    })
}

fn random_action(random: &mut fastrand::Rng, in_parts: bool) -> ExternalKvAction {
    use ExternalKvActionType::{ClearAllAtTier, Report, Revoke};
    let kind = [Report, Report, Report, Report, Revoke, ClearAllAtTier][random.usize(0..6)];
    let first = random.i64(0..10);
    let hashes: Vec<i64> = (first..random.i64(first..13)).collect();
    let hashes = if kind == ClearAllAtTier {
        Vec::new()
    } else {
        hashes
    };
    let mut action = action(kind, random.i32(1..4), hashes);
    if kind == Report && in_parts {
        action.component_masks = action
            .hashes
            .iter()
            .map(|_| [1, 3, 5, 7, 7][random.usize(0..5)])
            .collect();
        action.block_sizes = action.hashes.iter().map(|_| random.u32(0..2) * 16).collect();
    }
    action
}

#[tokio::test]
async fn answers_are_those_of_a_naive_model() {
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut found = 0;
    for round in 0..300 {
        let (reports, now) = (reports(), Instant::now());
        reports.configure(expected(&NAMES), now).unwrap();
        let mut model: BTreeMap<&str, Naive> = BTreeMap::new();
        for name in NAMES {
            let naive = model.entry(name).or_default();
            naive.spec = random_spec(&mut random);
        }
        for _ in 0..40 {
            let name = NAMES[random.usize(0..3)];
            let naive = model.get_mut(name).unwrap();
            let in_parts = naive.spec.is_some() || random.u8(0..20) == 0;
            if naive.seq.is_none() || random.u8(0..10) == 0 {
                let seq = random.u64(0..9);
                let hashes: Vec<i64> = (0..random.i64(0..13)).collect();
                *naive = Naive {
                    spec: naive.spec,
                    seq: Some(seq),
                    ..Naive::default()
                };
                naive.act(&action(ExternalKvActionType::Report, 1, hashes.clone()));
                let mut whole = snapshot(name, seq, hashes);
                whole.cache_spec = naive.spec;
                reports.replace(whole).await.unwrap();
                continue;
            }
            let last = naive.seq.unwrap();
            let seq = last + u64::from(random.u8(0..8) > 0) + u64::from(random.u8(0..12) == 0);
            let count = random.usize(0..6);
            let actions: Vec<_> = (0..count).map(|_| random_action(&mut random, in_parts)).collect();
            let mut given = batch(name, seq, actions.clone());
            given.cache_spec = naive.spec;
            let answer = reports.apply(given, now);
            if seq == last + 1 {
                actions.iter().for_each(|action| naive.act(action));
                naive.seq = Some(seq);
                assert!(!answer.unwrap().duplicate);
            } else if seq == last {
                assert!(answer.unwrap().duplicate);
            } else {
                let (expected, given) = (last + 1, seq);
                assert_eq!(answer, Err(BlockReportError::Gap { expected, given }));
                *naive = Naive {
                    spec: naive.spec,
                    ..Naive::default()
                };
            }
            for depth in [Depth::Usable, Depth::Matched] {
                let of_model = model
                    .iter()
                    .map(|(name, naive)| ((*name).to_owned(), naive.depth(depth)));
                let of_model: Vec<_> = of_model.filter(|(_, blocks)| *blocks > 0).collect();
                found += of_model.len();
                let is_exact = model
                    .values()
                    .all(|naive| naive.seq.is_some() && naive.is_judged());
                assert_eq!(
                    told(&reports, depth, now).await,
                    (of_model, is_exact),
                    "round {round} of seed {seed}, {depth:?}"
                );
            }
            check_placements(&reports, &model, now).await;
        }
    }
    assert!(found > 1000, "{found} matches");
}

/// Compares the tiers and components of each block with the model.
async fn check_placements(reports: &BlockReports, model: &BTreeMap<&str, Naive>, now: Instant) {
    let (matches, _) = reports.placements(&PROMPT, usize::MAX, now).await.unwrap();
    let mut placed = BTreeMap::new();
    for found in &matches {
        for tier in &found.hashes_by_tier {
            for (hash, mask) in tier.hashes.iter().zip(&tier.component_masks) {
                placed.insert((found.worker_id.as_str(), tier.tier, *hash), *mask);
            }
        }
    }
    let of_model = model.iter().flat_map(|(name, naive)| {
        let in_prompt = naive.placed.iter().filter(|((_, hash), _)| PROMPT.contains(hash));
        in_prompt.map(|((tier, hash), mask)| ((*name, *tier, *hash), *mask))
    });
    assert_eq!(placed, of_model.collect());
    let count = placed.len();
    assert!(reports.placements(&PROMPT, count, now).await.is_some());
    assert!(count == 0 || reports.placements(&PROMPT, count - 1, now).await.is_none());
}

#[tokio::test]
async fn answers_are_not_exact_until_it_is_known_who_reports() {
    let (reports, now) = (reports(), Instant::now());
    assert_eq!(told(&reports, Depth::Usable, now).await, (vec![], false));
    let later = now + Duration::from_secs(61);
    assert_eq!(
        told(&reports, Depth::Usable, later).await,
        (vec![], true),
        "no worker reports"
    );
    reports.configure(expected(&[]), now).unwrap();
    assert_eq!(told(&reports, Depth::Usable, now).await, (vec![], true));
}

#[tokio::test]
async fn a_worker_is_awaited_until_its_snapshot_and_behind_a_gap() {
    let (reports, now) = (reports(), Instant::now());
    let store = |seq| batch("a", seq, vec![action(ExternalKvActionType::Report, 1, vec![0])]);
    assert_eq!(reports.apply(store(1), now), Err(BlockReportError::Unexpected));
    assert_eq!(
        reports.replace(snapshot("a", 1, vec![])).await,
        Err(BlockReportError::Unexpected)
    );
    let ready = reports.configure(expected(&["a", "b"]), now).unwrap();
    assert_eq!((ready.total_workers, ready.ready_workers), (2, 0));
    assert_eq!(reports.apply(store(1), now), Err(BlockReportError::NoSnapshot));
    reports.replace(snapshot("a", 5, vec![0, 1])).await.unwrap();
    assert_eq!(
        told(&reports, Depth::Usable, now).await,
        (vec![("a".to_owned(), 2)], false),
        "b is awaited"
    );
    let ready = reports.configure(expected(&["a"]), now).unwrap();
    assert_eq!((ready.total_workers, ready.ready_workers), (1, 1));
    assert_eq!(
        told(&reports, Depth::Usable, now).await,
        (vec![("a".to_owned(), 2)], true)
    );
    let of_another = ApplyExternalKvBatchRequest {
        worker_epoch: "f".to_owned(),
        ..store(6)
    };
    assert!(reports.apply(store(3), now).unwrap().duplicate, "an old batch");
    // The worker has begun another epoch, so what is known of the last one is over.
    assert_eq!(reports.apply(of_another, now), Err(BlockReportError::NoSnapshot));
    reports.configure(expected(&["a"]), now).unwrap();
    assert_eq!(told(&reports, Depth::Usable, now).await, (vec![], false));
    reports.replace(snapshot("a", 5, vec![0, 1])).await.unwrap();
    let gap = BlockReportError::Gap {
        expected: 6,
        given: 7,
    };
    assert_eq!(reports.apply(store(7), now), Err(gap));
    assert_eq!(told(&reports, Depth::Usable, now).await, (vec![], false));
    assert_eq!(reports.apply(store(6), now), Err(BlockReportError::NoSnapshot));
    reports.replace(snapshot("a", 7, vec![0])).await.unwrap();
    assert_eq!(
        told(&reports, Depth::Usable, now).await,
        (vec![("a".to_owned(), 1)], true)
    );
}

#[tokio::test]
async fn a_silent_worker_is_left_out_until_a_batch_continues_what_is_known() {
    let (reports, now) = (reports(), Instant::now());
    reports.configure(expected(&["a"]), now).unwrap();
    reports.replace(snapshot("a", 0, vec![0, 1])).await.unwrap();
    let later = Instant::now() + Duration::from_secs(61);
    let (matches, coverage) = reports.prefixes(&PROMPT, Depth::Usable, later).await;
    assert!(matches.is_empty() && !coverage.is_exact && !coverage.knows_some);
    reports.apply(batch("a", 1, vec![]), later).unwrap();
    assert_eq!(
        told(&reports, Depth::Usable, later).await,
        (vec![("a".to_owned(), 2)], true)
    );
    // A repeated list of workers ends a silence that is within the limit: its time is counted anew. The bridge of an
    // idle worker sends the list again and again.
    let idle = later + Duration::from_secs(50);
    reports.configure(expected(&["a"]), idle).unwrap();
    let prolonged = idle + Duration::from_secs(50);
    assert_eq!(told(&reports, Depth::Usable, prolonged).await.0.len(), 1);
    // Neither a list nor a repeated batch ends a silence that is over the limit.
    let over = idle + Duration::from_secs(61);
    reports.configure(expected(&["a"]), over).unwrap();
    assert_eq!(told(&reports, Depth::Usable, over).await, (vec![], false));
    assert!(reports.apply(batch("a", 1, vec![]), over).unwrap().duplicate);
    assert_eq!(told(&reports, Depth::Usable, over).await, (vec![], false));
    reports.apply(batch("a", 2, vec![]), over).unwrap();
    assert_eq!(
        told(&reports, Depth::Usable, over).await,
        (vec![("a".to_owned(), 2)], true)
    );
}

#[tokio::test]
async fn a_prompt_ends_before_a_repeated_hash_and_all_workers_are_looked_at() {
    let (reports, now) = (reports(), Instant::now());
    let names: Vec<String> = (0..40).map(|number| format!("w{number:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    reports.configure(expected(&names), now).unwrap();
    // All workers together have more blocks than one look-up reads without a pause for other tasks.
    let chain: Vec<i64> = (0..500).collect();
    for name in &names {
        reports.replace(snapshot(name, 0, chain.clone())).await.unwrap();
    }
    let (matches, coverage) = reports.prefixes(&chain, Depth::Usable, Instant::now()).await;
    let found: Vec<_> = matches
        .iter()
        .map(|one| (one.worker.as_str(), one.blocks))
        .collect();
    let expected: Vec<_> = names.iter().map(|name| (*name, 500)).collect();
    assert_eq!((found, coverage.is_exact), (expected, true));
    let repeated = [0, 1, 2, 1, 2];
    let (matches, _) = reports.prefixes(&repeated, Depth::Usable, Instant::now()).await;
    assert!(matches.iter().all(|one| one.blocks == 3) && matches.len() == 40);
}

#[tokio::test]
async fn a_worker_without_room_is_awaited_and_the_others_stay() {
    let reports = BlockReports::new(limits(3 * WORKER_BYTES + 64 * 1024));
    let now = Instant::now();
    reports.configure(expected(&NAMES), now).unwrap();
    reports
        .replace(snapshot("a", 0, (0..100).collect()))
        .await
        .unwrap();
    let large = reports.replace(snapshot("b", 0, (0..5000).collect())).await;
    assert_eq!(large, Err(BlockReportError::NoRoom));
    reports.replace(snapshot("b", 0, vec![0])).await.unwrap();
    let mut last = Ok(());
    for seq in 1..10 {
        let first = i64::try_from(seq).unwrap() * 1000;
        let store = action(ExternalKvActionType::Report, 1, (first..first + 1000).collect());
        last = reports.apply(batch("b", seq, vec![store]), now).map(|_| ());
        if last.is_err() {
            break;
        }
    }
    assert_eq!(last, Err(BlockReportError::NoRoom));
    assert_eq!(
        told(&reports, Depth::Usable, now).await,
        (vec![("a".to_owned(), 12)], false)
    );
    let kept = reports.kept.read();
    let bytes: usize = kept.workers.values().map(ReportedWorker::bytes).sum();
    assert_eq!(kept.bytes, bytes, "what went is counted");
}

#[tokio::test]
async fn a_batch_that_clears_a_tier_often_walks_over_all_blocks_once() {
    use ExternalKvActionType::{ClearAllAtTier, Report};
    let (reports, now) = (reports(), Instant::now());
    reports.configure(expected(&["a"]), now).unwrap();
    reports.replace(snapshot("a", 0, vec![0, 1])).await.unwrap();
    let clear = || action(ClearAllAtTier, 2, vec![]);
    let mut actions: Vec<_> = (0..80)
        .flat_map(|hash| [clear(), action(Report, 2, vec![hash]), clear()])
        .collect();
    actions.push(action(Report, 2, vec![2]));
    reports.apply(batch("a", 1, actions), now).unwrap();
    assert_eq!(told(&reports, Depth::Usable, now).await.0, [("a".to_owned(), 3)]);
    let kept = reports.kept.read();
    let blocks = &kept.workers["a"].blocks;
    assert_eq!(blocks.walks, 1);
    assert!(
        blocks
            .get(1)
            .unwrap()
            .at(TierPlace::of_wire(2).unwrap())
            .is_none()
    );
}

#[test]
fn a_batch_that_is_wrong_changes_nothing() {
    use ExternalKvActionType::{Report, Unknown};
    let (reports, now) = (reports(), Instant::now());
    reports.configure(expected(&["a"]), now).unwrap();
    let unaligned = ExternalKvAction {
        component_masks: vec![1],
        ..action(Report, 1, vec![1, 2])
    };
    let code = |request: ApplyExternalKvBatchRequest| {
        tonic::Status::from(reports.apply(request, now).unwrap_err()).code()
    };
    use tonic::Code::{FailedPrecondition, InvalidArgument, ResourceExhausted};
    assert_eq!(code(batch("a", 1, vec![unaligned])), InvalidArgument);
    assert_eq!(
        code(batch("a", 1, vec![action(Report, 0, vec![1])])),
        InvalidArgument
    );
    assert_eq!(
        code(batch("a", 1, vec![action(Unknown, 1, vec![1])])),
        InvalidArgument
    );
    assert_eq!(code(batch("", 1, vec![])), InvalidArgument);
    assert_eq!(code(batch(&"a".repeat(300), 1, vec![])), InvalidArgument);
    let long = (0..20_000).collect();
    assert_eq!(
        code(batch("a", 1, vec![action(Report, 1, long)])),
        ResourceExhausted
    );
    let unnumbered = ApplyExternalKvBatchRequest {
        enforce_sequence: false,
        ..batch("a", 1, vec![])
    };
    assert_eq!(code(unnumbered), FailedPrecondition);
    let many: Vec<String> = (0..=WORKERS_MAX).map(|number| number.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let too_many = reports.configure(expected(&many), now);
    assert_eq!(too_many, Err(BlockReportError::TooManyWorkers(WORKERS_MAX + 1)));
}
