//! Discovery of this daemon by Dynamo's routers. A record of each instance (an endpoint of this daemon) is kept in
//! etcd, under a lease, or in a folder of files.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use kvatlas_config::Discovery;
use kvatlas_telemetry::LogGate;

use super::messages::{Instance, RequestTransport};
use kvatlas_process::dynamo::{EtcdError, ask_etcd};

/// Seconds for which etcd keeps the record of a process that has ended.
const LEASE_SECONDS: i64 = 10;
/// Time between two checks of a record. Several checks fit into one lease.
const REFRESH: Duration = Duration::from_secs(2);
/// Maximum length of an answer of etcd, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

static FAILED_GATE: LogGate = LogGate::new();

/// Reason why a discovery record could not be written.
#[derive(Debug, thiserror::Error)]
enum DiscoveryError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// Keeps the record of `instance` until `stop`, and then removes it.
///
/// Exception: over NATS, replicas share one record, so the record is not removed. If no other replica keeps the record,
/// it expires: its lease in etcd ends, or Dynamo drops its file for being old.
pub(super) async fn keep_record(
    discovery: Discovery,
    instance: Instance,
    transport: RequestTransport,
    stop: CancellationToken,
) {
    let is_shared = transport == RequestTransport::Nats;
    let mut record = Record {
        discovery,
        key: instance.key(),
        text: instance.record(&transport),
        lease: None,
    };
    loop {
        if let Err(error) = record.keep().await
            && let Some(suppressed) = FAILED_GATE.admit()
        {
            let discovery = &record.discovery;
            tracing::warn!(%error, ?discovery, suppressed, "Dynamo's routers cannot find this daemon");
        }
        tokio::select! {
            () = tokio::time::sleep(REFRESH) => {}
            () = stop.cancelled() => break,
        }
    }
    if !is_shared && let Err(error) = record.remove().await {
        tracing::debug!(%error, "the record of this daemon could not be taken away");
    }
}

/// Discovery record of an instance. Routers react to every write of a record, so a record that is already right is not
/// written again.
struct Record {
    discovery: Discovery,
    key: String,
    text: String,
    /// Number of this replica's lease in etcd; `None` if it has none yet.
    lease: Option<String>,
}

impl Record {
    /// Writes the record if it is missing. Otherwise renews the sign that the record's owner lives: the lease in etcd,
    /// or the file's modification time.
    async fn keep(&mut self) -> Result<(), DiscoveryError> {
        match &self.discovery {
            Discovery::Files(folder) => keep_file(folder, &file_of(folder, &self.key), &self.text),
            Discovery::Etcd(authority) => keep_key(authority, &self.key, &self.text, &mut self.lease).await,
        }
    }

    /// Removes the record. Called only for records that no other replica shares.
    async fn remove(self) -> Result<(), DiscoveryError> {
        match &self.discovery {
            Discovery::Files(folder) => Ok(std::fs::remove_file(file_of(folder, &self.key))?),
            Discovery::Etcd(authority) => revoke(authority, self.lease).await,
        }
    }
}

/// Returns the path of a key's file in `folder`. The part `v1/instances` of the key is a folder. The rest of the key,
/// percent-encoded, is the name of the file.
fn file_of(folder: &Path, key: &str) -> PathBuf {
    let (bucket, name) = match key.match_indices('/').nth(1) {
        Some((at, _)) => (&key[..at], &key[at + 1..]),
        None => ("", key),
    };
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    folder
        .join(bucket)
        .join(name.bytes().map(encode).collect::<String>())
}

/// Writes a record to the file at `path`, in a subfolder of `folder`.
///
/// If the file has this text already, only its modification time is renewed, because Dynamo removes files with an old
/// modification time. A new file is written in `folder` first and then moved into the subfolder, because Dynamo watches
/// the subfolder and must not find an unfinished file there.
fn keep_file(folder: &Path, path: &Path, text: &str) -> Result<(), DiscoveryError> {
    if std::fs::read_to_string(path).is_ok_and(|kept| kept == text) {
        let file = std::fs::File::options().write(true).open(path)?;
        return Ok(file.set_modified(SystemTime::now())?);
    }
    std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, text.as_bytes())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Writes a record to etcd under `lease`. First renews the lease, or makes a new one if `lease` is `None` or has ended.
///
/// The record may already exist with the same text, under the lease of another replica. While that replica renews its
/// lease, the record is left unchanged.
async fn keep_key(
    authority: &str,
    key: &str,
    text: &str,
    lease: &mut Option<String>,
) -> Result<(), DiscoveryError> {
    let id = match lease.take() {
        Some(id) if keep_alive(authority, &id).await? => id,
        _ => {
            let granted = post(authority, "lease/grant", &json!({"TTL": LEASE_SECONDS})).await?;
            let id = granted.get("ID").and_then(Value::as_str);
            id.ok_or(EtcdError::Answer)?.to_owned()
        }
    };
    let id = lease.insert(id);
    let (key, value) = (STANDARD.encode(key), STANDARD.encode(text));
    let found = post(authority, "kv/range", &json!({"key": key})).await?;
    let told = |field: &str| found.pointer(&format!("/kvs/0/{field}")).and_then(Value::as_str);
    let is_kept = match (told("value"), told("lease")) {
        (Some(kept), Some(owner)) if kept == value => {
            owner == id || seconds_left(authority, owner).await? > LEASE_SECONDS / 2
        }
        _ => false,
    };
    if !is_kept {
        let put = json!({"key": key, "value": value, "lease": id});
        post(authority, "kv/put", &put).await?;
    }
    Ok(())
}

