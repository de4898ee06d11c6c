//! The values given so far. A later source overrides an earlier one, and every mistake is kept.

use std::collections::BTreeSet;

use super::declare::Setting;
use super::effective::{Effective, SettingEntry};
use super::error::{ConfigError, Origin};
use super::kind::SettingValue;
use super::settings::SETTINGS;

/// Values of all sources read so far, read from the weakest source to the strongest.
#[derive(Debug, Default)]
pub(super) struct Layers {
    pub(super) effective: Effective,
    pub(super) errors: Vec<ConfigError>,
    /// Settings whose strongest value so far is not allowed. For them, `effective` holds the value of a weaker source.
    /// The weaker value was meant to be overridden, so rules about several settings must not rely on it.
    doubtful: BTreeSet<&'static str>,
    /// Whether part of the file could not be read. Then an absent setting may have been in the lost part, so nothing
    /// follows from its absence.
    pub(super) has_lost_input: bool,
}

impl Layers {
    /// Makes the weakest layer: the default of every setting.
    pub(super) fn new() -> Layers {
        let mut layers = Layers::default();
        for setting in SETTINGS.iter() {
            let value = setting.kind.parse(setting.default);
            layers.give(setting, value, || setting.default.into(), Origin::Default);
        }
        layers
    }

    /// Overrides the value given before, if any. `None` is a value that is not allowed: it is reported as an error, and
    /// `found` describes it.
    pub(super) fn give(
        &mut self,
        setting: &'static Setting,
        value: Option<SettingValue>,
        found: impl FnOnce() -> String,
        origin: Origin,
    ) {
        if let Some(value) = value {
            self.doubtful.remove(setting.key);
            self.effective
                .entries
                .insert(setting.key, SettingEntry { value, origin });
        } else {
            self.doubtful.insert(setting.key);
            self.errors
                .push(ConfigError::value(origin, setting.kind.allowed(), found()));
        }
    }

    /// Overrides the value given before with the text of a flag or variable.
    pub(super) fn give_text(&mut self, setting: &'static Setting, text: &str, origin: Origin) {
        self.give(
            setting,
            setting.kind.parse(text),
            || setting.kind.show(text),
            origin,
        );
    }

    /// Whether any source sets this setting: to an allowed value, a wrong one, or even the default.
    pub(super) fn is_said(&self, key: &str) -> bool {
        let entry = self.effective.entry(key);
        self.doubtful.contains(key) || entry.is_some_and(|entry| entry.origin != Origin::Default)
    }

    /// Whether rules may rely on the values of all these settings: none is doubtful, and no part of the file is lost.
    pub(super) fn are_settled(&self, keys: &[&str]) -> bool {
        !self.has_lost_input && keys.iter().all(|key| !self.doubtful.contains(key))
    }
}
