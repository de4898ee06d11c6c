//! Reset: makes an engine drop its prefix cache, which ends every doubt about the engine. Operators ask for it with
//! `kvatlas admin reset`.
//!
//! The command comes over NATS to every bridge. The bridges that follow the engine ask its server. Every bridge replies;
//! a bridge that does not follow the engine has 0 holders in its reply, so that the operator need not wait for it.
//!
//! The server is asked only at an address that the bridge already has: the server's own address, or the address for the
//! engine's requests. The command itself only names the engine.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::{Client, Message, Subject};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tokio::time::timeout;

use kvatlas_core::wire::{AdminCommand, AdminReply, AdminRequest, PROTOCOL_VERSION};
use kvatlas_engines::Format;
use kvatlas_engines::described::Flushed;

use kvatlas_process::broker::LastingSubscription;
use kvatlas_process::registry::NewEngine;
use kvatlas_process::{BRIDGE, instance_name};
use kvatlas_telemetry::log_gated;

use super::engines::{Bridge, NamedEngine};
use super::grpc::{self, GrpcError};
use super::http::{HttpError, ServerAddress, ServerConnection};

/// Maximum size of a command, in bytes.
const COMMAND_BYTES_MAX: usize = 4096;
/// Maximum time for an engine's answer. The sender of the command waits for it.
const PATIENCE: Duration = Duration::from_secs(3);
/// Maximum number of characters of an answer that are shown.
const ANSWER_CHARS_MAX: usize = 200;

/// Error that keeps an engine's cache from being dropped.
#[derive(Debug, thiserror::Error)]
enum ResetError {
    #[error(
        "the address of its server is not known: follow it as NAME=http://HOST:PORT, or add address=HOST:PORT to what gives it"
    )]
    NoServer,
    #[error("{0}: engines on this host may not be asked; allow it with --register-hosts")]
    Host(String),
    #[error("no endpoint is known by which {} drops its cache", .0.as_str())]
    NoEndpoint(Format),
    #[error("POST {0} is not served (404): start vLLM with VLLM_SERVER_DEV_MODE=1")]
    NoDevelopmentMode(String),
    #[error("POST {0} is not served (404)")]
    Absent(String),
    #[error("POST {0} needs a key, which the bridge does not have")]
    Locked(String),
    #[error("the engine keeps its cache while requests run: ask again when it is idle ({0})")]
    Busy(String),
    #[error("POST {url}: status {status}: {text}")]
    Status {
        url: String,
        status: StatusCode,
        text: String,
    },
    #[error("POST {url}: {error}")]
    Http { url: String, error: HttpError },
    #[error("{url}: {error}")]
    Grpc { url: String, error: GrpcError },
    #[error("{0} is not served")]
    AbsentMethod(String),
    #[error("{0}: no answer within {PATIENCE:?}")]
    TimedOut(String),
}

/// Server to ask, and the way to ask it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ResetTarget {
    way: ServerEndpoint,
    path: &'static str,
    format: Format,
}

/// Protocol and address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ServerEndpoint {
    Http(ServerAddress),
    /// URL of a server that sends events over gRPC.
    Grpc(String),
}

impl ResetTarget {
    fn url(&self) -> String {
        match &self.way {
            ServerEndpoint::Http(address) => {
                let scheme = if address.is_secure { "https" } else { "http" };
                format!("{scheme}://{}{}", address.authority(), self.path)
            }
            ServerEndpoint::Grpc(url) => format!("{url}{}", self.path),
        }
    }

    /// Asks the server to drop its engine's cache.
    async fn reset(&self) -> Result<(), ResetError> {
        let asked = async {
            match &self.way {
                ServerEndpoint::Http(address) => self.post(address).await,
                ServerEndpoint::Grpc(url) => self.flush(url).await,
            }
        };
        let asked = timeout(PATIENCE, asked).await;
        asked.map_err(|_| ResetError::TimedOut(self.url()))?
    }

    async fn post(&self, address: &ServerAddress) -> Result<(), ResetError> {
        let asked = async {
            let mut connection = ServerConnection::open(address).await?;
            connection.ask(Method::POST, self.path).await
        };
        let asked: Result<_, HttpError> = asked.await;
        let (status, body) = asked.map_err(|error| ResetError::Http {
            url: self.url(),
            error,
        })?;
        self.judge(status, &body)
    }