/// Renews a lease. Returns false if the lease has already ended.
async fn keep_alive(authority: &str, id: &str) -> Result<bool, EtcdError> {
    let kept = post(authority, "lease/keepalive", &json!({"ID": id})).await?;
    let left = kept.pointer("/result/TTL").and_then(Value::as_str);
    Ok(left.is_some_and(|left| left != "0"))
}

/// Returns the seconds that are left of a lease: 0 or less if the lease has ended.
async fn seconds_left(authority: &str, id: &str) -> Result<i64, EtcdError> {
    let told = post(authority, "lease/timetolive", &json!({"ID": id})).await?;
    let left = told.get("TTL").and_then(Value::as_str);
    Ok(left.and_then(|left| left.parse().ok()).unwrap_or(0))
}

async fn revoke(authority: &str, lease: Option<String>) -> Result<(), DiscoveryError> {
    let Some(id) = lease else { return Ok(()) };
    post(authority, "lease/revoke", &json!({"ID": id})).await?;
    Ok(())
}

async fn post(authority: &str, method: &str, body: &Value) -> Result<Value, EtcdError> {
    ask_etcd(authority, method, body, ANSWER_BYTES_MAX).await
}

#[cfg(test)]
mod tests {
    use kvatlas_lab::etcd::{self, EtcdValue};

    use super::*;

    const KEY: &str = "v1/instances/a/b/kv_indexer_query/5";

    #[test]
    fn keys_are_names_of_files() {
        let file = file_of(
            Path::new("/d"),
            "v1/instances/dynamo/backend/kv_indexer_query/abc",
        );
        let expected = "/d/v1/instances/dynamo%2Fbackend%2Fkv%5Findexer%5Fquery%2Fabc";
        assert_eq!(file, Path::new(expected));
    }

    #[tokio::test]
    async fn a_record_is_there_until_the_end_and_a_shared_one_longer() {
        let tcp = RequestTransport::Tcp("127.0.0.1:1".to_owned());
        for transport in [tcp, RequestTransport::Nats] {
            let folder = tempfile::tempdir().unwrap();
            let instance = Instance {
                component: "dynamo.backend".parse().unwrap(),
                id: 5,
            };
            let path = file_of(folder.path(), &instance.key());
            let stop = CancellationToken::new();
            let discovery = Discovery::Files(folder.path().to_owned());
            let text = instance.record(&transport);
            let keeping = keep_record(discovery, instance, transport.clone(), stop.clone());
            let keeping = tokio::spawn(keeping);
            while !path.exists() {
                tokio::task::yield_now().await;
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            stop.cancel();
            keeping.await.unwrap();
            assert_eq!(path.exists(), transport == RequestTransport::Nats);
        }
    }

    fn record(discovery: Discovery) -> Record {
        Record {
            discovery,
            key: KEY.to_owned(),
            text: "record".to_owned(),
            lease: None,
        }
    }

    /// Returns the name, modification time and inode number of each file in a folder.
    #[cfg(unix)]
    fn files_in(folder: &Path) -> Vec<(String, SystemTime, u64)> {
        use std::os::unix::fs::MetadataExt;
        let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
        let file = |entry: std::fs::DirEntry| {
            let metadata = entry.metadata().unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, metadata.modified().unwrap(), metadata.ino())
        };
        entries.map(file).collect()
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_file_that_is_there_only_gets_a_new_time() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = record(Discovery::Files(folder.path().to_owned()));
        let path = file_of(folder.path(), &record.key);
        record.keep().await.unwrap();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(old).unwrap();
        let before = files_in(path.parent().unwrap());
        record.keep().await.unwrap();
        let after = files_in(path.parent().unwrap());
        assert_eq!((before.len(), after.len()), (1, 1));
        assert_eq!((&before[0].0, before[0].2), (&after[0].0, after[0].2));
        assert!(before[0].1 == old && after[0].1 > old);
        // A record that another process has damaged or removed is written again.
        std::fs::write(&path, "cut o").unwrap();
        record.keep().await.unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "record");
        std::fs::remove_file(&path).unwrap();
        record.keep().await.unwrap();
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_key_is_written_once_and_taken_over_before_its_lease_ends() {
        let (etcd, authority) = etcd::serve().await;
        let (mut one, mut other) = (
            record(Discovery::Etcd(authority.clone())),
            record(Discovery::Etcd(authority)),
        );
        let state = || {
            let etcd = etcd.lock();
            (etcd.writes, etcd.kept[KEY].lease.clone())
        };
        for _ in 0..3 {
            one.keep().await.unwrap();
            other.keep().await.unwrap();
        }
        assert_eq!(state(), (1, "1".to_owned()));
        // The owner is gone, and its lease runs out.
        etcd.lock().leases.insert("1".to_owned(), LEASE_SECONDS / 2 + 1);
        other.keep().await.unwrap();
        assert_eq!(state(), (1, "1".to_owned()));
        etcd.lock().leases.insert("1".to_owned(), LEASE_SECONDS / 2);
        other.keep().await.unwrap();
        assert_eq!(state(), (2, "2".to_owned()));
        // First the key is missing, then it has another text, then all leases are missing.
        etcd.lock().kept.clear();
        other.keep().await.unwrap();
        let (value, lease) = (b"old".to_vec(), "2".to_owned());
        etcd.lock()
            .kept
            .insert(KEY.to_owned(), EtcdValue { value, lease });
        other.keep().await.unwrap();
        assert_eq!(state(), (4, "2".to_owned()));
        etcd.lock().leases.clear();
        other.keep().await.unwrap();
        assert_eq!(state(), (5, "3".to_owned()));
    }
}
