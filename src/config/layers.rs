//! The values given so far: a later source covers an earlier one, and every mistake is kept.

use std::collections::{BTreeMap, BTreeSet};

use super::error::{ConfigError, Origin};
use super::kind::Value;
use super::settings::{SETTINGS, Setting};

/// A value and who gave it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// The part of the file about one namespace.
#[derive(Debug, Clone)]
pub(super) struct NamespaceTable {
    pub(super) origin: Origin,
    /// By the key of the default that the entry overrides.
    pub(super) entries: BTreeMap<&'static str, Entry>,
}

/// The values in force.
#[derive(Debug, Clone, Default)]
pub(super) struct Effective {
    /// By the key of the setting.
    pub(super) entries: BTreeMap<&'static str, Entry>,
    /// By the name of the namespace.
    pub(super) namespaces: BTreeMap<String, NamespaceTable>,
}

impl Effective {
    pub(super) fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }
}

/// Sources laid over one another, weakest first.
#[derive(Debug, Default)]
pub(super) struct Layers {
    pub(super) effective: Effective,
    pub(super) errors: Vec<ConfigError>,
    /// Settings whose strongest value so far is not allowed. What stands in `effective` for them was
    /// meant to be covered, so nothing can be concluded from it.
    doubtful: BTreeSet<&'static str>,
    /// Whether an unknown part of the file is missing, so that nothing can be concluded from an absence.
    pub(super) has_lost_input: bool,
}

impl Layers {
    /// The layer of the defaults.
    pub(super) fn new() -> Layers {
        let mut layers = Layers::default();
        for setting in SETTINGS {
            let value = setting.kind.parse(setting.default);
            layers.give(setting, value, || setting.default.into(), Origin::Default);
        }
        layers
    }

    /// Lays a value over what was given before; `None`, described by `found`, is a value not allowed.
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

    /// Lays a flag's or variable's text over what was given before.
    pub(super) fn give_text(&mut self, setting: &'static Setting, text: &str, origin: Origin) {
        self.give(
            setting,
            setting.kind.parse(text),
            || setting.kind.show(text),
            origin,
        );
    }

    /// Whether conclusions can be drawn from all of these settings together.
    pub(super) fn are_settled(&self, keys: &[&str]) -> bool {
        !self.has_lost_input && keys.iter().all(|key| !self.doubtful.contains(key))
    }
}
