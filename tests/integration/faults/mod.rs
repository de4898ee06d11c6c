//! Faults that users of a daemon meet sooner or later: it is killed, its broker is killed, the network fails, or disks are full or
//! lie. Clocks jump, there is too little room, or replicas are restarted one after the other. While it happens no reply that
//! is marked exact is wrong; afterwards every reply is the truth.
//!
//! Each scenario prints what its replies were worth. `deploy/faults.sh` runs the long form, and with it the scenarios of
//! [`crate::resync`]: what publishers, and the way from them, do wrong.

mod broker;
mod capacity;
mod clocks;
mod cluster;
mod daemon_killed;
mod disk;
mod network;
mod replicas;
mod snapshot_files;

use std::time::Duration;

use crate::support::Client;
use crate::support::{eventually, fault_runs as runs};
use kvatlas_client::ClientError;

/// How long a router waits where the only daemon may be gone. Longer than the delays of the network.
const SHORT_PATIENCE: Duration = Duration::from_millis(400);

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// Waits until some daemon answers, whatever it knows.
async fn answers(client: &Client) {
    eventually("a daemon answers", async || match client.status().await {
        Ok(_) | Err(ClientError::Refused(_)) => Some(()),
        Err(_) => None,
    })
    .await;
}
