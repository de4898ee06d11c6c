//! Why a holder's state is not certain, as replies and metrics say it.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Why a holder's state is not certain. The words are part of the wire contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DegradedReason {
    /// Batches were lost: numbers are missing.
    Gap = 1 << 0,
    /// A batch could not be decoded.
    Undecodable = 1 << 1,
    /// An event could not be applied (a position out of range, no content in a namespace that recomputes).
    Rejected = 1 << 2,
    /// Stored blocks were dropped because their parent never came.
    UnknownParent = 1 << 3,
    /// A limit on blocks or bytes was reached, and blocks were left out or evicted. The holder has at least the reported blocks.
    Capacity = 1 << 4,
    /// Batches may have been lost since the last one that continued the count. The connection broke, messages were dropped,
    /// or the state comes from a snapshot.
    Unverified = 1 << 5,
    /// The publisher has been asked for what is missing, and the answer is not applied yet.
    Resyncing = 1 << 6,
    /// Nothing has been heard of the holder for a while, not even a heartbeat.
    Stale = 1 << 7,
    /// The publisher itself has missed events of the engine, and cannot get them again: until the engine clears or restarts.
    UpstreamGap = 1 << 8,
    /// The publisher itself has lost sight of the engine: the connection broke, or the engine is silent.
    UpstreamLost = 1 << 9,
    /// Events that have been received, or that may have been sent, are not applied yet, and the oldest has waited for long.
    Behind = 1 << 10,
    /// A batch that must be seen whole was being applied while the query was answered.
    Changing = 1 << 11,
    /// The publisher does not know all groups of layers of the engine. What full attention has is known; what a request can reuse is not.
    UnknownGroups = 1 << 13,
}

impl DegradedReason {
    /// All reasons, in the order in which replies list them.
    pub const ALL: [Self; 13] = [
        Self::Gap,
        Self::Undecodable,
        Self::Rejected,
        Self::UnknownParent,
        Self::Capacity,
        Self::Unverified,
        Self::Resyncing,
        Self::Stale,
        Self::UpstreamGap,
        Self::UpstreamLost,
        Self::Behind,
        Self::Changing,
        Self::UnknownGroups,
    ];

    /// The word on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Undecodable => "undecodable",
            Self::Rejected => "rejected",
            Self::UnknownParent => "unknown_parent",
            Self::Capacity => "capacity",
            Self::Unverified => "unverified",
            Self::Resyncing => "resyncing",
            Self::Stale => "stale",
            Self::UpstreamGap => "upstream_gap",
            Self::UpstreamLost => "upstream_lost",
            Self::Behind => "behind",
            Self::Changing => "changing",
            Self::UnknownGroups => "unknown_groups",
        }
    }

    /// Whether the reason is a fact about the blocks. Such a reason outlives a restart; the others describe the moment.
    pub fn is_lasting(self) -> bool {
        !self.is_of_the_moment() && !matches!(self, Self::Unverified | Self::Resyncing | Self::Stale)
    }

    /// Whether a resync can remove the reason. A full holder stays full. A silent publisher does not answer. A publisher that
    /// doubts its own state knows no more when it is asked.
    pub fn is_worth_a_resync(self) -> bool {
        !self.is_upstream()
            && !self.is_of_the_moment()
            && !matches!(self, Self::Capacity | Self::Resyncing | Self::Stale)
    }

    /// Whether the reason is about the moment of the query alone, and not about the holder.
    fn is_of_the_moment(self) -> bool {
        matches!(self, Self::Behind | Self::Changing)
    }

    /// Whether the doubt is the publisher's own: it says so in an event, and takes it back in one.
    pub fn is_upstream(self) -> bool {
        matches!(self, Self::UpstreamGap | Self::UpstreamLost | Self::UnknownGroups)
    }
}

/// A set of reasons; empty when the state is certain. Travels as an array of words.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct DegradedReasons(u32);

