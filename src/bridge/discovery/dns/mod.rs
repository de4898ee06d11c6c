//! Engines behind a DNS name, such as the name of a headless Service. Each address of the name is one engine. If SRV
//! records are asked for, each record is one engine, and also tells its port.
//!
//! An answer may lack an engine that still runs: name servers leave out pods that are briefly not ready, and do not
//! always return all records of a long list. So an engine counts as gone only after several answers in a row lack it.
//! If no answer comes, or the name server reports an error, the known engines stay. This holds for each single question
//! of a look: one without an answer makes the look fail.

mod servers;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use hickory_resolver::proto::rr::Name;

use kvatlas_process::registry::{Discovered, GivenEngine, NewServer};

use super::super::http::authority;
use super::super::spec::EngineDefaults;
use super::found::{SERVER_PORT, ServerPort, server_at};
use super::reports::Reports;
use super::spec::DnsPlace;
use servers::{NameServers, ResolveError};

/// Number of consecutive answers without an engine after which the engine counts as gone.
const MISSED_MAX: u32 = 3;

#[derive(Debug, thiserror::Error)]
enum DnsError {
    #[error(transparent)]
    Question(#[from] ResolveError),
    #[error("{target} has several ports: ask for one, such as dns:_http._tcp.NAME")]
    SeveralPorts { target: Name },
}

/// Engines behind a DNS name, each with the number of consecutive answers that have lacked it.
#[derive(Debug, Default)]
struct KnownServers(BTreeMap<String, (NewServer, u32)>);

impl KnownServers {
    /// Takes note of an answer of DNS, and returns all engines that are known.
    fn answered(&mut self, found: Vec<NewServer>) -> Vec<GivenEngine> {
        for (_, missed) in self.0.values_mut() {
            *missed += 1;
        }
        for server in found {
            self.0.insert(server.instance.clone(), (server, 0));
        }
        self.0.retain(|_, (_, missed)| *missed < MISSED_MAX);
        let servers = self.0.values().map(|(server, _)| server.clone());
        servers.map(GivenEngine::Server).collect()
    }
}

/// A name of DNS whose engines are looked for, again and again.
struct DnsSource<'a> {
    place: &'a DnsPlace,
    defaults: &'a EngineDefaults,
    /// Name servers that are asked; `None` until they are known.
    servers: Option<NameServers>,
    known: KnownServers,
}

/// Resolves the name of `place` every `interval`, for ever, and reports the engines.
pub(super) async fn run(place: &DnsPlace, defaults: &EngineDefaults, interval: Duration, reports: &Reports) {
    let mut source = DnsSource {
        place,
        defaults,
        servers: None,
        known: KnownServers::default(),
    };
    loop {
        source.look_once(reports).await;
        tokio::time::sleep(interval).await;
    }
}

impl DnsSource<'_> {
    /// Looks once, and reports the engines or the error. A name that no name server knows has no engines. So it is with a
    /// headless Service of Kubernetes while no pod of it is ready.
    async fn look_once(&mut self, reports: &Reports) {
        let found = self.look().await;
        let is_known = self.servers.as_ref().is_some_and(NameServers::take_known);
        match found {
            Ok(found) => {
                let engines = self.known.answered(found);
                let name = &self.place.name;
                let note = || {
                    format!("no name server knows {name}: none of its engines is ready, or it is misspelled")
                };
                reports.know_noting(engines, (!is_known).then(note));
            }
            Err(error) => reports.fail(&error),
        }
    }

    async fn look(&mut self) -> Result<Vec<NewServer>, DnsError> {
        let (name, defaults) = (&self.place.name, self.defaults);
        let servers = match &self.servers {
            Some(servers) => servers,
            None => self.servers.insert(match self.place.server {
                None => NameServers::of_machine()?,
                Some(address) => NameServers::at(address)?,
            }),
        };
        match self.place.port {
            Some(port) => addresses(servers, name, port, defaults).await,
            None => match records(servers, name, defaults).await? {
                found if found.is_empty() => addresses(servers, name, SERVER_PORT, defaults).await,
                found => Ok(found),
            },
        }
    }
}

/// Returns an engine for each address of `name`.
async fn addresses(
    servers: &NameServers,
    name: &str,
    port: u16,
    defaults: &EngineDefaults,
) -> Result<Vec<NewServer>, DnsError> {
    let found = servers.addresses(name).await?;
    let server = |address: std::net::IpAddr| {
        let host = address.to_string();
        server_at(
            authority(&host, port),
            &host,
            ServerPort {
                number: port,
                is_grpc: false,
            },
            Discovered::default(),
            defaults,
        )
    };
    Ok(found.into_iter().map(server).collect())
}

/// Returns an engine for each SRV record of `name`. The engine's name is the first label of the host name in the
/// record. If that host is a pod, the label is the pod's name.
async fn records(
    servers: &NameServers,
    name: &str,
    defaults: &EngineDefaults,
) -> Result<Vec<NewServer>, DnsError> {
    let mut ports: BTreeMap<Name, u16> = BTreeMap::new();
    for service in servers.services(name).await? {
        let before = ports.insert(service.target.clone(), service.port);
        if before.is_some_and(|port| port != service.port) {
            return Err(DnsError::SeveralPorts {
                target: service.target,
            });
        }
    }
    let mut engines = Vec::with_capacity(ports.len());
    for (target, port) in ports {
        let Some(address) = servers.addresses_of(&target).await?.into_iter().next() else {
            continue;
        };
        let target = target.to_utf8();
        let label = target.split('.').next().unwrap_or_default();
        let discovered = Discovered {
            // A new pod under the same name has another address, so the address tells pods apart.
            identity: address.to_string(),
            ..Discovered::default()
        };
        engines.push(server_at(
            label.to_owned(),
            &address.to_string(),
            ServerPort {
                number: port,
                // The service in the name of the SRV records tells the protocol.
                is_grpc: name.starts_with("_grpc."),
            },
            discovered,
            defaults,
        ));
    }
    Ok(engines)
}
