//! Questions to name servers. Each question is for one full name and one type of record.
//!
//! An answer without records and an error are told apart: "there are none", and "nobody knows". The resolver's own
//! walks over search domains and over both families of addresses do not do so. They go on after every error, and their
//! last answer counts. An answer without records then hides an earlier error. Here, the first error ends the walk.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::ProtoError;
use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::rdata::SRV;
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use hickory_resolver::system_conf::read_system_conf;

/// Error that keeps a question from being answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResolveError {
    #[error("the name servers of this machine are not known: {0}")]
    Servers(#[source] NetError),
    #[error("{text:?} is no name: {source}")]
    Text { text: String, source: ProtoError },
    #[error("no answer for {kind} of {name}: {source}")]
    Unanswered {
        name: Name,
        kind: RecordType,
        source: Box<NetError>,
    },
}

/// Name servers that can be asked, and the search domains of their names.
pub(super) struct NameServers {
    resolver: TokioResolver,
    /// Domains that are appended to a name which is not fully qualified, in the order in which they are tried.
    domains: Vec<Name>,
    /// Whether a name server knows one of the names since [`Self::take_known`], with or without records.
    is_known: AtomicBool,
}

impl NameServers {
    /// Returns the name servers of this machine, with its search domains.
    pub(super) fn of_machine() -> Result<Self, ResolveError> {
        let (config, options) = read_system_conf().map_err(ResolveError::Servers)?;
        Self::new(config, options)
    }

    /// Returns the name server at an address. It has no search domains.
    pub(super) fn at(server: SocketAddr) -> Result<Self, ResolveError> {
        Self::with_domains(server, Vec::new(), ResolverOpts::default())
    }

    /// Returns the name server at an address, with these search domains.
    pub(super) fn with_domains(
        server: SocketAddr,
        domains: Vec<Name>,
        options: ResolverOpts,
    ) -> Result<Self, ResolveError> {
        let mut connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
        for connection in &mut connections {
            connection.port = server.port();
        }
        let server = NameServerConfig::new(server.ip(), true, connections.into());
        Self::new(ResolverConfig::from_parts(None, domains, vec![server]), options)
    }

    fn new(config: ResolverConfig, mut options: ResolverOpts) -> Result<Self, ResolveError> {
        // Each look is to get the records of that moment.
        options.cache_size = 0;
        let domains = config.domain().into_iter().chain(config.search());
        let domains = domains.cloned().collect();
        let builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        let resolver = builder.with_options(options).build();
        Ok(Self {
            resolver: resolver.map_err(ResolveError::Servers)?,
            domains,
            is_known: AtomicBool::new(false),
        })
    }

    /// Returns whether any name that was asked for since the last call is known to a name server.
    pub(super) fn take_known(&self) -> bool {
        self.is_known.swap(false, Ordering::Relaxed)
    }

    /// Returns the addresses of the first full name that has some. Empty if none has any.
    pub(super) async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>, ResolveError> {
        if let Ok(address) = name.parse() {
            self.is_known.store(true, Ordering::Relaxed);
            return Ok(vec![address]);
        }
        for name in self.full_names(name)? {
            let found = self.addresses_of(&name).await?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Returns the addresses of a full name: its A records, or else its AAAA records. A pod with addresses of both
    /// families has one cache, and must be one engine.
    pub(super) async fn addresses_of(&self, name: &Name) -> Result<Vec<IpAddr>, ResolveError> {
        for kind in [RecordType::A, RecordType::AAAA] {
            let records = self.ask(name, kind).await?;
            let found: Vec<IpAddr> = records.iter().filter_map(RData::ip_addr).collect();
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Returns the SRV records of the first full name that has some. Empty if none has any.
    pub(super) async fn services(&self, name: &str) -> Result<Vec<SRV>, ResolveError> {
        for name in self.full_names(name)? {
            let records = self.ask(&name, RecordType::SRV).await?.into_iter();
            let service = |record| match record {
                RData::SRV(service) => Some(service),
                _ => None,
            };
            let found: Vec<SRV> = records.filter_map(service).collect();
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Asks for the records of one type that a full name has. Empty if the name servers say that there are none.
    async fn ask(&self, name: &Name, kind: RecordType) -> Result<Vec<RData>, ResolveError> {
        let are_none = |code| matches!(code, ResponseCode::NoError | ResponseCode::NXDomain);
        match self.resolver.lookup(name.clone(), kind).await {
            Ok(found) => {
                self.is_known.store(true, Ordering::Relaxed);
                Ok(found.answers().iter().map(|record| record.data.clone()).collect())
            }
            Err(NetError::Dns(DnsError::NoRecordsFound(nothing))) if are_none(nothing.response_code) => {
                let is_known = nothing.response_code != ResponseCode::NXDomain;
                self.is_known.fetch_or(is_known, Ordering::Relaxed);
                Ok(Vec::new())
            }
            Err(source) => Err(ResolveError::Unanswered {
                name: name.clone(),
                kind,
                source: Box::new(source),
            }),
        }
    }

    /// Returns the full names for which a name may stand, in the order in which they are tried. If the name has as many
    /// dots as `ndots` says, it is tried itself before the search domains, or else after them.
    fn full_names(&self, text: &str) -> Result<Vec<Name>, ResolveError> {
        let mut name = Name::from_utf8(text).map_err(|source| ResolveError::Text {
            text: text.to_owned(),
            source,
        })?;
        if name.is_fqdn() {
            return Ok(vec![name]);
        }
        // A name that would be too long is left out.
        let in_domain = |domain| name.clone().append_domain(domain).ok();
        let mut names: Vec<Name> = self.domains.iter().filter_map(in_domain).collect();
        let has_dots = usize::from(name.num_labels()) > self.resolver.options().ndots;
        let is_first = has_dots || name.is_localhost();
        name.set_fqdn(true);
        names.insert(if is_first { 0 } else { names.len() }, name);
        Ok(names)
    }
}
