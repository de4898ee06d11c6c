//! `kvatlas serve`: configuration, log and signals of the daemon's process.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use kvatlas_config::settings::CONFIG_VARIABLE;
use kvatlas_config::{Config, ConfigErrors, Kind, LoggingConfig, SettingFlags, process_environment};
use kvatlas_daemon::Daemon;
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

/// Arguments of `kvatlas serve`.
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
    /// Loads the configuration, and returns it with its source. With `--check-config` or `--print-config`, only checks
    /// or prints it, and returns `None`. A failure names every mistake in the configuration.
    pub(crate) fn load(self) -> Result<Option<(Config, ConfigSource)>, Failure> {
        let Self {
            config: file,
            check_config,
            print_config,
            settings,
        } = self;
        let source = ConfigSource {
            file: file.or_else(file_of_environment),
            flags: settings.into_given(),
        };
        let config = source.load()?;
        if print_config {
            print(&config.to_toml())?;
        } else if check_config {
            print("the configuration is sound\n")?;
        } else {
            return Ok(Some((config, source)));
        }
        Ok(None)
    }
}

/// Returns the configuration file that the environment names; `None` if it names none.
pub(crate) fn file_of_environment() -> Option<PathBuf> {
    let named = std::env::var_os(CONFIG_VARIABLE).filter(|path| !path.is_empty());
    named.map(PathBuf::from)
}

/// Fails if `path` exists and is not a regular file, but for example a pipe. To read a pipe again, a reload would wait
/// until somebody writes to it. The process would handle no signals during this wait.
pub(super) fn expect_regular(path: &Path) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => Err(Failure::usage(format_args!(
            "{path:?} is no regular file, and only those are read again"
        ))),
        // If the file's metadata cannot be read, reading the file later gives the better error.
        _ => Ok(()),
    }
}

/// Sources of the configuration: the file and the flags. A reload reads them again, together with the environment.
#[derive(Debug)]
pub(crate) struct ConfigSource {
    file: Option<PathBuf>,
    flags: BTreeMap<String, String>,
}

impl ConfigSource {
    /// Loads the configuration as it is now.
    fn load(&self) -> Result<Config, ConfigErrors> {
        let environment = process_environment().into_iter();
        Config::load(self.flags.clone(), environment, self.file.as_deref())
    }

    /// Reloads the configuration at every SIGHUP, and logs the outcome. Returns when a SIGHUP says that the terminal is
    /// gone. If the new configuration has mistakes, the old one stays in force.
    pub(crate) async fn reload_at(&self, hangups: &mut Hangups, daemon: &Daemon) {
        while hangups.asks_for_reload().await {
            self.reload(daemon);
        }
    }

    /// Loads the configuration as [`Self::load`] does, but only from a regular file. Reading a pipe could take forever,
    /// and the process handles no signals while it reads.
    fn load_again(&self) -> Result<Config, Failure> {
        self.file.as_deref().map_or(Ok(()), expect_regular)?;
        Ok(self.load()?)
    }

    fn reload(&self, daemon: &Daemon) {
        let config = match self.load_again() {
            Ok(config) => config,
            Err(error) => {
                tracing::error!(%error, "the configuration stays as it is");
                return;
            }
        };
        match daemon.reload(&config) {
            Ok(report) => {
                tracing::info!(applied = report.applied.join(", "), "configuration read again");
                if !report.needs_restart.is_empty() {
                    let settings = report.needs_restart.join(", ");
                    tracing::warn!(
                        settings,
                        "what has changed here takes effect with the next start only"
                    );
                }
            }
            Err(error) => tracing::error!(%error, "the configuration stays as it is"),
        }
    }
}

/// Sets up the log of the process.
pub(crate) fn start_logging(logging: &LoggingConfig) -> Result<(), Failure> {
    // The check is needed because the log filter would take an unknown level for the name of a module, and then log
    // nothing.
    Kind::LogFilter
        .check(&logging.level)
        .map_err(|rule| Failure::usage(format_args!("--logging-level {rule}")))?;
    kvatlas_telemetry::init(logging.format, &logging.level).map_err(Failure::usage)
}

/// Logs the addresses of the daemon: NATS, metrics and probes, queries over HTTP.
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
    match daemon.http_address() {
        Some(address) => tracing::info!("queries over HTTP are at http://{address}/"),
        None => tracing::info!("queries over HTTP are off (http.listen)"),
    }
}

