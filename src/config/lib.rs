//! The configuration of daemons, gateways and bridges.
//!
//! Each setting is one row in [`settings`]: name, type, default, bounds and help. Its flag, its environment variable, its
//! key in the TOML file, the typed [`Config`], the printed configuration and the page `deploy/settings.md` follow from the
//! row. The contract of [`Config::load`]:
//!
//! - A flag overrides the environment, which overrides the file, which overrides the default.
//! - Every value and every name is checked, even one that a stronger source overrides.
//! - **All** mistakes are reported at once. Each report names its flag, its variable, or its line of the file, and the allowed
//!   values.
//! - Loading changes nothing outside the process: it makes no directory and binds no address. Files that a setting
//!   names must exist.
//! - Secrets are shown neither in errors, nor by `Debug`, nor by [`Config::to_toml`].
//!
//! A namespace may have its own contract (block size, hashing, times of silence). Only the file can set it:
//!
//! ```toml
//! [namespaces.llama-70b]
//! block_size = 64
//! hashing = "recompute"
//! ```

mod authentication;
mod combinations;
mod declare;
mod dynamo;
mod effective;
mod environment;
mod error;
mod file;
mod flags;
mod kind;
mod layers;
mod live;
mod load;
mod namespaces;
mod print;
#[cfg(test)]
mod reference_tests;
mod rule;
pub mod settings;
mod suggest;
mod types;

pub use combinations::AUTHENTICATION;
pub use declare::{ENVIRONMENT_PREFIX, Setting};
pub use dynamo::{Discovery, DynamoComponent, NoComponent, NoDiscovery};
pub use environment::process_environment;
pub use error::{ConfigError, ConfigErrors, Origin};
pub use flags::{ReachFlags, SettingFlags};
pub use kind::{Kind, Secret};
pub use live::Live;
pub use load::Said;
pub use namespaces::NamespaceConfigs;
pub use settings::{
    AdminConfig, Config, DynamoConfig, EventsConfig, GatewayConfig, GrpcConfig, HttpConfig, LimitsConfig,
    LoggingConfig, NamespaceConfig, NatsConfig, ObjectStoreConfig, QueriesConfig, ReadyConfig, RedisConfig,
    ResyncConfig, ShardingConfig, ShutdownConfig, SnapshotsConfig, StreamConfig, SubjectsConfig,
    TracesConfig,
};
pub use suggest::meant;
pub use types::{Authentication, Depth, GrpcWriting, Transport};
