//! Engines' servers at addresses that a source has found.

use kvatlas_core::wire::{Address, Labels, Profile};

use kvatlas_process::registry::{Discovered, NewServer};

use super::super::http::authority;
use super::super::spec::EngineDefaults;

/// Default port of an engine's server: the usual port of vLLM.
pub(super) const SERVER_PORT: u16 = 8000;

/// Port of an engine's server. At this port, the bridge asks the server for its publishers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ServerPort {
    pub(super) number: u16,
    /// Whether the server is asked over gRPC instead of HTTP.
    pub(super) is_grpc: bool,
}

/// Makes the server at an address that a source has found. Requests for the engine go to that address, too.
pub(super) fn server_at(
    name: String,
    host: &str,
    port: ServerPort,
    discovered: Discovered,
    defaults: &EngineDefaults,
) -> NewServer {
    let authority = authority(host, port.number);
    let scheme = if port.is_grpc { "grpc" } else { "http" };
    NewServer {
        instance: name,
        url: format!("{scheme}://{authority}"),
        discovered,
        profile: Profile {
            address: Address::new(&authority).ok(),
            labels: Labels::default(),
        },
        ..defaults.server()
    }
}
