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
use kvatlas_engines::Format;
use kvatlas_process::registry::{GivenEngine, follow_patiently, read_scheme};
use tokio::signal::unix::Signal;

use super::connect::parse_time;
use super::failure::Failure;
use super::serve::expect_regular;

/// Shortest time between two writes of one engine's state. The engine's replay socket can repeat the events of a far
/// longer time.
const STATE_INTERVAL: Duration = Duration::from_secs(5);
/// Name under which a bridge lists the engines from flags and from `--engines-file`.
const SOURCE: &str = "flags";

/// Which engines to follow.
#[derive(Debug, Args)]
pub(super) struct EngineArguments {
    /// Follow an engine: http://HOST:PORT or grpc://HOST:PORT of its server, which is asked for the rest. Or NAME=tcp://HOST:PORT and, joined by commas,
    /// replay=tcp://HOST:PORT, rank=N, ranks=N, format=WORD, model=NAME, tenant=NAME, block_size=N, topic=TEXT, groups=KIND/KIND,
    /// hybrid=true, eagle=true, divergent_hits=true; of dynamo discovery=PLACE. May be given many times.
    #[arg(long = "engine", value_name = "ENGINE")]
    engines: Vec<String>,
    /// TOML file with a list of tables [[engine]], with the same keys beside name and endpoint. Read again at SIGHUP.
    #[arg(long = "engines-file", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Find engines, and follow those that are there: dns:NAME[:PORT], file:PATH (as --engines-file, or a folder of such files; read again
    /// when it changes), kubernetes:SELECTOR[@NAMESPACE][:PORT], the pods with these labels,
    /// inferencepool:[NAMESPACE/]NAME, the pods of a pool, endpointslices:[NAMESPACE/]SERVICE[:PORT], or dynamo:etcd:http://HOST:PORT, the
    /// publishers in Dynamo's records. May be given many times.
    #[arg(long = "discover", value_name = "SOURCE")]
    sources: Vec<Discover>,
    /// Labels of pods that become labels of their engines, which answers give to routers: KEY,KEY. Of kubernetes: and inferencepool:.
    #[arg(long, value_name = "KEYS")]
    pod_labels: Option<PodLabels>,
    /// The model that engines serve, unless they say. An engine's server has to serve it.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The tenant or routing group that engines serve, unless they say.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Tokens in a block of engines that do not say [default: as the server or the first block of an engine says; where no server is
    /// asked 16, or with `up` what namespace_defaults.block_size is].
    #[arg(long, value_name = "TOKENS")]
    pub(super) block_size: Option<u32>,
    /// Tokens in a block of engines that nobody says it of, and that cannot be asked.
    #[arg(skip)]
    pub(super) untold_block_size: Option<u32>,
    /// Format of the payloads of engines that do not say: vllm, sglang, tensorrt-llm, dynamo or mooncake.
    #[arg(long, value_name = "WORD", default_value = "vllm", value_parser = parse_format)]
    format: Format,
    /// Hashes that name the blocks of engines that do not say: llm-d-xxh64, llm-d-cbor-fnv, sglang or vllm-sha256-cbor, with :SEED behind it
    /// where there is one [default: the contract's].
    #[arg(long, value_name = "SCHEME", value_parser = read_scheme)]
    scheme: Option<Scheme>,
    /// Follow so many engines at most, with those that are registered over HTTP.
    #[arg(long, value_name = "COUNT", default_value_t = 1024)]
    max_engines: usize,
    /// Hosts whose engines may be registered over HTTP: NAME, *.SUFFIX, ADDRESS, ADDRESS/BITS or any, joined by commas. This machine, the
    /// client's own address and the hosts of given engines are always allowed.
    #[arg(long, value_name = "HOSTS", default_value = "")]
    register_hosts: AllowedHosts,
    /// Directory of this bridge alone, in which what it knows of engines is kept, and which are registered: the next one goes on from there.
    /// Or nats:BUCKET[/NAME], the same in JetStream, for a bridge without a disk. Bridges with one --lease share it, and registrations.
    #[arg(long, value_name = "PLACE")]
    state: Option<StatePlace>,
    /// Name that all bridges have which follow the same engines: one of them tells daemons of an engine, and another does when it dies.
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    lease: Option<String>,
    /// Publish engines' events once more, for routers with an index of their own, at two ports for each engine, events and replays:
    /// tcp://HOST:PORT-PORT, of which each engine gets two when it comes; tcp://HOST:PORT, for the engines of flags and file in their order; or
    /// NAME=tcp://HOST:PORT for one engine. May be given many times.
    #[arg(long = "republish", value_name = "ADDRESS")]
    republish: Vec<RepublishAddress>,
    /// Publish blocks with a salt, an adapter or an image, too. vLLM's router credits them to prompts without.
    #[arg(long)]
    republish_everything: bool,
    /// Keep so many bytes of blocks with their tokens for one engine at most; a block of 16 tokens takes 100.
    #[arg(long, value_name = "BYTES", default_value_t = 134_217_728)]
    republish_max_bytes: usize,
    /// Ports at which Dynamo's workers answer, such as 7300-7315, for a firewall that lets them in [default: any that are free].
    #[arg(long, value_name = "PORT[-PORT]")]
    answer_ports: Option<AnswerPorts>,
    /// Silence after which another process at an engine's sockets is in doubt until it clears, unless its name is the address of its server,
    /// or its source knows it by more than that: 600, 2.5s or 500ms. As daemons' namespace_defaults.remove_after_ms, after which they remove
    /// who is silent [default: 600s; with `up` that setting].
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    give_up_after: Option<Duration>,
    /// Silence after which the daemon of this process removes a holder.
    #[arg(skip)]
    pub(super) remove_after: Option<Duration>,
    /// Keep so many names of blocks for one engine at most; one takes about 120 bytes.
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
    /// Returns the model of `--model`, which is the default for engines that name no model.
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether some `--discover` source is given.
    pub(super) fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Reads the file again, and returns the engines that flags and the file name.
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

    /// Returns the default properties of engines, for specifications that leave properties out.
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

    /// Returns the time of silence after which another process at an engine's sockets no longer counts as that engine. Warns if
    /// this time is longer than the time after which the daemon of this process removes silent holders.
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

    /// Creates a bridge that will follow `engines`. With a `register_token`, clients elsewhere need that token to register
    /// further engines.
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

    /// Reads the engines again at every SIGHUP, for ever. If the file cannot be used, the bridge keeps following the same
    /// engines.
    pub(super) async fn reload_at(&self, mut hangup: Signal, bridge: &Bridge) {
        while hangup.recv().await.is_some() {
            // The signals wait meanwhile, so a pipe is not read.
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
        std::future::pending().await
    }
}
