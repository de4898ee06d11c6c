//! Checks of promised blocks: whether requests find as many blocks as exact answers promise. Routers report how many
//! blocks requests found.

use serde::Deserialize;

use super::report::Check;
use crate::cli::promises::BrokenPromise;

/// Namespace with the holders for which answers promised more blocks than requests find, from a daemon's route
/// `/index`.
#[derive(Debug, Deserialize)]
pub(super) struct Promising {
    namespace: String,
    #[serde(default)]
    broken_promises: Vec<BrokenPromise>,
}

/// Returns a failed check for each holder of which exact answers promise more blocks than requests find. `daemons` has
/// each daemon's address and namespaces.
pub(super) fn judge(daemons: &[(&str, Vec<Promising>)]) -> Vec<Check> {
    let mut checks = Vec::new();
    for (place, namespaces) in daemons {
        for Promising {
            namespace,
            broken_promises,
        } in namespaces
        {
            let name = format!("promises of {namespace}");
            let failed = broken_promises
                .iter()
                .map(|broken| Check::failed(&name, format!("{broken}, at {place}"), broken.mend(namespace)));
            checks.extend(failed);
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::super::report::CheckOutcome;
    use super::*;

    #[test]
    fn who_breaks_promises_fails() {
        let known = |broken: &str| -> Vec<Promising> {
            serde_json::from_str(&format!(
                r#"[{{"namespace":"m","broken_promises":[{broken}]}},{{"namespace":"old"}}]"#
            ))
            .unwrap()
        };
        assert!(judge(&[("a", known(""))]).is_empty());
        let broken = r#"{"worker":"vllm-3","rank":0,"promised_blocks":1000,"missing_blocks":110}"#;
        let checks = judge(&[("a", known("")), ("b", known(broken))]);
        assert_eq!((checks.len(), checks[0].outcome()), (1, CheckOutcome::Failed));
        assert!(checks[0].found().ends_with("at b"), "{}", checks[0].found());
    }
}
