//! Clients that speak the contract with daemons: a query client for routers, and a publisher for engines.

mod backoff;
mod clock;
mod error;
mod gather;
pub mod publish;
mod query;
mod refusal;
mod resend;

/// The NATS library, in the version whose connections the clients of this crate take.
pub use async_nats;
pub use backoff::{Backoff, reconnect_pause};
pub use clock::{rfc3339, unix_time_us, unix_us_of};
pub use error::ClientError;
pub use gather::{Gatherer, Merged};
pub use query::QueryClient;
pub use refusal::{Refusal, Refused};

/// Compiles the README's Rust examples.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExamples;
