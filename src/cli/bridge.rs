//! `kvatlas bridge`: follows engines, and publishes their blocks to daemons in other processes.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvatlas_bridge::{Bridge, RouterQuestion};
use kvatlas_config::{Config, process_environment};
use kvatlas_core::wire::{Address, AdminCommand, Subjects};
use kvatlas_daemon::http::{HEAD_BYTES_MAX, HttpParts, HttpServer, ReadTokens, TokenFiles};
use kvatlas_process::admin::{AdminServer, AdminSource, Latch, Readiness, ReadinessReport, WorkersQuery};
use kvatlas_process::broker::{ConnectPatience, ConnectionNotice, Refusal, Refused, connect};
use kvatlas_process::listener::ConnectionLimits;
use kvatlas_process::presence::advertised;
use kvatlas_process::present_bridge;
use kvatlas_process::registry::{EngineRegistry, EnginesReport};
use kvatlas_telemetry::{LogFormat, MetricsHandle, ProcessMetrics, install_shared, log_gated};
use tokio_util::sync::CancellationToken;

use super::connect::{DaemonArguments, given_flags};
use super::engines::EngineArguments;
use super::failure::Failure;
use super::nats_context::Surroundings;
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
/// Returns the longest time that it may take to stop a bridge: 5 s if the bridge is connected to NATS, else 0.5 s.
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
    /// Address for metrics and probes; port 0 takes a free one, off disables them [default: 127.0.0.1:9465]
    /// [environment: KVATLAS_ADMIN_LISTEN].
    #[arg(long, value_name = "ADDRESS")]
    admin_listen: Option<String>,
    /// Address to register engines at over HTTP; port 0 takes a free one, off disables it [default: off] [environment:
    /// KVATLAS_HTTP_LISTEN].
    #[arg(long, value_name = "ADDRESS")]
    http_listen: Option<String>,
    /// File with the bearer token that HTTP requests need [environment: KVATLAS_HTTP_TOKEN_FILE].
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<String>,
    /// Which log lines to write [default: info] [environment: KVATLAS_LOGGING_LEVEL].
    #[arg(long, value_name = "FILTER")]
    logging_level: Option<String>,
    /// Write log lines as JSON [environment: KVATLAS_LOGGING_FORMAT=json].
    #[arg(long)]
    logging_json: bool,
    /// At the end, tell daemons to forget the engines at once.
    #[arg(long)]
    forget: bool,
}

/// Answers the questions that reach the bridge's admin listener.
struct View {
    bridge: Bridge,
    readiness: Arc<Readiness>,
    metrics: MetricsHandle,
    process: ProcessMetrics,
}

impl AdminSource for View {
    fn metrics(&self) -> String {
        let report = self.readiness();
        self.process.ready.set(f64::from(report.is_ready()));
        let is_connected = report.is_set(Latch::Connected);
        self.process.connected.set(f64::from(is_connected));
        self.process.publish_usage();
        self.metrics.render()
    }

    /// Returns whether the bridge is ready, and why not. It is ready while it is connected to NATS, unless the server
    /// refuses a right that it needs to report engines.
    fn readiness(&self) -> ReadinessReport {
        self.readiness.report()
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
        serde_json::json!({ "engines": engines, "servers": servers, "sources": self.bridge.sources() })
            .to_string()
    }

    fn router_flags(&self, query: Option<&str>) -> Option<Result<String, String>> {
        match RouterQuestion::parse(query) {
            Ok(question) => self.bridge.router_flags(&question).map(Ok),
            Err(error) => Some(Err(error.to_owned())),
        }
    }

    fn index_json(&self) -> String {
        let engines = EnginesReport::of(&self.bridge);
        serde_json::json!({ "role": "bridge", "namespaces": [], "engines": engines }).to_string()
    }
}

impl BridgeArguments {
    /// Loads the settings. The container image sets `KVATLAS_ADMIN_LISTEN`, so the address of the admin listener may
    /// come from the environment, where `kvatlas probe` reads it, too.
    fn load(
        &self,
        environment: Vec<(String, String)>,
        surroundings: &Surroundings,
    ) -> Result<Config, Failure> {
        let (environment, mut flags) = self.daemon.sources(false, environment, surroundings)?;
        let logging_format = self.logging_json.then(|| LogFormat::Json.as_str().to_owned());
        flags.extend(given_flags([
            ("logging.level", &self.logging_level),
            ("logging.format", &logging_format),
            ("admin.listen", &self.admin_listen),
            ("http.listen", &self.http_listen),
            ("http.token_file", &self.http_token_file),
        ]));
        Ok(Config::load_for_bridge(flags, environment.into_iter())?)
    }

