//! Engines' servers at addresses that a source has found.

use kvatlas_core::wire::{Address, Labels, Profile, worker_of_instance};
use xxhash_rust::xxh3::xxh3_64;

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

/// Number of characters that stay of a name that is too long. The name fits, even if each of them takes two bytes.
const KEPT_CHARACTERS: usize = 23;

/// Returns `name`, or if it is too long for the name of an engine, its beginning and a hash of it.
fn fitting(name: String) -> String {
    match worker_of_instance(&name) {
        Ok(_) => name,
        Err(_) => {
            let kept: String = name.chars().take(KEPT_CHARACTERS).collect();
            format!("{kept}-{:016x}", xxh3_64(name.as_bytes()))
        }
    }
}

/// Makes the server at an address that a source has found. Requests for the engine go to that address, too. A `name` that
/// is too long is cut.
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
        instance: fitting(name),
        url: format!("{scheme}://{authority}"),
        discovered,
        profile: Profile {
            address: Address::new(&authority).ok(),
            labels: Labels::default(),
        },
        ..defaults.server()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_too_long_are_cut_and_stay_apart() {
        let pod = "ms-inference-scheduling-llm-d-modelservice-decode-8ff7fd5b58lw9";
        assert_eq!(fitting(pod.to_owned()), pod);
        let [first, second] = [0, 1].map(|rank| fitting(format!("{pod}-rank-{rank}")));
        assert!(first != second && first.starts_with("ms-inference-schedulin"));
        let dots = ".".repeat(253);
        for name in [first, second, fitting(dots)] {
            assert!(worker_of_instance(&name).is_ok(), "{name}");
        }
    }
}
