//! Messages and commands in the bytes of a peer, within bounds.

use bytes::{Buf, Bytes, BytesMut};

use kvatlas_telemetry::labels::FrameFault;

use super::{COMMAND, GREETING_BYTES, LONG, MORE, READY, Role, SOCKET_TYPE};

/// The bounds of a peer's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageLimits {
    /// Maximum size of a frame's body, in bytes.
    pub(super) frame_bytes_max: u64,
    /// Maximum size of a message, in bytes of its frames' bodies.
    pub(super) message_bytes_max: u64,
    /// Maximum number of frames in one message.
    pub(super) frames_max: usize,
    /// Maximum size of a command, in bytes. Handshakes need fewer than 100.
    pub(super) command_bytes_max: u64,
    /// Number of bytes that are read at a time.
    pub(super) chunk_bytes: usize,
}

impl MessageLimits {
    /// The bounds of an engine's messages. They are far above the decoders' own bounds, 16 MiB in at most four frames.
    pub(super) const ENGINE: Self = Self {
        frame_bytes_max: 32 << 20,
        message_bytes_max: 64 << 20,
        frames_max: 16,
        command_bytes_max: 4096,
        chunk_bytes: 64 << 10,
    };

    /// The bounds of messages from a router that connects to the bridge: subscriptions, questions and commands are
    /// short.
    pub(super) const ROUTER: Self = Self {
        frame_bytes_max: 1024,
        message_bytes_max: 4096,
        frames_max: 4,
        command_bytes_max: 1024,
        chunk_bytes: 1024,
    };
}

/// A message or a command that a peer has sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum MessageOrCommand {
    /// The frames of a message.
    Message(Vec<Bytes>),
    /// A command, with its name.
    Command(Bytes),
}

/// Reason why nothing can be exchanged with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum Mismatch {
    /// The peer speaks another protocol, or an older version.
    #[error("it does not speak ZMTP 3")]
    Protocol,
    /// The peer wants a security mechanism other than NULL.
    #[error("it wants a security mechanism (CURVE or another one); only NULL is spoken")]
    Mechanism,
    /// The peer ended the connection within the greeting.
    #[error(
        "it ends the connection within the greeting, as a ZeroMQ socket with a security mechanism (CURVE or another one) does; only \
         NULL is spoken"
    )]
    Greeting,
    /// The peer ended the connection instead of shaking hands.
    #[error(
        "it ends the connection at once, as a ZeroMQ socket of another type does, behind the port for something else"
    )]
    Ended,
    /// The peer has sent the command `ERROR`, by which it refuses the connection.
    #[error("it refuses the connection")]
    Refused,
    /// The peer is a socket of another type, for example because the port is wrong.
    #[error("it is a ZeroMQ socket of another type than {0}")]
    Type(&'static str),
}

/// Bytes of a peer that are not decoded yet, and the frames of a message that is not whole.
#[derive(Debug)]
pub(super) struct ZmtpDecoder {
    limits: MessageLimits,
    buffer: BytesMut,
    frames: Vec<Bytes>,
}

/// The flags of a frame, and the length of its body, which comes next.
#[derive(Debug, Clone, Copy)]
struct FrameHeader {
    flags: u8,
    bytes: usize,
    body: u64,
}

impl ZmtpDecoder {
    pub(super) fn new(limits: MessageLimits) -> Self {
        Self {
            limits,
            buffer: BytesMut::new(),
            frames: Vec::new(),
        }
    }

    /// Makes room for the bytes that are read next.
    pub(super) fn make_room(&mut self) -> &mut BytesMut {
        self.buffer.reserve(self.limits.chunk_bytes);
        &mut self.buffer
    }

