//! Search for the replicas: daemons, gateways and bridges answer on NATS as services.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_client::Refusal;

use super::broker::DoctorConnection;
use super::replicas::Replica;
use super::report::Check;
use crate::cli::admin_client::AdminClientArguments;
use crate::cli::presence::{PING, PresentProcess};

/// Longest wait on NATS for the answer of one more process, after the previous answer.
const FINDING_PATIENCE: Duration = Duration::from_millis(500);
/// Maximum number of daemons, gateways and bridges that are found.
const REPLICAS_MAX: usize = 256;

/// Finds the daemons, gateways and bridges that answer as services on NATS. Also returns a skipped check for each
/// process whose admin listener this machine cannot reach, and a warning if the server refuses the search.
pub(super) async fn find(
    connected: &DoctorConnection,
    prefix: &str,
    timeout: Duration,
) -> (Vec<Replica>, Vec<Check>) {
    let mut found = match connected.unless_refused(&[PING], ask_all(connected)).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return (Vec::new(), vec![Check::skipped("replicas", error)]),
        Err(refusal) => return (Vec::new(), vec![check_unfound(&refusal)]),
    };
    found.retain(|process| process.subjects_prefix == prefix);
    // The bridges come last.
    found.sort_by_cached_key(|process| (process.is_bridge(), process.instance.clone()));
    let own_host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let (mut replicas, mut checks): (Vec<Replica>, _) = (Vec::new(), Vec::new());
    for process in found {
        match reached_at(&process, &own_host) {
            Ok(address) => match AdminClientArguments::at(Some(address), timeout).client() {
                // The bridge of `kvatlas up` has the listener of the daemon in its process.
                Ok(admin) if process.is_bridge() && replicas.iter().any(|known| known.is_at(&admin)) => {}
                Ok(admin) => replicas.push(Replica::found(admin, &process.role, process.shard)),
                Err(failure) => checks.push(Check::skipped(&process.instance, failure)),
            },
            Err(why) => checks.push(Check::skipped(&format!("replica {}", process.instance), why)),
        }
    }
    (replicas, checks)
}

/// Returns the check that warns if the server refuses the search for replicas.
fn check_unfound(refusal: &Refusal) -> Check {
    Check::warning(
        "replicas",
        format!("{refusal}: so no daemons were looked for"),
        format!(
            "name the admin listener of each daemon with --admin; or allow {PING}, and the inbox of the credentials"
        ),
    )
}

/// Returns the address at which the machine `own_host` reaches the admin listener of a process, or the reason why it
/// cannot.
fn reached_at(process: &PresentProcess, own_host: &str) -> Result<String, &'static str> {
    let Some(address) = &process.admin else {
        return Err("it has no admin listener (admin.listen)");
    };
    let (_, place) = process.instance.rsplit_once('@').unwrap_or_default();
    let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
    // The process may be told to be at a host name (admin.advertise).
    let Ok(listens) = address.parse::<SocketAddr>() else {
        return Ok(address.clone());
    };
    if host == own_host || !(listens.ip().is_loopback() || listens.ip().is_unspecified()) {
        return Ok(address.clone());
    }
    if listens.ip().is_unspecified() {
        return Ok(format!("{host}:{}", listens.port()));
    }
    Err("its admin listener is on the loopback address of its machine; run the doctor there")
}

async fn ask_all(connected: &DoctorConnection) -> Result<Vec<PresentProcess>, async_nats::Error> {
    let nats = &connected.nats;
    let inbox = nats.new_inbox();
    let mut answers = nats.subscribe(inbox.clone()).await?;
    nats.publish_with_reply(PING, inbox, bytes::Bytes::new()).await?;
    let mut found = Vec::new();
    while let Ok(Some(answer)) = tokio::time::timeout(FINDING_PATIENCE, answers.next()).await {
        found.extend(PresentProcess::decode(&answer.payload));
        if found.len() >= REPLICAS_MAX {
            break;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_reached_from_where_it_listens() {
        let reached = |instance: &str, admin: Option<&str>| {
            let process = PresentProcess {
                instance: instance.to_owned(),
                subjects_prefix: "kvatlas".to_owned(),
                role: "daemon".to_owned(),
                shard: None,
                admin: admin.map(str::to_owned),
            };
            reached_at(&process, "here").ok()
        };
        let at = |address: &str| Some(address.to_owned());
        assert_eq!(
            reached("kvatlas@here:7", Some("127.0.0.1:9464")),
            at("127.0.0.1:9464")
        );
        assert_eq!(reached("kvatlas@there:7", Some("127.0.0.1:9464")), None);
        assert_eq!(
            reached("kvatlas@there:7", Some("10.0.0.7:9464")),
            at("10.0.0.7:9464")
        );
        assert_eq!(reached("kvatlas@there:7", Some("0.0.0.0:9464")), at("there:9464"));
        assert_eq!(reached("kvatlas@there:7", Some("[::]:1")), at("there:1"));
        assert_eq!(reached("kvatlas@here:7", None), None);
        for host in ["here", "there"] {
            let named = reached(&format!("kvatlas@{host}:7"), Some("vm.local:9464"));
            assert_eq!(named, at("vm.local:9464"));
        }
    }
}
