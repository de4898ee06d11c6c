//! Parts that the processes of kvatlas share: daemon, gateway, bridge, and the commands that ask them.
//!
//! | module | what |
//! |---|---|
//! | [`broker`] | connections to NATS that last, the development broker |
//! | [`admin`] | the HTTP listener of operators: metrics, probes, views |
//! | [`http`] | questions over HTTP, with bounds |
//! | [`listener`] | one listener within limits, which all that take connections use |
//! | [`registry`] | what is said of engines: between the listeners that are told, and the bridge that follows them |
//! | [`presence`] | by what tools find a process among the services of NATS |
//! | `instance` | the name by which people tell a process from others |
//! | [`setup`] | what a daemon wants of its surroundings |
//! | [`storage`] | the file system behind a directory, which one process has |
//! | [`dynamo`] | messages of Dynamo's request plane, and questions to etcd |

pub mod admin;
pub mod broker;
pub mod dynamo;
pub mod http;
mod instance;
pub mod listener;
pub mod presence;
pub mod registry;
pub mod setup;
pub mod storage;

pub use instance::{BRIDGE, instance_name};
pub use presence::present_bridge;
