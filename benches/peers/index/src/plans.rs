//! Layouts of scenarios A and F.

use crate::contender::Form;
use crate::scenario::Effort;
use crate::scenario::latency::Plan;
use crate::workload::{Kind, Layout, Sharing};

/// Number that the tables call one million: 2^20.
const MILLION: u32 = 1 << 20;

/// Number of workers in both scenarios.
const WORKERS: u32 = 128;

/// Distinct sequences of 1024 blocks, 1M blocks in all. Most goals are about this layout.
pub const DISTINCT: Layout = Layout {
    name: "1M blocks, depth 1024, distinct",
    blocks: MILLION,
    depth: 1024,
    workers: WORKERS,
    sharing: Sharing::Distinct,
};

/// Sequences of 1024 blocks, 1M blocks in all, of which groups of eight share their first half.
pub const EIGHT_SHARE: Layout = Layout {
    name: "1M blocks, depth 1024, 8 share 512",
    sharing: Sharing::EightShareHalf,
    ..DISTINCT
};

/// Eight sequences of 1024 blocks, each on every worker, 1M blocks in all.
pub const ALL_SHARE: Layout = Layout {
    name: "1M blocks, depth 1024, all 128 share",
    sharing: Sharing::AllShareAll,
    ..DISTINCT
};

/// One sequence on 10,000 workers.
const CROWD: Layout = Layout {
    name: "one sequence of 1024 blocks, 10,000 workers",
    blocks: 10_000 * 1024,
    depth: 1024,
    workers: 10_000,
    sharing: Sharing::AllShareAll,
};

/// Short sequences.
pub const SHALLOW: Layout = Layout {
    name: "1M blocks, depth 128, distinct",
    depth: 128,
    ..DISTINCT
};

/// Long sequences.
pub const DEEP: Layout = Layout {
    name: "1M blocks, depth 8192, distinct",
    depth: 8192,
    ..DISTINCT
};

/// Layout that exceeds the processor's caches.
pub const LARGE: Layout = Layout {
    name: "5M blocks, depth 1024, distinct",
    blocks: 5 * MILLION,
    ..DISTINCT
};

/// Conversations that differ in their first block: 4k, 16k and 65k of them, each of 16 blocks.
pub const FAN_OUT: [Layout; 3] = [
    fan_out("4k first blocks", 4096),
    fan_out("16k first blocks", 16_384),
    fan_out("65k first blocks", 65_536),
];

const fn fan_out(name: &'static str, conversations: u32) -> Layout {
    Layout {
        name,
        blocks: conversations * 16,
        depth: 16,
        workers: WORKERS,
        sharing: Sharing::Distinct,
    }
}

/// Returns the plans of scenario A.
pub fn latency(effort: Effort) -> Vec<Plan> {
    let layouts: &[Layout] = if effort.is_quick {
        &[DISTINCT, ALL_SHARE]
    } else {
        &[DISTINCT, EIGHT_SHARE, ALL_SHARE, SHALLOW, DEEP, LARGE]
    };
    let plan = |layout: &Layout| Plan {
        layout: layout.clone(),
        kinds: &Kind::ALL,
        forms: &Form::ALL,
        questions_max: if effort.is_quick { 256 } else { 2048 },
    };
    layouts.iter().map(plan).collect()
}

/// Returns the plans of scenario F.
pub fn fan_outs(effort: Effort) -> Vec<Plan> {
    let layouts = if effort.is_quick { &FAN_OUT[..1] } else { &FAN_OUT };
    let plan = |layout: &Layout| Plan {
        layout: layout.clone(),
        kinds: &[Kind::Hit, Kind::Miss],
        forms: &[Form::Native],
        questions_max: 4096,
    };
    layouts.iter().map(plan).collect()
}

/// Returns the layouts of scenario G.
pub fn modes(effort: Effort) -> Vec<Layout> {
    let large = Layout {
        name: "20M blocks, depth 1024, distinct",
        blocks: 20 * MILLION,
        ..DISTINCT
    };
    if effort.is_quick {
        vec![DISTINCT, LARGE]
    } else {
        vec![DISTINCT, LARGE, large, CROWD]
    }
}
