//! SGLang's router asks its indexer over gRPC (`kv_indexer.v1`): this listener answers in that indexer's place.
//!
//! ```text
//! router ──MatchExternalKvPrefix: hashes of a prompt's pages──▶ service ──▶ question ──▶ one search of each namespace
//! ```
//!
//! The router asks by SGLang's own hashes of pages, and names no model. So all namespaces with the hash scheme `sglang`
//! are searched, or only the one that `grpc.namespace` names. An answer names workers by their address, which has to be
//! the URL under which the router knows the worker. A worker whose state is in doubt is left out.
//!
//! Some status codes make that router choose by load instead. All other codes fail the user's request. So a question
//! that cannot be answered gets a code of the first kind:
//!
//! | code | when |
//! |---|---|
//! | `UNAVAILABLE` | the daemon is not ready, or nothing is known of the namespace |
//! | `DEADLINE_EXCEEDED` | the question did not arrive in time, or its time for an answer is over |
//! | `RESOURCE_EXHAUSTED` | too many questions wait, or the answer would be too long |
//! | `OUT_OF_RANGE` | the question is too long |
//!
//! An answer has the header `x-kvatlas-exact`, as over HTTP. It tells a certain empty answer from an uncertain one.
//!
//! | file | what |
//! |---|---|
//! | `messages` | questions and answers on the wire |
//! | `describe` | the description of the service, for clients that ask for it (reflection) |
//! | `question` | from a question to its answer |
//! | `reports` | workers whose blocks are reported over gRPC, and how many leading blocks of a prompt they have |
//! | `hits` | how often blocks were looked up |
//! | `health` | readiness, over gRPC's health protocol |
//! | `service` | one request: its token, the method that answers it, and its bounds |
//! | `connection` | one connection of HTTP/2 |
//! | `start` | the listener |

mod connection;
mod describe;
mod health;
mod hits;
mod messages;
mod question;
mod reports;
mod service;
mod start;

pub(crate) use start::start_grpc;
