//! What several benches need.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each bench uses some of it, and fails by panicking"
)]

#[path = "../../tests/integration/support/publisher.rs"]
pub(crate) mod publisher;

use std::process::{Child, Command, Stdio};

/// A number that looks like a hash (SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A child process that ends with the bench.
pub(crate) struct KilledOnDrop(pub Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `kvatlas serve` with these further arguments.
pub(crate) fn start_daemon(url: &str, arguments: &[&str]) -> KilledOnDrop {
    let mut serve = Command::new(env!("CARGO_BIN_EXE_kvatlas"));
    // `cargo bench` has what the build script has set in the environment, and the daemon takes that for a setting.
    serve.env_remove("KVATLAS_COMMIT");
    serve.args(["serve", "--nats-url", url, "--admin-listen", "off"]);
    serve.args(arguments);
    KilledOnDrop(serve.stdin(Stdio::null()).spawn().unwrap())
}
