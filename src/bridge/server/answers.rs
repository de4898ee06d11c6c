//! Answers of engines' servers over HTTP: which publishers there are, and which model is served.
//!
//! | server | question | answer |
//! |---|---|---|
//! | vLLM | `GET /kv_event_sources` | by rank, its publisher's sockets and topic; `{}` where events are off |
//! | SGLang | `GET /server_info` | `kv_events`: the first rank's ports, topic, block size; null where events are off |
//! | both | `GET /v1/models` | the names under which models and adapters are served |
//!
//! Answers over gRPC are in [`control`](super::control).

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;
use serde::de::IgnoredAny;

use kvatlas_core::wire::Rank;
use kvatlas_engines::Format;
use kvatlas_telemetry::log_gated;

use super::super::hosts::is_here;
use super::super::http::authority;
use super::super::zmtp::split_endpoint;

/// Maximum number of ranks of one server.
const RANKS_MAX: usize = 1024;

/// Hint for the operator of a vLLM engine that cannot be followed.
const VLLM_HINT: &str = "start the engine with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\
                         \"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'";
/// Hint for the operator of an SGLang engine that cannot be followed.
const SGLANG_HINT: &str = "start the engine with --kv-events-config '{\"publisher\":\"zmq\",\"topic\":\"kv-events\",\
                           \"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'";

/// Error in a server's answer that keeps its engine from being followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ServerAnswerError {
    /// The answer does not have the expected form.
    #[error("the answer to {path} is not understood: {reason}")]
    Form {
        /// The method and the path that were asked for.
        path: &'static str,
        /// Fault in the answer.
        reason: String,
    },
    /// The engine publishes no events, or not over ZeroMQ.
    #[error("the engine publishes no KV events over ZeroMQ: {hint}")]
    Off {
        /// Hint that names the flag with which the engine can be followed.
        hint: &'static str,
    },
    /// The publisher connects to an address instead of listening.
    #[error(
        "the engine's publisher connects to {endpoint} instead of listening, and cannot be followed: {hint}"
    )]
    Connects {
        /// Address that the publisher connects to.
        endpoint: String,
        /// Hint that names the flag with which the engine can be followed.
        hint: &'static str,
    },
    /// The list of models is empty.
    #[error("the server names no model")]
    NoModel,
    /// The server serves another model than the given one.
    #[error("the server has the model {served:?}, not {given:?}: it is another engine")]
    OtherModel {
        /// Model that the server should serve.
        given: String,
        /// First model that the server serves.
        served: String,
    },
}

/// Sockets of one publisher of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sockets {
    pub(super) rank: Rank,
    pub(super) endpoint: String,
    pub(super) replay: Option<String>,
    pub(super) topic: String,
    /// Hint for an error text if nobody listens at the endpoint: it names the flag to set. In that case the publisher
    /// probably connects to the endpoint instead of listening. `None` if the publisher surely listens.
    pub(super) refused_hint: Option<&'static str>,
}

/// The publishers of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Publishers {
    pub(super) format: Format,
    /// Number of tokens in a block; `None` if the server does not tell it.
    pub(super) block_size: Option<u32>,
    /// Whether the server tells that the engine has no KV connector, and so no tier beyond the device.
    pub(super) has_no_connector: bool,
    pub(super) sockets: Vec<Sockets>,
}

/// A publisher, as vLLM describes it.
#[derive(Deserialize)]
pub(super) struct VllmSource {
    #[serde(default)]
    pub(super) enable_kv_cache_events: bool,
    #[serde(default)]
    pub(super) publisher: Option<String>,
    #[serde(default)]
    pub(super) endpoint: Option<String>,
    #[serde(default)]
    pub(super) replay_endpoint: Option<String>,
    /// Number of batches that the replay socket keeps.
    #[serde(default)]
    pub(super) buffer_steps: Option<u64>,
    #[serde(default)]
    pub(super) topic: Option<String>,
}

/// Reads vLLM's answer to `GET /kv_event_sources`. `host` is the host in the server's URL.
pub(super) fn read_vllm(body: &[u8], host: &str) -> Result<Publishers, ServerAnswerError> {
    let failed = |reason: String| ServerAnswerError::Form {
        path: "GET /kv_event_sources",
        reason,
    };
    let sources: BTreeMap<String, VllmSource> =
        serde_json::from_slice(body).map_err(|error| failed(error.to_string()))?;
    let by_rank = sources.into_iter().map(|(rank, source)| {
        let rank: Rank = rank.parse().map_err(|_| failed(format!("{rank:?} is no rank")))?;
        Ok((rank, source))
    });
    vllm_publishers(by_rank.collect::<Result<_, ServerAnswerError>>()?, host, failed)
}

