//! Snapshots in the NATS Object Store. A fresh replica on another machine can start with the newest of them.
//!
//! - An object has the same name as the file of its snapshot.
//! - Replicas share a bucket. Each replica sends its snapshots, and removes all objects but the newest ones.
//! - Daemons that follow different workers cannot share a bucket. A [claim](super::claim) in the bucket names the
//!   deployment to which the bucket belongs.
//! - Two replicas that begin a snapshot in the same microsecond give it the same name. Then only the snapshot that was
//!   sent last is kept, and it is whole.
//! - An object is skipped and counted if its metadata cannot be read, or if it is a link.
//! - When a daemon starts, it fetches the newest object that is newer than its newest file, checks the object, and puts
//!   it among the files. A damaged object is skipped, as a damaged file is.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_nats::Client;
use async_nats::jetstream::context::{GetStreamError, GetStreamErrorKind};
use async_nats::jetstream::object_store::{self, ObjectMetadata, ObjectStore};
use async_nats::jetstream::stream::StorageType;
use async_nats::jetstream::{Context, ErrorCode};
use futures_util::StreamExt;
use tokio::io::AsyncReadExt;

use crate::lanes::{ServerClock, now_us};
use kvatlas_config::ObjectStoreConfig;
use kvatlas_core::snapshot::verify;
use kvatlas_core::wire::WireLimits;
use kvatlas_telemetry::SnapshotMetrics;
use kvatlas_telemetry::labels::SnapshotRejection;

use super::claim::Claim;
use super::directory::{DirectoryError, SnapshotDirectory, snapshot_name, stamp_of, unreadable, unwritable};
use kvatlas_process::broker::mend_requests;
use kvatlas_process::storage::open_regular;

/// Time for which objects are kept in a bucket that the daemon has made. An older snapshot is of no use. Pieces that a
/// killed daemon left behind expire, too.
const BUCKET_AGE_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Size of one piece of an object, in bytes. Servers usually take larger messages (`max_payload`).
const PIECE_BYTES: usize = 512 << 10;
/// Share of the time limit for fetching a snapshot that each piece may take, as a divisor: 4 stands for one quarter.
const PIECES_PATIENCE_SHARE: u32 = 4;
/// Maximum number of objects of a bucket that are read when it is listed.
const OBJECTS_MAX: usize = 10_000;
/// Maximum number of microseconds by which the time in a snapshot's name may be ahead of the server's clock. Some
/// difference is normal: clocks drift between the server's answers, and the servers of a cluster differ. A time that is
/// further ahead did not come from the server's clock.
const AHEAD_US_MAX: u64 = 5 * 60 * 1_000_000;

/// Reason why a snapshot could not be exchanged with the Object Store.
#[derive(Debug, thiserror::Error)]
pub enum ObjectStoreError {
    /// Something could not be done with the bucket or with an object.
    #[error("cannot {action} {name}: {reason}")]
    Failed {
        /// Action that was attempted.
        action: &'static str,
        /// Name of the bucket or of the object.
        name: String,
        /// Error text of the client library.
        reason: String,
    },
    /// Bucket belongs to daemons that follow other workers.
    #[error(
        "the Object Store bucket {bucket} has the snapshots of {deployment} (says {instance}), and this daemon follows \
         {own}; give it a bucket of its own (snapshots.object_store)"
    )]
    Taken {
        /// Name of the bucket.
        bucket: String,
        /// Deployment whose snapshots the bucket has.
        deployment: String,
        /// Name of the daemon of `deployment` that has claimed the bucket last.
        instance: String,
        /// Deployment of this daemon.
        own: String,
    },
    /// Object has more bytes than the configuration allows.
    #[error("{name} has more than {bytes_max} bytes; raise snapshots.object_store_max_bytes")]
    TooLarge {
        /// Name of the object.
        name: String,
        /// Maximum size of an object, in bytes.
        bytes_max: u64,
    },
    /// File cannot be read or written.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Request took too long. The value is the time limit.
    #[error("not within {0:?}, see snapshots.object_store_patience_seconds")]
    TimedOut(Duration),
}

/// Access of a daemon to the bucket, by which it sends, fetches and removes snapshots.
pub struct SnapshotStore {
    pub(super) client: Client,
    pub(super) jetstream: Context,
    pub(super) config: ObjectStoreConfig,
    /// Number of the newest snapshots that are kept in the bucket; at least 1.
    pub(super) keep: usize,
    pub(super) claim: Claim,
    /// Clock of the NATS server, which is read whenever the bucket is claimed.
    pub(super) clock: ServerClock,
}

