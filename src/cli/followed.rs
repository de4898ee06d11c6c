//! Engines of a bridge that are not followed, in words for people.

use kvatlas_process::registry::{EnginesReport, TroubledEngine};

use super::text::counted;
use kvatlas_daemon::runbook::{AdviceTable, joined, named};

/// Advice on an engine that is not followed. Mostly its error says what to do.
const UNFOLLOWED: &str =
    "where that does not say what to do: kvatlas explain KvatlasServersTroubled names the usual causes";

/// Returns the advice on the error of an engine of a bridge. The error may begin with a word that the pages explain.
pub(super) fn mend(engine: &TroubledEngine) -> String {
    let word = engine.error.split(':').next().unwrap_or_default();
    let told = AdviceTable::BridgeWords.advice(word);
    let mend = told.unwrap_or_else(|| UNFOLLOWED.to_owned());
    named(&mend, ["NAMESPACE", &engine.instance, "RANK"])
}

/// Returns a text that names an engine that is not followed, its address and its error. Many errors do not name the
/// address.
fn describe(engine: &TroubledEngine) -> String {
    let TroubledEngine {
        instance,
        endpoint,
        error,
        ..
    } = engine;
    let at = match endpoint.is_empty() || error.contains(endpoint) {
        true => String::new(),
        false => format!(" at {endpoint}"),
    };
    format!("engine {instance}{at} is not followed: {error}")
}

/// Returns a line for each engine that is not followed and for each source that cannot be used. The lines are indented.
pub(super) fn render(engines: &EnginesReport) -> String {
    let mut text = String::new();
    let unfollowed = engines.troubled.iter().filter(|engine| !engine.is_followed);
    for engine in unfollowed.clone() {
        text += &format!("  {}\n", describe(engine));
    }
    let unnamed = engines.troubled_total.saturating_sub(engines.troubled.len());
    if unnamed > 0 {
        let more = counted(unnamed as u64, "more engine has", "more engines have");
        text += &format!("  {more} an error\n");
    }
    if !text.is_empty() {
        let mend = joined(unfollowed.map(mend));
        text += &format!("    mend: {mend}\n");
    }
    for source in &engines.sources {
        if let Some(error) = &source.last_error {
            text += &format!("  source {}: {error}\n", source.source);
        }
    }
    text + &idle(engines).map_or(String::new(), |idle| format!("  {idle}\n"))
}

/// Returns a sentence about the engines that have stored no block yet; `None` if there is no such engine.
pub(super) fn idle(engines: &EnginesReport) -> Option<String> {
    let waiting = counted(
        engines.idle as u64,
        "engine is idle: its first request tells",
        "engines are idle: their first requests tell",
    );
    (engines.idle > 0).then(|| format!("{waiting} the block size (--block-size does it at once)"))
}

/// Returns a sentence about the first engine that is not followed, or the first source that cannot be used; `None` if
/// there is neither.
pub(super) fn first(engines: &EnginesReport) -> Option<String> {
    let engine = engines.troubled.iter().find(|engine| !engine.is_followed);
    let engine = engine.map(describe);
    let of_sources = || {
        engines.sources.iter().find_map(|source| {
            let error = source.last_error.as_ref()?;
            Some(format!("source {}: {error}", source.source))
        })
    };
    engine.or_else(of_sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_that_are_not_followed_are_named() {
        let report = |text: &str| serde_json::from_str::<EnginesReport>(text).unwrap();
        let sound = report(r#"{"publishers":2,"idle":0,"troubled":[],"troubled_total":0,"sources":[]}"#);
        assert_eq!((render(&sound), first(&sound)), (String::new(), None));
        let idle = EnginesReport { idle: 1, ..sound };
        let said = render(&idle);
        assert!(
            said.contains("1 engine is idle: its first request tells"),
            "{said}"
        );
        assert_eq!(first(&idle), None);
        let troubled = report(
            r#"{"publishers":1,"idle":0,"troubled":[{"instance":"a","error":"lossy","is_followed":true},
               {"instance":"b","endpoint":"http://h:1","error":"no events","is_followed":false}],"troubled_total":5,
               "sources":[{"source":"dns:x","engines":0,"last_error":"no name"}]}"#,
        );
        let said = render(&troubled);
        assert!(
            said.contains("  engine b at http://h:1 is not followed: no events\n"),
            "{said}"
        );
        assert!(
            said.contains("  3 more engines have an error\n    mend: "),
            "{said}"
        );
        assert!(
            said.contains("  source dns:x: no name\n") && !said.contains("lossy"),
            "{said}"
        );
        let said = "engine b at http://h:1 is not followed: no events";
        assert_eq!(first(&troubled).unwrap(), said);
        let named = TroubledEngine {
            error: "http://h:1/index: 404".to_owned(),
            ..troubled.troubled[1].clone()
        };
        assert_eq!(
            describe(&named),
            "engine b is not followed: http://h:1/index: 404"
        );
    }
}
