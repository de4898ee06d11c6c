//! Partial doubts: doubts that concern some queries only. A partial doubt arises if an engine's events leave out facts, or if
//! the content of a tier is uncertain.

use kvatlas_core::wire::{DegradedReason, DegradedReasons};
use kvatlas_engines::Translator;

/// Returns an engine's doubts that concern some queries only, as the degraded reasons that daemons are told.
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
        (blocks.hashes_pairs(), DegradedReason::HashesPairs),
    ]
    .into_iter()
    .filter(|(is_so, _)| *is_so)
    .fold(of_tiers, |reasons, (_, reason)| reasons.with(reason))
}

#[cfg(test)]
mod tests {
    use kvatlas_engines::{DecodeLimits, Decoder, EngineBatch, Format, Translation, TranslatorSettings};
    use serde_json::json;

    use super::*;

    #[test]
    fn what_cannot_be_placed_in_a_tier_is_a_gap_of_that_tier() {
        let stored = |medium: &str, parent: Option<u64>| {
            let tokens: Vec<u32> = (0..16).collect();
            json!({
                "type": "BlockStored", "block_hashes": [1], "parent_block_hash": parent, "token_ids": tokens,
                "block_size": 16, "lora_id": null, "medium": medium, "lora_name": null,
            })
        };
        for (medium, reason) in [
            ("CPU", DegradedReason::HostGap),
            ("STORAGE", DegradedReason::DiskGap),
            ("EXTERNAL", DegradedReason::ExternalGap),
        ] {
            let mut blocks = Translator::new(TranslatorSettings::for_format(Format::Vllm));
            let payload = json!([1.5, [stored("GPU", None), stored(medium, Some(9))], 0]).to_string();
            let mut batch = EngineBatch::default();
            let mut decoder = Decoder::new(Format::Vllm, DecodeLimits::default());
            decoder.decode(payload.as_bytes(), &mut batch).unwrap();
            assert_eq!(partial_doubts(&blocks), DegradedReasons::default());
            blocks.translate(&batch, &mut Translation::default());
            // The event of the device tier has told which block name 1 stands for, so the events of the other tiers are
            // understood.
            assert_eq!(
                partial_doubts(&blocks).contains(reason),
                medium == "STORAGE",
                "{medium}"
            );
            let unknown = payload.replace("[1]", "[2]").replace("\"GPU\"", "\"CPU_PINNED\"");
            decoder.decode(unknown.as_bytes(), &mut batch).unwrap();
            blocks.translate(&batch, &mut Translation::default());
            assert!(partial_doubts(&blocks).contains(reason), "{medium}");
            assert_eq!(blocks.doubt(), None);
        }
    }
}
