//! llm-d's router asks its index over Redis: this listener answers in Redis's place, as far as that router asks.
//!
//! ```text
//! router ──HKEYS of each block, in one pipeline──▶ connection ──▶ prefixes ──▶ one search of the index
//!        ──HSET, HDEL of its own guesses─────────▶ commands ────▶ guesses, for a short time
//! ```
//!
//! A key of the router is a sequence hash of a namespace that speaks one of llm-d's schemes; the model is part of each hash. So all such
//! namespaces are searched. The answer to a key lists the pods that hold the whole prefix up to there, for certain. A worker in doubt is left
//! out, as is one that begins behind a hole: the router would not count it.
//!
//! | file | what |
//! |---|---|
//! | `resp` | commands from bytes, replies to bytes |
//! | `entry` | fields of llm-d's hashes: who holds a block, and where |
//! | `prefixes` | from the keys of a pipeline to who holds how many of them |
//! | `guesses` | entries that routers have written themselves |
//! | `commands` | all commands but `HKEYS`, without I/O |
//! | `connection` | one connection: reading pipelines, writing replies |
//! | `start` | the listener |

mod commands;
mod connection;
mod entry;
mod guesses;
mod prefixes;
mod resp;
mod start;

pub(crate) use start::RedisStartError;
pub(crate) use start::start_redis;
