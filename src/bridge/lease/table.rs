//! Table of the lease, as one bridge knows it. It says which bridge speaks for which holder, that is, reports the
//! holder to daemons. It does no I/O, and callers pass the time.
//!
//! A bridge also hears its own beats, which come back to it over NATS.
//!
//! | event or state | time |
//! |---|---|
//! | a bridge sends a beat | every [`Times::beat`], and immediately when it begins or ends to speak |
//! | a bridge's term, for which it may speak | [`Times::term`] from the sending of its last beat that came back |
//! | other bridges count a bridge as alive | [`Times::silence`] from the last beat that they have heard of it |
//! | a bridge that has begun, or was cut off, only listens | [`Times::silence`] from its first beat that comes back |
//! | the same bridge, if it spoke last, only listens | [`Times::listen`] from its first beat that comes back |
//!
//! A bridge's term is shorter than the [`Times::silence`] for which other bridges wait, and begins earlier. So a bridge
//! that is cut off from NATS, or stands still, stops speaking before another begins. This order is not certain, because
//! clocks and messages may be late. Epochs keep answers right even then. A bridge that begins to speak takes an epoch
//! above all that it has heard of, and daemons drop messages of a lower epoch. If two bridges both speak, the one with
//! the lower epoch stops when it hears of the other.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvatlas_client::publish::{Term, Voice};
use tokio::sync::watch;

use super::beat::{FollowedHolder, HOLDERS_MAX, LeaseBeat};

/// Maximum number of other bridges of a group that the table holds.
const PEERS_MAX: usize = 64;
/// Maximum number of own beats (messages to the group) that the bridge remembers until they come back over NATS.
const SENT_MAX: usize = 64;

/// Times of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// Time between two beats, by which a bridge tells the others for which holders it speaks.
    pub beat: Duration,
    /// Time for which a bridge may speak (report holders to daemons), from the sending of its last beat that came back over NATS.
    pub term: Duration,
    /// Time for which a beat of a bridge that speaks (reports a holder) keeps other bridges from speaking.
    pub silence: Duration,
    /// Time for which a bridge that was cut off, and spoke last, only listens before it speaks again. In that time it
    /// hears two beats of any bridge that speaks now. Other bridges listen longer, so that bridges which come back
    /// together do not begin together.
    pub listen: Duration,
    /// Extra time that a bridge waits, before it takes over a holder, for each bridge that comes before it in the order
    /// of taking over.
    pub step: Duration,
    /// Minimum time for which another bridge must see a holder better, before the bridge that speaks for the holder
    /// gives way to that bridge.
    pub worse: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            beat: Duration::from_millis(250),
            term: Duration::from_millis(1000),
            silence: Duration::from_millis(1250),
            listen: Duration::from_millis(500),
            step: Duration::from_millis(200),
            worse: Duration::from_millis(1000),
        }
    }
}

/// A holder that this bridge follows, as the lease sees it.
struct Own {
    /// Number of this entry. It tells apart entries that were added one after another for the same holder.
    number: u64,
    turn: watch::Sender<Option<u64>>,
    epoch: Arc<AtomicU64>,
    sight: Arc<AtomicU8>,
    added: Instant,
    /// Highest epoch in which another bridge has reported the holder, according to that bridge's beats.
    heard_epoch: u64,
    /// Whether this bridge, as far as it knows, was the last bridge that reported the holder to daemons.
    spoke_last: bool,
    /// Time since which this bridge knows of no bridge that reports the holder to daemons; `None` if one reports it, or
    /// if this bridge does not hear the others.
    free_since: Option<Instant>,
    /// Time since which another bridge has seen the holder better than this bridge, while this bridge speaks for the
    /// holder. `None` if no other bridge sees it better.
    worse_since: Option<Instant>,
}

impl Own {
    /// Returns the epoch in which this bridge reports the holder to daemons; `None` if it does not report it.
    fn claim(&self) -> Option<u64> {
        let known = *self.turn.borrow();
        // Until the publisher has begun its epoch, the bridge claims the lowest number that this epoch can have.
        known.map(|known| self.epoch.load(Ordering::Acquire).max(known.saturating_add(1)))
    }

    fn sight(&self) -> u8 {
        self.sight.load(Ordering::Acquire)
    }
}

/// Another bridge, with the part of its last beat that concerns holders that this bridge follows.
struct PeerBridge {
    heard: Instant,
    holders: HashMap<u64, FollowedHolder>,
}

/// Outcome of [`LeaseTable::decide`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Decided {
    /// Number of holders that the bridge reports to daemons from now on.
    pub(super) begun: usize,
    /// Number of holders that the bridge no longer reports to daemons.
    pub(super) ended: usize,
    /// Whether the time for which the bridge may speak is over, so that it no longer reports any holder.
    pub(super) has_lapsed: bool,
}

