//! Tests of the daemon and the command line with a real broker. All are one binary, with a module for each subject.
//!
//! `cargo test --test integration jetstream::` runs one subject. What several subjects need is in [`support`].

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and its modules are seen by this binary alone"
)]

mod addresses;
mod attacker;
mod bad_input;
mod behind;
mod bridge;
mod capacity;
mod cli;
mod crash;
mod deployment;
mod discovery;
mod doctor;
mod documentation;
mod doubts;
mod dynamo_router;
mod evidence;
mod faults;
mod flood;
mod gateway_http;
mod ground_truth;
#[cfg(feature = "grpc")]
mod grpc;
#[cfg(feature = "grpc")]
mod grpc_reports;
mod hints;
mod history;
mod http;
mod identity;
mod jetstream;
mod lent_state;
mod liveness;
mod main_job;
mod object_store;
mod outage;
mod outcomes;
mod permissions;
mod redis;
mod refusals;
mod reload;
mod replay;
mod resync;
mod returns;
mod shards;
mod snapshot_restarts;
mod starts;
mod support;
mod traces;
mod transitions;
mod truthfulness;
mod usable;
