//! `kvatlas admin reset`: an operator has an engine drop its prefix cache, which ends every doubt about it.
//!
//! The command comes over NATS, to every bridge; those that follow the engine ask its server, and reply. Asked is where the engine is followed or
//! has been told to take requests, and nowhere else: the command only names it.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::{Client, Message};
use bytes::Bytes;
use futures_util::StreamExt;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tokio::time::timeout;

use kvatlas_core::wire::{AdminCommand, AdminReply, AdminRequest, PROTOCOL_VERSION};
use kvatlas_engines::Format;

use crate::daemon::metrics::LogGate;
use crate::daemon::{BRIDGE, instance_name};

use super::engines::{Bridge, Named};
use super::http::{HttpConnection, HttpError, ServerAddress};

static COMMAND_GATE: LogGate = LogGate::of_bursts(16);

/// Most bytes of a command.
const COMMAND_BYTES_MAX: usize = 4096;
/// Longest time for an engine's answer: whoever has sent the command waits.
const PATIENCE: Duration = Duration::from_secs(3);
/// Most characters of an answer that are shown.
const ANSWER_CHARS_MAX: usize = 200;

/// An error that leaves an engine's cache as it is.
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
    #[error("POST {0}: no answer within {PATIENCE:?}")]
    TimedOut(String),
}

/// A server to ask, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    address: ServerAddress,
    path: &'static str,
    format: Format,
}

impl Target {
    fn url(&self) -> String {
        let scheme = if self.address.is_secure { "https" } else { "http" };
        format!("{scheme}://{}{}", self.address.authority(), self.path)
    }

    /// Has the server's engine drop its cache.
    async fn reset(&self) -> Result<(), ResetError> {
        let asked = timeout(PATIENCE, self.ask()).await;
        let asked = asked.map_err(|_| ResetError::TimedOut(self.url()))?;
        let (status, body) = asked.map_err(|error| ResetError::Http {
            url: self.url(),
            error,
        })?;
        self.judge(status, &body)
    }

    async fn ask(&self) -> Result<(StatusCode, Bytes), HttpError> {
        let mut connection = HttpConnection::open(&self.address).await?;
        connection.ask(Method::POST, self.path).await
    }

    /// The meaning of an answer. vLLM refuses with status 200, SGLang with 400.
    fn judge(&self, status: StatusCode, body: &[u8]) -> Result<(), ResetError> {
        let text = || {
            String::from_utf8_lossy(body)
                .trim()
                .chars()
                .take(ANSWER_CHARS_MAX)
                .collect()
        };
        match (status, self.format) {
            (status, _) if status.is_success() => match serde_json::from_slice::<Outcome>(body) {
                Ok(Outcome { success: false }) => Err(ResetError::Busy(text())),
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

/// The answer of vLLM's newer releases; older ones say nothing.
#[derive(Debug, Deserialize)]
struct Outcome {
    success: bool,
}

impl Bridge {
    /// Listens to commands of operators for ever. Without the right to, nobody is answered, which `kvatlas admin` says.
    pub(super) async fn carry_out_commands(self, nats: Client) {
        let subject = self.subjects().admin(AdminCommand::Reset);
        let mut commands = match nats.subscribe(subject).await {
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
        let (Some(request), Some(reply_to)) = (request, &message.reply) else {
            return;
        };
        let own = instance_name(BRIDGE);
        let is_meant = request.instance.as_ref().is_none_or(|instance| *instance == own);
        let (Some(name), true) = (&request.engine, is_meant) else {
            return;
        };
        let publishers = self.called(name);
        if publishers.is_empty() {
            return;
        }
        let error = self.reset(&publishers).await.err();
        let error = error.map(|error| error.to_string());
        if let Some(suppressed) = COMMAND_GATE.admit() {
            tracing::info!(
                engine = name,
                error,
                suppressed,
                "an operator has an engine drop its cache"
            );
        }
        let reply = AdminReply {
            v: PROTOCOL_VERSION,
            instance: own,
            holders: if error.is_none() {
                publishers.len() as u64
            } else {
                0
            },
            error,
        };
        // Who does not hear of it asks again.
        let _ = nats.publish(reply_to.clone(), reply.encode().into()).await;
    }

    /// Has the servers of these publishers drop their caches, each once.
    async fn reset(&self, publishers: &[Named]) -> Result<(), ResetError> {
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

    fn target_of(&self, named: &Named) -> Result<Target, ResetError> {
        let Named { engine, server } = named;
        let path = match engine.format {
            Format::Vllm => "/reset_prefix_cache",
            Format::Sglang => "/flush_cache",
            format => return Err(ResetError::NoEndpoint(format)),
        };
        let address = match (server, &engine.profile.address) {
            (Some(url), _) => ServerAddress::parse(url).ok_or(ResetError::NoServer)?,
            (None, Some(told)) => {
                let told = told.as_str();
                let address = ServerAddress::parse(told);
                let address = address.or_else(|| ServerAddress::parse(&format!("http://{told}")));
                let address = address.ok_or(ResetError::NoServer)?;
                // It may have come with a registration, of which only the sockets were looked at.
                if !self.allows_host(&address.host) {
                    return Err(ResetError::Host(told.to_owned()));
                }
                address
            }
            (None, None) => return Err(ResetError::NoServer),
        };
        Ok(Target {
            address,
            path,
            format: engine.format,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(format: Format, status: u16, body: &str) -> Result<(), String> {
        let target = Target {
            address: ServerAddress::parse("http://gpu-0:8000").unwrap(),
            path: "/x",
            format,
        };
        let status = StatusCode::from_u16(status).unwrap();
        target
            .judge(status, body.as_bytes())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_answer_says_whether_the_cache_was_dropped() {
        for (format, status, body) in [
            (Format::Vllm, 200, ""),
            (Format::Vllm, 200, "{\"success\": true}"),
            (Format::Sglang, 200, "Cache flushed."),
        ] {
            assert_eq!(judged(format, status, body), Ok(()), "{body}");
        }
        for (format, status, body, words) in [
            (Format::Vllm, 404, "", "VLLM_SERVER_DEV_MODE=1"),
            (Format::Sglang, 404, "", "http://gpu-0:8000/x is not served"),
            (Format::Vllm, 200, "{\"success\": false}", "while requests run"),
            (
                Format::Sglang,
                400,
                "there are running requests",
                "there are running requests",
            ),
            (Format::Sglang, 401, "", "needs a key"),
            (Format::Vllm, 500, "oh", "500 Internal Server Error: oh"),
        ] {
            let error = judged(format, status, body).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
