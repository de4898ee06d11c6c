//! One file of the state: its format, with a bound on its length and a checksum.
//!
//! ```text
//! ┌──────────┬─────────┬──────┬───────────────────────┬──────────────────────┐
//! │ KVBRIDGE │ version │ kind │ value, in MessagePack │ XXH3-64 of all before │
//! │ 8 bytes  │ u32     │ u32  │                       │ u64                   │
//! └──────────┴─────────┴──────┴───────────────────────┴──────────────────────┘
//! ```
//!
//! Numbers are little-endian. A file is written under a temporary name, and then renamed. So a crash of the process leaves the
//! previous file. The file is not synced to the disk: a crash of the machine may damage it, and a damaged file is refused.

use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use kvatlas_process::storage::Storage;

const MAGIC: &[u8; 8] = b"KVBRIDGE";
/// Version of the format; raised with each change of it. Must be kept stable.
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;

/// The kind of a file's content. The numbers must be kept stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StateFileKind {
    Engine = 1,
    Registered = 2,
    Ports = 3,
}

/// Error that makes a file useless.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it has more than {0} bytes")]
    TooLarge(u64),
    #[error("it is no file of a bridge's state")]
    Foreign,
    #[error("it is of version {0}, and this bridge reads version {VERSION}")]
    OtherVersion(u32),
    #[error("it is damaged")]
    Damaged,
    /// The checksum is right, but the value cannot be decoded.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] rmp_serde::decode::Error),
    #[error("it cannot be written: {0}")]
    Unwritable(#[from] rmp_serde::encode::Error),
}

impl FileError {
    /// Whether the file may be right, and only could not be read for now.
    pub(super) fn may_pass(&self) -> bool {
        // The data of an object with a wrong digest is invalid, and a directory is an invalid input.
        let is_lasting = |kind| matches!(kind, io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput);
        matches!(self, Self::Io(error) if !is_lasting(error.kind()))
    }
}

/// Writer that computes the checksum of the written bytes. It fails if they exceed a bound.
struct Checked<W> {
    inner: W,
    hasher: Xxh3,
    left: u64,
}

impl<W: Write> Write for Checked<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self
            .left
            .checked_sub(bytes.len() as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::FileTooLarge, "it would be too large"))?;
        self.inner.write_all(bytes)?;
        self.hasher.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Writes a file: first at the path `temporary`, which is then renamed. Only the owner may read the two files, because the
/// tokens of republished blocks are prompts.
pub(super) fn write_file<T: Serialize>(
    storage: &dyn Storage,
    temporary: &Path,
    path: &Path,
    kind: StateFileKind,
    value: &T,
    bytes_max: u64,
) -> Result<(), FileError> {
    // Removes a temporary file that a crash has left.
    let _ = storage.remove(temporary);
    let mut writer = Checked {
        inner: BufWriter::new(storage.create_private(temporary)?),
        hasher: Xxh3::new(),
        left: bytes_max,
    };
    writer.write_all(MAGIC)?;
    writer.write_all(&VERSION.to_le_bytes())?;
    writer.write_all(&(kind as u32).to_le_bytes())?;
    rmp_serde::encode::write(&mut writer, value)?;
    let checksum = writer.hasher.digest();
    writer.write_all(&checksum.to_le_bytes())?;
    writer.flush()?;
    drop(writer);
    Ok(storage.rename(temporary, path)?)
}

/// Reads the content of a file; `None` if there is no file.
pub(super) fn read_file<T: DeserializeOwned>(
    storage: &dyn Storage,
    path: &Path,
    kind: StateFileKind,
    bytes_max: u64,
) -> Result<Option<T>, FileError> {
    let file = match storage.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(FileError::TooLarge(bytes_max));
    }
    let value = value_in(&bytes, kind)?;
    Ok(Some(rmp_serde::from_slice(value)?))
}

/// Checks the head and the checksum of a file's bytes, and returns the bytes of its value.
fn value_in(bytes: &[u8], kind: StateFileKind) -> Result<&[u8], FileError> {
    let rest = bytes.strip_prefix(MAGIC).ok_or(FileError::Foreign)?;
    let (version, rest) = rest.split_first_chunk().ok_or(FileError::Damaged)?;
    match u32::from_le_bytes(*version) {
        VERSION => {}
        other => return Err(FileError::OtherVersion(other)),
    }
    let found = rest.first_chunk().map(|kind| u32::from_le_bytes(*kind));
    let (checked, checksum) = bytes
        .split_last_chunk::<CHECKSUM_BYTES>()
        .ok_or(FileError::Damaged)?;
    if u64::from_le_bytes(*checksum) != xxh3_64(checked) {
        return Err(FileError::Damaged);
    }
    if found != Some(kind as u32) {
        return Err(FileError::Foreign);
    }
    checked.get(HEAD_BYTES..).ok_or(FileError::Damaged)
}
