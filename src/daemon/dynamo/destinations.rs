//! Answers on their way, counted by destination. A router whose address takes no answers must not use up what all routers
//! share. So each address has a share, and all addresses that have not taken an answer lately have one together.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// Maximum number of answers to one address that are on their way at the same time.
const ANSWERS_PER_ADDRESS_MAX: usize = 256;
/// Maximum number of answers to addresses that have taken an answer lately, as far as they are on their way at the same
/// time. Further ones wait.
const TO_TAKERS_MAX: usize = 768;
/// Maximum number of answers to all other addresses that are on their way at the same time. There is no room for more.
const TO_OTHERS_MAX: usize = 256;
/// Maximum number of answers to one of these other addresses that are on their way at the same time. Further ones wait
/// until the address takes one of these, for [`CONNECT_TIMEOUT`] at most.
const TO_ANOTHER_MAX: usize = 32;
/// Maximum number of answers that wait until their addresses take another answer, each of at most [`WAITING_UNIT`] bytes. A
/// longer one counts as several.
const WAITING_MAX: usize = 1024;
/// Number of bytes that one permit of the semaphore `Destinations::waiting` stands for.
const WAITING_UNIT: usize = 16 << 10;
/// Maximum time to connect to a router for its answer. Shorter than the usual time for the whole answer, so that an
/// address from which nothing comes back does not hold its share for so long. Suffices for a lost packet.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
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
    /// Places for answers that wait until their addresses take another answer.
    waiting: Semaphore,
    /// Notice that an address has taken an answer.
    taken: Notify,
}

impl Default for Destinations {
    fn default() -> Self {
        Self {
            counts: Mutex::default(),
            takers: Mutex::default(),
            to_takers: Semaphore::new(TO_TAKERS_MAX),
            to_others: Semaphore::new(TO_OTHERS_MAX),
            waiting: Semaphore::new(WAITING_MAX),
            taken: Notify::new(),
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

    /// Waits until an address has taken an answer lately.
    async fn taking(&self, address: SocketAddr) {
        loop {
            let taken = self.taken.notified();
            if self.has_taken(address) {
                return;
            }
            taken.await;
        }
    }
}

impl<'d> AnswerUnderWay<'d> {
    /// Reserves a place among the answers that are being sent. Waits for it if the address has taken an answer lately.
    /// Waits for a moment, too, if as many answers to the address are being sent as it may have: it may take one of them.
    /// `None` if there is no place, or no room for an answer of `bytes` to wait.
    ///
    /// `permit` lets a request be answered. It is given back before the wait for an address that may take nothing, so
    /// that such an address does not hold up the reading of requests.
    pub(super) async fn place(
        &self,
        bytes: usize,
        permit: OwnedSemaphorePermit,
    ) -> Option<SemaphorePermit<'d>> {
        let Destinations {
            to_takers,
            to_others,
            waiting,
            ..
        } = self.destinations;
        if self.destinations.has_taken(self.address) {
            return to_takers.acquire().await.ok();
        }
        if self.count <= TO_ANOTHER_MAX {
            return to_others.try_acquire().ok();
        }
        let units = u32::try_from(bytes.div_ceil(WAITING_UNIT).max(1)).ok()?;
        let _waiting = waiting.try_acquire_many(units).ok()?;
        drop(permit);
        let taking = self.destinations.taking(self.address);
        timeout(CONNECT_TIMEOUT, taking).await.ok()?;
        to_takers.acquire().await.ok()
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
        let mut before = None;
        if takers.len() < TAKERS_MAX || takers.contains_key(&self.address) {
            before = takers.insert(self.address, Instant::now());
        }
        drop(takers);
        // Answers to an address that is known to take them do not wait.
        if before.is_none_or(|before| before.elapsed() >= TAKER_AGE_MAX) {
            self.destinations.taken.notify_waiters();
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
    use std::sync::Arc;

    use futures_util::FutureExt;

    use super::*;

    fn permit() -> OwnedSemaphorePermit {
        Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap()
    }

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
        let place = |number: usize| answers[number].place(1, permit()).now_or_never().unwrap();
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

    /// Returns a place for an answer, if there is one at once.
    fn place<'d>(answer: &AnswerUnderWay<'d>) -> Option<SemaphorePermit<'d>> {
        answer.place(1, permit()).now_or_never().flatten()
    }

    #[tokio::test]
    async fn one_address_that_takes_nothing_leaves_places_to_others_that_are_new() {
        let destinations = Destinations::default();
        let begin = |number| destinations.begin(address(number)).unwrap();
        let answers: Vec<_> = (0..ANSWERS_PER_ADDRESS_MAX).map(|_| begin(1)).collect();
        let placed: Vec<_> = answers.iter().filter_map(place).collect();
        assert_eq!(placed.len(), TO_ANOTHER_MAX);
        assert!(place(&begin(2)).is_some());
    }

    #[tokio::test]
    async fn answers_beyond_the_share_of_a_new_address_wait_until_it_takes_one() {
        let destinations = Destinations::default();
        let begin = || destinations.begin(address(1)).unwrap();
        let first: Vec<_> = (0..TO_ANOTHER_MAX).map(|_| begin()).collect();
        let (answer, permits) = (begin(), Arc::new(Semaphore::new(1)));
        let mut place = Box::pin(answer.place(1, Arc::clone(&permits).try_acquire_owned().unwrap()));
        assert!(place.as_mut().now_or_never().is_none());
        assert_eq!(
            permits.available_permits(),
            1,
            "who waits does not hold up the others"
        );
        // Another address has taken its answer.
        destinations.begin(address(2)).unwrap().note(true);
        assert!(place.as_mut().now_or_never().is_none());
        first[0].note(true);
        assert!(place.as_mut().now_or_never().unwrap().is_some());
        let waiting: Vec<_> = (0..WAITING_MAX)
            .map(|_| destinations.waiting.try_acquire())
            .collect();
        assert!(waiting.iter().all(Result::is_ok));
        let late: Vec<_> = (0..=TO_ANOTHER_MAX)
            .map(|_| destinations.begin(address(3)).unwrap())
            .collect();
        assert!(
            late[TO_ANOTHER_MAX]
                .place(1, permit())
                .now_or_never()
                .unwrap()
                .is_none()
        );
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
