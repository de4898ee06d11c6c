//! Labels that a bridge adds to a holder's given labels.

use kvatlas_core::wire::{LAYERS_LABEL, Profile, TROUBLE_LABEL};

/// Labels that the bridge adds to a holder's given labels.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct AddedLabels {
    /// Label value that names the engine's layers other than full attention, such as `windows`; `None` if the label is
    /// not added.
    pub(super) layers: Option<&'static str>,
    /// Label value that says what is wrong with the engine; `None` if the label is not added.
    pub(super) trouble: Option<String>,
}

impl AddedLabels {
    /// Returns `profile` with these labels added. Leaves out the labels that would exceed the limits on labels.
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
