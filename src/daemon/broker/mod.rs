//! Connections to NATS that last, and the development broker.

mod credentials;
pub mod embedded;
mod nats;

pub use kvatlas_client::{Refusal, Refused};
pub use nats::{ConnectError, ConnectPatience, ConnectionNotice, RoundTripError, connect, round_trip};
pub(crate) use nats::{SubscribeError, connect_counted, follow_connection};
