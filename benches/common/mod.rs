//! Functions that several benches use.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each bench uses some of it, and fails by panicking"
)]

#[path = "../../tests/integration/support/publisher.rs"]
pub(crate) mod publisher;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Returns a number that looks like a hash (SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Child process that is killed when the value is dropped.
pub(crate) struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `kvatlas serve` with these further arguments.
pub(crate) fn start_daemon(url: &str, arguments: &[&str]) -> KilledOnDrop {
    let mut serve = Command::new(env!("CARGO_BIN_EXE_kvatlas"));
    serve.args(["serve", "--nats-url", url, "--admin-listen", "off"]);
    serve.args(arguments);
    KilledOnDrop(serve.stdin(Stdio::null()).spawn().unwrap())
}

/// Returns the processor time of all threads of a process so far; 0 if the system does not tell.
pub(crate) fn processor_time(process: &KilledOnDrop) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.0.id()));
    let nanos = tasks.into_iter().flatten().flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanos.sum())
}
