//! Checks of a bridge: whether it can look for engines, and whether it follows the engines that it knows.

use serde::Deserialize;

use super::report::Check;
use crate::cli::text::counted;

/// Maximum number of sources of engines (such as DNS or a file) that get a check of their own.
const LINES_MAX: usize = 16;

/// Answer of a bridge's route `/workers`: its engines, its servers, and the sources in which it looks for engines.
#[derive(Debug, Deserialize)]
pub(super) struct BridgeListing {
    engines: Vec<ListedInstance>,
    // An older bridge leaves these fields out.
    #[serde(default)]
    servers: Vec<ListedInstance>,
    #[serde(default)]
    sources: Vec<ListedSource>,
}

#[derive(Debug, Deserialize)]
struct ListedInstance {
    instance: String,
    last_error: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ListedSource {
    source: String,
    engines: u64,
    last_error: Option<String>,
}

impl BridgeListing {
    /// Path of the route that lists a bridge's engines, servers and sources.
    pub(super) const TARGET: &'static str = "/workers?limit=10000";
}

/// Returns the checks of the bridge at the address `place`: one for each source in which it looks for engines, and one
/// for all its engines and servers.
pub(super) fn judge(place: &str, followed: &BridgeListing) -> Vec<Check> {
    let sources = followed.sources.iter().take(LINES_MAX).map(judge_source);
    let mut checks: Vec<Check> = sources.collect();
    checks.push(judge_engines(place, followed));
    checks
}

fn judge_source(source: &ListedSource) -> Check {
    let name = format!("source {}", source.source);
    match &source.last_error {
        Some(error) => {
            let mend = "mend that: meanwhile engines that come and go are not seen";
            Check::failed(&name, error, mend)
        }
        None => Check::fine(
            &name,
            format!("knows {}", counted(source.engines, "engine", "engines")),
        ),
    }
}

/// Returns a check that warns if a server or an engine has an error. The check names the first server or engine with an
/// error, and counts the others.
fn judge_engines(place: &str, followed: &BridgeListing) -> Check {
    const NAME: &str = "engines";
    let BridgeListing { engines, servers, .. } = followed;
    let all = servers.iter().chain(engines);
    let mut troubled = all.filter_map(|one| Some((&one.instance, one.last_error.as_ref()?)));
    let Some((instance, error)) = troubled.next() else {
        let count = counted(engines.len() as u64, "publisher", "publishers");
        return Check::fine(NAME, format!("the bridge at {place} follows {count}"));
    };
    let found = match troubled.count() {
        0 => format!("{instance}: {error}"),
        more => format!("{instance}: {error}; and {more} more"),
    };
    let mend = format!(
        "http://{place}/workers names all of them; kvatlas explain KvatlasServersTroubled says what to do"
    );
    Check::warning(NAME, found, mend)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::report::CheckOutcome;
    use super::*;

    #[test]
    fn what_keeps_a_bridge_from_looking_is_a_failure() {
        let followed = |value| serde_json::from_value::<BridgeListing>(value).unwrap();
        let sound = followed(json!({
            "engines": [{"instance": "a", "last_error": null}],
            "sources": [{"source": "dns:a:1", "engines": 1, "last_error": null}],
        }));
        let outcomes = |followed: &BridgeListing| -> Vec<CheckOutcome> {
            judge("b:1", followed).iter().map(Check::outcome).collect()
        };
        assert_eq!(outcomes(&sound), [CheckOutcome::Fine, CheckOutcome::Fine]);
        let troubled = followed(json!({
            "engines": [{"instance": "a", "last_error": "other_engine"}],
            "servers": [{"instance": "b", "last_error": "no answer"}, {"instance": "c", "last_error": null}],
            "sources": [{"source": "kubernetes:a=b", "engines": 0, "last_error": "no Role"}],
        }));
        assert_eq!(outcomes(&troubled), [CheckOutcome::Failed, CheckOutcome::Warning]);
        let checks = judge("b:1", &troubled);
        assert_eq!(checks[0].found(), "no Role");
        assert_eq!(checks[1].found(), "b: no answer; and 1 more");
        // The answer of an older bridge has only `engines`.
        assert_eq!(outcomes(&followed(json!({"engines": []}))), [CheckOutcome::Fine]);
    }
}
