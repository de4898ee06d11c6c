//! Arguments about engines, which the commands `bridge` and `up` share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use kvatlas_bridge::{
    AllowedHosts, AnswerPorts, Bridge, BridgeOptions, Discover, DiscoverOptions, EngineDefaults,
    FollowOptions, LeaseOptions, LeaseTimes, PodLabels, RepublishAddress, RepublishOptions, SpecError,
    StateDirectory, StatePlace, parse_engine, parse_engines_file,
};
use kvatlas_config::Secret;
use kvatlas_core::hash::Scheme;
use kvatlas_core::index::Namespaces;
use kvatlas_core::wire::{NamespaceName, Subjects};
use kvatlas_daemon::http::TokenError;
use kvatlas_engines::Format;
use kvatlas_process::registry::{GivenEngine, follow_patiently, read_scheme};

use super::connect::parse_time;
use super::failure::Failure;
use super::serve::{Hangups, expect_regular};

/// Shortest time between two writes of one engine's state. After a restart, the bridge brings a state of this age up to
/// date: the engine's replay socket repeats the events of a far longer time.
const STATE_INTERVAL: Duration = Duration::from_secs(5);
/// Name under which a bridge lists the engines from flags and from `--engines-file`.
const SOURCE: &str = "flags";

/// Engines to follow, and the ways in which a bridge follows them.
#[derive(Debug, Args)]
pub(super) struct EngineArguments {
    /// Follow an engine. Give http://HOST:PORT or grpc://HOST:PORT of its server, which is asked for the rest. Or give
    /// NAME=tcp://HOST:PORT and, joined by commas, replay=tcp://HOST:PORT, rank=N, ranks=N, format=WORD, model=NAME,
    /// tenant=NAME, block_size=N, topic=TEXT, groups=KIND/KIND, hybrid=true, eagle=true, divergent_hits=true; for
    /// dynamo also discovery=PLACE. May be given many times.
    #[arg(long = "engine", value_name = "ENGINE")]
    engines: Vec<String>,
    /// TOML file with a list of tables [[engine]]. A table has name, endpoint, and the keys of --engine. Read again at
    /// SIGHUP.
    #[arg(long = "engines-file", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Follow the engines that are found in a source: dns:NAME[:PORT]; file:PATH (like --engines-file, or a folder of
    /// such files; read again when it changes); kubernetes:SELECTOR[@NAMESPACE][:PORT] for the pods with these labels;
    /// inferencepool:[NAMESPACE/]NAME for the pods of a pool; endpointslices:[NAMESPACE/]SERVICE[:PORT]; or
    /// dynamo:etcd:http://HOST:PORT for the publishers in Dynamo's records. May be given many times.
    #[arg(long = "discover", value_name = "SOURCE")]
    sources: Vec<Discover>,
    /// Keys of pods' labels that become labels of the engines, so that answers give them to routers: KEY,KEY. For the
    /// sources kubernetes: and inferencepool:.
    #[arg(long, value_name = "KEYS")]
    pod_labels: Option<PodLabels>,
    /// Model of engines that name no model. An engine's server must serve this model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Tenant or routing group of engines that name none.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Tokens in a block, for engines that name no block size [default: the size that the engine's server or first
    /// block tells; if there is no server to ask, 16, or with `up` the value of namespace_defaults.block_size].
    #[arg(long, value_name = "TOKENS")]
    pub(super) block_size: Option<u32>,
    /// Tokens in a block, for engines that cannot be asked and for which no block size is given.
    #[arg(skip)]
    pub(super) untold_block_size: Option<u32>,
    /// Format of the payloads, for engines that name none: vllm, sglang, tensorrt-llm, dynamo or mooncake.
    #[arg(long, value_name = "WORD", default_value = "vllm", value_parser = parse_format)]
    format: Format,
    /// Scheme of the hashes that name blocks, for engines that name none: llm-d-xxh64, llm-d-cbor-fnv, sglang or
    /// vllm-sha256-cbor, followed by :SEED if there is a seed [default: the contract's].
    #[arg(long, value_name = "SCHEME", value_parser = read_scheme)]
    scheme: Option<Scheme>,
    /// Follow at most so many engines, including those that are registered over HTTP.
    #[arg(long, value_name = "COUNT", default_value_t = 1024)]
    max_engines: usize,
    /// Hosts whose engines may be registered over HTTP: NAME, *.SUFFIX, ADDRESS, ADDRESS/BITS or any, joined by commas.
    /// This machine, the client's own address and the hosts of given engines are always allowed.
    #[arg(long, value_name = "HOSTS", default_value = "")]
    register_hosts: AllowedHosts,
    /// Directory of this bridge alone, in which it keeps its knowledge of engines, and the registered engines; the next
    /// process continues from there. Or nats:BUCKET[/NAME], which keeps the same in JetStream, for a bridge without a
    /// disk. Bridges with the same --lease share that place, and registrations.
    #[arg(long, value_name = "PLACE")]
    state: Option<StatePlace>,
    /// Name of the group of bridges that follow the same engines: one bridge of the group tells daemons about an
    /// engine, and another takes over when it dies.
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    lease: Option<String>,
    /// Republish engines' events, for routers with an index of their own, at two ports for each engine: events and
    /// replays. Give tcp://HOST:PORT-PORT, a range from which each engine gets two ports when it comes;
    /// tcp://HOST:PORT, for the engines of flags and file in their order; or NAME=tcp://HOST:PORT for one engine. May
    /// be given many times.
    #[arg(long = "republish", value_name = "ADDRESS")]
    republish: Vec<RepublishAddress>,
    /// Also republish blocks with a salt, an adapter or an image. vLLM's router credits them to prompts without these.
    #[arg(long)]
    republish_everything: bool,
    /// Keep at most so many bytes of one engine's blocks with their tokens, for --republish; a block of 16 tokens takes
    /// 100 bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 134_217_728)]
    republish_max_bytes: usize,
    /// Ports on which the bridge receives answers of Dynamo's workers, such as 7300-7315, so that a firewall can let
    /// them in [default: any free ports].
    #[arg(long, value_name = "PORT[-PORT]")]
    answer_ports: Option<AnswerPorts>,
    /// Silence of an engine after which another process at its sockets is in doubt until it clears all blocks: 600,
    /// 2.5s or 500ms. The process is not in doubt if the engine's name is the address of its server, or if its source
    /// recognises the engine by more than the address. The time should equal namespace_defaults.remove_after_ms, after
    /// which daemons remove silent holders [default: 600s; with `up` that setting].
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    give_up_after: Option<Duration>,
    /// Silence after which the daemon of this process removes a holder.
    #[arg(skip)]
    pub(super) remove_after: Option<Duration>,
    /// Keep at most so many block names of one engine; a name takes about 120 bytes.
    #[arg(long, value_name = "COUNT", default_value_t = 4_194_304)]
    max_blocks_per_engine: usize,
}

