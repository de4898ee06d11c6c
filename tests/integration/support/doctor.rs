//! `kvatlas doctor` as programs run it, and its report.

use serde_json::Value;

use super::process::kvatlas;

/// Runs `kvatlas doctor` with more arguments and with environment variables. Returns its exit code and its checks.
pub async fn doctor(url: &str, more: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, Vec<Value>) {
    let mut doctor = kvatlas(&["doctor", "--nats-url", url, "--json"]);
    doctor.args(more).envs(variables.iter().copied());
    let looking = tokio::task::spawn_blocking(move || doctor.output().unwrap());
    let looked = looking.await.unwrap();
    let report: Value = serde_json::from_slice(&looked.stdout).unwrap_or_else(|_| panic!("{looked:?}"));
    (looked.status.code(), report["checks"].as_array().unwrap().clone())
}

/// Returns the check with this name.
pub fn check<'c>(checks: &'c [Value], name: &str) -> &'c Value {
    let found = checks.iter().find(|check| check["name"] == name);
    found.unwrap_or_else(|| panic!("there is no {name} in {checks:?}"))
}
