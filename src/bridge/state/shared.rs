//! Registrations over HTTP that bridges share. Each registration is a key of JetStream. Every bridge of the set watches the
//! keys, and so follows the engines that were registered with another bridge.
//!
//! The client gets its answer a moment before its registration reaches JetStream. While JetStream cannot be reached,
//! registrations wait, and are written later, unless another bridge has written a newer one for the engine. An engine that
//! was unregistered keeps its key for [`FORGOTTEN_AFTER`]. So a bridge that was away learns that the engine was unregistered.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::Client;
use async_nats::jetstream::kv::{CreateErrorKind, Entry, Operation, Store, UpdateErrorKind};
use async_nats::jetstream::stream::Info;
use bytes::Bytes;
use futures_util::StreamExt;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use xxhash_rust::xxh3::xxh3_128;

use kvatlas_process::broker::mend_requests;
use kvatlas_process::registry::GivenEngine;
use kvatlas_telemetry::{BridgeMetrics, LogGate};

use super::FORGOTTEN_AFTER;
use super::bucket::{ANSWER_PATIENCE, Bucket};
use super::places::{places_in, places_key};
use crate::republish::PortPlaces;

/// Pause before the buckets are opened again.
const PAUSE: Duration = Duration::from_secs(1);
/// Pause between two counts of the failure that another owner has the set of files. An alert looks at five minutes.
const FENCED_PAUSE: Duration = Duration::from_secs(60);
/// Pause between two looks whether JetStream answers, and still has the entries that were heard. The watch waits for ever
/// where the connection is lost, or where the stream was made anew.
const LOOK_PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of registrations that wait to be written.
const NOTED_MAX: usize = 4096;
/// Part of a key that marks a registration.
const REGISTERED: &str = "registered.";

static UNREADABLE_GATE: LogGate = LogGate::new();

/// An engine that was registered or unregistered over HTTP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Registration {
    pub(in super::super) engine: GivenEngine,
    pub(in super::super) is_registered: bool,
}

/// Entry of the shared registrations, as a bridge has heard it.
pub(in super::super) struct HeardRegistration {
    pub(in super::super) registration: Registration,
    /// Time at which a client asked for it.
    pub(in super::super) asked: SystemTime,
    /// Revision of the entry. Later entries have higher ones.
    pub(in super::super) revision: u64,
    /// Whether the entry is no news: it is from before this bridge, or was heard before.
    pub(in super::super) is_known: bool,
}

/// The bridge that shares registrations with others.
pub(in super::super) trait SharedRegistry: Send + Sync {
    /// Returns the registered engines that the bridge knows. Entries that JetStream has lost are written anew.
    fn registered(&self) -> Vec<GivenEngine>;

    /// Applies an entry that another bridge, or an earlier one, has written.
    fn apply(&self, heard: HeardRegistration);

    /// Notes whether the bridge has heard all entries that are in JetStream.
    fn set_read(&self, is_read: bool);

    /// Takes a revision of the table of ports.
    fn heard_places(&self, revision: u64, places: PortPlaces);
}

/// Registration of this bridge that waits to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Noted {
    registration: Registration,
    /// Time at which it was asked for.
    asked: SystemTime,
    /// Revision of the entry in whose favour the registration ends; `None` if a client asked for that end, or registered the
    /// engine. Such an end is written only over the entry that it ends.
    replaced_by: Option<u64>,
}

impl Noted {
    /// Whether the registration is written over `entry`. `is_older` says that the entry is older in any case: this bridge has
    /// written it, or has heard it before.
    fn is_over(&self, entry: &Entry, is_older: bool) -> bool {
        let is_newer = || {
            let asked = decoded(entry).map_or(entry.created.into(), |(_, asked)| asked);
            entry.operation == Operation::Put && asked > self.asked
        };
        match self.replaced_by {
            Some(revision) => entry.revision < revision && self.ends(entry),
            None => is_older || !is_newer(),
        }
    }

    /// Whether `entry` registers the engine with the same words.
    fn ends(&self, entry: &Entry) -> bool {
        decoded(entry).is_ok_and(|(entry, _)| entry.is_registered && entry.engine == self.registration.engine)
    }
}

/// The registrations over HTTP that bridges share through one set of files in JetStream. Clones share them.
#[derive(Debug, Clone)]
pub(in super::super) struct SharedRegistrations {
    bucket: Arc<Bucket>,
    /// Registrations that are not written yet, by their keys.
    noted: Arc<Mutex<BTreeMap<String, Noted>>>,
    news: Arc<Notify>,
}

