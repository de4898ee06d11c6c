//! Query requests, which routers send.

use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};

use super::entries::{Entries, Message, serialize_entries};
use super::error::DecodeError;
use super::human::deserialize_fields;
use super::limits::WireLimits;
use super::positions::check_positions;
use super::query_field::{FieldKind, FieldValue};
use super::reader::{Reader, check_count, check_version, set_once};
use super::subject::WorkerName;
use super::writer::encode;

/// Blocks that a query is about, in one of four forms. Each form gives a prefix that starts at position 0, unless
/// [`SingleQuery::positions`] chooses blocks of a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryKey {
    /// Tokens of the prompt. The namespace's block size divides them into blocks.
    Tokens {
        /// The tokens. A tail that does not fill a block is ignored.
        tokens: Vec<Token>,
        /// Name of the LoRA adapter, if any.
        lora_name: Option<String>,
        /// Salt that separates caches, if any.
        cache_salt: Option<String>,
    },
    /// Hash of each block's tokens.
    BlockHashes(Vec<BlockHash>),
    /// Sequence hash of each block. Needs no hashing in the daemon.
    ///
    /// The hashes must be one rolling chain: each identifies its whole prefix.
    SequenceHashes(Vec<SequenceHash>),
    /// Lineage hash of each block. Each is the child of the previous hash.
    LineageHashes(Vec<PositionalLineageHash>),
}

impl QueryKey {
    /// Returns a stable word for the form, used in metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Tokens { .. } => "tokens",
            Self::BlockHashes(_) => "block_hashes",
            Self::SequenceHashes(_) => "sequence_hashes",
            Self::LineageHashes(_) => "lineage_hashes",
        }
    }
}

/// Options of a query, which select the content of its reply.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueryOptions {
    /// Workers whose holders the reply lists. If absent, all workers.
    pub workers: Option<Vec<WorkerName>>,
    /// Maximum number of holders in the reply, the best first. If absent, all holders.
    pub limit: Option<u32>,
    /// Minimum number of matched blocks of a holder in the reply. Absent or 0 counts as 1. If only bounds are known,
    /// a holder is left out if its upper bound is below this number.
    pub min_blocks: u32,
    /// Whether the reply gives, for each holder, the first block of the query that the holder lacks.
    pub explain: bool,
    /// Whether the reply tells how many blocks each holder has on the device, and on device and host together.
    pub tiers: bool,
    /// Whether the reply lists, separately, the holders that will soon have more of the prompt, according to hints
    /// from routers.
    pub predicted: bool,
}

/// One query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SingleQuery {
    /// Blocks that the query is about.
    pub key: QueryKey,
    /// Positions of the hashes in `key`, in ascending order, for a compressed chain. The hashes are then chosen blocks
    /// of a prefix, and the reply has bounds. [`SingleQuery::check`] checks that the positions fit. Absent if the
    /// hashes are a whole prefix.
    pub positions: Option<Vec<Position>>,
    /// Number of tokens of the whole prompt, including tokens that the query does not contain. A request always
    /// computes the prompt's last token, so it cannot reuse the block that ends with this token.
    ///
    /// If absent in a query by tokens, the query's tokens are the whole prompt. In such a query the number must be at
    /// least the number of the tokens sent. If absent in a query by hashes, a request is assumed to reuse every block.
    pub token_count: Option<u64>,
    /// Options, which select the content of the reply.
    pub options: QueryOptions,
}

impl SingleQuery {
    /// Makes a query with default options.
    pub fn new(key: QueryKey) -> Self {
        Self {
            key,
            positions: None,
            token_count: None,
            options: QueryOptions::default(),
        }
    }

