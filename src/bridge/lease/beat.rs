//! Beats: messages by which each bridge of a group tells the others which holders it speaks for and how well it sees them.

use serde::{Deserialize, Serialize};

/// Version of the form of a beat ([`LeaseBeat`]); raised with each change of the form.
const VERSION: u8 = 1;
/// Maximum number of holders in one beat ([`LeaseBeat`]).
pub(super) const HOLDERS_MAX: usize = 16_384;
/// Maximum size of a beat ([`LeaseBeat`]), in bytes: more than [`HOLDERS_MAX`] holders need.
const BYTES_MAX: usize = HOLDERS_MAX * 24 + 64;

/// Entry of one holder in a beat, the message by which a bridge tells others for which holders it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FollowedHolder {
    /// Hash of the holder's name.
    pub(super) holder: u64,
    /// How well the bridge sees the holder: a number of [`super::Sight`].
    pub(super) sight: u8,
    /// Epoch in which the bridge reports the holder to daemons; `None` if it does not report it.
    pub(super) epoch: Option<u64>,
}

/// Beat: a message by which a bridge tells other bridges for which holders it speaks, and how well it sees each holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaseBeat {
    version: u8,
    /// Bridge that sent the beat: a random number that each process draws for itself.
    pub(super) bridge: u64,
    /// Number of the beat, counted by the bridge that sends it.
    pub(super) number: u64,
    pub(super) holders: Vec<FollowedHolder>,
}

impl LeaseBeat {
    pub(super) fn new(bridge: u64, number: u64, holders: Vec<FollowedHolder>) -> Self {
        Self {
            version: VERSION,
            bridge,
            number,
            holders,
        }
    }

    /// Decodes the beat in a payload; `None` if the payload has another form or version, or exceeds the bounds.
    pub(super) fn decode(payload: &[u8]) -> Option<Self> {
        let beat: Self = (payload.len() <= BYTES_MAX)
            .then(|| rmp_serde::from_slice(payload).ok())
            .flatten()?;
        (beat.version == VERSION && beat.holders.len() <= HOLDERS_MAX).then_some(beat)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        // A beat has numbers alone, so that writing it cannot fail.
        rmp_serde::to_vec(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_is_read_as_it_was_written_and_nothing_else_is_one() {
        let followed = |holder| FollowedHolder {
            holder,
            sight: 2,
            epoch: (holder % 2 == 0).then_some(u64::MAX - holder),
        };
        let beat = LeaseBeat::new(
            7,
            8,
            (0..HOLDERS_MAX as u64)
                .map(|holder| followed(u64::MAX - holder))
                .collect(),
        );
        let payload = beat.encode();
        assert!(payload.len() <= BYTES_MAX);
        assert_eq!(LeaseBeat::decode(&payload), Some(beat.clone()));
        assert_eq!(LeaseBeat::decode(&payload[1..]), None);
        assert_eq!(LeaseBeat::decode(b""), None);
        assert_eq!(LeaseBeat::decode(&vec![0xc0; BYTES_MAX + 1]), None);
        let newer = LeaseBeat { version: 2, ..beat };
        assert_eq!(LeaseBeat::decode(&newer.encode()), None);
    }
}
