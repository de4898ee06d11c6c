//! Holders of which exact answers promise more than requests find, as a daemon's `/index` names them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Such a holder.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct BrokenPromise {
    worker: String,
    rank: u32,
    promised_blocks: u64,
    missing_blocks: u64,
}

impl fmt::Display for BrokenPromise {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            worker,
            rank,
            promised_blocks,
            missing_blocks,
        } = self;
        let percent = missing_blocks * 100 / (*promised_blocks).max(1);
        write!(
            formatter,
            "exact answers promise {percent} % more than {worker}/{rank} has ({missing_blocks} of {promised_blocks} blocks were \
             not found in the last minutes)"
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
            text.starts_with("exact answers promise 11 % more than vllm-3/0 has"),
            "{text}"
        );
    }
}
