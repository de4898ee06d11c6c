//! State that a bridge keeps on disk or in JetStream. The next bridge continues from that state, even if this bridge crashed.
//!
//! | file | content |
//! |---|---|
//! | `NAMESPACE.WORKER.RANK.engine` | one engine: its translator, and the numbers and digests of its last applied batches |
//! | `registered` | the engines that were registered over HTTP |
//! | `ports` | the ports at which engines are republished |
//! | `.lock` | name of the process that uses the directory |
//!
//! In JetStream (`bucket`) files of engines are objects, and registrations (`shared`) and ports (`places`) are keys.
//!
//! A file may be older than the batches that were published. So the next bridge begins a new epoch with the file's
//! content, in doubt, and asks the engine's replay socket for later batches. The doubt ends when the replay has shown
//! that the engine's process is the same, and has given the later batches. So no file makes a holder exact. A file that
//! is lost, outdated or of another process does no more harm than a missing one.

mod bucket;
mod file;
mod keeper;
mod place;
mod places;
mod registered;
mod shared;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use kvatlas_client::publish::PublishedHolder;
use kvatlas_core::wire::{Rank, Subjects};
use kvatlas_engines::{SavedMirror, SavedTranslator};

use kvatlas_process::registry::{BesideEvents, NewEngine};
use kvatlas_process::storage::{DirectoryLock, Disk, LockError, Storage};
use kvatlas_process::{BRIDGE, instance_name};
use kvatlas_telemetry::{BridgeMetrics, LogGate, log_gated};

use super::continuity::Continuity;
use bucket::Bucket;
use file::{FileError, StateFileKind, read_file, write_file};

pub(super) use keeper::Keeper;
pub use place::{PlaceError, StatePlace};
pub(super) use places::{KeptPlaces, PlacesError};
pub(super) use registered::Registered;
pub(super) use shared::{HeardRegistration, Registration, SharedRegistrations, SharedRegistry};

/// End of the name of an engine's file.
const ENGINE_SUFFIX: &str = ".engine";
/// Beginning of the name of a file that is being written.
const TEMPORARY_PREFIX: &str = ".new-";
/// Age after which an engine's file that was not written again is removed.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);
/// Age after which the file of an engine that is followed is written again, although nothing has changed. So the file
/// never looks forgotten.
pub(super) const REFRESHED_AFTER: Duration = Duration::from_secs(24 * 3600);
/// Default name of the bridge's set of files in JetStream, if neither the set nor a lease is named.
const DEFAULT_SET: &str = "bridge";
/// Maximum size that a name of a block takes in a file, in bytes, approximately.
const NAME_BYTES_MAX: u64 = 160;

static REFUSED_GATE: LogGate = LogGate::of_bursts(16);

/// Error that makes a directory useless.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The directory cannot be made or listed.
    #[error("the state directory {}: {source}", path.display())]
    Unusable {
        /// Path of the directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another bridge uses the directory.
    #[error("the state directory {} is in use by {owner}; give each bridge a directory of its own (--state)", path.display())]
    Taken {
        /// Path of the directory.
        path: PathBuf,
        /// Name that the other bridge gives itself.
        owner: String,
    },
    /// The lease's name cannot be the name of a set of files in JetStream.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

/// The saved state of one engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct KeptEngine {
    /// Text of the settings with which the engine's blocks were translated; see [`cache_of`].
    pub(super) cache: String,
    /// The holder's last epoch.
    pub(super) epoch: u64,
    /// The rank that the engine's batches name.
    pub(super) rank: Option<Rank>,
    /// Place of the topic of the engine's batches in the format; `None` in files of this version. An engine may come
    /// back under another topic while no bridge follows it.
    pub(super) topic: Option<Vec<u8>>,
    pub(super) continuity: Continuity,
    pub(super) blocks: SavedTranslator,
    /// The republished blocks, with their tokens; `None` if the engine is not republished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) republished: Option<SavedMirror>,
}

