//! Counts of the answers that are not exact because a holder is *in doubt*, that is, because its state is not certain.
//! These counts are the *cost* of the doubt.
//!
//! The index counts all answers about a namespace, and the answers that were not exact. For each holder, it also counts
//! the answers that list the holder as not exact. Once a second, `Costs::look` reads these counters for the holders in
//! doubt. A cost is the growth of the counters in the last one to two minutes, or since the doubt began.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use kvatlas_core::index::{HolderRecord, Namespace};
use kvatlas_core::wire::{HolderId, NamespaceName};

/// Interval at which the counters of answers are marked. A cost counts the answers since the mark before the last one,
/// so it covers one to two intervals.
const SPAN: Duration = Duration::from_secs(60);
/// Maximum number of holders whose cost is kept. Only a holder in doubt (its state is not certain) has a cost, which
/// takes about 200 bytes.
const HOLDERS_MAX: usize = 65_536;

/// Cost of a doubt about a holder or namespace: counts of answers in the last one to two minutes, or since the doubt
/// began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Cost {
    /// Number of all answers about the namespace.
    queries: u64,
    /// Number of answers that list the holder as not exact.
    finding: u64,
    /// Number of answers that are not exact, for any reason.
    inexact: u64,
}

impl Cost {
    /// Adds the costs of the same doubt that two replicas have counted. Only one replica answers a query, so no query
    /// is counted twice.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            queries: self.queries.saturating_add(other.queries),
            finding: self.finding.saturating_add(other.finding),
            inexact: self.inexact.saturating_add(other.inexact),
        }
    }

    /// Returns the share of the answers about the namespace that were not exact, as text. For a publisher that has no
    /// holder, this is the only share that is known, because answers list holders, not publishers.
    pub fn of_all(self) -> String {
        match self.queries {
            0 => "no queries lately".to_owned(),
            queries => format!("{} of answers inexact", percent(self.inexact, queries)),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            queries: self.queries.saturating_sub(before.queries),
            finding: self.finding.saturating_sub(before.finding),
            inexact: self.inexact.saturating_sub(before.inexact),
        }
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.queries > 0 {
            write!(
                formatter,
                "{} of queries find it, ",
                percent(self.finding, self.queries)
            )?;
        }
        formatter.write_str(&self.of_all())
    }
}

fn percent(part: u64, all: u64) -> String {
    // One query can be searched as two chains of hashes. A holder that both searches find is counted twice, so `part`
    // can exceed `all`.
    match part.min(all).saturating_mul(100) / all.max(1) {
        0 if part > 0 => "under 1 %".to_owned(),
        percent => format!("{percent} %"),
    }
}

/// Cost of a doubt as numbers and as a sentence. The sentence is for clients that show the cost without computing with
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ToldCost {
    #[serde(flatten)]
    cost: Cost,
    text: String,
}

impl ToldCost {
    /// Returns the cost of a holder's doubt, as numbers and in words.
    pub(crate) fn of_holder(cost: Cost) -> Self {
        Self {
            text: cost.to_string(),
            cost,
        }
    }

    /// Returns the cost of all doubts about a namespace, as numbers and in words.
    fn of_namespace(cost: Cost) -> Self {
        Self {
            text: cost.of_all(),
            cost,
        }
    }
}

/// Values of the counters of answers about a holder or namespace at three moments: at the mark before the last one
/// (`before`), at the last mark (`current`), and at the last look (`now`). Marks are at least [`SPAN`] apart.
#[derive(Debug)]
struct CostMarks {
    begun_at: Instant,
    before: Cost,
    current: Cost,
    now: Cost,
    /// Number of the last call of [`Costs::look`] that found the holder or namespace. The calls are numbered in order.
    seen: u64,
}

impl CostMarks {
    fn new(counts: Cost, now: Instant) -> Self {
        Self {
            begun_at: now,
            before: counts,
            current: counts,
            now: counts,
            seen: 0,
        }
    }

