//! Files of a bridge's state as objects of JetStream, for bridges without a disk.
//!
//! | place | content |
//! |---|---|
//! | object `SET/NAMESPACE.WORKER.RANK.engine` | the file of this name |
//! | key `SET.owner` | the bridge, or the group of bridges, that has the set |
//! | key `SET.registered.DIGEST` | an engine that was registered or unregistered over HTTP; see `shared` |
//! | key `SET.ports` | the ports at which engines are republished; see `places` |
//!
//! The objects are in an object store, and the keys in a key-value bucket of the same name. Bridges of one lease share
//! a set. Among other bridges, a set belongs to the bridge that opened it last, and writes of all others are refused
//! (fenced). A write of such a bridge may come through nevertheless. It does no harm, because a bridge does not trust a
//! file until the engine's replay socket has confirmed it.
//!
//! While JetStream cannot be reached, reading waits until [`OPEN_PATIENCE`] after the start, and then fails. Writing
//! fails immediately.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::kv::Store;
use async_nats::jetstream::object_store::{self, DeleteErrorKind, GetErrorKind, Object, ObjectStore};
use async_nats::jetstream::stream::{self, DiscardPolicy};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use kvatlas_process::storage::{Storage, StorageFile, shown};

use super::{FORGOTTEN_AFTER, TEMPORARY_PREFIX, name_of};

/// Time from the start for which reading waits until the buckets are there.
const OPEN_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum time for one answer of JetStream.
pub(super) const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum time for writing one file.
const WRITE_PATIENCE: Duration = Duration::from_secs(60);
/// Maximum size of all objects together, in bytes, in a bucket that a bridge has made.
const OBJECTS_BYTES_MAX: i64 = 1 << 30;
/// Maximum size of all keys together, in bytes, in a bucket that a bridge has made.
const KEYS_BYTES_MAX: i64 = 16 << 20;
/// Maximum size of one value, in bytes.
const VALUE_BYTES_MAX: i32 = 256 << 10;
const DESCRIPTION: &str = "state of kvatlas bridges";

/// The two buckets, once they are open.
#[derive(Clone)]
pub(super) struct Stores {
    objects: ObjectStore,
    pub(super) keys: Store,
}

/// A set of files in JetStream.
pub(super) struct Bucket {
    name: String,
    set: String,
    /// Name of the bridge, or of the group of bridges, that owns the set of files.
    owner: String,
    runtime: Handle,
    stores: watch::Sender<Option<Stores>>,
    /// Time at which reading no longer waits for the buckets.
    due_at: OnceLock<Instant>,
    /// Time of the last failed write or removal; `None` if the last one has not failed.
    failed_at: Mutex<Option<Instant>>,
    /// Files that are being written, by their paths.
    drafts: Mutex<BTreeMap<PathBuf, Draft>>,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "nats:{}/{}", self.name, self.set)
    }
}

