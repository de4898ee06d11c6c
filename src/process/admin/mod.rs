//! The admin listener: metrics, probes and a view of the index over HTTP.
//!
//! The contract:
//!
//! * The listener has an operating-system thread of its own with its own runtime, so that it answers while every other
//!   thread is saturated. What it serves comes from an [`AdminSource`], whose methods run on that thread: they must
//!   not wait for a lane or a connection.
//! * [`AdminServer::start`] has bound the address when it returns, so that a taken port stops the start of the daemon.
//! * Everything a client can hold is bounded: the connections, the time to send a request, the size of its head, the
//!   life of a connection. A request with a body is refused.
//! * It has no authentication and no encryption. It only reads, but it tells the names of workers and namespaces:
//!   bind it to an address that only operators reach.
//!
//! | route | answer |
//! |---|---|
//! | `/` | the routes, as text; for a browser, the page |
//! | `/metrics` | Prometheus' text format, version 0.0.4 |
//! | `/livez` | 200 while the admin thread runs |
//! | `/readyz` | 200 or 503, and as JSON which [`Latch`] is set and, in words, why it is not ready |
//! | `/workers` | JSON: the workers, see [`WorkersQuery`] |
//! | `/index` | JSON: the sizes of the index, by namespace |
//! | `/page/…` | what the page in a browser loads |

mod body;
mod readiness;
mod routes;
mod server;
#[cfg(test)]
mod tests;
mod workers_query;

pub use body::{AdminBody, Answering};
pub use readiness::{Latch, Readiness, ReadinessReport};
pub use server::{AdminError, AdminServer};
pub use workers_query::percent_decode;
pub use workers_query::{StateFilter, WORKERS_LIMIT_DEFAULT, WORKERS_LIMIT_MAX, WorkersCursor, WorkersQuery};

/// Streamed answers at a time. One source may have more connections than that, so that no stream is closed for a request beside it.
pub const STREAMS_MAX: usize = 16;

/// A request for the page, or for what it loads.
#[derive(Debug, Clone, Copy)]
pub struct PageRequest<'a> {
    /// `/`, or a path below `/page/`.
    pub path: &'a str,
    /// The part of the target after the question mark.
    pub query: &'a str,
}

/// The answer to a [`PageRequest`].
pub struct PageAnswer(pub Answering);

/// The source of what the admin listener serves. All methods run on the admin thread: they must be quick, and must not wait for
/// another thread that can be saturated.
pub trait AdminSource: Send + Sync {
    /// All metrics in Prometheus' text format.
    fn metrics(&self) -> String;

    /// Whether the daemon can serve, and what is missing if not.
    fn readiness(&self) -> ReadinessReport;

    /// The workers that the query selects, as one JSON value.
    fn workers_json(&self, query: &WorkersQuery) -> String;

    /// The sizes of the index by namespace, as one JSON value.
    fn index_json(&self) -> String;

    /// The page in a browser, and what it loads; none where there is no such path. The answer may take its time.
    fn page(&self, _request: PageRequest<'_>) -> Option<PageAnswer> {
        None
    }
}
