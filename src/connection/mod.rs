//! Connections to NATS: how to make one that lasts, and the development broker.

pub mod embedded;
mod nats;

pub use nats::{ConnectError, ConnectPatience, ConnectionNotice, RoundTripError, connect, round_trip};
