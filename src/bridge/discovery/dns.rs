//! Engines behind a DNS name, such as the name of a headless Service. Each address of the name is one engine. If SRV
//! records are asked for, each record is one engine, and also tells its port.
//!
//! An answer may lack an engine that still runs: name servers leave out pods that are briefly not ready, and do not
//! always return all records of a long list. So an engine counts as gone only after several answers in a row lack it.
//! If no answer comes, or the name server reports an error, the known engines stay.

use std::collections::BTreeMap;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};

use kvatlas_process::registry::{Discovered, GivenEngine, NewServer};

use super::super::http::authority;
use super::super::spec::EngineDefaults;
use super::found::{SERVER_PORT, ServerPort, server_at};
use super::reports::Reports;
use super::spec::DnsPlace;

/// Number of consecutive answers without an engine after which the engine counts as gone.
const MISSED_MAX: u32 = 3;

#[derive(Debug, thiserror::Error)]
enum DnsError {
    #[error("{0}")]
    Net(#[from] NetError),
    #[error("{target} has several ports: ask for one, such as dns:_http._tcp.NAME")]
    SeveralPorts { target: String },
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

/// Resolves the name of `place` every `interval`, for ever, and reports the engines.
pub(super) async fn run(place: &DnsPlace, defaults: &EngineDefaults, interval: Duration, reports: &Reports) {
    let mut known = KnownServers::default();
    let mut resolver = None;
    loop {
        match look(place, defaults, &mut resolver).await {
            Ok(found) => reports.know(known.answered(found)),
            Err(error) => reports.fail(&error),
        }
        tokio::time::sleep(interval).await;
    }
}

async fn look(
    place: &DnsPlace,
    defaults: &EngineDefaults,
    resolver: &mut Option<TokioResolver>,
) -> Result<Vec<NewServer>, DnsError> {
    let resolver = match resolver {
        Some(resolver) => resolver,
        None => resolver.insert(make_resolver(place)?),
    };
    match place.port {
        Some(port) => addresses(resolver, &place.name, port, defaults).await,
        None => match records(resolver, &place.name, defaults).await? {
            found if found.is_empty() => addresses(resolver, &place.name, SERVER_PORT, defaults).await,
            found => Ok(found),
        },
    }
}

/// Makes a resolver without a cache: for the name servers of this machine, with its search domains, or for the given name server.
fn make_resolver(place: &DnsPlace) -> Result<TokioResolver, NetError> {
    let mut builder = match place.server {
        None => TokioResolver::builder_tokio()?,
        Some(server) => {
            let mut connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
            for connection in &mut connections {
                connection.port = server.port();
            }
            let server = NameServerConfig::new(server.ip(), true, connections.into());
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        }
    };
    let options = builder.options_mut();
    options.cache_size = 0;
    // A pod with addresses of both families has one cache, and must be one engine.
    options.ip_strategy = LookupIpStrategy::Ipv4thenIpv6;
    builder.build()
}

/// Returns an empty list if the error means that the name has no records, or else the error.
fn or_nothing<T>(error: NetError) -> Result<Vec<T>, DnsError> {
    match error.is_no_records_found() {
        true => Ok(Vec::new()),
        false => Err(error.into()),
    }
}

/// Returns an engine for each address of `name`.
async fn addresses(
    resolver: &TokioResolver,
    name: &str,
    port: u16,
    defaults: &EngineDefaults,
) -> Result<Vec<NewServer>, DnsError> {
    let found = match resolver.lookup_ip(name).await {
        Ok(found) => found,
        Err(error) => return or_nothing(error),
    };
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
    Ok(found.iter().map(server).collect())
}

/// Returns an engine for each SRV record of `name`. The engine's name is the first label of the host name in the
/// record. If that host is a pod, the label is the pod's name.
async fn records(
    resolver: &TokioResolver,
    name: &str,
    defaults: &EngineDefaults,
) -> Result<Vec<NewServer>, DnsError> {
    let found = match resolver.lookup(name, RecordType::SRV).await {
        Ok(found) => found,
        Err(error) => return or_nothing(error),
    };
    let mut ports: BTreeMap<String, u16> = BTreeMap::new();
    for record in found.answers() {
        let RData::SRV(srv) = &record.data else {
            continue;
        };
        let target = srv.target.to_utf8();
        if ports
            .insert(target.clone(), srv.port)
            .is_some_and(|port| port != srv.port)
        {
            return Err(DnsError::SeveralPorts { target });
        }
    }
    let mut servers = Vec::with_capacity(ports.len());
    for (target, port) in ports {
        let addresses = match resolver.lookup_ip(target.as_str()).await {
            Ok(found) => found.iter().collect(),
            Err(error) => or_nothing(error)?,
        };
        let Some(address) = addresses.into_iter().next() else {
            continue;
        };
        let label = target.split('.').next().unwrap_or_default();
        let discovered = Discovered {
            // A new pod under the same name has another address, so the address tells pods apart.
            identity: address.to_string(),
            ..Discovered::default()
        };
        servers.push(server_at(
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
    Ok(servers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_gone_when_several_answers_in_a_row_lack_it() {
        let defaults = EngineDefaults::default();
        let port = ServerPort {
            number: 1,
            is_grpc: false,
        };
        let server = |name: &str| server_at(name.to_owned(), name, port, Discovered::default(), &defaults);
        let mut known = KnownServers::default();
        let mut answered = |names: &[&str]| -> Vec<String> {
            let engines = known.answered(names.iter().map(|name| server(name)).collect());
            engines
                .iter()
                .map(|engine| engine.instance().to_owned())
                .collect()
        };
        assert_eq!(answered(&["a", "b"]), ["a", "b"]);
        assert_eq!(answered(&["a"]), ["a", "b"]);
        assert_eq!(answered(&["a"]), ["a", "b"]);
        assert_eq!(answered(&["a", "b"]), ["a", "b"]);
        assert_eq!(answered(&["b"]), ["a", "b"]);
        assert_eq!(answered(&["b"]), ["a", "b"]);
        assert_eq!(answered(&["b"]), ["b"]);
    }
}
