//! Listener for llm-d's router. That router keeps its index in Redis, and asks it there. This listener answers in the
//! place of Redis, and knows the commands that the router uses.
//!
//! ```text
//! router ──HKEYS of each block, in one pipeline──▶ connection ──▶ prefixes ──▶ one search of the index
//!        ──HSET, HDEL of its own guesses─────────▶ commands ────▶ guesses, for a short time
//! ```
//!
//! A key of the router is a sequence hash of a namespace with one of llm-d's hash schemes. The hash includes the model, so all
//! such namespaces are searched. The answer to a key lists the pods that certainly hold the whole prefix up to that key. A worker
//! in doubt is left out. A worker that lacks an earlier block is left out as well, because the router would not count it.
//!
//! | file | what |
//! |---|---|
//! | `resp` | commands from bytes, replies to bytes |
//! | `entry` | fields of llm-d's Redis hashes: the pod that holds a block, and the tier |
//! | `known` | the namespaces that are searched |
//! | `prefixes` | from the keys of a pipeline to the pods that hold leading blocks |
//! | `guesses` | entries that routers have written themselves |
//! | `commands` | answers to all commands except `HKEYS`, without I/O |
//! | `connection` | one connection: reading pipelines, writing replies |
//! | `start` | the listener |

mod commands;
mod connection;
mod entry;
mod guesses;
mod known;
mod prefixes;
mod resp;
mod start;
#[cfg(test)]
mod tests;

pub(crate) use start::start_redis;
