//! Tests of answers about engines that look ahead, that is, hash each block together with the token after it.

use std::time::{Duration, Instant};

use kvatlas_core::wire::{Hint, PredictedHolder};

use super::*;

const AHEAD: [&[u32]; 2] = [&[1, 2, 3, 4, 5], &[5, 6, 7, 8, 9]];
const LOOKS: [DegradedReason; 1] = [DegradedReason::LooksAhead];

/// The prompt of the tokens from 1 to `last`.
fn up_to(last: u32) -> QueryKey {
    prompt(&(1..=last).collect::<Vec<u32>>(), None, None)
}

#[test]
fn engines_that_look_ahead_are_found_by_tokens() {
    let scene = Scene::new();
    let _plain = scene.add("plain", &[&[1, 2, 3, 4]], &[]);
    let lost = scene.add("ahead", &AHEAD, &LOOKS);
    let by = |tokens: &[u32]| scene.found(&prompt(tokens, None, None));
    let plain = ("plain", 1, true);
    let found = by(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(found, (who(&[("ahead", 2, true), plain]), true));
    // The prompt has another token after the second block, or no token.
    let found = by(&[1, 2, 3, 4, 5, 6, 7, 8, 10]);
    assert_eq!(found, (who(&[("ahead", 1, true), plain]), true));
    assert_eq!(
        by(&[1, 2, 3, 4, 5, 6, 7, 8]),
        (who(&[("ahead", 1, true), plain]), true)
    );
    assert_eq!(by(&[1, 2, 3, 4, 6]), (who(&[plain]), true));
    // By hashes, the holder is found if the hashes look ahead. Otherwise it is not known whether the holder has the
    // blocks.
    let hashes = |blocks: &[&[u32]]| {
        let hash = |tokens: &&[u32]| block_hash(tokens, HashSeed::default());
        QueryKey::BlockHashes(blocks.iter().map(hash).collect())
    };
    assert_eq!(scene.found(&hashes(&AHEAD)), (who(&[("ahead", 2, true)]), true));
    assert_eq!(scene.found(&hashes(&[&[1, 2, 3, 4]])), (who(&[plain]), false));
    // The list is cut, and each holder in doubt is counted once.
    lost.status().degrade(DegradedReason::UpstreamGap);
    let long = prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9], None, None);
    let whole = scene.ask(long.clone(), None);
    assert_eq!(
        (whole.holders.len(), whole.holders_total, whole.doubtful_holders),
        (2, 2, 0)
    );
    let short = prompt(&[1, 2, 3, 4, 9], None, None);
    assert_eq!(scene.ask(short, None).doubtful_holders, 1);
    let _other = scene.add("better", &[&[1, 2, 3, 4], &[5, 6, 7, 8]], &[]);
    let cut = scene.ask(long, Some(1));
    assert_eq!(
        (
            cut.holders[0].worker.as_str(),
            cut.holders_total,
            cut.doubtful_holders
        ),
        ("ahead", 3, 0)
    );
}

#[test]
fn engines_that_hash_pairs_compute_the_last_two_tokens() {
    let scene = Scene::new();
    let reasons = [DegradedReason::LooksAhead, DegradedReason::HashesPairs];
    let _single = scene.add("single", &AHEAD, &LOOKS);
    let _pairs = scene.add("pairs", &AHEAD, &reasons);
    let first = |limit: Option<u32>, tokens: u32| {
        let tokens: Vec<u32> = (1..=tokens).collect();
        let reply = scene.ask(prompt(&tokens, None, None), limit);
        let holders = reply.holders.iter();
        let found = holders.map(|holder| {
            (
                holder.worker.to_string(),
                holder.matched_blocks,
                holder.usable(),
                holder.exact,
            )
        });
        found.collect::<Vec<_>>()
    };
    let usable = |tokens| first(None, tokens);
    let found = |name: &str, matched, usable| (name.to_owned(), matched, usable, true);
    // Of 9 tokens, 8 can be reused, or 7 by pairs.
    assert_eq!(usable(9), [found("single", 2, 2), found("pairs", 2, 1)]);
    assert_eq!(usable(10), [found("pairs", 2, 2), found("single", 2, 2)]);
    assert_eq!(usable(5), [found("single", 1, 1), found("pairs", 1, 0)]);
    // A limit keeps the best.
    assert_eq!(first(Some(1), 9), [found("single", 2, 2)]);
}

#[test]
fn an_engine_that_looks_ahead_and_is_lost_between_the_two_searches_is_counted() {
    let scene = Scene::new();
    let _plain = scene.add("plain", &[&[1, 2, 3, 4]], &[]);
    let mut lost = scene.add("ahead", &[&[1, 2, 3, 4, 5]], &[DegradedReason::LooksAhead]);
    let query = SingleQuery::new(prompt(&[1, 2, 3, 4, 5], None, None));
    let (answerer, indexer) = (&scene.answerer, &scene.namespace.indexer);
    let doubts = answerer.doubts(&scene.namespace, &query.key);
    let asked = QueryLength::of(&query, 1, indexer);
    let search = |search: Search<'_>| indexer.find_matches(&query.key, search).unwrap();
    let found = || answerer.searched(&doubts, &query, true, asked, search);
    let ((mut calm, calm_doubted), (mut reply, doubted)) = (found(), found());
    answerer.add_ahead(&doubts, &query, &mut calm, &calm_doubted);
    assert_eq!((calm.holders.len(), calm.doubtful_holders), (2, 0));
    lost.apply(Event::Cleared, Tier::DEVICE, 0);
    lost.status().degrade(DegradedReason::Gap);
    answerer.add_ahead(&doubts, &query, &mut reply, &doubted);
    assert_eq!((reply.holders.len(), reply.doubtful_holders), (1, 1));
}

