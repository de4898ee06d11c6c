//! The name that a process gives itself, by which people tell it from other processes.

/// Default name of a bridge's connections to NATS.
pub const BRIDGE: &str = "kvatlas-bridge";

/// Returns `NAME@HOST:PID` for this process. `NAME` is `connection_name`, the name of its connections to NATS.
pub fn instance_name(connection_name: &str) -> String {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    format!("{connection_name}@{host}:{}", std::process::id())
}
