//! Changes of the holders' state since the last message to a client.
//!
//! All streams share one [`FleetState`]. The state numbers its looks (passes over all holders in the index). For each
//! holder it keeps the number of the look that last found something new. A client that has received look 7 gets the
//! holders with a greater number.

use std::collections::{HashMap, VecDeque};

use serde::Serialize;

use crate::lanes::{Freshness, FreshnessReading};
use crate::queries::report;
use kvatlas_core::index::{HolderRecord, Namespace};
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{Address, HolderId, Labels, NamespaceName, Profile};

/// Maximum number of holders that the page shows, over all namespaces. Degraded holders come first. The page also gets
/// the number of exact and of degraded holders of each namespace.
const HOLDERS_MAX: usize = 50_000;
/// Maximum number of removed holders that are remembered, for clients that still show them.
const GONE_MAX: usize = 10_000;

/// A holder's number on the page. This process never uses a number again for another holder. The next process begins
/// at 1 again, so a client forgets all numbers when a stream begins.
pub(super) type Number = u64;

/// State of all holders, as the last look (a pass over all holders) saw it.
#[derive(Debug, Default)]
pub(super) struct FleetState {
    look: u64,
    next: Number,
    namespaces: HashMap<NamespaceName, HashMap<HolderId, FleetEntry>>,
    gone: VecDeque<(u64, Number)>,
    /// Number of a look (a pass over all holders). All later removals of holders are remembered. Earlier removals may
    /// be forgotten, so a client whose last look is an earlier one must receive the whole state.
    complete_since: u64,
    /// Numbers of holders of each namespace, including holders that the page does not show.
    counts: HashMap<NamespaceName, HolderCounts>,
    shown: usize,
    total: usize,
}

/// Numbers of a namespace's holders by their state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(super) struct HolderCounts {
    exact: usize,
    degraded: usize,
}

#[derive(Debug)]
struct FleetEntry {
    number: Number,
    facts: Facts,
    profile: Profile,
    /// Time since which the holder is not exact, in microseconds since the Unix epoch. 0 if the holder is exact.
    since_us: u64,
    /// Number of the look (a pass over all holders) that last found a new value of `since_us`. The fields `added`,
    /// `changed`, `profiled` and `seen` are numbers of looks, too.
    dated: u64,
    added: u64,
    changed: u64,
    profiled: u64,
    seen: u64,
}

/// Facts about a holder that the page shows in addition to the holder's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Facts {
    blocks: u64,
    /// Bits of the holder's reasons for doubt. 0 if the holder is exact.
    reasons: u32,
    lag_us: u64,
    applied_at_us: u64,
    parked_events: u32,
}

/// Changes that are sent to a client. To keep a frame of thousands of holders short, a holder's values are an array in
/// this order:
///
/// * `added`: number, namespace, worker, rank;
/// * `profiles`: number, address, labels; only for holders that have an address or labels, or have just lost them;
/// * `since`: number, and the time since which the holder is not exact, in microseconds since the Unix epoch, or 0;
/// * `facts`: number, blocks, bits of the reasons for doubt, lag in microseconds, time of the last batch in
///   microseconds, parked events.
#[derive(Debug, Serialize)]
pub(super) struct FleetChange<'a> {
    /// Whether this change has the whole state. If so, the client must first forget all holders that it knows.
    whole: bool,
    added: Vec<(Number, &'a str, &'a str, u32)>,
    profiles: Vec<(Number, &'a str, &'a Labels)>,
    since: Vec<(Number, u64)>,
    facts: Vec<(Number, u64, u32, u64, u64, u32)>,
    gone: Vec<Number>,
    shown: usize,
    total: usize,
}

impl Facts {
    fn of(
        record: &HolderRecord,
        trust: &StreamTrust,
        look: &FreshnessReading<'_>,
        namespace: &NamespaceName,
    ) -> Self {
        let reply = report(record, trust, look, namespace);
        let status = &record.status;
        Self {
            blocks: reply.blocks,
            reasons: reply.degraded.bits(),
            lag_us: status.lag_us.load(),
            applied_at_us: status.applied_at_us.load(),
            parked_events: reply.parked_events,
        }
    }
}

