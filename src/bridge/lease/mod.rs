//! The lease: decides which of several bridges speaks for a holder, that is, reports it to daemons.
//!
//! All bridges of a group follow the engines. For each holder one bridge speaks to daemons; the others are ready to take
//! over. They agree by beats (short periodic messages) over NATS, on `PREFIX.v1.bridges.GROUP`: see `table`. A bridge that
//! begins to speak gives daemons all that it knows of the holder, in a new epoch. So nothing depends on the messages of the
//! bridge that spoke before.

mod beat;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use async_nats::{Client, Subscriber};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64;

use kvatlas_client::publish::{PublishedHolder, Voice};

use kvatlas_telemetry::log_gated;

use beat::LeaseBeat;
use table::LeaseTable;

pub use table::Times;

/// Pause between two decisions about which holders to report. A decision follows from the beats (short messages) of the
/// other bridges.
const LOOK: Duration = Duration::from_millis(25);
/// Pause before the next attempt to subscribe, after one failed.
const SUBSCRIBE_PAUSE: Duration = Duration::from_secs(1);

/// Maximum time without any beat, even of the bridge's own, after which it subscribes again.
const UNHEARD_MAX: Duration = Duration::from_secs(2);

/// Settings of the lease that the bridges of a group share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseOptions {
    /// Name of the group: the last token of the subject of its beats.
    pub group: String,
    /// Times of the lease, the same in all bridges of the group.
    pub times: Times,
}

/// How well a bridge sees a holder. Of several bridges, the one that sees the holder best speaks for it. The numbers go over the
/// wire and must stay stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sight {
    /// The bridge does not see the holder.
    None = 0,
    /// The bridge sees the holder, but some of its content is not known for certain.
    Doubtful = 1,
    /// All of the holder's content is known.
    Whole = 2,
}

/// A bridge's part of the lease, which decides which bridge reports which holder. Clones share it.
#[derive(Clone)]
pub(super) struct Lease {
    table: Arc<Mutex<LeaseTable>>,
}

/// One holder's entry in the lease. The bridge may report the holder to daemons until this value is dropped.
pub(super) struct LeaseShare {
    table: Arc<Mutex<LeaseTable>>,
    holder: u64,
    number: u64,
    sight: Arc<AtomicU8>,
    turn: watch::Receiver<Option<u64>>,
}

/// Turns of a bridge. A turn is a period in which the bridge reports a holder to daemons.
#[derive(Debug, Clone)]
pub(super) struct Turns(Option<watch::Receiver<Option<u64>>>);

impl Turns {
    /// Makes the turn of a bridge that has no lease. The turn never ends.
    pub(super) fn always() -> Self {
        Self(None)
    }

