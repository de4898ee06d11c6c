//! ZMTP 3.0 for sockets that bind: the bytes that a PUB and a ROUTER socket send and read.
//!
//! The library's own PUB keeps 100,000 messages for each subscriber, however long they are, and reserves as much memory as a frame
//! announces. Here the waiting messages are bounded in bytes, and a peer's messages to a few bytes.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Longest frame of a peer, in bytes of its body: subscriptions, questions and commands are far shorter.
const FRAME_BYTES_MAX: u64 = 1024;
/// Most frames of a peer's message.
const FRAMES_MAX: usize = 4;

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The kind of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// PUB.
    Publisher,
    /// ROUTER.
    Replay,
}

impl Role {
    fn socket_type(self) -> &'static str {
        match self {
            Self::Publisher => "PUB",
            Self::Replay => "ROUTER",
        }
    }
}

/// Error after which nothing more can be read from a peer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// The connection failed.
    #[error("{0}")]
    Network(#[from] io::Error),
    /// The peer speaks something else, or another version.
    #[error("it does not speak ZMTP 3")]
    Protocol,
    /// The peer sends more than such a socket takes.
    #[error("it sends too much")]
    TooMuch,
}

/// Something that a peer has sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The frames of a message.
    Message(Vec<Vec<u8>>),
    /// A command.
    Command(Vec<u8>),
}

/// Returns the first bytes that a socket sends: the greeting, and the command `READY`.
pub(super) fn opening(role: Role) -> Vec<u8> {
    let mut bytes = vec![0; GREETING_BYTES];
    bytes[0] = 0xff;
    // The signature, and version 3.0. With this version, peers subscribe by messages.
    bytes[9..12].copy_from_slice(&[0x7f, 3, 0]);
    bytes[12..16].copy_from_slice(b"NULL");
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    let socket_type = role.socket_type().as_bytes();
    ready.extend_from_slice(&(u32::try_from(socket_type.len()).unwrap_or_default()).to_be_bytes());
    ready.extend_from_slice(socket_type);
    push_frame(&mut bytes, COMMAND, &ready);
    bytes
}

/// Reads a peer's greeting, and its command `READY`.
pub(super) async fn read_opening(peer: &mut (impl AsyncRead + Unpin)) -> Result<(), ReadError> {
    let mut greeting = [0; GREETING_BYTES];
    peer.read_exact(&mut greeting).await?;
    let is_sound = greeting[0] == 0xff && greeting[9] == 0x7f && greeting[10] >= 3;
    if !is_sound || !greeting[12..].starts_with(b"NULL\0") {
        return Err(ReadError::Protocol);
    }
    match read(peer).await? {
        Received::Command(body) if body.starts_with(b"\x05READY") => Ok(()),
        _ => Err(ReadError::Protocol),
    }
}

/// Reads the next message or command.
pub(super) async fn read(peer: &mut (impl AsyncRead + Unpin)) -> Result<Received, ReadError> {
    let mut frames = Vec::new();
    loop {
        let flags = peer.read_u8().await?;
        let length = match flags & LONG {
            0 => u64::from(peer.read_u8().await?),
            _ => peer.read_u64().await?,
        };
        let length = usize::try_from(length.min(FRAME_BYTES_MAX + 1)).unwrap_or(usize::MAX);
        if length as u64 > FRAME_BYTES_MAX || frames.len() >= FRAMES_MAX {
            return Err(ReadError::TooMuch);
        }
        let mut body = vec![0; length];
        peer.read_exact(&mut body).await?;
        if flags & COMMAND != 0 {
            return Ok(Received::Command(body));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Received::Message(frames));
        }
    }
}

/// Appends a message.
pub(super) fn push_message(out: &mut Vec<u8>, frames: &[&[u8]]) {
    for (place, frame) in frames.iter().enumerate() {
        let more = if place + 1 < frames.len() { MORE } else { 0 };
        push_frame(out, more, frame);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    async fn received(mut bytes: &[u8]) -> Result<Received, ReadError> {
        read(&mut bytes).await
    }

    #[tokio::test]
    async fn what_is_written_is_read() {
        for role in [Role::Publisher, Role::Replay] {
            read_opening(&mut opening(role).as_slice()).await.unwrap();
        }
        let frames = [&b""[..], &[7; 300]];
        let mut bytes = Vec::new();
        push_message(&mut bytes, &frames);
        let read = received(&bytes).await.unwrap();
        assert_eq!(read, Received::Message(frames.map(<[u8]>::to_vec).to_vec()));
    }

    #[tokio::test]
    async fn too_much_is_refused_as_soon_as_it_is_announced() {
        let long = [&[LONG][..], &u64::MAX.to_be_bytes()].concat();
        assert!(matches!(received(&long).await, Err(ReadError::TooMuch)));
        let long = [&[LONG | COMMAND][..], &1025_u64.to_be_bytes()].concat();
        assert!(matches!(received(&long).await, Err(ReadError::TooMuch)));
        assert!(matches!(
            received(&[MORE, 0].repeat(5)).await,
            Err(ReadError::TooMuch)
        ));
        let http = [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 64]].concat();
        let opened = read_opening(&mut http.as_slice()).await;
        assert!(matches!(opened, Err(ReadError::Protocol)));
    }
}