impl SnapshotStore {
    /// Sends a snapshot file as an object with the file's name, and removes outdated objects. Returns the file's length
    /// in bytes. If only a part of the file was sent, it does not become an object.
    pub async fn upload(&self, path: &Path, metrics: &SnapshotMetrics) -> Result<u64, ObjectStoreError> {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let mut file = tokio::fs::File::from_std(open_regular(path).map_err(unreadable(path))?);
        let bytes = file.metadata().await.map_err(unreadable(path))?.len();
        if bytes > self.config.snapshot_bytes_max {
            return Err(self.too_large(&name));
        }
        let (bucket, server_us) = self.claimed().await?;
        let name = stamp_of(&name).map_or(name, |stamp| snapshot_name(stamp.min(server_us)));
        let metadata = ObjectMetadata {
            name: name.clone(),
            chunk_size: Some(PIECE_BYTES),
            ..ObjectMetadata::default()
        };
        let put = bucket.put(metadata, &mut file).await;
        put.map_err(|error| failed("send", &name, &error))?;
        self.prune(&bucket, metrics).await?;
        Ok(bytes)
    }

    /// Fetches the newest whole snapshot into `directory`, if it is newer than all files there. Damaged snapshots are
    /// counted and skipped. Returns `None` if no whole snapshot is newer.
    ///
    /// # Errors
    ///
    /// [`ObjectStoreError::Taken`] if the bucket belongs to daemons that follow other workers. Other errors if the
    /// server does not answer.
    pub async fn fetch_newer(
        &self,
        directory: &SnapshotDirectory,
        limits: &WireLimits,
        metrics: &SnapshotMetrics,
    ) -> Result<Option<PathBuf>, ObjectStoreError> {
        let patience = self.config.patience;
        tokio::time::timeout(patience, self.fetch_newest(directory, limits, metrics))
            .await
            .unwrap_or(Err(ObjectStoreError::TimedOut(patience)))
    }

    async fn fetch_newest(
        &self,
        directory: &SnapshotDirectory,
        limits: &WireLimits,
        metrics: &SnapshotMetrics,
    ) -> Result<Option<PathBuf>, ObjectStoreError> {
        let (bucket, server_us) = self.claimed().await?;
        let newest = directory.newest_stamp()?;
        let objects = self.snapshots(&bucket, metrics).await?;
        for (name, file_name) in to_fetch(objects, newest, server_us) {
            let started = Instant::now();
            let fetching = self.fetch(&bucket, &name, (directory, &file_name), limits, metrics);
            match fetching.await {
                Ok(Some((path, bytes))) => {
                    metrics.fetched(&name, bytes, started.elapsed());
                    return Ok(Some(path));
                }
                // The object was rejected, and counted as such.
                Ok(None) => {}
                Err(error) => metrics.fetch_failed(&error),
            }
        }
        Ok(None)
    }

    /// Fetches one object into a file. Returns `None` if the object is not a whole snapshot.
    async fn fetch(
        &self,
        bucket: &ObjectStore,
        name: &str,
        (directory, file_name): (&SnapshotDirectory, &str),
        limits: &WireLimits,
        metrics: &SnapshotMetrics,
    ) -> Result<Option<(PathBuf, u64)>, ObjectStoreError> {
        let failed = |error: &dyn std::fmt::Display| failed("fetch", name, error);
        let mut temporary = directory.temporary()?;
        let mut piece = vec![0; PIECE_BYTES];
        let mut bytes = 0;
        // Each piece has a time limit, because the client would wait for ever for a piece that is gone. The limit is
        // short enough that older objects can be tried after a failure.
        let piece_patience = self.config.patience / PIECES_PATIENCE_SHARE;
        let found = tokio::time::timeout(piece_patience, bucket.get(name)).await;
        let found = found.map_err(|_| failed(&format_args!("it did not come within {piece_patience:?}")))?;
        let mut object = found.map_err(|error| failed(&error))?;
        loop {
            // The client compares the digest at the end.
            let read = tokio::time::timeout(piece_patience, object.read(&mut piece)).await;
            let read = read.map_err(|_| {
                failed(&format_args!(
                    "its next piece did not come within {piece_patience:?}"
                ))
            })?;
            let length = read.map_err(|error| failed(&error))?;
            if length == 0 {
                break;
            }
            bytes += length as u64;
            if bytes > self.config.snapshot_bytes_max {
                return Err(self.too_large(name));
            }
            let (read, _) = piece.split_at(length);
            let written = temporary.write_all(read);
            written.map_err(unwritable(temporary.path()))?;
        }
        let limits = limits.clone();
        let path = temporary.path().to_owned();
        let checking = tokio::task::spawn_blocking(move || {
            let file = open_regular(&path).map_err(kvatlas_core::snapshot::SnapshotError::Io)?;
            verify(std::io::BufReader::new(file), &limits)
        });
        match checking.await.map_err(|error| failed(&error))? {
            Ok(_) => Ok(Some((directory.persist(temporary, file_name)?, bytes))),
            Err(error) => {
                metrics.rejected(SnapshotRejection::from(&error), &name, &error);
                Ok(None)
            }
        }
    }