    async fn flush(&self, url: &str) -> Result<(), ResetError> {
        let asked = async {
            let channel = grpc::connect(url, PATIENCE).await?;
            grpc::ask::<Flushed>(&channel, self.path).await
        };
        match asked.await {
            Ok(Flushed { success: true, .. }) => Ok(()),
            Ok(Flushed { message, .. }) => {
                Err(ResetError::Busy(message.chars().take(ANSWER_CHARS_MAX).collect()))
            }
            Err(error) if error.is_absent() => Err(ResetError::AbsentMethod(self.url())),
            Err(error) => Err(ResetError::Grpc {
                url: self.url(),
                error,
            }),
        }
    }

    /// Checks whether an answer says that the cache was dropped. vLLM refuses with status 200, SGLang with 400.
    fn judge(&self, status: StatusCode, body: &[u8]) -> Result<(), ResetError> {
        let text = || {
            String::from_utf8_lossy(body)
                .trim()
                .chars()
                .take(ANSWER_CHARS_MAX)
                .collect()
        };
        match (status, self.format) {
            (status, _) if status.is_success() => match serde_json::from_slice::<ResetAnswer>(body) {
                Ok(ResetAnswer { success: false }) => Err(ResetError::Busy(text())),
                _ => Ok(()),
            },
            (StatusCode::BAD_REQUEST, Format::Sglang) => Err(ResetError::Busy(text())),
            (StatusCode::NOT_FOUND, Format::Vllm) => Err(ResetError::NoDevelopmentMode(self.url())),
            (StatusCode::NOT_FOUND, _) => Err(ResetError::Absent(self.url())),
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => Err(ResetError::Locked(self.url())),
            (status, _) => Err(ResetError::Status {
                url: self.url(),
                status,
                text: text(),
            }),
        }
    }
}

/// Answer of vLLM's newer releases. Older releases answer without a body.
#[derive(Debug, Deserialize)]
struct ResetAnswer {
    success: bool,
}

impl Bridge {
    /// Listens to commands of operators for ever. While the bridge has no right to subscribe to them, it answers no
    /// command. `kvatlas admin` then reports that no bridge has carried out the command.
    pub(super) async fn carry_out_commands(self, nats: Client) {
        let subject = self.subjects().admin(AdminCommand::Reset);
        let subscribed = LastingSubscription::new(nats.clone(), subject, None, self.refused_optional());
        let mut commands = match subscribed.await {
            Ok(commands) => commands,
            Err(error) => return tracing::warn!(%error, "commands of operators are not heard"),
        };
        while let Some(command) = commands.next().await {
            self.carry_out(&nats, &command).await;
        }
    }

    async fn carry_out(&self, nats: &Client, message: &Message) {
        let request = AdminRequest::decode(&message.payload);
        let request = request
            .ok()
            .filter(|_| message.payload.len() <= COMMAND_BYTES_MAX);
        // The reply is sent with the bridge's rights, so the operator must not choose a subject of the contract for it.
        let is_allowed = |subject: &&Subject| self.subjects().may_reply_to(subject);
        let reply_to = message.reply.as_ref().filter(is_allowed);
        let (Some(request), Some(reply_to)) = (request, reply_to) else {
            return;
        };
        let own = instance_name(BRIDGE);
        let is_meant = request.instance.as_ref().is_none_or(|instance| *instance == own);
        let (Some(name), true) = (&request.engine, is_meant) else {
            return;
        };
        let reply = self.reset_called(name, own).await;
        // An operator who gets no reply asks again.
        let _ = nats.publish(reply_to.clone(), reply.encode().into()).await;
    }

    /// Has the engine that is called `name` drop its cache, and returns the reply of this bridge, whose name is `own`.
    /// The reply has 0 holders and no error if the bridge does not follow the engine.
    async fn reset_called(&self, name: &str, own: String) -> AdminReply {
        let publishers = self.called(name);
        let mut reply = AdminReply {
            v: PROTOCOL_VERSION,
            instance: own,
            holders: 0,
            error: None,
        };
        if publishers.is_empty() {
            return reply;
        }
        match self.reset(&publishers).await {
            Ok(()) => reply.holders = publishers.len() as u64,
            Err(error) => reply.error = Some(error.to_string()),
        }
        log_gated!(info "an operator has an engine drop its cache" up to 16; engine = name, error = reply.error);
        reply
    }

