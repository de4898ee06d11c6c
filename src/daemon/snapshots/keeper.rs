//! Keeper of a running daemon's snapshots. It loads a snapshot at the start, writes snapshots at regular intervals and
//! at the stop, and exchanges them with the Object Store.

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::{Stream, StreamExt};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use kvatlas_client::unix_time_us;

use crate::history::{FILE_BYTES_MAX, History, SavedHistory};
use crate::lanes::{ServerClock, snapshot_limits};
use crate::shared::{Shared, Stage};
use kvatlas_config::ObjectStoreConfig;
use kvatlas_process::admin::Latch;
use kvatlas_process::broker::{Buffer, ConnectError, ConnectionNotice, connect_counted};
use kvatlas_process::instance_name;
use kvatlas_telemetry::SnapshotMetrics;
use kvatlas_telemetry::labels::{Connection, SnapshotFailure};

use super::claim::{Claim, Deployment};
use super::directory::{DirectoryError, SnapshotDirectory};
use super::failing::SnapshotFailing;
use super::object_store::{ObjectStoreError, SnapshotStore};
use super::restore::{RestoreError, Restored, Restorer};
use super::save::Snapshotter;
use kvatlas_process::storage::Storage;
use kvatlas_process::storage::{DirectoryLock, LockError};

/// Reason why a daemon cannot start with its snapshots.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotStartError {
    /// Snapshot directory cannot be used.
    #[error("{0}; give a directory that the daemon may write to with --snapshots-directory")]
    Directory(#[from] DirectoryError),
    /// Another daemon uses the snapshot directory.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// Connecting to the Object Store failed.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Object Store cannot be used.
    #[error(transparent)]
    ObjectStore(#[from] ObjectStoreError),
    /// Newest snapshot cannot be restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// Task that reads the snapshot was interrupted.
    #[error("reading the snapshot was interrupted: {0}")]
    Interrupted(#[from] tokio::task::JoinError),
}

/// Name of the file with the history of holders' states.
const HISTORY_FILE: &str = "states.history";

/// Keeper that writes the snapshots of a running daemon.
pub(crate) struct SnapshotKeeper {
    history: Arc<History>,
    snapshotter: Arc<Snapshotter>,
    store: Option<SnapshotStore>,
    last_upload: Mutex<Option<Instant>>,
    failing: Arc<SnapshotFailing>,
    metrics: Arc<SnapshotMetrics>,
    lock: Mutex<Option<DirectoryLock>>,
}

/// Restores the newest snapshot, and begins to write new ones, as a task of `upkeep`. Returns `None` if no directory is
/// configured.
pub(crate) async fn start_snapshots(
    shared: &Shared,
    storage: Arc<dyn Storage>,
    upkeep: &Stage,
) -> Result<Option<Arc<SnapshotKeeper>>, SnapshotStartError> {
    let config = &shared.config.snapshots;
    let Some(path) = &config.directory else {
        shared.readiness.set(Latch::SnapshotLoaded);
        return Ok(None);
    };
    let directory = SnapshotDirectory::open_on(storage, path, config.keep)?;
    let instance = instance_name(&shared.nats.connection_name);
    let lock = DirectoryLock::take(path, &instance)?;
    let metrics = Arc::new(SnapshotMetrics::new());
    let store = match &config.object_store {
        Some(store) => Some(connect_store(shared, store, instance).await?),
        None => None,
    };
    if let Some(store) = &store {
        match store.fetch_newer(&directory, &snapshot_limits(), &metrics).await {
            Err(taken @ ObjectStoreError::Taken { .. }) => return Err(taken.into()),
            Err(error) => metrics.fetch_failed(&error),
            Ok(_) => {}
        }
    }
    restore_history(shared, &directory).await?;
    let restored = restore(shared, directory.clone(), Arc::clone(&metrics)).await?;
    log_restored(restored.as_ref(), path);
    shared.readiness.set(Latch::SnapshotLoaded);
    let snapshotter = Snapshotter::new(
        Arc::clone(&shared.pool),
        directory,
        Arc::clone(&shared.position),
        Arc::clone(&shared.trust),
    );
    let keeper = Arc::new(SnapshotKeeper {
        history: Arc::clone(&shared.history),
        snapshotter: Arc::new(snapshotter),
        store,
        last_upload: Mutex::new(None),
        failing: Arc::clone(&shared.snapshot_failing),
        metrics,
        lock: Mutex::new(Some(lock)),
    });
    upkeep.spawn_to_end(Arc::clone(&keeper).save_regularly(config.interval, upkeep.stop.clone()));
    Ok(Some(keeper))
}

async fn connect_store(
    shared: &Shared,
    config: &ObjectStoreConfig,
    instance: String,
) -> Result<SnapshotStore, ConnectError> {
    const CAPACITY: usize = 1024;
    let readiness = Arc::clone(&shared.readiness);
    // A starting daemon makes no other connection before this one, so the readiness shows this connection's trouble.
    let notice = move |notice: &ConnectionNotice| match notice {
        ConnectionNotice::Connected => readiness.set_trouble(Latch::SnapshotLoaded, None),
        ConnectionNotice::Error(text) => readiness.set_trouble(Latch::SnapshotLoaded, Some(text.clone())),
        _ => {}
    };
    // Snapshots have a connection of their own, so that large files do not hold up events.
    let buffer = Buffer::of_messages(CAPACITY);
    let client = connect_counted(&shared.nats, Connection::Snapshots, "snapshots", buffer, notice).await?;
    let deployment = Deployment {
        prefix: shared.config.subjects.prefix.clone(),
        shard: shared.config.sharding.shard,
    };
    Ok(SnapshotStore {
        jetstream: async_nats::jetstream::new(client.clone()),
        client,
        config: config.clone(),
        keep: shared.config.snapshots.keep.max(1),
        claim: Claim::new(&config.bucket, &deployment, instance),
        clock: ServerClock::default(),
    })
}

/// Reads the file with the history of holders' states, if there is one.
async fn restore_history(shared: &Shared, directory: &SnapshotDirectory) -> Result<(), SnapshotStartError> {
    let (history, directory) = (Arc::clone(&shared.history), directory.clone());
    let restoring = tokio::task::spawn_blocking(move || match directory.read(HISTORY_FILE, FILE_BYTES_MAX) {
        Ok(None) => {}
        Ok(Some(bytes)) => match SavedHistory::decode(&bytes) {
            Ok(saved) => history.restore(saved),
            Err(error) => history.file_failed(&error),
        },
        Err(error) => history.file_failed(&error),
    });
    Ok(restoring.await?)
}

async fn restore(
    shared: &Shared,
    directory: SnapshotDirectory,
    metrics: Arc<SnapshotMetrics>,
) -> Result<Option<Restored>, SnapshotStartError> {
    let events = &shared.config.events;
    let restorer = Restorer {
        pool: Arc::clone(&shared.pool),
        limits: snapshot_limits(),
        stream: events
            .transport
            .keeps_events()
            .then(|| events.stream.name.clone()),
        position: Arc::clone(&shared.position),
        trust: Arc::clone(&shared.trust),
        metrics,
    };
    let runtime = Handle::current();
    let restoring = tokio::task::spawn_blocking(move || restorer.restore_newest(&directory, &runtime));
    Ok(restoring.await??)
}

fn log_restored(restored: Option<&Restored>, directory: &Path) {
    let Some(restored) = restored else {
        tracing::info!(directory = %directory.display(), "there is no snapshot to start from");
        return;
    };
    let then = match &restored.cursor {
        Some(_) => "the events stream is read from there",
        None => "holders are unverified until their next batch",
    };
    tracing::info!(
        path = %restored.path.display(), holders = restored.totals.holders, blocks = restored.totals.blocks,
        created_us = restored.created_us, stream_sequence = restored.cursor.as_ref().map(|cursor| cursor.sequence),
        elapsed_seconds = restored.elapsed.as_secs_f64(), "started from a snapshot; {then}"
    );
}

/// Writes the history of holders' states to a file in the directory of the snapshots.
fn save_history(history: &History, directory: &SnapshotDirectory) {
    let saved = history.save(unix_time_us() / 1_000_000);
    let written = match saved.encode() {
        Ok(bytes) => directory
            .replace(HISTORY_FILE, &bytes)
            .map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    if let Err(error) = written {
        history.file_failed(&error);
    }
}

/// Calls `save` for each item of `due`. Calls `send` whenever a `save` has ended since the previous `send` began. When
/// `due` ends, a running `send` is cancelled.
///
/// The two run in parallel: sending delays no save, however long it waits for the broker.
async fn save_and_send<S: Future<Output = ()>, U: Future<Output = ()>>(
    mut due: impl Stream<Item = ()> + Unpin,
    save: impl Fn() -> S,
    send: impl Fn() -> U,
) {
    // However many saves end during one call of `send`, they lead to a single further call.
    let saved = Notify::new();
    let saving = async {
        while due.next().await.is_some() {
            save().await;
            saved.notify_one();
        }
    };
    let sending = async {
        loop {
            saved.notified().await;
            send().await;
        }
    };
    tokio::select! {
        () = saving => {}
        () = sending => {}
    }
}

impl SnapshotKeeper {
    /// Writes a snapshot every `period` until `stop` is cancelled, and sends it to the Object Store when an upload is
    /// due. When the daemon stops, a snapshot that is being written is finished, but a snapshot that is being sent is
    /// given up.
    async fn save_regularly(self: Arc<Self>, period: Duration, stop: CancellationToken) {
        let start = tokio::time::Instant::now() + period;
        let mut interval = tokio::time::interval_at(start, period);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let due = futures_util::stream::unfold((interval, stop), |(mut interval, stop)| async move {
            tokio::select! {
                () = stop.cancelled() => None,
                _ = interval.tick() => Some(((), (interval, stop))),
            }
        });
        let keeper = &self;
        let save = || async move {
            // `save` counts and logs its failure.
            let _ = keeper.save().await;
        };
        save_and_send(pin!(due), save, || keeper.upload_if_due()).await;
    }

    /// Writes one snapshot, and counts the success or the failure. The error says why no snapshot was written.
    pub(crate) async fn save(&self) -> Result<(), String> {
        let (snapshotter, metrics) = (Arc::clone(&self.snapshotter), Arc::clone(&self.metrics));
        let (runtime, history) = (Handle::current(), Arc::clone(&self.history));
        let server_us = self.store.as_ref().and_then(|store| store.clock.time_us());
        let begun_us = server_us.unwrap_or_else(unix_time_us);
        let written = tokio::task::spawn_blocking(move || match snapshotter.save(begun_us, &runtime) {
            Ok(saved) => {
                save_history(&history, snapshotter.directory());
                metrics.written(saved.bytes, saved.elapsed, SystemTime::now());
                if let Some(error) = &saved.prune_error {
                    metrics.prune_failed(error);
                }
                Ok(())
            }
            Err(error) => {
                metrics.failed(error.failure(), &error);
                Err(error.to_string())
            }
        });
        let written = written.await.unwrap_or_else(|error| {
            self.metrics.failed(SnapshotFailure::Interrupted, &error);
            Err(error.to_string())
        });
        self.failing.note_written(written.clone(), unix_time_us());
        written
    }

    /// Sends the newest snapshot to the Object Store, unless one was sent a short time ago.
    async fn upload_if_due(&self) {
        let Some(store) = &self.store else { return };
        let is_due = |last: &Instant| last.elapsed() >= store.config.interval;
        if !self.last_upload.lock().as_ref().is_none_or(is_due) {
            return;
        }
        let started = Instant::now();
        let sent = match self.send_newest(store).await {
            Ok(None) => return,
            Ok(Some((name, bytes))) => {
                *self.last_upload.lock() = Some(started);
                self.metrics.uploaded(&name, bytes, started.elapsed());
                Ok(())
            }
            Err(error) => {
                self.metrics.upload_failed(&error);
                store.mend_requests().await;
                Err(error.to_string())
            }
        };
        self.failing.note_sent(sent, unix_time_us());
    }

    /// Sends the newest snapshot. Returns its name and bytes; `None` if there is no snapshot.
    async fn send_newest(&self, store: &SnapshotStore) -> Result<Option<(String, u64)>, ObjectStoreError> {
        let Some(path) = self.snapshotter.directory().snapshots()?.into_iter().next() else {
            return Ok(None);
        };
        let bytes = store.upload(&path, &self.metrics).await?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(Some((name.into_owned(), bytes)))
    }

    /// Releases the lock on the directory, so that another daemon can use the directory. Must be called only after the
    /// last write.
    pub(crate) fn leave(&self) {
        self.lock.lock().take();
    }

    /// Updates the metric of the newest snapshot's age.
    pub(crate) fn publish_age(&self) {
        self.metrics.publish_age(SystemTime::now());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Tests that an upload does not delay snapshots, even if the broker never answers.
    #[tokio::test]
    async fn an_upload_that_waits_holds_up_no_snapshot() {
        let (saves, sends) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let save = || async {
            saves.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
        };
        let send = || async {
            sends.fetch_add(1, Ordering::Relaxed);
            std::future::pending::<()>().await;
        };
        save_and_send(futures_util::stream::iter([(); 5]), save, send).await;
        assert_eq!(
            (saves.load(Ordering::Relaxed), sends.load(Ordering::Relaxed)),
            (5, 1)
        );
    }
}
