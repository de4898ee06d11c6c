//! Broken promises. A promise about a holder is broken if requests find fewer blocks at the holder than exact answers
//! promise. A daemon's route `/index` lists the broken promises.

use std::fmt;

use kvatlas_daemon::runbook::{AdviceTable, mend_for};
use serde::{Deserialize, Serialize};

/// Holder of which exact answers promise more blocks than requests find.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct BrokenPromise {
    worker: String,
    rank: u32,
    promised_blocks: u64,
    missing_blocks: u64,
}

impl BrokenPromise {
    /// Returns the advice on what to do about this holder of `namespace`.
    pub(super) fn mend(&self, namespace: &str) -> String {
        let alert = ["KvatlasPromisesBroken"];
        let culprit = [namespace, &self.worker, &self.rank.to_string()];
        mend_for(alert.into_iter(), AdviceTable::OtherTroubles, culprit)
    }
}

impl fmt::Display for BrokenPromise {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            worker,
            rank,
            promised_blocks,
            missing_blocks,
        } = self;
        let percent = missing_blocks.saturating_mul(100) / (*promised_blocks).max(1);
        write!(
            formatter,
            "{percent} % of what exact answers promise of {worker}/{rank} is not found ({missing_blocks} of {promised_blocks} blocks \
             in the last minutes)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_and_how_much_is_said() {
        let json = r#"{"worker":"vllm-3","rank":0,"requests":9,"promised_blocks":1000,"missing_blocks":110}"#;
        let broken: BrokenPromise = serde_json::from_str(json).unwrap();
        let text = broken.to_string();
        assert!(
            text.starts_with("11 % of what exact answers promise of vllm-3/0 is not found (110 of 1000 "),
            "{text}"
        );
        let mend = broken.mend("llama");
        assert!(mend.contains("kvatlas admin resync llama vllm-3 0"), "{mend}");
    }
}
