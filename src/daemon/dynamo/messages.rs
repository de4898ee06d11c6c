//! Messages of Dynamo's request plane, as its release 1.6.1 has them.

use std::net::SocketAddr;

use bytes::Bytes;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::json;

use kvatlas_config::DynamoComponent;
use kvatlas_process::dynamo::{HEAD_BYTES, Lengths, two_parts};

/// Endpoint that Dynamo's routers ask.
pub(super) const ENDPOINT: &str = "kv_indexer_query";

/// Transport by which requests reach an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RequestTransport {
    /// Requests come on a NATS subject.
    Nats,
    /// Requests come over TCP to a listener at `HOST:PORT`.
    Tcp(String),
}

/// Instance of the endpoint: one daemon that serves one component of Dynamo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Instance {
    pub(super) component: DynamoComponent,
    /// Number that distinguishes instances of one endpoint.
    pub(super) id: u64,
}

impl Instance {
    /// Key of the instance's record: `v1/instances/NAMESPACE/COMPONENT/ENDPOINT/ID`.
    pub(super) fn key(&self) -> String {
        format!("v1/instances/{}", self.path())
    }

    fn path(&self) -> String {
        let DynamoComponent { namespace, name, .. } = &self.component;
        format!("{namespace}/{name}/{ENDPOINT}/{:x}", self.id)
    }

    /// NATS subject on which routers ask the instance.
    pub(super) fn subject(&self) -> String {
        let DynamoComponent { namespace, name, .. } = &self.component;
        format!("{namespace}_{name}.{ENDPOINT}-{:x}", self.id)
    }

    /// Path in the TCP requests by which routers ask the instance.
    pub(super) fn tcp_path(&self) -> String {
        let DynamoComponent { namespace, name, .. } = &self.component;
        format!("{:x}/{namespace}/{name}/{ENDPOINT}", self.id)
    }

    /// Discovery record that routers find under [`Self::key`].
    pub(super) fn record(&self, transport: &RequestTransport) -> String {
        let transport = match transport {
            RequestTransport::Nats => json!({"nats_tcp": self.subject()}),
            RequestTransport::Tcp(address) => json!({"tcp": format!("{address}/{}", self.tcp_path())}),
        };
        json!({
            "type": "Endpoint",
            "namespace": self.component.namespace,
            "component": self.component.name,
            "endpoint": ENDPOINT,
            "instance_id": self.id,
            "transport": transport,
            "device_type": "cpu",
            "request_plane_codec": "json",
        })
        .to_string()
    }
}

/// Errors of reading a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    /// Message is shorter than the lengths in its head say.
    #[error("a message of two parts is cut off")]
    Cut,
    /// Checksum in the message does not match the message's content.
    #[error("the checksum of a message of two parts is another")]
    Checksum,
    /// Part of the message is not valid JSON of the expected form.
    #[error("{part} cannot be read: {source}")]
    Json {
        /// Name of the part that is not valid.
        part: &'static str,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
    /// Endpoint that the request names is not served here. The router may have an outdated record of this address.
    #[error("the endpoint {0:?} is not served here (dynamo.components)")]
    Endpoint(String),
    /// Answer cannot be sent over the transport that the request names.
    #[error("answers go over {0:?}, which is not known here")]
    Transport(String),
}

/// Maximum number of characters of an endpoint's path that an error repeats.
const PATH_CHARACTERS_MAX: usize = 64;

impl MessageError {
    /// Returns the error for a path at which nothing is served.
    pub(super) fn endpoint(path: &str) -> Self {
        Self::Endpoint(path.chars().take(PATH_CHARACTERS_MAX).collect())
    }
}

