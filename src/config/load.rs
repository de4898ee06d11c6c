//! Combines the sources by their strength, and checks the result.

use std::collections::BTreeMap;
use std::path::Path;

use super::declare::Setting;
use super::error::{ConfigError, ConfigErrors, Origin};
use super::layers::Layers;
use super::settings::{Config, SETTINGS};
use super::{combinations, environment, file, print, suggest};

/// Sections that tell a client how to reach a daemon.
const CLIENT_SECTIONS: [&str; 2] = ["nats", "subjects"];

/// Beginnings of the variables of these sections. With the second also of those that are misspelt without their "S".
const CLIENT_BEGINNINGS: [&str; 2] = ["KVATLAS_NATS_", "KVATLAS_SUBJECT"];

/// Keys of the settings that a bridge reads, in addition to the settings that all clients read.
const BRIDGE_SETTINGS: [&str; 6] = [
    "admin.listen",
    "admin.advertise",
    "http.listen",
    "http.token_file",
    "logging.format",
    "logging.level",
];

/// Default address of a bridge's admin listener.
const BRIDGE_ADMIN_LISTEN: &str = "127.0.0.1:9465";

impl Config {
    /// Loads the configuration from three sources: the flags given, by the dotted keys of their settings; the
    /// environment variables; and the file, if there is one.
    ///
    /// Variables that do not begin with [`ENVIRONMENT_PREFIX`](super::declare::ENVIRONMENT_PREFIX) are
    /// passed over.
    ///
    /// # Errors
    ///
    /// All mistakes, in every source.
    pub fn load(
        flags: BTreeMap<String, String>,
        environment: impl Iterator<Item = (String, String)>,
        file: Option<&Path>,
    ) -> Result<Config, ConfigErrors> {
        Config::load_presuming(|_| Vec::new(), flags, environment, file)
    }

    /// Loads the configuration as [`Config::load`] does, but with defaults that the caller chooses for some settings.
    ///
    /// `presume` is a function that is called with the values that the sources give. It returns default values, each
    /// with the dotted key of its setting. Such a default is used if no source sets the setting.
    ///
    /// # Errors
    ///
    /// The errors of [`Config::load`].
    pub fn load_presuming(
        presume: impl FnOnce(Said<'_>) -> Vec<(&'static str, String)>,
        flags: BTreeMap<String, String>,
        environment: impl Iterator<Item = (String, String)>,
        file: Option<&Path>,
    ) -> Result<Config, ConfigErrors> {
        let mut layers = Layers::new();
        if let Some(path) = file {
            file::read(path, &mut layers);
        }
        environment::read(environment, &mut layers);
        read_flags(flags, &mut layers);
        let presumed = presume(Said(&layers));
        lay_beneath(presumed, &mut layers);
        combinations::check(&mut layers);
        ConfigErrors::check(layers.errors)?;
        Config::read(layers.effective).map_err(ConfigErrors::from)
    }

    /// Loads the settings by which a client reaches a daemon: how to reach NATS, and the prefix of the subjects.
    ///
    /// The sources are `flags`, by the dotted keys of their settings, and the environment. So a client finds the daemon
    /// that reads the same environment. Variables that only the daemon reads are passed over; misspelt ones of a client are
    /// mistakes.
    ///
    /// # Errors
    ///
    /// All mistakes in the flags and in the environment.
    pub fn load_for_client(
        flags: BTreeMap<String, String>,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Config, ConfigErrors> {
        Config::load(
            flags,
            environment.filter(|(name, _)| is_client_variable(name)),
            None,
        )
    }

    /// Loads the settings of a bridge: the settings by which a client reaches a daemon, the addresses on which the
    /// bridge listens, and its log. The default address of the bridge's admin listener differs from the daemon's. An environment
    /// variable about a listener or the log counts as not set if it is empty.
    ///
    /// # Errors
    ///
    /// All mistakes in the flags and in the environment.
    pub fn load_for_bridge(
        flags: BTreeMap<String, String>,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Config, ConfigErrors> {
        let is_for_bridges = |name: &str| {
            let mut settings = BRIDGE_SETTINGS.into_iter().filter_map(Setting::find);
            settings.any(|setting| setting.variable == name)
        };
        let environment = environment
            .filter(|(name, text)| is_client_variable(name) || !text.is_empty() && is_for_bridges(name));
        let presumed = |_: Said<'_>| vec![("admin.listen", BRIDGE_ADMIN_LISTEN.to_owned())];
        Config::load_presuming(presumed, flags, environment, None)
    }

    /// Returns the keys of the settings whose values differ from those of `other`. `namespaces` is among them if the tables of
    /// namespaces differ.
    pub fn changed_settings(&self, other: &Config) -> Vec<&'static str> {
        self.effective.differences(&other.effective)
    }

    /// Returns the values in force as a TOML file, each with its help and its origin in comments.
    ///
    /// The text loads back to the same configuration, except that secrets are left out.
    pub fn to_toml(&self) -> String {
        print::to_toml(&self.effective)
    }
}

/// Read access to the values that the flags, the environment and the file give. They are not yet checked as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Said<'a>(&'a Layers);

impl Said<'_> {
    /// Whether a source sets anything about an external NATS server.
    pub fn names_nats_server(self) -> bool {
        let mut keys = combinations::NOT_FOR_EMBEDDED.into_iter();
        keys.any(|key| self.0.is_said(key))
    }
}

/// Adds defaults that the caller chooses for some settings. They override the declared defaults, and every source
/// overrides them.
fn lay_beneath(presumed: Vec<(&'static str, String)>, layers: &mut Layers) {
    for (key, text) in presumed {
        if let Some(setting) = Setting::find(key)
            && !layers.is_said(key)
        {
            layers.give_text(setting, &text, Origin::Default);
        }
    }
}

/// Whether a setting tells a client how to reach a daemon. Settings of the embedded server are for daemons only.
pub(super) fn is_for_clients(setting: &Setting) -> bool {
    CLIENT_SECTIONS.contains(&setting.section())
        && !matches!(setting.key, "nats.embedded" | "nats.server_binary")
}

/// Whether a variable belongs to a setting that tells a client how to reach a daemon, or looks like one and is misspelt.
fn is_client_variable(variable: &str) -> bool {
    match SETTINGS.iter().find(|setting| setting.variable == variable) {
        Some(setting) => is_for_clients(setting),
        None => CLIENT_BEGINNINGS
            .iter()
            .any(|beginning| variable.starts_with(beginning)),
    }
}

fn read_flags(flags: BTreeMap<String, String>, layers: &mut Layers) {
    for (key, text) in flags {
        if let Some(setting) = Setting::find(&key) {
            layers.give_text(setting, &text, Origin::Flag(setting.flag_names()));
        } else {
            let meant = suggest::meant(&key, SETTINGS.iter().map(|setting| setting.key));
            let allowed = SETTINGS
                .iter()
                .map(|setting| setting.key)
                .collect::<Vec<_>>()
                .join(", ");
            layers.errors.push(ConfigError::Unknown {
                origin: Origin::Flag(key),
                allowed,
                meant,
            });
        }
    }
}

#[cfg(test)]
mod tests;
