//! The table of who speaks for which holder, as one bridge knows it. No I/O; the time is given.
//!
//! | what | for how long |
//! |---|---|
//! | a bridge beats | every [`Times::beat`], and at once when it begins or ends to speak |
//! | its term | [`Times::term`] from the sending of the last of its own beats that it has heard |
//! | it is alive to others | [`Times::silence`] from the last of its beats that they have heard |
//!
//! The term is the shorter one, and begins earlier: whoever is cut off from NATS, or stands still, is silent before another speaks. That is no proof, as
//! clocks and messages may be late. What keeps answers right is that whoever begins to speak takes an epoch above all that were heard of: daemons drop
//! what comes of a lower one. Of two that both speak, the lower one falls silent when it hears of the other.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvatlas_client::publish::{Term, Voice};
use tokio::sync::watch;

use super::beat::{Beat, Followed, HOLDERS_MAX};

/// Most other bridges of a group that are known at once.
const PEERS_MAX: usize = 64;
/// Most own beats that are waited for.
const SENT_MAX: usize = 64;

/// The times of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Between two beats.
    pub beat: Duration,
    /// How long a beat lets its own bridge speak.
    pub term: Duration,
    /// How long a beat keeps others from speaking.
    pub silence: Duration,
    /// How much longer the second best waits than the best.
    pub step: Duration,
    /// For how long another has to see a holder better before it is left to it.
    pub worse: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            beat: Duration::from_millis(250),
            term: Duration::from_millis(1000),
            silence: Duration::from_millis(1250),
            step: Duration::from_millis(200),
            worse: Duration::from_millis(1000),
        }
    }
}

/// A holder that this bridge follows.
struct Own {
    /// Tells apart those that come and go under one name.
    number: u64,
    turn: watch::Sender<Option<u64>>,
    epoch: Arc<AtomicU64>,
    sight: Arc<AtomicU8>,
    added: Instant,
    /// The highest epoch of another that was heard of.
    heard_epoch: u64,
    /// Since when nobody speaks for it, as far as is known.
    free_since: Option<Instant>,
    /// Since when another sees it better, while this bridge speaks.
    worse_since: Option<Instant>,
}

impl Own {
    /// The epoch in which this bridge speaks for it.
    fn claim(&self) -> Option<u64> {
        let known = *self.turn.borrow();
        // Until the publisher has begun, the least that it will be.
        known.map(|known| self.epoch.load(Ordering::Acquire).max(known.saturating_add(1)))
    }

    fn sight(&self) -> u8 {
        self.sight.load(Ordering::Acquire)
    }
}

/// The last beat of another bridge, about the holders that this one follows.
struct Peer {
    heard: Instant,
    holders: HashMap<u64, Followed>,
}

/// The outcome of a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Decided {
    /// Holders for which it speaks from now on.
    pub(super) begun: usize,
    /// The number of those for which it does no longer.
    pub(super) ended: usize,
    /// Whether that is because its own term is over.
    pub(super) has_lapsed: bool,
}

/// All that one bridge knows.
pub(super) struct Table {
    bridge: u64,
    times: Times,
    term: Term,
    own: BTreeMap<u64, Own>,
    peers: HashMap<u64, Peer>,
    /// When the own beats were sent that have not come back.
    sent: VecDeque<(u64, Instant)>,
    beats: u64,
    shares: u64,
    /// Since when own beats come back without a break.
    listening_since: Option<Instant>,
    /// Whether others are to hear at once what has changed.
    is_news: bool,
}

impl Table {
    pub(super) fn new(bridge: u64, times: Times) -> Self {
        Self {
            bridge,
            times,
            term: Term::default(),
            own: BTreeMap::new(),
            peers: HashMap::new(),
            sent: VecDeque::new(),
            beats: 0,
            shares: 0,
            listening_since: None,
            is_news: false,
        }
    }

    /// Begins to follow a holder. Returns its number, its voice, and where it is noted how well it is seen; none where there are too many.
    pub(super) fn add(&mut self, holder: u64, now: Instant) -> Option<(u64, Voice, Arc<AtomicU8>)> {
        if self.own.len() >= HOLDERS_MAX && !self.own.contains_key(&holder) {
            return None;
        }
        self.shares += 1;
        let (turn, receiver) = watch::channel(None);
        let (epoch, sight) = (Arc::<AtomicU64>::default(), Arc::<AtomicU8>::default());
        let own = Own {
            number: self.shares,
            turn,
            epoch: Arc::clone(&epoch),
            sight: Arc::clone(&sight),
            added: now,
            heard_epoch: 0,
            free_since: None,
            worse_since: None,
        };
        self.own.insert(holder, own);
        let voice = Voice {
            turn: receiver,
            term: self.term.clone(),
            epoch,
        };
        Some((self.shares, voice, sight))
    }

    /// Ends to follow a holder: another may speak for it at once.
    pub(super) fn remove(&mut self, holder: u64, number: u64) {
        if self.own.get(&holder).is_some_and(|own| own.number == number) {
            // A publisher that ends later is silent meanwhile.
            if let Some(own) = self.own.remove(&holder) {
                own.turn.send_replace(None);
            }
            self.is_news = true;
        }
    }

