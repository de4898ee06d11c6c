//! Questions to an engine's server over gRPC: whether the server sends events itself, or else which publishers it has,
//! and which model it serves.
//!
//! | server | question | answer |
//! |---|---|---|
//! | a server that sends events | `SubscribeKvEvents`, after an unused number | a refusal, so the method exists |
//! | the same | `GetModelInfo`; for vLLM also `GetServerInfo` | the model; the block size |
//! | vLLM's own front end | `vllm.Control/GetKvEventSources` | by rank, the publisher's sockets and topic; none if off |
//! | the same | `GetModelInfo`, `GetServerInfo` | the model; the block size, and a name of the process |

use std::time::Duration;

use kvatlas_core::wire::Rank;
use kvatlas_engines::Format;
use kvatlas_engines::described::{
    EventSource, EventSources, ModelInfo, ServerInfo, ServicedEngine, ServicedModel, TensorRtModel,
    TokenSpeedModel,
};
use tonic::transport::Channel;

use kvatlas_process::registry::NewServer;

use super::super::grpc::{self, GrpcError};
use super::super::http::{HttpError, ServerAddress};
use super::answers::{Publishers, ServerAnswerError, Sockets, VllmSource, choose_model, vllm_publishers};
use super::ask::{AskError, Described};

const SOURCES_PATH: &str = "/vllm.Control/GetKvEventSources";

/// Formats whose servers may send events themselves.
const SERVICED: [Format; 4] = [Format::Vllm, Format::Sglang, Format::TokenSpeed, Format::TensorRt];

/// Asks a server over gRPC and returns the engine as the server describes it. `patience` bounds the time to connect.
pub(super) async fn ask_grpc(
    server: &NewServer,
    address: &ServerAddress,
    patience: Duration,
) -> Result<Described, AskError> {
    let peers = tokio::net::lookup_host((address.host.as_str(), address.port)).await;
    let peers = peers
        .map_err(HttpError::Connection)?
        .map(|peer| peer.ip())
        .collect();
    let channel = grpc::connect(&server.url, patience).await?;
    let given = server.model.as_deref();
    // Servers of the given format are the likeliest.
    let order =
        std::iter::once(server.format).chain(SERVICED.into_iter().filter(|format| *format != server.format));
    for format in order {
        if grpc::hands_on(&channel, format).await? {
            let (publishers, ranks) = serviced(&channel, format, &server.url).await?;
            return Ok(Described {
                model: serviced_model(&channel, format, given).await?,
                publishers,
                peers,
                process: None,
                ranks,
            });
        }
    }
    let sources: EventSources =
        present(grpc::ask(&channel, SOURCES_PATH).await)?.ok_or(AskError::NoEvents)?;
    let told = grpc::ask::<ServerInfo>(&channel, "/vllm.Control/GetServerInfo").await;
    let told = present(told)?.unwrap_or_default();
    let model: ModelInfo = grpc::ask(&channel, "/vllm.Control/GetModelInfo").await?;
    Ok(Described {
        model: choose_model(model.names().into_iter(), given)?,
        publishers: Publishers {
            block_size: Some(told.kv_block_size).filter(|size| *size > 0),
            ..read_sources(sources, &address.host)?
        },
        peers,
        process: Some(told.instance_id).filter(|name| !name.is_empty()),
        ranks: None,
    })
}

