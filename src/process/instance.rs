//! The name that a daemon gives itself, so that people can tell it from others.

/// The name of a bridge's connections, unless it is given another.
pub const BRIDGE: &str = "kvatlas-bridge";

/// `NAME@HOST:PID`, with the name of its connections.
pub fn instance_name(connection_name: &str) -> String {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    format!("{connection_name}@{host}:{}", std::process::id())
}
