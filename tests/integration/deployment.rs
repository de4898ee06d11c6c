//! Files that are shipped for running the daemon, each checked by its own tool, such as the systemd unit and the
//! alerts.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::process::{kvatlas, without_settings};
use crate::support::{PATIENCE, broker, skipped};

fn shipped(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

/// Returns the output of a tool that accepts a file; `None` if the tool is not installed.
fn accepted(tool: &str, arguments: &[&str], file: &str) -> Option<String> {
    let path = shipped(file);
    let output = Command::new(tool)
        .args(arguments)
        .arg(path.file_name()?)
        .current_dir(path.parent()?)
        .output();
    let Ok(output) = output else {
        skipped(&format!("{tool}, which checks deploy/{file}, is not installed"));
        return None;
    };
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{tool} {arguments:?} deploy/{file}: {said}"
    );
    Some(said)
}

#[test]
fn each_alert_fires_for_its_fault_and_has_a_runbook() {
    let rules = std::fs::read_to_string(shipped("prometheus/alerts.yml")).unwrap();
    let tests = std::fs::read_to_string(shipped("prometheus/alerts_test.yml")).unwrap();
    let runbook = std::fs::read_to_string(shipped("operating.md")).unwrap();
    let alerts: Vec<&str> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    assert!(!alerts.is_empty());
    for alert in &alerts {
        assert!(
            tests.contains(&format!("alertname: {alert}\n")),
            "{alert} has no test"
        );
        assert!(
            runbook.contains(&format!("\n### {alert}\n")),
            "{alert} has no runbook"
        );
        let url = format!("/deploy/operating.md#{}\n", alert.to_lowercase());
        assert!(rules.contains(&url), "{alert} leads nowhere");
    }
    // The descriptions of the alerts are those of the runbook, as the script that inserts them confirms.
    assert_eq!(rules.matches(" description: \"").count(), alerts.len());
    accepted("python3", &[], "prometheus/annotate.py");
    accepted("promtool", &["check", "rules"], "prometheus/alerts.yml");
    accepted("promtool", &["test", "rules"], "prometheus/alerts_test.yml");
    accepted("promtool", &["test", "rules"], "prometheus/alerts_days_test.yml");
}

#[test]
fn the_chart_has_the_same_alerts() {
    let [one, other] = ["prometheus/alerts.yml", "helm/kvatlas/files/alerts.yml"]
        .map(|path| std::fs::read_to_string(shipped(path)).unwrap());
    assert_eq!(one, other, "copy deploy/prometheus/alerts.yml to the chart");
}

#[test]
fn the_units_leave_their_services_no_more_than_they_need() {
    let arguments = ["security", "--offline=true", "--threshold=25", "--no-pager"];
    for unit in ["systemd/kvatlas.service", "systemd/kvatlas-bridge.service"] {
        let said = accepted("systemd-analyze", &arguments, unit);
        assert!(said.is_none_or(|said| said.contains("Overall exposure level")));
    }
}

/// Waits until the daemon sends the message `wanted` to the socket of its supervisor, which is systemd outside tests.
fn told(socket: &UnixDatagram, wanted: &str) {
    let deadline = Instant::now() + PATIENCE;
    let mut buffer = [0; 256];
    while Instant::now() < deadline {
        let Ok(length) = socket.recv(&mut buffer) else {
            continue;
        };
        if std::str::from_utf8(&buffer[..length]).unwrap().trim() == wanted {
            return;
        }
    }
    panic!("the supervisor was not told {wanted} within {PATIENCE:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_supervisor_is_told_of_the_start_the_life_and_the_end() {
    supervised(&["serve", "--admin-listen", "off"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_supervisor_of_a_bridge_is_told_too() {
    // The engine does not exist, and the bridge keeps trying to connect.
    let engine = "--engine=gpu-0=tcp://127.0.0.1:1";
    supervised(&["bridge", "--admin-listen", "off", "--model", "m", engine]).await;
}

async fn supervised(arguments: &[&str]) {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut daemon = kvatlas(arguments)
        .args(["--nats-url", broker.url()])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "200000")
        .spawn()
        .unwrap();
    told(&socket, "READY=1");
    told(&socket, "WATCHDOG=1");
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    told(&socket, "STOPPING=1");
    assert!(daemon.wait().unwrap().success());
}

/// Python program that runs the command in its arguments in a new terminal. When the command has printed that it is
/// ready, the program closes the terminal. It ends with the exit code of the command.
const CLOSE_TERMINAL: &str = "
import os, pty, sys
process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[1], sys.argv[1:])
said = b''
while b' ready' not in said:
    said += os.read(terminal, 4096)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 255)
";

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_whose_terminal_is_closed_ends() {
    let broker = broker().await;
    let daemon = ["serve", "--admin-listen", "off", "--nats-url", broker.url()];
    let mut python = Command::new("python3");
    without_settings(&mut python);
    python
        .args(["-c", CLOSE_TERMINAL, env!("CARGO_BIN_EXE_kvatlas")])
        .args(daemon);
    let ending = tokio::task::spawn_blocking(move || python.status());
    let ended = tokio::time::timeout(PATIENCE, ending).await;
    let status = ended
        .expect("the daemon ends with its terminal")
        .unwrap()
        .unwrap();
    assert_eq!(status.code(), Some(0));
}
