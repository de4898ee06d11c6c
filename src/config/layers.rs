//! Values of the sources that have been read so far, and all mistakes in them. A source that is read later overrides
//! earlier ones.

use std::collections::BTreeSet;

use super::declare::Setting;
use super::effective::{Effective, SettingEntry};
use super::error::{ConfigError, Origin};
use super::kind::SettingValue;
use super::settings::SETTINGS;

/// Values and mistakes of the sources that have been read so far. Sources are read from the weakest to the strongest.
#[derive(Debug, Default)]
pub(super) struct Layers {
    pub(super) effective: Effective,
    pub(super) errors: Vec<ConfigError>,
    /// Settings whose last value, among the sources that have been read so far, is not allowed. For such a setting,
    /// `effective` holds the value of an earlier source. Rules about several settings must not rely on that value.
    doubtful: BTreeSet<&'static str>,
    /// Whether a syntax error made part of the file unreadable. A setting that seems to be absent may be in that part,
    /// so rules must not conclude anything from its absence.
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

    /// Sets the value of a setting, which overrides the value of an earlier source. `None` stands for a value that is
    /// not allowed. Such a value is reported as an error, in which `found` describes the value.
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

    /// Sets the value of a setting from the text of a flag or variable, which overrides the value of an earlier source.
    pub(super) fn give_text(&mut self, setting: &'static Setting, text: &str, origin: Origin) {
        self.give(
            setting,
            setting.kind.parse(text),
            || setting.kind.show(text),
            origin,
        );
    }

    /// Whether any source sets this setting. The value may be allowed, wrong, or equal to the default.
    pub(super) fn is_said(&self, key: &str) -> bool {
        let entry = self.effective.entry(key);
        self.doubtful.contains(key) || entry.is_some_and(|entry| entry.origin != Origin::Default)
    }

    /// Whether rules about several settings may rely on the values of these settings. They may if no setting has a
    /// wrong value, and if every part of the file could be read.
    pub(super) fn are_settled(&self, keys: &[&str]) -> bool {
        !self.has_lost_input && keys.iter().all(|key| !self.doubtful.contains(key))
    }
}
