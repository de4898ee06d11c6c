//! Checks of namespaces: whether all daemons hash a namespace in the same way, and whether its publishers are in order.
//!
//! If daemons hash a namespace differently, some of them find no holders, and still call their empty answers exact.

use std::collections::BTreeMap;
use std::fmt;

use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::PROBE_NAME;
use kvatlas_daemon::costs::Cost;
use serde::Deserialize;

use super::report::Check;
use crate::cli::refused::PublisherRefusal;
use crate::cli::status::{NamespaceStatus, Status};
use crate::cli::text::counted;

/// Settings that decide how a daemon hashes a namespace, from the daemon's route `/index`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(in crate::cli) struct Hashed {
    block_size: u32,
    hashing: String,
}

impl Hashed {
    /// Returns the number of tokens in a block.
    pub(super) fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.block_size).ok()
    }
}

impl fmt::Display for Hashed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block_size, hashing } = self;
        write!(formatter, "{block_size} tokens a block and hashing {hashing:?}")
    }
}

/// Returns a check that warns of epochs ahead of the clock and of unknown block sizes. `daemons` has each daemon's
/// address and status.
pub(super) fn publishers(daemons: &[(&str, &Status)]) -> Check {
    const NAME: &str = "publishers";
    let (mut found, mut are_ahead, mut are_unsized) = (Vec::new(), false, false);
    for (place, status) in daemons {
        for known in &status.namespaces {
            let name = &known.namespace;
            if known.epochs_ahead > 0 {
                are_ahead = true;
                let holders = counted(known.epochs_ahead, "holder has", "holders have");
                let names = match known.ahead.is_empty() {
                    true => String::new(),
                    false => format!(" ({})", known.ahead.join(", ")),
                };
                found.push(format!(
                    "{holders} an epoch ahead of the clock of {place} in {name}{names}"
                ));
            }
            if known.unsized_holders > 0 {
                are_unsized = true;
                let holders = counted(known.unsized_holders, "holder", "holders");
                found.push(format!("{holders} did not tell {place} a block size in {name}"));
            }
        }
    }
    if found.is_empty() {
        return Check::fine(NAME, "all epochs are of the past, and all block sizes are known");
    }
    let mends = [
        (
            are_ahead,
            "run an NTP client where the workers run, and restart those that are ahead",
        ),
        (
            are_unsized,
            "have publishers send block_size, or name the namespace in the configuration",
        ),
    ];
    let mends = mends.into_iter().filter(|(is_needed, _)| *is_needed);
    let mends: Vec<&str> = mends.map(|(_, mend)| mend).collect();
    Check::warning(NAME, found.join("; "), mends.join("; "))
}

/// Returns a failed check for each publisher whose batches are dropped, and one for each namespace with more of them
/// than its daemons name. `daemons` has each daemon's address and its status from before the doctor's probe. Probes of
/// other doctors are left out.
pub(super) fn refused(daemons: &[(&str, &Status)]) -> Vec<Check> {
    let mut culprits: BTreeMap<(&str, &str), CulpritPublisher<'_>> = BTreeMap::new();
    let mut unnamed: BTreeMap<&str, u64> = BTreeMap::new();
    for (place, status) in daemons {
        for known in &status.namespaces {
            let name = known.namespace.as_str();
            if known.unnamed_refused() > 0 {
                let most = unnamed.entry(name).or_default();
                *most = known.unnamed_refused().max(*most);
            }
            let refused = known.refused.iter();
            for refusal in refused.filter(|refusal| refusal.worker != PROBE_NAME) {
                let culprit = culprits
                    .entry((name, &refusal.worker))
                    .or_insert(CulpritPublisher {
                        refusal,
                        cost: None,
                        places: Vec::new(),
                    });
                culprit.cost = culprit.cost.into_iter().chain(known.cost).reduce(Cost::plus);
                culprit.places.push(place);
            }
        }
    }
    let checks = culprits
        .iter()
        .map(|((namespace, _), culprit)| culprit.check(namespace));
    let more = unnamed.iter().map(|(namespace, count)| {
        let name = format!("publishers of {namespace}");
        let found = format!("and {count} more, of which all batches are dropped, too");
        Check::failed(
            &name,
            found,
            "mend those that are named; the doctor names others then",
        )
    });
    checks.chain(more).collect()
}

/// Everything that daemons say about one publisher whose batches are dropped.
#[derive(Debug)]
struct CulpritPublisher<'d> {
    /// Refusal as the first daemon tells it.
    refusal: &'d PublisherRefusal,
    /// Numbers of recent answers about the publisher's namespace: all of them, and those that were not exact. They are
    /// sums over all daemons.
    cost: Option<Cost>,
    places: Vec<&'d str>,
}

impl CulpritPublisher<'_> {
    fn check(&self, namespace: &str) -> Check {
        let PublisherRefusal { worker, reason, .. } = self.refusal;
        let name = format!("publisher {worker} of {namespace}");
        let places = self.places.join(", ");
        let found = format!("all its batches are dropped ({reason}) at {places}");
        Check::failed(&name, found, self.refusal.mend(namespace)).costing(self.cost.map(Cost::of_all))
    }
}

