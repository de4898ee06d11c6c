//! The frames of engines' publishers and replay sockets.

use bytes::Bytes;

/// Payload of a batch, with the batch's number and topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Numbered {
    pub(super) seq: u64,
    pub(super) payload: Bytes,
    /// Topic of the payload; empty if the frames do not tell it.
    pub(super) topic: Bytes,
}

/// Fault of frames that do not form a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    /// The message has a wrong number of frames.
    #[error("a message has {0} frames; a batch has topic, number and payload")]
    Count(usize),
    /// The frame of the number does not have 8 bytes.
    #[error("the number of a batch has {0} bytes instead of 8")]
    Number(usize),
}

/// Number that ends a replay: −1.
const END: u64 = u64::MAX;

fn number(frame: &Bytes) -> Result<u64, FrameError> {
    let bytes: [u8; 8] = frame
        .as_ref()
        .try_into()
        .map_err(|_| FrameError::Number(frame.len()))?;
    Ok(u64::from_be_bytes(bytes))
}

/// Parses a published message: `[topic, number, payload]`.
pub(super) fn parse_published(frames: &[Bytes]) -> Result<Numbered, FrameError> {
    let [topic, seq, payload] = frames else {
        return Err(FrameError::Count(frames.len()));
    };
    Ok(Numbered {
        seq: number(seq)?,
        payload: payload.clone(),
        topic: topic.clone(),
    })
}

/// Parses a replayed message: `[empty, number, payload]`, and since vLLM 0.26 `[empty, topic, number, payload]`. Returns
/// `None` at the end of the replay.
pub(super) fn parse_replayed(frames: &[Bytes]) -> Result<Option<Numbered>, FrameError> {
    let (topic, seq, payload) = match frames {
        [empty, seq, payload] => (empty, seq, payload),
        [_empty, topic, seq, payload] => (topic, seq, payload),
        _ => return Err(FrameError::Count(frames.len())),
    };
    let seq = number(seq)?;
    Ok((seq != END).then(|| Numbered {
        seq,
        payload: payload.clone(),
        topic: topic.clone(),
    }))
}

/// Makes the question for all batches from `start` on: `[empty, number]`.
pub(super) fn replay_request(start: u64) -> [Bytes; 2] {
    [Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(frames: &[&[u8]]) -> Vec<Bytes> {
        frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect()
    }

    const SEVEN: &[u8] = &[0, 0, 0, 0, 0, 0, 0, 7];

    #[test]
    fn both_framings_of_a_replay_are_read() {
        let batch = |topic| {
            Some(Numbered {
                seq: 7,
                payload: Bytes::from_static(b"x"),
                topic: Bytes::from_static(topic),
            })
        };
        assert_eq!(parse_replayed(&frames(&[b"", SEVEN, b"x"])), Ok(batch(b"")));
        assert_eq!(
            parse_replayed(&frames(&[b"", b"kv", SEVEN, b"x"])),
            Ok(batch(b"kv"))
        );
        assert_eq!(parse_replayed(&frames(&[b"", &[0xff; 8], b""])), Ok(None));
        assert_eq!(parse_replayed(&frames(&[b"", b"", &[0xff; 8], b""])), Ok(None));
    }

    #[test]
    fn other_frames_are_errors() {
        assert_eq!(parse_published(&frames(&[b"kv", SEVEN, b"x"])).unwrap().seq, 7);
        assert_eq!(parse_published(&frames(&[b"x"])), Err(FrameError::Count(1)));
        assert_eq!(
            parse_published(&frames(&[b"", b"7", b"x"])),
            Err(FrameError::Number(1))
        );
        assert_eq!(parse_replayed(&frames(&[])), Err(FrameError::Count(0)));
        assert_eq!(
            parse_replayed(&frames(&[b"", b"", b""])),
            Err(FrameError::Number(0))
        );
    }
}
