//! Tests of the number of blocks that a request can reuse.

use super::*;

/// Adds a holder of ten blocks. The first four blocks and the eighth are resumable on the device. The last two blocks
/// lie on the host.
fn partly_resumable(answerer: &Answerer) {
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    let worker = WorkerName::new("partly").unwrap();
    let mut writer = namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap();
    let hashes: Vec<SequenceHash> = (100..110).map(SequenceHash).collect();
    let on_device = StoredBlocks {
        resumable: Resumable::from_flags((0..8).map(|block| block < 4 || block == 7)),
        ..StoredBlocks::by_sequence(None, None, hashes[..8].to_vec())
    };
    let on_host = StoredBlocks::by_sequence(Some(hashes[7]), None, hashes[8..].to_vec());
    writer.apply(Event::Stored(on_device), Tier::DEVICE, 0);
    writer.apply(Event::Stored(on_host), Tier::new(1).unwrap(), 0);
}

#[test]
fn an_answer_says_how_many_blocks_a_request_can_reuse() {
    let answerer = answerer();
    partly_resumable(&answerer);
    let ask = |blocks: u64, token_count| {
        let query = SingleQuery {
            token_count,
            options: QueryOptions {
                tiers: true,
                ..QueryOptions::default()
            },
            ..SingleQuery::new(QueryKey::SequenceHashes(
                (100..100 + blocks).map(SequenceHash).collect(),
            ))
        };
        let payload = QueryRequest::Single(query).encode();
        let answer = answerer.answer_query("kvatlas.v1.query.n", &payload, usize::MAX);
        let reply = QueryReply::decode(&answer.unwrap().payload).unwrap();
        let [holder] = &reply.holders[..] else {
            panic!("{reply:?}")
        };
        (
            (holder.matched_blocks, holder.usable_blocks),
            (holder.device_blocks, holder.device_usable_blocks),
            (holder.host_blocks, holder.host_usable_blocks),
        )
    };
    assert_eq!(
        ask(10, None),
        ((10, None), (Some(8), None), (Some(10), None)),
        "what is usable is not said where it is all"
    );
    assert_eq!(
        ask(7, None),
        ((7, Some(4)), (Some(7), Some(4)), (Some(7), Some(4)))
    );
    // Blocks have 16 tokens, and the last token is computed anyway.
    assert_eq!(ask(10, Some(161)).0, (10, None));
    assert_eq!(
        ask(10, Some(160)),
        ((10, Some(9)), (Some(8), None), (Some(10), Some(9)))
    );
    assert_eq!(ask(8, Some(128)).0, (8, Some(4)));
    assert_eq!(ask(2, Some(0)).0, (2, Some(0)));
}

#[test]
fn an_explanation_names_what_limits_a_holder() {
    let answerer = answerer();
    partly_resumable(&answerer);
    let limit = |blocks: u64, token_count| {
        let query = SingleQuery {
            token_count,
            options: QueryOptions {
                explain: true,
                ..QueryOptions::default()
            },
            ..SingleQuery::new(QueryKey::SequenceHashes(
                (100..100 + blocks).map(SequenceHash).collect(),
            ))
        };
        let payload = QueryRequest::Single(query).encode();
        let answer = answerer.answer_query("kvatlas.v1.query.n", &payload, usize::MAX);
        QueryReply::decode(&answer.unwrap().payload).unwrap().holders[0].limited_by
    };
    assert_eq!(limit(10, None), None);
    assert_eq!(limit(12, None), Some(Limit::FullAttention));
    assert_eq!(limit(7, None), Some(Limit::WindowOrState));
    assert_eq!(limit(10, Some(160)), Some(Limit::LastToken));
    // The last token excludes the eighth block, and the windows exclude the blocks before it.
    assert_eq!(limit(8, Some(128)), Some(Limit::WindowOrState));
    let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
    let holders = namespace
        .indexer
        .holders_of(&[WorkerName::new("partly").unwrap()]);
    let holder = holders.first().unwrap();
    for (layers, expected) in [
        ("windows", Limit::Window),
        ("states", Limit::State),
        ("windows+states", Limit::WindowOrState),
    ] {
        holder.status.set_profile(Profile {
            address: None,
            labels: Labels::NONE.with(LAYERS_LABEL, layers).unwrap(),
        });
        assert_eq!(limit(7, None), Some(expected));
        assert_eq!(limit(12, None), Some(Limit::FullAttention));
    }
}

