//! Query requests: what a router asks.

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};

use super::error::DecodeError;
use super::limits::WireLimits;
use super::name::WorkerName;
use super::positions::{PositionsError, check_positions};
use super::reader::{Reader, check_version, set_once};
use super::writer::{Writer, count};

/// What is asked for, in one of four forms. All are prefixes that start at position 0, unless [`SingleQuery::positions`] chooses
/// blocks of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryKey {
    /// The prompt's tokens; the namespace's block size cuts them into blocks.
    Tokens {
        /// The tokens. A tail that does not fill a block is not asked for.
        tokens: Vec<Token>,
        /// Name of the LoRA adapter, if any.
        lora_name: Option<String>,
        /// Salt that keeps caches apart, if any.
        cache_salt: Option<String>,
    },
    /// The hash of each block's tokens.
    BlockHashes(Vec<BlockHash>),
    /// The sequence hash of each block; needs no hashing in the daemon.
    ///
    /// They must be one rolling chain: each names its whole prefix.
    SequenceHashes(Vec<SequenceHash>),
    /// The lineage hash of each block, each the child of the one before.
    LineageHashes(Vec<PositionalLineageHash>),
}

impl QueryKey {
    /// A stable word for the form, used in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Tokens { .. } => "tokens",
            Self::BlockHashes(_) => "block_hashes",
            Self::SequenceHashes(_) => "sequence_hashes",
            Self::LineageHashes(_) => "lineage_hashes",
        }
    }
}

/// What the reply should have.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueryOptions {
    /// Answer only for these workers; for all where it is absent.
    pub workers: Option<Vec<WorkerName>>,
    /// At most this many holders, the best first; all where it is absent.
    pub limit: Option<u32>,
    /// Leave out holders with fewer matched blocks; 1 where it is absent or 0. Where only bounds are known, those that have fewer
    /// for certain.
    pub min_blocks: u32,
    /// Say where each holder dropped out.
    pub explain: bool,
}

/// One query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SingleQuery {
    /// What is asked for.
    pub key: QueryKey,
    /// Compressed chains: the position of each hash in `key`, ascending, where these are not the whole prefix but blocks chosen
    /// from one. The reply has bounds. [`check_positions`] says what fits; absent for whole prefixes.
    pub positions: Option<Vec<Position>>,
    /// What the reply should have.
    pub options: QueryOptions,
}

impl SingleQuery {
    /// A query with default options.
    pub fn new(key: QueryKey) -> Self {
        Self {
            key,
            positions: None,
            options: QueryOptions::default(),
        }
    }
}

/// The payload of a request on a query subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryRequest {
    /// One query, answered by a [`QueryReply`](super::QueryReply).
    Single(SingleQuery),
    /// Several queries, answered by a [`BatchReply`](super::BatchReply) in the same order.
    Batch(Vec<SingleQuery>),
}

impl QueryRequest {
    /// The payload for a query subject.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        match self {
            Self::Single(query) => {
                writer.map(1 + query.entries());
                writer.unsigned_entry("v", super::PROTOCOL_VERSION);
                query.encode(&mut writer);
            }
            Self::Batch(queries) => {
                writer.map(2);
                writer.unsigned_entry("v", super::PROTOCOL_VERSION);
                writer.text("queries");
                writer.array(count(queries.len()));
                for query in queries {
                    writer.map(query.entries());
                    query.encode(&mut writer);
                }
            }
        }
        writer.into_bytes()
    }

    /// Decodes a payload within `limits`.
    ///
    /// The limit on depth holds for each query; the limit on the message bounds them all together.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let (mut version, mut queries) = (None, None);
        let mut fields = QueryFields::default();
        reader.map("the request", |reader, key| match key {
            b"v" => set_once(&mut version, "v", reader.unsigned("v")?),
            b"queries" => set_once(&mut queries, "queries", decode_queries(reader, limits)?),
            _ => fields.read(reader, key, limits),
        })?;
        reader.finish()?;
        check_version(version)?;
        match queries {
            Some(_) if fields.has_key() => Err(DecodeError::Combination(
                "send queries or one query's own fields, not both",
            )),
            Some(queries) => Ok(Self::Batch(queries)),
            None => fields.into_query().map(Self::Single),
        }
    }
}

