//! Answers on their way, counted by destination. A router whose address takes no answers must not use up what all routers
//! share. So each address has a share, and all addresses that have not taken an answer lately have one together.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of answers to one address that are on their way at the same time.
const ANSWERS_PER_ADDRESS_MAX: usize = 256;
/// Maximum number of answers to addresses that have taken an answer lately, as far as they are on their way at the same
/// time. Further ones wait.
const TO_TAKERS_MAX: usize = 768;
/// Maximum number of answers to all other addresses that are on their way at the same time. There is no room for more.
const TO_OTHERS_MAX: usize = 256;
/// Maximum number of answers to one of these other addresses that are on their way at the same time.
const TO_ANOTHER_MAX: usize = 32;
/// Time for which it is remembered that an address has taken an answer.
const TAKER_AGE_MAX: Duration = Duration::from_secs(300);
/// Maximum number of addresses that are remembered.
const TAKERS_MAX: usize = 4096;

/// Counts of the answers on their way.
#[derive(Debug)]
pub(super) struct Destinations {
    counts: Mutex<HashMap<SocketAddr, usize>>,
    /// Times at which addresses took an answer last.
    takers: Mutex<HashMap<SocketAddr, Instant>>,
    to_takers: Semaphore,
    to_others: Semaphore,
}

impl Default for Destinations {
    fn default() -> Self {
        Self {
            counts: Mutex::default(),
            takers: Mutex::default(),
            to_takers: Semaphore::new(TO_TAKERS_MAX),
            to_others: Semaphore::new(TO_OTHERS_MAX),
        }
    }
}

/// Answer on its way. It counts until this value is dropped.
#[derive(Debug)]
pub(super) struct AnswerUnderWay<'d> {
    destinations: &'d Destinations,
    address: SocketAddr,
    begun: Instant,
    /// Number of answers to the address that were on their way when this one began, with this one.
    count: usize,
}

impl Destinations {
    /// Counts an answer to `address`. `None` if [`ANSWERS_PER_ADDRESS_MAX`] answers to it are on their way already.
    pub(super) fn begin(&self, address: SocketAddr) -> Option<AnswerUnderWay<'_>> {
        let mut counts = self.counts.lock();
        let count = counts.entry(address).or_default();
        if *count >= ANSWERS_PER_ADDRESS_MAX {
            return None;
        }
        *count += 1;
        Some(AnswerUnderWay {
            destinations: self,
            address,
            begun: Instant::now(),
            count: *count,
        })
    }

    fn has_taken(&self, address: SocketAddr) -> bool {
        let takers = self.takers.lock();
        let last = takers.get(&address);
        last.is_some_and(|last| last.elapsed() < TAKER_AGE_MAX)
    }
}

impl<'d> AnswerUnderWay<'d> {
    /// Reserves a place among the answers that are being sent. Waits for it if the address has taken an answer lately.
    /// `None` if it has not, and all places for such addresses, or those for one of them, are taken.
    pub(super) async fn place(&self) -> Option<SemaphorePermit<'d>> {
        match self.destinations.has_taken(self.address) {
            true => self.destinations.to_takers.acquire().await.ok(),
            false if self.count > TO_ANOTHER_MAX => None,
            false => self.destinations.to_others.try_acquire().ok(),
        }
    }

    /// Notes whether the address has taken the answer. An address that has not counts as one that takes none, unless it
    /// has taken another answer since this one began.
    pub(super) fn note(&self, is_taken: bool) {
        let mut takers = self.destinations.takers.lock();
        if !is_taken {
            if takers.get(&self.address).is_some_and(|last| *last < self.begun) {
                takers.remove(&self.address);
            }
            return;
        }
        if takers.len() >= TAKERS_MAX {
            takers.retain(|_, last| last.elapsed() < TAKER_AGE_MAX);
        }
        if takers.len() < TAKERS_MAX || takers.contains_key(&self.address) {
            takers.insert(self.address, Instant::now());
        }
    }
}

impl Drop for AnswerUnderWay<'_> {
    fn drop(&mut self) {
        let mut counts = self.destinations.counts.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn address(number: u32) -> SocketAddr {
        SocketAddr::new(std::net::Ipv4Addr::from_bits(number).into(), 9)
    }

    #[test]
    fn one_address_takes_no_more_than_its_share() {
        let destinations = Destinations::default();
        let begin = || destinations.begin(address(1));
        let mut under_way: Vec<_> = (0..ANSWERS_PER_ADDRESS_MAX).map(|_| begin().unwrap()).collect();
        assert!(begin().is_none());
        assert!(destinations.begin(address(2)).is_some());
        under_way.pop();
        assert!(begin().is_some());
        drop(under_way);
        assert!(destinations.counts.lock().is_empty());
    }

    #[test]
    fn addresses_that_take_nothing_leave_places_for_those_that_do() {
        let destinations = Destinations::default();
        let answers: Vec<_> = (0..=u32::try_from(TO_OTHERS_MAX).unwrap())
            .map(|number| destinations.begin(address(number)).unwrap())
            .collect();
        // A place is there, or is not, at once.
        let place = |number: usize| answers[number].place().now_or_never().unwrap();
        answers[0].note(true);
        let unknown: Vec<_> = (1..=TO_OTHERS_MAX).map(place).collect();
        assert!(unknown.iter().all(Option::is_some));
        assert!(place(1).is_none());
        assert!(place(0).is_some());
        // This one has begun before the other was taken.
        answers[0].note(false);
        assert!(place(0).is_some());
        destinations.begin(address(0)).unwrap().note(false);
        assert!(place(0).is_none());
        drop(unknown);
        assert!(place(0).is_some());
    }

    #[test]
    fn one_address_that_takes_nothing_leaves_places_to_others_that_are_new() {
        let destinations = Destinations::default();
        let begin = |number| destinations.begin(address(number)).unwrap();
        let answers: Vec<_> = (0..ANSWERS_PER_ADDRESS_MAX).map(|_| begin(1)).collect();
        let placed = answers
            .iter()
            .filter_map(|answer| answer.place().now_or_never().unwrap());
        let placed: Vec<_> = placed.collect();
        assert_eq!(placed.len(), TO_ANOTHER_MAX);
        assert!(begin(2).place().now_or_never().unwrap().is_some());
    }

    #[test]
    fn few_addresses_are_remembered() {
        let destinations = Destinations::default();
        for number in 0..=u32::try_from(TAKERS_MAX).unwrap() {
            destinations.begin(address(number)).unwrap().note(true);
        }
        assert_eq!(destinations.takers.lock().len(), TAKERS_MAX);
        assert!(destinations.has_taken(address(0)));
    }
}
