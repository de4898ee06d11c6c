//! Recognisers. A recogniser tells a trie which bytes may come next.

/// Recogniser of byte sequences, with a stack that has one entry for each byte.
///
/// The trie pushes bytes on its way down and pops them on its way up. At the end of a traversal, all bytes that it
/// has pushed have been popped.
pub trait Recognizer {
    /// Pushes `byte` if it may come next, and otherwise changes nothing. Returns whether `byte` was pushed.
    fn try_push_byte(&mut self, byte: u8) -> bool;

    /// Removes the last `count` pushed bytes. A traversal often calls this with a count of 0.
    fn pop_bytes(&mut self, count: usize);

    /// Whether `byte` may come next. Implement this method if there is a cheaper way than to push and pop the byte.
    fn byte_allowed(&mut self, byte: u8) -> bool {
        let is_allowed = self.try_push_byte(byte);
        if is_allowed {
            self.pop_bytes(1);
        }
        is_allowed
    }

    /// Called before a traversal begins.
    fn traversal_started(&mut self) {}

    /// Called after a traversal, when all its bytes are popped.
    fn traversal_finished(&mut self) {}
}
