//! Checks of a bridge: whether it can look for engines, and whether it follows the engines that it knows.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use kvatlas_core::wire::worker_of_instance;
use kvatlas_process::registry::{EnginesReport, SourceState};
use serde::Deserialize;

use super::replicas::ReplicaAnswer;
use super::report::Check;
use crate::cli::Failure;
use crate::cli::admin_client::ProcessRole;
use crate::cli::followed;
use crate::cli::status::Status;
use crate::cli::text::counted;

/// Maximum number of sources of engines (such as DNS or a file) that get a check of their own.
const LINES_MAX: usize = 16;

/// Admin listeners of the bridges that follow an engine, by its namespace, worker and rank.
pub(super) type Followers<'s> = BTreeMap<(String, String, u32), Vec<&'s str>>;

/// Engines that a bridge follows, as its route `/workers` lists them.
#[derive(Debug, Deserialize)]
struct ListedEngines {
    engines: Vec<ListedEngine>,
}

#[derive(Debug, Deserialize)]
struct ListedEngine {
    namespace: Option<String>,
    instance: String,
    rank: u32,
}

/// Asks the bridges among the replicas for their engines, where there are two bridges or more.
pub(super) async fn followers(seen: &[ReplicaAnswer]) -> Followers<'_> {
    let is_bridge = |index: &Status| index.role == ProcessRole::Bridge;
    let bridges = seen
        .iter()
        .filter(|(_, index)| index.as_ref().is_ok_and(is_bridge));
    let bridges: Vec<_> = bridges.map(|(replica, _)| replica.admin()).collect();
    let mut followers = Followers::new();
    if bridges.len() < 2 {
        return followers;
    }
    let asked = bridges.into_iter().map(async |bridge| {
        let followed: Result<ListedEngines, Failure> = bridge.json("/workers?limit=10000").await;
        (bridge.authority(), followed)
    });
    for (place, followed) in join_all(asked).await {
        for engine in followed.map_or(Vec::new(), |followed| followed.engines) {
            if let Some(namespace) = engine.namespace {
                let worker = worker_of_instance(&engine.instance);
                let worker = worker.map_or(engine.instance, |worker| worker.to_string());
                let name = (namespace, worker, engine.rank);
                followers.entry(name).or_default().push(place);
            }
        }
    }
    followers
}

/// Returns the checks of the bridge in the process whose admin listener is at `place`: one for each source in which it
/// looks for engines, and one for all its engines and servers.
pub(super) fn judge(place: &str, engines: &EnginesReport) -> Vec<Check> {
    let sources = engines.sources.iter().take(LINES_MAX).map(judge_source);
    let mut checks: Vec<Check> = sources.collect();
    checks.push(judge_engines(place, engines));
    checks
}

fn judge_source(source: &SourceState) -> Check {
    let name = format!("source {}", source.source);
    match &source.last_error {
        Some(error) => {
            let mend = match source.refused {
                0 => "mend that: meanwhile engines that come and go are not seen",
                _ => "mend that: meanwhile nobody knows what these engines have, and answers do not say so",
            };
            Check::failed(&name, error, mend)
        }
        None => {
            let engines = counted(source.engines as u64, "engine", "engines");
            Check::fine(&name, format!("knows {engines}"))
        }
    }
}

/// Returns a check that warns if a server or an engine has an error. The check names the first server or engine with an
/// error, and counts the others.
fn judge_engines(place: &str, engines: &EnginesReport) -> Check {
    const NAME: &str = "engines";
    let Some(first) = engines.troubled.first() else {
        let count = counted(engines.publishers as u64, "publisher", "publishers");
        let idle = followed::idle(engines).map_or(String::new(), |idle| format!("; {idle}"));
        return Check::fine(NAME, format!("the bridge at {place} follows {count}{idle}"));
    };
    let (found, mend) = (
        format!("{}: {}", first.instance, first.error),
        followed::mend(first),
    );
    match engines.troubled_total.saturating_sub(1) {
        0 => Check::warning(NAME, found, mend),
        more => Check::warning(
            NAME,
            format!("{found}; and {more} more"),
            format!("{mend}; kvatlas status --admin {place} --json names more"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::report::CheckOutcome;
    use super::*;

    #[test]
    fn what_keeps_a_bridge_from_looking_is_a_failure() {
        let report = |value| serde_json::from_value::<EnginesReport>(value).unwrap();
        let outcomes = |report: &EnginesReport| -> Vec<CheckOutcome> {
            judge("b:1", report).iter().map(Check::outcome).collect()
        };
        let sound = report(json!({
            "publishers": 1, "idle": 1, "troubled": [], "troubled_total": 0,
            "sources": [{"source": "dns:a:1", "engines": 1, "last_error": null}],
        }));
        assert_eq!(outcomes(&sound), [CheckOutcome::Fine, CheckOutcome::Fine]);
        let found = judge("b:1", &sound).remove(1).found().to_owned();
        assert!(found.contains("follows 1 publisher; 1 engine is idle"), "{found}");
        let engine =
            |name: &str, error: &str| json!({"instance": name, "error": error, "is_followed": false});
        let troubled = report(json!({
            "publishers": 2, "idle": 0, "troubled": [engine("b", "no answer"), engine("a", "other_engine")],
            "troubled_total": 2,
            "sources": [{"source": "kubernetes:a=b", "engines": 0, "last_error": "no Role"}],
        }));
        assert_eq!(outcomes(&troubled), [CheckOutcome::Failed, CheckOutcome::Warning]);
        let checks = judge("b:1", &troubled);
        assert_eq!(checks[0].found(), "no Role");
        assert_eq!(checks[1].found(), "b: no answer; and 1 more");
    }
}
