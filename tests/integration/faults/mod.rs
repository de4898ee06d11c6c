//! Faults that a daemon meets sooner or later. The daemon or its broker is killed, the network fails, or disks are full
//! or damage data. Clocks jump, the index has too little room, or replicas are restarted one after the other. During a
//! fault, no reply that is marked exact may be wrong; afterwards, every reply must equal the truth.
//!
//! Each scenario prints how many of its replies were exact, degraded (not marked exact), wrong, or blind (without any
//! holder although some holder had blocks). `deploy/faults.sh` runs the long form of these scenarios and of those in
//! [`crate::resync`], which are about faults of publishers and of the network between publishers and daemon.

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

/// Time after which a router gives up a query. It suits scenarios in which the only daemon is gone at times, and it is
/// longer than the delays of the simulated network.
const SHORT_PATIENCE: Duration = Duration::from_millis(400);

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// Waits until a daemon answers, even with a refusal.
async fn answers(client: &Client) {
    eventually("a daemon answers", async || match client.status().await {
        Ok(_) | Err(ClientError::Refused(_)) => Some(()),
        Err(_) => None,
    })
    .await;
}
