//! Checks of the settings of engines and servers, made before the bridge follows them.

use kvatlas_core::hash::{BlockSize, SchemeAlgorithm};
use kvatlas_core::index::{NamespaceSettings, Namespaces};
use kvatlas_core::wire::{ModelKey, worker_of_instance};
use kvatlas_engines::Format;

use kvatlas_process::registry::{Connection, NewEngine, NewServer, RegisterRefusal, SizeOf};

use super::http::ServerAddress;
use super::zmtp::split_endpoint;
use super::{grpc, tensorrt};

/// Checks the settings of an engine's server. Returns the address at which the bridge asks the server.
pub(super) fn check_server(server: &NewServer) -> Result<ServerAddress, RegisterRefusal> {
    let invalid = |text: String| Err(RegisterRefusal::Invalid(text));
    if let Err(error) = worker_of_instance(&server.instance) {
        return invalid(format!("instance {:?}: {error}", server.instance));
    }
    if let Some(model) = &server.model
        && let Err(error) = ModelKey::of_tenant(model, &server.tenant)
            .speaking(server.scheme.clone())
            .namespace()
    {
        return invalid(format!("model {model:?}: {error}; serve it under a shorter name"));
    }
    if let Some(Err(error)) = server.block_size.map(BlockSize::new) {
        return invalid(format!("block_size: {error}"));
    }
    if server.is_grpc()
        && let Err(error) = grpc::parse_endpoint(&server.url)
    {
        return invalid(format!("endpoint: {error}"));
    }
    match ServerAddress::of_server(&server.url).filter(|address| address.path == "/") {
        Some(address) => Ok(address),
        None => invalid(format!(
            "endpoint {:?} is not http://HOST:PORT or https://HOST:PORT",
            server.url
        )),
    }
}

/// Refuses an engine whose block size differs from the namespace's block size, because queries by tokens would not find
/// the engine's blocks. A namespace that is not configured has the block size of its present holders. Holders of the
/// same engine do not count, because they belong to an earlier process, which has ended.
pub(super) fn check_block_size(engine: &NewEngine, namespaces: &Namespaces) -> Result<(), RegisterRefusal> {
    let Ok(name) = engine.key.model.namespace() else {
        return Ok(());
    };
    let told = BlockSize::new(engine.block_size).ok();
    let check = |settings: &NamespaceSettings, whose| match settings.takes(told) {
        true => Ok(()),
        false => Err(RegisterRefusal::OtherBlockSize {
            asked: engine.block_size,
            in_force: settings.block_size.as_u32(),
            whose,
        }),
    };
    let Some(known) = namespaces.get(&name).filter(|known| !known.is_free()) else {
        return check(&namespaces.settings_for(told), SizeOf::Configuration(name));
    };
    let settings = known.indexer.settings();
    if known.is_configured {
        return check(settings, SizeOf::Configuration(name));
    }
    let own = worker_of_instance(&engine.key.instance).ok();
    let holders = known.indexer.holders();
    let others = holders.iter().map(|holder| &holder.id);
    match others.filter(|other| Some(&other.worker) != own.as_ref()).min() {
        Some(other) => check(settings, SizeOf::Holder(other.clone())),
        None => Ok(()),
    }
}

/// Checks that an engine can be followed with the settings that it was given.
///
/// # Errors
///
/// [`RegisterRefusal::Invalid`] says what to change.
pub(super) fn check_engine(engine: &NewEngine) -> Result<(), RegisterRefusal> {
    let invalid = |text: String| Err(RegisterRefusal::Invalid(text));
    if let Err(error) = engine.key.model.namespace() {
        return invalid(format!(
            "model {:?}: {error}; serve it under a shorter name",
            engine.key.model.model
        ));
    }
    if let Err(error) = worker_of_instance(&engine.key.instance) {
        return invalid(format!("instance {:?}: {error}", engine.key.instance));
    }
    if let Err(error) = BlockSize::new(engine.block_size) {
        return invalid(format!("block_size: {error}"));
    }
    if engine.key.model.scheme.is_some() && matches!(engine.format, Format::Dynamo | Format::Mooncake) {
        return invalid(format!(
            "scheme: {} tells no tokens, from which hashes of a scheme are computed",
            engine.format.as_str()
        ));
    }
    let scheme = engine.key.model.scheme.as_ref().map(|scheme| scheme.algorithm);
    // Only one kind of engine gives blocks the names that each of these schemes requires.
    let whose = match scheme {
        Some(SchemeAlgorithm::Sglang) => Some(Format::Sglang),
        Some(SchemeAlgorithm::VllmSha256Cbor) => Some(Format::Vllm),
        _ => None,
    };
    if let (Some(scheme), Some(whose)) = (scheme, whose)
        && engine.format != whose
    {
        return invalid(format!(
            "scheme: {} takes the names of {}, and {} has others",
            scheme.as_str(),
            whose.as_str(),
            engine.format.as_str()
        ));
    }
    if engine.replay.is_some() && engine.is_source() {
        return invalid(format!(
            "{} over {} has no replay socket",
            engine.format.as_str(),
            scheme_of(&engine.endpoint)
        ));
    }
    if engine.profile.address.is_some() && engine.format == Format::Dynamo {
        return invalid(
            "an event plane tells of many workers, which have no address together; leave address out"
                .to_owned(),
        );
    }
    if engine.discovery.is_some() && engine.format != Format::Dynamo {
        return invalid("discovery is for dynamo only; leave it out".to_owned());
    }
    match engine.connection() {
        Connection::Stream => check_grpc(engine),
        Connection::Drain => match tensorrt::parse_endpoint(&engine.endpoint) {
            Ok(_) => Ok(()),
            Err(error) => invalid(format!("endpoint: {error}")),
        },
        Connection::Plane if engine.endpoint.starts_with("nats://") => check_subject(engine),
        Connection::Sockets if engine.format == Format::TokenSpeed => {
            invalid("tokenspeed hands on events over gRPC only: grpc://HOST:PORT".to_owned())
        }
        Connection::Plane | Connection::Sockets => {
            let mut endpoints = std::iter::once(&engine.endpoint).chain(&engine.replay);
            endpoints.try_for_each(|endpoint| check_endpoint(endpoint))
        }
    }
}

