//! Queries: from a request to its reply.
//!
//! A daemon with an index answers inline, one request after the other on each connection. An answer takes microseconds,
//! less than passing the request to another task would. Several connections share the requests through a queue group,
//! as several replicas do.
//!
//! A gateway answers requests on the same subjects by asking the shards. It works on many requests at the same time.
//!
//! | file | subject |
//! |---|---|
//! | `start.rs` | making the connections, and the moment to begin |
//! | `turns.rs` | successive connections: moving to another server when a server is about to shut down |
//! | `requests.rs` | the subscriptions to requests, and leaving the queue group without losing a request |
//! | `service.rs` | one connection of a daemon with an index |
//! | `answer.rs` | from a request's payload to a reply's, without I/O |
//! | `heavy.rs`, `answer/pieces.rs` | heavy requests, which take long: their order, and answering them in pieces |
//! | `whole.rs` | searches that see a batch whole, or say that its holder is changing |
//! | `observed.rs` | counts and trace spans of requests |
//! | `prompts.rs` | the number of blocks that an answer found of each prompt, for metrics |
//! | `reply_memory.rs` | memory for replies, many in one piece |
//! | `sample.rs` | a sample of the prompts in queries, for people who look at the page |
//! | `gateway.rs` | one connection of a gateway |
//! | `source.rs`, `listeners.rs` | the source of the listeners' answers (the index or the shards), and its choice |
//! | `searched.rs` | the namespaces that are searched for a question that names none |
//! | `misses.rs` | a warning about routers whose questions never find a holder |
//! | `missing.rs` | the shards that a gateway's answers lack |
//! | `roster.rs`, `settle.rs` | comparing with another replica before the first answer |

pub(crate) mod answer;
pub(crate) mod gateway;
mod heavy;
mod hinting;
mod listeners;
mod member;
#[cfg(any(feature = "dynamo", feature = "grpc", feature = "redis"))]
mod misses;
mod missing;
mod observed;
mod prompts;
mod reply_memory;
pub(crate) mod request_room;
mod requests;
mod roster;
mod sample;
#[cfg(any(feature = "grpc", feature = "redis"))]
mod searched;
pub(crate) mod service;
mod settle;
mod shards;
mod source;
mod start;
mod turns;
mod whole;

pub(crate) use answer::{
    Answerer, AnyReply, Found, FoundHolder, described, dialect_query, report, unsized_holders, with_wait,
};
#[cfg(feature = "grpc")]
pub(crate) use heavy::HeavyRequest;
pub(crate) use heavy::HeavyTurns;
#[cfg(feature = "dynamo")]
pub(crate) use member::{MEMBER_MESSAGES_MIN, QueueMember};
#[cfg(any(feature = "dynamo", feature = "grpc", feature = "redis"))]
pub(crate) use misses::Misses;
pub(crate) use missing::{MissingShard, MissingShards, ShardOutage};
pub(crate) use sample::{BLOCKS_MAX as SAMPLED_BLOCKS_MAX, QuerySample, SampledQuery};
#[cfg(any(feature = "grpc", feature = "redis"))]
pub(crate) use searched::searched;
pub(crate) use shards::ShardAsker;
#[cfg(all(test, feature = "redis"))]
pub(crate) use source::Shards;
pub(crate) use source::{IndexHere, NoIndex, Source, SourceError};
pub(crate) use start::{query_limits, start_gateway, start_queries};
pub(crate) use whole::search_whole;
