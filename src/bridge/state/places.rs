//! Table of the ports that engines have. The table is kept for later bridges, and shared with other bridges.
//!
//! | place of the bridge's state | place of the table |
//! |---|---|
//! | a directory | the file `ports` |
//! | JetStream | the key `SET.ports`. A write names the revision that it replaces, so two engines never get one place |
//! | none | memory |

use std::io;
use std::sync::Arc;

use async_nats::jetstream::kv::{CreateErrorKind, Store, UpdateErrorKind};
use bytes::Bytes;
use kvatlas_telemetry::BridgeMetrics;

use super::bucket::Bucket;
use super::file::StateFileKind;
use super::{StateDirectory, refused};
use crate::republish::PortPlaces;

const NAME: &str = "ports";
/// Maximum size of the file, in bytes.
const BYTES_MAX: u64 = 1 << 20;
/// Maximum number of attempts to write a table that other bridges write at the same time.
const ATTEMPTS_MAX: usize = 32;

/// Error that keeps the table of ports from being changed for now.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum PlacesError {
    /// JetStream cannot be asked, or another bridge has the set of files.
    #[error("the table of ports in JetStream: {0}")]
    Io(#[from] io::Error),
    /// An earlier bridge's table may be there, but could not be read. Without it, routers that are still connected to an
    /// engine's ports could meet another engine there.
    #[error("the table of ports of an earlier bridge cannot be read")]
    Unread,
    /// Other bridges wrote the table of ports at each attempt.
    #[error("the table of ports in JetStream changes all the time")]
    Busy,
}

/// Storage of the table of the ports that engines have.
#[derive(Debug, Clone)]
pub(in super::super) struct KeptPlaces(PlacesStorage);

#[derive(Debug, Clone)]
enum PlacesStorage {
    Memory,
    File(StateDirectory),
    Shared(Arc<Bucket>),
}

impl KeptPlaces {
    /// Returns the storage for the table of ports. `state` is the place of the bridge's state; without it, the table is
    /// in memory only.
    pub(in super::super) fn of(state: Option<&StateDirectory>) -> Self {
        Self(match state {
            None => PlacesStorage::Memory,
            Some(state) => match state.shared() {
                Some(shared) => PlacesStorage::Shared(shared.bucket()),
                None => PlacesStorage::File(state.clone()),
            },
        })
    }

    /// Returns the table of ports that an earlier bridge has left in a file; an empty table if there is none that can be used.
    pub(in super::super) fn read(&self) -> PortPlaces {
        match &self.0 {
            PlacesStorage::File(directory) => directory.read(NAME, StateFileKind::Ports, BYTES_MAX),
            PlacesStorage::Memory | PlacesStorage::Shared(_) => None,
        }
        .unwrap_or_default()
    }

    /// Applies `change` to the table of ports, and writes the table. `known` is the table as this bridge knows it. If
    /// other bridges have written a newer table, or if the file could not be read before, the change is applied to the
    /// table that is there. Returns the table and its revision. If a file cannot be written, the failure is counted, but
    /// the change still applies.
    pub(in super::super) async fn change(
        &self,
        (revision, known): (u64, PortPlaces),
        mut change: impl FnMut(&mut PortPlaces),
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<(u64, PortPlaces), PlacesError> {
        let places = match &self.0 {
            PlacesStorage::Shared(bucket) => return change_shared(bucket, known, change).await,
            PlacesStorage::File(directory) => change_file(directory, known, change, metrics).await?,
            PlacesStorage::Memory => {
                let mut places = known;
                change(&mut places);
                places
            }
        };
        Ok((revision + 1, places))
    }
}

async fn change_file(
    directory: &StateDirectory,
    known: PortPlaces,
    mut change: impl FnMut(&mut PortPlaces),
    metrics: &Arc<BridgeMetrics>,
) -> Result<PortPlaces, PlacesError> {
    let mut before = known;
    if directory.is_unread(NAME) {
        let (late, metrics) = (directory.clone(), Arc::clone(metrics));
        let reading = tokio::task::spawn_blocking(move || {
            late.read_again(NAME, StateFileKind::Ports, BYTES_MAX, &metrics)
        });
        // A thread that has failed has logged that. No engine has ports before the table has been read.
        before = reading.await.ok().flatten().unwrap_or_default();
        if directory.is_unread(NAME) {
            return Err(PlacesError::Unread);
        }
    }
    let mut places = before.clone();
    change(&mut places);
    if places != before {
        let (directory, metrics, written) = (directory.clone(), Arc::clone(metrics), places.clone());
        let writing = tokio::task::spawn_blocking(move || {
            directory.write(NAME, StateFileKind::Ports, &written, BYTES_MAX, &metrics)
        });
        // A thread that has failed has logged that.
        let _ = writing.await;
    }
    Ok(places)
}

/// Returns the JetStream key of the table of ports.
pub(super) fn places_key(bucket: &Bucket) -> String {
    format!("{}{NAME}", bucket.prefix())
}

/// Decodes the table of ports from the value of its JetStream key; `None` if the value cannot be used.
pub(super) fn places_in(bucket: &Bucket, value: &[u8]) -> Option<PortPlaces> {
    let read = rmp_serde::from_slice(value);
    let read = read.inspect_err(|error| refused(&bucket.path().join(NAME), error));
    read.ok()
}

async fn change_shared(
    bucket: &Bucket,
    known: PortPlaces,
    mut change: impl FnMut(&mut PortPlaces),
) -> Result<(u64, PortPlaces), PlacesError> {
    let keys = bucket.opened()?.keys;
    bucket.check_owner(&keys).await?;
    for _ in 0..ATTEMPTS_MAX {
        let entry = keys.entry(places_key(bucket)).await.map_err(io::Error::other)?;
        let revision = entry.as_ref().map(|entry| entry.revision);
        let value = entry
            .as_ref()
            .map(|entry| &entry.value)
            .filter(|value| !value.is_empty());
        let before = value.and_then(|value| places_in(bucket, value));
        // The table may be missing or damaged, for example after a loss of JetStream's store. The engines that have
        // ports then keep them.
        let mut places = before.as_ref().unwrap_or(&known).clone();
        change(&mut places);
        if before.as_ref() == Some(&places) {
            return Ok((revision.unwrap_or_default(), places));
        }
        if let Some(revision) = write(bucket, &keys, &places, revision).await? {
            return Ok((revision, places));
        }
    }
    Err(PlacesError::Busy)
}

/// Writes `places` as the table of ports, if `revision` is still the table's revision in JetStream. Returns the new revision;
/// `None` if another bridge has written the table in the meantime.
async fn write(
    bucket: &Bucket,
    keys: &Store,
    places: &PortPlaces,
    revision: Option<u64>,
) -> Result<Option<u64>, PlacesError> {
    let key = places_key(bucket);
    let value = Bytes::from(rmp_serde::to_vec(places).map_err(io::Error::other)?);
    match revision {
        Some(revision) => match keys.update(key, value, revision).await {
            Ok(revision) => Ok(Some(revision)),
            Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => Ok(None),
            Err(error) => Err(io::Error::other(error).into()),
        },
        None => match keys.create(key, value).await {
            Ok(revision) => Ok(Some(revision)),
            Err(error) if error.kind() == CreateErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(io::Error::other(error).into()),
        },
    }
}
