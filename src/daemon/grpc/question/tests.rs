//! Tests of the answers to SGLang's routers.

use kvatlas_core::wire::{HolderId, WorkerName};
use kvatlas_telemetry::AnsweredPrompt;
use kvatlas_telemetry::labels::AnswerState;

use super::*;

fn holder(worker: &str, rank: u32, depths: [u32; 3], address: Option<&str>, is_exact: bool) -> FoundHolder {
    let [device, with_host, blocks] = depths;
    FoundHolder {
        id: HolderId {
            worker: WorkerName::new(worker).unwrap(),
            rank,
        },
        blocks,
        near_blocks: [device, with_host],
        matched_blocks: blocks,
        near_matched_blocks: [device, with_host],
        is_exact,
        near_exact: [is_exact; 2],
        address: address.map(|address| address.parse().unwrap()),
    }
}

fn found(holders: Vec<FoundHolder>, doubtful_holders: u32) -> Found {
    Found {
        block_size: 64,
        prompt: AnsweredPrompt {
            asked_blocks: 9,
            matched_blocks: 0,
            usable_blocks: 0,
            state: AnswerState::Exact,
        },
        holders,
        foreign_holders: 0,
        doubtful_holders,
    }
}

fn certain(holders: Vec<FoundHolder>, doubtful_holders: u32) -> Certain {
    let mut certain = Certain {
        is_exact: true,
        ..Certain::default()
    };
    let mut found = found(holders, doubtful_holders);
    found.lend_addresses(|_| Vec::new());
    certain.add(&found);
    certain.name_all(|_| false);
    certain
}

fn told(certain: &Certain) -> Vec<(String, u32, String)> {
    let (matches, _) = certain.matches(&GrpcMetrics::new());
    matches
        .into_iter()
        .map(|found| (found.worker_address, found.matched_prefix_blocks, found.worker_id))
        .collect()
}

#[test]
fn each_address_is_told_once_with_the_deepest_that_is_certain() {
    // The address of a discovered engine has no scheme.
    let (a, b) = (Some("http://a:30000"), Some("b:30000"));
    let holders = vec![
        holder("a", 0, [1, 2, 3], a, true),
        holder("a", 1, [2, 2, 2], a, true),
        holder("b_d1", 0, [4, 4, 4], b, true),
        // The worker of `b_d1` has restarted under another name, at the same address.
        holder("b_d0", 0, [1, 1, 1], b, true),
        holder("nowhere", 0, [9, 9, 9], None, true),
        holder("_pstore", 0, [0, 0, 9], Some("http://p:1"), true),
        holder("empty", 0, [0, 0, 0], Some("http://e:1"), true),
    ];
    let all = certain(holders.clone(), 0);
    let expected = [
        ("http://b:30000".to_owned(), 4, "b.1".to_owned()),
        ("http://a:30000".to_owned(), 3, "a".to_owned()),
    ];
    assert_eq!(
        (told(&all).as_slice(), all.is_exact, all.asked),
        (&expected[..], true, 9)
    );
    assert!(!certain(holders.clone(), 1).is_exact, "others may have more");
    let doubted = holder("c", 0, [9, 9, 9], Some("http://c:1"), false);
    let some = certain([holders, vec![doubted]].concat(), 0);
    assert_eq!((told(&some).as_slice(), some.is_exact), (&expected[..], false));
}

#[test]
fn a_name_means_the_same_worker_whoever_has_the_prompt() {
    let mut one = certain(vec![holder("gpu_u0", 0, [1; 3], Some("http://a:1"), true)], 0);
    let name = |found: &Certain| told(found).remove(0).2;
    assert_eq!(name(&one), "gpu_0");
    one.name_all(|worker| worker.as_str() == "gpu_0");
    assert_eq!(name(&one), "gpu_u0");
}

#[test]
fn an_answer_that_leaves_out_a_worker_does_not_list_all() {
    let lists_all = |depths, address| {
        let known = holder("a", 0, [1; 3], Some("http://a:30000"), true);
        let found = certain(vec![known, holder("b", 0, depths, address, true)], 0);
        found.matches(&GrpcMetrics::new()).1
    };
    assert!(!lists_all([2; 3], None));
    assert!(lists_all([2; 3], Some("b:30000")));
    assert!(lists_all([0; 3], None), "it has none of the blocks");
}

