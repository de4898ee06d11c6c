//! `kvatlas bridge`: follows engines, and publishes their blocks to daemons in other processes.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvatlas_bridge::{Bridge, RouterQuestion};
use kvatlas_config::{LoggingConfig, process_environment};
use kvatlas_core::wire::{Address, AdminCommand, Subjects};
use kvatlas_daemon::http::{HEAD_BYTES_MAX, HttpParts, HttpServer, read_token};
use kvatlas_process::admin::{AdminServer, AdminSource, Latch, Readiness, ReadinessReport, WorkersQuery};
use kvatlas_process::broker::{ConnectPatience, ConnectionNotice, Refusal, Refused, connect};
use kvatlas_process::listener::ConnectionLimits;
use kvatlas_process::present_bridge;
use kvatlas_process::registry::EngineRegistry;
use kvatlas_telemetry::{LogFormat, MetricsHandle, ProcessMetrics, install_shared, log_gated};
use tokio_util::sync::CancellationToken;

use super::connect::DaemonArguments;
use super::engines::EngineArguments;
use super::failure::Failure;
use super::serve::{Hangups, StopSignals, start_logging};
use super::supervisor;

pub(super) const EXAMPLES: &str = "\
Examples:
  kvatlas bridge --engine http://vllm-0:8000 --engine http://vllm-1:8000
  kvatlas bridge --discover kubernetes:app=vllm
  kvatlas bridge --model meta-llama/Llama-3.1-8B-Instruct \\
      --engine gpu-0=tcp://gpu-0:5557,replay=tcp://gpu-0:5558
  kvatlas bridge --engines-file /etc/kvatlas/engines.toml --nats-url nats://nats.example:4222
  kvatlas bridge --http-listen 127.0.0.1:8091";

/// Maximum number of messages from daemons (questions) that may wait for one publisher.
const SUBSCRIPTION_CAPACITY: usize = 1024;
/// Returns the longest time that the stop of a bridge may take: 5 s while it is connected to NATS, else 0.5 s.
pub(super) fn stop_patience(is_connected: bool) -> Duration {
    match is_connected {
        true => Duration::from_secs(5),
        false => Duration::from_millis(500),
    }
}

/// Engines to follow, and daemons to tell.
#[derive(Debug, Args)]
pub(crate) struct BridgeArguments {
    #[command(flatten)]
    daemon: DaemonArguments,
    #[command(flatten)]
    engines: EngineArguments,
    /// Address for metrics and probes; port 0 takes a free one, off disables them [default: 127.0.0.1:9465] [environment:
    /// KVATLAS_ADMIN_LISTEN].
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    admin_listen: Option<Listen>,
    /// Address to register engines at over HTTP; port 0 takes a free one, off disables it [default: off] [environment:
    /// KVATLAS_HTTP_LISTEN].
    #[arg(long, value_name = "ADDRESS", value_parser = parse_listen)]
    http_listen: Option<Listen>,
    /// File with the bearer token that HTTP requests need [environment: KVATLAS_HTTP_TOKEN_FILE].
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<PathBuf>,
    /// Which log lines to write.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    logging_level: String,
    /// Write log lines as JSON.
    #[arg(long)]
    logging_json: bool,
    /// At the end, tell daemons to forget the engines at once.
    #[arg(long)]
    forget: bool,
}

/// Address to listen on; `None` for the word `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listen(Option<SocketAddr>);

/// Default address of the listener for metrics and probes.
const ADMIN_LISTEN: Listen = Listen(Some(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9465))));

/// Addresses of the listeners. A flag overrides the environment, which overrides the default.
#[derive(Debug, PartialEq, Eq)]
struct Listeners {
    admin: Listen,
    http: Listen,
    http_token_file: Option<PathBuf>,
}

fn parse_listen(text: &str) -> Result<Listen, String> {
    match text {
        "off" => Ok(Listen(None)),
        address => address
            .parse()
            .map(|address| Listen(Some(address)))
            .map_err(|_| "write ADDRESS:PORT or off".to_owned()),
    }
}

/// Source of the answers of the bridge's admin listener.
struct View {
    bridge: Bridge,
    readiness: Arc<Readiness>,
    metrics: MetricsHandle,
    process: ProcessMetrics,
}