    fn note(&mut self, counts: Cost, now: Instant, look: u64) {
        if now.saturating_duration_since(self.begun_at) >= SPAN {
            (self.before, self.current) = (self.current, self.now);
            self.begun_at = now;
        }
        (self.now, self.seen) = (counts, look);
    }

    fn cost(&self) -> Cost {
        self.now.since(self.before)
    }
}

/// Costs of the doubts about all holders, and about all namespaces.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    look: u64,
    holders: usize,
    namespaces: HashMap<NamespaceName, OfNamespace>,
}

#[derive(Debug)]
struct OfNamespace {
    all: CostMarks,
    holders: HashMap<HolderId, CostMarks>,
}

impl Costs {
    /// Reads the counters of all namespaces and of their holders in doubt. Forgets namespaces that no longer exist, and
    /// holders that are exact again.
    pub(crate) fn look<'n>(&self, namespaces: impl Iterator<Item = &'n Namespace>, now: Instant) {
        let mut book = self.book.lock();
        book.look += 1;
        for namespace in namespaces {
            book.note(namespace, now);
        }
        let look = book.look;
        book.namespaces.retain(|_, known| known.all.seen == look);
        book.holders = book.namespaces.values().map(|known| known.holders.len()).sum();
    }

    /// Returns the cost of a holder's doubt. `None` if the holder was not in doubt at the last call of [`Self::look`].
    pub(crate) fn of_holder(&self, namespace: &NamespaceName, holder: &HolderId) -> Option<Cost> {
        let book = self.book.lock();
        let marks = book.namespaces.get(namespace)?.holders.get(holder)?;
        Some(marks.cost())
    }

    /// Returns the number of recent answers about a namespace, and how many of them were not exact. `None` if the last
    /// call of [`Self::look`] did not see the namespace.
    pub(crate) fn of_namespace(&self, namespace: &NamespaceName) -> Option<ToldCost> {
        let book = self.book.lock();
        let known = book.namespaces.get(namespace)?;
        Some(ToldCost::of_namespace(known.all.cost()))
    }

    /// Returns up to `max` holders in doubt, each with its cost. The holders are sorted by the number of answers that
    /// list them as not exact, the largest number first.
    pub(crate) fn worst(&self, max: usize) -> Vec<(NamespaceName, HolderId, Cost)> {
        let book = self.book.lock();
        let of_all = book.namespaces.iter().flat_map(|(name, known)| {
            let costs = known.holders.iter().map(|(id, marks)| (id, marks.cost()));
            costs.map(move |(id, cost)| (name, id, cost))
        });
        let mut all: Vec<_> = of_all.collect();
        all.sort_unstable_by_key(|(name, id, cost)| (std::cmp::Reverse(cost.finding), *name, *id));
        all.truncate(max);
        let owned = all
            .into_iter()
            .map(|(name, id, cost)| (name.clone(), id.clone(), cost));
        owned.collect()
    }
}

