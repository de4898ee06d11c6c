//! Bounds on the messages of a ZMTP 3 peer: walks over the peer's bytes without keeping them.
//!
//! ```text
//! greeting  64 bytes
//! frame     flags (1 byte), length (1 byte, or 8 with the flag LONG), body
//! ```
//!
//! A message is the frames up to the first one without the flag MORE. A command is a frame of its own, with the flag COMMAND.

use kvatlas_telemetry::labels::FrameFault;

const GREETING_BYTES: u64 = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The bounds of a peer's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WalkLimits {
    /// Longest frame, in bytes of its body.
    pub(super) frame_bytes_max: u64,
    /// Longest message, in bytes of its frames' bodies.
    pub(super) message_bytes_max: u64,
    /// Most frames of one message.
    pub(super) frames_max: u32,
    /// Longest command, in bytes. Handshakes need fewer than 100.
    pub(super) command_bytes_max: u64,
}

impl WalkLimits {
    /// The bounds of an engine: far above what decoders take, which is 16 MiB in at most four frames.
    pub(super) const ENGINE: Self = Self {
        frame_bytes_max: 32 << 20,
        message_bytes_max: 64 << 20,
        frames_max: 16,
        command_bytes_max: 4096,
    };
}

/// Part of the stream that comes next.
#[derive(Debug, Clone, Copy)]
enum State {
    /// This many bytes need no look: the rest of the greeting, or of a body.
    Skip(u64),
    /// The flags of a frame are next.
    Flags,
    /// `missing` more bytes of a frame's length; `value` is the length so far.
    Length { flags: u8, missing: u8, value: u64 },
}

/// A bound that a peer has broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Broken {
    /// Number of bytes, in the slice walked last, before the byte that broke the bound. They do not complete the head of the frame that
    /// broke it.
    pub(super) passed: usize,
    pub(super) fault: FrameFault,
}

/// Position in the bytes of one peer's connection.
#[derive(Debug)]
pub(super) struct Walker {
    limits: WalkLimits,
    state: State,
    /// Number of frames of the current message.
    frames: u32,
    message_bytes: u64,
}

impl Walker {
    /// Makes a walker at the beginning of a connection.
    pub(super) fn new(limits: WalkLimits) -> Self {
        Self {
            limits,
            state: State::Skip(GREETING_BYTES),
            frames: 0,
            message_bytes: 0,
        }
    }

