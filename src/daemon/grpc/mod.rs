//! Listener that answers SGLang's router over gRPC (`kv_indexer.v1`), in place of SGLang's own indexer.
//!
//! ```text
//! router ──MatchExternalKvPrefix: hashes of a prompt's pages──▶ service ──▶ question ──▶ one search of each namespace
//! ```
//!
//! A *page* is SGLang's word for a block. The router sends SGLang's own hashes of pages, and names no model. So all
//! namespaces with the hash scheme `sglang` are searched, or only the namespace that `grpc.namespace` names. An answer
//! names workers by their address, which has to be the URL under which the router knows the worker. A worker whose
//! state is in doubt is left out.
//!
//! After some status codes, that router chooses a worker by load instead. After all other codes, the user's request
//! fails. So a question that cannot be answered gets a code of the first kind:
//!
//! | code | when |
//! |---|---|
//! | `UNAVAILABLE` | the daemon is not ready, or nothing is known of the namespace |
//! | `DEADLINE_EXCEEDED` | the question did not arrive in time, or its time for an answer is over |
//! | `RESOURCE_EXHAUSTED` | too many questions wait, or the answer would be too long |
//! | `OUT_OF_RANGE` | the question is too long |
//!
//! An answer has the header `x-kvatlas-exact`, as over HTTP. The header tells whether an empty answer is certain.
//!
//! | file | what |
//! |---|---|
//! | `messages` | questions and answers on the wire |
//! | `describe` | the description of the service, for clients that ask for it (reflection) |
//! | `question` | from a question to its answer |
//! | `reports` | workers whose blocks are reported over gRPC, and how many leading blocks of a prompt they have |
//! | `health` | readiness, over gRPC's health protocol |
//! | `service` | one request: its token, the method that answers it, and its bounds |
//! | `connection` | one connection of HTTP/2 |
//! | `start` | the listener |

mod connection;
mod describe;
mod health;
mod messages;
mod question;
mod reports;
mod service;
mod start;

pub(crate) use start::start_grpc;
