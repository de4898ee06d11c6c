//! Keys and settings that the engine of a server is assumed to have until the server has told them.

use kvatlas_core::wire::Profile;
use kvatlas_process::registry::{EngineKey, GivenEngine, NewEngine, NewServer};

/// Returns the key of an engine. A server's engine has the key that it is assumed to have until the server has reported it.
pub(super) fn presumed_key(engine: &GivenEngine) -> EngineKey {
    match engine {
        GivenEngine::Publisher(engine) => engine.key.clone(),
        GivenEngine::Server(server) => key_of_server(server),
    }
}

/// Returns the engine of a server as it is assumed to be until the server has told how to follow it. The server's URL takes
/// the place of the sockets. `None` if the server's model or block size is not given.
pub(super) fn presumed(server: &NewServer, profile: Profile) -> Option<NewEngine> {
    let block_size = server.block_size.filter(|_| server.model.is_some())?;
    Some(NewEngine {
        key: key_of_server(server),
        endpoint: server.url.clone(),
        replay: None,
        format: server.format,
        block_size,
        topic: String::new(),
        beside: server.beside.clone(),
        groups: server.groups.clone(),
        profile,
        discovery: None,
        ttl: None,
    })
}

/// Returns the key that the engine of a server is assumed to have.
pub(super) fn key_of_server(server: &NewServer) -> EngineKey {
    let key = server.key();
    EngineKey {
        model: key.cache(),
        instance: key.instance,
        rank: 0,
    }
}
