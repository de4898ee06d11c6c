//! Replies in the test vectors: their meaning, and their bytes.

use kvatlas_core::wire::{
    Address, BatchReply, DegradedReason, DegradedReasons, DropOut, ErrorBody, Gathered, HolderMatch,
    HolderStatusReply, Limit, PredictedHolder, QueryReply, QueryResult, StatusReply, WorkerName,
};
use serde_json::{Value, json};

use super::batches::profile;
use super::{hex, lineage_chain};

fn holder(worker: &str, rank: u32, matched_blocks: u32) -> HolderMatch {
    HolderMatch::new(WorkerName::new(worker).unwrap(), rank, matched_blocks)
}

fn reply(holders: Vec<HolderMatch>) -> QueryReply {
    QueryReply {
        behind_us: 0,
        predicted: Vec::new(),
        v: 1,
        query_blocks: 2,
        block_size: 16,
        holders_total: u32::try_from(holders.len()).unwrap(),
        holders,
        foreign_holders: 0,
        doubtful_holders: 0,
        gathered: None,
        unseen_blocks_max: 0,
    }
}

fn words(reasons: DegradedReasons) -> Vec<&'static str> {
    reasons.iter().map(DegradedReason::as_str).collect()
}

fn gathered_meaning(gathered: Option<&Gathered>) -> Option<Value> {
    gathered.map(|gathered| json!({ "shards": gathered.shards, "missing": gathered.missing }))
}

/// Returns a holder with all its fields, including those that the payload leaves out.
fn holder_meaning(holder: &HolderMatch) -> Value {
    let drop_out = holder.dropped_out.as_ref().map(|drop_out| {
        json!({
            "position": drop_out.position,
            "lineage_hash": hex(&drop_out.lineage_hash.to_be_bytes()),
            "other_holders": drop_out.other_holders,
        })
    });
    json!({
        "worker": holder.worker.as_str(),
        "rank": holder.rank,
        "matched_blocks": holder.matched_blocks,
        "matched_blocks_max": holder.blocks_max(),
        "usable_blocks": holder.usable(),
        "device_blocks": holder.device_blocks,
        "host_blocks": holder.host_blocks,
        "device_usable_blocks": holder.device_usable_blocks.or(holder.device_blocks),
        "host_usable_blocks": holder.host_usable_blocks.or(holder.host_blocks),
        "exact": holder.exact,
        "degraded": words(holder.degraded),
        "dropped_out": drop_out,
        "limited_by": holder.limited_by.map(Limit::as_str),
        "address": holder.address,
        "labels": holder.labels,
    })
}

fn reply_meaning(reply: &QueryReply) -> Value {
    json!({
        "query_blocks": reply.query_blocks,
        "block_size": reply.block_size,
        "holders": reply.holders.iter().map(holder_meaning).collect::<Vec<_>>(),
        "holders_total": reply.holders_total,
        "foreign_holders": reply.foreign_holders,
        "doubtful_holders": reply.doubtful_holders,
        "unseen_blocks_max": reply.unseen_blocks_max,
        "gathered": gathered_meaning(reply.gathered.as_ref()),
        "predicted": reply.predicted.iter().map(predicted_meaning).collect::<Vec<_>>(),
    })
}

fn predicted_meaning(predicted: &PredictedHolder) -> Value {
    json!({
        "worker": predicted.worker.as_str(),
        "rank": predicted.rank,
        "blocks": predicted.blocks,
        "address": predicted.address,
    })
}

