//! Dynamo's request plane: the endpoint `kv_indexer_query`, which Dynamo's router asks with `--use-remote-indexer`.
//!
//! ```text
//!             discovery (etcd, or files)
//!               ▲ record           │
//! kvatlas ──────┘                  ▼
//!    ▲ ◀───── request, over NATS or TCP ────── router
//!    └─────── answer, over a connection to the address in the request ──▶
//! ```
//!
//! The router has no fallback: without an answer its requests fail. So every request gets an answer. A worker whose
//! state is in doubt is left out, and an unknown model has no workers. A daemon that is not ready answers with no
//! workers at all. A starting replica makes neither a record nor a subscription until it knows as much as the other
//! replicas. So routers do not ask it earlier.
//!
//! | file | what |
//! |---|---|
//! | `messages` | the two-part messages, and the discovery record |
//! | `answer` | from a question to its answer |
//! | `discovery` | keeping the record where routers look for it |
//! | `serve` | taking requests, and giving answers back |
//!
//! The bridge asks workers over the same plane, with the same messages.

mod answer;
mod destinations;
mod discovery;
mod messages;
mod serve;

pub(crate) use serve::start_dynamo;