#[test]
fn dialects_answer_what_a_request_reuses_or_what_full_attention_has() {
    let answerer = answerer();
    partly_resumable(&answerer);
    let name = NamespaceName::new("n").unwrap();
    let key = QueryKey::SequenceHashes((100..107).map(SequenceHash).collect());
    let depths = |depth| {
        let reply = answerer.answer_one(&name, &dialect_query(&key, None)).unwrap();
        let found = Found::of_reply(reply, depth).unwrap();
        let holder = &found.holders[0];
        assert_eq!((found.prompt.matched_blocks, found.prompt.usable_blocks), (7, 4));
        (holder.blocks, holder.near_blocks)
    };
    assert_eq!(depths(Depth::Usable), (4, [4, 4]));
    assert_eq!(depths(Depth::Matched), (7, [7, 7]));
}

#[test]
fn chosen_blocks_have_a_lower_bound_of_what_is_usable() {
    let answerer = answerer();
    partly_resumable(&answerer);
    for (positions, expected) in [([0, 6], (7, Some(4))), ([0, 7], (8, None)), ([1, 30], (2, None))] {
        let query = SingleQuery {
            positions: Some(positions.map(|at| Position::new(at).unwrap()).to_vec()),
            ..SingleQuery::new(QueryKey::SequenceHashes(
                positions.map(|at| SequenceHash(100 + at)).to_vec(),
            ))
        };
        let payload = QueryRequest::Single(query).encode();
        let answer = answerer.answer_query("kvatlas.v1.query.n", &payload, usize::MAX);
        let reply = QueryReply::decode(&answer.unwrap().payload).unwrap();
        let found = &reply.holders[0];
        assert_eq!((found.matched_blocks, found.usable_blocks), expected);
    }
}

/// A test that the maximum of engines that hash pairs of tokens cuts to a resumable block.
#[test]
fn pairs_end_at_a_resumable_block() {
    let scene = Scene::new();
    let blocks: Vec<Vec<u32>> = (0..3).map(|at| (1 + 4 * at..=4 + 4 * at).collect()).collect();
    let blocks: Vec<&[u32]> = blocks.iter().map(Vec::as_slice).collect();
    let resumable = |worker: &str, behind: [bool; 3], on_host: bool, reasons: &[DegradedReason]| {
        let mut writer = scene.add(worker, &[], reasons);
        let hashes = blocks
            .iter()
            .map(|tokens| block_hash(tokens, HashSeed::default()));
        let stored = StoredBlocks {
            resumable: Resumable::from_flags(behind),
            ..StoredBlocks::by_sequence(None, None, sequence_hashes(hashes).collect())
        };
        writer.apply(Event::Stored(stored.clone()), Tier::DEVICE, 0);
        if on_host {
            let all = StoredBlocks {
                resumable: Resumable::default(),
                ..stored
            };
            writer.apply(Event::Stored(all), Tier::new(1).unwrap(), 0);
        }
        writer
    };
    let pairs = [DegradedReason::HashesPairs];
    let _writers = [
        resumable("a-state", [true, false, true], false, &pairs),
        resumable("b-last", [false, false, true], false, &pairs),
        resumable("c-single", [false, false, true], false, &[]),
        resumable("d-host", [true, false, true], true, &pairs),
        resumable(
            "e-perhaps",
            [true, false, true],
            false,
            &[DegradedReason::HashesPairs, DegradedReason::HostGap],
        ),
    ];
    let ask = |tokens: u32| {
        let query = SingleQuery {
            options: QueryOptions {
                tiers: true,
                explain: true,
                ..QueryOptions::default()
            },
            ..SingleQuery::new(prompt(&(1..=tokens).collect::<Vec<_>>(), None, None))
        };
        let payload = QueryRequest::Single(query).encode();
        let answer = scene
            .answerer
            .answer_query("kvatlas.v1.query.small", &payload, usize::MAX);
        let reply = QueryReply::decode(&answer.unwrap().payload).unwrap();
        let holders = reply.holders.iter();
        let found = holders.map(|holder| {
            let device = holder.device_usable_blocks.or(holder.device_blocks);
            (
                holder.worker.to_string(),
                holder.usable(),
                device.unwrap(),
                holder.exact,
            )
        });
        found.collect::<Vec<_>>()
    };
    let found = |worker: &str, usable, device, exact| (worker.to_owned(), usable, device, exact);
    // Of 13 tokens, requests reuse 12, or 11 by pairs: two blocks, if they can go on behind them.
    assert_eq!(
        ask(13),
        [
            found("c-single", 3, 3, true),
            found("d-host", 2, 1, true),
            found("a-state", 1, 1, true),
            found("e-perhaps", 1, 1, false),
            found("b-last", 0, 0, true),
        ]
    );
    let all = ["a-state", "b-last", "c-single", "d-host", "e-perhaps"];
    assert_eq!(ask(14), all.map(|worker| found(worker, 3, 3, true)));
}

