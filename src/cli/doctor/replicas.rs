//! Checks of the replicas that were found on NATS, or named on the command line. Each replica should be ready, have
//! the right time, and know as many holders as the other replicas of its group.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::{join_all, try_join_all};
use kvatlas_client::unix_time_us;
use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::NamespaceName;
use kvatlas_daemon::runbook::{AdviceTable, mend_of};
use kvatlas_process::setup::Setup;

use super::bridges::{self, Followers};
use super::clock;
use super::holders::{self, Degraded};
use super::probe::Probe;
use super::report::Check;
use super::{namespaces, promises};
use crate::cli::Failure;
use crate::cli::admin_client::{AdminClient, ProcessRole};
use crate::cli::status::Status;
use crate::cli::text::counted;
use crate::cli::trouble::Trouble;

/// Pause between two counts of the holders that the daemons know.
const COUNTING_INTERVAL: Duration = Duration::from_millis(50);
/// A daemon, gateway or bridge of the deployment.
#[derive(Debug)]
pub(super) struct Replica {
    admin: AdminClient,
    /// Group of daemons that know the same workers: a shard, or empty without shards. `None` for a gateway or bridge
    /// that was found on NATS.
    group: Option<String>,
    /// Whether the process was found on NATS as a bridge, which follows engines and answers no queries.
    is_bridge: bool,
    /// Whether the command line names the process. If so, its check fails if the process does not answer. If not, the
    /// check only warns: for example, no daemon needs to run at the default address.
    is_expected: bool,
}

impl Replica {
    /// Whether the process was found on NATS as a bridge.
    pub(super) fn is_bridge(&self) -> bool {
        self.is_bridge
    }

    /// Returns the client of the replica's admin listener.
    pub(super) fn admin(&self) -> &AdminClient {
        &self.admin
    }

    /// Whether the replica has this admin listener.
    pub(super) fn is_at(&self, admin: &AdminClient) -> bool {
        self.admin.authority() == admin.authority()
    }

    /// Makes a replica that was found on NATS, from its admin listener, role and shard.
    pub(super) fn found(admin: AdminClient, role: &str, shard: Option<String>) -> Self {
        Self {
            admin,
            group: (role == ProcessRole::Daemon.as_str()).then(|| shard.unwrap_or_default()),
            is_bridge: role == ProcessRole::Bridge.as_str(),
            is_expected: false,
        }
    }

    /// Makes a replica from an admin listener. `is_expected` says whether the command line names it.
    pub(super) fn at(admin: AdminClient, is_expected: bool) -> Self {
        Self {
            admin,
            group: Some(String::new()),
            is_bridge: false,
            is_expected,
        }
    }
}

/// Replica, and the answer of its route `/index`.
pub(super) type ReplicaAnswer = (Replica, Result<Status, Failure>);

/// Asks each replica for its route `/index` once, so that all checks share the answers.
pub(super) async fn look(replicas: Vec<Replica>) -> Vec<ReplicaAnswer> {
    let asked = replicas.into_iter().map(async |replica| {
        let index = replica.admin.json("/index").await;
        (replica, index)
    });
    join_all(asked).await
}

/// Returns the needs of each daemon (message size, stream, disk space) with the daemon's address. Older daemons,
/// gateways and bridges do not tell their needs.
pub(super) fn setups(seen: &[ReplicaAnswer]) -> Vec<(String, Setup)> {
    let told = seen.iter().filter_map(|(replica, index)| {
        let index = index.as_ref().ok()?;
        let setup = index
            .setup
            .clone()
            .filter(|_| index.role == ProcessRole::Daemon)?;
        Some((replica.admin.authority().to_owned(), setup))
    });
    told.collect()
}

/// Returns the block size of a namespace, as the first daemon that knows the namespace tells it.
pub(super) fn block_size(seen: &[ReplicaAnswer], namespace: &NamespaceName) -> Option<BlockSize> {
    let known = seen.iter().filter_map(|(_, index)| index.as_ref().ok());
    known
        .flat_map(|index| &index.namespaces)
        .find(|known| known.namespace == namespace.as_str())
        .and_then(|known| known.hashed.as_ref()?.block_size())
}