/// Returns a text of the settings with which an engine's blocks are translated. Saved state is used only if its text is
/// the same. The address is not one of the settings, because the same process may have another address.
pub(super) fn cache_of(engine: &NewEngine) -> String {
    let NewEngine {
        key,
        format,
        block_size,
        topic,
        beside,
        groups,
        ..
    } = engine;
    let BesideEvents {
        adapters,
        is_untold,
        // No block is translated in another way for these: they only tell which tiers are in doubt.
        has_no_salts: _,
        tells_beyond: _,
    } = beside;
    let beside = format!("BesideEvents {{ adapters: {adapters:?}, is_untold: {is_untold:?} }}");
    format!("{key:?} {format:?} {block_size} {topic:?} {beside} {groups:?}")
}

/// Directory that only this process uses, or the set of files in JetStream that replaces a directory. Clones share it.
#[derive(Debug, Clone)]
pub struct StateDirectory {
    inner: Arc<OpenDirectory>,
}

#[derive(Debug)]
struct OpenDirectory {
    path: PathBuf,
    storage: Arc<dyn Storage>,
    /// Minimum time between two writes of one engine's file.
    interval: Duration,
    /// Names of the files that may be there, but could not be read. They are not written over.
    unread: Mutex<BTreeSet<String>>,
    /// Permit to write a file. Only one file is written at a time, because its content is in memory twice during the
    /// write.
    writing: Arc<Semaphore>,
    /// Lock of the directory; `None` in JetStream, where the name of an owner takes its place.
    _lock: Option<DirectoryLock>,
    /// Registrations in JetStream; `None` for a directory.
    shared: Option<SharedRegistrations>,
}