    /// Removes outdated objects. An object that cannot be removed does not stop the removal of the others.
    async fn prune(&self, bucket: &ObjectStore, metrics: &SnapshotMetrics) -> Result<(), ObjectStoreError> {
        let mut pruned = Ok(());
        for name in self.snapshots(bucket, metrics).await?.into_iter().skip(self.keep) {
            match bucket.delete(&name).await {
                Ok(()) => {}
                // Another replica was faster.
                Err(error) if error.kind() == object_store::DeleteErrorKind::NotFound => {}
                Err(error) => pruned = Err(failed("remove", &name, &error)),
            }
        }
        pruned
    }

    /// Returns the names of the snapshots in the bucket, the last sent first. Other objects are ignored.
    ///
    /// Listing waits for every object that existed when the listing began. An object that is removed during the listing
    /// may never come, so listing has a deadline.
    async fn snapshots(
        &self,
        bucket: &ObjectStore,
        metrics: &SnapshotMetrics,
    ) -> Result<Vec<String>, ObjectStoreError> {
        let patience = self.config.patience;
        tokio::time::timeout(patience, self.list(bucket, metrics))
            .await
            .unwrap_or(Err(ObjectStoreError::TimedOut(patience)))
    }

    async fn list(
        &self,
        bucket: &ObjectStore,
        metrics: &SnapshotMetrics,
    ) -> Result<Vec<String>, ObjectStoreError> {
        let failed = |error: &dyn std::fmt::Display| {
            failed("list the Object Store bucket", &self.config.bucket, error)
        };
        let mut objects = bucket
            .list()
            .await
            .map_err(|error| failed(&error))?
            .take(OBJECTS_MAX);
        let (mut found, mut unreadable) = (Vec::new(), None);
        while let Some(object) = objects.next().await {
            let object = match object {
                Ok(object) => object,
                // Anybody who can write to the bucket can put anything there. The other objects can still be used.
                Err(error) => {
                    metrics.object_passed_over(&error);
                    unreadable = Some(error);
                    continue;
                }
            };
            if stamp_of(&object.name).is_none() || object.deleted {
                continue;
            }
            // Replicas send no links. One can lead to itself.
            if object.options.is_some_and(|options| options.link.is_some()) {
                metrics.object_passed_over(&format_args!("{} is a link", object.name));
                continue;
            }
            found.push(object.name);
        }
        if let Some(error) = unreadable.filter(|_| found.is_empty()) {
            // No object could be read, so the fault may be the server's.
            return Err(failed(&error));
        }
        Ok(last_sent_first(found))
    }

    async fn open_if_there(&self) -> Result<Option<ObjectStore>, ObjectStoreError> {
        // The stream behind the bucket is asked for first: the error of a bucket does not say whether the bucket is missing.
        match self
            .jetstream
            .get_stream(format!("OBJ_{}", self.config.bucket))
            .await
        {
            Ok(_) => {}
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(self.unusable(&error)),
        }
        let bucket = self.jetstream.get_object_store(&self.config.bucket).await;
        bucket.map(Some).map_err(|error| self.unusable(&error))
    }

    async fn open_or_create(&self) -> Result<ObjectStore, ObjectStoreError> {
        if let Some(bucket) = self.open_if_there().await? {
            return Ok(bucket);
        }
        let config = object_store::Config {
            bucket: self.config.bucket.clone(),
            description: Some("snapshots of kvatlas".to_owned()),
            max_age: BUCKET_AGE_MAX,
            max_bytes: -1,
            storage: StorageType::File,
            num_replicas: self.config.replicas,
            ..object_store::Config::default()
        };
        let created = self.jetstream.create_object_store(config).await;
        created.map_err(|error| self.unusable(&error))
    }

    /// Opens or makes the bucket, and claims the bucket for this deployment.
    async fn claimed(&self) -> Result<(ObjectStore, u64), ObjectStoreError> {
        let bucket = self.open_or_create().await?;
        let asked_us = now_us();
        let server_us = self.claim.stake(&self.jetstream).await?;
        self.clock.note(server_us, asked_us);
        Ok((bucket, server_us))
    }

    /// Connects anew if answers to requests no longer come, although the server gives them.
    pub(super) async fn mend_requests(&self) {
        let subject = format!("$JS.API.STREAM.INFO.OBJ_{}", self.config.bucket);
        mend_requests(&self.client, &subject).await;
    }

    fn unusable(&self, error: &dyn std::fmt::Display) -> ObjectStoreError {
        let reason = format_args!("{error}; does the server have JetStream?");
        failed("use the Object Store bucket", &self.config.bucket, &reason)
    }

