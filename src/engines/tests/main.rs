//! Tests of the decoders and the translator, with recorded payloads, damaged payloads, and a naive model.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test stops at the first surprise"
)]

mod beyond;
mod common;
mod components;
mod doubts;
mod fixtures;
mod forms;
mod fuzz;
mod groups;
mod hidden_keys;
mod mirror;
mod oracle;
mod plane;
mod pool;
mod recalled;
mod rules;
mod saved;
mod schemes;
mod subscribed;
mod windows;