impl AdminSource for View {
    fn metrics(&self) -> String {
        let report = self.readiness();
        self.process.set_ready(report.is_ready());
        self.process.set_connected(report.is_set(Latch::Connected));
        self.metrics.render()
    }

    /// Returns the state of the connection. While the server refuses what the reports of engines need, the bridge is not ready.
    fn readiness(&self) -> ReadinessReport {
        let refusals = self.bridge.refusals();
        self.readiness.report().refused(Latch::EventsSubscribed, refusals)
    }

    fn workers_json(&self, query: &WorkersQuery) -> String {
        let engines: Vec<_> = self
            .bridge
            .engines()
            .into_iter()
            .take(query.limit)
            .map(|state| {
                serde_json::json!({
                    "instance": state.engine.key.instance,
                    "rank": state.engine.key.rank,
                    "namespace": state.engine.key.model.namespace().ok(),
                    "model": state.engine.key.model.model,
                    "tenant": state.engine.key.model.tenant,
                    "endpoint": state.engine.endpoint,
                    "status": format!("{:?}", state.status).to_lowercase(),
                    "last_error": state.last_error,
                    "address": state.engine.profile.address.as_ref().map(Address::as_str),
                    "republished": self.bridge.republished_at(&state.engine).map(|sockets| match sockets {
                        Ok(sockets) => serde_json::json!({ "events": sockets.events(), "replay": sockets.replay() }),
                        Err(error) => serde_json::json!({ "error": error }),
                    }),
                })
            })
            .collect();
        let servers: Vec<_> = self
            .bridge
            .servers()
            .into_iter()
            .take(query.limit)
            .map(|state| {
                serde_json::json!({
                    "instance": state.server.instance,
                    "url": state.server.url,
                    "identity": state.server.discovered.identity,
                    "labels": state.server.discovered.labels,
                    "engines": state.engines.len(),
                    "last_error": state.last_error,
                })
            })
            .collect();
        let sources: Vec<_> = self
            .bridge
            .sources()
            .into_iter()
            .map(|state| {
                serde_json::json!({
                    "source": state.source,
                    "engines": state.engines,
                    "last_error": state.last_error,
                })
            })
            .collect();
        serde_json::json!({ "engines": engines, "servers": servers, "sources": sources }).to_string()
    }

    fn router_flags(&self, query: Option<&str>) -> Option<Result<String, String>> {
        match RouterQuestion::parse(query) {
            Ok(question) => self.bridge.router_flags(&question).map(Ok),
            Err(error) => Some(Err(error.to_owned())),
        }
    }

    fn index_json(&self) -> String {
        serde_json::json!({ "role": "bridge", "namespaces": [] }).to_string()
    }
}

/// Returns the address of a listener: the flag's address, else the address in the environment variable `name`, else the default.
/// An empty variable counts as not set.
fn listen_at(
    flag: Option<Listen>,
    name: &str,
    environment: &[(String, String)],
    default: Listen,
) -> Result<Listen, Failure> {
    match (flag, variable(name, environment)) {
        (Some(listen), _) => Ok(listen),
        (None, Some(text)) => {
            parse_listen(text).map_err(|error| Failure::usage(format_args!("{name} is {text:?}: {error}")))
        }
        (None, None) => Ok(default),
    }
}

fn variable<'a>(name: &str, environment: &'a [(String, String)]) -> Option<&'a str> {
    environment
        .iter()
        .find(|(known, text)| known == name && !text.is_empty())
        .map(|(_, text)| text.as_str())
}

impl BridgeArguments {
    /// Returns the addresses of the listeners. The container image sets the address of the admin listener with the variable that
    /// `kvatlas probe` reads, too.
    fn listeners(&self, environment: &[(String, String)]) -> Result<Listeners, Failure> {
        let token_file = self.http_token_file.clone();
        Ok(Listeners {
            admin: listen_at(
                self.admin_listen,
                "KVATLAS_ADMIN_LISTEN",
                environment,
                ADMIN_LISTEN,
            )?,
            http: listen_at(self.http_listen, "KVATLAS_HTTP_LISTEN", environment, Listen(None))?,
            http_token_file: token_file
                .or_else(|| variable("KVATLAS_HTTP_TOKEN_FILE", environment).map(PathBuf::from)),
        })
    }