/// Entries of JetStream that are not news to this bridge: those from before its first connection, and those that it has
/// heard since.
struct KnownEntries {
    /// Time at which the stream was made. Another stream has numbers of its own.
    stream: SystemTime,
    /// Revision of the last known entry.
    until: u64,
    /// Revision of the last entry that this bridge has heard. Entries up to it are older than all that waits to be written:
    /// one that waited when it heard a newer entry was dropped.
    heard: u64,
    /// Revisions that this bridge has written on this connection and that the watch has not shown yet, by their keys. Earlier
    /// entries of the same keys are outdated.
    written: BTreeMap<String, u64>,
}

impl KnownEntries {
    /// Returns the known entries at a new connection; `before` are those at the last one.
    fn at(before: Option<Self>, info: &Info) -> Self {
        let (stream, last) = (SystemTime::from(info.created), info.state.last_sequence);
        let (until, heard) = match before {
            None => (last, 0),
            // The server may have lost its last entries. Others get their numbers.
            Some(before) if before.stream == stream => (before.until.min(last), before.heard.min(last)),
            Some(_) => (0, 0),
        };
        Self {
            stream,
            until,
            heard,
            written: BTreeMap::new(),
        }
    }

    /// Notes that this bridge has heard an entry.
    fn note_heard(&mut self, revision: u64) {
        self.until = self.until.max(revision);
        self.heard = self.heard.max(revision);
    }

    /// Whether this bridge has written the entry, or has heard it before.
    fn is_own_or_heard(&self, entry: &Entry) -> bool {
        entry.revision <= self.heard || self.written.get(&entry.key) == Some(&entry.revision)
    }

    /// Fails if the stream was made anew, or has lost entries that were known.
    fn check(&self, info: &Info) -> io::Result<()> {
        let is_same = SystemTime::from(info.created) == self.stream && info.state.last_sequence >= self.until;
        match is_same {
            true => Ok(()),
            false => Err(io::Error::other("JetStream has lost entries of its keys")),
        }
    }
}

impl SharedRegistrations {
    pub(super) fn new(bucket: Arc<Bucket>) -> Self {
        Self {
            bucket,
            noted: Arc::default(),
            news: Arc::default(),
        }
    }

    pub(super) fn bucket(&self) -> Arc<Bucket> {
        Arc::clone(&self.bucket)
    }

    /// Notes a registration of this bridge, which a client has just asked for, to be written.
    pub(in super::super) fn note(&self, registration: Registration, metrics: &BridgeMetrics) {
        let noted = Noted {
            registration,
            asked: SystemTime::now(),
            replaced_by: None,
        };
        self.add(noted, metrics);
    }

    /// Notes the end of the registration of `engine`, to be written: it has given way to the entry with the revision `by`,
    /// or to a later one. The end is not written if the engine is registered otherwise by then.
    pub(in super::super) fn note_replaced(&self, engine: GivenEngine, by: u64, metrics: &BridgeMetrics) {
        let noted = Noted {
            registration: Registration {
                engine,
                is_registered: false,
            },
            asked: SystemTime::now(),
            replaced_by: Some(by),
        };
        self.add(noted, metrics);
    }

    fn add(&self, added: Noted, metrics: &BridgeMetrics) {
        let key = self.key(&added.registration.engine);
        let mut noted = self.noted.lock();
        if noted.len() >= NOTED_MAX && !noted.contains_key(&key) {
            metrics.state_failed(&key, &"too many registrations wait to be written");
            return;
        }
        noted.insert(key, added);
        drop(noted);
        self.news.notify_one();
    }

    /// Whether a registration of `engine` waits to be written for which a client asked after the time `asked`.
    pub(in super::super) fn is_noted_since(&self, engine: &GivenEngine, asked: SystemTime) -> bool {
        let waiting = self.noted.lock();
        let noted = waiting.get(&self.key(engine));
        noted.is_some_and(|noted| noted.registration.is_registered && noted.asked > asked)
    }

    /// Takes a registration of `engine` that waits to be written. Returns whether it registers the engine; `None` if there
    /// is none.
    #[cfg(test)]
    pub(in super::super) fn take_noted(&self, engine: &GivenEngine) -> Option<bool> {
        let noted = self.noted.lock().remove(&self.key(engine));
        noted.map(|noted| noted.registration.is_registered)
    }