#[test]
fn tiers_beyond_add_nothing_to_pairs_at_their_end() {
    let scene = Scene::new();
    let hashes = [&[1, 2, 3, 4], &[5, 6, 7, 8], &[9, 10, 11, 12]];
    let hashes = hashes.map(|tokens| block_hash(tokens, HashSeed::default()));
    let mut writer = scene.add("w", &[], &[DegradedReason::HashesPairs, DegradedReason::HostGap]);
    let stored = StoredBlocks {
        resumable: Resumable::from_flags([false, true, false]),
        ..StoredBlocks::by_sequence(None, None, sequence_hashes(hashes).collect())
    };
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    let query = SingleQuery {
        options: QueryOptions {
            explain: true,
            ..QueryOptions::default()
        },
        ..SingleQuery::new(prompt(&(1..=13).collect::<Vec<_>>(), None, None))
    };
    let payload = QueryRequest::Single(query).encode();
    let answer = scene
        .answerer
        .answer_query("kvatlas.v1.query.small", &payload, usize::MAX);
    let reply = QueryReply::decode(&answer.unwrap().payload).unwrap();
    let [holder] = reply.holders.as_slice() else {
        panic!("one holder");
    };
    assert_eq!(
        (holder.matched_blocks, holder.usable(), holder.exact),
        (3, 2, true)
    );
    assert_eq!(holder.limited_by, Some(Limit::LastToken));
}

#[test]
fn an_answer_about_pairs_is_of_one_search() {
    let scene = Scene::new();
    let tokens: Vec<u32> = (1..=13).collect();
    let blocks: Vec<&[u32]> = tokens.chunks_exact(4).collect();
    let pairs = [DegradedReason::HashesPairs];
    let mut goes = scene.add("goes", &blocks, &pairs);
    let _stays = scene.add("stays", &blocks, &pairs);
    let name = NamespaceName::new("small").unwrap();
    let namespace = scene.answerer.namespace(&name).unwrap();
    let query = SingleQuery::new(prompt(&tokens, None, None));
    let doubts = scene.answerer.doubts(&namespace, &query.key);
    let indexer = &namespace.indexer;
    let asked = QueryLength::of(&query, 3, indexer);
    let mut searches = 0;
    let (reply, _) = scene.answerer.searched(&doubts, &query, true, asked, |search| {
        searches += 1;
        if searches == 2 {
            goes.apply(Event::Cleared, Tier::DEVICE, 0);
        }
        indexer.find_matches(&query.key, search).unwrap()
    });
    let holders: Vec<_> = reply
        .holders
        .iter()
        .map(|holder| holder.worker.as_str())
        .collect();
    assert_eq!((searches, holders), (2, vec!["stays"]));
}
