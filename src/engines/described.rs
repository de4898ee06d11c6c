//! Messages by which engines' servers describe their engine over gRPC: its model, its block size, and the publishers of its
//! events.
//!
//! | Server | Service | Messages |
//! |---|---|---|
//! | vLLM's own front end | `vllm.Control` | [`EventSources`], [`ServerInfo`], [`ModelInfo`] |
//! | servicers of SMG | as `SubscribeKvEvents` | [`ServicedModel`], [`TokenSpeedModel`], [`TensorRtModel`], [`ServicedEngine`] |
//!
//! Fields that kvatlas does not need are not declared, and are skipped. The service OpenEngine has a method
//! `GetKvEventSources`, too. Its answer has a different field 2. kvatlas does not ask OpenEngine.

/// A request without fields.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Ask {}

/// The publishers of an engine's events: the answer to `GetKvEventSources`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct EventSources {
    /// One publisher for each rank; empty if events are off.
    #[prost(message, repeated, tag = "1")]
    pub sources: Vec<EventSource>,
}

/// One publisher of an engine's events.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct EventSource {
    /// The publisher's transport: `zmq`.
    #[prost(string, tag = "1")]
    pub transport: String,
    /// The address where the publisher sends events. It is given as in the engine's configuration, so it may have a
    /// wildcard.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The topic of the publisher's messages.
    #[prost(string, tag = "3")]
    pub topic: String,
    /// The address where the publisher replays events; empty if it does not replay.
    #[prost(string, tag = "4")]
    pub replay_endpoint: String,
    /// The data-parallel rank.
    #[prost(uint32, optional, tag = "5")]
    pub data_parallel_rank: Option<u32>,
    /// The encoding of payloads: `msgpack`.
    #[prost(string, tag = "6")]
    pub encoding: String,
    /// The version of the format of the payloads' events: 1.
    #[prost(uint32, tag = "7")]
    pub schema_version: u32,
}

/// The answer to `GetServerInfo` of vLLM's front end.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ServerInfo {
    /// A name that identifies the engine's process: no other process has it. Empty if the process has no such name.
    #[prost(string, tag = "3")]
    pub instance_id: String,
    /// Tokens in a block; 0 if unknown.
    #[prost(uint32, tag = "6")]
    pub kv_block_size: u32,
}

/// The answer to `GetModelInfo` of vLLM's front end.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ModelInfo {
    /// The model as it was loaded.
    #[prost(string, tag = "1")]
    pub model_id: String,
    /// The name by which requests ask for the model.
    #[prost(string, tag = "2")]
    pub served_model_name: String,
    /// Further names of the model.
    #[prost(string, repeated, tag = "3")]
    pub aliases: Vec<String>,
}

impl ModelInfo {
    /// The names under which the model is served, the main one first.
    pub fn names(self) -> Vec<String> {
        let named = std::iter::once(self.served_model_name).chain(self.aliases);
        let names: Vec<String> = named.filter(|name| !name.is_empty()).collect();
        match names.is_empty() && !self.model_id.is_empty() {
            true => vec![self.model_id],
            false => names,
        }
    }
}

/// The answer to `GetModelInfo` of a servicer (gRPC front end) of vLLM or SGLang.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ServicedModel {
    /// The model as it was loaded.
    #[prost(string, tag = "1")]
    pub model_path: String,
    /// The name by which requests ask for the model. If it is empty, they ask by the path.
    #[prost(string, tag = "6")]
    pub served_model_name: String,
}

/// The answer to `GetModelInfo` of a servicer (gRPC front end) of TokenSpeed.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct TokenSpeedModel {
    /// The model as it was loaded.
    #[prost(string, tag = "1")]
    pub model_path: String,
    /// The name by which requests ask for the model. If it is empty, they ask by the path.
    #[prost(string, tag = "3")]
    pub served_model_name: String,
}

/// The answer to `GetModelInfo` of a servicer (gRPC front end) of TensorRT-LLM.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct TensorRtModel {
    /// The name of the model.
    #[prost(string, tag = "1")]
    pub model_id: String,
}

