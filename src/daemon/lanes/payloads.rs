//! Storage for the payloads of several messages in one piece of memory.

/// Number of bytes for the length in front of each payload.
const LENGTH_BYTES: usize = size_of::<u32>();

/// List of payloads in one buffer. In front of each payload is its length.
#[derive(Debug, Default)]
pub(crate) struct Payloads {
    bytes: Vec<u8>,
    count: usize,
}

impl Payloads {
    /// Makes a list with a copy of one payload.
    pub(super) fn of(payload: &[u8]) -> Self {
        let mut payloads = Self {
            bytes: Vec::with_capacity(LENGTH_BYTES + payload.len()),
            count: 0,
        };
        payloads.push(payload);
        payloads
    }

    /// Adds a copy of a payload. For the second payload, reserves room for `count_max` payloads of this length, but for
    /// at most `bytes_max` bytes. [`Self::trim`] gives back the room that is not used.
    pub(super) fn push_within(&mut self, payload: &[u8], count_max: usize, bytes_max: usize) {
        if self.count == 1 {
            let bytes = (count_max * payload.len()).min(bytes_max);
            self.bytes.reserve(bytes + count_max * LENGTH_BYTES);
        }
        self.push(payload);
    }

    /// Frees unused memory if it is more than half of the buffer.
    pub(super) fn trim(&mut self) {
        if self.bytes.capacity() / 2 > self.bytes.len() {
            self.bytes.shrink_to_fit();
        }
    }

    fn push(&mut self, payload: &[u8]) {
        // A message is far shorter than 4 GiB.
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes.extend_from_slice(payload);
        self.count += 1;
    }

    /// Returns the number of payloads.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Returns the size of all payloads together in bytes, without the lengths in front of them.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len() - self.count * LENGTH_BYTES
    }

    /// Returns the payloads in their order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.bytes.as_slice();
        std::iter::from_fn(move || {
            let (length, behind) = rest.split_first_chunk::<LENGTH_BYTES>()?;
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            let (payload, behind) = behind.split_at_checked(length)?;
            rest = behind;
            Some(payload)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_come_out_as_they_went_in() {
        let sent: [&[u8]; 4] = [b"one", b"", b"three", &[7; 70_000]];
        let mut payloads = Payloads::of(sent[0]);
        sent[1..]
            .iter()
            .for_each(|payload| payloads.push_within(payload, 4, 100));
        assert_eq!(payloads.iter().collect::<Vec<_>>(), sent);
        assert_eq!((payloads.len(), payloads.bytes()), (4, 70_008));
    }

    #[test]
    fn room_that_is_not_used_is_given_back() {
        let mut payloads = Payloads::of(&[1; 100]);
        payloads.push_within(&[2; 100], 32, 16 << 10);
        assert!(payloads.bytes.capacity() >= 33 * 100);
        payloads.trim();
        assert!(payloads.bytes.capacity() < 500, "{}", payloads.bytes.capacity());
        assert_eq!(payloads.iter().collect::<Vec<_>>(), [&[1; 100][..], &[2; 100]]);
    }
}
