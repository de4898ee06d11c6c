//! kvatlas keeps a global map of the KV-cache blocks held by every LLM inference worker, so that a router can send each
//! request to the worker that already holds most of its prompt.
//!
//! The binary `kvatlas` is the daemon and its tools. This library is what they are made of; its parts stand alone:
//!
//! - [`client`]: ask a daemon.
//! - [`publisher`]: publish a worker's events, from an engine or a sidecar beside it.
//! - [`index`]: the exact index, for use without a daemon.
//! - [`hash`]: the hash contract, shared with Dynamo.
//! - [`wire`]: the MessagePack contract. `deploy/README.md` describes it for other languages.
//! - [`vocabulary`]: which tokens of a model may come next; on [`trie`], flat tries.
//! - [`daemon`]: a whole daemon within a process.
//!
//! The README shows how to begin.

pub mod admin;
pub mod baselines;
pub mod client;
pub mod config;
pub mod connection;
pub mod daemon;
pub mod hash;
pub mod index;
pub mod ingest;
pub mod publisher;
pub mod query_service;
pub mod simulation;
pub mod snapshot;
pub mod snapshotter;
pub mod telemetry;
pub mod tracking;
pub mod trie;
pub mod vocabulary;
pub mod wire;

/// Compiles the README's Rust examples.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