/// Receiver of the signals that ask the process to stop: SIGTERM and SIGINT. As soon as this receiver exists, they no
/// longer end the process by themselves.
#[derive(Debug)]
pub(crate) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    last: LastSignal,
}

/// Time of the last signal that was not an echo. An echo is the same signal, sent again immediately.
#[derive(Debug, Default)]
struct LastSignal(Option<Instant>);

impl LastSignal {
    /// Maximum time between a signal and its echo, which is the same signal sent again. Programs such as `timeout` send
    /// a signal to a process, and immediately to its group. A person would take longer to send a second one.
    const ECHO_MAX: Duration = Duration::from_millis(100);

    /// Records a signal that came at the time `now`. Returns whether it is a new signal, and not an echo of the last
    /// one.
    fn is_new(&mut self, now: Instant) -> bool {
        let is_echo = self
            .0
            .is_some_and(|last| now.duration_since(last) < Self::ECHO_MAX);
        if !is_echo {
            self.0 = Some(now);
        }
        !is_echo
    }
}

impl StopSignals {
    /// Begins to listen to the signals.
    pub(crate) fn listen() -> Result<Self, Failure> {
        Ok(Self {
            terminate: listen_to(SignalKind::terminate())?,
            interrupt: listen_to(SignalKind::interrupt())?,
            last: LastSignal::default(),
        })
    }

    /// Waits for the next signal, and returns its name.
    pub(crate) async fn next(&mut self) -> &'static str {
        loop {
            let name = tokio::select! {
                _ = self.terminate.recv() => "SIGTERM",
                _ = self.interrupt.recv() => "SIGINT",
            };
            if self.last.is_new(Instant::now()) {
                return name;
            }
        }
    }
}

/// Receiver of the signal SIGHUP. The signal asks for a reload, or says that the process's terminal is gone. As soon as
/// this receiver exists, SIGHUP no longer ends the process by itself.
#[derive(Debug)]
pub(crate) struct Hangups {
    signals: Signal,
    /// Whether the process began in a terminal.
    had_terminal: bool,
}

impl Hangups {
    /// Begins to listen to the signal.
    pub(crate) fn listen() -> Result<Self, Failure> {
        Ok(Self {
            signals: listen_to(SignalKind::hangup())?,
            had_terminal: has_terminal(),
        })
    }

    /// Waits for the next signal. Returns `true` if it asks for a reload, and `false` if the terminal in which the
    /// process began is gone.
    pub(super) async fn asks_for_reload(&mut self) -> bool {
        let is_there = self.signals.recv().await.is_some();
        is_there && (!self.had_terminal || has_terminal())
    }
}

/// Whether a standard stream is an open terminal. A terminal that has been closed does not count.
fn has_terminal() -> bool {
    std::io::stdin().is_terminal() || std::io::stdout().is_terminal() || std::io::stderr().is_terminal()
}

fn listen_to(kind: SignalKind) -> Result<Signal, Failure> {
    signal(kind).map_err(|error| Failure::failed(format_args!("cannot listen to signals: {error}")))
}

#[cfg(test)]
mod tests {
    use kvatlas_telemetry::LogFormat;

    use super::*;

    #[test]
    fn one_signal_that_comes_twice_is_one() {
        let (mut last, first) = (LastSignal::default(), Instant::now());
        let after = |milliseconds| first + Duration::from_millis(milliseconds);
        assert!(last.is_new(first));
        assert!(!last.is_new(after(1)) && !last.is_new(after(99)));
        assert!(last.is_new(after(100)));
    }

    #[test]
    fn a_reload_does_not_wait_for_the_writer_of_a_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("kvatlas.toml");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        let source = |file| ConfigSource {
            file: Some(file),
            flags: BTreeMap::new(),
        };
        let refused = source(pipe).load_again().unwrap_err();
        assert!(refused.to_string().contains("is no regular file"), "{refused}");
        let absent = source(folder.path().join("absent")).load_again().unwrap_err();
        assert!(!absent.to_string().contains("is no regular file"), "{absent}");
    }

    #[test]
    fn a_level_that_there_is_not_is_wrong_usage() {
        let failure = start_logging(&LoggingConfig {
            format: LogFormat::Text,
            level: "bogus".to_owned(),
        });
        let failure = failure.unwrap_err();
        assert_eq!(failure.status, super::super::ExitStatus::Usage);
        assert!(
            failure.to_string().contains("--logging-level must be a level"),
            "{failure}"
        );
    }
}
