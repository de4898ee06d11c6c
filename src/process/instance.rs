//! The name that a process gives itself, so that people can tell it from others.

/// Name of a bridge's connections, unless it is given another.
pub const BRIDGE: &str = "kvatlas-bridge";

/// Returns `NAME@HOST:PID`, where `NAME` is the name of the process's connections.
pub fn instance_name(connection_name: &str) -> String {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    format!("{connection_name}@{host}:{}", std::process::id())
}