impl DegradedReasons {
    /// The set with every reason.
    pub fn all() -> Self {
        DegradedReason::ALL.into_iter().fold(Self::default(), Self::with)
    }

    /// The set with one reason.
    pub fn of(reason: DegradedReason) -> Self {
        Self(reason as u32)
    }

    /// Whether the state is certain.
    // serde's `skip_serializing_if` passes a reference.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Whether there are reasons, and all are about the moment of the query alone.
    pub fn are_of_the_moment(self) -> bool {
        !self.is_empty() && self.iter().all(DegradedReason::is_of_the_moment)
    }

    /// Whether `reason` is in the set.
    pub fn contains(self, reason: DegradedReason) -> bool {
        self.0 & reason as u32 != 0
    }

    /// Those that are the publisher's own doubts.
    #[must_use]
    pub fn upstream(self) -> Self {
        self.filtered(DegradedReason::is_upstream)
    }

    /// The set with all of `others` added.
    #[must_use]
    pub fn union(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// The set with `reason` added.
    #[must_use]
    pub fn with(self, reason: DegradedReason) -> Self {
        Self(self.0 | reason as u32)
    }

    /// The set with `reason` removed.
    #[must_use]
    pub fn without(self, reason: DegradedReason) -> Self {
        Self(self.0 & !(reason as u32))
    }

    /// The reasons in the set for which `is_wanted` holds.
    #[must_use]
    pub fn filtered(self, is_wanted: impl Fn(DegradedReason) -> bool) -> Self {
        self.iter()
            .filter(|reason| is_wanted(*reason))
            .fold(Self::default(), Self::with)
    }

    /// The reasons, in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = DegradedReason> {
        DegradedReason::ALL
            .into_iter()
            .filter(move |reason| self.contains(*reason))
    }

    /// The set as a number, for a snapshot. Bit values must be kept stable.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// The set from a number; bits that mean nothing are dropped.
    pub fn from_bits(bits: u32) -> Self {
        Self(
            DegradedReason::ALL
                .iter()
                .fold(0, |known, reason| known | *reason as u32)
                & bits,
        )
    }
}

impl fmt::Debug for DegradedReasons {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_set()
            .entries(self.iter().map(DegradedReason::as_str))
            .finish()
    }
}

impl Serialize for DegradedReasons {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.iter().count()))?;
        for reason in self.iter() {
            list.serialize_element(reason.as_str())?;
        }
        list.end()
    }
}

impl<'de> Deserialize<'de> for DegradedReasons {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Words;

        impl<'de> Visitor<'de> for Words {
            type Value = DegradedReasons;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of reasons")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<DegradedReasons, A::Error> {
                let mut reasons = DegradedReasons::default();
                while let Some(word) = list.next_element::<std::borrow::Cow<'de, str>>()? {
                    // A later daemon may have reasons that this client does not know; `exact` says enough then.
                    let known = DegradedReason::ALL
                        .into_iter()
                        .find(|reason| reason.as_str() == word);
                    reasons = known.map_or(reasons, |reason| reasons.with(reason));
                }
                Ok(reasons)
            }
        }

        deserializer.deserialize_seq(Words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_travel_as_words() {
        let reasons = DegradedReasons::of(DegradedReason::Gap).with(DegradedReason::Unverified);
        let text = serde_json::to_string(&reasons).unwrap();
        assert_eq!(text, r#"["gap","unverified"]"#);
        assert_eq!(serde_json::from_str::<DegradedReasons>(&text).unwrap(), reasons);
        assert_eq!(
            DegradedReasons::from_bits(u32::MAX).iter().count(),
            DegradedReason::ALL.len()
        );
        let with_a_later_one: DegradedReasons = serde_json::from_str(r#"["tired","gap"]"#).unwrap();
        assert_eq!(with_a_later_one, DegradedReasons::of(DegradedReason::Gap));
    }
}
