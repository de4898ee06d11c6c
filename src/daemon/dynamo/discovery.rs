//! Discovery of this daemon: keeps an instance's record where routers look for it. That is etcd (under a lease), or a folder of files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use kvatlas_config::Discovery;
use kvatlas_telemetry::LogGate;

use super::messages::{Instance, Transport};
use kvatlas_process::dynamo::{EtcdError, ask_etcd};

/// Seconds for which etcd keeps the record of a process that is gone.
const LEASE_SECONDS: u64 = 10;
/// Time between two writes of a record. Several writes fit into one lease. So when one of the replicas that share a record ends, the
/// others keep the record.
const REFRESH: Duration = Duration::from_secs(2);
/// Longest answer of etcd to a write, in bytes.
const ANSWER_BYTES_MAX: usize = 1 << 20;

static FAILED_GATE: LogGate = LogGate::new();

/// Why a record could not be written.
#[derive(Debug, thiserror::Error)]
enum DiscoveryError {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Etcd(#[from] EtcdError),
}

/// Keeps the record of `instance` until `stop`, and then removes it. Over NATS, replicas share one record. A shared record in etcd is not
/// removed: its lease ends unless another replica keeps it. A shared file is removed, and another replica writes it again.
pub(super) async fn keep_record(
    discovery: Discovery,
    instance: Instance,
    transport: Transport,
    stop: CancellationToken,
) {
    let record = instance.record(&transport);
    let is_shared = transport == Transport::Nats;
    let mut lease = None;
    loop {
        let written = match &discovery {
            Discovery::Files(folder) => write_file(&file_of(folder, &instance.key()), &record),
            Discovery::Etcd(authority) => put(authority, &instance.key(), &record, &mut lease).await,
        };
        if let Err(error) = written
            && let Some(suppressed) = FAILED_GATE.admit()
        {
            tracing::warn!(%error, ?discovery, suppressed, "Dynamo's routers cannot find this daemon");
        }
        tokio::select! {
            () = tokio::time::sleep(REFRESH) => {}
            () = stop.cancelled() => break,
        }
    }
    let removed = match &discovery {
        // If another replica shares the file, it writes the file again.
        Discovery::Files(folder) => {
            std::fs::remove_file(file_of(folder, &instance.key())).map_err(Into::into)
        }
        // The record ends with this replica's lease, unless another replica has since put the record under its own.
        Discovery::Etcd(_) if is_shared => Ok(()),
        Discovery::Etcd(authority) => revoke(authority, lease).await,
    };
    if let Err(error) = removed {
        tracing::debug!(%error, "the record of this daemon could not be taken away");
    }
}

/// Returns the file of a key: `v1/instances/` is a folder, and the rest is a percent-encoded file name.
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

/// Replaces a file in one step.
fn write_file(path: &Path, content: &str) -> Result<(), DiscoveryError> {
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, content.as_bytes())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Writes a record to etcd under `lease`. First renews the lease, or makes a new one if there is none or it has ended.
async fn put(
    authority: &str,
    key: &str,
    record: &str,
    lease: &mut Option<String>,
) -> Result<(), DiscoveryError> {
    let id = match lease.take() {
        Some(id) if is_alive(authority, &id).await? => id,
        _ => {
            let granted = post(authority, "lease/grant", &json!({"TTL": LEASE_SECONDS})).await?;
            let id = granted.get("ID").and_then(Value::as_str);
            id.ok_or(EtcdError::Answer)?.to_owned()
        }
    };
    let put = json!({"key": STANDARD.encode(key), "value": STANDARD.encode(record), "lease": id});
    post(authority, "kv/put", &put).await?;
    *lease = Some(id);
    Ok(())
}

/// Renews a lease. Returns false if the lease has already ended.
async fn is_alive(authority: &str, id: &str) -> Result<bool, EtcdError> {
    let kept = post(authority, "lease/keepalive", &json!({"ID": id})).await?;
    let left = kept.pointer("/result/TTL").and_then(Value::as_str);
    Ok(left.is_some_and(|left| left != "0"))
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
    use super::*;

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
    async fn a_record_is_there_until_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let instance = Instance {
            component: "dynamo.backend".parse().unwrap(),
            id: 5,
        };
        let path = file_of(folder.path(), &instance.key());
        let stop = CancellationToken::new();
        let discovery = Discovery::Files(folder.path().to_owned());
        let keeping = tokio::spawn(keep_record(
            discovery,
            instance.clone(),
            Transport::Nats,
            stop.clone(),
        ));
        while !path.exists() {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            instance.record(&Transport::Nats)
        );
        stop.cancel();
        keeping.await.unwrap();
        assert!(!path.exists());
    }
}
