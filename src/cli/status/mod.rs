//! `kvatlas status`: all namespaces of a daemon on one screen.

mod namespace;

use std::collections::BTreeMap;

use clap::Args;
use kvatlas_client::unix_time_us;
use kvatlas_core::wire::PROBE_NAME;
use kvatlas_process::registry::EnginesReport;
use kvatlas_process::setup::Setup;
use serde::{Deserialize, Deserializer, Serialize};

use super::admin_client::{AdminClient, AdminClientArguments, ProcessRole};
use super::doubted::DoubtedHolder;
use super::failure::Failure;
use super::followed;
use super::output::{print, print_json};
use super::table::TextTable;
use super::text::{counted, printable};
use super::trouble::ProcessTroubles;
pub(super) use namespace::NamespaceStatus;

pub(super) const EXAMPLES: &str = "Exit codes: 0 ready, every holder exact and every engine followed, 1 not so, 69 no daemon.\n\n\
    Examples:\n  \
    kvatlas status\n  \
    kvatlas status --admin 10.0.0.7:9464 --json\n  \
    until kvatlas status >/dev/null; do sleep 1; done";

/// Maximum number of pages of degraded holders that are read. A page has up to 10,000 holders.
const PAGES_MAX: usize = 100;

/// Daemon whose status is shown, and the form.
#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    #[command(flatten)]
    admin: AdminClientArguments,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// One page of the route `/workers`.
#[derive(Debug, Deserialize)]
struct HoldersPage {
    holders: Vec<DoubtedHolder>,
    next: Option<String>,
}

/// Status of a daemon: the answer of its route `/index`, its readiness, and its degraded holders.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) role: ProcessRole,
    #[serde(skip_deserializing)]
    ready: bool,
    /// Reasons why the daemon is not ready; empty if it is ready.
    #[serde(skip_deserializing)]
    reasons: Vec<String>,
    #[serde(default)]
    messages_waiting: u64,
    #[serde(flatten)]
    pub(super) troubles: ProcessTroubles,
    /// Needs of the daemon (message size, stream, disk space). An older daemon leaves them out.
    #[serde(default, skip_serializing)]
    pub(super) setup: Option<Setup>,
    /// Engines of the bridge in the process; `None` if there is no bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) engines: Option<EnginesReport>,
    #[serde(deserialize_with = "without_probes")]
    pub(super) namespaces: Vec<NamespaceStatus>,
}

/// Reads the namespaces, without the one that only probes of `kvatlas doctor` use. It concerns nobody.
fn without_probes<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Vec<NamespaceStatus>, D::Error> {
    let mut namespaces = Vec::<NamespaceStatus>::deserialize(deserializer)?;
    namespaces.retain(|status| status.namespace != PROBE_NAME);
    Ok(namespaces)
}

/// Prints the status. Fails unless all is well:
///
/// - The daemon is ready, and its NATS server is not silent.
/// - Every holder is exact, and requests find the blocks that exact answers promise.
/// - No batches are dropped, and no events come for a namespace that does not exist.
/// - Snapshots are written and sent.
/// - No shard is missing, and a gateway has answers.
/// - The bridge in the process, if there is one, follows its engines; idle ones count as followed.
pub(crate) async fn status(arguments: StatusArguments) -> Result<(), Failure> {
    let client = arguments.admin.client()?;
    let (status, now_us) = (Status::read(&client).await?, unix_time_us());
    if arguments.json {
        print_json(&status)?;
    } else {
        print(&printable(&status.render(client.authority(), now_us)))?;
    }
    status.verdict(now_us)
}

impl Status {
    async fn read(client: &AdminClient) -> Result<Self, Failure> {
        let readiness = client.readiness().await?;
        let mut status: Self = client.json("/index").await?;
        (status.ready, status.reasons) = (readiness.ready, readiness.reasons);
        let mut namespaces: BTreeMap<String, NamespaceStatus> = BTreeMap::new();
        for namespace in status.namespaces.drain(..) {
            namespaces.insert(namespace.namespace.clone(), namespace);
        }
        let mut target = "/workers?state=degraded&limit=10000".to_owned();
        let pages_max = if status.role.keeps_an_index() {
            PAGES_MAX
        } else {
            0
        };
        for _ in 0..pages_max {
            let page: HoldersPage = client.json(&target).await?;
            for holder in page.holders {
                if let Some(status) = namespaces.get_mut(&holder.namespace) {
                    status.note(holder);
                }
            }
            let Some(next) = page.next else { break };
            target = format!("/workers?state=degraded&limit=10000&after={next}");
        }
        status.namespaces.extend(namespaces.into_values());
        Ok(status)
    }