/// The answer to `GetServerInfo` of a servicer (gRPC front end) of vLLM.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ServicedEngine {
    /// The name of the engine's KV connector; empty if it has none.
    #[prost(string, tag = "6")]
    pub kv_connector: String,
    /// The number of data-parallel ranks; 0 if the server does not tell it.
    #[prost(int32, tag = "9")]
    pub data_parallel_size: i32,
    /// Tokens in a block; 0 until the engine knows.
    #[prost(int32, tag = "12")]
    pub block_size: i32,
}

impl ServicedEngine {
    /// Whether the engine certainly has no KV connector, and so no tier beyond the device. Servicers that tell the block size
    /// also tell the connector.
    pub fn has_no_connector(&self) -> bool {
        self.block_size > 0 && self.kv_connector.is_empty()
    }
}

/// The answer to `FlushCache` of a servicer (gRPC front end).
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Flushed {
    /// Whether the engine has dropped its cache, as it was asked to.
    #[prost(bool, tag = "1")]
    pub success: bool,
    /// The server's message about the outcome.
    #[prost(string, tag = "2")]
    pub message: String,
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    #[test]
    fn a_model_has_the_names_under_which_it_is_served() {
        let model = |served: &str, aliases: &[&str]| ModelInfo {
            model_id: "/models/m".to_owned(),
            served_model_name: served.to_owned(),
            aliases: aliases.iter().map(|&alias| alias.to_owned()).collect(),
        };
        assert_eq!(model("m", &["n", ""]).names(), ["m", "n"]);
        assert_eq!(model("", &[]).names(), ["/models/m"]);
        assert!(ModelInfo::default().names().is_empty());
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = (0..hex.len()).step_by(2).map(|at| &hex[at..at + 2]);
        digits
            .map(|digits| u8::from_str_radix(digits, 16).unwrap())
            .collect()
    }

    /// The answers were recorded from the Rust front end of vLLM 0.33.0, which served two ranks.
    #[test]
    fn the_answers_of_vllms_front_end_are_read() {
        let sources = "0a3d0a037a6d71120c7463703a2f2f2a3a353535371a026b76220c7463703a2f2f2a3a36353537280032076d73677061636b380140904e48a08d0650a08d06\
                       0a3d0a037a6d71120c7463703a2f2f2a3a353535381a026b76220c7463703a2f2f2a3a36353538280132076d73677061636b380140904e48a08d0650a08d06";
        let source = |rank: u32| EventSource {
            transport: "zmq".to_owned(),
            endpoint: format!("tcp://*:{}", 5557 + rank),
            topic: "kv".to_owned(),
            replay_endpoint: format!("tcp://*:{}", 6557 + rank),
            data_parallel_rank: Some(rank),
            encoding: "msgpack".to_owned(),
            schema_version: 1,
        };
        let read = EventSources::decode(bytes(sources).as_slice()).unwrap();
        assert_eq!(read.sources, [source(0), source(1)]);
        let server = "0a06302e33332e301204766c6c6d1a04696e7374220c080110011802280130013802288010301038c80140084880105a006205302e362e307010";
        let expected = ServerInfo {
            instance_id: "inst".to_owned(),
            kv_block_size: 16,
        };
        assert_eq!(ServerInfo::decode(bytes(server).as_slice()), Ok(expected));
        let model = "0a066f2f6d2d3168120161a00101a80101";
        let model = ModelInfo::decode(bytes(model).as_slice()).unwrap();
        assert_eq!(model.names(), ["a"]);
    }

    /// OpenEngine's field 2 is a message with host, port and protocol. Read as text, that is no address.
    #[test]
    fn what_openengine_calls_by_the_same_name_is_no_address() {
        let foreign = b"\x0a\x12\x0a\x03zmq\x12\x0b\x0a\x06gpu-0a\x10\xb5+";
        let read = EventSources::decode(&foreign[..]);
        assert!(read.is_err() || !read.unwrap().sources[0].endpoint.contains("://"));
    }
}