    /// Walks on over `bytes`, which may begin and end anywhere. After an error the connection is of no use.
    ///
    /// # Errors
    ///
    /// [`Broken`] as soon as the head of a frame announces a length or a frame beyond a bound.
    pub(super) fn walk(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            self.state = match self.state {
                State::Skip(left) => {
                    let rest = bytes.len() - at;
                    // The conversion cannot lose anything: the result is at most `rest`.
                    let skipped = usize::try_from(left).map_or(rest, |left| left.min(rest));
                    at += skipped;
                    Self::skip(left - skipped as u64)
                }
                State::Flags => {
                    at += 1;
                    let missing = if byte & LONG == 0 { 1 } else { 8 };
                    State::Length {
                        flags: byte,
                        missing,
                        value: 0,
                    }
                }
                State::Length {
                    flags,
                    missing,
                    value,
                } => {
                    let value = value << 8 | u64::from(byte);
                    let next = match missing {
                        1 => match self.admit(flags, value) {
                            Ok(()) => Self::skip(value),
                            Err(fault) => return Err(Broken { passed: at, fault }),
                        },
                        _ => State::Length {
                            flags,
                            missing: missing - 1,
                            value,
                        },
                    };
                    at += 1;
                    next
                }
            };
        }
        Ok(())
    }

    fn skip(bytes: u64) -> State {
        match bytes {
            0 => State::Flags,
            left => State::Skip(left),
        }
    }

    /// Counts a frame with these `flags` and this length, or refuses it with the bound that it breaks.
    fn admit(&mut self, flags: u8, bytes: u64) -> Result<(), FrameFault> {
        let limits = self.limits;
        if flags & COMMAND != 0 {
            return match bytes <= limits.command_bytes_max {
                true => Ok(()),
                false => Err(FrameFault::CommandTooLong),
            };
        }
        self.frames = self.frames.saturating_add(1);
        self.message_bytes = self.message_bytes.saturating_add(bytes);
        if bytes > limits.frame_bytes_max {
            return Err(FrameFault::FrameTooLong);
        }
        if self.message_bytes > limits.message_bytes_max {
            return Err(FrameFault::MessageTooLong);
        }
        if self.frames > limits.frames_max {
            return Err(FrameFault::TooManyFrames);
        }
        if flags & MORE == 0 {
            (self.frames, self.message_bytes) = (0, 0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: WalkLimits = WalkLimits {
        frame_bytes_max: 300,
        message_bytes_max: 400,
        frames_max: 3,
        command_bytes_max: 20,
    };

    fn frame(flags: u8, body: usize) -> Vec<u8> {
        let mut bytes = vec![flags];
        match flags & LONG {
            0 => bytes.push(u8::try_from(body).unwrap()),
            _ => bytes.extend((body as u64).to_be_bytes()),
        }
        // Bodies look like heads.
        bytes.resize(bytes.len() + body, 0xff);
        bytes
    }

    fn stream(frames: &[Vec<u8>]) -> Vec<u8> {
        [vec![0xff; 64], frames.concat()].concat()
    }

    /// The outcome for the bytes whole, cut in two at every place, and byte by byte: always the same.
    fn walked(bytes: &[u8]) -> Option<Broken> {
        let whole = Walker::new(LIMITS).walk(bytes).err();
        for cut in 0..=bytes.len() {
            let mut walker = Walker::new(LIMITS);
            let (first, second) = bytes.split_at(cut);
            let found = match walker.walk(first) {
                Err(broken) => Some(broken),
                Ok(()) => walker.walk(second).err().map(|broken| Broken {
                    passed: cut + broken.passed,
                    ..broken
                }),
            };
            assert_eq!(found, whole, "cut at {cut}");
        }
        let mut walker = Walker::new(LIMITS);
        let single = bytes.chunks(1).enumerate().find_map(|(place, byte)| {
            let broken = walker.walk(byte).err()?;
            Some(Broken {
                passed: place + broken.passed,
                ..broken
            })
        });
        assert_eq!(single, whole, "byte by byte");
        whole
    }

    #[test]
    fn messages_within_the_bounds_pass_wherever_they_are_cut() {
        let bytes = stream(&[
            frame(COMMAND, 20),
            frame(COMMAND | LONG, 20),
            frame(MORE, 0),
            frame(MORE | LONG, 0),
            frame(LONG, 300),
            frame(0, 255),
            // A command between the frames of a message is none of them.
            frame(MORE, 200),
            frame(COMMAND, 0),
            frame(MORE | LONG, 8),
            frame(0, 192),
            frame(0, 0),
        ]);
        assert_eq!(walked(&bytes), None);
        assert_eq!(walked(&bytes[..70]), None);
        assert_eq!(walked(&[]), None);
    }

    #[test]
    fn what_is_beyond_a_bound_is_found_before_its_head_is_whole() {
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
            let head = if last[0] & LONG == 0 { 1 } else { 8 };
            let passed = stream(&before).len() + first.concat().len() + head;
            let bytes = stream(&[before.concat(), frames.concat()]);
            assert_eq!(walked(&bytes), Some(Broken { passed, fault }));
        }
    }

    #[test]
    fn any_length_can_be_announced() {
        for length in [1_u64 << 30, 1 << 62, 1 << 63, u64::MAX] {
            let head = [&[LONG][..], &length.to_be_bytes()].concat();
            let broken = Broken {
                passed: 64 + 8,
                fault: FrameFault::FrameTooLong,
            };
            assert_eq!(walked(&stream(&[head])), Some(broken));
        }
    }
}