impl Book {
    fn note(&mut self, namespace: &Namespace, now: Instant) {
        let look = self.look;
        let (queries, inexact) = namespace.answers.counts();
        let all = Cost {
            queries,
            finding: 0,
            inexact,
        };
        let known = self
            .namespaces
            .entry(namespace.name.clone())
            .or_insert_with(|| OfNamespace {
                all: CostMarks::new(all, now),
                holders: HashMap::new(),
            });
        known.all.note(all, now, look);
        let is_doubtful = |holder: &&std::sync::Arc<HolderRecord>| holder.status.inexact_since_us.load() > 0;
        let holders = namespace.indexer.holders();
        for holder in holders.iter().filter(is_doubtful) {
            let finding = holder.status.doubtful_answers.load(Ordering::Relaxed);
            let counts = Cost { finding, ..all };
            if let Some(marks) = known.holders.get_mut(&holder.id) {
                marks.note(counts, now, look);
            } else if self.holders < HOLDERS_MAX {
                self.holders += 1;
                let mut marks = CostMarks::new(counts, now);
                marks.seen = look;
                known.holders.insert(holder.id.clone(), marks);
            }
        }
        known.holders.retain(|_, marks| marks.seen == look);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::shared::unbounded;
    use kvatlas_core::index::HolderWriter;
    use kvatlas_core::wire::WorkerName;

    use super::*;

    fn id(worker: &str) -> HolderId {
        let worker = WorkerName::new(worker).unwrap();
        HolderId { worker, rank: 0 }
    }

    fn namespace() -> Arc<Namespace> {
        let namespaces = unbounded(4);
        let name = NamespaceName::new("n").unwrap();
        namespaces.get_or_create(&name, None).unwrap()
    }

    /// Counts answers about the namespace. The numbers are of three kinds: exact answers (`exact`), inexact answers
    /// that list the holder as not exact (`finding`), and other inexact answers (`inexact`).
    fn answer(namespace: &Namespace, holder: &HolderWriter, exact: u64, finding: u64, inexact: u64) {
        (0..exact).for_each(|_| namespace.answers.count(true));
        (0..finding + inexact).for_each(|_| namespace.answers.count(false));
        let doubtful = &holder.status().doubtful_answers;
        doubtful.fetch_add(finding, Ordering::Relaxed);
    }

    #[test]
    fn a_doubt_costs_what_was_answered_since_it_began() {
        let (namespace, costs, begun) = (namespace(), Costs::default(), Instant::now());
        let holder = namespace.indexer.register(&id("a")).unwrap();
        let look = |seconds: u64| {
            costs.look(std::iter::once(&*namespace), begun + Duration::from_secs(seconds));
        };
        answer(&namespace, &holder, 1000, 0, 0);
        look(0);
        assert_eq!(costs.of_holder(&namespace.name, &id("a")), None, "it is exact");
        holder.status().inexact_since_us.store(1);
        look(1);
        answer(&namespace, &holder, 50, 31, 19);
        look(2);
        let cost = costs.of_holder(&namespace.name, &id("a")).unwrap();
        assert_eq!(
            cost.to_string(),
            "31 % of queries find it, 50 % of answers inexact"
        );
        assert_eq!(costs.worst(9), [(namespace.name.clone(), id("a"), cost)]);
        let all = costs.of_namespace(&namespace.name).unwrap();
        assert_eq!(
            (all.text.as_str(), all.cost.queries),
            ("50 % of answers inexact", 100)
        );
        // Answers from more than two spans ago no longer count.
        for seconds in [62, 123, 184] {
            look(seconds);
        }
        let cost = costs.of_holder(&namespace.name, &id("a")).unwrap();
        assert_eq!(cost.to_string(), "no queries lately");
        holder.status().inexact_since_us.store(0);
        look(185);
        assert_eq!(costs.of_holder(&namespace.name, &id("a")), None);
    }

    #[test]
    fn those_who_cost_most_come_first_and_little_is_not_nothing() {
        let (namespace, costs, now) = (namespace(), Costs::default(), Instant::now());
        let holders = ["a", "b", "c"].map(|worker| namespace.indexer.register(&id(worker)).unwrap());
        for holder in &holders {
            holder.status().inexact_since_us.store(1);
        }
        costs.look(std::iter::once(&*namespace), now);
        answer(&namespace, &holders[1], 999, 3, 0);
        answer(&namespace, &holders[2], 0, 1, 0);
        costs.look(std::iter::once(&*namespace), now);
        let worst = costs.worst(2);
        let names: Vec<_> = worst.iter().map(|(_, id, _)| id.worker.as_str()).collect();
        assert_eq!(names, ["b", "c"]);
        assert_eq!(
            worst[1].2.to_string(),
            "under 1 % of queries find it, under 1 % of answers inexact"
        );
        assert_eq!(worst[0].2.plus(worst[1].2).finding, 4);
    }
}