impl FleetState {
    /// Does a look: compares the present state of all holders with their state at the previous look, and notes the
    /// changes.
    pub(super) fn look<'n>(
        &mut self,
        namespaces: impl Iterator<Item = &'n Namespace>,
        trust: &StreamTrust,
        freshness: &Freshness,
    ) {
        self.look_within(HOLDERS_MAX, namespaces, trust, freshness);
    }

    /// Does a look, and shows at most `max` holders. Exact holders are shown only if all degraded holders are.
    fn look_within<'n>(
        &mut self,
        max: usize,
        namespaces: impl Iterator<Item = &'n Namespace>,
        trust: &StreamTrust,
        freshness: &Freshness,
    ) {
        self.look += 1;
        self.shown = 0;
        self.counts.clear();
        let mut exact = Vec::new();
        for namespace in namespaces {
            let name = &namespace.name;
            let look = freshness.look(name);
            let mut counts = HolderCounts::default();
            for record in namespace.indexer.holders() {
                let facts = Facts::of(&record, trust, &look, name);
                if facts.reasons == 0 {
                    counts.exact += 1;
                    if exact.len() < max {
                        exact.push((name, record, facts));
                    }
                } else {
                    counts.degraded += 1;
                    self.show(max, name, &record, facts);
                }
            }
            self.counts.insert(name.clone(), counts);
        }
        for (name, record, facts) in exact {
            self.show(max, name, &record, facts);
        }
        let all = self.counts.values();
        self.total = all.map(|counts| counts.exact + counts.degraded).sum();
        self.forget_unseen();
    }

    fn show(&mut self, max: usize, namespace: &NamespaceName, record: &HolderRecord, facts: Facts) {
        if self.shown < max {
            self.shown += 1;
            self.note(namespace, record, facts);
        }
    }

    /// Returns the numbers of a namespace's holders at the last look.
    pub(super) fn counts(&self, namespace: &NamespaceName) -> HolderCounts {
        self.counts.get(namespace).copied().unwrap_or_default()
    }

    fn note(&mut self, namespace: &NamespaceName, record: &HolderRecord, facts: Facts) {
        let (look, id, profile) = (self.look, &record.id, record.status.profile());
        let since_us = record.status.inexact_since_us.load();
        if !self.namespaces.contains_key(namespace) {
            self.namespaces.insert(namespace.clone(), HashMap::new());
        }
        let Some(entries) = self.namespaces.get_mut(namespace) else {
            return;
        };
        if let Some(entry) = entries.get_mut(id) {
            entry.seen = look;
            if entry.facts != facts {
                (entry.facts, entry.changed) = (facts, look);
            }
            if entry.profile != profile {
                (entry.profile, entry.profiled) = (profile, look);
            }
            if entry.since_us != since_us {
                (entry.since_us, entry.dated) = (since_us, look);
            }
            return;
        }
        self.next += 1;
        let entry = FleetEntry {
            number: self.next,
            facts,
            since_us,
            dated: if since_us == 0 { 0 } else { look },
            added: look,
            changed: look,
            // A holder without a profile is not listed among the profiles.
            profiled: if profile.is_empty() { 0 } else { look },
            profile,
            seen: look,
        };
        entries.insert(id.clone(), entry);
    }

    fn forget_unseen(&mut self) {
        let (look, gone) = (self.look, &mut self.gone);
        for entries in self.namespaces.values_mut() {
            entries.retain(|_, entry| {
                if entry.seen != look {
                    gone.push_back((look, entry.number));
                }
                entry.seen == look
            });
        }
        self.namespaces.retain(|_, entries| !entries.is_empty());
        while gone.len() > GONE_MAX {
            if let Some((at, _)) = gone.pop_front() {
                self.complete_since = at;
            }
        }
    }

    /// Returns the number of a holder, or `None` if the page does not show it.
    pub(super) fn number(&self, namespace: &NamespaceName, holder: &HolderId) -> Option<Number> {
        let entry = self.namespaces.get(namespace)?.get(holder)?;
        Some(entry.number)
    }

    /// Returns what has changed since the last look (a pass over all holders) that the client has received. `heard` is
    /// the number of that look, or 0 for a new client. Afterwards it is the number of the latest look.
    pub(super) fn change(&self, heard: &mut u64) -> FleetChange<'_> {
        let whole = *heard == 0 || *heard < self.complete_since;
        let since = if whole { 0 } else { *heard };
        let (mut added, mut profiles, mut facts) = (Vec::new(), Vec::new(), Vec::new());
        let mut dates = Vec::new();
        for (namespace, entries) in &self.namespaces {
            for (id, entry) in entries {
                if entry.added > since {
                    added.push((entry.number, namespace.as_str(), id.worker.as_str(), id.rank));
                }
                if entry.profiled > since {
                    let Profile { address, labels } = &entry.profile;
                    let address = address.as_ref().map_or("", Address::as_str);
                    profiles.push((entry.number, address, labels));
                }
                if entry.dated > since {
                    dates.push((entry.number, entry.since_us));
                }
                if entry.changed > since {
                    let known = &entry.facts;
                    facts.push((
                        entry.number,
                        known.blocks,
                        known.reasons,
                        known.lag_us,
                        known.applied_at_us,
                        known.parked_events,
                    ));
                }
            }
        }
        let is_news = |(at, _): &&(u64, Number)| *at > since && !whole;
        let gone = self.gone.iter().filter(is_news).map(|(_, number)| *number);
        let gone = gone.collect();
        *heard = self.look;
        FleetChange {
            whole,
            added,
            profiles,
            since: dates,
            facts,
            gone,
            shown: self.shown,
            total: self.total,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::shared::unbounded;
    use kvatlas_core::wire::{DegradedReason, WorkerName};

    use super::*;

    #[test]
    fn a_client_hears_of_each_change_once() {
        let namespaces = unbounded(4);
        let namespace = namespaces
            .get_or_create(&NamespaceName::new("n").unwrap(), None)
            .unwrap();
        let trust = StreamTrust::default();
        let freshness = Freshness::without_events();
        let register = |name: &str| {
            let worker = WorkerName::new(name).unwrap();
            namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap()
        };
        let (first, second) = (register("a"), register("b"));
        let (mut fleet, mut heard) = (FleetState::default(), 0);
        fleet.look(std::iter::once(&*namespace), &trust, &freshness);
        let change = fleet.change(&mut heard);
        assert!(change.whole);
        assert_eq!(
            (change.added.len(), change.facts.len(), change.gone.len()),
            (2, 2, 0)
        );
        fleet.look(std::iter::once(&*namespace), &trust, &freshness);
        let change = fleet.change(&mut heard);
        assert!(!change.whole && change.facts.is_empty() && change.added.is_empty());

        first.status().degrade(DegradedReason::Gap);
        first.status().inexact_since_us.store(7_000_000);
        fleet.look(std::iter::once(&*namespace), &trust, &freshness);
        let mut late = 0;
        assert_eq!(fleet.change(&mut late).facts.len(), 2, "who is new hears all");
        let change = fleet.change(&mut heard);
        let [(number, _, reasons, ..)] = change.facts[..] else {
            panic!("one holder has changed: {change:?}");
        };
        assert_ne!(reasons & DegradedReason::Gap as u32, 0);
        assert_eq!(change.since, [(number, 7_000_000)]);

        let tell = |address: &str| {
            first.status().set_profile(Profile {
                address: Address::new(address).ok(),
                labels: Labels::NONE,
            });
        };
        for address in ["10.0.0.7:8000", ""] {
            tell(address);
            fleet.look(std::iter::once(&*namespace), &trust, &freshness);
            let change = fleet.change(&mut heard);
            assert_eq!(change.profiles, [(number, address, &Labels::NONE)]);
            assert!(change.facts.is_empty());
        }

        second.retire();
        fleet.look(std::iter::once(&*namespace), &trust, &freshness);
        let change = fleet.change(&mut heard);
        assert_eq!(change.gone.len(), 1);
        assert_ne!(change.gone[0], number);
        assert_eq!((change.shown, change.total), (1, 1));
    }

    #[test]
    fn holders_beyond_the_bound_are_counted_and_degraded_ones_are_shown_first() {
        let (all, trust) = (unbounded(4), StreamTrust::default());
        let mut holders = Vec::new();
        for (name, workers) in [("a", 3), ("z", 2)] {
            let name = NamespaceName::new(name).unwrap();
            let namespace = all.get_or_create(&name, None).unwrap();
            for worker in 0..workers {
                let worker = WorkerName::new(&format!("w{worker}")).unwrap();
                let id = HolderId { worker, rank: 0 };
                let holder = namespace.indexer.register(&id).unwrap();
                holder.status().confirm(trust.generation());
                holders.push((name.clone(), id, holder));
            }
        }
        let (last_name, last, writer) = holders.last().unwrap();
        writer.status().degrade(DegradedReason::Gap);
        let freshness = Freshness::without_events();
        let (mut fleet, mut heard) = (FleetState::default(), 0);
        let known = all.all();
        let known = known.iter().map(|namespace| &**namespace);
        fleet.look_within(2, known, &trust, &freshness);
        let change = fleet.change(&mut heard);
        assert_eq!((change.shown, change.total, change.added.len()), (2, 5, 2));
        let degraded = fleet.number(last_name, last).expect("a degraded holder is shown");
        assert!(change.added.iter().any(|added| added.0 == degraded));
        let counts = |name: &str| fleet.counts(&NamespaceName::new(name).unwrap());
        let expected = |exact, degraded| HolderCounts { exact, degraded };
        assert_eq!((counts("a"), counts("z")), (expected(3, 0), expected(1, 1)));
        assert_eq!(counts("none"), HolderCounts::default());
    }

    #[test]
    fn who_missed_too_many_departures_is_told_everything() {
        let fleet = FleetState {
            look: 9,
            complete_since: 5,
            ..FleetState::default()
        };
        assert!(fleet.change(&mut 4).whole);
        assert!(!fleet.change(&mut 5).whole);
    }
}
