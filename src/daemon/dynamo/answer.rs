//! Answers to the questions of Dynamo's routers. An answer lists the workers that hold leading blocks of a prompt, in
//! Dynamo's format.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use kvatlas_core::wire::{ErrorCode, ModelKey, QueryKey, WorkerName, is_pool, usual_number};

use crate::queries::{Found, FoundHolder, Misses, Source};
use kvatlas_process::admin::Readiness;
use kvatlas_telemetry::labels::QueryKind;
use kvatlas_telemetry::{DynamoAnswerMetrics, QueryErrorMetrics, QueryMetricsByNamespace};

use super::messages::Question;

/// Answerer of the questions of Dynamo's routers.
pub(super) struct Indexer {
    pub(super) source: Arc<Source>,
    pub(super) readiness: Arc<Readiness>,
    pub(super) errors: QueryErrorMetrics,
    pub(super) namespaces: QueryMetricsByNamespace,
    pub(super) misses: Misses,
    pub(super) metrics: DynamoAnswerMetrics,
}

impl Indexer {
    /// Returns the answer to `question`, in Dynamo's format. It lists the workers of the tenant `tenant` whose state is
    /// certain, each with the number of leading blocks of the prompt that the worker has.
    pub(super) async fn answer(&self, question: &Question, tenant: &str) -> Value {
        let found = self.find(question, tenant).await;
        let holders = found.as_ref().map_or(&[][..], |found| &found.holders);
        tiered_scores(holders, question.device_only, |worker| {
            self.metrics.without_number(worker);
        })
    }

    async fn find(&self, question: &Question, tenant: &str) -> Option<Found> {
        if !self.readiness.may_still_answer() {
            self.errors.failed(ErrorCode::Unavailable, &"not ready");
            return None;
        }
        let model = ModelKey::of_tenant(question.model_name.clone(), tenant.to_owned());
        let refused = |error| self.errors.failed(ErrorCode::BadRequest, &error);
        let namespace = model.namespace().map_err(refused).ok()?;
        // A long prompt is cut to the longest query that is allowed. Blocks found in this beginning are leading blocks
        // of the whole prompt too.
        let hashes = question
            .block_hashes
            .iter()
            .take(self.source.limits().query_depth_max);
        let key = QueryKey::BlockHashes(hashes.map(|hash| (*hash).into()).collect());
        let begun = Instant::now();
        match self.source.find(&namespace, &key, None).await {
            Ok(found) => {
                let metrics = self.namespaces.of(&namespace);
                metrics.answered(QueryKind::BlockHashes, begun.elapsed());
                metrics.found(found.prompt);
                if !found.holders.is_empty() {
                    self.misses.found();
                } else if !question.block_hashes.is_empty() {
                    self.misses.missed(&self.source, &[namespace]);
                }
                Some(found)
            }
            Err(error) => {
                self.errors.failed(error.code, &error.text);
                None
            }
        }
    }
}

/// Returns the holders in Dynamo's format. A score is the number of a prompt's leading blocks that a worker has on the
/// device. The `hits` of the tiers `host_pinned` and `disk` are the numbers of blocks with which that tier continues
/// the prefix of the nearer tiers.
///
/// Only certain numbers are given: if a far tier of a worker is in doubt, only the worker's nearer tiers are listed. A
/// worker whose name is not a number in its usual form (no sign, no leading zeros) is left out, because Dynamo identifies
/// workers by numbers. `left_out` is told of it, but not of a pool, from which no request is served.
fn tiered_scores(holders: &[FoundHolder], device_only: bool, left_out: impl Fn(&WorkerName)) -> Value {
    let mut scores = Vec::new();
    let (mut host, mut disk) = (Vec::new(), Vec::new());
    for holder in holders.iter().filter_map(FoundHolder::certain) {
        let worker = &holder.id.worker;
        let Some(worker_id) = usual_number(worker.as_str()) else {
            if !is_pool(worker) {
                left_out(worker);
            }
            continue;
        };
        let worker = json!({"worker_id": worker_id, "dp_rank": holder.id.rank});
        let [device, with_host] = holder.near_blocks;
        let push = |list: &mut Vec<Value>, blocks: u32| {
            if blocks > 0 {
                list.push(json!([worker, blocks]));
            }
        };
        push(&mut scores, device);
        if !device_only {
            push(&mut host, with_host.saturating_sub(device));
            push(&mut disk, holder.blocks.saturating_sub(with_host));
        }
    }
    let lower = [("host_pinned", host), ("disk", disk)].into_iter();
    let lower = lower.filter(|(_, hits)| !hits.is_empty());
    let lower: Vec<Value> = lower.map(|(tier, hits)| json!([tier, {"hits": hits}])).collect();
    json!({"TieredScores": {"device": {"scores": scores, "frequencies": []}, "lower_tier": lower}})
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use kvatlas_core::wire::HolderId;

    use super::*;

    fn holder(worker: &str, matched_blocks: u32, near_blocks: [u32; 2], is_exact: bool) -> FoundHolder {
        FoundHolder {
            id: HolderId {
                worker: WorkerName::new(worker).unwrap(),
                rank: 1,
            },
            blocks: matched_blocks,
            matched_blocks,
            near_blocks,
            near_matched_blocks: near_blocks,
            is_exact,
            near_exact: [is_exact; 2],
            address: None,
        }
    }

    #[test]
    fn tiers_count_what_follows_the_tiers_before() {
        let holders = [
            holder("7", 9, [3, 5], true),
            holder("8", 4, [4, 4], true),
            holder("9", 4, [4, 4], false),
            holder("gpu-0", 4, [4, 4], true),
            // Another worker than 7.
            holder("07", 9, [9, 9], true),
            holder("10", 2, [0, 2], true),
        ];
        let worker = |id: u64| json!({"worker_id": id, "dp_rank": 1});
        let expected = json!({"TieredScores": {
            "device": {"scores": [[worker(7), 3], [worker(8), 4]], "frequencies": []},
            "lower_tier": [
                ["host_pinned", {"hits": [[worker(7), 2], [worker(10), 2]]}],
                ["disk", {"hits": [[worker(7), 4]]}],
            ],
        }});
        let left_out = RefCell::default();
        let note = |worker: &WorkerName| Vec::push(&mut left_out.borrow_mut(), worker.to_string());
        assert_eq!(tiered_scores(&holders, false, note), expected);
        assert_eq!(left_out.into_inner(), ["gpu-0", "07"]);
        let device = tiered_scores(&holders, true, |_| {});
        assert_eq!(device["TieredScores"]["lower_tier"], json!([]));
        assert_eq!(
            device["TieredScores"]["device"],
            expected["TieredScores"]["device"]
        );
    }
}
