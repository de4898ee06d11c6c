//! Tests of the harness that judges replies: the replies that it calls wrong, and a scenario without faults.

use crate::support::truth::{Tally, Truth, Verdict, Window, Workload, ask_all, settle};
use crate::support::{Client, broker, daemon};
use kvatlas_core::wire::{BatchCursor, DegradedReason, DegradedReasons, HolderMatch, QueryReply, Tier};

#[test]
fn an_exact_claim_is_judged_by_the_states_of_its_window() {
    let truth = Truth::default();
    let chain = crate::support::hashes(1, 3);
    let at = |seq| BatchCursor { epoch: 1, seq };
    let claim = |matched_blocks, exact| QueryReply {
        behind_us: 0,
        predicted: Vec::new(),
        v: 1,
        query_blocks: 3,
        block_size: 16,
        holders: vec![HolderMatch {
            exact,
            ..HolderMatch::new(crate::support::worker("a"), 0, matched_blocks)
        }],
        holders_total: 1,
        foreign_holders: 0,
        doubtful_holders: 0,
        gathered: None,
        unseen_blocks_max: 0,
    };
    let judge = |window: &Window, reply: QueryReply| truth.judge(window, &chain, Ok(&reply));
    truth.apply(
        "a",
        0,
        at(1),
        &[crate::support::stored(crate::support::hashes(1, 3))],
    );
    truth.apply(
        "a",
        0,
        at(2),
        &[crate::support::removed(crate::support::hashes(2, 1))],
    );
    // Until the daemon is known to have seen the removal, the state before it, the state after it, and all states
    // between them are right.
    let early = truth.window();
    for matched in 1..=3 {
        assert_eq!(judge(&early, claim(matched, true)), Verdict::Exact);
    }
    truth.raise_floor("a", 0, at(2));
    let late = truth.window();
    assert!(matches!(judge(&late, claim(3, true)), Verdict::Wrong(_)));
    assert_eq!(judge(&late, claim(3, false)), Verdict::Degraded);
    for (also, verdict) in [
        (DegradedReason::Behind, Verdict::Momentary),
        (DegradedReason::Unverified, Verdict::Momentary),
        (DegradedReason::Gap, Verdict::Degraded),
    ] {
        let mut changing = claim(3, false);
        changing.holders[0].degraded = DegradedReasons::of(DegradedReason::Changing).with(also);
        assert_eq!(judge(&late, changing), verdict);
    }
    assert_eq!(judge(&late, claim(1, true)), Verdict::Exact);
    // A holder that does not exist is wrong, and an answer without holders is blind.
    let nobody = QueryReply {
        holders: Vec::new(),
        ..claim(0, true)
    };
    assert!(matches!(judge(&late, nobody), Verdict::Blind(_)));
    // A new epoch has no blocks of the old one.
    let fresh = BatchCursor { epoch: 2, seq: 1 };
    truth.apply("a", 0, fresh, &[]);
    truth.raise_floor("a", 0, fresh);
    assert!(matches!(
        judge(&truth.window(), claim(1, true)),
        Verdict::Wrong(_)
    ));
    assert!(truth.expected(&chain).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_faults_every_reply_is_exact_and_none_is_blind() {
    const BATCHES: u64 = 300;
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let (truth, mut workload, mut tally) = (Truth::default(), Workload::new(1, 16), Tally::default());
    let prompts = workload.prompts().to_vec();
    let mut publishers: Vec<_> = ["gpu-0", "gpu-1", "gpu-2"]
        .map(|name| (name, client.publisher(name, 0)))
        .into();
    for number in 0..BATCHES {
        let which = usize::try_from(workload.below(3)).unwrap();
        let (name, publisher) = &mut publishers[which];
        let cursor = BatchCursor {
            seq: publisher.cursor().seq + 1,
            ..publisher.cursor()
        };
        let events = workload.events();
        truth.apply(name, 0, cursor, &events);
        publisher.publish(Tier::DEVICE, events).await.unwrap();
        if number % 20 == 0 {
            ask_all(&client, &truth, &prompts, &mut tally).await;
            truth.raise_floors(&client.status().await.unwrap());
        }
    }
    settle(&client, &truth, &prompts, &mut tally).await;
    tally.report("no faults");
    // A query may come while a batch is being applied, which takes a while on a busy machine.
    assert_eq!((tally.degraded - tally.momentary, tally.blind), (0, 0), "{tally}");
    assert!(tally.momentary * 20 <= tally.asked, "{tally}");
    daemon.stop().await;
}