    fn totals(&self) -> (u64, u64) {
        let sum = |count: &dyn Fn(&NamespaceStatus) -> u64| self.namespaces.iter().map(count).sum();
        (sum(&|status| status.holders), sum(&|status| status.degraded))
    }

    fn verdict(&self, now_us: u64) -> Result<(), Failure> {
        let (holders, degraded) = self.totals();
        if !self.ready {
            let role = self.role.as_str();
            return Err(Failure::failed(format_args!("the {role} is not ready")));
        }
        if let Some(silence) = self.troubles.silence.told() {
            return Err(Failure::failed(silence));
        }
        if degraded > 0 {
            return Err(Failure::failed(format_args!(
                "{degraded} of {} degraded; kvatlas doctor says which, and what to do",
                counted(holders, "holder is", "holders are")
            )));
        }
        let mut namespaces = self.namespaces.iter();
        if let Some(status) = namespaces.find(|status| !status.refused.is_empty()) {
            return Err(Failure::failed(status.render_refused()));
        }
        if let Some(trouble) = self.troubles.told(now_us).first() {
            return Err(Failure::failed(&trouble.what));
        }
        let broken = self
            .namespaces
            .iter()
            .find_map(|status| status.broken_promises.first());
        if let Some(broken) = broken {
            return Err(Failure::failed(broken));
        }
        if let Some(unfollowed) = self.engines.as_ref().and_then(followed::first) {
            return Err(Failure::failed(unfollowed));
        }
        Ok(())
    }