/// Returns the publishers that vLLM describes, by rank. `failed` converts a fault in the answer to an error.
pub(super) fn vllm_publishers(
    sources: Vec<(Rank, VllmSource)>,
    host: &str,
    failed: impl Fn(String) -> ServerAnswerError,
) -> Result<Publishers, ServerAnswerError> {
    if sources.len() > RANKS_MAX {
        return Err(failed(format!("it has {} ranks", sources.len())));
    }
    let off = ServerAnswerError::Off { hint: VLLM_HINT };
    let mut sockets = Vec::with_capacity(sources.len());
    for (rank, source) in sources {
        let is_followed = source.enable_kv_cache_events && source.publisher.as_deref() == Some("zmq");
        let endpoint = source.endpoint.as_deref().filter(|_| is_followed);
        let endpoint = endpoint.ok_or_else(|| off.clone())?;
        sockets.push(vllm_sockets(rank, endpoint, &source, host)?);
    }
    sockets.sort_by_key(|sockets| sockets.rank);
    match sockets.is_empty() {
        true => Err(off),
        false => Ok(Publishers {
            format: Format::Vllm,
            block_size: None,
            has_no_connector: false,
            sockets,
        }),
    }
}

/// Returns the sockets of one publisher of vLLM. vLLM's publisher listens at addresses with `*` or `::`, and connects
/// to all others. There is one exception: instead of `tcp://*:0`, vLLM's answer has the address at which the publisher
/// listens. So an answer without `*` or `::` does not show whether the publisher listens or connects.
fn vllm_sockets(
    rank: Rank,
    endpoint: &str,
    source: &VllmSource,
    host: &str,
) -> Result<Sockets, ServerAnswerError> {
    let connects = || ServerAnswerError::Connects {
        endpoint: endpoint.to_owned(),
        hint: VLLM_HINT,
    };
    let (bound, port) = split_endpoint(endpoint).ok_or_else(connects)?;
    let is_wildcard = matches!(bound, "*" | "::");
    if !is_wildcard && is_never_bound(bound) {
        return Err(connects());
    }
    let at_host = |bound: &str, port| {
        format!(
            "tcp://{}",
            authority(if is_any(bound) { host } else { bound }, port)
        )
    };
    // A replay socket that keeps no batches is of no use, nor is one that only programs on the engine's machine reach: from
    // elsewhere, that address leads to the bridge's own machine.
    let keeps_any = source.buffer_steps != Some(0);
    let replay = source.replay_endpoint.as_deref().filter(|_| keeps_any);
    let replay = replay.and_then(split_endpoint);
    let is_reached = |bound: &str| is_here(host) || !is_here(bound);
    if let Some((bound, port)) = replay.filter(|(bound, _)| !is_reached(bound)) {
        log_gated!(
            warn "only the engine's machine reaches its replay socket: followed without it, until it listens at tcp://*:PORT";
            host, bound, port
        );
    }
    let replay = replay.filter(|(bound, _)| is_reached(bound));
    Ok(Sockets {
        rank,
        endpoint: at_host(bound, port),
        replay: replay.map(|(bound, port)| at_host(bound, port)),
        topic: source.topic.clone().unwrap_or_default(),
        refused_hint: (!is_wildcard).then_some(VLLM_HINT),
    })
}

/// Whether vLLM's publisher surely connects to this host. When the publisher listens, vLLM never names such a host.
fn is_never_bound(host: &str) -> bool {
    let is_unspecified = |address: IpAddr| address.to_canonical().is_unspecified();
    is_here(host) || host.parse().is_ok_and(is_unspecified)
}

/// Returns whether a host means all addresses of a machine.
fn is_any(host: &str) -> bool {
    matches!(host, "*" | "::" | "0.0.0.0" | "")
}

#[derive(Deserialize)]
struct SglangInfo {
    #[serde(default)]
    kv_events: Option<SglangEvents>,
}

#[derive(Deserialize)]
struct SglangEvents {
    #[serde(default)]
    publisher: Option<String>,
    endpoint_host: String,
    endpoint_port_base: u16,
    #[serde(default)]
    topic: Option<String>,
    #[serde(default)]
    block_size: Option<u32>,
    #[serde(default)]
    dp_size: Option<u32>,
    #[serde(default)]
    replay_endpoint_port_base: Option<u16>,
}

