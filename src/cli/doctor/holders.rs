//! Checks of the holders that are not exact: one for each holder, with the reasons.

use std::collections::BTreeMap;
use std::fmt;

use kvatlas_core::wire::{DegradedReason, DegradedReasons};
use kvatlas_daemon::costs::Cost;
use kvatlas_daemon::runbook::{joined, mend_of_doubt};
use serde::Deserialize;

use super::bridges::Followers;
use super::probe::Probe;
use super::report::Check;
use crate::cli::doubted::DoubtedHolder;
use crate::cli::text::{counted, since};

/// Maximum number of holders that get a check of their own.
const LINES_MAX: usize = 16;

/// Holders that are not exact, as a daemon's route `/workers` lists them.
#[derive(Debug, Deserialize)]
pub(super) struct Degraded {
    holders: Vec<DoubtedHolder>,
    holders_total: u64,
}

impl Degraded {
    /// Path of the route that lists at most 1,000 degraded holders, and tells their total number.
    pub(super) const TARGET: &str = "/workers?state=degraded&limit=1000";
}

/// Everything that daemons say about one holder.
#[derive(Debug, Default)]
struct Culprit<'d> {
    reasons: DegradedReasons,
    /// Beginning of the doubt, in microseconds since the Unix epoch. If the daemons name different times, this is the
    /// earliest.
    since_us: Option<u64>,
    /// Details of the reasons, from the first daemon that tells any. The text comes from that daemon, or from the
    /// bridge that follows the engine.
    detail: Option<&'d str>,
    /// Numbers of recent answers about the namespace: all of them, those that list the holder as not exact, and those
    /// that are not exact. They are sums over all daemons.
    cost: Option<Cost>,
    places: Vec<&'d str>,
}

/// Name of a holder: namespace, worker and rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct NamespacedHolder<'d> {
    namespace: &'d str,
    worker: &'d str,
    rank: u32,
}

impl fmt::Display for NamespacedHolder<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            worker,
            rank,
        } = self;
        write!(formatter, "holder {worker}/{rank} of {namespace}")
    }
}

impl<'d> Culprit<'d> {
    fn add(&mut self, place: &'d str, holder: &'d DoubtedHolder) {
        self.reasons = self.reasons.union(holder.degraded);
        self.since_us = self.since_us.into_iter().chain(holder.since_us).min();
        self.detail = self.detail.or(holder.detail.as_deref());
        self.cost = self.cost.into_iter().chain(holder.cost).reduce(Cost::plus);
        self.places.push(place);
    }

    /// Returns the check of this holder. `followers` are the admin listeners of the bridges that follow its engine.
    fn check(&self, name: NamespacedHolder<'_>, followers: &[&str], now_us: u64) -> Check {
        let words: Vec<&str> = self.reasons.iter().map(|reason| reason.as_str()).collect();
        let (since, places) = (since(self.since_us, now_us), self.places.join(", "));
        let detail = self.detail.map_or(String::new(), |detail| format!(": {detail}"));
        let by = match followers.len() >= 2 && self.reasons.contains(DegradedReason::Contested) {
            true => format!("; followed by the bridges at {}", followers.join(", ")),
            false => String::new(),
        };
        let found = format!("{}{since}{detail}, at {places}{by}", words.join(", "));
        let rank = name.rank.to_string();
        let culprit = [name.namespace, name.worker, &rank];
        let mend_of = |reason| mend_of_doubt(reason, self.reasons, self.detail, culprit);
        let mend = joined(self.reasons.iter().filter_map(mend_of));
        Check::failed(&name.to_string(), found, mend).costing(self.cost.map(|cost| cost.to_string()))
    }
}