impl StateDirectory {
    /// Opens the directory at `path`, and creates it if it is missing. Each engine's file is written at most once in `interval`.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn open(path: &Path, interval: Duration) -> Result<Self, StateError> {
        Self::open_on(path, interval, Arc::new(Disk))
    }

    fn open_on(path: &Path, interval: Duration, storage: Arc<dyn Storage>) -> Result<Self, StateError> {
        let unusable = |source| StateError::Unusable {
            path: path.to_owned(),
            source,
        };
        storage.create_directory(path).map_err(unusable)?;
        let owner = format!("the bridge of process {}", std::process::id());
        let lock = DirectoryLock::take(path, &owner).map_err(|error| match error {
            LockError::Taken { path, owner } => StateError::Taken { path, owner },
            LockError::Unusable { path, source } => StateError::Unusable { path, source },
        })?;
        for left in storage.list(path).map_err(unusable)? {
            if name_of(&left).starts_with(TEMPORARY_PREFIX) {
                // A file that cannot be removed takes room, and does no other harm.
                let _ = storage.remove(&left);
            }
        }
        Ok(Self {
            inner: Arc::new(OpenDirectory {
                path: path.to_owned(),
                storage,
                interval,
                unread: Mutex::default(),
                writing: Arc::new(Semaphore::new(1)),
                _lock: Some(lock),
                shared: None,
            }),
        })
    }

    /// Opens `place`. In JetStream, the bridges of the lease `group` share a set of files; a bridge without a lease has
    /// a set of its own. Nothing is asked of JetStream before [`super::Bridge::start`]. Has to be called in a tokio
    /// runtime.
    ///
    /// # Errors
    ///
    /// [`StateError`].
    pub fn open_place(
        place: &StatePlace,
        group: Option<&str>,
        subjects: &Subjects,
        interval: Duration,
    ) -> Result<Self, StateError> {
        let (name, set) = match place {
            StatePlace::Directory(path) => return Self::open(path, interval),
            StatePlace::Bucket { bucket, set } => (bucket.clone(), set.as_deref()),
        };
        let set = place::checked(set.or(group).unwrap_or(DEFAULT_SET))?;
        let owner = match group {
            Some(group) => format!("the group of {}", subjects.bridges(group)),
            None => format!("{} ({:08x})", instance_name(BRIDGE), fastrand::u32(..)),
        };
        let bucket = Arc::new(Bucket::new(name, set, owner));
        Ok(Self {
            inner: Arc::new(OpenDirectory {
                path: bucket.path(),
                storage: Arc::clone(&bucket) as Arc<dyn Storage>,
                interval,
                unread: Mutex::default(),
                writing: Arc::new(Semaphore::new(1)),
                _lock: None,
                shared: Some(SharedRegistrations::new(bucket)),
            }),
        })
    }

    /// Returns the registrations that bridges share; `None` if they are in a file of this bridge.
    pub(super) fn shared(&self) -> Option<&SharedRegistrations> {
        self.inner.shared.as_ref()
    }

    /// Returns the saved state of an engine; `None` if there is none. State is also `None`, and logged, if it is
    /// unusable or was saved with other settings than in the text `cache` (see [`cache_of`]).
    pub(super) fn engine(&self, holder: &PublishedHolder, cache: &str, bytes_max: u64) -> Option<KeptEngine> {
        let kept = self.read(&engine_file(holder), StateFileKind::Engine, bytes_max)?;
        self.of_cache(holder, kept, cache)
    }

    /// Returns the saved state of an engine, like [`Self::engine`], after an earlier attempt to read it has failed.
    fn late_engine(
        &self,
        holder: &PublishedHolder,
        cache: &str,
        bytes_max: u64,
        metrics: &BridgeMetrics,
    ) -> Option<KeptEngine> {
        let kept = self.read_again(&engine_file(holder), StateFileKind::Engine, bytes_max, metrics)?;
        self.of_cache(holder, kept, cache)
    }

    fn of_cache(&self, holder: &PublishedHolder, kept: KeptEngine, cache: &str) -> Option<KeptEngine> {
        if kept.cache != cache {
            self.refuse_engine(holder, &"its engine has other blocks by now");
            return None;
        }
        Some(kept)
    }

    /// Logs that an engine's file cannot be used.
    pub(super) fn refuse_engine(&self, holder: &PublishedHolder, error: &dyn std::fmt::Display) {
        refused(&self.inner.path.join(engine_file(holder)), error);
    }

    /// Writes the file of an engine. Returns whether that succeeded.
    fn write_engine(
        &self,
        holder: &PublishedHolder,
        kept: &KeptEngine,
        bytes_max: u64,
        metrics: &BridgeMetrics,
    ) -> bool {
        self.write(
            &engine_file(holder),
            StateFileKind::Engine,
            kept,
            bytes_max,
            metrics,
        )
    }

    /// Whether the file `name` may be there, but could not be read.
    fn is_unread(&self, name: &str) -> bool {
        self.inner.unread.lock().contains(name)
    }

    /// Allows that the file of an engine is written over, although it could not be read.
    fn write_over(&self, holder: &PublishedHolder) {
        self.inner.unread.lock().remove(&engine_file(holder));
    }

    /// Removes the files of engines that are not among the `followed` ones, and that were last written more than
    /// [`FORGOTTEN_AFTER`] ago. Blocks the thread.
    pub(super) fn remove_forgotten(&self, followed: &[PublishedHolder], metrics: &BridgeMetrics) {
        let followed: BTreeSet<String> = followed.iter().map(engine_file).collect();
        let listed = self.inner.storage.list(&self.inner.path).unwrap_or_default();
        let is_meant = |path: &PathBuf| is_forgotten(path) && !followed.contains(name_of(path));
        for path in listed.into_iter().filter(is_meant) {
            let file = path.display();
            match self.inner.storage.remove(&path) {
                Ok(()) => {
                    log_gated!(info "the file of an engine that was not followed for a week is removed"; %file)
                }
                Err(error) => metrics.state_failed(&file, &error),
            }
        }
    }

    /// Removes the file of an engine that is no longer followed. Blocks the thread.
    pub(super) fn forget_engine(&self, holder: &PublishedHolder, metrics: &BridgeMetrics) {
        let path = self.inner.path.join(engine_file(holder));
        self.write_over(holder);
        match self.inner.storage.remove(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                metrics.state_failed(&path.display(), &error);
            }
            _ => {}
        }
    }

    /// Reads the value in a file; `None` if there is none. A value that cannot be read is also `None`, and is logged. If
    /// the file may be right nevertheless, it is not written over until it has been read.
    fn read<T: DeserializeOwned>(&self, name: &str, kind: StateFileKind, bytes_max: u64) -> Option<T> {
        match self.look(name, kind, bytes_max) {
            Ok(read) => {
                self.inner.unread.lock().remove(name);
                read
            }
            Err(error) => {
                self.inner.unread.lock().insert(name.to_owned());
                unread(&self.inner.path.join(name), &error);
                None
            }
        }
    }

    /// Reads the value in a file that could not be read before, like [`Self::read`]. The file may have been written over
    /// since this reading began, so the failure of this reading keeps nobody from writing. A failure is logged and counted.
    fn read_again<T: DeserializeOwned>(
        &self,
        name: &str,
        kind: StateFileKind,
        bytes_max: u64,
        metrics: &BridgeMetrics,
    ) -> Option<T> {
        match self.look(name, kind, bytes_max) {
            Ok(read) => {
                self.inner.unread.lock().remove(name);
                read
            }
            Err(error) => {
                metrics.state_failed(&self.inner.path.join(name).display(), &error);
                None
            }
        }
    }

    /// Returns the value in a file; `None`, and logged, if there is none that can be used. The error means that the file
    /// may be right although it cannot be read.
    fn look<T: DeserializeOwned>(
        &self,
        name: &str,
        kind: StateFileKind,
        bytes_max: u64,
    ) -> Result<Option<T>, FileError> {
        let path = self.inner.path.join(name);
        match read_file(self.inner.storage.as_ref(), &path, kind, bytes_max) {
            Err(error) if !error.may_pass() => {
                refused(&path, &error);
                Ok(None)
            }
            read => read,
        }
    }

    fn write<T: Serialize>(
        &self,
        name: &str,
        kind: StateFileKind,
        value: &T,
        bytes_max: u64,
        metrics: &BridgeMetrics,
    ) -> bool {
        let path = self.inner.path.join(name);
        if self.is_unread(name) {
            metrics.state_failed(&path.display(), &"the file that is there has not been read");
            return false;
        }
        let temporary = self.inner.path.join(format!("{TEMPORARY_PREFIX}{name}"));
        let storage = self.inner.storage.as_ref();
        let written = write_file(storage, &temporary, &path, kind, value, bytes_max);
        if let Err(error) = &written {
            // The previous version of the file stays.
            let _ = storage.remove(&temporary);
            metrics.state_failed(&path.display(), error);
        }
        written.is_ok()
    }
}

