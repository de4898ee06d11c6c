//! Log lines about holders that stay degraded, so that an operator sees which worker is broken.
//!
//! A fault makes many holders degraded for a moment, and most recover within moments. The code that notices the fault
//! logs it, with at most one line a second. An operator looks for the holder that does not recover. [`HolderWatch`]
//! writes a line about such a holder, and another line when it is exact again. While any holder is not exact, a summary
//! is written once a minute.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use kvatlas_core::wire::{DegradedReason, DegradedReasons, HolderId, NamespaceName};

/// Time for which a holder must be degraded before a log line names it.
const NAMED_AFTER: Duration = Duration::from_secs(3);

/// Interval between summaries while a holder is not exact.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of log lines about single holders that one pass over all holders writes. One more line counts the
/// remaining holders.
const LINES_MAX: usize = 10;

type NamespaceHolder = (NamespaceName, HolderId);

/// Record of a holder that is not exact.
#[derive(Debug)]
struct Inexact {
    since: Instant,
    reasons: DegradedReasons,
    is_named: bool,
    /// Whether the current pass over all holders has seen the holder.
    is_seen: bool,
}

/// Finding of a pass over all holders that is logged.
#[derive(Debug, PartialEq, Eq)]
enum Finding {
    /// Holder has been degraded for a while.
    Stays(NamespaceHolder, DegradedReasons, Duration),
    /// Holder that was named in the log is exact again.
    Recovered(NamespaceHolder, Duration),
    /// Holder that was named in the log is no longer known.
    Gone(NamespaceHolder, Duration),
    /// Number of further findings, which are not logged one by one.
    More(usize),
    /// Summary: the number of degraded holders, counts by reason, the holder that has been degraded longest, and for
    /// how long.
    Summary(usize, DegradedCounts, NamespaceHolder, Duration),
}

/// Number of degraded holders by reason. A holder with two reasons counts twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DegradedCounts([usize; DegradedReason::ALL.len()]);

impl fmt::Display for DegradedCounts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = DegradedReason::ALL.into_iter().zip(self.0);
        let texts: Vec<String> = counted
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| format!("{}: {count}", reason.as_str()))
            .collect();
        formatter.write_str(&texts.join(", "))
    }
}

/// Record of the degraded holders, with the time since which each has been degraded. Holders that are exact take no
/// memory here.
#[derive(Debug)]
pub(super) struct HolderWatch {
    inexact: HashMap<NamespaceHolder, Inexact>,
    last_summary: Instant,
}

impl HolderWatch {
    /// Makes a record that has not seen any holder yet.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            inexact: HashMap::new(),
            last_summary: now,
        }
    }

    /// Begins a look, that is, a pass over every holder.
    pub(super) fn look(&mut self) -> HolderLook<'_> {
        HolderLook {
            watch: self,
            holders: Vec::new(),
        }
    }

    fn find(&mut self, holders: Vec<(NamespaceHolder, DegradedReasons)>, now: Instant) -> Vec<Finding> {
        let mut findings = Vec::new();
        self.inexact.values_mut().for_each(|one| one.is_seen = false);
        for (key, reasons) in holders {
            if reasons.is_empty() {
                if let Some(one) = self.inexact.remove(&key).filter(|one| one.is_named) {
                    findings.push(Finding::Recovered(key, now - one.since));
                }
                continue;
            }
            let one = self.inexact.entry(key.clone()).or_insert_with(|| Inexact {
                since: now,
                reasons,
                is_named: false,
                is_seen: true,
            });
            one.is_seen = true;
            one.reasons = reasons;
            let lasted = now - one.since;
            if !one.is_named && lasted >= NAMED_AFTER {
                one.is_named = true;
                findings.push(Finding::Stays(key, reasons, lasted));
            }
        }
        let gone = self.inexact.extract_if(|_, one| !one.is_seen);
        findings.extend(
            gone.filter(|(_, one)| one.is_named)
                .map(|(key, one)| Finding::Gone(key, now - one.since)),
        );
        if findings.len() > LINES_MAX {
            let more = findings.len() - LINES_MAX;
            findings.truncate(LINES_MAX);
            findings.push(Finding::More(more));
        }
        findings.extend(self.summary(now));
        findings
    }

    fn summary(&mut self, now: Instant) -> Option<Finding> {
        let (key, oldest) = self.inexact.iter().min_by_key(|(_, one)| one.since)?;
        if now - self.last_summary < SUMMARY_INTERVAL {
            return None;
        }
        self.last_summary = now;
        let count = |reason| {
            let has = |one: &&Inexact| one.reasons.contains(reason);
            self.inexact.values().filter(has).count()
        };
        let counts = DegradedCounts(DegradedReason::ALL.map(count));
        let lasted = now - oldest.since;
        Some(Finding::Summary(self.inexact.len(), counts, key.clone(), lasted))
    }
}

/// Pass over every holder that is in progress.
pub(super) struct HolderLook<'w> {
    watch: &'w mut HolderWatch,
    holders: Vec<(NamespaceHolder, DegradedReasons)>,
}