/// Whether an answer to `GET /server_info` is vLLM's, which has such a page in its development mode. It says nothing about
/// publishers.
pub(super) fn is_info_of_vllm(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct VllmInfo {
        #[serde(rename = "vllm_config")]
        _config: IgnoredAny,
    }
    serde_json::from_slice::<VllmInfo>(body).is_ok()
}

/// Reads SGLang's answer to `GET /server_info`. `host` is the host in the server's URL.
pub(super) fn read_sglang(body: &[u8], host: &str) -> Result<Publishers, ServerAnswerError> {
    let failed = |reason: String| ServerAnswerError::Form {
        path: "GET /server_info",
        reason,
    };
    let info: SglangInfo = serde_json::from_slice(body).map_err(|error| failed(error.to_string()))?;
    let is_zmq = |events: &SglangEvents| {
        events
            .publisher
            .as_deref()
            .is_none_or(|publisher| publisher == "zmq")
    };
    let off = ServerAnswerError::Off { hint: SGLANG_HINT };
    let events = info.kv_events.filter(is_zmq).ok_or(off)?;
    let ranks = events.dp_size.unwrap_or(1).max(1);
    if ranks as usize > RANKS_MAX {
        return Err(failed(format!("it has {ranks} ranks")));
    }
    // SGLang puts addresses of IPv6 into brackets.
    let bound = events.endpoint_host.trim_start_matches('[').trim_end_matches(']');
    let is_wildcard = is_any(bound);
    if is_here(bound) {
        return Err(ServerAnswerError::Connects {
            endpoint: format!("tcp://{}", authority(bound, events.endpoint_port_base)),
            hint: SGLANG_HINT,
        });
    }
    let host = if is_wildcard { host } else { bound };
    let at = |base: u16, rank: u32| {
        let port = u16::try_from(u32::from(base).saturating_add(rank))
            .ok()
            .filter(|_| base > 0);
        port.map(|port| format!("tcp://{}", authority(host, port)))
    };
    let sockets = (0..ranks).map(|rank| {
        let missing = || failed(format!("rank {rank} has no port"));
        let replay = events
            .replay_endpoint_port_base
            .map(|base| at(base, rank).ok_or_else(missing));
        Ok(Sockets {
            rank,
            endpoint: at(events.endpoint_port_base, rank).ok_or_else(missing)?,
            replay: replay.transpose()?,
            topic: events.topic.clone().unwrap_or_default(),
            refused_hint: (!is_wildcard).then_some(SGLANG_HINT),
        })
    });
    Ok(Publishers {
        format: Format::Sglang,
        block_size: events.block_size,
        has_no_connector: false,
        sockets: sockets.collect::<Result<_, ServerAnswerError>>()?,
    })
}

#[derive(Deserialize)]
struct Models {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    /// The model that an adapter belongs to.
    #[serde(default)]
    parent: Option<String>,
}

/// Reads the answer to `GET /v1/models`. Returns the `given` model if it is served, or the first served model if none is
/// given. Adapters do not count as models.
pub(super) fn read_model(body: &[u8], given: Option<&str>) -> Result<String, ServerAnswerError> {
    let models: Models = serde_json::from_slice(body).map_err(|error| ServerAnswerError::Form {
        path: "GET /v1/models",
        reason: error.to_string(),
    })?;
    let served = models.data.into_iter().filter(|model| model.parent.is_none());
    choose_model(served.map(|model| model.id), given)
}