/// Returns the maximum size of an engine's file, in bytes. The engine has at most `names_max` names. Its republished blocks
/// take at most `republished_max` bytes of memory. A token takes 4 bytes of memory, and at most 5 in a file.
pub(super) fn engine_bytes_max(names_max: usize, republished_max: usize) -> u64 {
    let (names, republished) = (names_max as u64, republished_max as u64);
    NAME_BYTES_MAX
        .saturating_mul(names)
        .saturating_add(republished)
        .saturating_add(republished / 4)
        .saturating_add(1 << 20)
}

/// Returns the name of an engine's file. It has only characters that subjects may have.
fn engine_file(holder: &PublishedHolder) -> String {
    let PublishedHolder {
        namespace,
        worker,
        rank,
    } = holder;
    format!("{namespace}.{worker}.{rank}{ENGINE_SUFFIX}")
}

/// Returns the name of the file at `path`; empty if it is no text.
fn name_of(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// Whether a file is an engine's file that was last written more than [`FORGOTTEN_AFTER`] ago.
fn is_forgotten(path: &Path) -> bool {
    let is_old = || {
        let written = path.metadata().and_then(|metadata| metadata.modified());
        let age = written.map(|written| SystemTime::now().duration_since(written).unwrap_or_default());
        age.is_ok_and(|age| age > FORGOTTEN_AFTER)
    };
    name_of(path).ends_with(ENGINE_SUFFIX) && is_old()
}

fn unread(path: &Path, error: &dyn std::fmt::Display) {
    if let Some(suppressed) = REFUSED_GATE.admit() {
        let file = path.display();
        tracing::warn!(%file, %error, suppressed, "what was kept cannot be read for now: begun without it, and not written over");
    }
}

fn refused(path: &Path, error: &dyn std::fmt::Display) {
    if let Some(suppressed) = REFUSED_GATE.admit() {
        let file = path.display();
        tracing::warn!(%file, %error, suppressed, "what was kept is of no use: begun without it");
    }
}

#[cfg(test)]
mod tests;
