//! The values in force (for each setting, the value of the strongest source), and the way in which a table of settings reads
//! them.

use std::collections::{BTreeMap, BTreeSet};

use super::error::{ConfigError, Origin};
use super::kind::SettingValue;
use super::rule::Rule;

/// A value and its origin.
#[derive(Debug, Clone)]
pub(super) struct SettingEntry {
    pub(super) value: SettingValue,
    pub(super) origin: Origin,
}

/// Values with their origins, by the key of their setting.
pub(super) type SettingEntries = BTreeMap<&'static str, SettingEntry>;

/// The entries of one named table of the file, such as `[namespaces.llama]`.
#[derive(Debug, Clone)]
pub(super) struct NamedEntries {
    pub(super) origin: Origin,
    /// Entries by the key of the default setting that they override.
    pub(super) entries: SettingEntries,
}

/// Values in force: for each setting, the value of the strongest source, with its origin.
#[derive(Debug, Clone, Default)]
pub(super) struct Effective {
    pub(super) entries: SettingEntries,
    /// Named tables by the table that holds them (`namespaces`), then by their names (`llama`).
    pub(super) named: BTreeMap<&'static str, BTreeMap<String, NamedEntries>>,
}

impl Effective {
    pub(super) fn entry(&self, key: &str) -> Option<&SettingEntry> {
        self.entries.get(key)
    }

    /// Returns the keys of the settings whose values differ from those of `other`. Origins are not compared. If the named tables
    /// in a table differ, the list has that table's name, such as `namespaces`.
    pub(super) fn differences(&self, other: &Effective) -> Vec<&'static str> {
        let is_changed = |(key, entry): &(&&'static str, &SettingEntry)| {
            other.entry(key).is_none_or(|others| others.value != entry.value)
        };
        let changed = self.entries.iter().filter(is_changed).map(|(key, _)| *key);
        let tables: BTreeSet<_> = self.named.keys().chain(other.named.keys()).copied().collect();
        let different = tables
            .into_iter()
            .filter(|table| self.plain(table) != other.plain(table));
        changed.chain(different).collect()
    }

    /// Returns the values in the named tables of `table` (such as `[namespaces.llama]` in `namespaces`), without their
    /// origins.
    fn plain(&self, table: &str) -> Vec<(&str, &'static str, &SettingValue)> {
        let mut values = Vec::new();
        for (name, table) in self.named(table) {
            values.extend(
                table
                    .entries
                    .iter()
                    .map(|(key, entry)| (name.as_str(), *key, &entry.value)),
            );
        }
        values
    }

    /// Returns the named tables in `table` of the file (such as `[namespaces.llama]` in `namespaces`), each with its
    /// name.
    pub(super) fn named(&self, table: &str) -> impl Iterator<Item = (&String, &NamedEntries)> + Clone {
        self.named.get(table).into_iter().flatten()
    }
}

/// View of the values in force (for each setting, the value of the strongest source), from which a table of settings is
/// read. If the view is for a named table, that table's entries override the others.
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

    /// Returns the name of each named table in `table` (such as `[namespaces.llama]` in `namespaces`), with a view of
    /// the values in force there.
    pub(super) fn named(&self, table: &str) -> impl Iterator<Item = (&'a String, Values<'a>)> {
        let effective = self.effective;
        effective.named(table).map(move |(name, table)| {
            let overrides = Some(&table.entries);
            (name, Values { effective, overrides })
        })
    }
}
