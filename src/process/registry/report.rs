//! Report on the engines of a bridge, for `/index` of its process. The doctor and the status read it.

use serde::{Deserialize, Serialize};

use super::EngineRegistry;

/// Maximum number of engines with an error that a report names.
const NAMED_MAX: usize = 16;

/// A source of engines (such as DNS or a file), as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceState {
    /// The source, as it was given.
    pub source: String,
    /// Number of engines that the source knows.
    pub engines: usize,
    /// Number of these engines that the bridge does not follow.
    #[serde(default)]
    pub refused: usize,
    /// Error that keeps the source from looking for engines, or the bridge from following some of them; `None` if all
    /// engines are found and followed.
    pub last_error: Option<String>,
}

/// An engine with an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TroubledEngine {
    /// Name of the instance, as gateways know it.
    pub instance: String,
    /// Address of the server or of the publisher; empty if the bridge is of an earlier release.
    #[serde(default)]
    pub endpoint: String,
    /// Error in words.
    pub error: String,
    /// Whether the engine is followed in spite of the error.
    pub is_followed: bool,
}

/// Report on the engines of a bridge: how many it follows, and what keeps it from following others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnginesReport {
    /// Number of publishers that the bridge follows.
    pub publishers: usize,
    /// Number of servers whose engine has stored no block yet. The bridge follows such an engine from its first block
    /// on, which tells the block size.
    pub idle: usize,
    /// Servers and publishers with an error, servers first. At most 16 are named.
    pub troubled: Vec<TroubledEngine>,
    /// Number of all servers and publishers with an error.
    pub troubled_total: usize,
    /// Sources in which the bridge looks for engines.
    pub sources: Vec<SourceState>,
}

impl EnginesReport {
    /// Returns the report on the engines of `registry`.
    pub fn of(registry: &dyn EngineRegistry) -> Self {
        let (servers, engines) = (registry.servers(), registry.engines());
        let idle = servers.iter().filter(|state| state.is_idle).count();
        let publishers = engines.iter().filter(|state| state.status.is_followed()).count();
        let of_servers = servers.into_iter().filter(|state| !state.is_idle).map(|state| {
            let is_followed = !state.engines.is_empty();
            let server = state.server;
            (server.instance, server.url, state.last_error, is_followed)
        });
        let of_engines = engines.into_iter().map(|state| {
            let (engine, is_followed) = (state.engine, state.status.is_followed());
            (
                engine.key.instance,
                engine.endpoint,
                state.last_error,
                is_followed,
            )
        });
        let mut troubled: Vec<TroubledEngine> = of_servers
            .chain(of_engines)
            .filter_map(|(instance, endpoint, error, is_followed)| {
                Some(TroubledEngine {
                    instance,
                    endpoint,
                    error: error?,
                    is_followed,
                })
            })
            .collect();
        let troubled_total = troubled.len();
        troubled.truncate(NAMED_MAX);
        Self {
            publishers,
            idle,
            troubled,
            troubled_total,
            sources: registry.sources(),
        }
    }
}