    /// Returns the status as text for people, at most 60 columns wide if names are short.
    fn render(&self, authority: &str, now_us: u64) -> String {
        let ready = if self.ready { "ready" } else { "NOT READY" };
        let mut text = format!(
            "{authority}: {ready}, {} waiting\n",
            counted(self.messages_waiting, "message", "messages")
        );
        for reason in &self.reasons {
            text += &format!("  {reason}\n");
        }
        for trouble in self.troubles.told(now_us) {
            text += &format!("  {}\n    mend: {}\n", trouble.what, trouble.mend);
        }
        text += &self.engines.as_ref().map_or(String::new(), followed::render);
        if let Some(hint) = self.role.hint() {
            return text + hint;
        }
        if self.namespaces.is_empty() {
            return text + "no worker has been heard of\n";
        }
        let mut table = TextTable::new(&["NAMESPACE", ">HOLDERS", ">DEGRADED", ">BLOCKS", ">COPIES"]);
        for status in &self.namespaces {
            table.push(vec![
                status.namespace.clone(),
                status.holders.to_string(),
                status.degraded.to_string(),
                status.distinct_blocks.to_string(),
                status.held_blocks.to_string(),
            ]);
        }
        text += &table.render();
        for status in self.namespaces.iter().filter(|status| status.degraded > 0) {
            text += &status.render_degraded(now_us);
        }
        self.namespaces
            .iter()
            .for_each(|status| text += &status.render_notes());
        text
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{DegradedReason, DegradedReasons};
    use kvatlas_daemon::costs::Cost;

    use super::super::refused::PublisherRefusal;
    use super::*;

    /// Present time of the tests: a minute after the troubles began.
    const NOW_US: u64 = 1_800_000_060_000_000;

    fn wide() -> PublisherRefusal {
        PublisherRefusal {
            worker: "wide".to_owned(),
            reason: "other_settings".to_owned(),
            since_us: None,
        }
    }

    fn sound() -> Status {
        let namespace = |name: &str| {
            let sizes = r#""holders":1000,"distinct_blocks":123456,"held_blocks":12345678"#;
            serde_json::from_str(&format!(r#"{{"namespace":"{name}",{sizes}}}"#)).unwrap()
        };
        Status {
            role: ProcessRole::Daemon,
            ready: true,
            reasons: Vec::new(),
            messages_waiting: 1,
            troubles: ProcessTroubles::default(),
            setup: None,
            engines: None,
            namespaces: vec![namespace("llama"), namespace("qwen")],
        }
    }

    #[test]
    fn a_sound_daemon_is_a_line_a_namespace() {
        let status = sound();
        let expected = "\
127.0.0.1:9464: ready, 1 message waiting
NAMESPACE  HOLDERS  DEGRADED  BLOCKS    COPIES
llama         1000         0  123456  12345678
qwen          1000         0  123456  12345678
";
        assert_eq!(status.render("127.0.0.1:9464", 0), expected);
        assert_eq!(status.verdict(NOW_US), Ok(()));
    }

    /// Expects that the status shows `shown`, and fails with `said`.
    fn expect_failure(status: &Status, shown: &str, said: &str) {
        let text = status.render("a:1", NOW_US);
        assert!(text.contains(shown), "{text}");
        assert_eq!(status.verdict(NOW_US), Err(Failure::failed(said)));
    }

    #[test]
    fn what_keeps_no_index_says_so() {
        for (role, text) in [
            (r#""gateway""#, "a gateway"),
            (r#""bridge""#, "a bridge"),
            (r#""later""#, "no worker"),
        ] {
            let status = Status {
                role: serde_json::from_str(role).unwrap(),
                namespaces: Vec::new(),
                ..sound()
            };
            let said = status.render("a:1", 0);
            assert!(said.contains(text), "{said}");
        }
        // Older daemons do not say.
        let status: Status = serde_json::from_str(r#"{"namespaces":[],"messages_waiting":0}"#).unwrap();
        assert_eq!(status.role, ProcessRole::Daemon);
    }

    #[test]
    fn a_gateway_without_answers_is_not_well() {
        let outage = r#"{"shard_outage":{"since_us":1800000000000000,"error":"all are away"}}"#;
        let status = Status {
            role: ProcessRole::Gateway,
            troubles: serde_json::from_str(outage).unwrap(),
            namespaces: Vec::new(),
            ..sound()
        };
        let said = "no shard has an answer since 08:00:00 UTC (60 s): all are away";
        expect_failure(&status, &format!("  {said}\n    mend: start"), said);
    }

    #[test]
    fn a_shard_that_is_missing_is_named_and_fails() {
        let missing = r#"{"missing_shards":[{"shard":1,"shards":2,"since_us":1800000000000000}]}"#;
        let status = Status {
            role: ProcessRole::Gateway,
            troubles: serde_json::from_str(missing).unwrap(),
            namespaces: Vec::new(),
            ..sound()
        };
        let said = "shard 1/2 does not answer since 08:00:00 UTC (60 s)";
        expect_failure(&status, &format!("  {said}\n    mend: start"), said);
    }

    #[test]
    fn what_a_doctor_has_left_is_no_trouble() {
        let index = |name: &str| format!(r#"{{"namespaces":[{{"namespace":"{name}","holders":1}}]}}"#);
        let read = |name: &str| serde_json::from_str::<Status>(&index(name)).unwrap();
        assert!(read(PROBE_NAME).namespaces.is_empty());
        assert_eq!(read("llama").totals(), (1, 0));
    }

    #[test]
    fn a_silent_server_is_the_fault_and_not_the_lanes() {
        let index = r#"{"namespaces":[],"broker_silent_us":5000000}"#;
        let mut status: Status = serde_json::from_str(index).unwrap();
        status.ready = true;
        let said = "nothing has come from the NATS server for 5.0s, not even the daemon's own messages";
        let line = format!("  {said}\n    mend: see whether the NATS server runs");
        expect_failure(&status, &line, said);
        // The server runs and answers. Nobody leads the stream.
        let index = r#"{"namespaces":[],"broker_silent_us":5000000,"stream_trouble":"no leader"}"#;
        let mut status: Status = serde_json::from_str(index).unwrap();
        status.ready = true;
        let said = "nothing has been known of the events stream for 5.0s: no leader";
        let line = format!("  {said}\n    mend: correct what it names");
        expect_failure(&status, &line, said);
    }

    #[test]
    fn a_namespace_of_which_nothing_is_taken_is_named_and_fails() {
        let strays = r#"{"strays":[{"namespace":"new","worker":"gpu-0","reason":"undecodable","detail":"no map","messages":7,
            "since_us":1800000000000000}]}"#;
        let status = Status {
            troubles: serde_json::from_str(strays).unwrap(),
            ..sound()
        };
        let text = status.render("a:1", NOW_US);
        let line = "  nothing of namespace new is taken: 7 messages, the last of gpu-0 (undecodable) since 08:00:00 UTC (60 s): no map\n    mend: ";
        assert!(text.contains(line), "{text}");
        assert!(status.verdict(NOW_US).is_err());
    }

    #[test]
    fn an_engine_that_is_not_followed_is_told_and_fails() {
        let troubled = r#"[{"instance":"bad","error":"no events","is_followed":false}]"#;
        let engines =
            format!(r#"{{"publishers":0,"idle":0,"troubled":{troubled},"troubled_total":1,"sources":[]}}"#);
        let mut status: Status =
            serde_json::from_str(&format!(r#"{{"namespaces":[],"engines":{engines}}}"#)).unwrap();
        status.ready = true;
        let said = "engine bad is not followed: no events";
        expect_failure(&status, &format!("\n  {said}\n    mend: "), said);
    }

    #[test]
    fn snapshots_that_are_not_sent_are_told_and_fail() {
        let index = r#"{"namespaces":[],"snapshot_error":null,"snapshot_upload_error":"no room"}"#;
        let mut status: Status = serde_json::from_str(index).unwrap();
        status.ready = true;
        let said = "snapshots are not sent to the Object Store: no room";
        expect_failure(&status, &format!("\n  {said}\n    mend: see"), said);
    }

    #[test]
    fn what_is_not_right_is_named_and_fails() {
        let mut status = sound();
        let gap = DegradedReasons::of(DegradedReason::Gap);
        for number in 0..12 {
            status.namespaces[0].note(DoubtedHolder {
                namespace: "llama".to_owned(),
                worker: format!("gpu-{number}"),
                rank: 0,
                since_us: (number == 0).then_some(1_800_000_000_000_000),
                detail: (number == 0).then(|| "expected batch 2, got 5".to_owned()),
                cost: (number == 0).then(Cost::default),
                degraded: if number == 0 {
                    gap.with(DegradedReason::Stale)
                } else {
                    gap
                },
            });
        }
        let text = status.render("a:1", NOW_US);
        assert!(
            text.contains(
                "degraded in llama: gap 12, stale 1\n  gpu-0/0 gap, stale since 08:00:00 UTC (60 s)\n    expected batch 2, got 5\n    \
                 no queries lately\n  gpu-1/0 gap\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("  gpu-9/0 gap\n  and 2 more\n  mend gap: "),
            "{text}"
        );
        assert!(text.contains("\n  mend stale: "), "{text}");
        let failure = status.verdict(NOW_US).unwrap_err();
        assert!(
            failure.to_string().starts_with("12 of 2000 holders are degraded"),
            "{failure}"
        );
        let mut dropped = sound();
        dropped.namespaces[1].refused = vec![wide()];
        let failure = dropped.verdict(NOW_US).unwrap_err();
        assert!(
            failure
                .to_string()
                .starts_with("publishers in qwen: all batches are dropped of wide"),
            "{failure}"
        );
        dropped.namespaces[1].refused_total = 3;
        let text = dropped.namespaces[1].render_refused();
        assert!(text.ends_with("of wide (other_settings) and 2 more"), "{text}");
        status.namespaces[0].epochs_ahead = 1;
        status.namespaces[0].ahead = vec!["gpu-3/0".to_owned()];
        status.namespaces[1].refused = vec![wide()];
        status.namespaces[1].unsized_holders = 3;
        let text = status.render("a:1", NOW_US);
        assert!(
            text.ends_with(
                "clocks in llama: 1 holder has an epoch ahead of the daemon's clock: gpu-3/0\n\
                 publishers in qwen: all batches are dropped of wide (other_settings)\n    \
                 mend wide: see which engine, publisher or bridge (--block-size) of the namespace gives another size than the others; or set namespaces.NAME.block_size\n\
                 block size in qwen: guessed, 3 holders do not say it\n"
            ),
            "{text}"
        );
        status.ready = false;
        status.reasons.push("NATS: no".to_owned());
        assert!(
            status
                .render("a:1", 0)
                .starts_with("a:1: NOT READY, 1 message waiting\n  NATS: no\n")
        );
        assert_eq!(
            status.verdict(NOW_US),
            Err(Failure::failed("the daemon is not ready"))
        );
    }
}