    /// Waits until it is the bridge's turn to report the holder to daemons.
    pub(super) async fn begin(&mut self) {
        if let Some(turn) = &mut self.0
            && turn.wait_for(Option::is_some).await.is_err()
        {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the present turn ends, so that the bridge no longer reports the holder. Waits for ever if the turn
    /// never ends.
    pub(super) async fn end(&mut self) {
        let changed = match &mut self.0 {
            Some(turn) => turn.changed().await.is_ok(),
            None => false,
        };
        if !changed {
            std::future::pending::<()>().await;
        }
    }
}

impl LeaseShare {
    /// Returns the turns in which this bridge reports the holder to daemons.
    pub(super) fn turns(&self) -> Turns {
        Turns(Some(self.turn.clone()))
    }

    /// Stores how well this bridge sees the holder.
    pub(super) fn note(&self, sight: Sight) {
        self.sight.store(sight as u8, Ordering::Release);
    }

    /// Whether this bridge now reports the holder to daemons.
    pub(super) fn speaks(&self) -> bool {
        self.turn.borrow().is_some()
    }
}

impl Drop for LeaseShare {
    fn drop(&mut self) {
        self.table.lock().remove(self.holder, self.number);
    }
}

impl Lease {
    pub(super) fn new(times: Times) -> Self {
        let table = LeaseTable::new(fastrand::u64(..), times);
        Self {
            table: Arc::new(Mutex::new(table)),
        }
    }

    /// Adds the holder to the lease. Returns its entry, and the [`Voice`] that tells the holder's publisher when to
    /// publish. `None` if the lease has too many holders.
    pub(super) fn share(&self, holder: &PublishedHolder) -> Option<(LeaseShare, Voice)> {
        let PublishedHolder {
            namespace,
            worker,
            rank,
        } = holder;
        let holder = xxh3_64(format!("{namespace}.{worker}.{rank}").as_bytes());
        let (number, voice, sight) = self.table.lock().add(holder, Instant::now())?;
        let share = LeaseShare {
            table: Arc::clone(&self.table),
            holder,
            number,
            sight,
            turn: voice.turn.clone(),
        };
        Some((share, voice))
    }

    /// Sends beats (messages with the bridge's claims) on `subject`, until `stop`. The last beat tells the other
    /// bridges for which holders this bridge no longer speaks.
    pub(super) fn start(
        &self,
        nats: Client,
        subject: String,
        beat: Duration,
        stop: CancellationToken,
    ) -> JoinHandle<()> {
        let task = LeaseTask {
            table: Arc::clone(&self.table),
            nats,
            subject,
            beat,
        };
        tokio::spawn(task.run(stop))
    }
}

struct LeaseTask {
    table: Arc<Mutex<LeaseTable>>,
    nats: Client,
    subject: String,
    beat: Duration,
}

impl LeaseTask {
    async fn run(self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            match self.nats.subscribe(self.subject.clone()).await {
                Ok(beats) => self.beat_until(beats, &stop).await,
                Err(error) => self.log_failure(&error),
            }
            stop.run_until_cancelled(tokio::time::sleep(SUBSCRIBE_PAUSE))
                .await;
        }
        self.send().await;
        // Other bridges then need not wait for the end of the term.
        let _ = self.nats.flush().await;
    }

    /// Exchanges beats with the other bridges. A beat says which holders its sender reports. Ends when the task is
    /// stopped or the subscription ends.
    ///
    /// The bridge's own beats come back. If none does, the server may have withdrawn the right to the subscription, and
    /// given it back. So the bridge subscribes again.
    async fn beat_until(&self, mut beats: Subscriber, stop: &CancellationToken) {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut beat_at = Instant::now();
        let mut heard_at = Instant::now();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                message = beats.next() => match message {
                    Some(message) => {
                        heard_at = Instant::now();
                        if let Some(beat) = LeaseBeat::decode(&message.payload) {
                            self.table.lock().heard(beat, Instant::now());
                        }
                    }
                    None => return,
                },
                _ = looks.tick() => {}
            }
            if heard_at.elapsed() > UNHEARD_MAX {
                heard_at = Instant::now();
                match self.nats.subscribe(self.subject.clone()).await {
                    Ok(again) => beats = again,
                    Err(error) => return self.log_failure(&error),
                }
            }
            self.decide();
            if self.table.lock().is_news() || Instant::now() >= beat_at {
                beat_at = Instant::now() + self.beat;
                self.send().await;
            }
        }
    }

    fn decide(&self) {
        let decided = self.table.lock().decide(Instant::now());
        let (begun, ended, has_lapsed) = (decided.begun, decided.ended, decided.has_lapsed);
        if begun + ended > 0 || has_lapsed {
            log_gated!(info "the bridge speaks for other holders than before" up to 8; begun, ended, has_lapsed);
        }
    }

    async fn send(&self) {
        let beat = self.table.lock().beat(Instant::now()).encode();
        if let Err(error) = self.nats.publish(self.subject.clone(), beat.into()).await {
            self.log_failure(&error);
        }
    }

    fn log_failure(&self, error: &dyn std::fmt::Display) {
        log_gated!(
            error "the lease of the bridges cannot be kept: this one is silent";
            subject = &self.subject, %error
        );
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kvatlas_core::wire::{NamespaceName, WorkerName};
    use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker, find_nats_server};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn write_rights(folder: &Path, permissions: &str) {
        let text = format!("authorization {{ users: [ {{ user: bridge, password: x {permissions} }} ] }}");
        std::fs::write(folder.join("rights.conf"), text).unwrap();
    }

    /// Makes the server load its configuration again, with these permissions of the bridge.
    fn reload(server: &Path, broker: &EmbeddedBroker, folder: &Path, permissions: &str) {
        write_rights(folder, permissions);
        let signal = format!("reload={}", broker.pid());
        let done = std::process::Command::new(server)
            .args(["--signal", &signal])
            .status();
        assert!(done.unwrap().success());
    }

    #[tokio::test]
    async fn a_bridge_speaks_again_when_it_may_hear_beats_again() {
        let server = find_nats_server(None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        write_rights(folder.path(), "");
        // The server takes every path as relative to its own directory.
        let name = folder.path().file_name().unwrap().to_string_lossy();
        let options = BrokerOptions {
            config_lines: vec![format!("include \"../{name}/rights.conf\"")],
            ..BrokerOptions::default()
        };
        let broker = EmbeddedBroker::start_with(&server, options).await.unwrap();
        let login = async_nats::ConnectOptions::with_user_and_password("bridge".to_owned(), "x".to_owned());
        let nats = login.connect(broker.url()).await.unwrap();
        let times = Times::default();
        let lease = Lease::new(times);
        let holder = PublishedHolder {
            namespace: NamespaceName::new("m").unwrap(),
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 0,
        };
        let (share, _voice) = lease.share(&holder).unwrap();
        share.note(Sight::Whole);
        let stop = CancellationToken::new();
        let task = lease.start(
            nats,
            "kvatlas.v1.bridges.pair".to_owned(),
            times.beat,
            stop.clone(),
        );
        let mut turns = share.turns();
        let begun = async |turns: &mut Turns| tokio::time::timeout(PATIENCE, turns.begin()).await;
        begun(&mut turns).await.expect("the bridge speaks");

        let denied = ", permissions: { subscribe: { deny: \"kvatlas.v1.bridges.>\" } }";
        reload(&server, &broker, folder.path(), denied);
        tokio::time::timeout(PATIENCE, turns.end())
            .await
            .expect("the bridge falls silent");
        reload(&server, &broker, folder.path(), "");
        begun(&mut turns).await.expect("the bridge speaks again");
        stop.cancel();
        task.await.unwrap();
    }
}
