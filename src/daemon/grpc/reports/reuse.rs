//! The rules of a cache's components: how many leading blocks of a prompt a worker can reuse.
//!
//! | component | what a request needs of it |
//! |---|---|
//! | full attention | every block |
//! | a window | the last `swa_window_tokens` tokens before the end, or every block |
//! | a recurrent state | the last block |
//!
//! A cache that cannot be judged counts as 0 blocks, and answers are not exact then:
//!
//! - The worker reports components without a cache spec.
//! - The spec has a later version, names no component, or has a window without a length.
//!
//! So does a window in blocks whose sizes are not told, unless it begins with the prompt.

use super::super::messages::{TierType, WorkerCacheSpec};
use super::blocks::{TierPlace, WorkerBlock, WorkerBlocks};

pub(super) const FULL: u8 = 1;
pub(super) const WINDOW: u8 = 2;
pub(super) const STATE: u8 = 4;
/// Highest version of cache specs that the rules of this file can judge. Version 0 has the same rules.
const VERSION: u32 = 1;
/// Tiers from which components of a block can be reused: device and host. Each tier is the bit `1 << number`, where
/// `number` is the tier's number on the wire.
const REUSED_TIERS: u32 = (1 << TierType::Hbm as u32) | (1 << TierType::Dram as u32);

/// Two depths of a prompt: `matched` is the number of leading blocks that full attention has. `usable` is the number of
/// leading blocks that a request can reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ReuseDepths {
    pub(super) matched: u32,
    pub(super) usable: u32,
    /// Whether the rules can judge the cache, as far as it has blocks of the prompt.
    pub(super) is_judged: bool,
}

/// Returns the depths of a prompt with `hashes` in a worker's `blocks`, by the rules of `spec`.
pub(super) fn depths(blocks: &WorkerBlocks, spec: Option<&WorkerCacheSpec>, hashes: &[i64]) -> ReuseDepths {
    match spec {
        None if !blocks.are_in_parts() => whole(blocks, hashes),
        Some(spec) if is_known(spec) => in_parts(blocks, spec, hashes),
        _ => ReuseDepths {
            is_judged: hashes.first().is_none_or(|hash| blocks.get(*hash).is_none()),
            ..ReuseDepths::default()
        },
    }
}

/// Whether the rules of this file can judge a cache with this spec.
fn is_known(spec: &WorkerCacheSpec) -> bool {
    let has_window = spec.components & u32::from(WINDOW) != 0;
    let is_window_told = !has_window || spec.swa_window_tokens > 0;
    spec.components != 0 && spec.version <= VERSION && is_window_told
}

fn whole(blocks: &WorkerBlocks, hashes: &[i64]) -> ReuseDepths {
    let held = hashes.iter().take_while(|hash| blocks.get(**hash).is_some());
    let count = u32::try_from(held.count()).unwrap_or(u32::MAX);
    ReuseDepths {
        matched: count,
        usable: count,
        is_judged: true,
    }
}

fn in_parts(blocks: &WorkerBlocks, spec: &WorkerCacheSpec, hashes: &[i64]) -> ReuseDepths {
    let wants = |component: u8| spec.components & u32::from(component) != 0;
    let mut found = ReuseDepths {
        is_judged: true,
        ..ReuseDepths::default()
    };
    // Number of tokens in the consecutive blocks, up to the present block, that have the window's component. `u64::MAX`
    // if these blocks begin at the start of the prompt. `None` if the present block does not have the component.
    let mut window = Some(u64::MAX);
    for hash in hashes {
        let Some(held) = blocks.get(*hash) else { break };
        if !has(held, FULL, spec.full_tier_mask) {
            break;
        }
        found.matched = found.matched.saturating_add(1);
        window = match has(held, WINDOW, spec.swa_tier_mask) {
            true => Some(window.unwrap_or_default().saturating_add(u64::from(held.tokens))),
            false => None,
        };
        let has_window = window.is_some_and(|tokens| tokens >= u64::from(spec.swa_window_tokens));
        let has_state = has(held, STATE, spec.mamba_tier_mask);
        if (has_window || !wants(WINDOW)) && (has_state || !wants(STATE)) {
            found.usable = found.matched;
        }
        if wants(WINDOW) && window.is_some() && !has_window && held.tokens == 0 {
            found.is_judged = false;
        }
    }
    found
}