#[test]
fn ranks_with_addresses_of_their_own_are_told_apart() {
    let (a, b) = (Some("http://h:6000"), Some("http://h:6001"));
    let all = certain(
        vec![
            holder("u", 0, [3, 3, 3], a, true),
            holder("u", 1, [1, 1, 5], b, true),
        ],
        0,
    );
    let expected = [
        ("http://h:6001".to_owned(), 5, "u".to_owned()),
        ("http://h:6000".to_owned(), 3, "u".to_owned()),
    ];
    assert_eq!(told(&all), expected);
    assert_eq!(all.workers[0].near_blocks, [3, 3]);
    assert_eq!(all.workers[1].near_blocks, [1, 1]);
}

#[test]
fn tiers_at_one_address_are_those_of_one_rank() {
    let (a, b) = (Some("http://h:6000"), Some("http://h:6001"));
    let tiers = |ranks: [([u32; 3], Option<&str>); 2]| {
        let [first, second] = ranks;
        let ranks = vec![
            holder("u", 0, first.0, first.1, true),
            holder("u", 1, second.0, second.1, true),
        ];
        let workers = certain(ranks, 0).workers.into_iter();
        workers
            .map(|worker| (worker.reach(), url_of(&worker)))
            .collect::<Vec<_>>()
    };
    let at_a = |reach| vec![(reach, "http://h:6000".to_owned())];
    assert_eq!(tiers([([3, 3, 3], a), ([1, 1, 5], a)]), at_a([5, 1, 1]));
    assert_eq!(tiers([([1, 5, 5], a), ([3, 3, 5], a)]), at_a([5, 3, 3]));
    // A rank without an address is where the worker's other ranks are.
    assert_eq!(tiers([([3, 3, 3], None), ([1, 1, 5], a)]), at_a([5, 1, 1]));
    let three = [holder("u", 0, [1; 3], a, true), holder("u", 1, [1; 3], b, true)];
    // The rank at the other address may be in doubt, or have no block of the prompt.
    let lent = |others: &[FoundHolder], elsewhere: Option<&str>| {
        let mut found = found([others, &[holder("u", 2, [1; 3], None, true)]].concat(), 0);
        found.lend_addresses(|_| elsewhere.into_iter().flat_map(str::parse).collect());
        found.holders.pop().unwrap().address
    };
    assert_eq!(lent(&three, None), None, "it may be at either");
    let doubted = [three[0].clone(), holder("u", 1, [1; 3], b, false)];
    assert_eq!(lent(&doubted, None), None);
    assert_eq!(lent(&three[..1], b), None);
    assert_eq!(lent(&three[..1], a), three[0].address);
}

#[test]
fn tiers_have_the_blocks_behind_those_of_nearer_ones() {
    let of_tiers = |depths| {
        let found = tiers_of(
            &holder("b_d1", 0, depths, None, true),
            "b.1".to_owned(),
            &[1, 2, -3, 4],
        );
        assert_eq!((found.worker_id.as_str(), found.address.as_str()), ("b.1", ""));
        let tiers = found.hashes_by_tier.into_iter();
        tiers.map(|tier| (tier.tier, tier.hashes)).collect::<Vec<_>>()
    };
    assert_eq!(
        of_tiers([1, 2, 4]),
        [(1, vec![1]), (2, vec![2]), (3, vec![-3, 4])]
    );
    assert_eq!(of_tiers([0, 0, 1]), [(3, vec![1])]);
    // Blocks beyond the question's hashes are not listed.
    assert_eq!(of_tiers([9, 9, 9]), [(1, vec![1, 2, -3, 4])]);
}

#[test]
fn a_shard_that_does_not_understand_the_query_is_not_the_routers_fault() {
    for code in [ErrorCode::BadRequest, ErrorCode::UnsupportedVersion] {
        assert_eq!(code_of(code), Code::Unavailable);
    }
}