    /// The next beat, which is sent now.
    pub(super) fn beat(&mut self, now: Instant) -> Beat {
        self.is_news = false;
        self.beats += 1;
        self.sent.push_back((self.beats, now));
        if self.sent.len() > SENT_MAX {
            self.sent.pop_front();
        }
        let followed = |(holder, own): (&u64, &Own)| Followed {
            holder: *holder,
            sight: own.sight(),
            epoch: own.claim(),
        };
        Beat::new(self.bridge, self.beats, self.own.iter().map(followed).collect())
    }

    /// Takes a beat that was heard.
    pub(super) fn heard(&mut self, beat: Beat, now: Instant) {
        if beat.bridge == self.bridge {
            return self.heard_own(beat.number, now);
        }
        if self.peers.len() >= PEERS_MAX && !self.peers.contains_key(&beat.bridge) {
            return;
        }
        let known = beat
            .holders
            .into_iter()
            .filter(|followed| self.own.contains_key(&followed.holder));
        let holders: HashMap<u64, Followed> = known.map(|followed| (followed.holder, followed)).collect();
        for (holder, followed) in &holders {
            if let (Some(own), Some(epoch)) = (self.own.get_mut(holder), followed.epoch) {
                own.heard_epoch = own.heard_epoch.max(epoch);
            }
        }
        self.peers.insert(beat.bridge, Peer { heard: now, holders });
    }

    fn heard_own(&mut self, number: u64, now: Instant) {
        while let Some((sent, at)) = self.sent.pop_front() {
            if sent == number {
                self.term.extend(at + self.times.term);
                if self.term.holds_at(now) {
                    self.listening_since.get_or_insert(now);
                }
                return;
            }
            if sent > number {
                self.sent.push_front((sent, at));
                return;
            }
        }
    }

    /// Whether others are to hear at once what has changed.
    pub(super) fn is_news(&self) -> bool {
        self.is_news
    }

    /// Decides for which holders it speaks.
    pub(super) fn decide(&mut self, now: Instant) -> Decided {
        let mut decided = Decided::default();
        let silence = self.times.silence;
        self.peers
            .retain(|_, peer| now.saturating_duration_since(peer.heard) < silence);
        if self.listening_since.is_some() && !self.term.holds_at(now) {
            // Who was cut off, or stood still, listens before it speaks again.
            self.listening_since = None;
            decided.has_lapsed = true;
        }
        let Self {
            own,
            peers,
            times,
            bridge,
            listening_since,
            ..
        } = self;
        for (holder, own) in own {
            let others = Others::of(peers, *holder, (own.sight(), *bridge));
            let was_speaking = own.claim();
            let speaks = match was_speaking {
                Some(epoch) => {
                    let may_go_on = own.may_go_on(epoch, &others, *bridge, times, now);
                    listening_since.is_some() && may_go_on
                }
                None => own.may_begin(&others, *listening_since, times, now),
            };
            match (was_speaking, speaks) {
                (None, true) => {
                    let known = own.heard_epoch.max(own.epoch.load(Ordering::Acquire));
                    own.turn.send_replace(Some(known));
                    decided.begun += 1;
                }
                (Some(_), false) => {
                    own.turn.send_replace(None);
                    decided.ended += 1;
                }
                _ => {}
            }
        }
        self.is_news |= decided.begun + decided.ended > 0;
        decided
    }
}

/// The word of those that are alive about one holder.
#[derive(Debug, Default)]
struct Others {
    /// The highest epoch in which one speaks, and who.
    claim: Option<(u64, u64)>,
    /// How well the best one sees it.
    sight_max: u8,
    /// How many are to speak before this bridge.
    before: u32,
}

impl Others {
    fn of(peers: &HashMap<u64, Peer>, holder: u64, (sight, bridge): (u8, u64)) -> Self {
        let mut others = Self::default();
        for (peer, told) in peers {
            let Some(followed) = told.holders.get(&holder) else {
                continue;
            };
            others.claim = others.claim.max(followed.epoch.map(|epoch| (epoch, *peer)));
            others.sight_max = others.sight_max.max(followed.sight);
            let is_before = (followed.sight, bridge) > (sight, *peer);
            others.before += u32::from(is_before);
        }
        others
    }
}

impl Own {
    fn may_go_on(&mut self, epoch: u64, others: &Others, bridge: u64, times: &Times, now: Instant) -> bool {
        self.free_since = None;
        if others.sight_max > self.sight() {
            let since = *self.worse_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= times.worse {
                self.worse_since = None;
                return false;
            }
        } else {
            self.worse_since = None;
        }
        others.claim.is_none_or(|claim| claim < (epoch, bridge))
    }

    fn may_begin(
        &mut self,
        others: &Others,
        listening: Option<Instant>,
        times: &Times,
        now: Instant,
    ) -> bool {
        let Some(listening) = listening.filter(|_| others.claim.is_none()) else {
            self.free_since = None;
            return false;
        };
        let free = *self.free_since.get_or_insert(now);
        // By then it has heard of everybody who is alive.
        let listened = listening.max(self.added) + times.silence;
        now >= listened.max(free) + times.step * others.before
    }
}

#[cfg(test)]
mod tests;