/// Returns the answer; `None` if the server does not have the method.
fn present<Answer>(asked: Result<Answer, GrpcError>) -> Result<Option<Answer>, GrpcError> {
    match asked {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the one publisher of a server that sends events itself, that is, its stream over gRPC. Also returns the
/// number of ranks, if the server tells it.
async fn serviced(
    channel: &Channel,
    format: Format,
    url: &str,
) -> Result<(Publishers, Option<u32>), GrpcError> {
    let told = match format {
        Format::Vllm => grpc::ask(channel, "/vllm.grpc.engine.VllmEngine/GetServerInfo").await,
        _ => Ok(ServicedEngine::default()),
    };
    let told: ServicedEngine = present(told)?.unwrap_or_default();
    let number = |told: i32| u32::try_from(told).ok().filter(|number| *number > 0);
    let publishers = Publishers {
        format,
        block_size: number(told.block_size),
        has_no_connector: told.has_no_connector(),
        sockets: vec![Sockets {
            // Frames name their ranks themselves.
            rank: 0,
            endpoint: url.to_owned(),
            replay: None,
            topic: String::new(),
            refused_hint: None,
        }],
    };
    Ok((publishers, number(told.data_parallel_size)))
}

/// Returns the model of a server that sends events itself. If a model is `given`, the server need not tell its own.
async fn serviced_model(channel: &Channel, format: Format, given: Option<&str>) -> Result<String, AskError> {
    let named = |served: String, loaded: String| if served.is_empty() { loaded } else { served };
    let of_servicer = |model: ServicedModel| named(model.served_model_name, model.model_path);
    let told = match format {
        Format::Sglang => {
            let path = "/sglang.grpc.scheduler.SglangScheduler/GetModelInfo";
            grpc::ask(channel, path).await.map(of_servicer)
        }
        Format::TokenSpeed => {
            let asked = grpc::ask(
                channel,
                "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/GetModelInfo",
            )
            .await;
            asked.map(|model: TokenSpeedModel| named(model.served_model_name, model.model_path))
        }
        Format::TensorRt => {
            let asked = grpc::ask(channel, "/trtllm.TrtllmService/GetModelInfo").await;
            asked.map(|model: TensorRtModel| model.model_id)
        }
        Format::Vllm | Format::Mooncake | Format::Dynamo => {
            let path = "/vllm.grpc.engine.VllmEngine/GetModelInfo";
            grpc::ask(channel, path).await.map(of_servicer)
        }
    };
    match (present(told)?.filter(|name| !name.is_empty()), given) {
        (Some(told), given) => Ok(choose_model(std::iter::once(told), given)?),
        (None, Some(given)) => Ok(given.to_owned()),
        (None, None) => Err(AskError::Untold),
    }
}

/// Reads vLLM's answer to `GetKvEventSources`. `host` is the host in the server's URL.
fn read_sources(answer: EventSources, host: &str) -> Result<Publishers, ServerAnswerError> {
    let failed = |reason: String| ServerAnswerError::Form {
        path: SOURCES_PATH,
        reason,
    };
    let source = |(number, source): (usize, EventSource)| {
        let is_address = source
            .endpoint
            .split_once("://")
            .is_some_and(|(scheme, _)| !scheme.is_empty());
        // OpenEngine has another field at this place.
        if !is_address {
            return Err(failed(format!("{:?} is no address", source.endpoint)));
        }
        if source.encoding != "msgpack" || source.schema_version > 1 {
            let EventSource {
                encoding,
                schema_version,
                ..
            } = source;
            return Err(failed(format!(
                "its events are {encoding:?} of version {schema_version}"
            )));
        }
        let rank = source.data_parallel_rank.or_else(|| u32::try_from(number).ok());
        let replay = Some(source.replay_endpoint).filter(|endpoint| !endpoint.is_empty());
        let described = VllmSource {
            enable_kv_cache_events: true,
            publisher: Some(source.transport),
            endpoint: Some(source.endpoint),
            replay_endpoint: replay,
            // A server that does not tell it sends 0.
            buffer_steps: None,
            topic: Some(source.topic),
        };
        Ok((rank.unwrap_or(Rank::MAX), described))
    };
    let sources = answer.sources.into_iter().enumerate().map(source);
    vllm_publishers(sources.collect::<Result<_, ServerAnswerError>>()?, host, failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(endpoint: &str) -> EventSource {
        EventSource {
            transport: "zmq".to_owned(),
            endpoint: endpoint.to_owned(),
            topic: "kv".to_owned(),
            replay_endpoint: "tcp://*:6557".to_owned(),
            data_parallel_rank: Some(0),
            encoding: "msgpack".to_owned(),
            schema_version: 1,
        }
    }

    fn read(sources: Vec<EventSource>) -> Result<Publishers, ServerAnswerError> {
        read_sources(EventSources { sources }, "h")
    }

    #[test]
    fn vllm_tells_its_publishers_over_grpc_as_it_does_over_http() {
        let second = EventSource {
            data_parallel_rank: Some(1),
            replay_endpoint: String::new(),
            ..source("tcp://[::]:5558")
        };
        let publishers = read(vec![second, source("tcp://*:5557")]).unwrap();
        let sockets = |rank: Rank, port: u16, replay: Option<&str>| Sockets {
            rank,
            endpoint: format!("tcp://h:{port}"),
            replay: replay.map(str::to_owned),
            topic: "kv".to_owned(),
            refused_hint: None,
        };
        let expected = [sockets(0, 5557, Some("tcp://h:6557")), sockets(1, 5558, None)];
        assert_eq!(publishers.sockets, expected);
    }

    #[test]
    fn what_cannot_be_followed_is_said() {
        let other = |change: fn(&mut EventSource)| {
            let mut source = source("tcp://*:5557");
            change(&mut source);
            vec![source]
        };
        for sources in [vec![], other(|source| source.transport = "null".to_owned())] {
            let error = read(sources).unwrap_err();
            assert!(matches!(error, ServerAnswerError::Off { .. }), "{error}");
        }
        for address in ["tcp://10.0.0.1:0", "tcp://127.0.0.1:1"] {
            let error = read(vec![source(address)]).unwrap_err();
            assert!(
                matches!(&error, ServerAnswerError::Connects { endpoint, .. } if endpoint == address),
                "{error}"
            );
        }
        for (sources, words) in [
            (
                other(|source| source.endpoint = "\n\u{5}gpu-0\u{10}".to_owned()),
                "no address",
            ),
            (other(|source| source.encoding = "json".to_owned()), "\"json\""),
            (other(|source| source.schema_version = 2), "version 2"),
        ] {
            let error = read(sources).unwrap_err();
            assert!(
                matches!(&error, ServerAnswerError::Form { reason, .. } if reason.contains(words)),
                "{error}"
            );
        }
    }
}