/// A test that the end of one holder's doubt does not hide that another one has been lost meanwhile.
#[test]
fn a_doubt_that_ends_between_the_two_searches_hides_no_lost_holder() {
    let scene = Scene::new();
    let plain = scene.add("plain", &[&[1, 2, 3, 4]], &[DegradedReason::Stale]);
    let mut lost = scene.add("ahead", &[&[1, 2, 3, 4, 5]], &LOOKS);
    let query = SingleQuery::new(up_to(5));
    let (answerer, indexer) = (&scene.answerer, &scene.namespace.indexer);
    let doubts = answerer.doubts(&scene.namespace, &query.key);
    let asked = QueryLength::of(&query, 1, indexer);
    let search = |search: Search<'_>| indexer.find_matches(&query.key, search).unwrap();
    let (mut reply, doubted) = answerer.searched(&doubts, &query, true, asked, search);
    assert_eq!((reply.holders.len(), reply.doubtful_holders), (1, 0));
    plain.status().recover(DegradedReason::Stale);
    lost.apply(Event::Cleared, Tier::DEVICE, 0);
    lost.status().degrade(DegradedReason::Gap);
    answerer.add_ahead(&doubts, &query, &mut reply, &doubted);
    assert_eq!((reply.holders.len(), reply.doubtful_holders), (1, 1));
}

#[test]
fn a_doubt_about_a_tier_leaves_answers_about_engines_that_look_ahead_exact() {
    let scene = Scene::new();
    let reasons = [DegradedReason::LooksAhead, DegradedReason::HostGap];
    let _ahead = scene.add("ahead", &AHEAD, &reasons);
    assert_eq!(scene.found(&up_to(9)), (who(&[("ahead", 2, true)]), true));
    // Blocks after those on the device may be on the host.
    assert_eq!(scene.found(&up_to(13)), (who(&[("ahead", 2, false)]), false));
    let _plain = scene.add(
        "plain",
        &[&[1, 2, 3, 4], &[5, 6, 7, 8]],
        &[DegradedReason::HostGap],
    );
    let _sure = scene.add("sure", &AHEAD[..1], &LOOKS);
    let all = who(&[("ahead", 2, true), ("plain", 2, true), ("sure", 1, true)]);
    assert_eq!(scene.found(&up_to(9)), (all, true));
    // Each of the first two is in doubt where it is not listed.
    for (limit, doubtful) in [(3, 0), (2, 0), (1, 1), (0, 2)] {
        let cut = scene.ask(up_to(9), Some(limit));
        assert_eq!(cut.holders.len(), limit as usize);
        assert_eq!(
            (cut.holders_total, cut.doubtful_holders),
            (3, doubtful),
            "{limit}"
        );
    }
}

#[test]
fn an_explanation_tells_blocks_that_tokens_do_not_determine() {
    let scene = Scene::new();
    let _ahead = scene.add("ahead", &AHEAD, &LOOKS);
    let explained = |last: u32, token_count| {
        let mut query = SingleQuery::new(up_to(last));
        (query.options.explain, query.token_count) = (true, token_count);
        let reply = scene.answerer.answer_one(&scene.namespace.name, &query).unwrap();
        let holder = reply.holders.into_iter().next().unwrap();
        let dropped_out = holder.dropped_out.map(|dropped| dropped.position);
        (holder.matched_blocks, holder.limited_by, dropped_out)
    };
    assert_eq!(explained(9, None), (2, None, None));
    // The token after the second block is not known.
    assert_eq!(explained(8, None), (1, Some(Limit::LastToken), None));
    assert_eq!(explained(8, Some(9)), (1, Some(Limit::LastToken), None));
    assert_eq!(explained(13, None), (2, Some(Limit::FullAttention), Some(2)));
}

#[test]
fn hints_about_engines_that_look_ahead_come_true() {
    let mut scene = Scene::new();
    let hints = Arc::new(Hints::new(None, Duration::from_secs(600), 1 << 20));
    scene.answerer.hints = Some(Arc::clone(&hints));
    let (name, now) = (scene.namespace.name.clone(), Instant::now());
    let mut ahead = scene.add("ahead", &AHEAD[..1], &LOOKS);
    let _plain = scene.add("plain", &[&[1, 2, 3, 4]], &[]);
    let hint = |worker: &str, last| Hint {
        worker: WorkerName::new(worker).unwrap(),
        rank: 0,
        prompt: SingleQuery::new(up_to(last)),
    };
    let answerer = &scene.answerer;
    let predicted = || {
        let mut query = SingleQuery::new(up_to(9));
        query.options.predicted = true;
        let reply = answerer.answer_one(&name, &query).unwrap();
        let blocks = |holder: PredictedHolder| (holder.worker.to_string(), holder.blocks);
        reply.predicted.into_iter().map(blocks).collect::<Vec<_>>()
    };
    // What is known already is not predicted.
    answerer.take_hints(&name, &[hint("ahead", 5)], now).unwrap();
    assert!(predicted().is_empty());
    answerer
        .take_hints(&name, &[hint("plain", 9), hint("ahead", 9)], now)
        .unwrap();
    let two = |worker: &str| (worker.to_owned(), 2);
    assert_eq!(predicted(), [two("ahead"), two("plain")]);
    let hashes = AHEAD.map(|tokens| block_hash(tokens, HashSeed::default()));
    let stored = StoredBlocks::by_sequence(None, None, sequence_hashes(hashes).collect());
    ahead.apply(Event::Stored(stored), Tier::DEVICE, 0);
    answerer.look_at_hints(64, now);
    // After the hint has come true, only events tell what the holder has.
    ahead.apply(Event::Cleared, Tier::DEVICE, 0);
    assert_eq!(predicted(), [two("plain")]);
}
