//! The daemon's configuration.
//!
//! One [table of settings](settings) gives every setting its flag, its environment variable, its key in the
//! TOML file, its kind, default and help. The contract of [`Config::load`]:
//!
//! - A flag covers the environment, which covers the file, which covers the default.
//! - Everything is checked, covered values and unknown names included, and **every** mistake is reported at
//!   once with the flag, variable or line of the file that made it, and with what would be allowed.
//! - Nothing is changed outside the process: no directory is made and no address is bound. Files that a
//!   setting names are looked for.
//! - Secrets are shown neither in errors, nor by `Debug`, nor by [`Config::to_toml`].
//!
//! Namespaces may have contracts of their own, in the file only:
//!
//! ```toml
//! [namespaces.llama-70b]
//! block_size = 64
//! hashing = "recompute"
//! ```

mod build;
mod combinations;
mod environment;
mod error;
mod file;
mod flags;
mod kind;
mod layers;
mod load;
mod print;
pub mod settings;
mod types;

pub use environment::process_environment;
pub use error::{ConfigError, ConfigErrors, Origin};
pub use flags::SettingFlags;
pub use kind::{Kind, Secret};
pub use load::Config;
pub use print::settings_markdown;
pub use types::{
    AdminConfig, Authentication, EventsConfig, GatewayConfig, Hashing, IndexKind, LimitsConfig, LogFormat,
    LoggingConfig, NamespaceConfig, NamespacesConfig, NatsConfig, ObjectStoreConfig, QueriesConfig,
    ReadyConfig, ResyncConfig, ShardingConfig, ShutdownConfig, SnapshotsConfig, StreamConfig, SubjectsConfig,
    Transport,
};
