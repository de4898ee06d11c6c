//! The values given so far: a later source covers an earlier one, and every mistake is kept.

use std::collections::BTreeSet;

use super::declare::Setting;
use super::effective::{Effective, Entry};
use super::error::{ConfigError, Origin};
use super::kind::Value;
use super::settings::SETTINGS;

/// Sources laid over one another, weakest first.
#[derive(Debug, Default)]
pub(super) struct Layers {
    pub(super) effective: Effective,
    pub(super) errors: Vec<ConfigError>,
    /// Settings whose strongest value so far is not allowed. For them, `effective` has a weaker value. That value was
    /// meant to be covered, so nothing can be concluded from it.
    doubtful: BTreeSet<&'static str>,
    /// Whether part of the file could not be read. Then nothing can be concluded from an absence.
    pub(super) has_lost_input: bool,
}

impl Layers {
    /// The layer of the defaults.
    pub(super) fn new() -> Layers {
        let mut layers = Layers::default();
        for setting in SETTINGS.iter() {
            let value = setting.kind.parse(setting.default);
            layers.give(setting, value, || setting.default.into(), Origin::Default);
        }
        layers
    }

    /// Lays a value over those given before. `None` is a value that is not allowed; `found` describes it.
    pub(super) fn give(
        &mut self,
        setting: &'static Setting,
        value: Option<Value>,
        found: impl FnOnce() -> String,
        origin: Origin,
    ) {
        if let Some(value) = value {
            self.doubtful.remove(setting.key);
            self.effective
                .entries
                .insert(setting.key, Entry { value, origin });
        } else {
            self.doubtful.insert(setting.key);
            self.errors
                .push(ConfigError::value(origin, setting.kind.allowed(), found()));
        }
    }

    /// Lays the text of a flag or variable over the values given before.
    pub(super) fn give_text(&mut self, setting: &'static Setting, text: &str, origin: Origin) {
        self.give(
            setting,
            setting.kind.parse(text),
            || setting.kind.show(text),
            origin,
        );
    }

    /// Whether a source says something about this setting, right or wrong, be it the default.
    pub(super) fn is_said(&self, key: &str) -> bool {
        let entry = self.effective.entry(key);
        self.doubtful.contains(key) || entry.is_some_and(|entry| entry.origin != Origin::Default)
    }

    /// Whether conclusions can be drawn from all of these settings together.
    pub(super) fn are_settled(&self, keys: &[&str]) -> bool {
        !self.has_lost_input && keys.iter().all(|key| !self.doubtful.contains(key))
    }
}
