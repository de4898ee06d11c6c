//! Guesses: entries that routers write about where blocks will be. They are kept apart from engines' events, for a
//! short time and in bounded memory.
//!
//! A router removes its guesses after some seconds. If the router has ended, its guesses are dropped when their time to
//! live is over. If there is no room, the oldest guesses are dropped first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use kvatlas_telemetry::RedisGuessMetrics;
use kvatlas_telemetry::labels::GuessDrop;

/// Approximate size of one kept guess, in bytes. The bytes of its field are not included.
const ENTRY_BYTES: usize = 192;
/// Maximum number of guesses (entries that routers write about a block) of one key.
const PER_KEY_MAX: usize = 1024;

/// Guesses of all routers: entries that say where blocks will be.
pub(super) struct Guesses {
    kept: Mutex<KeptGuesses>,
    time_to_live: Duration,
    bytes_max: usize,
    metrics: RedisGuessMetrics,
}

#[derive(Default)]
struct KeptGuesses {
    by_key: BTreeMap<u64, Vec<Guess>>,
    /// Guesses (predictions by routers of where blocks will be) by their numbers, each with its end of life and its
    /// key. Guesses are numbered in the order in which they were written.
    ends: BTreeMap<u64, (Instant, u64)>,
    written: u64,
    bytes: usize,
}

struct Guess {
    field: Arc<[u8]>,
    /// Number of the guess, under which `ends` lists it.
    number: u64,
}

impl KeptGuesses {
    /// Forgets the guess with the number `number`.
    fn forget(&mut self, number: u64) {
        let Some((_, key)) = self.ends.remove(&number) else {
            return;
        };
        let Some(guesses) = self.by_key.get_mut(&key) else {
            return;
        };
        if let Some(place) = guesses.iter().position(|guess| guess.number == number) {
            let gone = guesses.swap_remove(place);
            self.bytes = self.bytes.saturating_sub(cost(&gone.field));
        }
        if guesses.is_empty() {
            self.by_key.remove(&key);
        }
    }

    fn oldest(&self) -> Option<(u64, Instant)> {
        let (number, (ends, _)) = self.ends.first_key_value()?;
        Some((*number, *ends))
    }
}

fn cost(field: &[u8]) -> usize {
    field.len() + ENTRY_BYTES
}

impl Guesses {
    /// Creates an empty store of guesses, that is, predictions by routers of where blocks will be. A guess is kept for
    /// `time_to_live`. All guesses together take at most about `bytes_max` bytes.
    pub(super) fn new(time_to_live: Duration, bytes_max: usize) -> Self {
        Self {
            kept: Mutex::default(),
            time_to_live,
            bytes_max,
            metrics: RedisGuessMetrics::new(),
        }
    }

    /// Drops the guesses whose time to live has ended by `now`. Then runs `work` on the remaining guesses.
    fn with<T>(&self, now: Instant, work: impl FnOnce(&mut KeptGuesses) -> T) -> T {
        let mut kept = self.kept.lock();
        let before = kept.ends.len();
        while let Some((number, ends)) = kept.oldest()
            && ends <= now
        {
            kept.forget(number);
            self.metrics.dropped.get(GuessDrop::Expired).increment(1);
        }
        let done = work(&mut kept);
        if kept.ends.len() != before {
            self.metrics.kept.set(kept.ends.len() as f64);
        }
        done
    }

    /// Keeps a guess (a router's prediction of where a block will be) from `now` on. Returns whether the guess is new.
    pub(super) fn add(&self, key: u64, field: &[u8], now: Instant) -> bool {
        self.with(now, |kept| {
            let known = kept.by_key.get(&key).map_or(&[][..], Vec::as_slice);
            let same = known.iter().find(|guess| *guess.field == *field);
            let same = same.map(|guess| guess.number);
            let eldest = known.iter().map(|guess| guess.number).min();
            let is_new = same.is_none();
            let is_full = is_new && known.len() >= PER_KEY_MAX;
            same.into_iter().for_each(|number| kept.forget(number));
            if let Some(number) = eldest.filter(|_| is_full) {
                kept.forget(number);
                self.metrics.dropped.get(GuessDrop::Room).increment(1);
            }
            let room = self.bytes_max.saturating_sub(cost(field));
            while kept.bytes > room
                && let Some((number, _)) = kept.oldest()
            {
                kept.forget(number);
                self.metrics.dropped.get(GuessDrop::Room).increment(1);
            }
            kept.written += 1;
            let number = kept.written;
            kept.ends.insert(number, (now + self.time_to_live, key));
            kept.bytes += cost(field);
            let guess = Guess {
                field: field.into(),
                number,
            };
            kept.by_key.entry(key).or_default().push(guess);
            is_new
        })
    }

