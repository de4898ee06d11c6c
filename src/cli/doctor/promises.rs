//! Checks of promised blocks: whether requests find as many blocks as exact answers promise. Routers report how many
//! blocks requests found.

use super::report::Check;
use crate::cli::status::Status;

/// Returns a failed check for each holder of which exact answers promise more blocks than requests find. `daemons` has
/// each daemon's address and status.
pub(super) fn judge(daemons: &[(&str, &Status)]) -> Vec<Check> {
    let mut checks = Vec::new();
    for (place, status) in daemons {
        for known in &status.namespaces {
            let name = format!("promises of {}", known.namespace);
            let failed = known.broken_promises.iter().map(|broken| {
                let found = format!("{broken}, at {place}");
                Check::failed(&name, found, broken.mend(&known.namespace))
            });
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
        let known = |broken: &str| -> Status {
            serde_json::from_str(&format!(
                r#"{{"namespaces":[{{"namespace":"m","broken_promises":[{broken}]}},{{"namespace":"old"}}]}}"#
            ))
            .unwrap()
        };
        assert!(judge(&[("a", &known(""))]).is_empty());
        let broken = r#"{"worker":"vllm-3","rank":0,"promised_blocks":1000,"missing_blocks":110}"#;
        let checks = judge(&[("a", &known("")), ("b", &known(broken))]);
        assert_eq!((checks.len(), checks[0].outcome()), (1, CheckOutcome::Failed));
        assert!(checks[0].found().ends_with("at b"), "{}", checks[0].found());
    }
}
