//! Settings of namespaces: the defaults, and the tables of the file that override them.

use std::collections::BTreeMap;

use super::declare::{Setting, SettingTable};
use super::effective::Values;
use super::error::ConfigError;
use super::settings::{NamespaceConfig, SETTINGS};

/// Default values of namespaces, and the values of each namespace that has a table of its own.
///
/// Such a table overrides the keys that it has. All other keys keep the default:
///
/// ```toml
/// [namespace_defaults]
/// block_size = 32
///
/// [namespaces.llama]
/// hashing = "recompute"
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceConfigs {
    /// Values of namespaces without a table of their own.
    pub default: NamespaceConfig,
    /// Values of each namespace with a table, by its name.
    pub overrides: BTreeMap<String, NamespaceConfig>,
}

impl NamespaceConfigs {
    /// Returns the values for `name`: those of its own table, and the defaults for keys that the table leaves out.
    pub fn of(&self, name: &str) -> NamespaceConfig {
        self.overrides.get(name).copied().unwrap_or(self.default)
    }
}

impl SettingTable for NamespaceConfigs {
    fn settings() -> Vec<Setting> {
        NamespaceConfig::settings()
    }

    fn read(values: Values<'_>) -> Result<Self, ConfigError> {
        let own = values.namespaces();
        let overrides = own.map(|(name, values)| Ok((name.clone(), NamespaceConfig::read(values)?)));
        Ok(Self {
            default: NamespaceConfig::read(values)?,
            overrides: overrides.collect::<Result<_, ConfigError>>()?,
        })
    }

    fn take_live(&mut self, other: &Self) {
        self.default.take_live(&other.default);
        for (name, values) in &mut self.overrides {
            let given = other.overrides.get(name);
            given.into_iter().for_each(|given| values.take_live(given));
        }
    }
}

/// Returns the settings that a namespace's own table can override.
pub(super) fn of_namespaces() -> impl Iterator<Item = &'static Setting> {
    SETTINGS
        .iter()
        .filter(|setting| setting.section() == "namespace_defaults")
}
