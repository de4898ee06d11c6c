//! Doubts for some queries only: what an engine's events cannot tell, and tiers of which something is not known, as daemons are told.

use kvatlas_core::wire::{DegradedReason, DegradedReasons};
use kvatlas_engines::Translator;

/// The doubts that what has come of an engine leaves for some queries only.
pub(super) fn partial_doubts(blocks: &Translator) -> DegradedReasons {
    let untold = blocks.untold();
    let of_tiers = blocks
        .tier_doubts()
        .filter_map(|(tier, _)| DegradedReason::of_tier(tier))
        .fold(DegradedReasons::default(), DegradedReasons::with);
    [
        (untold.salts, DegradedReason::UntoldSalts),
        (untold.adapters, DegradedReason::UntoldAdapters),
        (blocks.looks_ahead(), DegradedReason::LooksAhead),
    ]
    .into_iter()
    .filter(|(is_so, _)| *is_so)
    .fold(of_tiers, |reasons, (_, reason)| reasons.with(reason))
}
