//! The real binary, which runs a single command or a daemon that can be killed.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use serde_json::Value;

use super::PATIENCE;

/// Returns a command that runs the binary, without the settings of the person who runs the tests.
pub fn kvatlas(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvatlas"));
    without_settings(&mut command);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Removes from a command the kvatlas and NATS settings that it would inherit from this process's environment.
pub fn without_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVATLAS_") {
            command.env_remove(name);
        }
    }
    // A context that this person has chosen for the nats command line must not count.
    command
        .env("XDG_CONFIG_HOME", "/nonexistent")
        .env_remove("NATS_CONTEXT");
}

/// Settings that suit slow machines, and publishers without heartbeats: long times until the daemon calls a holder
/// behind or stale. Tests about these times set other values.
const PATIENT: [(&str, &str); 2] = [
    ("events.behind_after_ms", "30000"),
    ("namespace_defaults.stale_after_ms", "30000"),
];

/// Returns command-line flags for `settings`, and for the [`PATIENT`] settings that `settings` does not override. A
/// flag for `true` has no value.
fn flags(settings: &[(&str, &str)]) -> Vec<String> {
    let is_unsaid = |patient: &(&str, &str)| settings.iter().all(|(key, _)| *key != patient.0);
    let patient = PATIENT.into_iter().filter(is_unsaid);
    let settings: Vec<_> = settings.iter().copied().chain(patient).collect();
    let flag = |(key, value): &(&str, &str)| {
        let name = format!("--{}", key.replace(['.', '_'], "-"));
        std::iter::once(name).chain((*value != "true").then(|| (*value).to_owned()))
    };
    settings.iter().flat_map(flag).collect()
}

/// Daemon (`kvatlas serve`) or bridge in a process of its own, which is killed when the value is dropped. Its metrics
/// are its own, whereas daemons in the test's process share theirs.
pub struct Process {
    daemon: Child,
    /// Lines of the process's log, if the log is read.
    log: Receiver<String>,
    admin_address: Option<SocketAddr>,
}

impl Process {
    /// Starts a daemon for the broker at `url`, without an admin listener, and returns at once.
    pub fn start(url: &str, settings: &[(&str, &str)]) -> Self {
        let mut serve = kvatlas(&["serve", "--nats-url", url, "--admin-listen", "off"]);
        serve.args(["--logging-level", "warn"]).args(flags(settings));
        let (_, log) = channel();
        Self {
            daemon: serve.spawn().unwrap(),
            log,
            admin_address: None,
        }
    }

    /// Starts a daemon for the broker at `url`, with an admin listener, and waits until it is ready.
    pub fn serve(url: &str, settings: &[(&str, &str)]) -> Self {
        let mut arguments = vec!["--nats-url".to_owned(), url.to_owned()];
        arguments.extend(flags(settings));
        let mut process = Self::logged(&arguments);
        process.wait_until_listening();
        process.wait_for_line(|line| message(line) == "ready");
        process
    }

    /// Starts a daemon with these further arguments, an admin listener, and a log for [`Self::wait_for_line`].
    pub fn logged(arguments: &[impl AsRef<std::ffi::OsStr>]) -> Self {
        let mut serve = kvatlas(&[
            "serve",
            "--logging-format",
            "json",
            "--admin-listen",
            "127.0.0.1:0",
        ]);
        serve.args(arguments);
        Self::read(serve)
    }

    /// Starts a bridge for the broker at `url`, with these further arguments, and waits for its admin listener.
    pub fn bridge(url: &str, arguments: &[&str]) -> Self {
        Self::bridge_in(url, arguments, &[])
    }

    /// Starts a bridge as [`Self::bridge`] does, with further environment variables.
    pub fn bridge_in(url: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let listening = ["--admin-listen", "127.0.0.1:0", "--logging-json"];
        let mut bridge = kvatlas(&["bridge", "--nats-url", url]);
        bridge
            .args(listening)
            .args(arguments)
            .envs(variables.iter().copied());
        let mut process = Self::read(bridge);
        let line = process.wait_for_line(|line| message(line) == "admin listener started");
        process.admin_address = Some(line["local_addr"].as_str().unwrap().parse().unwrap());
        process
    }

    /// Starts `kvatlas up`, which is a daemon and a bridge in one process, for the broker at `url`. Waits for the admin
    /// listener of the process.
    pub fn up(url: &str, arguments: &[&str]) -> Self {
        let settings = ["--logging-format", "json", "--http-listen", "127.0.0.1:0"];
        let mut up = kvatlas(&["up", "--nats-url", url, "--admin-listen", "127.0.0.1:0"]);
        up.args(settings).args(arguments);
        let mut process = Self::read(up);
        process.wait_until_listening();
        process
    }

    /// Waits for the daemon's admin listener.
    fn wait_until_listening(&mut self) {
        let prefix = "metrics and probes are at http://";
        let line = self.wait_for_line(|line| message(line).starts_with(prefix));
        let address = message(&line).trim_start_matches(prefix).trim_end_matches('/');
        self.admin_address = Some(address.parse().unwrap());
    }

    /// Starts a command, and reads its log.
    fn read(mut command: Command) -> Self {
        let mut daemon = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(daemon.stderr.take().unwrap()).lines();
        let (line, log) = channel();
        // The log is read to its end in any case, because a full pipe would block the daemon.
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|text| {
                let _ = line.send(text);
            });
        });
        Self {
            daemon,
            log,
            admin_address: None,
        }
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.daemon.id()
    }

    /// Whether the process still runs.
    pub fn runs(&mut self) -> bool {
        self.daemon.try_wait().unwrap().is_none()
    }

    /// Returns the address of the metrics of a process from [`Self::serve`] or [`Self::bridge`].
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address.expect("a daemon with an admin listener")
    }

    /// Returns the next line of the log for which `is_wanted` is true. Fails the test if the process ends first, or
    /// logs nothing for a long time.
    pub fn wait_for_line(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Value {
        let mut read = Vec::new();
        while let Ok(line) = self.log.recv_timeout(PATIENCE) {
            match serde_json::from_str(&line) {
                Ok(parsed) if is_wanted(&parsed) => return parsed,
                _ => read.push(line),
            }
        }
        panic!(
            "the daemon ended, or said nothing for {PATIENCE:?}; its log:\n{}",
            read.join("\n")
        );
    }

    /// Stops the process by a signal. Returns its exit code and the rest of its log.
    pub fn stop(mut self) -> (Option<i32>, String) {
        kill_process(Pid::from_child(&self.daemon), Signal::TERM).unwrap();
        let rest: Vec<String> = self.log.iter().collect();
        (self.daemon.wait().unwrap().code(), rest.join("\n"))
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.daemon), signal).unwrap();
    }

    /// Stops the process, and waits until none of its threads runs. On a busy machine, a thread may notice the signal
    /// long after it was sent.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let changed = waitpid(Some(Pid::from_child(&self.daemon)), WaitOptions::UNTRACED);
        let (_, status) = changed.unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }

    /// Kills the process with SIGKILL: without a drain, and without a last snapshot.
    pub fn kill(mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
    }
}

/// Returns the message of a line of the log.
pub fn message(line: &Value) -> &str {
    line["message"].as_str().unwrap_or_default()
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both calls fail only if the process has ended already.
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Returns the peak memory of a process, in bytes.
pub fn memory_peak(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
}
