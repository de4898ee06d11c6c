//! The query service: answers requests on query and status subjects.
//!
//! Requests are answered inline, one after the other per connection: an answer costs microseconds, less than handing it to
//! another task. Several connections share the requests by queue group, like several replicas do.

mod answer;
mod service;

pub use answer::{Answer, Answerer};
pub use service::{QueryService, QueryServiceError};
