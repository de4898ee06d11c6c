//! Memory for replies. Many short replies share one piece of memory.
//!
//! One thread makes a reply, and another thread frees the reply's memory after sending it. If one thread frees memory
//! that another thread has allocated, that costs the allocator more than a copy of a short reply.

use bytes::{Bytes, BytesMut};

/// Size of one piece of memory that many short replies share, in bytes.
const PIECE_BYTES: usize = 16 << 10;
/// Maximum length of a reply that is copied, in bytes. A longer reply keeps the memory in which it was made.
const COPIED_BYTES_MAX: usize = 2 << 10;

/// Memory to which the short replies of one connection are copied.
///
/// A piece stays in memory as long as a reply in it waits to be sent. Replies are sent in the order in which they were
/// made. So at most two pieces exist that are not full of waiting replies.
#[derive(Debug)]
pub(super) struct ReplyMemory {
    piece: BytesMut,
}

impl ReplyMemory {
    pub(super) fn new() -> Self {
        Self {
            piece: BytesMut::with_capacity(PIECE_BYTES),
        }
    }

    /// Returns the bytes of the reply. A short reply is copied into the current piece; a long one keeps its own memory.
    pub(super) fn take(&mut self, reply: Vec<u8>) -> Bytes {
        if reply.len() > COPIED_BYTES_MAX {
            return reply.into();
        }
        // If the piece is full, this reserves a new one, or the same one if all its replies have been sent.
        self.piece.reserve(reply.len());
        self.piece.extend_from_slice(&reply);
        self.piece.split().freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_that_wait_keep_what_they_say() {
        let mut memory = ReplyMemory::new();
        let lengths = (0..200_usize).map(|number| number * 37 % (2 * COPIED_BYTES_MAX));
        let made: Vec<Vec<u8>> = lengths
            .zip(0_u8..)
            .map(|(length, byte)| vec![byte; length])
            .collect();
        let waiting: Vec<Bytes> = made.iter().map(|reply| memory.take(reply.clone())).collect();
        assert_eq!(waiting, made);
    }

    #[test]
    fn the_memory_stays_one_piece_where_replies_do_not_wait() {
        let mut memory = ReplyMemory::new();
        let first = memory.take(vec![1; 8]).as_ptr();
        for _ in 0..1000 {
            let reply = memory.take(vec![2; COPIED_BYTES_MAX]);
            let behind = reply.as_ptr().addr() - first.addr();
            assert!(
                behind < PIECE_BYTES,
                "the reply lies {behind} bytes behind the first"
            );
        }
    }
}
