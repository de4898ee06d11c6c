//! The query service: answers requests on query and status subjects.
//!
//! A daemon with an index answers inline, one request after the other per connection: an answer costs microseconds, less than
//! handing it to another task. Several connections share the requests by queue group, like several replicas do. A gateway
//! answers the same subjects by asking the shards, many requests at a time.
//!
//! Whoever stops leaves the queue group without losing a request: see `queue_member`.

mod answer;
mod gateway;
mod queue_member;
mod responder;
mod roster;
mod service;

pub use answer::{Answer, Answerer};
pub use gateway::{Gateway, GatewaySettings};
pub use roster::{holders_behind, known_holders};
pub use service::{QueryService, QueryServiceError, ServedRequests};
