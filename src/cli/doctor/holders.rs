//! The holders whose state is not certain: a line each, with the reasons.

use std::collections::BTreeMap;

use kvatlas::daemon::runbook::mend_of;
use kvatlas_core::wire::DegradedReasons;
use serde::Deserialize;

use super::report::Check;
use crate::cli::text::{counted, since};

/// Holders that have a line of their own, at most.
const LINES_MAX: usize = 16;

/// The holders that are not exact, as a daemon's route `/workers` gives them.
#[derive(Debug, Deserialize)]
pub(super) struct Degraded {
    holders: Vec<Holder>,
    holders_total: u64,
}

impl Degraded {
    /// The route that gives them. More are counted, and not listed.
    pub(super) const TARGET: &str = "/workers?state=degraded&limit=1000";
}

#[derive(Debug, Deserialize)]
struct Holder {
    namespace: String,
    worker: String,
    rank: u32,
    #[serde(default)]
    degraded: DegradedReasons,
    #[serde(default)]
    since_us: Option<u64>,
}

/// The statements of daemons about one holder.
#[derive(Debug, Default)]
struct Culprit<'d> {
    reasons: DegradedReasons,
    /// The earliest time of all.
    since_us: Option<u64>,
    places: Vec<&'d str>,
}

/// Judges what daemons say at a time, each with where it is. Holders of the namespace `own` are the doctor's.
pub(super) fn judge(daemons: &[(&str, Degraded)], own: &str, now_us: u64) -> Vec<Check> {
    let mut culprits: BTreeMap<String, Culprit<'_>> = BTreeMap::new();
    let mut unlisted = 0;
    for (place, known) in daemons {
        let listed = u64::try_from(known.holders.len()).unwrap_or(u64::MAX);
        unlisted = unlisted.max(known.holders_total.saturating_sub(listed));
        for holder in known.holders.iter().filter(|holder| holder.namespace != own) {
            let Holder {
                namespace,
                worker,
                rank,
                degraded,
                since_us,
            } = holder;
            let name = format!("holder {worker}/{rank} of {namespace}");
            let culprit = culprits.entry(name).or_default();
            culprit.reasons = culprit.reasons.union(*degraded);
            culprit.since_us = culprit.since_us.into_iter().chain(*since_us).min();
            culprit.places.push(place);
        }
    }
    if culprits.is_empty() {
        return vec![Check::fine("holders", "all are exact")];
    }
    unlisted += u64::try_from(culprits.len().saturating_sub(LINES_MAX)).unwrap_or(u64::MAX);
    let mut checks: Vec<Check> = culprits
        .iter()
        .take(LINES_MAX)
        .map(|(name, culprit)| {
            let words: Vec<&str> = culprit.reasons.iter().map(|reason| reason.as_str()).collect();
            let (since, places) = (since(culprit.since_us, now_us), culprit.places.join(", "));
            let found = format!("{}{since}, at {places}", words.join(", "));
            Check::failed(name, found, mend_of(words.iter().copied(), "what to do"))
        })
        .collect();
    if unlisted > 0 {
        let found = format!("{} not exact, too", counted(unlisted, "other is", "others are"));
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
    use super::super::report::Outcome;
    use super::*;

    fn degraded(text: &str) -> Degraded {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn each_culprit_has_a_line_with_its_reasons() {
        let none = degraded(r#"{"holders":[],"holders_total":0}"#);
        let checks = judge(&[("a", none)], "own", 0);
        assert_eq!(
            (checks.len(), checks[0].outcome(), checks[0].found()),
            (1, Outcome::Fine, "all are exact")
        );
        let holder = |namespace: &str, worker: &str, reason: &str| {
            let since_us = 1_800_000_000_000_000_u64;
            format!(
                r#"{{"namespace":"{namespace}","worker":"{worker}","rank":0,"degraded":["{reason}"],"since_us":{since_us}}}"#
            )
        };
        let some = |holders: &[String], total: usize| {
            degraded(&format!(
                r#"{{"holders":[{}],"holders_total":{total}}}"#,
                holders.join(",")
            ))
        };
        let first = some(
            &[
                holder("m", "vllm-2", "upstream_gap"),
                holder("own", "own", "stale"),
            ],
            2,
        );
        let second = some(&[holder("m", "vllm-2", "gap")], 1);
        let checks = judge(&[("a", first), ("b", second)], "own", 1_800_000_060_000_000);
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].outcome(), Outcome::Failed);
        assert_eq!(
            checks[0].found(),
            "gap, upstream_gap since 08:00:00 UTC (60 s), at a, b"
        );
        let many: Vec<String> = (0..20)
            .map(|number| holder("m", &format!("w-{number}"), "stale"))
            .collect();
        let checks = judge(&[("a", some(&many, 30))], "own", 0);
        assert_eq!(checks.len(), LINES_MAX + 1);
        assert_eq!(checks[LINES_MAX].found(), "14 others are not exact, too");
    }
}