fn decode_queries(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Vec<SingleQuery>, DecodeError> {
    let queries = reader.array("queries", limits.queries_max)?;
    let decode_one = |_| {
        let mut fields = QueryFields::default();
        reader.map("a query", |reader, key| fields.read(reader, key, limits))?;
        fields.into_query()
    };
    (0..queries).map(decode_one).collect()
}

/// The fields of one query, as they come in.
#[derive(Default)]
struct QueryFields<'a> {
    tokens: Option<Vec<Token>>,
    lora_name: Option<Option<&'a str>>,
    cache_salt: Option<Option<&'a str>>,
    block_hashes: Option<Vec<BlockHash>>,
    sequence_hashes: Option<Vec<SequenceHash>>,
    lineage_hashes: Option<Vec<PositionalLineageHash>>,
    positions: Option<Vec<Position>>,
    workers: Option<Vec<WorkerName>>,
    limit: Option<Option<u64>>,
    min_blocks: Option<u32>,
    explain: Option<bool>,
}

impl<'a> QueryFields<'a> {
    fn read(&mut self, reader: &mut Reader<'a>, key: &[u8], limits: &WireLimits) -> Result<(), DecodeError> {
        let depth = limits.query_depth_max;
        let tokens = depth.saturating_mul(limits.tokens_per_block_max);
        match key {
            b"tokens" => set_once(&mut self.tokens, "tokens", reader.list("tokens", tokens)?),
            b"lora_name" => set_once(
                &mut self.lora_name,
                "lora_name",
                reader.optional_text("lora_name", limits.text_bytes_max)?,
            ),
            b"cache_salt" => set_once(
                &mut self.cache_salt,
                "cache_salt",
                reader.optional_text("cache_salt", limits.text_bytes_max)?,
            ),
            b"block_hashes" => set_once(
                &mut self.block_hashes,
                "block_hashes",
                reader.list("block_hashes", depth)?,
            ),
            b"sequence_hashes" => set_once(
                &mut self.sequence_hashes,
                "sequence_hashes",
                reader.list("sequence_hashes", depth)?,
            ),
            b"lineage_hashes" => set_once(
                &mut self.lineage_hashes,
                "lineage_hashes",
                reader.list("lineage_hashes", depth)?,
            ),
            b"positions" => set_once(&mut self.positions, "positions", decode_positions(reader, depth)?),
            b"workers" => set_once(&mut self.workers, "workers", decode_workers(reader, limits)?),
            b"limit" => set_once(&mut self.limit, "limit", reader.optional_unsigned("limit")?),
            b"min_blocks" => set_once(
                &mut self.min_blocks,
                "min_blocks",
                reader.unsigned_32("min_blocks")?,
            ),
            b"explain" => set_once(&mut self.explain, "explain", reader.boolean("explain")?),
            _ => reader.skip(),
        }
    }

    fn has_key(&self) -> bool {
        self.tokens.is_some()
            || self.block_hashes.is_some()
            || self.sequence_hashes.is_some()
            || self.lineage_hashes.is_some()
    }

    fn into_query(self) -> Result<SingleQuery, DecodeError> {
        let options = QueryOptions {
            workers: self.workers,
            // A limit beyond 32 bits is no limit.
            limit: self
                .limit
                .flatten()
                .map(|limit| u32::try_from(limit).unwrap_or(u32::MAX)),
            min_blocks: self.min_blocks.unwrap_or_default(),
            explain: self.explain.unwrap_or_default(),
        };
        let key = match (
            self.tokens,
            self.block_hashes,
            self.sequence_hashes,
            self.lineage_hashes,
        ) {
            (Some(tokens), None, None, None) => QueryKey::Tokens {
                tokens,
                lora_name: self.lora_name.flatten().map(str::to_owned),
                cache_salt: self.cache_salt.flatten().map(str::to_owned),
            },
            (None, Some(hashes), None, None) => QueryKey::BlockHashes(hashes),
            (None, None, Some(hashes), None) => QueryKey::SequenceHashes(hashes),
            (None, None, None, Some(hashes)) => QueryKey::LineageHashes(hashes),
            (None, None, None, None) => {
                return Err(DecodeError::Combination(
                    "nothing is asked for; send tokens, block_hashes, sequence_hashes or lineage_hashes",
                ));
            }
            _ => {
                return Err(DecodeError::Combination(
                    "send only one of tokens, block_hashes, sequence_hashes and lineage_hashes",
                ));
            }
        };
        match (&self.positions, &key) {
            (Some(_), _) if options.explain => {
                return Err(DecodeError::Combination(
                    "explain needs the whole chain; leave out positions or explain",
                ));
            }
            (Some(positions), key) => check_positions(key, positions)?,
            (None, QueryKey::LineageHashes(hashes)) => check_chain(hashes)?,
            (None, _) => {}
        }
        Ok(SingleQuery {
            key,
            positions: self.positions,
            options,
        })
    }
}