/// Returns the model of an engine: the `given` model, which must be among the `served`, or else the first served model.
pub(super) fn choose_model(
    mut served: impl Iterator<Item = String>,
    given: Option<&str>,
) -> Result<String, ServerAnswerError> {
    let first = served.next().ok_or(ServerAnswerError::NoModel)?;
    match given {
        None => Ok(first),
        Some(given) if first == given || served.any(|model| model == given) => Ok(given.to_owned()),
        Some(given) => Err(ServerAnswerError::OtherModel {
            given: given.to_owned(),
            served: first,
        }),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vllm(endpoint: &str) -> Result<Publishers, ServerAnswerError> {
        // As vLLM 0.33's front end answers.
        let answer = json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint,
            "replay_endpoint": "tcp://*:6557", "buffer_steps": 10000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "kv"}});
        read_vllm(answer.to_string().as_bytes(), "10.0.0.7")
    }

    #[test]
    fn vllm_tells_its_publishers_by_rank() {
        let source = |rank: u32| {
            json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{}", 5557 + rank),
                "replay_endpoint": format!("tcp://[::]:{}", 6557 + rank), "topic": ""})
        };
        let answer = json!({"10": source(10), "2": source(2)});
        let publishers = read_vllm(answer.to_string().as_bytes(), "fd00::1").unwrap();
        let expected = |rank: u32| Sockets {
            rank,
            endpoint: format!("tcp://[fd00::1]:{}", 5557 + rank),
            replay: Some(format!("tcp://[fd00::1]:{}", 6557 + rank)),
            topic: String::new(),
            refused_hint: None,
        };
        assert_eq!(publishers.sockets, [expected(2), expected(10)]);
        assert_eq!((publishers.format, publishers.block_size), (Format::Vllm, None));
    }

    #[test]
    fn a_replay_socket_that_keeps_nothing_is_none() {
        let replay = |steps: u64| {
            let answer = json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                "replay_endpoint": "tcp://*:6557", "buffer_steps": steps}});
            let publishers = read_vllm(answer.to_string().as_bytes(), "10.0.0.7").unwrap();
            publishers.sockets[0].replay.clone()
        };
        assert_eq!(replay(1).as_deref(), Some("tcp://10.0.0.7:6557"));
        assert_eq!(replay(0), None);
    }

    /// From another machine, the address of such a socket leads to the bridge's own machine.
    #[test]
    fn a_replay_socket_that_only_the_engines_machine_reaches_is_none_elsewhere() {
        let replay = |host: &str| {
            let answer = json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                "replay_endpoint": "tcp://127.0.0.1:6557"}});
            let publishers = read_vllm(answer.to_string().as_bytes(), host).unwrap();
            publishers.sockets[0].replay.clone()
        };
        assert_eq!(replay("localhost").as_deref(), Some("tcp://127.0.0.1:6557"));
        assert_eq!(replay("10.0.0.7"), None);
    }

    /// The answers were recorded from the Rust front end of vLLM 0.33.0, with two ranks.
    #[test]
    fn the_answers_of_vllms_front_end_are_read() {
        let sources = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6557","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"},"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:6558","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}}"#;
        let expected = |rank: u32| Sockets {
            rank,
            endpoint: format!("tcp://h:{}", 5557 + rank),
            replay: Some(format!("tcp://h:{}", 6557 + rank)),
            topic: "kv".to_owned(),
            refused_hint: None,
        };
        assert_eq!(
            read_vllm(sources, "h").unwrap().sockets,
            [expected(0), expected(1)]
        );
        let models = br#"{"object":"list","data":[{"id":"o/m","object":"model","created":1795687859,"owned_by":"vllm-frontend-rs","root":"o/m","parent":null,"max_model_len":2048}]}"#;
        assert_eq!(read_model(models, None).unwrap(), "o/m");
    }

    #[test]
    fn an_address_of_vllm_without_a_wildcard_is_where_it_may_connect_to() {
        assert_eq!(
            vllm("tcp://*:5557").unwrap().sockets[0].endpoint,
            "tcp://10.0.0.7:5557"
        );
        assert_eq!(vllm("tcp://[::]:5557").unwrap().sockets[0].refused_hint, None);
        // vLLM answers so for `tcp://*:0`.
        let sockets = vllm("tcp://10.0.0.9:40001").unwrap().sockets.remove(0);
        assert_eq!(sockets.endpoint, "tcp://10.0.0.9:40001");
        assert_eq!(sockets.refused_hint, Some(VLLM_HINT));
        for endpoint in [
            "tcp://0.0.0.0:5557",
            "tcp://127.0.0.1:5557",
            "tcp://localhost:1",
            "tcp://[::ffff:127.0.0.1]:5557",
            "ipc:///tmp/x",
            "tcp://*:0",
        ] {
            let connects = ServerAnswerError::Connects {
                endpoint: endpoint.to_owned(),
                hint: VLLM_HINT,
            };
            assert_eq!(vllm(endpoint), Err(connects));
        }
    }

    #[test]
    fn an_engine_that_publishes_nothing_is_told_with_the_flag() {
        for hint in [VLLM_HINT, SGLANG_HINT] {
            assert!(hint.contains("--kv-events-config"), "{hint}");
        }
        let off =
            json!({"0": {"enable_kv_cache_events": false, "publisher": "zmq", "endpoint": "tcp://*:1"}});
        let null =
            json!({"0": {"enable_kv_cache_events": true, "publisher": "null", "endpoint": "tcp://*:1"}});
        for answer in [json!({}), off, null] {
            let read = read_vllm(answer.to_string().as_bytes(), "h");
            assert_eq!(read, Err(ServerAnswerError::Off { hint: VLLM_HINT }));
        }
        for answer in [json!({}), json!({"kv_events": null})] {
            let read = read_sglang(answer.to_string().as_bytes(), "h");
            assert_eq!(read, Err(ServerAnswerError::Off { hint: SGLANG_HINT }));
        }
    }

    #[test]
    fn sglang_tells_the_ports_of_its_first_rank() {
        let events = json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv-events",
            "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 6557});
        let answer = json!({"model_path": "/m", "kv_events": events});
        let publishers = read_sglang(answer.to_string().as_bytes(), "h").unwrap();
        assert_eq!(
            (publishers.format, publishers.block_size),
            (Format::Sglang, Some(64))
        );
        let ports: Vec<_> = publishers
            .sockets
            .iter()
            .map(|sockets| (sockets.rank, sockets.endpoint.as_str(), sockets.replay.as_deref()))
            .collect();
        let expected = [
            (0, "tcp://h:5557", Some("tcp://h:6557")),
            (1, "tcp://h:5558", Some("tcp://h:6558")),
        ];
        assert_eq!(ports, expected);
        let mut beyond = events;
        (beyond["endpoint_port_base"], beyond["endpoint_host"]) = (json!(65535), json!("0.0.0.0"));
        let answer = json!({"kv_events": beyond});
        assert!(read_sglang(answer.to_string().as_bytes(), "h").is_err());
    }

    #[test]
    fn sglang_tells_addresses_of_ipv6_in_brackets() {
        let endpoint = |told: &str| {
            let events = json!({"endpoint_host": told, "endpoint_port_base": 5557});
            let answer = json!({"kv_events": events});
            let read = read_sglang(answer.to_string().as_bytes(), "fd00::7");
            read.map(|mut publishers| publishers.sockets.remove(0).endpoint)
        };
        assert_eq!(endpoint("[::]").as_deref(), Ok("tcp://[fd00::7]:5557"));
        assert_eq!(endpoint("[fd00::1]").as_deref(), Ok("tcp://[fd00::1]:5557"));
        assert_eq!(endpoint("10.0.0.1").as_deref(), Ok("tcp://10.0.0.1:5557"));
        for here in ["127.0.0.1", "[::1]", "localhost"] {
            let connects = ServerAnswerError::Connects {
                endpoint: format!("tcp://{here}:5557"),
                hint: SGLANG_HINT,
            };
            assert_eq!(endpoint(here), Err(connects));
        }
    }

    #[test]
    fn a_page_of_vllm_is_told_from_sglangs() {
        for of_vllm in [
            json!({"vllm_config": "VllmConfig(...)"}),
            json!({"vllm_config": {"a": 1}, "vllm_env": {}}),
        ] {
            assert!(is_info_of_vllm(of_vllm.to_string().as_bytes()));
        }
        for other in [
            json!({}),
            json!({"model_path": "/m"}),
            json!({"kv_events": null}),
            json!([]),
        ] {
            assert!(!is_info_of_vllm(other.to_string().as_bytes()));
        }
    }

    #[test]
    fn the_first_model_is_served_and_adapters_are_none() {
        let answer = json!({"object": "list", "data": [{"id": "sql", "parent": "m"}, {"id": "m", "parent": null}, {"id": "alias"}]});
        let read = |given| read_model(answer.to_string().as_bytes(), given);
        assert_eq!(read(None).unwrap(), "m");
        assert_eq!(read(Some("alias")).unwrap(), "alias");
        let other = ServerAnswerError::OtherModel {
            given: "sql".to_owned(),
            served: "m".to_owned(),
        };
        assert_eq!(read(Some("sql")), Err(other));
        assert_eq!(
            read_model(br#"{"data":[]}"#, None),
            Err(ServerAnswerError::NoModel)
        );
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        for body in [
            &b""[..],
            b"[]",
            b"{\"x\":{}}",
            b"\xff",
            b"{\"0\":{\"endpoint\":1}}",
            b"{\"a\":[]}",
        ] {
            assert!(read_vllm(body, "h").is_err());
        }
        for body in [
            &b""[..],
            b"[]",
            b"{\"kv_events\":{}}",
            b"{\"kv_events\":{\"endpoint_host\":\"h\",\"endpoint_port_base\":-1}}",
        ] {
            assert!(read_sglang(body, "h").is_err());
        }
        for body in [&b""[..], b"{}", b"{\"data\":[{}]}"] {
            assert!(read_model(body, None).is_err());
        }
    }
}
