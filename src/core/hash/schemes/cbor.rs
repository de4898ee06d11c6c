//! Writer of canonical CBOR (RFC 8949, 4.2), whose bytes go straight into a hash function.

/// A hash function that takes bytes piece by piece.
pub(super) trait Sink {
    /// Takes the next bytes.
    fn take(&mut self, bytes: &[u8]);
}

/// Writes CBOR items into a sink.
pub(super) struct Cbor<S>(pub(super) S);

impl<S: Sink> Cbor<S> {
    /// Kinds of CBOR items (major types), each as the upper three bits of the item's first byte.
    const UNSIGNED: u8 = 0 << 5;
    const BYTES: u8 = 2 << 5;
    const TEXT: u8 = 3 << 5;
    const LIST: u8 = 4 << 5;
    const MAP: u8 = 5 << 5;
    const NIL: u8 = 0xf6;

    pub(super) fn unsigned(&mut self, value: u64) {
        self.head(Self::UNSIGNED, value);
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.head(Self::BYTES, bytes.len() as u64);
        self.0.take(bytes);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.head(Self::TEXT, text.len() as u64);
        self.0.take(text.as_bytes());
    }

    /// Writes the head of a list of `items` items, which the caller writes next.
    pub(super) fn list(&mut self, items: usize) {
        self.head(Self::LIST, items as u64);
    }

    /// Writes a list of tokens.
    pub(super) fn tokens(&mut self, tokens: &[u32]) {
        self.list(tokens.len());
        tokens.iter().for_each(|token| self.unsigned(u64::from(*token)));
    }

    /// Writes the head of a map of `entries` entries, which the caller writes next.
    pub(super) fn map(&mut self, entries: usize) {
        self.head(Self::MAP, entries as u64);
    }

    pub(super) fn nil(&mut self) {
        self.0.take(&[Self::NIL]);
    }

    /// Writes the head of an item: its major type, and its value or length in as few bytes as possible.
    fn head(&mut self, major: u8, value: u64) {
        let bytes = value.to_be_bytes();
        let (additional, width) = match value {
            0..=23 => {
                let [.., small] = bytes;
                return self.0.take(&[major | small]);
            }
            24..=0xff => (24, 1),
            0x100..=0xffff => (25, 2),
            0x1_0000..=0xffff_ffff => (26, 4),
            _ => (27, 8),
        };
        self.0.take(&[major | additional]);
        self.0.take(bytes.get(bytes.len() - width..).unwrap_or_default());
    }
}
