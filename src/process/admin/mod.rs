//! The admin listener: metrics, probes and a view of the index over HTTP.
//!
//! The contract:
//!
//! * The listener has an operating-system thread of its own with its own runtime, so that it answers while every other
//!   thread is saturated. Its answers come from an [`AdminSource`], whose methods run on that thread. They must not
//!   wait for a lane (a thread that applies events) or a connection.
//! * [`AdminServer::start`] returns only after it has bound the address, so a taken port stops the start of the daemon.
//! * Bounds limit everything that a client can hold: the connections, the time to send a request, the size of its head,
//!   the life of a connection. A request with a body is refused.
//! * The listener has no authentication and no encryption. It only reads, but it shows the names of workers and
//!   namespaces. Bind it to an address that only operators reach.
//!
//! | route | answer |
//! |---|---|
//! | `/` | the routes, as text; for a browser, the page |
//! | `/metrics` | Prometheus' text format, version 0.0.4 |
//! | `/livez` | 200 while the admin thread runs |
//! | `/readyz` | 200 or 503, with JSON: whether each [`Latch`] is set, and the reasons why the process is not ready |
//! | `/workers` | JSON: the workers, see [`WorkersQuery`] |
//! | `/index` | JSON: the sizes of the index, by namespace |
//! | `/vllm-router` | flags of vLLM's router for the engines that a bridge republishes, as text |
//! | `/page/…` | what the page in a browser loads |

mod parameters;
mod readiness;
mod routes;
mod server;
#[cfg(test)]
mod tests;
mod workers_query;

use axum::Router;
use axum::response::Response;

pub use parameters::{ParametersError, parameters};
pub use readiness::{Latch, Readiness, ReadinessReport};
pub use server::{AdminError, AdminServer};
pub use workers_query::{StateFilter, WORKERS_LIMIT_DEFAULT, WORKERS_LIMIT_MAX, WorkersCursor, WorkersQuery};

/// Maximum number of answers that are streamed at the same time. A single client may have twice as many connections.
/// So a client that holds all streams can still make other requests, and the listener closes none of its streams to
/// make room for them.
pub const STREAMS_MAX: usize = 16;

/// The source of the admin listener's answers. All methods run on the admin thread. A method must be quick, and must
/// not wait for another thread that can be saturated.
pub trait AdminSource: Send + Sync {
    /// Returns all metrics in Prometheus' text format.
    fn metrics(&self) -> String;

    /// Returns whether the daemon can serve, and what is missing if not.
    fn readiness(&self) -> ReadinessReport;

    /// Returns the workers that the query selects, as one JSON value.
    fn workers_json(&self, query: &WorkersQuery) -> String;

    /// Returns the sizes of the index as one JSON value, with an entry for each namespace.
    fn index_json(&self) -> String;

    /// Returns the flags with which vLLM's router follows the engines that this process republishes. `Err` has a text
    /// for the client if the query string is not valid. `None` if this process republishes no engines.
    fn router_flags(&self, _query: Option<&str>) -> Option<Result<String, String>> {
        None
    }

    /// Returns the page for browsers at `/`. `None` if there is no page.
    fn home(&self) -> Option<Response> {
        None
    }

    /// Returns the routes below `/page/`: what the page in a browser loads. Their answers may be slow.
    fn page(&self) -> Router {
        Router::new()
    }
}
