//! Reader of a snapshot in an untrusted file.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};

use xxhash_rust::xxh3::xxh3_64;
use zstd::stream::read::Decoder;

use super::forest::{ForestChunk, ForestError, ForestReader};
use super::{
    CONTENT_BYTES_MAX, FORMAT_VERSION, FRAME_BYTES_MAX, FrameKind, HEADER_BYTES, HolderFrame, MAGIC,
    STREAMS_MAX, SnapshotTotals, StreamCursor, WINDOW_LOG, frame_checksum,
};

/// Reason why a file cannot be used as a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file cannot be read.
    #[error("cannot read: {0}")]
    Io(io::Error),
    /// The file does not begin like a snapshot.
    #[error("this is not a kvatlas snapshot")]
    NotASnapshot,
    /// The file has another format version.
    #[error("the snapshot has format version {version}, this build reads {FORMAT_VERSION}")]
    Version {
        /// Format version of the file.
        version: u32,
    },
    /// The header is damaged.
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    /// The file ends before its end frame.
    #[error("the snapshot is truncated in frame {frame}")]
    Truncated {
        /// Number of the incomplete frame, from 0.
        frame: u64,
    },
    /// The compressed part is damaged, or needs more memory than a reader allows.
    #[error("frame {frame} cannot be decompressed: {reason}")]
    Compression {
        /// Number of the first frame that cannot be read, from 0.
        frame: u64,
        /// The decompressor's error text.
        reason: String,
    },
    /// The file decompresses to more bytes than a snapshot may have.
    #[error("the snapshot has more than {CONTENT_BYTES_MAX} bytes when decompressed")]
    TooLong,
    /// A frame with the cursor of a JetStream stream comes after a holder, or there are too many such frames.
    #[error("frame {frame} names a stream where none may be named")]
    MisplacedStream {
        /// Number of the frame, from 0.
        frame: u64,
    },
    /// A frame's header gives a length above the maximum.
    #[error("frame {frame} announces {bytes} bytes, more than {FRAME_BYTES_MAX}")]
    FrameTooLong {
        /// Number of the frame, from 0.
        frame: u64,
        /// Length that the frame's header gives, in bytes.
        bytes: u64,
    },
    /// A frame is damaged, or frames were lost, repeated or swapped.
    #[error("the checksum of frame {frame} does not match")]
    FrameChecksum {
        /// Number of the frame, from 0.
        frame: u64,
    },
    /// A frame has a kind that this format version does not have.
    #[error("frame {frame} is of the unknown kind {kind}")]
    UnknownKind {
        /// Number of the frame, from 0.
        frame: u64,
        /// The kind's number.
        kind: u8,
    },
    /// A frame's payload cannot be decoded as its kind.
    #[error("frame {frame} cannot be decoded: {reason}")]
    Undecodable {
        /// Number of the frame, from 0.
        frame: u64,
        /// The decoder's error text.
        reason: String,
    },
    /// The payload of a frame with a part of a forest is not valid; see [`super::forest`].
    #[error("frame {frame} is no part of a forest: {error}")]
    Forest {
        /// Number of the frame, from 0.
        frame: u64,
        /// The error in the payload.
        error: ForestError,
    },
    /// A forest has not ended, but a frame of another kind comes. Or a holder frame gives its holder a number in the
    /// forests that does not follow the previous holder's number.
    #[error("frame {frame} comes where a forest goes on, or numbers a holder wrongly")]
    MisplacedForest {
        /// Number of the frame, from 0.
        frame: u64,
    },
    /// A batch comes without a holder before it.
    #[error("frame {frame} is a batch without a holder")]
    BatchWithoutHolder {
        /// Number of the frame, from 0.
        frame: u64,
    },
    /// The counts in the end frame differ from the counts of the content.
    #[error("the snapshot announces {announced:?} but has {found:?}")]
    Totals {
        /// Totals that the end frame gives.
        announced: SnapshotTotals,
        /// Totals counted in the frames before the end frame.
        found: SnapshotTotals,
    },
    /// More bytes follow after the end frame.
    #[error("bytes follow the end of the snapshot")]
    TrailingBytes,
}

