//! Lays the sources over one another and checks the result.

use std::collections::BTreeMap;
use std::path::Path;

use super::build::Builder;
use super::error::{ConfigError, ConfigErrors, Origin};
use super::layers::{Effective, Layers};
use super::settings::{SETTINGS, Setting};
use super::types::{
    AdminConfig, EventsConfig, GatewayConfig, LimitsConfig, LoggingConfig, NamespacesConfig, NatsConfig,
    QueriesConfig, ReadyConfig, ResyncConfig, ShardingConfig, ShutdownConfig, SnapshotsConfig,
    SubjectsConfig,
};
use super::{combinations, environment, file, print};

/// Sections that say how to reach a daemon.
const CLIENT_SECTIONS: [&str; 2] = ["nats", "subjects"];

/// A configuration in which every value is allowed, alone and beside the others.
///
/// Two are equal when their values are, whoever gave them.
#[derive(Debug, Clone)]
pub struct Config {
    /// How to reach NATS.
    pub nats: NatsConfig,
    /// Which subjects to use.
    pub subjects: SubjectsConfig,
    /// How events are taken in.
    pub events: EventsConfig,
    /// How publishers are asked for what is missing.
    pub resync: ResyncConfig,
    /// How queries are answered.
    pub queries: QueriesConfig,
    /// Which part of the workers is taken.
    pub sharding: ShardingConfig,
    /// How a gateway gathers.
    pub gateway: GatewayConfig,
    /// When a starting daemon takes queries.
    pub ready: ReadyConfig,
    /// What the index may hold.
    pub limits: LimitsConfig,
    /// The contracts of the namespaces.
    pub namespaces: NamespacesConfig,
    /// Where and when to write snapshots.
    pub snapshots: SnapshotsConfig,
    /// Where to serve metrics and probes.
    pub admin: AdminConfig,
    /// What to log.
    pub logging: LoggingConfig,
    /// How to stop.
    pub shutdown: ShutdownConfig,
    /// The values as they were given, for printing.
    effective: Effective,
}

impl Config {
    /// Loads the configuration from the flags given, by the dotted keys of their settings, the variables of
    /// the environment, and the file, if there is one.
    ///
    /// Variables that do not begin with [`ENVIRONMENT_PREFIX`](super::settings::ENVIRONMENT_PREFIX) are
    /// passed over.
    ///
    /// # Errors
    ///
    /// Everything that is wrong, in every source.
    pub fn load(
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
        combinations::check(&mut layers);
        ConfigErrors::check(layers.errors)?;
        Config::build(layers.effective)
    }

    /// Loads what a client needs to reach a daemon: from `flags`, by the dotted keys of their settings, and from those
    /// variables of the environment that say where NATS is, how to authenticate there and what subjects begin with. So the
    /// client finds the daemon that reads the same environment, and what only the daemon reads does not matter.
    ///
    /// # Errors
    ///
    /// Everything that is wrong, in both sources.
    pub fn load_for_client(
        flags: BTreeMap<String, String>,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Config, ConfigErrors> {
        Config::load(flags, environment.filter(|(name, _)| is_for_clients(name)), None)
    }

    /// The values in force as a TOML file, each with its help and its origin in comments.
    ///
    /// The text loads back to the same configuration, except that secrets are left out.
    pub fn to_toml(&self) -> String {
        print::to_toml(&self.effective)
    }

    fn build(effective: Effective) -> Result<Config, ConfigErrors> {
        let mut builder = Builder::new(&effective);
        let nats = builder.nats();
        let subjects = builder.subjects();
        let events = builder.events();
        let resync = builder.resync();
        let queries = builder.queries();
        let sharding = builder.sharding();
        let gateway = builder.gateway();
        let ready = builder.ready();
        let limits = builder.limits();
        let namespaces = builder.namespaces();
        let snapshots = builder.snapshots();
        let admin = builder.admin();
        let logging = builder.logging();
        let shutdown = builder.shutdown();
        ConfigErrors::check(builder.errors)?;
        Ok(Config {
            nats,
            subjects,
            events,
            resync,
            queries,
            sharding,
            gateway,
            ready,
            limits,
            namespaces,
            snapshots,
            admin,
            logging,
            shutdown,
            effective,
        })
    }
}

impl PartialEq for Config {
    fn eq(&self, other: &Config) -> bool {
        self.nats == other.nats
            && self.subjects == other.subjects
            && self.events == other.events
            && self.resync == other.resync
            && self.queries == other.queries
            && self.sharding == other.sharding
            && self.gateway == other.gateway
            && self.ready == other.ready
            && self.limits == other.limits
            && self.namespaces == other.namespaces
            && self.snapshots == other.snapshots
            && self.admin == other.admin
            && self.logging == other.logging
            && self.shutdown == other.shutdown
    }
}

impl Eq for Config {}

/// Whether a variable tells a client how to reach a daemon. Nobody can connect to an embedded server by asking for one.
fn is_for_clients(variable: &str) -> bool {
    SETTINGS.iter().any(|setting| {
        setting.variable == variable
            && CLIENT_SECTIONS.contains(&setting.section())
            && !matches!(setting.key, "nats.embedded" | "nats.server_binary")
    })
}

fn read_flags(flags: BTreeMap<String, String>, layers: &mut Layers) {
    for (key, text) in flags {
        if let Some(setting) = Setting::find(&key) {
            layers.give_text(setting, &text, Origin::Flag(setting.flag.to_owned()));
        } else {
            let allowed = SETTINGS
                .iter()
                .map(|setting| setting.key)
                .collect::<Vec<_>>()
                .join(", ");
            layers.errors.push(ConfigError::Unknown {
                origin: Origin::Flag(key),
                allowed,
            });
        }
    }
}

#[cfg(test)]
mod tests;
