//! Whether daemons hash each namespace alike. Otherwise an answer depends on who gives it, and each is called exact.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;

use super::report::Check;

/// What decides how a daemon hashes a namespace, as its route `/index` says it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Hashed {
    namespace: String,
    block_size: u32,
    hashing: String,
}

impl fmt::Display for Hashed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            block_size, hashing, ..
        } = self;
        write!(formatter, "{block_size} tokens a block and hashing {hashing:?}")
    }
}

/// Compares the namespaces of all daemons, each with where it is.
pub(super) fn compare(daemons: &[(&str, Vec<Hashed>)]) -> Check {
    const NAME: &str = "namespaces";
    let mut first: BTreeMap<&str, (&str, &Hashed)> = BTreeMap::new();
    let mut differences = Vec::new();
    for (place, namespaces) in daemons {
        for hashed in namespaces {
            let (first_place, known) = first.entry(&hashed.namespace).or_insert((place, hashed));
            if *known != hashed {
                let name = &hashed.namespace;
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
    use super::super::report::Outcome;
    use super::*;

    fn hashed(namespace: &str, block_size: u32) -> Hashed {
        Hashed {
            namespace: namespace.to_owned(),
            block_size,
            hashing: "engine".to_owned(),
        }
    }

    #[test]
    fn a_namespace_is_hashed_alike_everywhere() {
        let alike = [
            ("a", vec![hashed("m", 16)]),
            ("b", vec![hashed("m", 16), hashed("n", 32)]),
            ("c", vec![hashed("n", 32)]),
        ];
        assert_eq!(compare(&alike).outcome(), Outcome::Fine);
        let sizes = [("a", vec![hashed("m", 16)]), ("b", vec![hashed("m", 32)])];
        assert_eq!(compare(&sizes).outcome(), Outcome::Failed);
        let recomputed = Hashed {
            hashing: "recompute".to_owned(),
            ..hashed("m", 16)
        };
        let modes = [("a", vec![hashed("m", 16)]), ("b", vec![recomputed])];
        assert_eq!(compare(&modes).outcome(), Outcome::Failed);
    }
}
