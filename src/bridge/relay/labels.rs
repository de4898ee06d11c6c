//! Labels that a bridge adds to those that a holder was given.

use kvatlas_core::wire::{LAYERS_LABEL, Profile, TROUBLE_LABEL};

/// Labels that the bridge adds to those that a holder was given.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct AddedLabels {
    /// Layers beside full attention that the engine's events tell of.
    pub(super) layers: Option<&'static str>,
    /// Trouble with the engine, as the value of a label.
    pub(super) trouble: Option<String>,
}

impl AddedLabels {
    /// Returns `profile` with these labels added. A label for which there is no room is left out.
    pub(super) fn to(&self, profile: &Profile) -> Profile {
        let added = [
            (LAYERS_LABEL, self.layers),
            (TROUBLE_LABEL, self.trouble.as_deref()),
        ];
        let mut profile = profile.clone();
        for (key, value) in added {
            let labels = value.and_then(|value| profile.labels.with(key, value).ok());
            profile.labels = labels.unwrap_or(profile.labels);
        }
        profile
    }
}