/// Whether one of `tiers`, on the device or the host, has the block's `component`.
fn has(held: &WorkerBlock, component: u8, tiers: u32) -> bool {
    TierPlace::ALL.into_iter().any(|tier| {
        let is_reused = REUSED_TIERS & tiers & (1 << tier.to_wire()) != 0;
        is_reused && held.at(tier).is_some_and(|known| known & component != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: u32 = 1 << 1;
    const HOST: u32 = 1 << 2;
    const DISK: u32 = 1 << 3;

    fn spec(components: u8, window: u32) -> WorkerCacheSpec {
        WorkerCacheSpec {
            version: 1,
            components: components.into(),
            swa_window_tokens: window,
            full_tier_mask: DEVICE | HOST | DISK,
            swa_tier_mask: DEVICE,
            mamba_tier_mask: DEVICE,
        }
    }

    /// Returns the depths (matched, usable) of a prompt with the blocks 0, 1, 2, … Each block has 16 tokens. `parts`
    /// gives the tier and components of each block.
    fn found(spec: Option<WorkerCacheSpec>, parts: &[(i32, u8)]) -> (u32, u32) {
        let found = judged(spec, parts, 16);
        (found.matched, found.usable)
    }

    fn judged(spec: Option<WorkerCacheSpec>, parts: &[(i32, u8)], tokens: u32) -> ReuseDepths {
        let mut blocks = WorkerBlocks::default();
        for (hash, (tier, components)) in (0..).zip(parts) {
            if let Some(tier) = TierPlace::of_wire(*tier) {
                blocks.store(hash, tier, u32::from(*components), tokens);
            }
        }
        let asked: Vec<i64> = (0..).take(parts.len() + 1).collect();
        depths(&blocks, spec.as_ref(), &asked)
    }

    #[test]
    fn whole_blocks_count_up_to_the_first_hole() {
        assert_eq!(found(None, &[(1, 0), (3, 0), (2, 0), (0, 0), (1, 0)]), (3, 3));
    }

    #[test]
    fn what_cannot_be_judged_counts_for_nothing() {
        let none = (0, 0);
        assert_eq!(
            found(None, &[(1, 0), (1, FULL)]),
            none,
            "components without a kind"
        );
        let full = [(1, FULL), (1, FULL)];
        let later = WorkerCacheSpec {
            version: 2,
            ..spec(FULL, 0)
        };
        for (kind, name) in [
            (spec(0, 0), "no component"),
            (spec(FULL | WINDOW, 0), "a window without a length"),
            (later, "later rules"),
        ] {
            assert_eq!(found(Some(kind), &full), none, "{name}");
            assert!(!judged(Some(kind), &full, 16).is_judged, "{name}");
            assert!(judged(Some(kind), &[], 16).is_judged, "it has no block");
        }
        assert_eq!(found(Some(spec(FULL, 0)), &full), (2, 2));
        assert_eq!(
            found(Some(spec(FULL, 0)), &[(1, 0)]),
            none,
            "a block without components"
        );
    }

    #[test]
    fn full_attention_needs_every_block_on_device_or_host() {
        let parts = [(1, FULL), (2, FULL), (3, FULL), (1, FULL)];
        assert_eq!(found(Some(spec(FULL, 0)), &parts), (2, 2));
    }

    #[test]
    fn a_window_needs_its_tokens_before_the_end_or_all_from_the_beginning() {
        let both = FULL | WINDOW;
        let two = Some(spec(both, 32));
        assert_eq!(
            found(two, &[(1, both), (1, FULL), (1, both)]),
            (3, 1),
            "one block of two"
        );
        assert_eq!(found(two, &[(1, both), (1, FULL), (1, both), (1, both)]), (4, 4));
        let unsized_blocks = [(1, FULL), (1, both), (1, both)];
        assert!(!judged(two, &unsized_blocks, 0).is_judged);
        assert!(judged(two, &unsized_blocks, 16).is_judged);
        assert!(
            judged(two, &[(1, both), (1, both)], 0).is_judged,
            "from the beginning"
        );
        // This spec does not reuse windows from the host.
        assert_eq!(found(two, &[(1, both), (2, both)]), (2, 1));
    }

    #[test]
    fn a_state_is_needed_at_the_end_only() {
        let both = FULL | STATE;
        let parts = [(1, FULL), (1, both), (1, FULL)];
        assert_eq!(found(Some(spec(both, 0)), &parts), (3, 2));
    }
}