/// Splits a message into header and body, after a check of lengths and checksum.
fn parts(message: &[u8]) -> Result<(&[u8], &[u8]), MessageError> {
    let (head, rest) = message
        .split_first_chunk::<HEAD_BYTES>()
        .ok_or(MessageError::Cut)?;
    let lengths = Lengths::read(head).ok_or(MessageError::Cut)?;
    let header = rest.get(..lengths.header).ok_or(MessageError::Cut)?;
    let body = rest
        .get(lengths.header..)
        .and_then(|rest| rest.get(..lengths.body))
        .ok_or(MessageError::Cut)?;
    match lengths.is_sum_of(header, body) {
        true => Ok((header, body)),
        false => Err(MessageError::Checksum),
    }
}

/// Destination of an answer to a router.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct ReplyTo {
    /// Address at which the router takes answers.
    #[serde(deserialize_with = "ip_and_port")]
    pub(super) address: SocketAddr,
    /// Name that the router has given to the request. The answer repeats it, so that the router knows which request is
    /// answered.
    pub(super) subject: String,
}

/// Reads an address `IP:PORT`, as routers tell it. An IPv6 address may lack its brackets. Names of hosts are refused: to
/// look one up may occupy a thread for many seconds.
fn ip_and_port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    let without_brackets = || {
        let (ip, port) = text.rsplit_once(':')?;
        Some(SocketAddr::new(ip.parse().ok()?, port.parse().ok()?))
    };
    let address = text.parse().ok().or_else(without_brackets);
    address.ok_or_else(|| D::Error::custom("it is not an IP address with a port"))
}

/// Question of a router: the workers that hold leading blocks of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Question {
    /// Name of the model that the question is about.
    pub(super) model_name: String,
    /// The prompt's block hashes, as the query contract defines them.
    pub(super) block_hashes: Vec<u64>,
    /// Whether only blocks on the device are counted.
    #[serde(default)]
    pub(super) device_only: bool,
}

/// Request of a router: the destination of its answer, and its question. A question that cannot be read is replaced by
/// the error.
#[derive(Debug)]
pub(super) struct DynamoRequest {
    pub(super) reply_to: ReplyTo,
    pub(super) question: Result<Question, MessageError>,
}

/// Reads a request.
///
/// # Errors
///
/// [`MessageError`] if the destination of the answer cannot be read, so that no answer can be sent.
pub(super) fn read_request(message: &[u8]) -> Result<DynamoRequest, MessageError> {
    #[derive(Deserialize)]
    struct Control {
        connection_info: ConnectionInfo,
    }

    #[derive(Deserialize)]
    struct ConnectionInfo {
        transport: String,
        info: String,
    }

    let json = |part| move |source| MessageError::Json { part, source };
    let (header, body) = parts(message)?;
    let control: Control = serde_json::from_slice(header).map_err(json("the header"))?;
    let ConnectionInfo { transport, info } = control.connection_info;
    if transport != "tcp_server" {
        return Err(MessageError::Transport(transport));
    }
    Ok(DynamoRequest {
        reply_to: serde_json::from_str(&info).map_err(json("the address of the answer"))?,
        question: serde_json::from_slice(body).map_err(json("the question")),
    })
}

