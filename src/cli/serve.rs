//! `kvatlas serve`: what the daemon's life needs around the daemon.

use std::path::PathBuf;

use clap::Args;
use kvatlas::config::settings::CONFIG_VARIABLE;
use kvatlas::config::{Config, ConfigErrors, LogFormat, LoggingConfig, SettingFlags, process_environment};
use kvatlas::daemon::Daemon;
use kvatlas::telemetry;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::Failure;
use super::output::print;

pub(super) const EXAMPLES: &str = "\
A flag covers its environment variable, which covers the file, which covers the default. Everything that is wrong is \
reported at once.

Examples:
  kvatlas serve --embedded
  kvatlas serve --nats-url nats://nats.example:4222 --snapshots-directory /var/lib/kvatlas
  kvatlas serve --shard 0/3
  kvatlas serve --gateway
  kvatlas serve --config /etc/kvatlas.toml --check-config";

/// How to serve.
#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// TOML file with settings [environment: KVATLAS_CONFIG].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration, and end.
    #[arg(long, conflicts_with = "print_config")]
    check_config: bool,
    /// Print the configuration in force as TOML, and end.
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    settings: SettingFlags,
}

impl ServeArguments {
    /// The configuration, or everything that is wrong with it; `None` when it was only to be looked at, and has been.
    pub(crate) fn load(self) -> Result<Option<Config>, Failure> {
        let Self {
            config: file,
            check_config,
            print_config,
            settings,
        } = self;
        let config = load(file, settings)?;
        if print_config {
            print(&config.to_toml())?;
        } else if check_config {
            print("the configuration is sound\n")?;
        } else {
            return Ok(Some(config));
        }
        Ok(None)
    }
}

fn load(file: Option<PathBuf>, settings: SettingFlags) -> Result<Config, ConfigErrors> {
    let named = || std::env::var_os(CONFIG_VARIABLE).filter(|path| !path.is_empty());
    let file = file.or_else(|| named().map(PathBuf::from));
    let environment = process_environment().into_iter();
    Config::load(settings.into_given(), environment, file.as_deref())
}

/// Sets up the log of the process.
pub(crate) fn start_logging(logging: &LoggingConfig) -> Result<(), Failure> {
    let format = match logging.format {
        LogFormat::Text => telemetry::LogFormat::Text,
        LogFormat::Json => telemetry::LogFormat::Json,
    };
    telemetry::init(format, &logging.level).map_err(Failure::usage)
}

/// Logs where the daemon can be reached.
pub(crate) fn announce(daemon: &Daemon) {
    let urls = &daemon.nats().urls;
    let addresses: Vec<String> = urls
        .iter()
        .map(|url| format!("{}:{}", url.host(), url.port()))
        .collect();
    tracing::info!(
        nats = addresses.join(","),
        "started; connecting to NATS where it is not connected yet"
    );
    match daemon.admin_address() {
        Some(address) => tracing::info!("metrics and probes are at http://{address}/"),
        None => tracing::info!("metrics and probes are off (admin.listen)"),
    }
}

/// The signals that ask the process to stop. From their construction on they no longer end it by themselves.
#[derive(Debug)]
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Begins to listen.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::failed(format_args!("cannot listen to signals: {error}")))
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// The name of the next signal.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
