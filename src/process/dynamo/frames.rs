//! Messages of two parts (a header and a body), as Dynamo's request plane frames them in release 1.6.1.

use bytes::{BufMut, Bytes, BytesMut};
use xxhash_rust::xxh3::Xxh3;

/// Length of a message's head: the lengths of header and body, and a checksum, which is 0 if there is none. Each is 64 bits,
/// big-endian.
pub const HEAD_BYTES: usize = 24;

/// Returns a message of header and body, without a checksum.
pub fn two_parts(header: &[u8], body: &[u8]) -> Bytes {
    let mut message = BytesMut::with_capacity(HEAD_BYTES + header.len() + body.len());
    message.put_u64(header.len() as u64);
    message.put_u64(body.len() as u64);
    message.put_u64(0);
    message.put_slice(header);
    message.put_slice(body);
    message.freeze()
}

/// The head of a message: the lengths of its parts, and their checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Bytes of the header.
    pub header: usize,
    /// Bytes of the body.
    pub body: usize,
    /// XXH3-64 of header and body; 0 if the sender has computed none.
    pub checksum: u64,
}

impl Lengths {
    /// Reads the head. `None` if a length exceeds the range of `usize`.
    pub fn read(head: &[u8; HEAD_BYTES]) -> Option<Self> {
        let number = |at: usize| {
            let bytes = head.get(at..)?.first_chunk::<8>()?;
            Some(u64::from_be_bytes(*bytes))
        };
        Some(Self {
            header: usize::try_from(number(0)?).ok()?,
            body: usize::try_from(number(8)?).ok()?,
            checksum: number(16)?,
        })
    }

    /// Returns whether the parts match the checksum. A checksum of 0 matches all parts.
    pub fn is_sum_of(&self, header: &[u8], body: &[u8]) -> bool {
        let mut summed = Xxh3::new();
        summed.update(header);
        summed.update(body);
        self.checksum == 0 || self.checksum == summed.digest()
    }
}