    /// Checks that the parts of the query fit together. Every decoded query has passed this check.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Combination`] for `explain`, `tiers` or `predicted` together with positions, and for a
    /// `token_count` below the number of tokens. [`DecodeError::Positions`] for positions that do not fit the hashes.
    /// [`DecodeError::BrokenChain`] for lineage hashes that are not one chain from position 0.
    pub fn check(&self) -> Result<(), DecodeError> {
        if let (Some(count), QueryKey::Tokens { tokens, .. }) = (self.token_count, &self.key)
            && count < tokens.len() as u64
        {
            return Err(DecodeError::Combination(
                "token_count is less than the tokens sent; leave it out, or say how many the prompt has",
            ));
        }
        match (&self.positions, &self.key) {
            (Some(_), _) if self.options.explain => Err(DecodeError::Combination(
                "explain needs the whole chain; leave out positions or explain",
            )),
            (Some(_), _) if self.options.tiers => Err(DecodeError::Combination(
                "tiers needs the whole chain; leave out positions or tiers",
            )),
            (Some(_), _) if self.options.predicted => Err(DecodeError::Combination(
                "predicted needs the whole chain; leave out positions or predicted",
            )),
            (Some(positions), key) => Ok(check_positions(key, positions)?),
            (None, QueryKey::LineageHashes(hashes)) => check_chain(hashes),
            (None, _) => Ok(()),
        }
    }
}

/// Payload of a request on a query subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryRequest {
    /// One query, answered by a [`QueryReply`](super::QueryReply).
    Single(SingleQuery),
    /// Several queries, answered by a [`BatchReply`](super::BatchReply) in the same order.
    Batch(Vec<SingleQuery>),
}

impl QueryRequest {
    /// Encodes the request as the payload for a query subject.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a payload within `limits`.
    ///
    /// The limit on depth applies to each query. The limit on the message's length applies to all queries together.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let mut fields = QueryFields::default();
        reader.map("the request", |reader, key| match key {
            b"v" => set_once(&mut fields.v, "v", reader.unsigned("v")?),
            b"queries" => {
                let queries = decode_queries(reader, limits)?;
                set_once(&mut fields.queries, "queries", queries)
            }
            _ => fields.read(reader, key, limits),
        })?;
        reader.finish()?;
        fields.into_request()
    }
}

impl Message for QueryRequest {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", super::PROTOCOL_VERSION)?;
        match self {
            Self::Single(query) => query.write(entries),
            Self::Batch(queries) => entries.maps("queries", queries),
        }
    }
}

impl Message for SingleQuery {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        match &self.key {
            QueryKey::Tokens {
                tokens,
                lora_name,
                cache_salt,
            } => {
                entries.list("tokens", tokens)?;
                entries.optional_text("lora_name", lora_name.as_ref())?;
                entries.optional_text("cache_salt", cache_salt.as_ref())?;
            }
            QueryKey::BlockHashes(hashes) => entries.list("block_hashes", hashes)?,
            QueryKey::SequenceHashes(hashes) => entries.list("sequence_hashes", hashes)?,
            QueryKey::LineageHashes(hashes) => entries.list("lineage_hashes", hashes)?,
        }
        if let Some(positions) = &self.positions {
            entries.list("positions", positions)?;
        }
        entries.optional_number("token_count", self.token_count)?;
        let options = &self.options;
        if let Some(workers) = &options.workers {
            entries.texts("workers", workers.iter().map(WorkerName::as_str))?;
        }
        entries.optional_number("limit", options.limit.map(u64::from))?;
        if options.min_blocks != 0 {
            entries.number("min_blocks", u64::from(options.min_blocks))?;
        }
        if options.explain {
            entries.flag("explain", true)?;
        }
        if options.tiers {
            entries.flag("tiers", true)?;
        }
        if options.predicted {
            entries.flag("predicted", true)?;
        }
        Ok(())
    }
}

serialize_entries!(QueryRequest, SingleQuery);

impl<'de> Deserialize<'de> for QueryRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_fields(deserializer, QueryFields::into_request)
    }
}

impl<'de> Deserialize<'de> for SingleQuery {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_fields(deserializer, |fields: QueryFields| {
            if fields.v.is_some() || fields.queries.is_some() {
                return Err(DecodeError::Combination(
                    "v and queries belong to a request; write one query",
                ));
            }
            fields.into_query()
        })
    }
}