fn decode_positions(reader: &mut Reader<'_>, count_max: usize) -> Result<Vec<Position>, DecodeError> {
    let positions: Vec<u32> = reader.list("positions", count_max)?;
    let position = |position: u32| Position::new(u64::from(position)).map_err(PositionsError::from);
    Ok(positions.into_iter().map(position).collect::<Result<_, _>>()?)
}

fn decode_workers(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Vec<WorkerName>, DecodeError> {
    let workers = reader.array("workers", limits.filter_workers_max)?;
    let decode_one = |_| {
        let text = reader.text("workers", limits.name_bytes_max)?;
        WorkerName::bounded(text, limits.name_bytes_max).map_err(|source| DecodeError::Name {
            field: "workers",
            source,
        })
    };
    (0..workers).map(decode_one).collect()
}

/// Lineage hashes must be one chain from position 0, or a match of one would not prove the prefix of the next.
fn check_chain(hashes: &[PositionalLineageHash]) -> Result<(), DecodeError> {
    let mut before: Option<&PositionalLineageHash> = None;
    for (index, hash) in hashes.iter().enumerate() {
        let continues = match before {
            None => hash.position() == 0,
            Some(parent) => hash.is_child_of(parent),
        };
        if !continues {
            return Err(DecodeError::BrokenChain { index });
        }
        before = Some(hash);
    }
    Ok(())
}

impl SingleQuery {
    fn encode(&self, writer: &mut Writer) {
        match &self.key {
            QueryKey::Tokens {
                tokens,
                lora_name,
                cache_salt,
            } => {
                writer.list_entry("tokens", tokens);
                if let Some(name) = lora_name {
                    writer.text_entry("lora_name", name);
                }
                if let Some(salt) = cache_salt {
                    writer.text_entry("cache_salt", salt);
                }
            }
            QueryKey::BlockHashes(hashes) => writer.list_entry("block_hashes", hashes),
            QueryKey::SequenceHashes(hashes) => writer.list_entry("sequence_hashes", hashes),
            QueryKey::LineageHashes(hashes) => writer.list_entry("lineage_hashes", hashes),
        }
        if let Some(positions) = &self.positions {
            let positions: Vec<u32> = positions.iter().map(|position| position.as_u32()).collect();
            writer.list_entry("positions", &positions);
        }
        if let Some(workers) = &self.options.workers {
            writer.text("workers");
            writer.array(count(workers.len()));
            for worker in workers {
                writer.text(worker.as_str());
            }
        }
        if let Some(limit) = self.options.limit {
            writer.unsigned_entry("limit", u64::from(limit));
        }
        if self.options.min_blocks != 0 {
            writer.unsigned_entry("min_blocks", u64::from(self.options.min_blocks));
        }
        if self.options.explain {
            writer.boolean_entry("explain", true);
        }
    }

    /// How many map entries the encoding has.
    fn entries(&self) -> u32 {
        let key = match &self.key {
            QueryKey::Tokens {
                lora_name,
                cache_salt,
                ..
            } => 1 + u32::from(lora_name.is_some()) + u32::from(cache_salt.is_some()),
            _ => 1,
        };
        let options = &self.options;
        key + u32::from(self.positions.is_some())
            + u32::from(options.workers.is_some())
            + u32::from(options.limit.is_some())
            + u32::from(options.min_blocks != 0)
            + u32::from(options.explain)
    }
}
