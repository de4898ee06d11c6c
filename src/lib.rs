//! kvatlas keeps a global map of the KV-cache blocks held by every LLM inference worker.

pub mod admin;
pub mod client;
pub mod config;
pub mod connection;
pub mod daemon;
pub mod hash;
pub mod index;
pub mod ingest;
pub mod query_service;
pub mod simulation;
pub mod snapshot;
pub mod snapshotter;
pub mod telemetry;
pub mod tracking;
pub mod wire;