/// Parses the name of a group of bridges, as `--lease` takes it. The name becomes the last token of a subject.
fn parse_group(name: &str) -> Result<String, String> {
    let checked = NamespaceName::new(name).map_err(|error| error.to_string())?;
    Ok(checked.to_string())
}

fn parse_format(word: &str) -> Result<Format, String> {
    Format::from_word(word).ok_or_else(|| {
        let known = Format::WORDS.join(", ");
        format!("known are {known}")
    })
}

impl From<SpecError> for Failure {
    fn from(error: SpecError) -> Self {
        Self::usage(error)
    }
}

impl EngineArguments {
    /// Whether some `--discover` source is given.
    pub(super) fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Reads the file of `--engines-file` again, and returns the engines that flags and the file name.
    pub(super) fn load(&self) -> Result<Vec<GivenEngine>, SpecError> {
        let defaults = self.defaults();
        let mut engines = Vec::new();
        for text in &self.engines {
            engines.extend(parse_engine(text, &defaults)?);
        }
        if let Some(path) = &self.file {
            engines.extend(parse_engines_file(path, &defaults)?);
        }
        Ok(engines)
    }

    /// Returns the properties that engines get if their specifications leave them out.
    fn defaults(&self) -> EngineDefaults {
        let unsaid = EngineDefaults::default();
        EngineDefaults {
            model: self.model.clone(),
            tenant: self.tenant.clone(),
            block_size: self.block_size,
            untold_block_size: self.untold_block_size.unwrap_or(unsaid.untold_block_size),
            format: self.format,
            scheme: self.scheme.clone(),
            pod_labels: self.pod_labels.clone().unwrap_or_default(),
        }
    }