/// Checks each replica: readiness, clock, holders that are not exact, and the number of holders. The daemons of a group
/// should know the same number of holders after at most `patience`. The doctor's own `probe` is no trouble.
pub(super) async fn check(seen: &[ReplicaAnswer], patience: Duration, probe: &Probe) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut groups: BTreeMap<&str, Vec<Indexed<'_>>> = BTreeMap::new();
    for (replica, index) in seen {
        let Replica { admin, group, .. } = replica;
        let name = format!("replica {}", admin.authority());
        match check_readiness(&name, admin, index).await {
            Err(failure) => {
                checks.push(check_absent(&name, replica.is_expected, &failure));
                checks.push(Check::skipped("clock", format!("{name} does not tell its time")));
            }
            Ok((index, check)) => {
                if let Some(group) = group.as_ref().filter(|_| index.role.keeps_an_index()) {
                    groups.entry(group).or_default().push((admin, index));
                }
                checks.push(check);
                checks.extend(check_troubles(admin.authority(), index));
                let engines = index.engines.iter();
                checks.extend(engines.flat_map(|engines| bridges::judge(admin.authority(), engines)));
                match index.role {
                    ProcessRole::Bridge => {}
                    ProcessRole::Daemon | ProcessRole::Gateway => checks.push(clock::check(admin).await),
                }
            }
        }
    }
    let daemons: Vec<Indexed<'_>> = groups.values().flatten().copied().collect();
    checks.extend(check_holders(&daemons, &bridges::followers(seen).await, probe).await);
    checks.extend(check_indexes(&daemons));
    for (group, replicas) in groups.into_iter().filter(|(_, replicas)| replicas.len() > 1) {
        let known: Vec<u64> = replicas.iter().map(|(_, index)| holders_in(index)).collect();
        // The first counts come from the answers that are already there. The daemons are asked again only if these
        // counts differ.
        let mut known = Some(known);
        let count = async || match known.take() {
            Some(known) => Ok(known),
            None => try_join_all(replicas.iter().map(|(admin, _)| holders_of(admin))).await,
        };
        checks.push(compare(group, count_until_alike(patience, count).await));
    }
    checks
}

/// Admin listener of a replica, and the answer of its route `/index`.
type Indexed<'s> = (&'s AdminClient, &'s Status);