fn decode_queries(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Vec<SingleQuery>, DecodeError> {
    let queries = reader.array("queries", limits.queries_max)?;
    (0..queries)
        .map(|index| decode_query(reader, "a query", limits).map_err(DecodeError::in_query(index)))
        .collect()
}

/// Reads a query that is part of another message. Errors call the query `what`.
pub(super) fn decode_query(
    reader: &mut Reader<'_>,
    what: &'static str,
    limits: &WireLimits,
) -> Result<SingleQuery, DecodeError> {
    let mut fields = QueryFields::default();
    reader.map(what, |reader, key| fields.read(reader, key, limits))?;
    fields.into_query()
}

/// Description of a field of a query.
#[derive(Debug, Clone, Copy)]
pub struct QueryField {
    /// Key of the field.
    pub key: &'static str,
    /// Kind of the field's value.
    pub kind: FieldKind,
    /// Meaning of the field, in the words of the contract's page.
    pub meaning: &'static str,
}

/// Defines the fields of a query. Each row determines how a field is decoded, its line in the contract's page, and
/// how HTTP requests give it.
macro_rules! query_fields {
    ($($key:ident: $type:ty, $meaning:literal;)+) => {
        /// Fields of a query, in the order of the contract's page.
        pub const QUERY_FIELDS: &[QueryField] = &[$(QueryField {
            key: stringify!($key),
            kind: <$type as FieldValue>::KIND,
            meaning: $meaning,
        }),+];

        /// Fields of one query, or of a request, filled while they are read.
        #[derive(Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct QueryFields {
            v: Option<u64>,
            queries: Option<Vec<SingleQuery>>,
            $($key: Option<$type>,)+
        }

        impl QueryFields {
            fn read(
                &mut self,
                reader: &mut Reader<'_>,
                key: &[u8],
                limits: &WireLimits,
            ) -> Result<(), DecodeError> {
                $(if key == stringify!($key).as_bytes() {
                    let value = <$type>::read(reader, stringify!($key), limits)?;
                    return set_once(&mut self.$key, stringify!($key), value);
                })+
                reader.skip()
            }

            /// Takes the value of the field `key` from a map of a format for people, such as JSON. If a query has no
            /// such field, returns `false` and takes nothing.
            ///
            /// # Errors
            ///
            /// The format's error, if the value is not of the field's kind.
            pub fn take<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<bool, A::Error> {
                $(if key == stringify!($key) {
                    self.$key = map.next_value()?;
                    return Ok(true);
                })+
                Ok(false)
            }

            /// Checks each value against `limits`, and returns the number of bytes that the values take in a message.
            fn checked_bytes(&self, limits: &WireLimits) -> Result<usize, DecodeError> {
                let mut bytes = 0;
                $(if let Some(value) = &self.$key {
                    bytes += value.checked_bytes(stringify!($key), limits)?;
                })+
                Ok(bytes)
            }

            /// Whether any field of a query is set. A nil counts as absent.
            fn asks_something(&self) -> bool {
                $(self.$key.as_ref().is_some_and(|value| !value.is_void()))||+
            }
        }
    };
}

query_fields! {
    tokens: Vec<Token>, "the prompt's tokens; the daemon cuts and hashes them";
    lora_name: Option<String>, "beside `tokens`: the name of the LoRA adapter";
    cache_salt: Option<String>, "beside `tokens`: the salt that keeps caches apart";
    block_hashes: Vec<BlockHash>, "the block hash of each block";
    sequence_hashes: Vec<SequenceHash>, "the sequence hash of each block: the cheapest form";
    lineage_hashes: Vec<PositionalLineageHash>, "one chain from position 0";
    positions: Option<Vec<Position>>, "beside `sequence_hashes` or `lineage_hashes`: where each stands, ascending; see [compressed chains](#compressed-chains)";
    token_count: Option<u64>, "how many tokens the prompt has: beside hashes, or beside tokens that the prompt goes on behind. A request computes its last token, so `usable_blocks` ends before the block of that; where absent, every block of hashes sent counts, and the last token sent is the prompt's";
    workers: Vec<WorkerName>, "answer only for these workers; all where absent";
    limit: Option<u64>, "at most so many holders, the best first; all where absent";
    min_blocks: u32, "leave out holders with fewer matched blocks, of a compressed chain those with fewer for certain; 1 where absent or 0";
    explain: bool, "say where each holder dropped out; false where absent";
    tiers: bool, "say how many of its blocks each holder has near: `device_blocks` and `host_blocks`, and how many of these are usable; false where absent";
    predicted: bool, "list apart, in `predicted`, who will have more of the prompt soon, by what routers have [hinted](#hints); false where absent";
}

