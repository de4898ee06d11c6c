//! Guesses the allowed name that a misspelt name stands for.

use super::declare::Setting;
use super::settings::SETTINGS;

/// Least similarity, from 0 to 1, at which a name counts as a misspelling of another name.
const LIKENESS_MIN: f64 = 0.8;

/// Returns the allowed name that is most similar to `name`; `None` if no allowed name is similar enough.
pub fn meant<'a>(name: &str, allowed: impl Iterator<Item = &'a str>) -> Option<String> {
    let likeness = |other: &str| strsim::jaro_winkler(&name.to_lowercase(), &other.to_lowercase());
    let rated = allowed.map(|other| (likeness(other), other));
    let best = rated.max_by(|one, other| one.0.total_cmp(&other.0))?;
    (best.0 >= LIKENESS_MIN).then(|| best.1.to_owned())
}

/// Least similarity at which a name counts as that of a setting in another section.
const LIKENESS_ELSEWHERE_MIN: f64 = 0.95;

/// Returns the key of the setting, in any section, whose own name is most similar to `name`; `None` if none is similar
/// enough, or if several are equally similar.
pub(crate) fn elsewhere(name: &str) -> Option<String> {
    let likeness = |setting: &Setting| strsim::jaro_winkler(name, setting.name());
    let best = SETTINGS.iter().map(likeness).max_by(f64::total_cmp)?;
    let mut nearest = SETTINGS.iter().filter(|setting| likeness(setting) >= best);
    let (meant, other) = (nearest.next()?, nearest.next());
    (best >= LIKENESS_ELSEWHERE_MIN && other.is_none()).then(|| meant.key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_of_another_section_is_named_with_its_section() {
        let stale = "namespace_defaults.stale_after_ms";
        assert_eq!(elsewhere("stale_after").as_deref(), Some(stale));
        assert_eq!(elsewhere("stale_after_ms").as_deref(), Some(stale));
        // Several sections have this name.
        assert_eq!(elsewhere("listen"), None);
        assert_eq!(elsewhere("foo"), None);
    }

    #[test]
    fn a_slip_is_guessed_and_a_stranger_is_not() {
        let allowed = ["KVATLAS_NATS_URL", "KVATLAS_NATS_USER", "KVATLAS_LOGGING_LEVEL"];
        let meant = |name| meant(name, allowed.into_iter());
        assert_eq!(meant("KVATLAS_NATS_ULR").as_deref(), Some("KVATLAS_NATS_URL"));
        assert_eq!(
            meant("KVATLAS_LOGING_LEVEL").as_deref(),
            Some("KVATLAS_LOGGING_LEVEL")
        );
        assert_eq!(meant("kvatlas_nats_user").as_deref(), Some("KVATLAS_NATS_USER"));
        assert_eq!(meant("PATH"), None);
    }
}