pub(super) fn query_replies() -> Vec<Value> {
    let doubted = HolderMatch {
        exact: false,
        degraded: DegradedReasons::of(DegradedReason::Gap).with(DegradedReason::Resyncing),
        dropped_out: Some(DropOut {
            position: 1,
            lineage_hash: lineage_chain()[1],
            other_holders: 3,
        }),
        limited_by: Some(Limit::FullAttention),
        ..holder("gpu-1", 5, 1)
    };
    let tiered = HolderMatch {
        device_blocks: Some(0),
        host_blocks: Some(1),
        ..holder("gpu-2", 0, 2)
    };
    let usable = HolderMatch {
        usable_blocks: Some(1),
        device_blocks: Some(2),
        host_blocks: Some(2),
        device_usable_blocks: Some(0),
        host_usable_blocks: Some(1),
        ..holder("gpu-3", 0, 2)
    };
    let compressed = QueryReply {
        query_blocks: 4096,
        block_size: 16,
        unseen_blocks_max: 63,
        ..reply(vec![HolderMatch {
            matched_blocks_max: Some(127),
            ..holder("gpu-0", 0, 64)
        }])
    };
    let gathered = QueryReply {
        holders_total: 9,
        foreign_holders: 2,
        doubtful_holders: 3,
        gathered: Some(Gathered {
            shards: 3,
            missing: vec![1],
        }),
        ..reply(vec![holder("gpu-0", 0, 2)])
    };
    let hinted = |worker: &str, rank, blocks, address| PredictedHolder {
        worker: WorkerName::new(worker).unwrap(),
        rank,
        blocks,
        address,
    };
    let predicted = QueryReply {
        predicted: vec![
            hinted("gpu-1", 1, 2, Address::new("10.0.0.7:8000").ok()),
            hinted("gpu-2", 0, 1, None),
        ],
        ..reply(vec![holder("gpu-0", 0, 1)])
    };
    let vector = |name: &str, reply: &QueryReply| {
        let payload = reply.encode();
        assert_eq!(&QueryReply::decode(&payload).unwrap(), reply);
        json!({ "name": name, "meaning": reply_meaning(reply), "payload": hex(&payload) })
    };
    vec![
        vector("nobody", &reply(Vec::new())),
        vector(
            "one exact, one degraded and explained",
            &reply(vec![holder("gpu-0", 0, 2), doubted]),
        ),
        vector("tier by tier", &reply(vec![tiered])),
        vector("fewer blocks usable than matched", &reply(vec![usable])),
        vector("bounds", &compressed),
        vector("gathered from shards", &gathered),
        vector("one who will have more soon", &predicted),
        vector(
            "an address and labels",
            &reply(vec![
                holder("gpu-0", 0, 2).with_profile(profile()),
                holder("gpu-1", 0, 1),
            ]),
        ),
    ]
}

pub(super) fn query_batch_replies() -> Vec<Value> {
    let error = ErrorBody {
        code: 413,
        text: "too long".to_owned(),
    };
    let found = reply(vec![holder("gpu-0", 0, 2)]);
    let meaning = json!({ "results": [{ "reply": reply_meaning(&found) }, { "error": { "code": 413, "text": "too long" } }] });
    let both = BatchReply {
        v: 1,
        results: vec![QueryResult::Reply(found), QueryResult::Error(error)],
    };
    let payload = both.encode();
    assert_eq!(BatchReply::decode(&payload).unwrap(), both);
    let told = reply(vec![holder("gpu-0", 0, 2).with_profile(profile())]);
    let said_once =
        json!({ "results": [{ "reply": reply_meaning(&told) }, { "reply": reply_meaning(&told) }] });
    let twice = BatchReply {
        v: 1,
        results: vec![QueryResult::Reply(told.clone()), QueryResult::Reply(told)],
    };
    let mut once = twice.clone();
    once.say_profiles_once();
    assert_ne!(once, twice);
    assert_eq!(BatchReply::decode(&once.encode()).unwrap(), twice);
    vec![
        json!({ "name": "one reply and one error", "meaning": meaning, "payload": hex(&payload) }),
        json!({ "name": "an address and labels, said once", "meaning": said_once, "payload": hex(&once.encode()) }),
    ]
}

pub(super) fn status_replies() -> Vec<Value> {
    let holder = HolderStatusReply {
        worker: WorkerName::new("gpu-0").unwrap(),
        rank: 1,
        epoch: 1_800_000_000_000_000,
        seq: 42,
        blocks: 70_000,
        parked_events: 2,
        foreign_chain: true,
        epoch_ahead_s: 3600,
        exact: false,
        address: profile().address,
        labels: profile().labels,
        degraded: DegradedReasons::of(DegradedReason::UnknownParent),
        since_us: Some(1_800_000_000_500_000),
    };
    let meaning = json!({
        "block_size": 16,
        "distinct_blocks": 70_000,
        "batches_waiting": 3,
        "unsized_holders": 1,
        "refused_holders": 0,
        "unheard_holders": 1,
        "holders": [{
            "worker": holder.worker.as_str(),
            "rank": holder.rank,
            "epoch": holder.epoch,
            "seq": holder.seq,
            "blocks": holder.blocks,
            "parked_events": holder.parked_events,
            "foreign_chain": holder.foreign_chain,
            "epoch_ahead_s": holder.epoch_ahead_s,
            "exact": holder.exact,
            "degraded": words(holder.degraded),
            "since_us": holder.since_us,
            "address": holder.address,
            "labels": holder.labels,
        }],
        "gathered": null,
    });
    let status = StatusReply {
        behind_us: 0,
        v: 1,
        block_size: 16,
        distinct_blocks: 70_000,
        batches_waiting: 3,
        unsized_holders: 1,
        refused_holders: 0,
        unheard_holders: 1,
        holders: vec![holder],
        gathered: None,
    };
    let payload = status.encode();
    assert_eq!(StatusReply::decode(&payload).unwrap(), status);
    vec![json!({ "name": "one degraded holder", "meaning": meaning, "payload": hex(&payload) })]
}