    /// Whether some bytes of the peer are not decoded yet.
    pub(super) fn has_begun(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// Reads the greeting of the peer. Returns false while it is not whole.
    pub(super) fn greeting(&mut self) -> Result<bool, Mismatch> {
        // A peer of another protocol may send fewer bytes than a greeting has, and wait.
        if self.buffer.first().is_some_and(|first| *first != 0xff) {
            return Err(Mismatch::Protocol);
        }
        let Some((greeting, _)) = self.buffer.split_first_chunk::<GREETING_BYTES>() else {
            return Ok(false);
        };
        let has_version = greeting[9] == 0x7f && greeting[10] >= 3;
        let is_null = greeting[12..].starts_with(b"NULL\0");
        self.buffer.advance(GREETING_BYTES);
        match (has_version, is_null) {
            (true, true) => Ok(true),
            (true, false) => Err(Mismatch::Mechanism),
            (false, _) => Err(Mismatch::Protocol),
        }
    }

    /// Returns the next message or command; `None` if it is not whole.
    ///
    /// # Errors
    ///
    /// The bound that the peer breaks. The error comes as soon as the head of a frame announces too much. After an
    /// error, no more bytes can be decoded.
    pub(super) fn next(&mut self) -> Result<Option<MessageOrCommand>, FrameFault> {
        while let Some(head) = self.head() {
            self.admit(head)?;
            let body = usize::try_from(head.body).unwrap_or(usize::MAX);
            if self.buffer.len() - head.bytes < body {
                return Ok(None);
            }
            self.buffer.advance(head.bytes);
            let body = self.buffer.split_to(body).freeze();
            if head.flags & COMMAND != 0 {
                return Ok(Some(MessageOrCommand::Command(body)));
            }
            self.frames.push(body);
            if head.flags & MORE == 0 {
                return Ok(Some(MessageOrCommand::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    /// Returns the head of the next frame; `None` if it is not whole.
    fn head(&self) -> Option<FrameHeader> {
        let (flags, rest) = self.buffer.split_first()?;
        let (bytes, body) = match flags & LONG {
            0 => (2, u64::from(*rest.first()?)),
            _ => (9, u64::from_be_bytes(*rest.first_chunk()?)),
        };
        let flags = *flags;
        Some(FrameHeader { flags, bytes, body })
    }

    /// Checks that the next frame, which begins with `head`, keeps the message or command within the bounds.
    fn admit(&self, head: FrameHeader) -> Result<(), FrameFault> {
        let limits = &self.limits;
        if head.flags & COMMAND != 0 {
            return match head.body <= limits.command_bytes_max {
                true => Ok(()),
                false => Err(FrameFault::CommandTooLong),
            };
        }
        if head.body > limits.frame_bytes_max {
            return Err(FrameFault::FrameTooLong);
        }
        let before: u64 = self.frames.iter().map(|frame| frame.len() as u64).sum();
        if before + head.body > limits.message_bytes_max {
            return Err(FrameFault::MessageTooLong);
        }
        if self.frames.len() >= limits.frames_max {
            return Err(FrameFault::TooManyFrames);
        }
        Ok(())
    }
}

/// Checks that `command` is `READY` of a socket that can talk to `role`.
pub(super) fn check_ready(command: &[u8], role: Role) -> Result<(), Mismatch> {
    if command.starts_with(b"\x05ERROR") {
        return Err(Mismatch::Refused);
    }
    let mut properties = command.strip_prefix(READY).ok_or(Mismatch::Protocol)?;
    while let Some((name, value, rest)) = property(properties) {
        if name.eq_ignore_ascii_case(&SOCKET_TYPE[1..]) {
            let is_peer = role.peers().iter().any(|peer| peer.as_bytes() == value);
            let wanted = role.peers().first().copied().unwrap_or_default();
            return if is_peer {
                Ok(())
            } else {
                Err(Mismatch::Type(wanted))
            };
        }
        properties = rest;
    }
    Err(Mismatch::Protocol)
}

/// Returns the name and the value of the first property in `bytes`, and the bytes after this property; `None` if it is
/// not complete.
fn property(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    let (name, rest) = rest.split_at_checked(usize::from(*length))?;
    let (length, rest) = rest.split_first_chunk()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    let (value, rest) = rest.split_at_checked(length)?;
    Some((name, value, rest))
}

#[cfg(test)]
mod tests {
    use super::super::{greeting, ready};
    use super::*;

    const LIMITS: MessageLimits = MessageLimits {
        frame_bytes_max: 300,
        message_bytes_max: 400,
        frames_max: 3,
        command_bytes_max: 20,
        chunk_bytes: 64,
    };

    fn frame(flags: u8, body: usize) -> Vec<u8> {
        let mut bytes = vec![flags];
        match flags & LONG {
            0 => bytes.push(u8::try_from(body).unwrap()),
            _ => bytes.extend((body as u64).to_be_bytes()),
        }
        // The bytes of a body look like the head of a frame.
        bytes.resize(bytes.len() + body, 0xff);
        bytes
    }

    /// Outcome of decoding: the lengths of each message's frames, and the bound that was broken in the end. A command
    /// of n bytes counts as −1 − n.
    type Seen = (Vec<Vec<i64>>, Option<FrameFault>);

    fn seen<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Seen {
        let (mut decoder, mut all) = (ZmtpDecoder::new(LIMITS), Vec::new());
        for piece in pieces {
            decoder.make_room().extend_from_slice(piece);
            loop {
                match decoder.next() {
                    Ok(Some(MessageOrCommand::Message(frames))) => {
                        all.push(frames.iter().map(|frame| frame.len() as i64).collect());
                    }
                    Ok(Some(MessageOrCommand::Command(body))) => all.push(vec![-1 - body.len() as i64]),
                    Ok(None) => break,
                    Err(fault) => return (all, Some(fault)),
                }
            }
        }
        (all, None)
    }

    /// Decodes the bytes, and returns the outcome. Asserts that the outcome is the same if the bytes come in one piece,
    /// in two pieces with any cut, or byte by byte.
    fn decoded(bytes: &[u8]) -> Seen {
        let whole = seen([bytes].into_iter());
        for cut in 0..=bytes.len() {
            let (first, second) = bytes.split_at(cut);
            assert_eq!(seen([first, second].into_iter()), whole, "cut at {cut}");
        }
        assert_eq!(seen(bytes.chunks(1)), whole, "byte by byte");
        whole
    }

    #[test]
    fn messages_within_the_bounds_are_read_wherever_they_are_cut() {
        let bytes = [
            frame(COMMAND, 20),
            frame(COMMAND | LONG, 20),
            frame(MORE, 0),
            frame(MORE | LONG, 0),
            frame(LONG, 300),
            frame(0, 255),
            // A command between the frames of a message does not count as a frame of the message.
            frame(MORE, 200),
            frame(COMMAND, 0),
            frame(MORE | LONG, 8),
            frame(0, 192),
            frame(0, 0),
        ]
        .concat();
        let messages = [
            vec![-21],
            vec![-21],
            vec![0, 0, 300],
            vec![255],
            vec![-1],
            vec![200, 8, 192],
            vec![0],
        ];
        assert_eq!(decoded(&bytes), (messages.to_vec(), None));
        assert_eq!(decoded(&[]), (Vec::new(), None));
    }

    #[test]
    fn a_bound_is_broken_by_the_head_of_a_frame_after_all_messages_before_it() {
        let before = [frame(COMMAND, 5), frame(MORE, 1), frame(0, 7)];
        let cases = [
            (vec![frame(LONG, 301)], FrameFault::FrameTooLong),
            (vec![frame(COMMAND, 21)], FrameFault::CommandTooLong),
            (vec![frame(COMMAND | LONG, 21)], FrameFault::CommandTooLong),
            (
                vec![frame(MORE, 200), frame(COMMAND, 3), frame(MORE, 201)],
                FrameFault::MessageTooLong,
            ),
            (
                vec![frame(MORE, 0), frame(MORE, 0), frame(MORE, 0), frame(0, 0)],
                FrameFault::TooManyFrames,
            ),
        ];
        for (frames, fault) in cases {
            let (last, first) = frames.split_last().unwrap();
            let head = if last[0] & LONG == 0 { 2 } else { 9 };
            let bytes = [before.concat(), first.concat(), last[..head].to_vec()].concat();
            let (messages, found) = decoded(&bytes);
            assert_eq!(
                (&messages[..2], found),
                (&[vec![-6], vec![1, 7]][..], Some(fault))
            );
        }
    }

    #[test]
    fn any_length_can_be_announced_and_reserves_nothing() {
        for length in [1_u64 << 30, 1 << 62, 1 << 63, u64::MAX] {
            let head = [&[LONG][..], &length.to_be_bytes()].concat();
            assert_eq!(decoded(&head), (Vec::new(), Some(FrameFault::FrameTooLong)));
        }
        let mut decoder = ZmtpDecoder::new(MessageLimits::ENGINE);
        let head = [&[LONG][..], &(32_u64 << 20).to_be_bytes()].concat();
        decoder.make_room().extend_from_slice(&head);
        assert_eq!(decoder.next(), Ok(None));
        assert!(decoder.make_room().capacity() < 256 << 10);
    }

    #[test]
    fn the_opening_tells_whether_a_peer_can_be_talked_to() {
        let check = |bytes: &[u8], role| {
            let mut decoder = ZmtpDecoder::new(MessageLimits::ROUTER);
            decoder.make_room().extend_from_slice(bytes);
            assert!(decoder.greeting()?);
            match decoder.next() {
                Ok(Some(MessageOrCommand::Command(body))) => check_ready(&body, role),
                other => panic!("{other:?}"),
            }
        };
        let opening = |role| [&greeting()[..], &ready(role)].concat();
        let pairs = [(Role::Publisher, Role::Subscriber), (Role::Replay, Role::Asker)];
        for (one, other) in pairs {
            assert_eq!(check(&opening(one), other), Ok(()));
            assert_eq!(check(&opening(other), one), Ok(()));
        }
        let replay = opening(Role::Replay);
        assert_eq!(check(&replay, Role::Subscriber), Err(Mismatch::Type("PUB")));
        let curve = [&replay[..12], b"CURVE\0", &replay[18..]].concat();
        assert_eq!(check(&curve, Role::Asker), Err(Mismatch::Mechanism));
        let old = [&replay[..10], &[2], &replay[11..]].concat();
        assert_eq!(check(&old, Role::Asker), Err(Mismatch::Protocol));
        assert_eq!(check(b"HTTP/1.1", Role::Asker), Err(Mismatch::Protocol));
    }
}