impl Bucket {
    /// Makes the set of files `set` in the bucket `name` for `owner`. Does not ask JetStream for anything yet. The
    /// set's blocking methods use the tokio runtime in which this is called.
    pub(super) fn new(name: String, set: String, owner: String) -> Self {
        Self {
            name,
            set,
            owner,
            runtime: Handle::current(),
            stores: watch::Sender::new(None),
            due_at: OnceLock::new(),
            failed_at: Mutex::default(),
            drafts: Mutex::default(),
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        format!("{self:?}").into()
    }

    /// Returns the prefix of the JetStream keys that belong to this set of files.
    pub(super) fn prefix(&self) -> String {
        format!("{}.", self.set)
    }

    /// Returns the subject on which the server is asked for its account of the keys.
    pub(super) fn info_subject(&self) -> String {
        format!("$JS.API.STREAM.INFO.KV_{}", self.name)
    }

    pub(super) fn owner_key(&self) -> String {
        format!("{}.owner", self.set)
    }

    /// Opens the buckets, and makes those that are missing. The first call takes the set of files from its present owner.
    pub(super) async fn open(&self, jetstream: &Context) -> io::Result<Stores> {
        let name = &self.name;
        let objects = match jetstream.get_object_store(name).await {
            Ok(objects) => objects,
            Err(_) => {
                let config = object_store::Config {
                    bucket: name.clone(),
                    description: Some(DESCRIPTION.to_owned()),
                    max_age: FORGOTTEN_AFTER,
                    max_bytes: OBJECTS_BYTES_MAX,
                    ..object_store::Config::default()
                };
                let made = jetstream.create_object_store(config).await;
                made.map_err(io::Error::other)?
            }
        };
        let keys = match jetstream.get_key_value(name).await {
            Ok(keys) => keys,
            Err(_) => {
                let made = jetstream.create_stream(keys_config(name)).await;
                made.map_err(io::Error::other)?;
                jetstream.get_key_value(name).await.map_err(io::Error::other)?
            }
        };
        let stores = Stores { objects, keys };
        // Only the first call takes the set of files. Later calls leave it to the owner that it has by then.
        let is_first = self.stores.borrow().is_none();
        if is_first {
            self.own(&stores.keys).await?;
        }
        self.stores.send_replace(Some(stores.clone()));
        Ok(stores)
    }

    async fn own(&self, keys: &Store) -> io::Result<()> {
        let owner = self.owner.clone().into();
        let written = keys.put(self.owner_key(), owner).await;
        written.map(drop).map_err(io::Error::other)
    }

    /// Whether `owner` is the name of this bridge, or of its group.
    pub(super) fn is_own(&self, owner: &[u8]) -> bool {
        owner == self.owner.as_bytes()
    }

    /// Returns the error for a bridge that no longer owns the set of files; `owner` is the set's new owner.
    pub(super) fn fenced(&self, owner: &[u8]) -> io::Error {
        let owner = shown(&String::from_utf8_lossy(owner));
        io::Error::other(format!(
            "{owner} has it now; give each bridge or lease a set of its own (--state nats:BUCKET/NAME)"
        ))
    }

    /// Returns the name of the set's owner, if that is another bridge or group. `None` if the set of files belongs to this bridge
    /// or its group.
    pub(super) async fn other_owner(&self, keys: &Store) -> io::Result<Option<Bytes>> {
        let owner = keys.get(self.owner_key()).await.map_err(io::Error::other)?;
        if owner.is_none() {
            // The key is missing because the bucket was emptied or removed, so this bridge takes the set again.
            self.own(keys).await?;
        }
        Ok(owner.filter(|owner| !self.is_own(owner)))
    }

    /// Fails if another owner has the set of files.
    pub(super) async fn check_owner(&self, keys: &Store) -> io::Result<()> {
        match self.other_owner(keys).await? {
            Some(owner) => Err(self.fenced(&owner)),
            None => Ok(()),
        }
    }

    /// Waits until the buckets are open, for at most [`OPEN_PATIENCE`] from the start, and returns them. Blocks the thread.
    fn awaited(&self) -> io::Result<Stores> {
        let due_at = *self.due_at.get_or_init(|| Instant::now() + OPEN_PATIENCE);
        let mut stores = self.stores.subscribe();
        let opened = self
            .runtime
            .block_on(async { timeout_at(due_at, stores.wait_for(Option::is_some)).await.is_ok() });
        match opened {
            true => self.opened(),
            false => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("JetStream has not opened the bucket within {OPEN_PATIENCE:?}"),
            )),
        }
    }

    /// Returns the buckets; an error while they are not open.
    pub(super) fn opened(&self) -> io::Result<Stores> {
        self.stores.borrow().clone().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotConnected,
                "JetStream has not opened the bucket yet",
            )
        })
    }

    /// Returns the buckets for a write or a removal. Fails immediately while they are not open, and for a while after a
    /// failure. So a bridge that ends does not wait for each file.
    fn usable(&self) -> io::Result<Stores> {
        let has_just_failed = |at: Instant| at.elapsed() < ANSWER_PATIENCE;
        match self.failed_at.lock().is_some_and(has_just_failed) {
            true => Err(io::Error::other("JetStream has just failed")),
            false => self.opened(),
        }
    }

    /// Runs a request that must be answered within `patience`.
    fn block_on<T>(&self, patience: Duration, request: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let answered = self.runtime.block_on(async { timeout(patience, request).await });
        answered.map_err(|_| not_in_time(patience))?
    }

    /// Returns the name of the object of a file.
    fn object(&self, path: &Path) -> String {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        format!("{}/{file}", self.set)
    }
}