    /// Follows engines until the process is told to stop.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let environment = process_environment();
        let listeners = self.listeners(&environment)?;
        let config = self.daemon.load(environment)?;
        let format = match self.logging_json {
            true => LogFormat::Json,
            false => LogFormat::Text,
        };
        start_logging(&LoggingConfig {
            format,
            level: self.logging_level.clone(),
        })?;
        let subjects = Subjects::new(&config.subjects.prefix).map_err(Failure::usage)?;
        let engines = self.engines.load()?;
        if engines.is_empty() && !self.engines.has_sources() && listeners.http.0.is_none() {
            let text =
                "there is no engine to follow: give --engine, --engines-file, --discover or --http-listen";
            return Err(Failure::usage(text));
        }
        let (mut signals, hangups) = (StopSignals::listen()?, Hangups::listen()?);
        let commands = subjects.admin(AdminCommand::Reset);
        let metrics = install_shared().map_err(Failure::failed)?;
        let bridge = self.engines.bridge(subjects.clone(), None, &engines, None)?;
        let readiness = Arc::new(Readiness::new());
        let view = Arc::new(View {
            bridge: bridge.clone(),
            readiness: Arc::clone(&readiness),
            metrics,
            process: ProcessMetrics::new(),
        });
        let admin = listeners.start_admin(&view)?;
        let http = listeners.start_http(&view, &bridge).await?;
        let ready = Arc::clone(&readiness);
        let noting = bridge.clone();
        let notice = move |notice: ConnectionNotice| note(&readiness, &noting, &commands, &notice);
        let connecting = connect(
            &config.nats,
            "bridge",
            SUBSCRIPTION_CAPACITY,
            ConnectPatience::Forever,
            notice,
        );
        let nats = connecting.await.map_err(Failure::failed)?;
        bridge.start(&nats);
        let place = admin.as_ref().map(AdminServer::local_addr);
        let presence = CancellationToken::new();
        let until = presence.clone();
        tokio::spawn(
            async move { present_bridge(nats, &config.subjects.prefix, place, subjects, until).await },
        );
        tracing::info!(engines = engines.len(), "the bridge follows engines");
        tokio::spawn(supervisor::keep_watchdog());
        let signal = tokio::select! {
            signal = signals.next() => signal,
            () = announce_ready(&ready) => "the end of the connection",
            () = self.engines.reload_at(hangups, &bridge) => "SIGHUP",
        };
        tracing::info!(signal, "stopping");
        supervisor::stopping();
        presence.cancel();
        if let Some(http) = http {
            http.stop().await;
        }
        let is_connected = || ready.report().is_set(Latch::Connected);
        let patience = stop_patience(is_connected());
        let stopping = tokio::time::timeout(patience, bridge.stop(self.forget)).await;
        drop(admin);
        match stopping {
            Err(_) if is_connected() => Err(Failure::failed("engines were still followed at the end")),
            Err(_) => {
                // Nobody is there to be told.
                tracing::warn!(
                    "NATS could not be reached, so daemons were not told; they find the engines stale"
                );
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

impl Listeners {
    fn start_admin(&self, view: &Arc<View>) -> Result<Option<AdminServer>, Failure> {
        let source: Arc<dyn AdminSource> = Arc::clone(view) as Arc<dyn AdminSource>;
        let started = self.admin.0.map(|listen| AdminServer::start(listen, source));
        started.transpose().map_err(Failure::failed)
    }

    async fn start_http(&self, view: &Arc<View>, bridge: &Bridge) -> Result<Option<HttpServer>, Failure> {
        let Some(listen) = self.http.0 else {
            return Ok(None);
        };
        let token = read_token("http.token_file", self.http_token_file.as_deref());
        let parts = HttpParts::of_bridge(
            Arc::new(bridge.clone()),
            Arc::clone(view) as Arc<dyn AdminSource>,
            token.map_err(Failure::usage)?,
        );
        let limits = ConnectionLimits {
            connections_max: 256,
            per_source_max: 64,
            head_timeout: Duration::from_secs(75),
            age_max: None,
            drain_timeout: Duration::from_secs(2),
            head_bytes_max: HEAD_BYTES_MAX,
        };
        let started = HttpServer::start(listen, parts, limits).await;
        started.map(Some).map_err(Failure::failed)
    }
}

/// Prefix of the subjects on which services of NATS are asked, for example by `kvatlas doctor`.
const SERVICES: &str = "$SRV.";

/// Logs an incident of the NATS connection, and updates the bridge's readiness.
///
/// A bridge is ready while it is connected, because it has nothing to load. It stays ready if the server refuses a subscription
/// to `commands` (the subject of operators' commands) or to [`SERVICES`]. While the server refuses what the reports of engines need, it is not ready. Any other refusal is a trouble.
fn note(readiness: &Readiness, bridge: &Bridge, commands: &str, notice: &ConnectionNotice) {
    match notice {
        ConnectionNotice::Connected => {
            tracing::info!("connected to NATS");
            bridge.forget_refusals();
            readiness.set_trouble(Latch::EventsSubscribed, None);
            Latch::ALL.into_iter().for_each(|latch| readiness.set(latch));
        }
        ConnectionNotice::Disconnected => {
            tracing::warn!("the connection to NATS broke");
            readiness.clear(Latch::Connected);
        }
        ConnectionNotice::Error(text) => {
            log_gated!(warn "connection to NATS"; text);
            readiness.set_trouble(Latch::EventsSubscribed, Some(text.clone()));
        }
        ConnectionNotice::Refused(Refusal {
            refused: Refused::Subscription(Some(subject)),
            words,
        }) if subject == commands || subject.starts_with(SERVICES) => {
            log_gated!(
                warn "kvatlas admin reset is not heard, or kvatlas doctor does not find the bridge by itself";
                subject, words
            );
        }
        // A bridge subscribes for resyncs and publishes events: without one of the rights it is of no use.
        ConnectionNotice::Refused(refusal) => {
            log_gated!(error "the NATS server refuses what the bridge needs"; %refusal);
            if !bridge.note_refusal(refusal) {
                readiness.set_trouble(Latch::EventsSubscribed, Some(refusal.to_string()));
            }
        }
        ConnectionNotice::LameDuck | ConnectionNotice::SlowConsumer => {}
    }
}

/// Waits until the bridge has reached NATS, and then tells the supervisor that the bridge is ready. Never returns.
async fn announce_ready(readiness: &Readiness) {
    const INTERVAL: Duration = Duration::from_millis(20);
    while !readiness.report().is_ready() {
        tokio::time::sleep(INTERVAL).await;
    }
    supervisor::ready();
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        bridge: BridgeArguments,
    }

    fn listeners(flags: &[&str], environment: &[(&str, &str)]) -> Result<Listeners, Failure> {
        let command = Command::try_parse_from(std::iter::once(&"bridge").chain(flags)).unwrap();
        let environment: Vec<(String, String)> = environment
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect();
        command.bridge.listeners(&environment)
    }

    #[test]
    fn listeners_are_those_of_flags_over_the_environment_over_the_defaults() {
        let expected = |admin: &str, http: &str, token_file: Option<&str>| Listeners {
            admin: parse_listen(admin).unwrap(),
            http: parse_listen(http).unwrap(),
            http_token_file: token_file.map(PathBuf::from),
        };
        let defaults = expected("127.0.0.1:9465", "off", None);
        assert_eq!(listeners(&[], &[]), Ok(defaults));
        let empty = [("KVATLAS_ADMIN_LISTEN", ""), ("KVATLAS_HTTP_TOKEN_FILE", "")];
        assert_eq!(
            listeners(&[], &empty),
            Ok(expected("127.0.0.1:9465", "off", None))
        );
        let environment = [
            ("KVATLAS_ADMIN_LISTEN", "0.0.0.0:9464"),
            ("KVATLAS_HTTP_LISTEN", "0.0.0.0:8090"),
            ("KVATLAS_HTTP_TOKEN_FILE", "/run/token"),
        ];
        let of_environment = expected("0.0.0.0:9464", "0.0.0.0:8090", Some("/run/token"));
        assert_eq!(listeners(&[], &environment), Ok(of_environment));
        let flags = [
            "--admin-listen=off",
            "--http-listen=127.0.0.1:1",
            "--http-token-file=/own",
        ];
        let of_flags = expected("off", "127.0.0.1:1", Some("/own"));
        assert_eq!(listeners(&flags, &environment), Ok(of_flags));
        let failure = listeners(&[], &[("KVATLAS_HTTP_LISTEN", "8090")]).unwrap_err();
        assert!(failure.to_string().contains("KVATLAS_HTTP_LISTEN"), "{failure}");
    }
}
