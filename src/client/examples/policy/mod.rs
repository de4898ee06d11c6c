//! Policy that chooses the engine for a request: by cached blocks, by load, and among equal engines by the prompt's home (the
//! engine that a hash of its first tokens chooses). To use the policy, copy this file; it needs no other.
//!
//! `deploy/router-example/README.md` gives the reasons for the policy.

use std::cmp::Reverse;
use std::collections::HashMap;

use sha2::{Digest, Sha256};

/// Maximum number of leading tokens that decide a prompt's home (the engine that the prompt prefers). It exceeds the
/// length of a system prompt, because most prompts share the system prompt.
const HOME_TOKENS_MAX: usize = 1024;
/// Divides a prompt's number of blocks, to give the tolerance in use when some engine is known to have blocks of the
/// prompt. Two engines count as equally good if both their costs exceed the least cost by at most the tolerance.
const KNOWN_TOLERANCE_DIVISOR: u64 = 10;

/// Returns the hash of a prompt's first tokens, which decides the prompt's home (the engine that it prefers). The
/// number of these tokens is a power of two. So a short conversation keeps its home over most turns.
fn home_key(tokens: &[u32]) -> [u8; 32] {
    let shortened = tokens.len().min(HOME_TOKENS_MAX);
    let decisive = shortened.checked_ilog2().map_or(0, |power| 1 << power);
    let mut hasher = Sha256::new();
    for token in tokens.iter().take(decisive) {
        hasher.update(token.to_le_bytes());
    }
    hasher.finalize().into()
}

/// Returns the engine's score for prompts with the hash `key` of their first tokens. The score is the same in every
/// router. The engine with the highest score is the home of these prompts, that is, the engine that they prefer.
fn home_score(engine: &str, key: &[u8; 32]) -> [u8; 32] {
    let hasher = Sha256::new()
        .chain_update(engine)
        .chain_update([0])
        .chain_update(key);
    hasher.finalize().into()
}

/// Returns the engine for a prompt of `blocks` blocks, and the number of blocks that the engine has to compute. `None`
/// if there are no engines.
///
/// `usable` has the number of the prompt's blocks that an engine can reuse; an engine that is not in the map counts as
/// 0. `under_way` has the number of blocks that each engine has to compute for other prompts.
pub(crate) fn choose<'e>(
    engines: &'e [String],
    tokens: &[u32],
    blocks: u64,
    usable: &HashMap<String, u64>,
    under_way: &HashMap<String, u64>,
) -> Option<(&'e str, u64)> {
    let of = |counts: &HashMap<String, u64>, engine: &str| counts.get(engine).copied().unwrap_or_default();
    let to_compute = |engine: &str| blocks.saturating_sub(of(usable, engine));
    let cost = |engine: &str| to_compute(engine) + of(under_way, engine);
    let is_known = engines.iter().any(|engine| of(usable, engine) > 0);
    // If no engine is known to have blocks, the prompt's home has a good chance to have all of them. So the tolerance
    // is large.
    let divisor = if is_known { KNOWN_TOLERANCE_DIVISOR } else { 1 };
    let least = engines.iter().map(|engine| cost(engine)).min()?;
    // Costs are multiplied by the divisor, so that nothing is rounded.
    let most = least * divisor + blocks;
    let key = home_key(tokens);
    let equals = engines.iter().filter(|engine| cost(engine) * divisor <= most);
    let chosen = equals.min_by_key(|engine| Reverse(home_score(engine, &key)))?;
    Some((chosen, to_compute(chosen)))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn all_examples_choose_alike() {
        let text = include_str!("../../../../deploy/router-example/choices.json");
        let cases: Vec<Value> = serde_json::from_str(text).unwrap();
        assert!(cases.len() >= 100);
        for case in cases {
            let number = |name: &str| u32::try_from(case[name].as_u64().unwrap()).unwrap();
            let tokens: Vec<u32> = (number("first_token")..)
                .take(number("tokens") as usize)
                .collect();
            let counts = |name: &str| serde_json::from_value(case[name].clone()).unwrap();
            let engines: Vec<String> = serde_json::from_value(case["engines"].clone()).unwrap();
            let chosen = choose(
                &engines,
                &tokens,
                u64::from(number("blocks")),
                &counts("usable"),
                &counts("under_way"),
            );
            let expected = (
                case["chosen"].as_str().unwrap(),
                case["to_compute"].as_u64().unwrap(),
            );
            assert_eq!(chosen, Some(expected), "{case}");
        }
    }
}
