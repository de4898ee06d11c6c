//! Records of Dynamo's discovery: which worker a publisher reports, and where that worker is asked for its whole state.
//!
//! | key | record |
//! |---|---|
//! | `v1/event_sources/SCOPE/topic/TOPIC/PUBLISHER` | the worker, its rank, and its `recovery_target` |
//! | `v1/event_channels/SCOPE/topic/TOPIC/PUBLISHER` | the address on ZeroMQ |
//!
//! In etcd, the records have leases. In a folder, each record is a file. The path of its folder and its percent-encoded
//! name together form the record's key. The process to which a record belongs touches the file every few seconds.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use percent_encoding::percent_decode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use kvatlas_core::wire::{Rank, WorkerName, worker_of_instance};

use kvatlas_config::Discovery;
use kvatlas_process::dynamo::{EtcdError, ask_etcd};
use kvatlas_telemetry::log_gated;

const SOURCES: &str = "v1/event_sources/";
pub(in super::super) const CHANNELS: &str = "v1/event_channels/";
/// Time between two looks, that is, readings of all records.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of records of one kind.
const RECORDS_MAX: usize = 8192;
/// Maximum size of a record, in bytes.
const RECORD_BYTES_MAX: usize = 64 << 10;
/// Maximum size of an answer of etcd, in bytes.
const ANSWER_BYTES_MAX: usize = 32 << 20;
/// Age above which an untouched file no longer counts, because its process must have ended. A living process touches
/// its files every few seconds.
const FORSAKEN_AFTER: Duration = Duration::from_secs(60);

/// Place where a worker is asked for its whole state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// A listener at `HOST:PORT`, and the path of the endpoint there.
    Tcp { address: String, path: String },
    /// A subject of NATS on which the worker is asked.
    Nats(String),
}

/// Worker that a publisher reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SourceRecord {
    /// Subject on which the worker's events come over NATS.
    pub(super) subject: String,
    pub(super) id: u64,
    pub(super) worker: WorkerName,
    pub(super) rank: Rank,
    pub(super) target: Target,
}

/// All records of one place, as they were when they were last read without an error.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in super::super) struct Records {
    /// Workers by their publishers' numbers.
    pub(super) sources: BTreeMap<u64, SourceRecord>,
    /// Publishers' numbers by the addresses at which they publish.
    pub(super) channels: BTreeMap<String, u64>,
    /// Whether the records have been read without an error yet.
    pub(super) is_known: bool,
    /// Error of the last reading, in words; `None` if it succeeded.
    pub(super) trouble: Option<String>,
}

/// Error that keeps records from being read.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum RecordsError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error("there are more than {RECORDS_MAX} records")]
    TooMany,
}

/// Key of a record, and the record's value.
pub(in super::super) type Pair = (String, Vec<u8>);

/// Tasks that read discovery's records: one task for each place. All users of a place's records share the task.
#[derive(Default)]
pub(in super::super) struct RecordReaders(Mutex<Vec<(Discovery, watch::Receiver<Arc<Records>>)>>);

