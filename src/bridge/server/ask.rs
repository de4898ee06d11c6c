//! Questions to one engine's server: which publishers it has, and which model it serves.

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use hyper::{Method, StatusCode};
use kvatlas_engines::Format;
use tokio::time::timeout;

use kvatlas_process::registry::NewServer;

use super::super::grpc::GrpcError;
use super::super::http::{HttpError, ServerAddress, ServerConnection};
use super::answers::{Publishers, ServerAnswerError, is_info_of_vllm, read_model, read_sglang, read_vllm};
use super::control::ask_grpc;

const VLLM_PATH: &str = "/kv_event_sources";
const SGLANG_PATH: &str = "/server_info";
const MODELS_PATH: &str = "/v1/models";

/// Error that keeps the bridge from getting an engine's description from its server.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// The connection, or HTTP on it, failed.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The server was silent for too long.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The server answered with an unexpected status.
    #[error("status {status} for GET {path}")]
    Status {
        /// The path that was asked for.
        path: &'static str,
        /// Status of the answer.
        status: StatusCode,
    },
    /// The address is no server of an engine, or the server is too old.
    #[error(
        "neither GET {VLLM_PATH} nor GET {SGLANG_PATH} is answered: name the sockets of the engine, NAME=tcp://HOST:PORT,replay=tcp://HOST:PORT"
    )]
    Unknown,
    /// The server tells its models only to clients with a key.
    #[error("GET {MODELS_PATH} needs a key: say which model the engine has, with model=NAME or --model")]
    Locked,
    /// The connection, or gRPC on it, failed.
    #[error(transparent)]
    Grpc(#[from] GrpcError),
    /// The server neither sends events, nor tells the sockets of publishers.
    #[error(
        "neither SubscribeKvEvents nor vLLM's GetKvEventSources is served: start the engine with --kv-events-config, or name its sockets, \
         NAME=tcp://HOST:PORT,replay=tcp://HOST:PORT"
    )]
    NoEvents,
    /// The server sends events, but does not tell its model.
    #[error("the server does not tell its model: say which one the engine has, with model=NAME or --model")]
    Untold,
    /// The server's answer does not allow the engine to be followed.
    #[error(transparent)]
    Answer(#[from] ServerAnswerError),
}

impl AskError {
    /// Whether the server has answered, in a way that is of no use.
    pub(super) fn is_answer(&self) -> bool {
        match self {
            Self::Http(_) | Self::TimedOut(_) => false,
            Self::Grpc(error) => error.is_answer(),
            _ => !self.is_other_engine(),
        }
    }

    /// Whether the error means that the server belongs to another engine, because it serves another model than the given
    /// one.
    pub(super) fn is_other_engine(&self) -> bool {
        matches!(self, Self::Answer(ServerAnswerError::OtherModel { .. }))
    }
}

/// An engine, as its server describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) model: String,
    pub(super) publishers: Publishers,
    /// Addresses of the server, among them the one that has answered.
    pub(super) peers: Vec<IpAddr>,
    /// Name of the engine's process, which differs between processes; `None` if the server tells none.
    pub(super) process: Option<String>,
    /// Number of ranks whose events come from one publisher; `None` if the server does not tell the number, or has a publisher
    /// for each rank.
    pub(super) ranks: Option<u32>,
}

/// Asks a server, and returns the engine as the server describes it. `patience` bounds the time for all answers together.
pub(super) async fn ask(
    server: &NewServer,
    address: &ServerAddress,
    patience: Duration,
) -> Result<Described, AskError> {
    let asked = async {
        match server.is_grpc() {
            true => ask_grpc(server, address, patience).await,
            false => ask_http(server, address).await,
        }
    };
    let asked = timeout(patience, asked).await;
    asked.map_err(|_| AskError::TimedOut(patience))?
}

async fn ask_http(server: &NewServer, address: &ServerAddress) -> Result<Described, AskError> {
    let mut questions = ServerQuestions {
        address,
        connection: ServerConnection::open(address).await?,
    };
    let publishers = questions.publishers(server.format).await?;
    let model = questions.model(server.model.as_deref()).await?;
    Ok(Described {
        model,
        publishers,
        peers: vec![questions.connection.peer().ip()],
        process: None,
        ranks: None,
    })
}

struct ServerQuestions<'a> {
    address: &'a ServerAddress,
    connection: ServerConnection,
}

impl ServerQuestions<'_> {
    async fn get(&mut self, path: &'static str) -> Result<(StatusCode, Bytes), HttpError> {
        if self.connection.is_closed() {
            self.connection = ServerConnection::open(self.address).await?;
        }
        self.connection.ask(Method::GET, path).await
    }

    /// Returns the publishers. vLLM and SGLang have different paths for this question. Asks first at the path for the
    /// format `first`, and at the other path if the server does not have that one.
    async fn publishers(&mut self, first: Format) -> Result<Publishers, AskError> {
        let order = match first {
            Format::Sglang => [SGLANG_PATH, VLLM_PATH],
            _ => [VLLM_PATH, SGLANG_PATH],
        };
        for path in order {
            let (status, body) = self.get(path).await?;
            match status {
                StatusCode::OK if path == VLLM_PATH => return Ok(read_vllm(&body, &self.address.host)?),
                // A vLLM server that is too old for its own path.
                StatusCode::OK if is_info_of_vllm(&body) => {}
                StatusCode::OK => return Ok(read_sglang(&body, &self.address.host)?),
                StatusCode::NOT_FOUND => {}
                status => return Err(AskError::Status { path, status }),
            }
        }
        Err(AskError::Unknown)
    }

    /// Returns the engine's model. If the server shows its list of models only to clients with a key, returns the
    /// `given` model, or an error without it.
    async fn model(&mut self, given: Option<&str>) -> Result<String, AskError> {
        let (status, body) = self.get(MODELS_PATH).await?;
        match (status, given) {
            (StatusCode::OK, given) => Ok(read_model(&body, given)?),
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, Some(given)) => Ok(given.to_owned()),
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, None) => Err(AskError::Locked),
            (status, _) => Err(AskError::Status {
                path: MODELS_PATH,
                status,
            }),
        }
    }
}
