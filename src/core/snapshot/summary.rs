//! Summaries of a snapshot, and the check that the snapshot is whole.

use std::io::Read;

use serde::Serialize;

use crate::wire::{EventBatch, WireLimits};

use super::{
    FORMAT_VERSION, Frame, HolderFrame, SnapshotError, SnapshotReader, SnapshotTotals, StreamCursor,
};

/// Maximum number of holders that a summary lists, which is more than a daemon can have. The bound keeps a hostile
/// file from filling the memory.
const SUMMARY_HOLDERS_MAX: usize = 1 << 20;

/// Summary of a whole snapshot, without its holders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SnapshotContent {
    /// Format version of the snapshot.
    pub version: u32,
    /// Time at which the snapshot was begun, in microseconds since the Unix epoch.
    pub created_us: u64,
    /// Cursors of streams. Each gives the message up to which a stream is part of the snapshot.
    pub streams: Vec<StreamCursor>,
    /// Totals over all holders.
    pub totals: SnapshotTotals,
}

/// Summary of one holder in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HolderSummary {
    /// Name, cursor and other fields of the holder's frame.
    #[serde(flatten)]
    pub holder: HolderFrame,
    /// Number of batches that rebuild the holder's blocks.
    pub batches: u64,
}

/// Summary of a whole snapshot, with its holders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SnapshotSummary {
    /// Summary without the holders.
    #[serde(flatten)]
    pub content: SnapshotContent,
    /// The holders, in the file's order.
    pub holders: Vec<HolderSummary>,
}

/// Reads a snapshot to its end and checks all its content. Every event must be within `limits`. Takes no more memory
/// than [`SnapshotReader`].
pub fn verify<R: Read>(input: R, limits: &WireLimits) -> Result<SnapshotContent, SnapshotError> {
    read_whole(input, limits, |_| Ok(()))
}

/// Checks a snapshot as [`verify`] does, and lists its holders.
pub fn summarise<R: Read>(input: R, limits: &WireLimits) -> Result<SnapshotSummary, SnapshotError> {
    let mut holders: Vec<HolderSummary> = Vec::new();
    let content = read_whole(input, limits, |frame| {
        match frame {
            Frame::Stream(_) | Frame::Forest(_) => {}
            Frame::Holder(_) if holders.len() == SUMMARY_HOLDERS_MAX => return Err(SnapshotError::TooLong),
            Frame::Holder(holder) => holders.push(HolderSummary { holder, batches: 0 }),
            Frame::Batch(_) => {
                if let Some(holder) = holders.last_mut() {
                    holder.batches += 1;
                }
            }
        }
        Ok(())
    })?;
    Ok(SnapshotSummary { content, holders })
}

fn read_whole<R: Read>(
    input: R,
    limits: &WireLimits,
    mut take: impl FnMut(Frame) -> Result<(), SnapshotError>,
) -> Result<SnapshotContent, SnapshotError> {
    let mut reader = SnapshotReader::new(input)?;
    let mut streams = Vec::new();
    while let Some(frame) = reader.next_frame()? {
        match &frame {
            Frame::Stream(cursor) => streams.push(cursor.clone()),
            Frame::Holder(_) | Frame::Forest(_) => {}
            Frame::Batch(payload) => {
                EventBatch::decode(payload, limits).map_err(|error| SnapshotError::Undecodable {
                    frame: reader.frames() - 1,
                    reason: error.to_string(),
                })?;
            }
        }
        take(frame)?;
    }
    Ok(SnapshotContent {
        version: FORMAT_VERSION,
        created_us: reader.created_us(),
        streams,
        totals: reader.totals(),
    })
}