/// Returns the settings of the stream that stores a key-value bucket. The bridge makes this stream itself. The client's
/// own call for making a bucket cannot read the answers of NATS servers before 2.10.
fn keys_config(name: &str) -> stream::Config {
    stream::Config {
        name: format!("KV_{name}"),
        description: Some(DESCRIPTION.to_owned()),
        subjects: vec![format!("$KV.{name}.>")],
        max_messages_per_subject: 1,
        max_message_size: VALUE_BYTES_MAX,
        max_bytes: KEYS_BYTES_MAX,
        discard: DiscardPolicy::New,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        ..stream::Config::default()
    }
}

/// Returns the kind of the I/O error for a JetStream error about one object. `is_missing` says that there is no such
/// object.
fn kind_of(is_missing: bool) -> io::ErrorKind {
    match is_missing {
        true => io::ErrorKind::NotFound,
        false => io::ErrorKind::Other,
    }
}

fn not_in_time(patience: Duration) -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("JetStream has not answered within {patience:?}"),
    )
}

impl Storage for Bucket {
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read>> {
        let (stores, name) = (self.awaited()?, self.object(path));
        let found = self.block_on(ANSWER_PATIENCE, async {
            stores
                .objects
                .get(name)
                .await
                .map_err(|error| io::Error::new(kind_of(error.kind() == GetErrorKind::NotFound), error))
        });
        Ok(Box::new(ObjectReader {
            object: found?,
            runtime: self.runtime.clone(),
        }))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.usable()?;
        let draft = Draft::default();
        self.drafts.lock().insert(path.to_owned(), draft.clone());
        Ok(Box::new(draft))
    }

    /// Creates a file without private permissions, because JetStream decides who may read a bucket.
    fn create_private(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let draft = self.drafts.lock().remove(from).ok_or(io::ErrorKind::NotFound)?;
        let bytes = std::mem::take(&mut *draft.0.lock());
        let (stores, name) = (self.opened()?, self.object(to));
        let written = self.block_on(WRITE_PATIENCE, async {
            self.check_owner(&stores.keys).await?;
            let written = stores.objects.put(name.as_str(), &mut bytes.as_slice()).await;
            written.map(drop).map_err(io::Error::other)
        });
        *self.failed_at.lock() = written.is_err().then(Instant::now);
        written
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        // A file that is being written is here alone, so JetStream need not be asked.
        if self.drafts.lock().remove(path).is_some() || name_of(path).starts_with(TEMPORARY_PREFIX) {
            return Ok(());
        }
        let (stores, name) = (self.usable()?, self.object(path));
        let removed =
            self.block_on(ANSWER_PATIENCE * 2, async {
                self.check_owner(&stores.keys).await?;
                stores.objects.delete(name).await.map_err(|error| {
                    io::Error::new(kind_of(error.kind() == DeleteErrorKind::NotFound), error)
                })
            });
        let is_failure = |error: &io::Error| error.kind() != io::ErrorKind::NotFound;
        *self.failed_at.lock() = removed.as_ref().is_err_and(is_failure).then(Instant::now);
        removed
    }

    /// Returns an empty list, because no file has to be cleaned up: a crash leaves none, and JetStream removes old
    /// objects itself.
    fn list(&self, _directory: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }

    fn create_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn sync_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }
}

/// File that is being written. Its bytes are collected here, and sent as a whole when the file is renamed.
#[derive(Debug, Clone, Default)]
struct Draft(Arc<Mutex<Vec<u8>>>);

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl StorageFile for Draft {
    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reader of an object. At the end, the client library checks the object's digest.
struct ObjectReader {
    object: Object,
    runtime: Handle,
}

impl Read for ObjectReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let object = &mut self.object;
        // If a piece of the object is gone, the client library would wait for it for ever.
        let read = self
            .runtime
            .block_on(async { timeout(ANSWER_PATIENCE, object.read(buffer)).await });
        read.map_err(|_| not_in_time(ANSWER_PATIENCE))?
    }
}