impl QueryFields {
    /// Makes a request from these fields, the version `v`, and for a batch the `queries`. All of them together must
    /// be within `limits`, like a message with the same content.
    ///
    /// # Errors
    ///
    /// The errors of [`QueryRequest::decode`].
    pub fn into_request_within(
        self,
        v: Option<u64>,
        queries: Option<Vec<Self>>,
        limits: &WireLimits,
    ) -> Result<QueryRequest, DecodeError> {
        let mut bytes = self.checked_bytes(limits)?;
        if let Some(queries) = &queries {
            check_count("queries", queries.len(), limits.queries_max)?;
            for (index, query) in queries.iter().enumerate() {
                let checked = query.checked_bytes(limits);
                bytes += checked.map_err(DecodeError::in_query(index))?;
            }
        }
        if bytes > limits.message_bytes_max {
            let max = limits.message_bytes_max;
            return Err(DecodeError::Oversized { bytes, max });
        }
        let decoded =
            |(index, query): (usize, Self)| query.into_query().map_err(DecodeError::in_query(index));
        let queries = queries.map(|queries| queries.into_iter().enumerate().map(decoded).collect());
        let queries = queries.transpose()?;
        Self { v, queries, ..self }.into_request()
    }

    fn into_request(mut self) -> Result<QueryRequest, DecodeError> {
        check_version(self.v)?;
        match self.queries.take() {
            Some(_) if self.asks_something() => Err(DecodeError::Combination(
                "send queries or one query's own fields, not both",
            )),
            Some(queries) => Ok(QueryRequest::Batch(queries)),
            None => self.into_query().map(QueryRequest::Single),
        }
    }

    fn into_query(mut self) -> Result<SingleQuery, DecodeError> {
        let key = self.take_key()?;
        let options = QueryOptions {
            workers: self.workers,
            // A limit beyond 32 bits limits nothing.
            limit: self
                .limit
                .flatten()
                .map(|limit| u32::try_from(limit).unwrap_or(u32::MAX)),
            min_blocks: self.min_blocks.unwrap_or_default(),
            explain: self.explain.unwrap_or_default(),
            tiers: self.tiers.unwrap_or_default(),
            predicted: self.predicted.unwrap_or_default(),
        };
        let query = SingleQuery {
            key,
            positions: self.positions.flatten(),
            token_count: self.token_count.flatten(),
            options,
        };
        query.check()?;
        Ok(query)
    }

    fn take_key(&mut self) -> Result<QueryKey, DecodeError> {
        let (lora_name, cache_salt) = (self.lora_name.take().flatten(), self.cache_salt.take().flatten());
        let names_content = [&lora_name, &cache_salt].into_iter().any(|text| !text.is_void());
        match (
            self.tokens.take(),
            self.block_hashes.take(),
            self.sequence_hashes.take(),
            self.lineage_hashes.take(),
        ) {
            (Some(tokens), None, None, None) => Ok(QueryKey::Tokens {
                tokens,
                lora_name,
                cache_salt,
            }),
            // Passed over, these would change the answer without notice.
            (None, ..) if names_content => Err(DecodeError::Combination(
                "lora_name and cache_salt belong to tokens; leave them out",
            )),
            (None, Some(hashes), None, None) => Ok(QueryKey::BlockHashes(hashes)),
            (None, None, Some(hashes), None) => Ok(QueryKey::SequenceHashes(hashes)),
            (None, None, None, Some(hashes)) => Ok(QueryKey::LineageHashes(hashes)),
            (None, None, None, None) => Err(DecodeError::Combination(
                "nothing is asked for; send tokens, block_hashes, sequence_hashes or lineage_hashes",
            )),
            _ => Err(DecodeError::Combination(
                "send only one of tokens, block_hashes, sequence_hashes and lineage_hashes",
            )),
        }
    }
}

/// Checks that lineage hashes are one chain from position 0. If they were not, a holder could have the block of one
/// hash without the blocks before it.
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