    /// Opens the set of files in JetStream, and exchanges registrations between `registry` and the other bridges. When another
    /// owner takes the set of files, that is counted every [`FENCED_PAUSE`] until the bridge ends.
    pub(in super::super) async fn run(
        self,
        nats: Client,
        metrics: Arc<BridgeMetrics>,
        registry: impl SharedRegistry,
    ) {
        let mut jetstream = async_nats::jetstream::new(nats.clone());
        jetstream.set_timeout(ANSWER_PATIENCE);
        let failed = |error: &io::Error| metrics.state_failed(&format_args!("{:?}", self.bucket), error);
        let mut known = None;
        loop {
            let exchanged = match self.bucket.open(&jetstream).await {
                Ok(stores) => {
                    tracing::info!(state = ?self.bucket, "the bridge's state is kept in JetStream");
                    Box::pin(self.exchange(&stores.keys, &mut known, &metrics, &registry)).await
                }
                Err(error) => Err(error),
            };
            // Where another owner has the set, this bridge hears of no other registrations any more.
            registry.set_read(exchanged.is_ok());
            match exchanged {
                Ok(owner) => loop {
                    failed(&self.bucket.fenced(&owner));
                    tokio::time::sleep(FENCED_PAUSE).await;
                },
                Err(error) => failed(&error),
            }
            mend_requests(&nats, &self.bucket.info_subject()).await;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Exchanges registrations with other bridges until an error occurs, or until another owner has the set of files. Returns
    /// that owner's name.
    async fn exchange(
        &self,
        keys: &Store,
        known: &mut Option<KnownEntries>,
        metrics: &BridgeMetrics,
        registry: &impl SharedRegistry,
    ) -> io::Result<Bytes> {
        if let Some(owner) = self.bucket.other_owner(keys).await? {
            return Ok(owner);
        }
        let info = keys.stream.get_info().await.map_err(io::Error::other)?;
        let before = known.take();
        let known = known.insert(KnownEntries::at(before, &info));
        self.restore(keys, registry.registered()).await?;
        let all = format!("{}>", self.bucket.prefix());
        let mut watch = keys.watch_with_history(all).await.map_err(io::Error::other)?;
        let ended = || io::Error::other("the watch of its keys has ended");
        let mut is_read = false;
        let mut looks = interval_at(Instant::now() + LOOK_PAUSE, LOOK_PAUSE);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = looks.tick() => {
                    let info = keys.stream.get_info().await.map_err(io::Error::other)?;
                    known.check(&info)?;
                }
                entry = watch.next() => {
                    let entry = entry.ok_or_else(ended)?.map_err(io::Error::other)?;
                    if entry.key == self.bucket.owner_key() {
                        // The owner changes only if the key is written. If the bucket is emptied, which deletes the
                        // key, the owner stays the same.
                        if entry.operation == Operation::Put && !self.bucket.is_own(&entry.value) {
                            return Ok(entry.value);
                        }
                    } else if entry.key == places_key(&self.bucket) {
                        if entry.operation == Operation::Put
                            && let Some(places) = places_in(&self.bucket, &entry.value)
                        {
                            registry.heard_places(entry.revision, places);
                        }
                    } else if let Some(is_known) = self.is_known(&entry, known) {
                        self.heard(keys, &entry, is_known, registry).await?;
                        known.note_heard(entry.revision);
                    }
                    if entry.seen_current {
                        is_read = true;
                        registry.set_read(true);
                    }
                }
                () = self.news.notified() => {}
            }
            // Before that, newer entries of other bridges may come.
            if is_read {
                self.write_noted(keys, metrics, known).await?;
            }
        }
    }

