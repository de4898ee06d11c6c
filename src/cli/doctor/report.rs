//! Results of checks, and their report.

use serde::Serialize;

use crate::cli::failure::Failure;

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CheckOutcome {
    /// The checked part works.
    Fine,
    /// The checked part works, but perhaps not for long.
    Warning,
    /// The checked part does not work.
    Failed,
    /// The part was not checked.
    Skipped,
}

/// One check, and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    name: String,
    outcome: CheckOutcome,
    /// Finding of the check, in words.
    found: String,
    /// Share of queries that the problem affects, in words; `None` if it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<String>,
    /// Advice on what to do; `None` if nothing needs to be done.
    mend: Option<String>,
}

#[allow(
    clippy::needless_pass_by_value,
    reason = "callers give texts and errors, most of them made for it"
)]
impl Check {
    /// Makes a successful check: the checked part works.
    pub(super) fn fine(name: &str, found: impl ToString) -> Self {
        Self::new(name, CheckOutcome::Fine, &found, None)
    }

    /// Makes a check that warns: the checked part works, but perhaps not for long.
    pub(super) fn warning(name: &str, found: impl ToString, mend: impl ToString) -> Self {
        Self::new(name, CheckOutcome::Warning, &found, Some(mend.to_string()))
    }

    /// Makes a failed check: the checked part does not work.
    pub(super) fn failed(name: &str, found: impl ToString, mend: impl ToString) -> Self {
        Self::new(name, CheckOutcome::Failed, &found, Some(mend.to_string()))
    }

    /// Makes a skipped check: the part was not checked, for the reason `why`.
    pub(super) fn skipped(name: &str, why: impl ToString) -> Self {
        Self::new(name, CheckOutcome::Skipped, &why, None)
    }

    /// Sets the share of queries that the problem affects, in words.
    pub(super) fn costing(self, cost: Option<String>) -> Self {
        Self { cost, ..self }
    }

    #[cfg(test)]
    pub(super) fn outcome(&self) -> CheckOutcome {
        self.outcome
    }

    #[cfg(test)]
    pub(super) fn found(&self) -> &str {
        &self.found
    }

    #[cfg(test)]
    pub(super) fn mend(&self) -> &str {
        self.mend.as_deref().unwrap_or_default()
    }

    fn new(name: &str, outcome: CheckOutcome, found: &impl ToString, mend: Option<String>) -> Self {
        Self {
            name: name.to_owned(),
            outcome,
            found: found.to_string(),
            cost: None,
            mend,
        }
    }
}

/// All checks, in the order in which they were made.
#[derive(Debug, Default, Serialize)]
pub(super) struct DoctorReport {
    checks: Vec<Check>,
}

impl DoctorReport {
    pub(super) fn add(&mut self, check: Check) {
        self.checks.push(check);
    }

    pub(super) fn extend(&mut self, checks: Vec<Check>) {
        self.checks.extend(checks);
    }

    /// Returns a line for each check. Lines with the cost and the advice follow a check that has them.
    pub(super) fn render(&self) -> String {
        let mut text = String::new();
        for check in &self.checks {
            let sign = match check.outcome {
                CheckOutcome::Fine => "ok  ",
                CheckOutcome::Warning => "WARN",
                CheckOutcome::Failed => "FAIL",
                CheckOutcome::Skipped => "-   ",
            };
            text += &format!("{sign} {}: {}\n", check.name, check.found);
            for (title, said) in [("cost", &check.cost), ("mend", &check.mend)] {
                if let Some(said) = said {
                    text += &format!("     {title}: {said}\n");
                }
            }
        }
        text
    }

    fn count(&self, outcome: CheckOutcome) -> usize {
        let is_one = |check: &&Check| check.outcome == outcome;
        self.checks.iter().filter(is_one).count()
    }

    /// Fails if a check failed, or if there is no connection to NATS. In the second case, `unconnected` is the reason.
    /// Warnings are no failure.
    pub(super) fn verdict(&self, unconnected: Option<&str>) -> Result<(), Failure> {
        if let Some(why) = unconnected {
            return Err(Failure::unavailable(why));
        }
        match self.count(CheckOutcome::Failed) {
            0 => Ok(()),
            failed => Err(Failure::failed(format_args!(
                "{failed} of {} checks failed",
                self.checks.len()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_mended_stands_below_its_check() {
        let mut report = DoctorReport::default();
        report.add(Check::fine("broker", "nats-server 2.15"));
        report.add(Check::warning("disk", "1 % free", "make room"));
        assert_eq!(report.verdict(None), Ok(()));
        let failed = Check::failed("round trip", "no answer", "start the daemon");
        report.add(failed.costing(Some("31 % of queries".to_owned())));
        report.add(Check::skipped("clock", "no admin listener"));
        let expected = "\
ok   broker: nats-server 2.15
WARN disk: 1 % free
     mend: make room
FAIL round trip: no answer
     cost: 31 % of queries
     mend: start the daemon
-    clock: no admin listener
";
        assert_eq!(report.render(), expected);
        assert_eq!(report.verdict(None), Err(Failure::failed("1 of 4 checks failed")));
        assert_eq!(
            report
                .verdict(Some("no NATS server could be reached"))
                .unwrap_err()
                .status,
            crate::cli::ExitStatus::Unavailable
        );
    }
}