/// Checks that several bridges can follow an engine at the same time, so that each bridge gets all of the engine's
/// events. A server that removes its events when it answers is refused.
pub(super) fn check_shared(engine: &NewEngine) -> Result<(), RegisterRefusal> {
    match engine.connection() {
        Connection::Drain => Err(RegisterRefusal::Drained {
            key: Box::new(engine.key.clone()),
        }),
        Connection::Sockets | Connection::Plane | Connection::Stream => Ok(()),
    }
}

/// Returns the scheme of an endpoint, which stands before `://`; `tcp` if there is none.
fn scheme_of(endpoint: &str) -> &str {
    endpoint.split_once("://").map_or("tcp", |(scheme, _)| scheme)
}

/// Checks the settings of an engine whose server sends events over gRPC.
fn check_grpc(engine: &NewEngine) -> Result<(), RegisterRefusal> {
    let invalid = |text: String| Err(RegisterRefusal::Invalid(text));
    if grpc::method_path(engine.format).is_none() {
        return invalid(format!("{} is not served over gRPC", engine.format.as_str()));
    }
    if !engine.topic.is_empty() {
        return invalid("a gRPC server has no topics; leave topic out".to_owned());
    }
    match grpc::parse_endpoint(&engine.endpoint) {
        Ok(_) => Ok(()),
        Err(error) => invalid(format!("endpoint: {error}")),
    }
}

/// Checks two settings of an event plane: the URL of its NATS server, which may not hold credentials, and the subject
/// of its events.
fn check_subject(engine: &NewEngine) -> Result<(), RegisterRefusal> {
    let invalid = |text: String| Err(RegisterRefusal::Invalid(text));
    if engine.endpoint.contains('@') || engine.endpoint.parse::<async_nats::ServerAddr>().is_err() {
        return invalid(format!("endpoint {:?} is not nats://HOST:PORT", engine.endpoint));
    }
    let is_token = |token: &str| !token.is_empty() && !token.contains(char::is_whitespace);
    if engine.topic.split('.').all(is_token) {
        return Ok(());
    }
    invalid(
        "give the subject of the events: topic=namespace.NAME.component.NAME.endpoint.NAME.kv-events"
            .to_owned(),
    )
}

/// Checks that an endpoint is a `tcp://HOST:PORT` that can be connected to.
fn check_endpoint(endpoint: &str) -> Result<(), RegisterRefusal> {
    let refused = || RegisterRefusal::Invalid(format!("endpoint {endpoint:?} is not tcp://HOST:PORT"));
    match split_endpoint(endpoint) {
        Some((host, _)) if host != "*" => Ok(()),
        _ => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_process::registry::GivenEngine;

    use super::*;
    use crate::spec::{EngineDefaults, parse_engine};

    #[test]
    fn an_engine_that_gives_each_event_once_is_for_one_bridge() {
        let all = EngineDefaults {
            model: Some("m".to_owned()),
            ..EngineDefaults::default()
        };
        let shared = |text: &str| match parse_engine(text, &all).unwrap().remove(0) {
            GivenEngine::Publisher(engine) => check_shared(&engine),
            GivenEngine::Server(server) => panic!("{server:?}"),
        };
        let refusal = shared("trt=http://h:8000,format=tensorrt-llm").unwrap_err();
        assert!(matches!(&refusal, RegisterRefusal::Drained { key } if key.instance == "trt"));
        for engine in [
            "a=tcp://h:1",
            "a=tcp://h:1,format=dynamo",
            "a=tcp://h:1,format=mooncake",
        ] {
            assert_eq!(shared(engine), Ok(()), "{engine}");
        }
    }
}