/// State of the lease, as one bridge knows it.
pub(super) struct LeaseTable {
    bridge: u64,
    times: Times,
    term: Term,
    own: BTreeMap<u64, Own>,
    peers: HashMap<u64, PeerBridge>,
    /// Own beats (messages to the group) that have not come back over NATS: number and time of sending.
    sent: VecDeque<(u64, Instant)>,
    beats: u64,
    shares: u64,
    /// Time since which the bridge's own messages (beats) come back over NATS without a break; `None` if they do not
    /// come back.
    listening_since: Option<Instant>,
    /// Whether a change has to be sent to the other bridges immediately.
    is_news: bool,
}

impl LeaseTable {
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

    /// Begins to follow a holder. Returns three things: the number of the holder's entry, the [`Voice`] by which the
    /// holder's publisher learns when to speak, and the cell that stores how well this bridge sees the holder. `None`
    /// if the table has too many holders.
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
            spoke_last: false,
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

    /// Removes the entry `number` of a holder that the bridge no longer follows, so that another bridge may report the
    /// holder immediately. Does nothing if the holder has a newer entry.
    pub(super) fn remove(&mut self, holder: u64, number: u64) {
        if self.own.get(&holder).is_some_and(|own| own.number == number) {
            // The publisher may end later than this call. Until then it sends nothing to daemons.
            if let Some(own) = self.own.remove(&holder) {
                own.turn.send_replace(None);
            }
            self.is_news = true;
        }
    }

    /// Returns the next beat (message to the other bridges), which the caller sends now.
    pub(super) fn beat(&mut self, now: Instant) -> LeaseBeat {
        self.is_news = false;
        self.beats += 1;
        self.sent.push_back((self.beats, now));
        if self.sent.len() > SENT_MAX {
            self.sent.pop_front();
        }
        let followed = |(holder, own): (&u64, &Own)| FollowedHolder {
            holder: *holder,
            sight: own.sight(),
            epoch: own.claim(),
        };
        LeaseBeat::new(self.bridge, self.beats, self.own.iter().map(followed).collect())
    }

    /// Takes in a beat (message about the holders that a bridge speaks for), whether another bridge or this bridge has sent it.
    pub(super) fn heard(&mut self, beat: LeaseBeat, now: Instant) {
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
        let holders: HashMap<u64, FollowedHolder> =
            known.map(|followed| (followed.holder, followed)).collect();
        for (holder, followed) in &holders {
            if let (Some(own), Some(epoch)) = (self.own.get_mut(holder), followed.epoch) {
                own.heard_epoch = own.heard_epoch.max(epoch);
            }
        }
        self.peers.insert(beat.bridge, PeerBridge { heard: now, holders });
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

    /// Whether a change has to be sent to the other bridges immediately.
    pub(super) fn is_news(&self) -> bool {
        self.is_news
    }

    /// Decides which holders the bridge reports to daemons from `now` on, and tells the holders' publishers.
    pub(super) fn decide(&mut self, now: Instant) -> Decided {
        let mut decided = Decided::default();
        let silence = self.times.silence;
        self.peers
            .retain(|_, peer| now.saturating_duration_since(peer.heard) < silence);
        if self.listening_since.is_some() && !self.term.holds_at(now) {
            // A bridge that was cut off, or stood still, listens before it speaks again.
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
                    own.spoke_last = true;
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

/// Facts about one holder, from the beats of the other living bridges.
#[derive(Debug, Default)]
struct Others {
    /// Highest epoch in which another bridge reports the holder, and that bridge's number; `None` if no other bridge reports it.
    claim: Option<(u64, u64)>,
    /// How well the holder is seen by the bridge that sees it best.
    sight_max: u8,
    /// Number of other bridges that come before this bridge in the order in which bridges take over the holder.
    before: u32,
}

impl Others {
    fn of(peers: &HashMap<u64, PeerBridge>, holder: u64, (sight, bridge): (u8, u64)) -> Self {
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
        self.spoke_last &= others.claim.is_none();
        let Some(listening) = listening.filter(|_| others.claim.is_none()) else {
            self.free_since = None;
            return false;
        };
        let free = *self.free_since.get_or_insert(now);
        let listens = if self.spoke_last {
            times.listen
        } else {
            times.silence
        };
        // In this time, the bridge hears of every bridge that speaks, unless beats are late. In that case the epochs
        // decide.
        let listened = listening.max(self.added) + listens;
        now >= listened.max(free) + times.step * others.before
    }
}

#[cfg(test)]
mod tests;