    /// Follows engines until the process is told to stop.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        // First of all: until then, SIGHUP would end the process.
        let (mut signals, hangups) = (StopSignals::listen()?, Hangups::listen()?);
        let config = self.load(process_environment(), &Surroundings::of_process())?;
        start_logging(&config.logging)?;
        let subjects = Subjects::new(&config.subjects.prefix).map_err(Failure::usage)?;
        let engines = self.engines.load()?;
        if engines.is_empty() && !self.engines.has_sources() && config.http.listen.is_none() {
            let text =
                "there is no engine to follow: give --engine, --engines-file, --discover or --http-listen";
            return Err(Failure::usage(text));
        }
        let commands = subjects.admin(AdminCommand::Reset);
        let metrics = install_shared().map_err(Failure::failed)?;
        let bridge = self.engines.bridge(subjects.clone(), None, &engines, None)?;
        let readiness = Arc::new(Readiness::new());
        let refusing = bridge.clone();
        readiness.follow_refusals(Latch::EnginesFollowed, move || refusing.refusals());
        let view = Arc::new(View {
            bridge: bridge.clone(),
            readiness: Arc::clone(&readiness),
            metrics,
            process: ProcessMetrics::new(),
        });
        let admin = start_admin(&config, &view)?;
        let tokens = TokenFiles::default();
        let http = start_http(&config, &view, &bridge, &tokens).await?;
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
        let host = config.admin.advertise.as_deref();
        let place = admin.as_ref().map(|admin| advertised(host, admin.local_addr()));
        let presence = CancellationToken::new();
        let (until, refused) = (presence.clone(), bridge.refused_optional().clone());
        tokio::spawn(async move {
            present_bridge(nats, &config.subjects.prefix, place, subjects, until, &refused).await;
        });
        tracing::info!(engines = engines.len(), "the bridge follows engines");
        tokio::spawn(supervisor::keep_watchdog());
        let signal = tokio::select! {
            signal = signals.next() => signal,
            () = announce_ready(&ready) => "the end of the connection",
            () = self.engines.reload_at(hangups, &bridge, || tokens.read_again().map(ReadTokens::replace)) => "SIGHUP",
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
                // Without a connection, no daemon can be told that the engines are no longer followed.
                tracing::warn!(
                    "NATS could not be reached, so daemons were not told; they find the engines stale"
                );
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

fn start_admin(config: &Config, view: &Arc<View>) -> Result<Option<AdminServer>, Failure> {
    let source: Arc<dyn AdminSource> = Arc::clone(view) as Arc<dyn AdminSource>;
    let started = config
        .admin
        .listen
        .map(|listen| AdminServer::start(listen, source));
    started.transpose().map_err(Failure::failed)
}

async fn start_http(
    config: &Config,
    view: &Arc<View>,
    bridge: &Bridge,
    tokens: &TokenFiles,
) -> Result<Option<HttpServer>, Failure> {
    let Some(listen) = config.http.listen else {
        return Ok(None);
    };
    let token = tokens.read("http.token_file", config.http.token_file.as_deref());
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
        unread_timeout: Duration::ZERO,
    };
    let started = HttpServer::start(listen, parts, limits).await;
    started.map(Some).map_err(Failure::failed)
}

/// Prefix of the subjects on which services of NATS are asked, for example by `kvatlas doctor`.
const SERVICES: &str = "$SRV.";

/// Logs an incident of the NATS connection, and updates the bridge's readiness.
///
/// A bridge is ready while it is connected, because it has nothing to load, and unless [`note_refusal`] notes that the
/// server refuses what the bridge needs. Any other refusal is noted as a trouble.
fn note(readiness: &Readiness, bridge: &Bridge, commands: &str, notice: &ConnectionNotice) {
    match notice {
        ConnectionNotice::Connected => {
            tracing::info!("connected to NATS");
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
        ConnectionNotice::Refused(refusal) => {
            if !note_refusal(bridge, commands, refusal) {
                readiness.set_trouble(Latch::EventsSubscribed, Some(refusal.to_string()));
            }
        }
        ConnectionNotice::LameDuck | ConnectionNotice::SlowConsumer => {}
    }
}

/// Logs a refusal of the NATS server, and notes it in the bridge. Returns `false` for a refusal that the bridge does
/// not know.
///
/// A bridge needs the right to subscribe for resyncs and the right to publish events. Without either right it is of no
/// use. It can do without the subscription to `commands` (the subject of operators' commands) and to [`SERVICES`].
pub(super) fn note_refusal(bridge: &Bridge, commands: &str, refusal: &Refusal) -> bool {
    if let Refused::Subscription(Some(subject)) = &refusal.refused
        && (subject == commands || subject.starts_with(SERVICES))
    {
        bridge.refused_optional().count();
        log_gated!(
            warn "kvatlas admin reset is not heard, or kvatlas doctor does not find the bridge by itself";
            subject, words = refusal.words
        );
        return true;
    }
    log_gated!(error "the NATS server refuses what the bridge needs"; %refusal);
    bridge.note_refusal(refusal)
}

/// Waits until the bridge has reached NATS, and then tells the supervisor that the bridge is ready. Never returns.
async fn announce_ready(readiness: &Readiness) {
    const INTERVAL: Duration = Duration::from_millis(20);
    while !readiness.report().is_set(Latch::Connected) {
        tokio::time::sleep(INTERVAL).await;
    }
    supervisor::ready();
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::PathBuf;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        bridge: BridgeArguments,
    }

    type Listening = (Option<SocketAddr>, Option<SocketAddr>, Option<PathBuf>);

    fn listening(flags: &[&str], environment: &[(&str, &str)]) -> Result<Listening, Failure> {
        let command = Command::try_parse_from(std::iter::once(&"bridge").chain(flags)).unwrap();
        let environment = environment
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let loaded = command
            .bridge
            .load(environment.collect(), &Surroundings::default())?;
        let http = loaded.http;
        Ok((loaded.admin.listen, http.listen, http.token_file))
    }

    #[test]
    fn logging_is_that_of_flags_over_the_environment_over_the_defaults() {
        let logged = |flags: &[&str], environment: &[(&str, &str)]| {
            let command = Command::try_parse_from(std::iter::once(&"bridge").chain(flags)).unwrap();
            let own = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
            let environment = environment.iter().map(own).collect();
            let loaded = command
                .bridge
                .load(environment, &Surroundings::default())
                .unwrap();
            (loaded.logging.format, loaded.logging.level)
        };
        let expected = |format, level: &str| (format, level.to_owned());
        assert_eq!(logged(&[], &[]), expected(LogFormat::Text, "info"));
        let environment = [
            ("KVATLAS_LOGGING_FORMAT", "json"),
            ("KVATLAS_LOGGING_LEVEL", "warn"),
        ];
        assert_eq!(logged(&[], &environment), expected(LogFormat::Json, "warn"));
        let flags = ["--logging-level", "error", "--logging-json"];
        assert_eq!(logged(&flags, &environment), expected(LogFormat::Json, "error"));
        assert_eq!(logged(&flags, &[]), expected(LogFormat::Json, "error"));
    }

    #[test]
    fn listeners_are_those_of_flags_over_the_environment_over_the_defaults() {
        let address = |text: &str| Some(text.parse().unwrap());
        let defaults = (address("127.0.0.1:9465"), None, None);
        assert_eq!(listening(&[], &[]), Ok(defaults.clone()));
        let empty = [("KVATLAS_ADMIN_LISTEN", ""), ("KVATLAS_HTTP_TOKEN_FILE", "")];
        assert_eq!(listening(&[], &empty), Ok(defaults));
        let token = tempfile::NamedTempFile::new().unwrap();
        let own = tempfile::NamedTempFile::new().unwrap();
        let environment = [
            ("KVATLAS_ADMIN_LISTEN", "0.0.0.0:9464"),
            ("KVATLAS_HTTP_LISTEN", "0.0.0.0:8090"),
            ("KVATLAS_HTTP_TOKEN_FILE", token.path().to_str().unwrap()),
            // Only a daemon reads this.
            ("KVATLAS_EVENTS_LANES", "x"),
        ];
        let of_environment = (
            address("0.0.0.0:9464"),
            address("0.0.0.0:8090"),
            Some(token.path().to_owned()),
        );
        assert_eq!(listening(&[], &environment), Ok(of_environment));
        let flags = [
            "--admin-listen=off",
            "--http-listen=127.0.0.1:1",
            &format!("--http-token-file={}", own.path().display()),
        ];
        let of_flags = (None, address("127.0.0.1:1"), Some(own.path().to_owned()));
        assert_eq!(listening(&flags, &environment), Ok(of_flags));
        let failure = listening(&[], &[("KVATLAS_HTTP_LISTEN", "8090")]).unwrap_err();
        assert!(failure.to_string().contains("KVATLAS_HTTP_LISTEN"), "{failure}");
    }
}