/// Returns all bytes that are sent to the router for `answer`. The bytes are five messages: the request's subject, a
/// note that there is no error, the answer, and two end marks.
pub(super) fn response(reply_to: &ReplyTo, answer: &serde_json::Value) -> Bytes {
    let hello = json!({"subject": reply_to.subject, "stream_type": "response"}).to_string();
    let data = json!({"data": answer, "complete_final": false}).to_string();
    let frames = [
        two_parts(hello.as_bytes(), b""),
        two_parts(br#"{"error":null}"#, b""),
        two_parts(b"", data.as_bytes()),
        two_parts(b"", br#"{"complete_final":true}"#),
        two_parts(br#""sentinel""#, b""),
    ];
    frames.concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance() -> Instance {
        Instance {
            component: "dynamo.backend".parse().unwrap(),
            id: 0xab_cdef,
        }
    }

    #[test]
    fn an_error_repeats_the_beginning_of_a_path() {
        let told = |length| MessageError::endpoint(&"ä".repeat(length)).to_string();
        assert!(told(64).contains(&"ä".repeat(64)));
        assert_eq!(told(4096), told(64));
    }

    #[test]
    fn records_are_what_routers_look_for() {
        let instance = instance();
        assert_eq!(
            instance.key(),
            "v1/instances/dynamo/backend/kv_indexer_query/abcdef"
        );
        assert_eq!(instance.subject(), "dynamo_backend.kv_indexer_query-abcdef");
        let record: serde_json::Value =
            serde_json::from_str(&instance.record(&RequestTransport::Nats)).unwrap();
        assert_eq!(
            record["transport"],
            json!({"nats_tcp": "dynamo_backend.kv_indexer_query-abcdef"})
        );
        assert_eq!(record["instance_id"], 0xab_cdef);
        let record = instance.record(&RequestTransport::Tcp("127.0.0.1:7".to_owned()));
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        let path = "127.0.0.1:7/abcdef/dynamo/backend/kv_indexer_query";
        assert_eq!(record["transport"], json!({"tcp": path}));
    }

    /// Returns an encoded request of a router.
    fn request(transport: &str, body: &str) -> Bytes {
        request_to("127.0.0.1:9", transport, body)
    }

    /// Returns an encoded request of a router that takes its answer at `address`.
    fn request_to(address: &str, transport: &str, body: &str) -> Bytes {
        let info = json!({"address": address, "subject": "s", "context": "c", "stream_type": "response"});
        let header = json!({
            "id": "1", "request_type": "single_in", "response_type": "many_out",
            "connection_info": {"transport": transport, "info": info.to_string()},
        });
        two_parts(header.to_string().as_bytes(), body.as_bytes())
    }

    /// The resolver's threads are those of snapshots, too.
    #[test]
    fn answers_go_to_addresses_and_never_to_names() {
        let read = |address| read_request(&request_to(address, "tcp_server", "{}"));
        for (told, address) in [
            ("127.0.0.1:9", "127.0.0.1:9"),
            ("[fd00::1]:9", "[fd00::1]:9"),
            ("fd00::1:9", "[fd00::1]:9"),
        ] {
            assert_eq!(read(told).unwrap().reply_to.address.to_string(), address);
        }
        for name in [
            "localhost:9",
            "router.example.org:9",
            "127.0.0.1",
            "127.0.0.1:",
            ":9",
            "",
        ] {
            assert!(matches!(read(name), Err(MessageError::Json { .. })), "{name}");
        }
    }

    #[test]
    fn requests_are_read_whole_or_not_at_all() {
        let body = r#"{"model_name":"m","block_hashes":[1,18446744073709551615],"device_only":true}"#;
        let message = request("tcp_server", body);
        let asked = read_request(&message).unwrap();
        assert_eq!(
            (
                asked.reply_to.address.to_string(),
                asked.reply_to.subject.as_str()
            ),
            ("127.0.0.1:9".to_owned(), "s")
        );
        let expected = Question {
            model_name: "m".to_owned(),
            block_hashes: vec![1, u64::MAX],
            device_only: true,
        };
        assert_eq!(asked.question.unwrap(), expected);
        for end in 0..message.len() {
            assert!(read_request(&message[..end]).is_err(), "{end}");
        }
        // The destination of the answer is known even if the question cannot be read.
        assert!(
            read_request(&request("tcp_server", "[]"))
                .unwrap()
                .question
                .is_err()
        );
        assert!(read_request(&request("quic", body)).is_err());
        let mut summed = message.to_vec();
        let sum = xxhash_rust::xxh3::xxh3_64(&message[HEAD_BYTES..]);
        summed[16..HEAD_BYTES].copy_from_slice(&sum.to_be_bytes());
        assert!(read_request(&summed).is_ok());
        summed[HEAD_BYTES - 1] ^= 1;
        assert!(matches!(read_request(&summed), Err(MessageError::Checksum)));
        let huge = [&[0xff; HEAD_BYTES][..], b"x"].concat();
        assert!(read_request(&huge).is_err());
    }
}