    /// Writes the registrations of `engines` that JetStream has lost. Those that wait to be written are written once, by
    /// [`Self::write_noted`]: the other bridges would take the second entry for a newer registration.
    async fn restore(&self, keys: &Store, engines: Vec<GivenEngine>) -> io::Result<()> {
        for engine in engines {
            let key = self.key(&engine);
            if self.noted.lock().contains_key(&key) {
                continue;
            }
            let registration = Registration {
                engine,
                is_registered: true,
            };
            // All that waits was asked for later.
            let restored = encoded(&registration, SystemTime::UNIX_EPOCH)?;
            match keys.create(key, restored).await {
                Ok(_) => {}
                Err(error) if error.kind() == CreateErrorKind::AlreadyExists => {}
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(())
    }

    /// Returns whether an entry is no news, which `known` entries are not; `None` if it is older than this bridge's own entry
    /// for the same engine, which is written or waits to be written. If one that waits is older than the entry, it is dropped,
    /// and the entry is news.
    fn is_known(&self, entry: &Entry, known: &mut KnownEntries) -> Option<bool> {
        let own = known.written.get(&entry.key);
        if own.is_some_and(|own| entry.revision < *own) {
            return None;
        }
        let mut waiting = self.noted.lock();
        let noted = waiting.get(&entry.key);
        if noted.is_some_and(|noted| noted.is_over(entry, known.is_own_or_heard(entry))) {
            return None;
        }
        let is_dropped = waiting.remove(&entry.key).is_some();
        drop(waiting);
        known.written.remove(&entry.key);
        Some(entry.revision <= known.until && !is_dropped)
    }

    /// Applies an entry (a registration or its removal) that a bridge has written. `is_known` says that it is no news.
    /// Purges the entry of an engine that was unregistered longer than [`FORGOTTEN_AFTER`] ago.
    async fn heard(
        &self,
        keys: &Store,
        entry: &Entry,
        is_known: bool,
        registry: &impl SharedRegistry,
    ) -> io::Result<()> {
        if entry.operation != Operation::Put {
            return Ok(());
        }
        let (registration, asked) = match decoded(entry) {
            Ok(decoded) => decoded,
            Err(error) => {
                if let Some(suppressed) = UNREADABLE_GATE.admit() {
                    let key = kvatlas_process::storage::shown(&entry.key);
                    tracing::warn!(key, %error, suppressed, "a registration in JetStream cannot be read");
                }
                return Ok(());
            }
        };
        let age = SystemTime::now().duration_since(entry.created.into());
        if !registration.is_registered && age.unwrap_or_default() > FORGOTTEN_AFTER {
            let subject = format!("{}{}", keys.prefix, entry.key);
            let purge = keys.stream.purge().filter(subject);
            // Only entries up to this revision are purged, so a later entry of the same key stays.
            let purged = purge.sequence(entry.revision.saturating_add(1)).await;
            purged.map_err(io::Error::other)?;
        }
        registry.apply(HeardRegistration {
            registration,
            asked,
            revision: entry.revision,
            is_known,
        });
        Ok(())
    }

    /// Writes the registrations that wait to be written.
    async fn write_noted(
        &self,
        keys: &Store,
        metrics: &BridgeMetrics,
        known: &mut KnownEntries,
    ) -> io::Result<()> {
        loop {
            let next = self.noted.lock().first_key_value().map(own_entry);
            let Some((key, noted)) = next else {
                return Ok(());
            };
            let revision = self.write(keys, &key, &noted, known).await;
            let revision = revision.inspect_err(|error| metrics.state_failed(&key, error))?;
            let mut waiting = self.noted.lock();
            if waiting.get(&key) == Some(&noted) {
                waiting.remove(&key);
            }
            drop(waiting);
            known.written.extend(revision.map(|revision| (key, revision)));
        }
    }

    /// Writes a registration, and returns its revision. Writes nothing, and returns `None`, in two cases. Either a newer entry
    /// has come, which the watch shows next. Or this is the end of a registration that has given way, and the engine is
    /// registered otherwise by now.
    async fn write(
        &self,
        keys: &Store,
        key: &str,
        noted: &Noted,
        known: &KnownEntries,
    ) -> io::Result<Option<u64>> {
        let value = encoded(&noted.registration, noted.asked)?;
        let entry = keys.entry(key).await.map_err(io::Error::other)?;
        let is_end = noted.replaced_by.is_some();
        let is_over = |entry: &Entry| noted.is_over(entry, known.is_own_or_heard(entry));
        if !entry.as_ref().map_or(!is_end, is_over) {
            return Ok(None);
        }
        // A request that is not answered is sent after the next connection, when another bridge may have written.
        let Some(entry) = entry else {
            let created = keys.create(key, value).await;
            return created.map(Some).map_err(io::Error::other);
        };
        match keys.update(key, value, entry.revision).await {
            Ok(revision) => Ok(Some(revision)),
            Err(error) if is_end && error.kind() == UpdateErrorKind::WrongLastRevision => Ok(None),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Returns the key of an engine. It has a digest of the engine's name, because keys allow fewer characters than
    /// names.
    fn key(&self, engine: &GivenEngine) -> String {
        let name = match engine {
            GivenEngine::Publisher(engine) => engine.key.to_string(),
            GivenEngine::Server(server) => format!("server {} of {}", server.instance, server.key().cache()),
        };
        let digest = xxh3_128(name.as_bytes());
        format!("{}{REGISTERED}{digest:032x}", self.bucket.prefix())
    }
}

/// Returns the value of an entry: a registration, and behind it the time at which a client asked for it.
fn encoded(registration: &Registration, asked: SystemTime) -> io::Result<Bytes> {
    let mut encoded = rmp_serde::to_vec(registration).map_err(io::Error::other)?;
    rmp_serde::encode::write(&mut encoded, &asked).map_err(io::Error::other)?;
    Ok(encoded.into())
}

/// Returns the registration in an entry, and the time at which a client asked for it. In an entry without it, that is the time
/// at which JetStream took the entry.
fn decoded(entry: &Entry) -> Result<(Registration, SystemTime), rmp_serde::decode::Error> {
    let mut values = rmp_serde::Deserializer::from_read_ref(&entry.value);
    let registration = Registration::deserialize(&mut values)?;
    let asked = SystemTime::deserialize(&mut values).unwrap_or(entry.created.into());
    Ok((registration, asked))
}

fn own_entry((key, noted): (&String, &Noted)) -> (String, Noted) {
    (key.clone(), noted.clone())
}

#[cfg(test)]
mod tests;