    fn too_large(&self, name: &str) -> ObjectStoreError {
        ObjectStoreError::TooLarge {
            name: name.to_owned(),
            bytes_max: self.config.snapshot_bytes_max,
        }
    }
}

/// Returns the names of objects, the last sent first. `names` has them in the order of sending. A name that occurs
/// twice takes the place of its later occurrence.
fn last_sent_first(mut names: Vec<String>) -> Vec<String> {
    names.reverse();
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    names
}

/// Returns the names of the objects that are newer than the newest file, the newest object first. Each comes with the
/// name for its file. That name has a later time than the newest file's name.
///
/// - `objects` has the names of the objects, the last sent first. An object that is not newer ends the search, because
///   the following objects were sent before it.
/// - `newest_file` is the time in the newest file's name, and `server_us` is the server's time.
fn to_fetch(
    objects: Vec<String>,
    newest_file: Option<u64>,
    server_us: u64,
) -> impl Iterator<Item = (String, String)> {
    let comparable = newest_file.filter(|stamp| *stamp <= server_us.saturating_add(AHEAD_US_MAX));
    let newer = objects.into_iter().map_while(move |name| {
        let stamp =
            stamp_of(&name).filter(|stamp| Some(*stamp) != newest_file && Some(*stamp) > comparable)?;
        Some((stamp, name))
    });
    newer.map(move |(stamp, name)| {
        let after_files = newest_file.map_or(0, |newest| newest.saturating_add(1));
        (name, snapshot_name(stamp.min(server_us).max(after_files)))
    })
}

fn is_missing(error: &GetStreamError) -> bool {
    matches!(error.kind(), GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

/// Makes the error of an action on the bucket or the object `name`.
pub(super) fn failed(action: &'static str, name: &str, error: &dyn std::fmt::Display) -> ObjectStoreError {
    ObjectStoreError::Failed {
        action,
        name: name.to_owned(),
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_000_000_000_000;
    const MINUTE: u64 = 60 * 1_000_000;
    const DAY: u64 = 24 * 60 * MINUTE;

    fn names(stamps: &[u64]) -> Vec<String> {
        stamps.iter().map(|stamp| snapshot_name(*stamp)).collect()
    }

    /// Returns the times in two names of each object that a starting daemon would fetch: the object's own name, and the
    /// name of its file.
    fn fetched(objects: &[u64], newest_file: Option<u64>) -> Vec<(u64, u64)> {
        let stamp = |name: String| stamp_of(&name).unwrap();
        to_fetch(names(objects), newest_file, NOW)
            .map(|(object, file)| (stamp(object), stamp(file)))
            .collect()
    }

    #[test]
    fn the_newest_object_is_the_one_that_was_sent_last() {
        // The second object was sent by a replica whose clock was ahead.
        let sent = names(&[1, NOW + DAY, 2, 3]);
        assert_eq!(last_sent_first(sent), names(&[3, 2, NOW + DAY, 1]));
        // Object 1 was sent again while the list was made.
        assert_eq!(last_sent_first(names(&[1, 2, 1])), names(&[1, 2]));
    }

    #[test]
    fn a_start_fetches_what_is_newer_than_its_files() {
        let (old, file, new) = (NOW - 3 * MINUTE, NOW - 2 * MINUTE, NOW - MINUTE);
        assert_eq!(fetched(&[new, old], None), [(new, new), (old, old)]);
        assert_eq!(fetched(&[new, old], Some(file)), [(new, new)]);
        assert_eq!(fetched(&[old, new], Some(file)), []);
        assert_eq!(fetched(&[file, old], Some(file)), []);
    }

    #[test]
    fn an_object_of_a_clock_that_was_ahead_does_not_replace_newer_files() {
        let (ahead, sent, file) = (NOW + DAY, NOW - 2 * MINUTE, NOW - MINUTE);
        // The object with a time in the future was sent before an object that is older than the file.
        assert_eq!(fetched(&[sent, ahead], Some(file)), []);
        assert_eq!(fetched(&[sent, ahead], Some(sent)), []);
        // A fresh replica takes the last sent object first. No file gets a time in the future.
        assert_eq!(fetched(&[sent, ahead], None), [(sent, sent), (ahead, NOW)]);
    }

    #[test]
    fn a_file_of_a_clock_that_was_ahead_does_not_keep_newer_objects_away() {
        let (ahead, new) = (NOW + DAY, NOW - MINUTE);
        // The fetched object's file gets the latest name, so it is loaded first.
        assert_eq!(fetched(&[new], Some(ahead)), [(new, ahead + 1)]);
        // The last sent object is the replica's own file, so no object is newer.
        assert_eq!(fetched(&[ahead, new], Some(ahead)), []);
        // Clocks drift, so a file's time that is a minute ahead is believed.
        assert_eq!(fetched(&[new], Some(NOW + MINUTE)), []);
    }
}
