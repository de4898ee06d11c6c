//! Engines as people write them, in flags and in a TOML file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use kvatlas_core::hash::Scheme;
use kvatlas_core::wire::{Address, Labels, ModelKey, Profile, ProfileError};
use kvatlas_engines::{Format, GroupFacts};

use kvatlas_config::NoDiscovery;
use kvatlas_process::registry::{
    BesideEvents, Discovered, EngineKey, GivenEngine, NewEngine, NewServer, read_scheme,
};

use super::check::{check_engine, check_server};
use super::discovery::PodLabels;
use super::http::ServerAddress;

/// Maximum number of ranks that one line names.
const RANKS_MAX: u32 = 1024;
/// Maximum size of a file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Fault in the text that describes an engine.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// A flag does not have the expected form.
    #[error(
        "--engine {text:?}: {reason}; write http://HOST:PORT or grpc://HOST:PORT, or NAME=tcp://HOST:PORT and, joined by commas, replay=tcp://HOST:PORT, \
         rank=N, ranks=N, format=WORD, model=NAME, tenant=NAME, block_size=N, topic=TEXT, adapters=NUMBER:NAME, salts=untold|none, lookahead=untold, \
         tiers=told, groups=KIND/KIND, hybrid=true, eagle=true, divergent_hits=true, scheme=SCHEME, address=HOST:PORT, label=KEY:VALUE, \
         discovery=PLACE"
    )]
    Flag {
        /// The flag's value.
        text: String,
        /// Text that says what is wrong.
        reason: String,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The file is larger than any list of engines.
    #[error("{} has more than {FILE_BYTES_MAX} bytes", path.display())]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file does not have the expected form.
    #[error("{}: {reason}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Text that says what is wrong, and where.
        reason: String,
    },
}

/// Settings of engines for which no other settings are given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineDefaults {
    /// Model; `None` if each engine, or its server, has to tell its own.
    pub model: Option<String>,
    /// Tenant of the engines.
    pub tenant: Option<String>,
    /// Number of tokens in a block; `None` if it is not given for all engines.
    pub block_size: Option<u32>,
    /// Number of tokens in a block that is assumed for an engine if no block size is given and the engine cannot be
    /// asked.
    pub untold_block_size: u32,
    /// Format of the engines' payloads.
    pub format: Format,
    /// Scheme of the hashes by which engines name blocks; `None` for the contract's hashes.
    pub scheme: Option<Scheme>,
    /// Keys of pod labels that are copied to the engines found as pods.
    pub pod_labels: PodLabels,
}

impl Default for EngineDefaults {
    fn default() -> Self {
        Self {
            model: None,
            tenant: None,
            block_size: None,
            untold_block_size: 16,
            format: Format::Vllm,
            scheme: None,
            pod_labels: PodLabels::default(),
        }
    }
}

impl EngineDefaults {
    /// Makes a server that has only these default settings. It has no name and no address yet.
    pub(super) fn server(&self) -> NewServer {
        NewServer {
            instance: String::new(),
            url: String::new(),
            model: self.model.clone(),
            tenant: ModelKey::of_tenant("", self.tenant.clone().unwrap_or_default()).tenant,
            format: self.format,
            block_size: self.block_size,
            beside: BesideEvents::default(),
            groups: GroupFacts::default(),
            discovered: Discovered::default(),
            scheme: self.scheme.clone(),
            profile: Profile::default(),
            ttl: None,
        }
    }
}

/// Parsed text that describes one engine.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineText {
    /// Name of the engine; empty if a server is to be named by its host and port.
    #[serde(default)]
    name: String,
    endpoint: String,
    replay: Option<String>,
    rank: Option<u32>,
    ranks: Option<u32>,
    format: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    block_size: Option<u32>,
    topic: Option<String>,
    adapters: Option<String>,
    salts: Option<String>,
    lookahead: Option<String>,
    tiers: Option<String>,
    groups: Option<Vec<String>>,
    hybrid: Option<bool>,
    eagle: Option<bool>,
    divergent_hits: Option<bool>,
    address: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    scheme: Option<String>,
    discovery: Option<String>,
}

/// Parses the engines of one `--engine`: one engine, or one for each rank.
///
/// # Errors
///
/// [`SpecError::Flag`].
pub fn parse_engine(text: &str, defaults: &EngineDefaults) -> Result<Vec<GivenEngine>, SpecError> {
    let failed = |reason: String| SpecError::Flag {
        text: text.to_owned(),
        reason,
    };
    parse_flag(text)
        .and_then(|engine| engine.resolve(defaults))
        .map_err(failed)
}

