//! Writer of a snapshot.

use std::io::{self, Write};

use xxhash_rust::xxh3::xxh3_64;
use zstd::stream::write::Encoder;

use super::forest::ForestFrame;
use super::{
    FORMAT_VERSION, FRAME_BYTES_MAX, FrameKind, HEADER_BYTES, HolderFrame, MAGIC, SnapshotTotals,
    StreamCursor, WINDOW_LOG, frame_checksum,
};

/// The compressor's level. Higher levels cost time and save almost no bytes: hashes compress only by repetitions, which
/// the compressor finds in its window at any level.
const COMPRESSION_LEVEL: i32 = 1;

/// Writes one snapshot, frame by frame. Without a call of [`finish`](Self::finish) the file is incomplete, and
/// readers refuse it.
pub struct SnapshotWriter<W: Write> {
    output: Encoder<'static, Counting<W>>,
    frames: u64,
    totals: SnapshotTotals,
}

/// Writer that counts the bytes written to it.
struct Counting<W> {
    output: W,
    bytes: u64,
}

impl<W: Write> Write for Counting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.output.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

impl<W: Write> SnapshotWriter<W> {
    /// Begins a snapshot. `created_us` is the current time, in microseconds since the Unix epoch.
    pub fn new(mut output: W, created_us: u64) -> io::Result<Self> {
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        header.extend_from_slice(&created_us.to_le_bytes());
        header.extend_from_slice(&xxh3_64(&header).to_le_bytes());
        output.write_all(&header)?;
        let bytes = header.len() as u64;
        let mut output = Encoder::new(Counting { output, bytes }, COMPRESSION_LEVEL)?;
        output.window_log(WINDOW_LOG)?;
        output.long_distance_matching(true)?;
        Ok(Self {
            output,
            frames: 0,
            totals: SnapshotTotals::default(),
        })
    }

    /// Writes the cursor of a stream. Must be called before the first holder is written.
    pub fn write_stream(&mut self, cursor: &StreamCursor) -> io::Result<()> {
        let payload = rmp_serde::to_vec_named(cursor).map_err(io::Error::other)?;
        self.write_frame(FrameKind::Stream, &payload)
    }

    /// Writes a holder's frame. The batches written next belong to this holder.
    pub fn write_holder(&mut self, holder: &HolderFrame) -> io::Result<()> {
        let payload = rmp_serde::to_vec_named(holder).map_err(io::Error::other)?;
        self.write_frame(FrameKind::Holder, &payload)?;
        self.totals.holders += 1;
        self.totals.blocks += holder.blocks;
        Ok(())
    }

    /// Writes an encoded event batch of the holder written last.
    pub fn write_batch(&mut self, payload: &[u8]) -> io::Result<()> {
        self.write_frame(FrameKind::Batch, payload)?;
        self.totals.batches += 1;
        Ok(())
    }

    /// Writes a part of a forest ([`super::forest`]), for holders whose frames were written earlier.
    pub fn write_forest(&mut self, frame: &ForestFrame) -> io::Result<()> {
        self.write_frame(FrameKind::Forest, &frame.payload)?;
        self.totals.forest_runs += frame.runs;
        self.totals.forest_blocks += frame.blocks;
        Ok(())
    }

    /// Ends the snapshot. Returns the output, the totals, and the compressed length in bytes. The file is not yet
    /// synced to disk: that is left to the caller.
    pub fn finish(mut self) -> io::Result<(W, SnapshotTotals, u64)> {
        let payload = rmp_serde::to_vec_named(&self.totals).map_err(io::Error::other)?;
        self.write_frame(FrameKind::End, &payload)?;
        let mut counting = self.output.finish()?;
        counting.output.flush()?;
        Ok((counting.output, self.totals, counting.bytes))
    }

    fn write_frame(&mut self, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
        let too_long = || {
            io::Error::other(format!(
                "a frame of {} bytes is longer than {FRAME_BYTES_MAX}",
                payload.len()
            ))
        };
        if payload.len() > FRAME_BYTES_MAX {
            return Err(too_long());
        }
        let length = u32::try_from(payload.len())
            .map_err(|_| too_long())?
            .to_le_bytes();
        let checksum = frame_checksum(self.frames, length, kind as u8, payload);
        self.output.write_all(&length)?;
        self.output.write_all(&[kind as u8])?;
        self.output.write_all(payload)?;
        self.output.write_all(&checksum.to_le_bytes())?;
        self.frames += 1;
        Ok(())
    }
}