impl RecordReaders {
    /// Returns a receiver that follows the records of a place. If no task reads the place yet, `spawn` runs one.
    pub(in super::super) fn of(
        &self,
        discovery: &Discovery,
        spawn: impl FnOnce(futures_util::future::BoxFuture<'static, ()>),
    ) -> watch::Receiver<Arc<Records>> {
        let mut readers = self.0.lock();
        if let Some((_, records)) = readers.iter().find(|(other, _)| other == discovery) {
            return records.clone();
        }
        let (known, records) = watch::channel(Arc::default());
        spawn(Box::pin(look_for_ever(discovery.clone(), known)));
        readers.push((discovery.clone(), records.clone()));
        records
    }
}

async fn look_for_ever(discovery: Discovery, known: watch::Sender<Arc<Records>>) {
    loop {
        let before = Arc::clone(&known.borrow());
        let looked = look(&discovery, &before).await;
        known.send_if_modified(|records| {
            let now = match looked {
                Ok(now) => now,
                // The records that were known stay.
                Err(error) => Records {
                    trouble: Some(format!("Dynamo's records cannot be read: {error}")),
                    ..Records::clone(records)
                },
            };
            let is_news = **records != now;
            *records = Arc::new(now);
            is_news
        });
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Reads the records as they are now. If a record cannot be read, its value in `before` stays.
async fn look(discovery: &Discovery, before: &Records) -> Result<Records, RecordsError> {
    let sources = look_at(discovery, SOURCES).await?;
    let channels = look_at(discovery, CHANNELS).await?;
    Ok(read_records(sources, channels, before))
}

/// Reads all records whose keys begin with `prefix`.
pub(in super::super) async fn look_at(
    discovery: &Discovery,
    prefix: &'static str,
) -> Result<Vec<Pair>, RecordsError> {
    match discovery {
        Discovery::Etcd(authority) => range(authority, prefix).await,
        Discovery::Files(folder) => {
            let folder = folder.clone();
            let reading = tokio::task::spawn_blocking(move || files(&folder, prefix));
            reading.await.map_err(io::Error::other)?
        }
    }
}

/// Reads all keys of etcd that begin with `prefix`, with their values.
async fn range(authority: &str, prefix: &str) -> Result<Vec<Pair>, RecordsError> {
    // The end is the first key behind all keys with the prefix: `0` follows `/`.
    let end = format!("{}0", prefix.trim_end_matches('/'));
    let question =
        json!({"key": STANDARD.encode(prefix), "range_end": STANDARD.encode(end), "limit": RECORDS_MAX + 1});
    let answer = ask_etcd(authority, "kv/range", &question, ANSWER_BYTES_MAX).await?;
    let pairs = match answer.get("kvs") {
        // If there are no keys, the gateway leaves the list out.
        None => return Ok(Vec::new()),
        Some(Value::Array(pairs)) => pairs,
        Some(_) => return Err(EtcdError::Answer.into()),
    };
    if pairs.len() > RECORDS_MAX {
        return Err(RecordsError::TooMany);
    }
    let field = |pair: &Value, name| {
        // The gateway leaves an empty field out.
        let text = pair.get(name).and_then(Value::as_str).unwrap_or_default();
        STANDARD.decode(text).map_err(|_| EtcdError::Answer)
    };
    let pair = |pair: &Value| {
        let key = String::from_utf8_lossy(&field(pair, "key")?).into_owned();
        Ok((key, field(pair, "value")?))
    };
    pairs.iter().map(pair).collect()
}

/// Reads all files of a folder of discovery whose keys begin with `prefix`.
fn files(folder: &Path, prefix: &str) -> Result<Vec<Pair>, RecordsError> {
    let bucket = folder.join(prefix);
    let entries = match std::fs::read_dir(&bucket) {
        Ok(entries) => entries,
        // Before the first worker starts, discovery's folder exists without the subfolder. If discovery's own folder is
        // missing, it was configured wrongly.
        Err(error) if error.kind() == io::ErrorKind::NotFound && folder.is_dir() => return Ok(Vec::new()),
        Err(error) => return Err(error.into()),
    };
    let mut pairs = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Some(value) = read_file(&entry.path())? {
            let name = entry.file_name();
            let rest = percent_decode(name.as_encoded_bytes()).decode_utf8_lossy();
            pairs.push((format!("{prefix}{rest}"), value));
        }
        if pairs.len() > RECORDS_MAX {
            return Err(RecordsError::TooMany);
        }
    }
    Ok(pairs)
}

/// Reads a record's file; `None` if it is gone, was not touched for [`FORSAKEN_AFTER`], or is no record.
fn read_file(path: &Path) -> Result<Option<Vec<u8>>, RecordsError> {
    let read = || {
        let metadata = std::fs::metadata(path)?;
        let age = SystemTime::now().duration_since(metadata.modified()?);
        let is_forsaken = age.is_ok_and(|age| age > FORSAKEN_AFTER);
        let is_record = metadata.is_file() && metadata.len() <= RECORD_BYTES_MAX as u64;
        (is_record && !is_forsaken)
            .then(|| std::fs::read(path))
            .transpose()
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(read?),
    }
}

fn read_records(sources: Vec<Pair>, channels: Vec<Pair>, before: &Records) -> Records {
    let read = |(key, value): Pair| match read_source(&key, &value) {
        Ok(record) => record,
        Err(error) => {
            log_gated!(warn "a record of Dynamo's discovery cannot be read"; key, error);
            // A record that cannot be read may be half written at this moment.
            let publisher = publisher_of(&key)?;
            Some((publisher, before.sources.get(&publisher)?.clone()))
        }
    };
    let read_channel = |(key, value): Pair| {
        read_channel(&value).or_else(|| {
            let publisher = publisher_of(&key)?;
            let mut channels = before.channels.iter();
            let known = channels.find(|(_, known)| **known == publisher);
            known.map(|(endpoint, _)| (endpoint.clone(), publisher))
        })
    };
    Records {
        sources: sources.into_iter().filter_map(read).collect(),
        channels: channels.into_iter().filter_map(read_channel).collect(),
        is_known: true,
        trouble: None,
    }
}

/// Reads a record: the publisher's number and its worker. `None` if the worker cannot be asked; an error in words if the
/// record has another form.
fn read_source(key: &str, value: &[u8]) -> Result<Option<(u64, SourceRecord)>, String> {
    #[derive(Deserialize)]
    struct Source {
        publisher_id: u64,
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        worker: Worker,
        recovery_target: Option<Recovery>,
    }
    #[derive(Deserialize)]
    struct Worker {
        worker_id: u64,
        #[serde(default)]
        dp_rank: Rank,
    }
    #[derive(Deserialize)]
    struct Recovery {
        transport: Transport,
    }
    #[derive(Deserialize)]
    enum Transport {
        #[serde(rename = "tcp")]
        Tcp(String),
        #[serde(rename = "nats_tcp")]
        Nats(String),
    }

    let source: Source = serde_json::from_slice(value).map_err(|error| error.to_string())?;
    let Some(recovery) = source.metadata.recovery_target else {
        return Ok(None);
    };
    let target = match recovery.transport {
        Transport::Nats(subject) => Target::Nats(subject),
        Transport::Tcp(target) => {
            let (address, path) = target.split_once('/').ok_or("the target has no path")?;
            let (address, path) = (address.to_owned(), path.to_owned());
            Target::Tcp { address, path }
        }
    };
    let Worker { worker_id, dp_rank } = source.metadata.worker;
    let record = SourceRecord {
        subject: subject_of(key).ok_or("the key has no topic")?,
        id: worker_id,
        worker: worker_of_instance(&worker_id.to_string()).map_err(|error| error.to_string())?,
        rank: dp_rank,
        target,
    };
    Ok(Some((source.publisher_id, record)))
}

/// Returns the publisher's number, with which a record's key ends.
fn publisher_of(key: &str) -> Option<u64> {
    u64::from_str_radix(key.rsplit_once('/')?.1, 16).ok()
}

/// Returns the subject of the key `v1/event_sources/SCOPE/topic/TOPIC/PUBLISHER`: the scope's words and the topic.
fn subject_of(key: &str) -> Option<String> {
    let (scope, rest) = key.strip_prefix(SOURCES)?.rsplit_once("/topic/")?;
    let (topic, _publisher) = rest.split_once('/')?;
    Some(format!("{}.{topic}", scope.replace('/', ".")))
}

/// Reads the address of a publisher on ZeroMQ, and its number. The record of a broker, which several publishers share, names
/// no publisher and gives `None`.
fn read_channel(value: &[u8]) -> Option<(String, u64)> {
    let value: Value = serde_json::from_slice(value).ok()?;
    let endpoint = value.pointer("/transport/config/endpoint")?.as_str()?;
    Some((endpoint.to_owned(), value.get("instance_id")?.as_u64()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/17a8";

    fn source(transport: &Value) -> Vec<u8> {
        json!({
            "type": "EventSource", "topic": "kv-events", "publisher_id": 6056,
            "metadata": {
                "worker": {"worker_id": 11_528_643_050_913_782_559_u64, "dp_rank": 1},
                "recovery_target": {
                    "component": "backend", "endpoint": "worker_kv_query_source_17a8", "namespace": "dynamo",
                    "transport": transport, "request_plane_codec": "msgpack",
                },
            },
        })
        .to_string()
        .into_bytes()
    }

    fn record(target: Target) -> SourceRecord {
        SourceRecord {
            subject: "namespace.dynamo.component.backend.endpoint.generate.kv-events".to_owned(),
            id: 11_528_643_050_913_782_559,
            worker: WorkerName::new("11528643050913782559").unwrap(),
            rank: 1,
            target,
        }
    }

    #[test]
    fn records_say_where_a_worker_is_asked() {
        let key = format!("{SOURCES}{KEY}");
        let over_tcp =
            source(&json!({"tcp": "10.0.0.7:34051/9ffd/dynamo/backend/worker_kv_query_source_17a8"}));
        let target = Target::Tcp {
            address: "10.0.0.7:34051".to_owned(),
            path: "9ffd/dynamo/backend/worker_kv_query_source_17a8".to_owned(),
        };
        assert_eq!(read_source(&key, &over_tcp), Ok(Some((6056, record(target)))));
        let over_nats = source(&json!({"nats_tcp": "dynamo_backend.x-99"}));
        let target = Target::Nats("dynamo_backend.x-99".to_owned());
        assert_eq!(read_source(&key, &over_nats), Ok(Some((6056, record(target)))));
        // The worker of this record keeps no index of its own.
        let none =
            br#"{"publisher_id":1,"metadata":{"worker":{"worker_id":7,"dp_rank":0},"recovery_target":null}}"#;
        assert_eq!(read_source(&key, none), Ok(None));
        for (key, value) in [
            (key.as_str(), b"{}".to_vec()),
            (key.as_str(), source(&json!({"http": "x"}))),
            (key.as_str(), source(&json!({"tcp": "x"}))),
            ("v1/other", source(&json!({"nats_tcp": "x"}))),
        ] {
            assert!(read_source(key, &value).is_err(), "{key}");
        }
    }

    #[tokio::test]
    async fn a_folder_has_the_records_of_living_processes() {
        let folder = tempfile::tempdir().unwrap();
        let place = Discovery::Files(folder.path().to_owned());
        let nothing = Records::default();
        assert!(look(&place, &nothing).await.unwrap().sources.is_empty());
        let bucket = folder.path().join(SOURCES);
        std::fs::create_dir_all(&bucket).unwrap();
        let name = KEY.replace('/', "%2F").replace('-', "%2D");
        let path = bucket.join(&name);
        std::fs::write(&path, source(&json!({"nats_tcp": "s"}))).unwrap();
        std::fs::write(bucket.join("unreadable"), "x").unwrap();
        let dead = bucket.join("dead%2Ftopic%2Fkv%2Devents%2F2");
        std::fs::write(&dead, source(&json!({"nats_tcp": "t"}))).unwrap();
        let long_ago = SystemTime::now() - FORSAKEN_AFTER * 2;
        std::fs::File::open(&dead)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
        let channels = folder.path().join(CHANNELS);
        std::fs::create_dir_all(&channels).unwrap();
        let address = channels.join(name);
        std::fs::write(&address, channel()).unwrap();
        let records = look(&place, &nothing).await.unwrap();
        let expected = BTreeMap::from([(6056, record(Target::Nats("s".to_owned())))]);
        assert_eq!(records.sources, expected);
        assert_eq!(records.channels, BTreeMap::from([("tcp://h:1".to_owned(), 6056)]));
        // A record that is just being written stays as it was.
        for file in [&path, &address] {
            std::fs::write(file, "{").unwrap();
        }
        assert_eq!(look(&place, &records).await.unwrap(), records);
        let unknown = look(&place, &nothing).await.unwrap();
        assert!(unknown.sources.is_empty() && unknown.channels.is_empty());
        std::fs::remove_dir_all(folder.path()).unwrap();
        assert!(look(&place, &records).await.is_err());
    }

    fn channel() -> Vec<u8> {
        let channel =
            json!({"instance_id": 6056, "transport": {"kind": "Zmq", "config": {"endpoint": "tcp://h:1"}}});
        channel.to_string().into_bytes()
    }

    #[tokio::test]
    async fn etcd_has_the_records_below_a_prefix() {
        let (etcd, authority) = kvatlas_lab::etcd::serve().await;
        let place = Discovery::Etcd(authority);
        let nothing = Records::default();
        // Without a key the gateway leaves the list out.
        let empty = look(&place, &nothing).await.unwrap();
        assert!(empty.is_known && empty.sources.is_empty() && empty.channels.is_empty());
        let key = format!("{SOURCES}{KEY}");
        {
            let mut etcd = etcd.lock();
            etcd.put(&key, source(&json!({"nats_tcp": "s"})));
            etcd.put(&format!("{CHANNELS}{KEY}"), channel());
            // Other keys, which come right before and right after those with the prefix.
            let of_another = source(&json!({"nats_tcp": "t"}));
            etcd.put(&format!("v1/event_sourcer/{KEY}"), of_another.clone());
            etcd.put(&format!("v1/event_sources0{KEY}"), of_another);
        }
        assert_eq!(look_at(&place, SOURCES).await.unwrap().len(), 1);
        let records = look(&place, &nothing).await.unwrap();
        let expected = BTreeMap::from([(6056, record(Target::Nats("s".to_owned())))]);
        assert_eq!(records.sources, expected);
        assert_eq!(records.channels, BTreeMap::from([("tcp://h:1".to_owned(), 6056)]));
        // The gateway leaves out the empty value, so the record stays as it was. KEY ends with the number of its
        // publisher.
        etcd.lock().put(&key, "");
        assert_eq!(look(&place, &records).await.unwrap().sources, records.sources);
        assert!(look(&place, &nothing).await.unwrap().sources.is_empty());
        etcd.lock().kept.clear();
        assert!(look(&place, &records).await.unwrap().sources.is_empty());
    }

    #[tokio::test]
    async fn etcd_may_have_so_many_records_at_most() {
        let (etcd, authority) = kvatlas_lab::etcd::serve().await;
        let place = Discovery::Etcd(authority);
        for number in 0..RECORDS_MAX {
            etcd.lock().put(&format!("{CHANNELS}{number}"), "{}");
        }
        assert_eq!(look_at(&place, CHANNELS).await.unwrap().len(), RECORDS_MAX);
        etcd.lock().put(&format!("{CHANNELS}more"), "{}");
        let refused = look_at(&place, CHANNELS).await;
        assert!(matches!(refused, Err(RecordsError::TooMany)), "{refused:?}");
    }
}