fn parse_flag(text: &str) -> Result<EngineText, String> {
    let mut parts = text.split(',');
    let first = parts.next().unwrap_or_default();
    let (name, endpoint) = match first.split_once('=') {
        Some(named) => named,
        None if GivenEngine::is_url(first) => ("", first),
        None => return Err("the name or the endpoint is missing".to_owned()),
    };
    let (mut engine, mut labels) = (toml::Table::new(), BTreeMap::new());
    engine.insert("name".to_owned(), name.into());
    engine.insert("endpoint".to_owned(), endpoint.into());
    for part in parts {
        let (key, value) = part
            .split_once('=')
            .ok_or_else(|| format!("{part:?} has no value"))?;
        let twice = match key {
            "label" => {
                let (key, value) = value
                    .split_once(':')
                    .ok_or_else(|| format!("label is {value:?}; write KEY:VALUE"))?;
                labels.insert(key.to_owned(), value.to_owned()).is_some()
            }
            "name" | "endpoint" | "labels" => {
                return Err(format!(
                    "there is no key {key}: write NAME=ENDPOINT first, and label=KEY:VALUE"
                ));
            }
            _ => engine.insert(key.to_owned(), toml_value(key, value)?).is_some(),
        };
        if twice {
            return Err(format!("{key} is given twice"));
        }
    }
    // The keys of the flag, which differ a little from those of a file, are listed behind any reason.
    let reason = |error: toml::de::Error| error.message().split(", expected one of").take(1).collect();
    let engine = EngineText::deserialize(engine).map_err::<String, _>(reason)?;
    Ok(EngineText { labels, ..engine })
}

/// Returns the value of a key of the flag `--engine` as a TOML file has it.
fn toml_value(key: &str, value: &str) -> Result<toml::Value, String> {
    Ok(match key {
        "rank" | "ranks" | "block_size" => {
            let number = value.parse::<u32>();
            let number = number.map_err(|_| format!("{key} is {value:?}, which is no number"))?;
            number.into()
        }
        "hybrid" | "eagle" | "divergent_hits" => {
            let flag = value.parse::<bool>();
            flag.map_err(|_| format!("{key} is {value:?}; write true or false"))?
                .into()
        }
        "groups" => value.split('/').collect::<Vec<_>>().into(),
        _ => value.into(),
    })
}

/// Reads the engines of a TOML file: a list of tables `[[engine]]` with the keys `name`, `endpoint`, and the keys of
/// the flag `--engine`.
///
/// # Errors
///
/// Every [`SpecError`] except [`SpecError::Flag`].
pub fn parse_engines_file(path: &Path, defaults: &EngineDefaults) -> Result<Vec<GivenEngine>, SpecError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        #[serde(default)]
        engine: Vec<EngineText>,
    }

    let read = |source| SpecError::Read {
        path: path.to_owned(),
        source,
    };
    let failed = |reason: String| SpecError::File {
        path: path.to_owned(),
        reason,
    };
    if std::fs::metadata(path).map_err(read)?.len() > FILE_BYTES_MAX {
        return Err(SpecError::TooLarge {
            path: path.to_owned(),
        });
    }
    let text = std::fs::read_to_string(path).map_err(read)?;
    let file: File = toml::from_str(&text).map_err(|error| failed(error.to_string()))?;
    let mut engines = Vec::new();
    for engine in file.engine {
        let name = engine.name.clone();
        let resolved = engine.resolve(defaults);
        engines.extend(resolved.map_err(|reason| failed(format!("engine {name:?}: {reason}")))?);
    }
    Ok(engines)
}

/// Facts that an engine never tells, neither by its events nor by its server.
struct UntoldFacts {
    beside: BesideEvents,
    groups: GroupFacts,
    scheme: Option<Scheme>,
    profile: Profile,
}

impl EngineText {
    fn facts(&self) -> Result<UntoldFacts, String> {
        Ok(UntoldFacts {
            beside: BesideEvents::parse(
                self.adapters.as_deref(),
                self.salts.as_deref(),
                self.lookahead.as_deref(),
                self.tiers.as_deref(),
            )?,
            groups: self.group_facts()?,
            scheme: self.scheme.as_deref().map(read_scheme).transpose()?,
            profile: self.profile().map_err(|error| error.to_string())?,
        })
    }

    fn group_facts(&self) -> Result<GroupFacts, String> {
        let words = self.groups.iter().flatten().map(String::as_str);
        Ok(GroupFacts {
            kinds: GroupFacts::read_kinds(words)?,
            is_hybrid: self.hybrid.unwrap_or_default(),
            has_eagle_drop: self.eagle.unwrap_or_default(),
            has_divergent_hits: self.divergent_hits.unwrap_or_default(),
        })
    }

    fn profile(&self) -> Result<Profile, ProfileError> {
        Ok(Profile {
            address: self.address.as_deref().map(Address::new).transpose()?,
            labels: Labels::new(self.labels.clone())?,
        })
    }

