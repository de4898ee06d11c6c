//! The daemon: a global map of the KV-cache blocks of every worker. Events update the map, and queries ask it.
//!
//! A *room* is a folder, of this crate or of `core`. The rooms of this crate:
//!
//! | room | what it does | imports |
//! |---|---|---|
//! | `life` | starts, drains and stops the daemon, and keeps its readiness | every room |
//! | `sources` | receives events: core NATS, JetStream | `lanes` |
//! | [`lanes`] | turns messages into changes of the index | |
//! | `resync` | asks publishers for missing batches | `lanes` |
//! | `queries` | answers requests | `lanes`, `outcomes`, `hints` |
//! | `outcomes` | compares the blocks that requests find with those that answers promised | |
//! | `hints` | keeps routers' reports of where they have sent requests | |
//! | [`snapshots`] | writes, restores and exchanges files | `lanes` |
//! | `page` | serves the admin listener's page for a browser | `queries`, `outcomes` |
//! | [`http`] | gives the same answers over HTTP (the query listener) | `lanes`, `queries`, `outcomes` |
//! | `dynamo` | answers Dynamo's router on its request plane | `queries` |
//! | `redis` | answers llm-d's router | `http`, `queries` |
//! | `grpc` | answers SGLang's router | `http`, `queries` |
//! | `traces` | sends spans of queries and batches to a collector | |
//!
//! Every room may import `traces`, and the crates below: `kvatlas_telemetry`, `kvatlas_config`, and `kvatlas_process` with the
//! admin listener, connections to NATS and the registry of engines. No room imports `life`.
//!
//! | file | what it holds |
//! |---|---|
//! | `vital.rs` | the end of the process where a part of it panics |
//! | `shared.rs` | state that `life` hands to the four rooms that start tasks: `sources`, `resync`, `queries`, `snapshots` |
//! | [`runbook`] | explanations of words from the pages for operators: for the page, `kvatlas explain` and `kvatlas doctor` |
//! | `reports.rs` | receiving the reports of routers over NATS, for `outcomes` and `queries` |
//! | `responder.rs` | sending replies and errors over NATS |
//!
//! # The way of one batch
//!
//! From a message on `PREFIX.v1.events.NAMESPACE.WORKER` to the index: four rooms, twelve files.
//!
//! 1. A source receives the message: [`CoreNatsSource::run`](sources::core_nats::CoreNatsSource::run), or
//!    [`JetStreamSource::run`](sources::jetstream::JetStreamSource::run), which also checks the stream's numbers. It adds the
//!    *generation* of the stream, a number that changes when messages are lost. So messages from before a loss are
//!    distinguished from later messages.
//! 2. [`LanePool::sort`](lanes::LanePool::sort), and with JetStream [`LanePool::receive`](lanes::LanePool::receive), reads the
//!    namespace and the worker from the subject: [`Subjects::parse_events`](kvatlas_core::wire::Subjects::parse_events).
//!    Further messages on the same subject reuse the sender that was found.
//! 3. [`LanePool::admit`](lanes::LanePool::admit) passes over other shards' workers, finds the namespace, and asks
//!    [`Assignments::assign`](lanes::line::Assignments::assign) for the worker's lane.
//! 4. The lane's queue takes the message, together with the others that have come. Messages of one worker that come together
//!    are one job. While the queue is full, messages of core NATS are dropped by
//!    [`JobSender::send_or_drop`](lanes::queue::JobSender::send_or_drop). With JetStream,
//!    [`JobSender::send`](lanes::queue::JobSender::send) waits: this is the back-pressure.
//! 5. [`Lane::run`](lanes::lane::Lane::run), on the lane's thread, takes the next jobs of a worker.
//! 6. [`EventBatch::decode`](kvatlas_core::wire::EventBatch::decode) checks and decodes the payload, with `core/wire/event.rs`
//!    and `reader.rs`. If it fails, the worker's holders are degraded.
//! 7. [`Holder::apply`](lanes::holder::Holder::apply) asks
//!    [`SequenceTracker::classify`](lanes::sequence::SequenceTracker::classify) what the batch's number means: apply the batch,
//!    skip it, or hold it until missing batches have come.
//! 8. [`HolderWriter::apply`](kvatlas_core::index::HolderWriter::apply) applies event after event to the index. Its reply says
//!    which blocks were rejected, and the holder turns that into reasons for doubt.
//!
//! | room | files |
//! |---|---|
//! | `sources` | `core_nats.rs` or `jetstream.rs` |
//! | `lanes` | `pool.rs`, `line.rs`, `queue.rs`, `lane.rs`, `holder.rs`, `sequence.rs` |
//! | `core/wire` | `subject.rs`, `batch.rs`, `event.rs`, `reader.rs` |
//! | `core/index` | counted as one: `writer.rs`, `namespace.rs`, `indexer.rs`, `shared.rs`, `holder/`, `runs/`, `directory/` |
//!
//! Outside these steps, `lanes/payloads.rs` keeps the payloads of a job, `lanes/tally.rs` and `kvatlas_telemetry` count, and
//! `lanes/position.rs` notes the last message of the stream that was handed over. `core/wire/reader/fast.rs` reads short keys
//! and numbers, and passes over keys that the contract does not know. When the index has reached its bound on blocks,
//! `core/index/capacity.rs` evicts some of them.
//!
//! # The way of one query
//!
//! From a request on `PREFIX.v1.query.NAMESPACE` to its reply: three rooms, ten files. No lane takes part.
//!
//! 1. `LastingRequests::next` returns the next request that NATS sends to this connection as a member of the queue group.
//! 2. [`QueryService::run`](queries::service::QueryService::run) answers them one after the other.
//! 3. [`Answerer::read_query`](queries::answer::Answerer::read_query) reads the namespace from the subject
//!    ([`Subjects::parse_query`](kvatlas_core::wire::Subjects::parse_query)) and decodes the request
//!    ([`QueryRequest::decode`](kvatlas_core::wire::QueryRequest::decode)).
//! 4. [`PositionalIndexer::find_chain`](kvatlas_core::index::PositionalIndexer::find_chain) searches the index, without a lock.
//!    [`find_bounds`](kvatlas_core::index::PositionalIndexer::find_bounds) does the same for blocks chosen from a chain.
//! 5. The answerer orders the holders, adds each holder's reasons for doubt, and encodes the
//!    [`QueryReply`](kvatlas_core::wire::QueryReply).
//! 6. [`Responder::send`](responder::Responder::send) sends it, or an error in its place.
//!
//! | room | files |
//! |---|---|
//! | `queries` | `requests.rs`, `service.rs`, `answer.rs`; in no room: `responder.rs` |
//! | `core/wire` | `subject.rs`, `query.rs`, `reader.rs`, `reply.rs`, `reasons.rs` |
//! | `core/index` | `indexer.rs` and its parts, counted as one: `namespace.rs`, `search/`, `runs/`, `directory/` |
//!
//! Outside these steps, `kvatlas_telemetry::QueryMetrics` counts. Queries by tokens or block hashes also use `core/hash`. A
//! gateway takes requests the same way, and then asks the shards: [`Gateway::run`](queries::gateway::Gateway::run).
//!
//! # Start and stop
//!
//! Start, in this order:
//!
//! 1. embedded broker, if the settings ask for one
//! 2. lanes
//! 3. admin listener
//! 4. HTTP listener, if the settings ask for one: it refuses queries until the daemon is ready
//! 5. newest snapshot: from the Object Store if it has a newer one than the directory, else the newest file
//! 6. operators' commands
//! 7. events
//! 8. resyncs
//! 9. queries
//!
//! Queries are served once two conditions hold: events are followed, and this daemon's index knows as much as that of a
//! replica that serves. The second condition has a time limit. [`kvatlas_process::admin::Latch`] lists what readiness
//! waits for.
//!
//! A gateway has no index. It skips the snapshot, events, resyncs and the comparison.
//!
//! Stop, in this order: no new queries over NATS, then over HTTP; no new events; lanes drained; a last snapshot; admin
//! listener; broker. All of it has one time limit.

#![allow(
    rustdoc::private_intra_doc_links,
    reason = "the walks lead through the rooms' own files"
)]

pub mod costs;
#[cfg(feature = "dynamo")]
mod dynamo;
#[cfg(feature = "grpc")]
mod grpc;
mod hints;
mod history;
pub mod http;
pub mod lanes;
mod life;
mod outcomes;
mod page;
mod queries;
#[cfg(feature = "redis")]
mod redis;
mod reports;
mod responder;
mod resync;
pub mod runbook;
mod shared;
pub mod snapshots;
mod sources;
mod start_error;
mod traces;
mod troubles;
mod vital;

#[cfg(feature = "dynamo")]
pub use dynamo::dynamo_subjects;
pub use life::{Daemon, NamespaceError, ReloadError, ReloadReport, StopReport, namespaces};
pub use sources::stream::{StreamError, check_config};
pub use start_error::StartError;