    /// Asks the server of each of these publishers to drop its engine's prefix cache. A server of several publishers is
    /// asked once.
    async fn reset(&self, publishers: &[NamedEngine]) -> Result<(), ResetError> {
        let mut targets = BTreeMap::new();
        for named in publishers {
            let target = self.target_of(named)?;
            targets.insert(target.url(), target);
        }
        for target in targets.values() {
            target.reset().await?;
        }
        Ok(())
    }

    fn target_of(&self, named: &NamedEngine) -> Result<ResetTarget, ResetError> {
        let NamedEngine { engine, server } = named;
        let path = reset_path(engine.format, engine.is_grpc());
        let path = path.ok_or(ResetError::NoEndpoint(engine.format))?;
        let way = match engine.is_grpc() {
            true => ServerEndpoint::Grpc(engine.endpoint.clone()),
            false => ServerEndpoint::Http(self.http_address(engine, server.as_deref())?),
        };
        Ok(ResetTarget {
            way,
            path,
            format: engine.format,
        })
    }

    /// Returns the address at which an engine is asked over HTTP: the address of `server`, which reported the engine, or
    /// else the engine's address for requests.
    fn http_address(&self, engine: &NewEngine, server: Option<&str>) -> Result<ServerAddress, ResetError> {
        if let Some(address) = server.and_then(ServerAddress::parse) {
            return Ok(address);
        }
        let told = engine
            .profile
            .address
            .as_ref()
            .ok_or(ResetError::NoServer)?
            .as_str();
        let address = ServerAddress::parse(told).or_else(|| ServerAddress::parse(&format!("http://{told}")));
        let address = address.ok_or(ResetError::NoServer)?;
        // The address may have come with a registration, for which only the sockets' hosts were checked.
        match self.allows_host(&address.host) {
            true => Ok(address),
            false => Err(ResetError::Host(told.to_owned())),
        }
    }
}

/// Returns the path of the request that drops the cache of an engine of this format; `None` if the format has no such path.
fn reset_path(format: Format, is_grpc: bool) -> Option<&'static str> {
    match (format, is_grpc) {
        (Format::Vllm, false) => Some("/reset_prefix_cache"),
        (Format::Sglang, false) => Some("/flush_cache"),
        (Format::Vllm, true) => Some("/vllm.grpc.engine.VllmEngine/FlushCache"),
        (Format::Sglang, true) => Some("/sglang.grpc.scheduler.SglangScheduler/FlushCache"),
        (Format::TokenSpeed, true) => Some("/tokenspeed.grpc.scheduler.TokenSpeedScheduler/FlushCache"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(format: Format, status: u16, body: &str) -> Result<(), ResetError> {
        let target = ResetTarget {
            way: ServerEndpoint::Http(ServerAddress::parse("http://gpu-0:8000").unwrap()),
            path: "/x",
            format,
        };
        let status = StatusCode::from_u16(status).unwrap();
        target.judge(status, body.as_bytes())
    }

    #[test]
    fn an_answer_says_whether_the_cache_was_dropped() {
        for (format, status, body) in [
            (Format::Vllm, 200, ""),
            (Format::Vllm, 200, "{\"success\": true}"),
            (Format::Sglang, 200, "Cache flushed."),
        ] {
            let answer = judged(format, status, body);
            assert!(answer.is_ok(), "{body}: {answer:?}");
        }
    }

    #[test]
    fn an_answer_says_why_the_cache_was_not_dropped() {
        let here = "http://gpu-0:8000/x";
        let error = |format, status, body| judged(format, status, body).unwrap_err();
        let absent = error(Format::Vllm, 404, "");
        assert!(
            matches!(&absent, ResetError::NoDevelopmentMode(url) if url == here),
            "{absent}"
        );
        let absent = error(Format::Sglang, 404, "");
        assert!(
            matches!(&absent, ResetError::Absent(url) if url == here),
            "{absent}"
        );
        for (format, status, body) in [
            (Format::Vllm, 200, "{\"success\": false}"),
            (Format::Sglang, 400, "there are running requests"),
        ] {
            let busy = error(format, status, body);
            assert!(matches!(&busy, ResetError::Busy(text) if text == body), "{busy}");
        }
        let locked = error(Format::Sglang, 401, "");
        assert!(
            matches!(&locked, ResetError::Locked(url) if url == here),
            "{locked}"
        );
        let other = error(Format::Vllm, 500, "oh");
        let is_told = matches!(
            &other,
            ResetError::Status { url, status: StatusCode::INTERNAL_SERVER_ERROR, text } if url == here && text == "oh"
        );
        assert!(is_told, "{other}");
    }
}