    /// Returns the time of silence after which another process at an engine's sockets no longer counts as that engine.
    /// Warns if this time is longer than the time after which the daemon of this process removes silent holders.
    fn give_up_after(&self) -> Duration {
        let by_default = || {
            self.remove_after
                .unwrap_or(FollowOptions::default().give_up_after)
        };
        let give_up_after = self.give_up_after.unwrap_or_else(by_default);
        if self
            .remove_after
            .is_some_and(|remove_after| give_up_after > remove_after)
        {
            tracing::warn!(
                ?give_up_after,
                remove_after = ?self.remove_after,
                "whoever has the sockets of an engine that the daemon has removed is taken for it until --give-up-after: \
                 do not let that be longer than namespace_defaults.remove_after_ms"
            );
        }
        give_up_after
    }

    /// Returns the options for republishing engines' events; `None` without `--republish`.
    fn republished(&self) -> Result<Option<RepublishOptions>, Failure> {
        let options = RepublishOptions {
            addresses: self.republish.clone(),
            has_special: self.republish_everything,
            bytes_max: self.republish_max_bytes,
        };
        options.check().map_err(Failure::usage)?;
        let has_bucket = matches!(self.state, Some(StatePlace::Bucket { .. }));
        if options.has_range() && self.lease.is_some() && !has_bucket {
            return Err(Failure::usage(
                "bridges with one --lease need --state nats:BUCKET to give an engine the same ports of a range (--republish)",
            ));
        }
        Ok((!options.addresses.is_empty()).then_some(options))
    }

    /// Creates a bridge that will follow `engines`. If there is a `register_token`, clients on other machines need it
    /// to register further engines.
    pub(super) fn bridge(
        &self,
        subjects: Subjects,
        namespaces: Option<Arc<Namespaces>>,
        engines: &[GivenEngine],
        register_token: Option<Secret>,
    ) -> Result<Bridge, Failure> {
        let republish = self.republished()?;
        let group = self.lease.as_deref();
        let open = |place| StateDirectory::open_place(place, group, &subjects, STATE_INTERVAL);
        let state = self.state.as_ref().map(open);
        let options = BridgeOptions {
            state: state.transpose().map_err(Failure::usage)?,
            lease: self.lease.clone().map(|group| LeaseOptions {
                group,
                times: LeaseTimes::default(),
            }),
            follow: FollowOptions {
                blocks_max: self.max_blocks_per_engine,
                give_up_after: self.give_up_after(),
                answer_ports: self.answer_ports.clone().unwrap_or_default(),
                ..FollowOptions::default()
            },
            namespaces,
            engines_max: self.max_engines,
            register_hosts: self.register_hosts.clone(),
            register_token,
            republish,
            ..BridgeOptions::default()
        };
        let bridge = Bridge::new(subjects, options);
        bridge.assign_republished(engines);
        bridge.replace(SOURCE, engines).map_err(|refused| {
            let texts: Vec<String> = refused.iter().map(ToString::to_string).collect();
            Failure::usage(texts.join("; "))
        })?;
        bridge.take_up_registered();
        let defaults = self.defaults();
        for source in &self.sources {
            bridge.discover(source, &defaults, DiscoverOptions::default());
        }
        Ok(bridge)
    }

    /// Reads the engines again at every SIGHUP, and the tokens of listeners by `read_tokens`. Returns when a SIGHUP
    /// says that the terminal is gone. If the file cannot be used, the bridge keeps following the same engines.
    pub(super) async fn reload_at(
        &self,
        mut hangups: Hangups,
        bridge: &Bridge,
        read_tokens: impl Fn() -> Result<Vec<&'static str>, TokenError>,
    ) {
        while hangups.asks_for_reload().await {
            match read_tokens() {
                Ok(changed) => changed
                    .iter()
                    .for_each(|setting| tracing::info!(setting, "a token was read again")),
                Err(error) => tracing::error!(%error, "the tokens stay as they are"),
            }
            // No signal is handled while the file is read. So only a regular file is read: a pipe could block.
            let regular = self.file.as_deref().map_or(Ok(()), expect_regular);
            let loaded = match regular {
                Ok(()) => self.load().map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let engines = match loaded {
                Ok(engines) => engines,
                Err(error) => {
                    tracing::error!(error, "the engines stay as they are");
                    continue;
                }
            };
            bridge.assign_republished(&engines);
            match follow_patiently(|| bridge.replace(SOURCE, &engines)).await {
                Ok(()) => tracing::info!(engines = engines.len(), "engines read again"),
                Err(refused) => {
                    for refusal in refused {
                        tracing::error!(%refusal, "an engine is not followed");
                    }
                }
            }
        }
    }
}
