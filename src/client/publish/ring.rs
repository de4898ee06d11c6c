//! Ring of the last batches, for daemons that miss some.

use std::collections::VecDeque;

use bytes::Bytes;

use super::options::PublisherOptions;

/// The last batches of one epoch, without a gap, bounded in number and bytes.
#[derive(Debug)]
pub(super) struct Ring {
    batches: VecDeque<Bytes>,
    bytes: usize,
    /// Number of the last batch that was added.
    last: u64,
    batches_max: usize,
    bytes_max: usize,
}

impl Ring {
    /// Makes an empty ring for a publisher with these options. It keeps nothing if the publisher answers no questions.
    pub(super) fn of(options: &PublisherOptions, last: u64) -> Self {
        let batches_max = match options.answers_resyncs {
            true => options.ring_batches_max,
            false => 0,
        };
        Self::new(last, batches_max, options.ring_bytes_max)
    }

    /// Makes an empty ring. The first batch that is added gets the number after `last`.
    fn new(last: u64, batches_max: usize, bytes_max: usize) -> Self {
        Self {
            batches: VecDeque::new(),
            bytes: 0,
            last,
            batches_max,
            bytes_max,
        }
    }

    /// Adds the next batch. Then removes the oldest batches until the ring is within its limits on number and bytes.
    pub(super) fn push(&mut self, payload: Bytes) {
        self.last += 1;
        self.bytes += payload.len();
        self.batches.push_back(payload);
        while self.batches.len() > self.batches_max || self.bytes > self.bytes_max {
            let Some(oldest) = self.batches.pop_front() else {
                return;
            };
            self.bytes -= oldest.len();
        }
    }

    /// Returns the batches after number `seq`. `None` if the ring no longer has all of them, or if `seq` exceeds the number of
    /// the last batch.
    pub(super) fn after(&self, seq: u64) -> Option<impl Iterator<Item = &Bytes>> {
        let missing = usize::try_from(self.last.checked_sub(seq)?).ok()?;
        let skipped = self.batches.len().checked_sub(missing)?;
        Some(self.batches.iter().skip(skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(ring: &Ring, seq: u64) -> Option<Vec<u8>> {
        ring.after(seq)
            .map(|batches| batches.map(|payload| payload[0]).collect())
    }

    #[test]
    fn the_last_ones_are_kept_within_both_bounds() {
        let mut ring = Ring::new(10, 3, 100);
        assert_eq!(after(&ring, 10), Some(Vec::new()));
        assert_eq!(after(&ring, 9), None);
        for number in 11..=14_u8 {
            ring.push(Bytes::from(vec![number; 2]));
        }
        assert_eq!(after(&ring, 11), Some(vec![12, 13, 14]));
        assert_eq!(after(&ring, 13), Some(vec![14]));
        assert_eq!(after(&ring, 10), None, "batch 11 had to make room");
        assert_eq!(after(&ring, 15), None, "nobody can have had that");
        ring.push(Bytes::from(vec![15; 97]));
        assert_eq!(after(&ring, 13), Some(vec![14, 15]));
        // One that is larger than the ring is not kept at all.
        ring.push(Bytes::from(vec![16; 101]));
        assert_eq!(after(&ring, 15), None);
        assert_eq!(after(&ring, 16), Some(Vec::new()));
    }
}
