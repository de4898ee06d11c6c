//! File that keeps the history of holders' states, so that the history outlives the daemon.
//!
//! The file has a MessagePack value, followed by the value's xxh3 hash, little-endian. A file that cannot be read is
//! reported and ignored, because a start must not fail for a history.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use kvatlas_core::wire::{HolderId, NamespaceName, Rank, WorkerName};

use super::History;
use super::changes::HistoryState;

/// Version of the file format.
const VERSION: u64 = 1;
/// Length of the hash after the history, in bytes.
const HASH_BYTES: usize = 8;
/// Maximum length of a file that is read, in bytes. Every file that the bounds on the history allow is shorter.
pub(crate) const FILE_BYTES_MAX: u64 = 64 << 20;

/// Reason why the history in a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HistoryError {
    /// File is cut off, or damaged.
    #[error("its hash is not that of its content")]
    Damaged,
    /// File has another format than this version writes.
    #[error("it is none that this version writes: {0}")]
    Form(String),
}

/// History in the form in which a file keeps it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedHistory {
    v: u64,
    /// Time at which the history was saved, in seconds since the Unix epoch.
    saved_s: u64,
    holders: Vec<SavedHolder>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedHolder {
    namespace: NamespaceName,
    worker: WorkerName,
    rank: Rank,
    /// Changes of a holder. Each is a time in seconds since the Unix epoch, and a state as a number.
    changes: Vec<(u64, u32)>,
}

impl SavedHistory {
    /// Returns the content of a file that keeps this history.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, HistoryError> {
        let mut bytes = rmp_serde::to_vec(self).map_err(|error| HistoryError::Form(error.to_string()))?;
        bytes.extend_from_slice(&xxh3_64(&bytes).to_le_bytes());
        Ok(bytes)
    }

    /// Reads the history from a file's content.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HistoryError> {
        let (content, hash) = bytes
            .split_last_chunk::<HASH_BYTES>()
            .ok_or(HistoryError::Damaged)?;
        if xxh3_64(content).to_le_bytes() != *hash {
            return Err(HistoryError::Damaged);
        }
        let saved: Self =
            rmp_serde::from_slice(content).map_err(|error| HistoryError::Form(error.to_string()))?;
        match saved.v {
            VERSION => Ok(saved),
            other => Err(HistoryError::Form(format!("its version is {other}"))),
        }
    }
}

impl History {
    /// Returns the present history in the form in which a file keeps it.
    pub(crate) fn save(&self, now_s: u64) -> SavedHistory {
        let book = self.book.lock();
        let holders = book.holders.iter().flat_map(|(namespace, holders)| {
            holders.iter().map(|(id, entry)| SavedHolder {
                namespace: namespace.clone(),
                worker: id.worker.clone(),
                rank: id.rank,
                changes: entry
                    .changes
                    .iter()
                    .map(|change| (change.at_s, change.state.bits()))
                    .collect(),
            })
        });
        SavedHistory {
            v: VERSION,
            saved_s: now_s,
            holders: holders.collect(),
        }
    }

    /// Takes over a saved history. No daemon was running after the history was saved, so the state of its holders
    /// counts as not known from that time on. Holders that had been removed before stay removed.
    pub(crate) fn restore(&self, saved: SavedHistory) {
        let mut book = self.book.lock();
        for SavedHolder {
            namespace,
            worker,
            rank,
            changes,
        } in saved.holders
        {
            let id = HolderId { worker, rank };
            for (at_s, bits) in changes {
                book.note(&namespace, &id, at_s, HistoryState::from_bits(bits));
            }
            let was_there = book.last(&namespace, &id) != Some(HistoryState::Gone);
            if was_there {
                book.note(&namespace, &id, saved.saved_s, HistoryState::Unwatched);
            }
        }
    }
}

impl super::HistoryBook {
    fn last(&self, namespace: &NamespaceName, holder: &HolderId) -> Option<HistoryState> {
        let entry = self.holders.get(namespace)?.get(holder)?;
        entry.changes.last().map(|last| last.state)
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{DegradedReason, DegradedReasons};

    use super::*;

    #[test]
    fn a_history_outlives_its_daemon() {
        let (namespace, worker) = (NamespaceName::new("n").unwrap(), WorkerName::new("w").unwrap());
        let id = HolderId { worker, rank: 3 };
        let before = History::new();
        let gap = HistoryState::Known(DegradedReasons::of(DegradedReason::Gap));
        before.book.lock().note(&namespace, &id, 100, gap);
        let bytes = before.save(120).encode().unwrap();
        let after = History::new();
        after.restore(SavedHistory::decode(&bytes).unwrap());
        let since = after.book.lock().note(&namespace, &id, 130, gap);
        assert_eq!(since, Some(Some(100)));
        let shown = serde_json::to_value(after.of(&namespace, &id)).unwrap();
        let expected = serde_json::json!([
            {"at_us": 100_000_000, "state": "degraded", "degraded": ["gap"]},
            {"at_us": 120_000_000, "state": "unwatched"},
            {"at_us": 130_000_000, "state": "degraded", "degraded": ["gap"]},
        ]);
        assert_eq!(shown, expected);
        for cut in 0..bytes.len() {
            assert!(SavedHistory::decode(&bytes[..cut]).is_err(), "{cut} bytes");
        }
        let mut damaged = bytes;
        damaged[3] ^= 1;
        assert!(matches!(
            SavedHistory::decode(&damaged),
            Err(HistoryError::Damaged)
        ));
    }
}
