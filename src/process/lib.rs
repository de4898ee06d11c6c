//! Code that the processes of kvatlas share: the daemon, the gateway, the bridge, and the commands that send requests
//! to them.
//!
//! | module | what |
//! |---|---|
//! | [`broker`] | connections to NATS that reconnect by themselves, and the development broker |
//! | [`admin`] | the HTTP listener of operators: metrics, probes, views |
//! | [`http`] | requests over HTTP, with a bound on the size of answers |
//! | [`listener`] | a listener that limits its connections; all other listeners build on it |
//! | [`registry`] | the registry of engines, by which listeners tell the bridge which engines to follow |
//! | [`presence`] | the protocol by which tools find a process among the services of NATS |
//! | `boot_clock` | the clock that goes on while the machine is suspended |
//! | `instance` | the name by which people tell a process from others |
//! | [`setup`] | the needs of a daemon: size of messages, stream, room for snapshots |
//! | [`storage`] | file operations on a directory, and the lock that keeps other processes out of it |
//! | [`dynamo`] | messages of Dynamo's request plane, and questions to etcd |

pub mod admin;
mod boot_clock;
pub mod broker;
pub mod dynamo;
pub mod http;
mod instance;
pub mod listener;
pub mod presence;
pub mod registry;
pub mod setup;
pub mod storage;

pub use boot_clock::since_boot;
pub use instance::{BRIDGE, instance_name};
pub use presence::present_bridge;