    fn resolve(mut self, defaults: &EngineDefaults) -> Result<Vec<GivenEngine>, String> {
        self.model = self.model.or_else(|| defaults.model.clone());
        self.tenant = self.tenant.or_else(|| defaults.tenant.clone());
        self.block_size = self.block_size.or(defaults.block_size);
        let format = match &self.format {
            None => defaults.format,
            Some(word) => Format::from_word(word).ok_or_else(|| {
                let known = Format::WORDS.join(", ");
                format!("format is {word:?}; known are {known}")
            })?,
        };
        let mut facts = self.facts()?;
        facts.scheme = facts.scheme.or_else(|| defaults.scheme.clone());
        if GivenEngine::is_server(&self.endpoint, format) {
            return Ok(vec![GivenEngine::Server(self.server(format, facts)?)]);
        }
        let block_size = self.block_size.unwrap_or(defaults.untold_block_size);
        let engines = self.publishers(format, block_size, &facts)?;
        Ok(engines.into_iter().map(GivenEngine::Publisher).collect())
    }

    /// Makes a server from the text. The bridge asks that server for the engine's sockets and topics, which the text must not
    /// name.
    fn server(self, format: Format, facts: UntoldFacts) -> Result<NewServer, String> {
        let told = [
            ("replay", self.replay.is_some()),
            ("rank", self.rank.is_some()),
            ("ranks", self.ranks.is_some()),
            ("topic", self.topic.is_some()),
            ("discovery", self.discovery.is_some()),
        ];
        if let Some((key, _)) = told.iter().find(|(_, is_given)| *is_given) {
            return Err(format!("a server tells its sockets and topics; leave {key} out"));
        }
        let name = match self.name.is_empty() {
            true => ServerAddress::of_server(&self.endpoint).map(|address| address.authority()),
            false => Some(self.name),
        };
        let server = NewServer {
            instance: name.unwrap_or_default(),
            url: self.endpoint,
            model: self.model,
            tenant: ModelKey::of_tenant("", self.tenant.unwrap_or_default()).tenant,
            format,
            block_size: self.block_size,
            beside: facts.beside,
            groups: facts.groups,
            discovered: Discovered::default(),
            scheme: facts.scheme,
            profile: facts.profile,
            ttl: None,
        };
        match check_server(&server) {
            Ok(_) => Ok(server),
            Err(refusal) => Err(refusal.to_string()),
        }
    }

    /// Makes the engines at the given sockets: one engine, or one for each rank.
    fn publishers(
        &self,
        format: Format,
        block_size: u32,
        facts: &UntoldFacts,
    ) -> Result<Vec<NewEngine>, String> {
        let model = self.model.as_deref();
        let model = model.ok_or("the model is missing: give --model, or model=NAME with the engine")?;
        let tenant = self.tenant.clone().unwrap_or_default();
        let ranks = match (self.rank, self.ranks) {
            (Some(_), Some(_)) => return Err("give rank or ranks, not both".to_owned()),
            (rank, None) => rank.unwrap_or_default()..=rank.unwrap_or_default(),
            (None, Some(ranks @ 1..=RANKS_MAX)) => 0..=ranks - 1,
            (None, Some(_)) => return Err(format!("ranks goes from 1 to {RANKS_MAX}")),
        };
        let discovery = self.discovery.as_deref().map(str::parse).transpose();
        let discovery = discovery.map_err(|error: NoDiscovery| format!("discovery is {error}"))?;
        let is_offset = self.ranks.is_some();
        let at = |endpoint: &str, rank: u32| {
            if is_offset {
                offset(endpoint, rank)
            } else {
                Ok(endpoint.to_owned())
            }
        };
        let engine = |rank: u32| {
            let engine = NewEngine {
                key: EngineKey {
                    instance: self.name.clone(),
                    model: ModelKey::of_tenant(model, tenant.clone()).speaking(facts.scheme.clone()),
                    rank,
                },
                endpoint: at(&self.endpoint, rank)?,
                replay: self
                    .replay
                    .as_deref()
                    .map(|replay| at(replay, rank))
                    .transpose()?,
                format,
                block_size,
                topic: self.topic.clone().unwrap_or_default(),
                beside: facts.beside.clone(),
                groups: facts.groups.clone(),
                profile: facts.profile.clone(),
                discovery: discovery.clone(),
                ttl: None,
            };
            check_engine(&engine).map_err(|refusal| refusal.to_string())?;
            Ok(engine)
        };
        ranks.map(engine).collect()
    }
}

/// Returns the endpoint of a rank: `endpoint` with its port raised by `rank`. An error in words if there is no such port.
fn offset(endpoint: &str, rank: u32) -> Result<String, String> {
    let refused = || format!("{endpoint} has no port to which rank {rank} can be added");
    let (host, port) = endpoint.rsplit_once(':').ok_or_else(refused)?;
    let port: u32 = port.parse().map_err(|_| refused())?;
    let port = u16::try_from(port.saturating_add(rank)).map_err(|_| refused())?;
    Ok(format!("{host}:{port}"))
}

#[cfg(test)]
mod tests;