impl HolderLook<'_> {
    /// Notes that the holder exists, with its `reasons` for doubt. No reasons mean that it is exact.
    pub(super) fn saw(&mut self, namespace: &NamespaceName, holder: &HolderId, reasons: DegradedReasons) {
        let inexact = &self.watch.inexact;
        // An exact holder matters only if it was not exact before.
        if reasons.is_empty() && inexact.is_empty() {
            return;
        }
        let key = (namespace.clone(), holder.clone());
        if !reasons.is_empty() || inexact.contains_key(&key) {
            self.holders.push((key, reasons));
        }
    }

    /// Ends the pass over every holder, and logs its findings. Every holder must have been seen before.
    pub(super) fn end(self, now: Instant) {
        self.watch.find(self.holders, now).into_iter().for_each(tell);
    }
}

fn tell(finding: Finding) {
    match finding {
        Finding::Stays((namespace, holder), reasons, lasted) => {
            let for_s = lasted.as_secs();
            tracing::warn!(%namespace, %holder, ?reasons, for_s, "holder stays degraded");
        }
        Finding::Recovered((namespace, holder), lasted) => {
            let after_s = lasted.as_secs();
            tracing::info!(%namespace, %holder, after_s, "holder is exact again");
        }
        Finding::Gone((namespace, holder), lasted) => {
            let after_s = lasted.as_secs();
            tracing::info!(%namespace, %holder, after_s, "holder that was degraded is removed");
        }
        Finding::More(holders) => {
            tracing::warn!(
                holders,
                "more holders stay degraded, are exact again, or are removed"
            );
        }
        Finding::Summary(holders, reasons, (namespace, holder), lasted) => {
            let for_s = lasted.as_secs();
            tracing::warn!(holders, %reasons, longest = %holder, %namespace, for_s, "holders are degraded");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_core::wire::WorkerName;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(number: usize) -> NamespaceHolder {
        let worker = WorkerName::new(&format!("gpu-{number}")).unwrap();
        (NamespaceName::new("llama").unwrap(), HolderId { worker, rank: 0 })
    }

    fn gap() -> DegradedReasons {
        DegradedReasons::of(DegradedReason::Gap)
    }

    #[test]
    fn a_holder_that_recovers_at_once_is_not_named() {
        let start = Instant::now();
        let mut watch = HolderWatch::new(start);
        assert_eq!(watch.find(vec![(key(1), gap())], start), []);
        assert_eq!(watch.find(vec![(key(1), gap())], start + SECOND), []);
        let exact = DegradedReasons::default();
        assert_eq!(watch.find(vec![(key(1), exact)], start + 2 * SECOND), []);
        assert!(watch.inexact.is_empty());
        // After a recovery, the time is counted from the next fault.
        assert_eq!(watch.find(vec![(key(1), gap())], start + 9 * SECOND), []);
    }

    #[test]
    fn a_look_remembers_who_is_or_was_not_exact() {
        let mut watch = HolderWatch::new(Instant::now());
        let ((namespace, one), (_, two)) = (key(1), key(2));
        let mut look = watch.look();
        look.saw(&namespace, &one, gap());
        look.saw(&namespace, &two, DegradedReasons::default());
        assert_eq!(look.holders, [(key(1), gap())]);
        look.end(Instant::now());
        let mut look = watch.look();
        look.saw(&namespace, &one, DegradedReasons::default());
        look.saw(&namespace, &two, DegradedReasons::default());
        assert_eq!(look.holders, [(key(1), DegradedReasons::default())]);
        look.end(Instant::now());
        assert!(watch.inexact.is_empty());
    }

    #[test]
    fn a_holder_that_stays_is_named_once_and_its_recovery_too() {
        let start = Instant::now();
        let mut watch = HolderWatch::new(start);
        let mut findings = Vec::new();
        for second in 0..20 {
            findings.extend(watch.find(vec![(key(1), gap()), (key(2), gap())], start + second * SECOND));
        }
        let stays = |number| Finding::Stays(key(number), gap(), NAMED_AFTER);
        assert_eq!(findings, [stays(1), stays(2)]);
        // Holder 1 is exact again, and holder 2 has left.
        let exact = vec![(key(1), DegradedReasons::default())];
        assert_eq!(
            watch.find(exact, start + 20 * SECOND),
            [
                Finding::Recovered(key(1), 20 * SECOND),
                Finding::Gone(key(2), 20 * SECOND)
            ]
        );
    }

    #[test]
    fn many_are_counted_and_summed_up_once_a_minute() {
        let start = Instant::now();
        let mut watch = HolderWatch::new(start);
        let all = || (0..50).map(|number| (key(number), gap())).collect::<Vec<_>>();
        assert_eq!(watch.find(all(), start), []);
        let named = watch.find(all(), start + NAMED_AFTER);
        assert_eq!(named.len(), LINES_MAX + 1);
        assert_eq!(named.last(), Some(&Finding::More(40)));
        assert_eq!(watch.find(all(), start + 59 * SECOND), []);
        let summary = watch.find(all(), start + SUMMARY_INTERVAL);
        let [Finding::Summary(50, counts, _, lasted)] = &summary[..] else {
            panic!("{summary:?}");
        };
        assert_eq!(
            (counts.to_string(), *lasted),
            ("gap: 50".to_owned(), SUMMARY_INTERVAL)
        );
        assert_eq!(watch.find(all(), start + SUMMARY_INTERVAL + SECOND), []);
    }
}
