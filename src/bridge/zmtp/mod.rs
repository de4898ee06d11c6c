//! ZMTP 3.0, ZeroMQ's wire protocol over TCP, for the four kinds of sockets that a bridge has.
//!
//! ```text
//! greeting  64 bytes
//! frame     flags (1 byte), length (1 byte, or 8 with the flag LONG), body
//! ```
//!
//! A message is the frames up to the first one without the flag MORE. A command is a frame of its own, with the flag COMMAND.
//!
//! ZeroMQ libraries reserve as much memory as a frame announces. They also reconnect without telling the caller, and bound
//! their queues by the number of messages, not by bytes. This module does the opposite:
//!
//! - It checks the announced sizes first ([`MessageLimits`]).
//! - Its memory grows only with the bytes that arrive.
//! - It never reconnects: a broken connection ends.

mod connection;
mod decoder;
mod reader;

pub(super) use connection::PeerConnection;
use decoder::MessageLimits;
pub(super) use decoder::{MessageOrCommand, Mismatch};
pub(super) use reader::ReadError;

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
const READY: &[u8] = b"\x05READY";
const SOCKET_TYPE: &[u8] = b"\x0bSocket-Type";

/// The kind of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A PUB socket, which listens for connections.
    Publisher,
    /// A ROUTER socket, which listens for connections.
    Replay,
    /// A SUB socket, which makes the connection.
    Subscriber,
    /// A DEALER socket, which makes the connection.
    Asker,
}

impl Role {
    fn socket_type(self) -> &'static str {
        match self {
            Self::Publisher => "PUB",
            Self::Replay => "ROUTER",
            Self::Subscriber => "SUB",
            Self::Asker => "DEALER",
        }
    }

    /// Returns the bounds of the peer's messages.
    fn limits(self) -> MessageLimits {
        match self {
            Self::Publisher | Self::Replay => MessageLimits::ROUTER,
            Self::Subscriber | Self::Asker => MessageLimits::ENGINE,
        }
    }

    /// Returns the types of sockets that can be at the other end.
    fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Publisher => &["SUB", "XSUB"],
            Self::Replay => &["REQ", "DEALER", "ROUTER"],
            Self::Subscriber => &["PUB", "XPUB"],
            Self::Asker => &["REP", "DEALER", "ROUTER"],
        }
    }
}

/// Returns the greeting, which a socket sends first.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    // The signature, and version 3.0. With this version, peers subscribe by messages.
    bytes[9..12].copy_from_slice(&[0x7f, 3, 0]);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Returns the command `READY`, which follows the greetings.
fn ready(role: Role) -> Vec<u8> {
    let mut bytes = Vec::new();
    let socket_type = role.socket_type().as_bytes();
    let length = u32::try_from(socket_type.len()).unwrap_or_default();
    let ready = [READY, SOCKET_TYPE, &length.to_be_bytes(), socket_type].concat();
    push_frame(&mut bytes, COMMAND, &ready);
    bytes
}

/// Appends a message.
pub(super) fn push_message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    for (place, frame) in frames.iter().enumerate() {
        let more = if place + 1 < frames.len() { MORE } else { 0 };
        push_frame(out, more, frame);
    }
}

/// Returns the answer to a heartbeat; `None` for any other command. A heartbeat is `PING` with a time to live and a context,
/// which the answer repeats.
fn pong(command: &[u8]) -> Option<Vec<u8>> {
    let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
    let mut bytes = Vec::new();
    push_frame(&mut bytes, COMMAND, &[b"\x04PONG", context].concat());
    Some(bytes)
}

fn push_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => out.extend_from_slice(&[flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// Returns host and port of `tcp://HOST:PORT`, the host without brackets; `None` for any other text or for port 0. An
/// IPv6 address needs brackets.
pub(super) fn split_endpoint(endpoint: &str) -> Option<(&str, u16)> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let port: u16 = port.parse().ok()?;
    let is_part = |byte: u8| {
        let is_of_address = bracketed.is_some() && byte == b':';
        byte.is_ascii_alphanumeric() || b"-_.*%".contains(&byte) || is_of_address
    };
    let host = bracketed.unwrap_or(host);
    let is_host = !host.is_empty() && host.bytes().all(is_part);
    (is_host && port > 0).then_some((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_is_answered_with_its_context() {
        let pong_of = |command: &[u8]| pong(command).map(|bytes| bytes[2..].to_vec());
        assert_eq!(pong_of(b"\x04PING\x00\x05context").unwrap(), b"\x04PONGcontext");
        assert_eq!(pong_of(b"\x04PING\x00\x05").unwrap(), b"\x04PONG");
        assert_eq!(pong_of(b"\x04PING"), None);
        assert_eq!(pong_of(b"\x05ERROR\x00"), None);
    }

    #[test]
    fn an_endpoint_is_a_host_and_a_port() {
        for (endpoint, parts) in [
            ("tcp://gpu-0.svc:5557", Some(("gpu-0.svc", 5557))),
            ("tcp://[::1]:5557", Some(("::1", 5557))),
            ("tcp://*:5557", Some(("*", 5557))),
            ("tcp://[::ffff:192.0.2.2]:5557", Some(("::ffff:192.0.2.2", 5557))),
            ("tcp://::ffff:192.0.2.2:5557", None),
            ("tcp://::1:5557", None),
            ("tcp://a:b:5557", None),
            ("tcp://a@b:5557", None),
            ("tcp://a/b:5557", None),
            ("tcp://:5557", None),
            ("tcp://a:0", None),
            ("tcp://a:99999", None),
            ("ipc:///run/a", None),
        ] {
            assert_eq!(split_endpoint(endpoint), parts, "{endpoint}");
        }
    }
}
