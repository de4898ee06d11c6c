//! The query listener over HTTP. It gives the same answers as over NATS, in the contract's format and in the formats of
//! other indexers.
//!
//! | route | answer |
//! |---|---|
//! | `POST /v1/query` | the contract's reply as JSON; counts blocks |
//! | `GET /v1/status` | the last applied batch of each holder of a namespace |
//! | `GET /v1/models` | the models of which a cache is known |
//! | `POST /v1/outcomes`, `POST /v1/hints` | take reports of routers |
//! | `POST /query`, `POST /query_by_hash` | the dialects of Mooncake and Dynamo; count tokens |
//! | `POST /lookup` | the dialect of LMCache's controller; counts tokens |
//! | `POST /register`, `POST /unregister` | start and stop following an engine, if a bridge runs in the process |
//! | `GET /workers` | the known workers, and how engines are followed |
//! | `GET /dump` | all blocks of all holders, as a stream |
//! | `GET /health` | 200 while queries are answered, else 503 |
//! | `GET /metrics` | the metrics, as on the admin listener |
//! | `GET /openapi.json` | description of all routes, for programs |
//!
//! A handler reads the index directly, on the thread of its connection. Reading takes no lock, and connections are
//! spread over all cores.
//!
//! The header `x-kvatlas-exact` is `true` if the answer is certain. It is `false` in three cases:
//!
//! - The state of a holder in the answer is not certain.
//! - A holder that is not in the answer may hold more than is known.
//! - A query of this form cannot find some of the holders.
//!
//! Connections are bounded in number. A request is bounded in its head, its body, and the time to send them; answers
//! that clients have not read are bounded in bytes and time. When the
//! daemon stops, the time to finish is bounded too. With a token, every route but `/health` needs `Authorization:
//! Bearer TOKEN`. The listener does not encrypt: for encryption, put a proxy in front of it.

mod answers;
mod auth;
mod bodies;
mod caller;
mod contract;
mod dialect;
mod dump;
mod error;
mod fields;
mod lookup;
mod models;
mod openapi;
mod registration;
mod reports;
mod routes;
mod scores;
mod server;
mod shared;
#[cfg(test)]
mod tests;
mod workers;

pub use auth::{ReadTokens, TokenError, TokenFile, TokenFiles};
#[cfg(feature = "grpc")]
pub(crate) use bodies::{Bodies, BodyLimits};
#[cfg(feature = "grpc")]
pub(crate) use error::HttpRefusal;
pub use server::{HEAD_BYTES_MAX, HttpServer, HttpStartError};
pub use shared::HttpParts;
pub(crate) use shared::Index;