/// Returns a check that fails if two daemons hash a namespace differently. `daemons` has each daemon's address and
/// status.
pub(super) fn compare(daemons: &[(&str, &Status)]) -> Check {
    const NAME: &str = "namespaces";
    let mut first: BTreeMap<&str, (&str, &Hashed)> = BTreeMap::new();
    let mut differences = Vec::new();
    for (place, status) in daemons {
        for NamespaceStatus {
            namespace: name,
            hashed,
            ..
        } in &status.namespaces
        {
            let Some(hashed) = hashed else { continue };
            let (first_place, known) = first.entry(name).or_insert((place, hashed));
            if *known != hashed {
                differences.push(format!(
                    "{name} has {known} at {first_place}, and {hashed} at {place}"
                ));
            }
        }
    }
    if differences.is_empty() {
        return Check::fine(NAME, format!("all {} daemons hash them alike", daemons.len()));
    }
    Check::failed(
        NAME,
        differences.join("; "),
        "give all daemons the same namespaces.NAME and namespace_defaults: the answers of one of them have no holders",
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::CheckOutcome;
    use super::*;

    fn status(namespaces: &str) -> Status {
        serde_json::from_str(&format!(r#"{{"namespaces":[{namespaces}]}}"#)).unwrap()
    }

    #[test]
    fn clocks_that_are_ahead_and_sizes_that_are_guessed_are_named() {
        let fine = publishers(&[("a", &status(r#"{"namespace":"m"}"#))]);
        assert_eq!(fine.outcome(), CheckOutcome::Fine);
        let odd = r#"{"namespace":"m","epochs_ahead":1,"ahead":["w/0"],"unsized_holders":2}"#;
        let check = publishers(&[("a", &status(odd))]);
        assert_eq!(check.outcome(), CheckOutcome::Warning);
        assert_eq!(
            check.found(),
            "1 holder has an epoch ahead of the clock of a in m (w/0); 2 holders did not tell a a block size in m"
        );
        assert!(check.mend().contains("NTP") && check.mend().contains("block_size"));
        // The two findings have different advice.
        let ahead = publishers(&[("a", &status(r#"{"namespace":"m","epochs_ahead":1}"#))]);
        assert!(ahead.mend().contains("NTP") && !ahead.mend().contains("block_size"));
        let guessed = publishers(&[("a", &status(r#"{"namespace":"m","unsized_holders":1}"#))]);
        assert!(guessed.mend().contains("block_size") && !guessed.mend().contains("NTP"));
    }

    #[test]
    fn whose_batches_are_dropped_fails() {
        let dropped = |worker: &str, reason: &str| {
            status(&format!(
                r#"{{"namespace":"m","refused":[{{"worker":"{worker}","reason":"{reason}"}}]}}"#
            ))
        };
        let wide = dropped("wide", "other_settings");
        let known = [("a", &wide), ("b", &wide)];
        let checks = refused(&known);
        assert_eq!(checks.len(), 1);
        assert_eq!(
            (checks[0].outcome(), checks[0].found()),
            (
                CheckOutcome::Failed,
                "all its batches are dropped (other_settings) at a, b"
            )
        );
        let stale = refused(&[("a", &dropped("old", "stale_epoch"))]);
        assert!(
            stale[0].mend().ends_with("kvatlas admin forget m old"),
            "{stale:?}"
        );
        let undecodable = refused(&[("a", &dropped("odd", "undecodable"))]);
        assert!(
            !undecodable[0].mend().contains("kvatlas admin"),
            "{undecodable:?}"
        );
        assert!(refused(&[("a", &dropped(PROBE_NAME, "other_settings"))]).is_empty());
    }

    #[test]
    fn publishers_that_are_not_named_are_counted() {
        let dropped = |namespace: &str, total: u64| {
            let named = r#"{"worker":"wide","reason":"other_settings"}"#;
            let refused = format!(r#""refused":[{named}],"refused_total":{total}"#);
            status(&format!(r#"{{"namespace":"{namespace}",{refused}}}"#))
        };
        let [few, many, all, own] =
            [("m", 3), ("m", 5), ("n", 1), (PROBE_NAME, 9)].map(|(name, total)| dropped(name, total));
        let known = [("a", &few), ("b", &many), ("c", &all), ("d", &own)];
        let checks = refused(&known);
        assert_eq!(checks.len(), 3);
        assert_eq!(
            (checks[2].outcome(), checks[2].found()),
            (
                CheckOutcome::Failed,
                "and 4 more, of which all batches are dropped, too"
            )
        );
    }

    #[test]
    fn a_namespace_is_hashed_alike_everywhere() {
        let hashed = |namespace: &str, block_size: u32, hashing: &str| {
            format!(r#"{{"namespace":"{namespace}","block_size":{block_size},"hashing":"{hashing}"}}"#)
        };
        let [m, n] = ["m", "n"].map(|name| hashed(name, if name == "m" { 16 } else { 32 }, "engine"));
        let [one, both, other] = [m.clone(), format!("{m},{n}"), n].map(|text| status(&text));
        let alike = [("a", &one), ("b", &both), ("c", &other)];
        assert_eq!(compare(&alike).outcome(), CheckOutcome::Fine);
        for different in [hashed("m", 32, "engine"), hashed("m", 16, "recompute")] {
            let check = compare(&[("a", &one), ("b", &status(&different))]);
            assert_eq!(check.outcome(), CheckOutcome::Failed);
        }
    }
}
