//! `kvatlas snapshot export`: prints the content of a snapshot as JSON lines.

use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::PathBuf;

use clap::Args;
use kvatlas_core::hash::Position;
use kvatlas_core::snapshot::forest::ForestChunk;
use kvatlas_core::snapshot::{FORMAT_VERSION, Frame, HolderFrame, InForest, SnapshotError, SnapshotReader};
use kvatlas_core::wire::{
    BlockNames, DegradedReasons, Event, EventBatch, NamespaceName, Resumable, StoredBlocks, WorkerName,
};
use serde_json::json;

use super::super::event_line::LineBatch;
use super::super::failure::Failure;
use super::files::{cannot_open, file_limits};
use kvatlas_process::storage::open_regular;

#[derive(Debug, Args)]
pub(super) struct ExportArguments {
    /// The snapshot.
    #[arg(value_name = "FILE")]
    path: PathBuf,
    /// Only holders of this namespace.
    #[arg(long, value_name = "NAME")]
    namespace: Option<NamespaceName>,
    /// Only holders of this worker.
    #[arg(long, value_name = "NAME")]
    worker: Option<WorkerName>,
}

/// Error that ends an export early.
#[derive(Debug, thiserror::Error)]
enum SnapshotExportError {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("cannot write to standard output: {0}")]
    Output(#[from] io::Error),
    #[error("cannot write a line as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// Writes the content of a snapshot to standard output. If the reader, such as `head`, has ended, that is no failure.
pub(super) fn export(arguments: &ExportArguments) -> Result<(), Failure> {
    let path = &arguments.path;
    if path.is_dir() {
        return Err(Failure::usage(format_args!(
            "{path:?} is a directory; name one of the snapshots in it"
        )));
    }
    let file = open_regular(path).map_err(|error| cannot_open(path, &error))?;
    let mut output = BufWriter::new(io::stdout().lock());
    let is_wanted = |holder: &HolderFrame| {
        let is_namespace = arguments
            .namespace
            .as_ref()
            .is_none_or(|name| *name == holder.namespace);
        let is_worker = arguments
            .worker
            .as_ref()
            .is_none_or(|name| *name == holder.worker);
        is_namespace && is_worker
    };
    let exported = write_lines(BufReader::with_capacity(1 << 20, file), &mut output, is_wanted);
    match exported.and_then(|()| Ok(output.flush()?)) {
        // If the reader of the output has ended, as `head` does, that is no failure.
        Err(SnapshotExportError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        exported => exported.map_err(|error| Failure::failed(format_args!("{}: {error}", path.display()))),
    }
}

fn write_lines(
    input: impl Read,
    output: &mut impl Write,
    is_wanted: impl Fn(&HolderFrame) -> bool,
) -> Result<(), SnapshotExportError> {
    let limits = file_limits();
    let mut reader = SnapshotReader::new(input)?;
    let head = json!({ "version": FORMAT_VERSION, "created_us": reader.created_us() });
    writeln!(output, "{}", json!({ "snapshot": head }))?;
    let mut takes_batches = false;
    // Holders whose blocks are in a forest, by their numbers there; `None` for a holder that is not wanted.
    let mut in_forest: Vec<Option<HolderFrame>> = Vec::new();
    while let Some(frame) = reader.next_frame()? {
        match frame {
            Frame::Stream(cursor) => writeln!(output, "{}", json!({ "stream": cursor }))?,
            Frame::Holder(holder) => {
                takes_batches = is_wanted(&holder);
                if takes_batches {
                    writeln!(output, "{}", json!({ "holder": holder_json(&holder) }))?;
                }
                if holder.forest.is_some() {
                    in_forest.push(takes_batches.then_some(holder));
                }
            }
            Frame::Forest(chunk) => write_forest(&chunk, &in_forest, output)?,
            Frame::Batch(payload) if takes_batches => {
                let batch =
                    EventBatch::decode(&payload, &limits).map_err(|error| SnapshotError::Undecodable {
                        frame: reader.frames() - 1,
                        reason: error.to_string(),
                    })?;
                let line = LineBatch {
                    tier: batch.tier,
                    events: batch.events,
                };
                writeln!(output, "{}", line.to_json()?)?;
            }
            Frame::Batch(_) => {}
        }
    }
    writeln!(output, "{}", json!({ "end": reader.totals() }))?;
    Ok(())
}

/// Writes the wanted holders' blocks in one chunk of a forest, a part of the snapshot that stores the blocks of many
/// holders together. Each holder gets two lines: one that names the holder, and one with a batch.
fn write_forest(
    chunk: &ForestChunk,
    holders: &[Option<HolderFrame>],
    output: &mut impl Write,
) -> Result<(), SnapshotExportError> {
    for (number, runs) in chunk.holders() {
        let Some(Some(holder)) = holders.get(number as usize) else {
            continue;
        };
        let Some(InForest { tier, .. }) = holder.forest else {
            continue;
        };
        let whose = json!({ "namespace": holder.namespace, "worker": holder.worker, "rank": holder.rank });
        writeln!(output, "{}", json!({ "continued": whose }))?;
        let events = runs.map(|run| {
            Event::Stored(StoredBlocks {
                names: BlockNames::Sequence {
                    parent: run.parent,
                    position: Position::new(u64::from(run.position)).ok(),
                    hashes: run.hashes.to_vec(),
                },
                content: None,
                engine_hashes: None,
                resumable: Resumable::ALL,
            })
        });
        let line = LineBatch {
            tier,
            events: events.collect(),
        };
        writeln!(output, "{}", line.to_json()?)?;
    }
    Ok(())
}

fn holder_json(holder: &HolderFrame) -> serde_json::Value {
    json!({
        "namespace": holder.namespace,
        "worker": holder.worker,
        "rank": holder.rank,
        "epoch": holder.epoch,
        "seq": holder.seq,
        "blocks": holder.blocks,
        "degraded": DegradedReasons::from_bits(holder.degraded_bits),
        "hashing": holder.hashing,
        "block_size": holder.block_size,
        "foreign_chain": holder.foreign_chain,
        "made_us": holder.made_us,
        "seen_us": holder.seen_us,
    })
}

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::SequenceHash;
    use kvatlas_core::index::Hashing;
    use kvatlas_core::snapshot::{SnapshotWriter, StreamCursor};
    use kvatlas_core::wire::{Labels, Tier};

    use super::*;

    fn holder(worker: &str) -> HolderFrame {
        HolderFrame {
            namespace: NamespaceName::new("llama").unwrap(),
            worker: WorkerName::new(worker).unwrap(),
            rank: 0,
            epoch: 7,
            seq: 2,
            degraded_bits: 1,
            blocks: 1,
            hashing: Hashing::Engine,
            block_size: 16,
            is_size_told: false,
            foreign_chain: false,
            made_us: None,
            seen_us: None,
            address: None,
            labels: Labels::NONE,
            forest: None,
        }
    }

    fn sample() -> Vec<u8> {
        let mut writer = SnapshotWriter::new(Vec::new(), 5).unwrap();
        let cursor = StreamCursor {
            stream: "EVENTS".to_owned(),
            created_us: 3,
            sequence: 9,
            digest: None,
            intake: None,
            has_all: true,
            server: None,
        };
        writer.write_stream(&cursor).unwrap();
        for (worker, hash) in [("gpu-0", 10), ("gpu-1", 11)] {
            writer.write_holder(&holder(worker)).unwrap();
            let blocks = StoredBlocks::by_sequence(None, None, vec![SequenceHash(hash)]);
            let batch = EventBatch {
                epoch: 7,
                seq: 2,
                rank: 0,
                time_us: None,
                tier: Tier::DEVICE,
                block_size: None,
                profile: None,
                events: vec![Event::Stored(blocks)],
            };
            writer.write_batch(&batch.encode()).unwrap();
        }
        writer.finish().unwrap().0
    }

    fn lines(bytes: &[u8], worker: &str) -> Result<String, SnapshotExportError> {
        let mut output = Vec::new();
        write_lines(bytes, &mut output, |holder| holder.worker.as_str() == worker)?;
        Ok(String::from_utf8(output).unwrap())
    }

    #[test]
    fn a_snapshot_is_its_frames_as_lines() {
        let text = lines(&sample(), "gpu-1").unwrap();
        let mut lines = text.lines();
        for (key, value) in [
            ("snapshot", json!({ "version": 3, "created_us": 5 })),
            (
                "stream",
                json!({ "stream": "EVENTS", "created_us": 3, "sequence": 9, "has_all": true }),
            ),
            ("holder", holder_json(&holder("gpu-1"))),
        ] {
            let line: serde_json::Value = serde_json::from_str(lines.next().unwrap()).unwrap();
            assert_eq!(line, json!({ key: value }));
        }
        let batch = LineBatch::parse(lines.next().unwrap()).unwrap();
        assert_eq!((batch.tier, batch.blocks()), (Tier::DEVICE, 1));
        assert_eq!(
            lines.next(),
            Some("{\"end\":{\"batches\":2,\"blocks\":2,\"holders\":2}}")
        );
        assert_eq!(lines.next(), None);
    }

    #[test]
    fn a_truncated_snapshot_has_no_end() {
        let bytes = sample();
        assert!(matches!(
            lines(&bytes[..bytes.len() - 1], "gpu-0"),
            Err(SnapshotExportError::Snapshot(SnapshotError::Truncated { .. }))
        ));
    }
}
