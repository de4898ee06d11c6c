//! The values in force (for each setting, the value of the strongest source), and the way in which a table of settings reads
//! them.

use std::collections::BTreeMap;

use super::error::{ConfigError, Origin};
use super::kind::SettingValue;
use super::rule::Rule;

/// Table of the configuration file that holds the tables of namespaces, such as `[namespaces.llama]`.
pub(super) const NAMESPACES: &str = "namespaces";

/// A value and its origin.
#[derive(Debug, Clone)]
pub(super) struct SettingEntry {
    pub(super) value: SettingValue,
    pub(super) origin: Origin,
}

/// Values with their origins, by the key of their setting.
pub(super) type SettingEntries = BTreeMap<&'static str, SettingEntry>;

/// The entries of a namespace's own table in the file, such as `[namespaces.llama]`.
#[derive(Debug, Clone)]
pub(super) struct NamespaceEntries {
    pub(super) origin: Origin,
    /// Entries by the key of the default setting that they override.
    pub(super) entries: SettingEntries,
}

/// Values in force: for each setting, the value of the strongest source, with its origin.
#[derive(Debug, Clone, Default)]
pub(super) struct Effective {
    pub(super) entries: SettingEntries,
    /// Tables of namespaces, by the namespace's name.
    pub(super) namespaces: BTreeMap<String, NamespaceEntries>,
}

impl Effective {
    pub(super) fn entry(&self, key: &str) -> Option<&SettingEntry> {
        self.entries.get(key)
    }

    /// Returns the keys of the settings whose values differ from those of `other`. Origins are not compared. If the tables
    /// of namespaces differ, the list has `namespaces`.
    pub(super) fn differences(&self, other: &Effective) -> Vec<&'static str> {
        let is_changed = |(key, entry): &(&&'static str, &SettingEntry)| {
            other.entry(key).is_none_or(|others| others.value != entry.value)
        };
        let changed = self.entries.iter().filter(is_changed).map(|(key, _)| *key);
        let is_different = self.plain() != other.plain();
        changed.chain(is_different.then_some(NAMESPACES)).collect()
    }

    /// Returns the values in the tables of namespaces, without their origins.
    fn plain(&self) -> Vec<(&str, &'static str, &SettingValue)> {
        let tables = self.namespaces.iter();
        let values = tables.flat_map(|(name, table)| {
            let entries = table.entries.iter();
            entries.map(|(key, entry)| (name.as_str(), *key, &entry.value))
        });
        values.collect()
    }
}

/// View of the values in force (for each setting, the value of the strongest source), from which a table of settings is
/// read. If the view is for a namespace, the entries of its own table override the others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Values<'a> {
    effective: &'a Effective,
    overrides: Option<&'a SettingEntries>,
}

impl<'a> Values<'a> {
    pub(super) fn new(effective: &'a Effective) -> Values<'a> {
        Values {
            effective,
            overrides: None,
        }
    }

    /// Returns the value of one setting, converted by `rule`.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Table`] if no such setting is declared, or its bounds do not fit `T`.
    pub(super) fn get<T>(&self, key: &'static str, rule: &Rule<T>) -> Result<T, ConfigError> {
        let own = self.overrides.and_then(|overrides| overrides.get(key));
        own.or_else(|| self.effective.entry(key))
            .and_then(|entry| (rule.read)(&entry.value))
            .ok_or(ConfigError::Table { key })
    }

    /// Returns the name of each namespace that has a table of its own, with a view of the values in force there.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = (&'a String, Values<'a>)> {
        let effective = self.effective;
        effective.namespaces.iter().map(move |(name, table)| {
            let overrides = Some(&table.entries);
            (name, Values { effective, overrides })
        })
    }
}