/// One frame, which has been checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// Cursor of a stream: the message up to which the stream is part of the snapshot.
    Stream(StreamCursor),
    /// Frame of a holder. The holder's blocks come in later frames.
    Holder(HolderFrame),
    /// An encoded event batch, of the holder whose frame came last.
    Batch(Vec<u8>),
    /// Blocks of many holders, whose frames came earlier.
    Forest(ForestChunk),
}

/// Reads a snapshot frame by frame. Each frame is checked before it is returned.
///
/// A file that has been cut off shows this only at its end, where the end frame is missing. So check the whole file
/// ([`verify`](super::verify)) before relying on its content. A reader takes memory for one frame and the
/// decompressor's window, whatever the file contains.
pub struct SnapshotReader<R> {
    content: Decoder<'static, BufReader<R>>,
    created_us: u64,
    frames: u64,
    streams: u64,
    pub(super) content_bytes: u64,
    totals: SnapshotTotals,
    forest: ForestReader,
    /// Number of holders read so far whose blocks are in forests.
    in_forest: u32,
    /// Whether the next frame may be a batch: the last holder's blocks come in batches, and not in a forest.
    takes_batches: bool,
    is_ended: bool,
}

impl<R: Read> SnapshotReader<R> {
    /// Reads and checks the header of the snapshot in `input`, which should be buffered.
    pub fn new(mut input: R) -> Result<Self, SnapshotError> {
        let mut header = [0; HEADER_BYTES];
        input
            .read_exact(&mut header)
            .map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => SnapshotError::NotASnapshot,
                _ => SnapshotError::Io(error),
            })?;
        if field::<8>(&header, 0) != MAGIC {
            return Err(SnapshotError::NotASnapshot);
        }
        let version = u32::from_le_bytes(field(&header, 8));
        if version != FORMAT_VERSION {
            return Err(SnapshotError::Version { version });
        }
        if xxh3_64(header.split_at(20).0) != u64::from_le_bytes(field(&header, 20)) {
            return Err(SnapshotError::HeaderChecksum);
        }
        let mut content = Decoder::new(input).map_err(SnapshotError::Io)?.single_frame();
        content.window_log_max(WINDOW_LOG).map_err(SnapshotError::Io)?;
        Ok(Self {
            content,
            created_us: u64::from_le_bytes(field(&header, 12)),
            frames: 0,
            streams: 0,
            content_bytes: 0,
            totals: SnapshotTotals::default(),
            forest: ForestReader::default(),
            in_forest: 0,
            takes_batches: false,
            is_ended: false,
        })
    }

    /// Number of frames that have been read.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Time at which the snapshot was begun, in microseconds since the Unix epoch.
    pub fn created_us(&self) -> u64 {
        self.created_us
    }

    /// Totals of the frames read so far.
    pub fn totals(&self) -> SnapshotTotals {
        self.totals
    }

    /// Reads the next frame. Returns `None` at the end of a whole snapshot.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, SnapshotError> {
        if self.is_ended {
            return Ok(None);
        }
        let frame = self.frames;
        let (kind, payload) = self.read_frame()?;
        if self.forest.is_open() && kind != FrameKind::Forest {
            return Err(SnapshotError::MisplacedForest { frame });
        }
        let undecodable = |error: &dyn std::fmt::Display| SnapshotError::Undecodable {
            frame,
            reason: error.to_string(),
        };
        match kind {
            FrameKind::Stream => {
                self.streams += 1;
                if self.totals.holders > 0 || self.streams > STREAMS_MAX {
                    return Err(SnapshotError::MisplacedStream { frame });
                }
                let cursor = rmp_serde::from_slice(&payload).map_err(|error| undecodable(&error))?;
                Ok(Some(Frame::Stream(cursor)))
            }
            FrameKind::Holder => {
                let holder: HolderFrame =
                    rmp_serde::from_slice(&payload).map_err(|error| undecodable(&error))?;
                self.take_holder(&holder, frame)?;
                Ok(Some(Frame::Holder(holder)))
            }
            FrameKind::Forest => {
                self.takes_batches = false;
                let chunk = self.forest.read(&payload, self.in_forest);
                let chunk = chunk.map_err(|error| SnapshotError::Forest { frame, error })?;
                self.totals.forest_runs += chunk.runs() as u64;
                self.totals.forest_blocks += chunk.blocks() as u64;
                Ok(Some(Frame::Forest(chunk)))
            }
            FrameKind::Batch if !self.takes_batches => Err(SnapshotError::BatchWithoutHolder { frame }),
            FrameKind::Batch => {
                self.totals.batches += 1;
                Ok(Some(Frame::Batch(payload)))
            }
            FrameKind::End => {
                let announced: SnapshotTotals =
                    rmp_serde::from_slice(&payload).map_err(|error| undecodable(&error))?;
                self.end(announced)
            }
        }
    }

    fn take_holder(&mut self, holder: &HolderFrame, frame: u64) -> Result<(), SnapshotError> {
        self.totals.holders += 1;
        self.totals.blocks = self.totals.blocks.saturating_add(holder.blocks);
        self.takes_batches = holder.forest.is_none();
        let Some(own) = holder.forest else { return Ok(()) };
        if own.number != self.in_forest {
            return Err(SnapshotError::MisplacedForest { frame });
        }
        // Saturation is harmless: the number sizes nothing in memory, and no file has so many frames.
        self.in_forest = self.in_forest.saturating_add(1);
        Ok(())
    }

    fn end(&mut self, announced: SnapshotTotals) -> Result<Option<Frame>, SnapshotError> {
        if announced != self.totals {
            return Err(SnapshotError::Totals {
                announced,
                found: self.totals,
            });
        }
        if !is_at_end(&mut self.content).map_err(|error| self.read_error(error))? {
            return Err(SnapshotError::TrailingBytes);
        }
        self.is_ended = true;
        Ok(None)
    }

    fn read_frame(&mut self) -> Result<(FrameKind, Vec<u8>), SnapshotError> {
        let frame = self.frames;
        let mut head = [0; 5];
        self.read_exact(&mut head)?;
        let length: [u8; 4] = field(&head, 0);
        let [kind] = field(&head, 4);
        let bytes = u64::from(u32::from_le_bytes(length));
        if bytes > FRAME_BYTES_MAX as u64 {
            return Err(SnapshotError::FrameTooLong { frame, bytes });
        }
        let mut payload = Vec::new();
        // The vector grows with the bytes that are really there, so a false length costs no memory.
        let taken = self
            .content
            .by_ref()
            .take(bytes)
            .read_to_end(&mut payload)
            .map_err(|error| self.read_error(error))?;
        if (taken as u64) < bytes {
            return Err(SnapshotError::Truncated { frame });
        }
        let mut checksum = [0; 8];
        self.read_exact(&mut checksum)?;
        if frame_checksum(frame, length, kind, &payload) != u64::from_le_bytes(checksum) {
            return Err(SnapshotError::FrameChecksum { frame });
        }
        self.content_bytes += bytes;
        if self.content_bytes > CONTENT_BYTES_MAX {
            return Err(SnapshotError::TooLong);
        }
        self.frames += 1;
        let known = [
            FrameKind::Holder,
            FrameKind::Batch,
            FrameKind::End,
            FrameKind::Stream,
            FrameKind::Forest,
        ];
        let known = known.into_iter().find(|known| *known as u8 == kind);
        Ok((known.ok_or(SnapshotError::UnknownKind { frame, kind })?, payload))
    }

    fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), SnapshotError> {
        self.content
            .read_exact(bytes)
            .map_err(|error| self.read_error(error))
    }

    /// Turns an error of the file or of the decompressor into a [`SnapshotError`].
    fn read_error(&self, error: io::Error) -> SnapshotError {
        let frame = self.frames;
        if error.kind() == ErrorKind::UnexpectedEof {
            return SnapshotError::Truncated { frame };
        }
        if error.raw_os_error().is_some() {
            return SnapshotError::Io(error);
        }
        SnapshotError::Compression {
            frame,
            reason: error.to_string(),
        }
    }
}

/// Whether no more bytes follow, neither compressed nor uncompressed. Consumes input to find out.
fn is_at_end<R: Read>(content: &mut Decoder<'static, BufReader<R>>) -> io::Result<bool> {
    Ok(content.read(&mut [0])? == 0 && content.get_mut().fill_buf()?.is_empty())
}

/// Returns the `N` bytes at `offset` in `bytes`, which must be long enough.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[offset..offset + N]);
    field
}
