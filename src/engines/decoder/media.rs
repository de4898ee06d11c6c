//! Media: the engines' names for the memories in which blocks lie, and the tier of each.

use kvatlas_core::wire::Tier;

/// Media by tier: device, host, local disk, remote storage.
const MEDIA: [(u8, &[&str]); 4] = [
    (0, &["GPU", "DEVICE"]),
    (1, &["CPU", "CPU_PINNED", "CPU_TIER1", "HOST_PINNED"]),
    (2, &["DISK", "STORAGE", "NVME", "CPU_TIER2"]),
    (3, &["EXTERNAL", "NETWORK", "REMOTE", "SHARED"]),
];

/// The tier of a medium, whose name may be in upper or lower case; `None` for an unknown medium.
pub(crate) fn tier_of_medium(medium: &[u8]) -> Option<Tier> {
    let has = |names: &[&str]| {
        names
            .iter()
            .any(|name| name.as_bytes().eq_ignore_ascii_case(medium))
    };
    MEDIA
        .into_iter()
        .find(|(_, names)| has(names))
        .and_then(|(tier, _)| Tier::new(tier))
}

/// Whether vLLM's connectors never report that a block was removed from this medium. This holds for `cpu`, the name
/// that the connectors for Mooncake and LMCache use for the host, and for `STORAGE`, any store on disk.
pub(crate) fn is_never_removed(medium: &str) -> bool {
    matches!(medium, "cpu" | "STORAGE")
}

/// The tier of a cache level: 0 is the accelerator's memory, 1 the host's memory, 2 a disk. `None` for other levels.
pub(super) fn tier_of_level(level: u64) -> Option<Tier> {
    u8::try_from(level)
        .ok()
        .filter(|level| *level <= 2)
        .and_then(Tier::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_have_tiers() {
        let tier = |medium: &str| tier_of_medium(medium.as_bytes()).map(Tier::as_u8);
        assert_eq!(tier("GPU"), Some(0));
        assert_eq!(tier("cpu"), Some(1));
        assert_eq!(tier("CPU_PINNED"), Some(1));
        assert_eq!(tier("STORAGE"), Some(2));
        assert_eq!(tier("EXTERNAL"), Some(3));
        assert_eq!(tier("FS"), None);
        assert_eq!(tier(""), None);
        assert_eq!(tier_of_level(1).map(Tier::as_u8), Some(1));
        assert_eq!(tier_of_level(3), None);
    }
}