/// Returns a failed check for each of the first [`LINES_MAX`] holders that any daemon calls not exact, and one check
/// that counts the other such holders.
///
/// `daemons` has each daemon's address and holders, `followers` the bridges of each engine, and `now_us` is the present
/// time. The doctor's own `probe` is left out.
pub(super) fn judge(
    daemons: &[(&str, Degraded)],
    followers: &Followers<'_>,
    probe: &Probe,
    now_us: u64,
) -> Vec<Check> {
    let mut culprits: BTreeMap<NamespacedHolder<'_>, Culprit<'_>> = BTreeMap::new();
    let mut unlisted = 0;
    for (place, known) in daemons {
        let listed = u64::try_from(known.holders.len()).unwrap_or(u64::MAX);
        unlisted = unlisted.max(known.holders_total.saturating_sub(listed));
        for holder in &known.holders {
            let name = NamespacedHolder {
                namespace: &holder.namespace,
                worker: &holder.worker,
                rank: holder.rank,
            };
            if !probe.is_holder(name.namespace, name.worker, name.rank) {
                culprits.entry(name).or_default().add(place, holder);
            }
        }
    }
    if culprits.is_empty() && unlisted == 0 {
        return vec![Check::fine("holders", "all are exact")];
    }
    unlisted += u64::try_from(culprits.len().saturating_sub(LINES_MAX)).unwrap_or(u64::MAX);
    let mut checks: Vec<Check> = culprits
        .iter()
        .take(LINES_MAX)
        .map(|(name, culprit)| {
            let engine = (name.namespace.to_owned(), name.worker.to_owned(), name.rank);
            let followers = followers.get(&engine).map_or(&[][..], Vec::as_slice);
            culprit.check(*name, followers, now_us)
        })
        .collect();
    if unlisted > 0 {
        let found = match checks.is_empty() {
            true => format!("{} not exact", counted(unlisted, "is", "are")),
            false => format!("{} not exact, too", counted(unlisted, "other is", "others are")),
        };
        checks.push(Check::failed(
            "holders",
            found,
            "kvatlas status shows how many there are for each reason",
        ));
    }
    checks
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::PROBE_NAME;

    use super::super::report::{CheckOutcome, DoctorReport};
    use super::*;

    fn degraded(text: &str) -> Degraded {
        serde_json::from_str(text).unwrap()
    }

    /// Returns a holder as a daemon lists it.
    fn holder(namespace: &str, worker: &str, reason: &str) -> String {
        let known = r#""since_us":1800000000000000,"detail":"expected batch 2, got 5""#;
        let cost = r#"{"queries":50,"finding":31,"inexact":50,"text":""}"#;
        format!(
            r#"{{"namespace":"{namespace}","worker":"{worker}","rank":0,"degraded":["{reason}"],{known},"cost":{cost}}}"#
        )
    }

    /// Returns a daemon's answer that lists some holders of `total`.
    fn some(holders: &[String], total: usize) -> Degraded {
        let holders = holders.join(",");
        degraded(&format!(r#"{{"holders":[{holders}],"holders_total":{total}}}"#))
    }

    #[test]
    fn each_culprit_has_a_line_with_its_reasons() {
        let (none_follow, none) = (Followers::new(), degraded(r#"{"holders":[],"holders_total":0}"#));
        let checks = judge(&[("a", none)], &none_follow, &Probe::named("own", "own", 0), 0);
        assert_eq!(
            (checks.len(), checks[0].outcome(), checks[0].found()),
            (1, CheckOutcome::Fine, "all are exact")
        );
        let first = some(
            &[
                holder("m", "vllm-2", "upstream_gap"),
                holder("own", "own", "stale"),
                holder("own", "vllm-3", "stale"),
                holder(PROBE_NAME, "other", "stale"),
            ],
            4,
        );
        let second = some(&[holder("m", "vllm-2", "gap")], 1);
        let checks = judge(
            &[("a", first), ("b", second)],
            &none_follow,
            &Probe::named("own", "own", 0),
            1_800_000_060_000_000,
        );
        assert_eq!(checks.len(), 2);
        assert_eq!(checks[0].outcome(), CheckOutcome::Failed);
        assert_eq!(
            checks[0].found(),
            "gap, upstream_gap since 08:00:00 UTC (60 s): expected batch 2, got 5, at a, b"
        );
        let mut report = DoctorReport::default();
        report.extend(checks);
        let said = report.render();
        assert!(
            said.contains("cost: 62 % of queries find it, 100 % of answers inexact\n"),
            "{said}"
        );
        assert!(said.contains("kvatlas admin resync m vllm-2 0"), "{said}");
        // Only the probe itself is left out of its namespace.
        assert!(
            said.contains("FAIL holder vllm-3/0 of own: stale since"),
            "{said}"
        );
    }

    #[test]
    fn holders_without_a_line_are_counted() {
        let many: Vec<String> = (0..20)
            .map(|number| holder("m", &format!("w-{number}"), "stale"))
            .collect();
        let checks = judge(
            &[("a", some(&many, 30))],
            &Followers::new(),
            &Probe::named("own", "own", 0),
            0,
        );
        assert_eq!(checks.len(), LINES_MAX + 1);
        assert_eq!(checks[LINES_MAX].found(), "14 others are not exact, too");
        let unlisted = judge(
            &[("a", some(&[], 3))],
            &Followers::new(),
            &Probe::named("own", "own", 0),
            0,
        );
        assert_eq!(unlisted[0].found(), "3 are not exact");
    }
}