/// Returns the checks of the holders that are not exact, from the answers of the daemons that have an index. Daemons
/// that do not tell their holders have a failed check each.
async fn check_holders(daemons: &[Indexed<'_>], followers: &Followers<'_>, probe: &Probe) -> Vec<Check> {
    let asked = daemons.iter().map(async |(daemon, _)| {
        let degraded: Result<Degraded, Failure> = daemon.json(Degraded::TARGET).await;
        (daemon.authority(), degraded)
    });
    let (mut known, mut checks) = (Vec::new(), Vec::new());
    for (place, degraded) in join_all(asked).await {
        match degraded {
            Ok(degraded) => known.push((place, degraded)),
            Err(failure) => checks.push(Check::failed(
                &format!("holders of {place}"),
                failure,
                "see the daemon's log, or run the doctor again: what this daemon doubts is not known",
            )),
        }
    }
    if !known.is_empty() {
        checks.extend(holders::judge(&known, followers, probe, unix_time_us()));
    }
    checks
}

/// Returns a failed check for each trouble that the process at `place` tells of itself.
fn check_troubles(place: &str, index: &Status) -> Vec<Check> {
    let told = index.troubles.told(unix_time_us()).into_iter();
    told.map(|Trouble { part, what, mend }| Check::failed(&format!("{part} of {place}"), what, mend))
        .collect()
}

/// Returns the checks that need only the daemons' answers of `/index`: publishers, promised blocks, hashing.
fn check_indexes(daemons: &[Indexed<'_>]) -> Vec<Check> {
    if daemons.is_empty() {
        return Vec::new();
    }
    let places = daemons.iter().map(|(admin, index)| (admin.authority(), *index));
    let known: Vec<(&str, &Status)> = places.collect();
    let mut checks = vec![namespaces::publishers(&known)];
    checks.extend(namespaces::refused(&known));
    checks.extend(promises::judge(&known));
    if daemons.len() > 1 {
        checks.push(namespaces::compare(&known));
    }
    checks
}

/// Calls `count` again and again until it returns only equal numbers, but at most for `patience`. Returns the last
/// numbers.
///
/// Replicas apply a change at different times. For example, one replica forgets the holder of the doctor's probe later
/// than another.
async fn count_until_alike<E>(
    patience: Duration,
    mut count: impl AsyncFnMut() -> Result<Vec<u64>, E>,
) -> Result<Vec<u64>, E> {
    let deadline = Instant::now() + patience;
    loop {
        let holders = count().await?;
        if holders.windows(2).all(|two| two[0] == two[1]) || Instant::now() >= deadline {
            return Ok(holders);
        }
        tokio::time::sleep(COUNTING_INTERVAL).await;
    }
}

/// Returns a check that warns if the daemons of a group know different numbers of holders.
fn compare(group: &str, holders: Result<Vec<u64>, Failure>) -> Check {
    let name = match group {
        "" => "replicas".to_owned(),
        shard => format!("replicas of shard {shard}"),
    };
    let holders = match holders {
        Ok(holders) => holders,
        Err(failure) => return Check::skipped(&name, failure),
    };
    match holders.as_slice() {
        [first, rest @ ..] if rest.iter().any(|known| known != first) => Check::warning(
            &name,
            format!("they know different numbers of holders: {holders:?}"),
            "ask again in a minute; if it stays so, one of them does not receive all events, or they are shards",
        ),
        known => {
            let first = known.first().copied().unwrap_or_default();
            let holders = counted(first, "holder", "holders");
            Check::fine(&name, format!("all {} know {holders}", known.len()))
        }
    }
}

/// Returns the check of a replica whose admin listener does not answer. The check fails if `is_expected`, that is, if
/// the replica must be there. Otherwise it warns.
fn check_absent(name: &str, is_expected: bool, failure: &Failure) -> Check {
    if is_expected {
        let mend = "start it, or see whether its admin.listen is there and this machine reaches it";
        return Check::failed(name, failure, mend);
    }
    let mend = "name the daemon's admin.listen with --admin, once for each replica";
    Check::warning(name, failure, mend)
}

/// Checks whether a replica is ready. Also returns the answer of its route `/index`.
async fn check_readiness<'s>(
    name: &str,
    replica: &AdminClient,
    index: &'s Result<Status, Failure>,
) -> Result<(&'s Status, Check), Failure> {
    let readiness = replica.readiness().await?;
    let index = index.as_ref().map_err(Failure::clone)?;
    if !readiness.ready {
        let found = format!("not ready: {}", readiness.reasons.join("; "));
        let mend = match readiness.awaited.as_deref() {
            Some(latch) => mend_of([latch].into_iter(), AdviceTable::Latches),
            None => "see its log".to_owned(),
        };
        return Ok((index, Check::failed(name, found, mend)));
    }
    let said = describe_ready(index.role, holders_in(index));
    Ok((index, Check::fine(name, said)))
}

fn describe_ready(role: ProcessRole, holders: u64) -> String {
    match role {
        ProcessRole::Daemon => format!("ready, knows {}", counted(holders, "holder", "holders")),
        ProcessRole::Gateway | ProcessRole::Bridge => {
            format!("ready; it is a {}, which keeps no index", role.as_str())
        }
    }
}

/// Returns the number of holders in a daemon's answer of `/index`.
fn holders_in(index: &Status) -> u64 {
    index.namespaces.iter().map(|namespace| namespace.holders).sum()
}

/// Asks a daemon how many holders it knows now.
async fn holders_of(daemon: &AdminClient) -> Result<u64, Failure> {
    Ok(holders_in(&daemon.json("/index").await?))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::report::{CheckOutcome, DoctorReport};
    use super::*;

    /// Reads an answer of `/index` without namespaces. `fields` are its other fields, each with a comma.
    fn status(fields: &str) -> Status {
        serde_json::from_str(&format!(r#"{{{fields}"namespaces":[]}}"#)).unwrap()
    }

    #[test]
    fn snapshots_that_are_not_written_or_not_sent_fail() {
        let checks = |index: &str| check_troubles("a:1", &status(index));
        assert_eq!(
            checks(r#""snapshot_error":null,"snapshot_upload_error":null,"#),
            []
        );
        assert_eq!(checks(""), [], "an older daemon does not tell");
        let failed = checks(r#""snapshot_error":"disk full","snapshot_upload_error":"no room","#);
        let told: Vec<_> = failed
            .iter()
            .map(|check| (check.outcome(), check.found()))
            .collect();
        let expected = [
            (CheckOutcome::Failed, "snapshots are not written: disk full"),
            (
                CheckOutcome::Failed,
                "snapshots are not sent to the Object Store: no room",
            ),
        ];
        assert_eq!(told, expected);
        assert!(
            failed[1].mend().contains("bucket") && failed[1].mend().contains("KvatlasSnapshotUploadsFail"),
            "{failed:?}"
        );
    }

    #[test]
    fn a_silent_server_fails() {
        let check = |index: &str| check_troubles("a:1", &status(index)).pop();
        assert_eq!(check(r#""broker_silent_us":null,"#), None);
        assert_eq!(check(""), None, "an older daemon does not tell");
        let failed = check(r#""broker_silent_us":5000000,"#).unwrap();
        assert_eq!(failed.outcome(), CheckOutcome::Failed);
        assert!(failed.found().contains("for 5.0s"), "{failed:?}");
        let failed = check(r#""broker_silent_us":5000000,"stream_trouble":"no leader","#).unwrap();
        assert!(failed.found().ends_with("for 5.0s: no leader"), "{failed:?}");
    }

    #[test]
    fn a_replica_that_somebody_named_must_answer() {
        let refused = Failure::unavailable("connection refused");
        let outcome = |is_expected| check_absent("replica a:1", is_expected, &refused).outcome();
        assert_eq!(outcome(true), CheckOutcome::Failed);
        assert_eq!(outcome(false), CheckOutcome::Warning);
    }

    #[test]
    fn whoever_keeps_no_index_is_no_replica() {
        assert_eq!(describe_ready(ProcessRole::Daemon, 1), "ready, knows 1 holder");
        assert!(describe_ready(ProcessRole::Bridge, 0).contains("it is a bridge"));
        assert!(describe_ready(ProcessRole::Gateway, 0).contains("it is a gateway"));
    }

    #[test]
    fn replicas_of_a_group_know_as_many_holders() {
        assert_eq!(compare("", Ok(vec![3, 3])).outcome(), CheckOutcome::Fine);
        assert_eq!(compare("0/2", Ok(vec![3, 4])).outcome(), CheckOutcome::Warning);
        assert_eq!(
            compare("", Err(Failure::usage("gone"))).outcome(),
            CheckOutcome::Skipped
        );
    }

    /// Serves `routes`, and returns a replica with this admin listener.
    async fn replica(routes: axum::Router) -> Replica {
        Replica::at(AdminClient::of_routes(routes).await, true)
    }

    /// Answer of a sound daemon without holders on every route.
    const SOUND: &str =
        r#"{"ready": true, "reasons": [], "namespaces": [], "holders": [], "holders_total": 0}"#;

    /// A test that two replicas with the same number of holders are each asked for `/index` only once.
    #[tokio::test]
    async fn each_is_asked_for_its_index_once() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let index = axum::routing::get(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            std::future::ready(SOUND)
        });
        let routes = axum::Router::new().route("/index", index);
        let routes = routes.fallback(move || std::future::ready(SOUND));
        let seen = look(vec![replica(routes.clone()).await, replica(routes).await]).await;
        assert!(setups(&seen).is_empty(), "an older daemon tells none");
        let checks = check(&seen, Duration::ZERO, &Probe::named("own", "own", 0)).await;
        assert!(checks.iter().any(|check| check.found().starts_with("all 2 know")));
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn the_advice_is_about_the_latch_that_the_others_wait_for() {
        let unready = r#"{"ready": false, "reasons": ["no JetStream"], "latches": {"caught_up": false,
            "events_subscribed": false}, "awaited": "events_subscribed", "namespaces": [], "holders": [], "holders_total": 0}"#;
        let routes = axum::Router::new().fallback(move || std::future::ready(unready));
        let seen = look(vec![replica(routes).await]).await;
        let checks = check(&seen, Duration::ZERO, &Probe::named("own", "own", 0)).await;
        let mend = checks[0].mend();
        assert!(mend.contains("the right to subscribe"), "{mend}");
        assert!(!mend.contains("replica") && !mend.contains("as for"), "{mend}");
    }

    #[tokio::test]
    async fn a_gateway_names_the_shards_that_it_misses() {
        let gateway = r#"{"ready": true, "reasons": [], "role": "gateway", "namespaces": [],
            "missing_shards": [{"shard": 1, "shards": 2, "since_us": 0}]}"#;
        let routes = axum::Router::new().fallback(move || std::future::ready(gateway));
        let seen = look(vec![replica(routes).await]).await;
        let mut report = DoctorReport::default();
        report.extend(check(&seen, Duration::ZERO, &Probe::named("own", "own", 0)).await);
        let (said, place) = (report.render(), seen[0].0.admin.authority());
        let line = format!("FAIL shards of {place}: shard 1/2 does not answer since ");
        assert!(said.contains(&line), "{said}");
    }

    #[tokio::test]
    async fn a_replica_that_cannot_tell_its_holders_hides_no_others() {
        let sound = axum::Router::new().fallback(|| std::future::ready(SOUND));
        let refused = axum::http::StatusCode::INTERNAL_SERVER_ERROR;
        let failing = sound.clone().route(
            "/workers",
            axum::routing::get(move || std::future::ready(refused)),
        );
        let doubted = r#"{"holders": [{"namespace": "m", "worker": "gpu-0", "rank": 0, "degraded": ["gap"]}], "holders_total": 1}"#;
        let doubting = sound.route(
            "/workers",
            axum::routing::get(move || std::future::ready(doubted)),
        );
        let seen = look(vec![replica(failing).await, replica(doubting).await]).await;
        let mut report = DoctorReport::default();
        report.extend(check(&seen, Duration::ZERO, &Probe::named("own", "own", 0)).await);
        let said = report.render();
        assert!(said.contains("FAIL holder gpu-0/0 of m: gap"), "{said}");
        let place = seen[0].0.admin.authority();
        assert!(said.contains(&format!("FAIL holders of {place}: ")), "{said}");
    }

    #[tokio::test]
    async fn bridges_that_contest_a_holder_are_named() {
        let daemon = r#"{"ready": true, "reasons": [], "namespaces": [], "holders_total": 2, "holders": [
            {"namespace": "m", "worker": "10_d0_d0_d1_c8000", "rank": 0, "degraded": ["contested"]},
            {"namespace": "m", "worker": "gpu-1", "rank": 0, "degraded": ["gap"]}]}"#;
        let bridge = r#"{"ready": true, "reasons": [], "role": "bridge", "namespaces": [],
            "engines": [{"namespace": "m", "instance": "10.0.0.1:8000", "rank": 0}, {"namespace": "m", "instance": "gpu-1", "rank": 0}]}"#;
        let index = r#"{"role": "bridge", "namespaces": []}"#;
        let served = |text: &'static str| axum::Router::new().fallback(move || std::future::ready(text));
        let bridge = || {
            let index = axum::routing::get(move || std::future::ready(index));
            served(bridge).route("/index", index)
        };
        let [one, other] = [replica(bridge()).await, replica(bridge()).await];
        let seen = look(vec![replica(served(daemon)).await, one, other]).await;
        let checks = check(&seen, Duration::ZERO, &Probe::named("own", "own", 0)).await;
        let places: Vec<&str> = seen[1..]
            .iter()
            .map(|(replica, _)| replica.admin.authority())
            .collect();
        let ending = format!("; followed by the bridges at {}", places.join(", "));
        let named = checks.iter().filter(|check| check.found().ends_with(&ending));
        let named: Vec<&Check> = named.collect();
        assert_eq!(named.len(), 1, "{checks:?}");
        assert!(
            named[0].found().starts_with("contested") && named[0].mend().contains("--lease"),
            "{named:?}"
        );
    }

    /// A test in which one replica has already forgotten the holder of the doctor's probe, and another has not yet.
    #[tokio::test]
    async fn a_holder_that_comes_or_goes_meanwhile_is_no_difference() {
        let reads = [[4, 3], [4, 3], [3, 3]];
        let mut next = reads.iter();
        let count = async || next.next().map(|read| read.to_vec()).ok_or("read too often");
        let counted = count_until_alike(Duration::from_secs(60), count).await;
        assert_eq!(counted, Ok(vec![3, 3]));
        let stays = async || Ok::<_, &str>(vec![4, 3]);
        assert_eq!(count_until_alike(Duration::ZERO, stays).await, Ok(vec![4, 3]));
    }
}