    /// Removes a guess. Returns whether the guess existed.
    pub(super) fn remove(&self, key: u64, field: &[u8], now: Instant) -> bool {
        self.with(now, |kept| {
            let known = kept.by_key.get(&key).map_or(&[][..], Vec::as_slice);
            let same = known.iter().find(|guess| *guess.field == *field);
            let number = same.map(|guess| guess.number);
            number.into_iter().for_each(|number| kept.forget(number));
            number.is_some()
        })
    }

    /// Whether any of the keys has a guess, that is, a router's prediction of where a block will be.
    pub(super) fn has_any(&self, keys: impl IntoIterator<Item = u64>, now: Instant) -> bool {
        self.with(now, |kept| {
            keys.into_iter().any(|key| kept.by_key.contains_key(&key))
        })
    }

    /// Returns the fields that routers have written for a key as guesses (predictions of where the block will be).
    pub(super) fn of(&self, key: u64, now: Instant) -> Vec<Arc<[u8]>> {
        self.with(now, |kept| {
            let guesses = kept.by_key.get(&key).map_or(&[][..], Vec::as_slice);
            guesses.iter().map(|guess| Arc::clone(&guess.field)).collect()
        })
    }

    /// Returns up to `count` keys that have guesses, in ascending order, beginning at the key `from`. Also returns the
    /// key at which the next page begins, or 0 if there is none.
    pub(super) fn keys(&self, from: u64, count: usize, now: Instant) -> (Vec<u64>, u64) {
        self.with(now, |kept| {
            let mut rest = kept.by_key.range(from..).map(|(key, _)| *key);
            let page = rest.by_ref().take(count).collect();
            (page, rest.next().unwrap_or_default())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(2);

    fn fields(guesses: &Guesses, key: u64, now: Instant) -> Vec<Vec<u8>> {
        guesses.of(key, now).iter().map(|field| field.to_vec()).collect()
    }

    #[test]
    fn guesses_end_with_their_time_and_writing_them_again_renews_it() {
        let (guesses, begun) = (Guesses::new(TTL, 1 << 20), Instant::now());
        assert!(guesses.add(7, b"a", begun));
        assert!(guesses.add(7, b"b", begun));
        let later = begun + TTL / 2;
        assert!(!guesses.add(7, b"a", later), "it is there already");
        assert_eq!(fields(&guesses, 7, later).len(), 2);
        assert_eq!(fields(&guesses, 7, begun + TTL), [b"a"]);
        assert!(!guesses.has_any([7], later + TTL));
        assert!(guesses.kept.lock().ends.is_empty() && guesses.kept.lock().bytes == 0);
    }

    #[test]
    fn guesses_are_taken_back() {
        let (guesses, now) = (Guesses::new(TTL, 1 << 20), Instant::now());
        guesses.add(7, b"a", now);
        guesses.add(9, b"a", now);
        assert!(!guesses.remove(7, b"b", now) && !guesses.remove(8, b"a", now));
        assert!(guesses.remove(7, b"a", now) && !guesses.remove(7, b"a", now));
        assert!(!guesses.has_any([7, 8], now) && guesses.has_any([8, 9], now));
    }

    #[test]
    fn the_oldest_give_way_where_there_is_no_room() {
        let now = Instant::now();
        let guesses = Guesses::new(TTL, 3 * cost(b"a"));
        (0..5).for_each(|key| {
            guesses.add(key, b"a", now);
        });
        assert_eq!(guesses.keys(0, 9, now), (vec![2, 3, 4], 0));
        let guesses = Guesses::new(TTL, usize::MAX);
        for number in 0..=PER_KEY_MAX {
            guesses.add(1, &number.to_le_bytes(), now);
        }
        assert_eq!(fields(&guesses, 1, now).len(), PER_KEY_MAX);
        assert!(!guesses.remove(1, &0_usize.to_le_bytes(), now), "the oldest");
    }

    #[test]
    fn keys_come_in_pages() {
        let (guesses, now) = (Guesses::new(TTL, 1 << 20), Instant::now());
        for key in [5, u64::MAX, 1, 3] {
            guesses.add(key, b"a", now);
        }
        assert_eq!(guesses.keys(0, 2, now), (vec![1, 3], 5));
        assert_eq!(guesses.keys(5, 2, now), (vec![5, u64::MAX], 0));
    }
}
