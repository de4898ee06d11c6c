//! Answers on their way, counted by destination. A router whose address takes no answers must not use up what all routers
//! share.

use std::collections::HashMap;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

/// Maximum number of answers to one address that are on their way at the same time.
const ANSWERS_PER_ADDRESS_MAX: usize = 256;

/// Counts of the answers on their way, by the hashes of their addresses. A hash takes little memory, however long the
/// address is. Two addresses with equal hashes share a count.
#[derive(Debug, Default)]
pub(super) struct Destinations(Mutex<HashMap<u64, usize>>);

/// Answer on its way. It counts until this value is dropped.
#[derive(Debug)]
pub(super) struct AnswerUnderWay<'d> {
    destinations: &'d Destinations,
    key: u64,
}

impl Destinations {
    /// Counts an answer to `address`. `None` if [`ANSWERS_PER_ADDRESS_MAX`] answers to it are on their way already.
    pub(super) fn begin(&self, address: &str) -> Option<AnswerUnderWay<'_>> {
        let key = xxh3_64(address.as_bytes());
        let mut counts = self.0.lock();
        let count = counts.entry(key).or_default();
        if *count >= ANSWERS_PER_ADDRESS_MAX {
            return None;
        }
        *count += 1;
        Some(AnswerUnderWay {
            destinations: self,
            key,
        })
    }
}

impl Drop for AnswerUnderWay<'_> {
    fn drop(&mut self) {
        let mut counts = self.destinations.0.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_takes_no_more_than_its_share() {
        let destinations = Destinations::default();
        let begin = || destinations.begin("10.0.0.1:9");
        let mut under_way: Vec<_> = (0..ANSWERS_PER_ADDRESS_MAX).map(|_| begin().unwrap()).collect();
        assert!(begin().is_none());
        assert!(destinations.begin("10.0.0.2:9").is_some());
        under_way.pop();
        assert!(begin().is_some());
        drop(under_way);
        assert!(destinations.0.lock().is_empty());
    }
}
