//! Reasons why a holder's state is not certain, as replies and metrics give them.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::query::QueryKey;
use super::tier::Tier;
use crate::worded;

/// Whether `text`, such as a salt, is given and not empty. Only then does it change the hashes of blocks.
fn is_named(text: Option<&String>) -> bool {
    text.is_some_and(|text| !text.is_empty())
}

worded! {
    /// Reason why a holder's state is not certain. The words are part of the wire contract.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u32)]
    pub enum DegradedReason {
        /// Batches were lost, because batch numbers are missing.
        Gap = 1 << 0 => "gap",
        /// A batch could not be decoded.
        Undecodable = 1 << 1 => "undecodable",
        /// An event could not be applied. For example, a position is out of range, or an event has no content in a
        /// namespace that recomputes hashes.
        Rejected = 1 << 2 => "rejected",
        /// Stored blocks were dropped because their parent never arrived.
        UnknownParent = 1 << 3 => "unknown_parent",
        /// A limit on blocks or bytes was reached, and blocks were left out or evicted. The holder has at least the
        /// reported blocks.
        Capacity = 1 << 4 => "capacity",
        /// Batches may have been lost since the last batch with the expected number. The connection broke, messages
        /// were dropped, or the state comes from a snapshot.
        Unverified = 1 << 5 => "unverified",
        /// The publisher has been asked for the missing batches, and the answer is not applied yet.
        Resyncing = 1 << 6 => "resyncing",
        /// The holder's publisher has sent nothing for a while, not even a heartbeat.
        Stale = 1 << 7 => "stale",
        /// The publisher has missed events of the engine, and cannot get them again. The reason stays until the
        /// engine clears its cache or restarts.
        UpstreamGap = 1 << 8 => "upstream_gap",
        /// The publisher has lost contact with the engine: the connection broke, or the engine is silent.
        UpstreamLost = 1 << 9 => "upstream_lost",
        /// Events that have been received, or that may have been sent, have not been applied yet. The oldest of them
        /// has waited for a long time.
        Behind = 1 << 10 => "behind",
        /// During the query, a batch that must be seen as a whole was being applied.
        Changing = 1 << 11 => "changing",
        /// Batches of a lower epoch arrive, or of one too far ahead, so two publishers claim the holder. It is not known whose blocks the
        /// reported blocks are.
        Contested = 1 << 12 => "contested",
        /// The publisher does not know all groups of layers of the engine. It knows which blocks full attention has,
        /// but not how many of them a request can reuse.
        UnknownGroups = 1 << 13 => "unknown_groups",
        /// The engine's events do not contain salts, so nothing is certain for a query with a salt, nor for one by hashes that
        /// the holder does not have.
        UntoldSalts = 1 << 14 => "untold_salts",
        /// The engine's events do not reliably tell which adapter a block belongs to. So nothing is certain for a
        /// query with an adapter, nor for one by hashes that the holder does not have.
        UntoldAdapters = 1 << 15 => "untold_adapters",
        /// The engine hashes each block together with the token after it. Queries by tokens find its blocks. Queries by
        /// hashes find them only if the hashes are computed in the same way.
        LooksAhead = 1 << 16 => "looks_ahead",
        /// The publisher does not know all blocks that the engine has on the host. It knows the blocks on the device.
        HostGap = 1 << 17 => "host_gap",
        /// Like [`Self::HostGap`], for a local disk. The blocks on the device and the host are known.
        DiskGap = 1 << 18 => "disk_gap",
        /// Like [`Self::HostGap`], for remote storage. The blocks in nearer tiers are known.
        ExternalGap = 1 << 19 => "external_gap",
        /// The engine hashes overlapping pairs of tokens, and computes the last two tokens of each prompt. Answers take
        /// that into account, so the reason makes no query uncertain.
        HashesPairs = 1 << 20 => "hashes_pairs",
        /// A reason of a later version, which this version does not know.
        Unknown = 1 << 29 => "unknown_reason",
    }
}

impl DegradedReason {
    /// Whether the reason is about the holder's blocks themselves, so that it still holds after the daemon has
    /// restarted. Other reasons only describe the stream of events at one moment.
    pub fn is_lasting(self) -> bool {
        !self.is_of_the_moment()
            && !matches!(
                self,
                Self::Unverified | Self::Resyncing | Self::Stale | Self::Contested
            )
    }

    /// Whether a resync can remove the reason. In a resync, the publisher sends the missed batches or its full state. A
    /// resync cannot remove a reason of the moment, which only says that events are waiting or being applied. Nor does
    /// a resync help in these cases:
    ///
    /// - The holder is at its capacity, and stays full.
    /// - The publisher is silent, and does not answer.
    /// - A resync is already under way.
    /// - The publisher itself doubts its blocks. A resync cannot give it the knowledge that it lacks.
    pub fn is_worth_a_resync(self) -> bool {
        !self.is_upstream()
            && !self.is_of_the_moment()
            && !matches!(self, Self::Capacity | Self::Resyncing | Self::Stale)
    }

    /// Whether the reason only says that, during a query, events were waiting to be applied or a batch was being
    /// applied. Such a reason says nothing about the holder's blocks.
    fn is_of_the_moment(self) -> bool {
        matches!(self, Self::Behind | Self::Changing)
    }

    /// Whether the reason is the publisher's own doubt about its blocks. The publisher reports the doubt in one event,
    /// and withdraws the doubt in a later event.
    pub fn is_upstream(self) -> bool {
        let is_of_all = matches!(self, Self::UpstreamGap | Self::UpstreamLost | Self::UnknownGroups);
        is_of_all || self.is_of_some_queries()
    }

    /// Whether the reason makes only some queries uncertain. Answers to all other queries are certain in spite of it.
    pub fn is_of_some_queries(self) -> bool {
        let is_of_a_form = matches!(
            self,
            Self::UntoldSalts | Self::UntoldAdapters | Self::LooksAhead | Self::HashesPairs
        );
        is_of_a_form || self.tier().is_some()
    }

    /// Returns the tier whose blocks the reason puts in doubt: the host, the disk or remote storage. Blocks in nearer
    /// tiers are certain. `None` for a reason that is not about one tier.
    pub fn tier(self) -> Option<Tier> {
        match self {
            Self::HostGap => Some(Tier::HOST),
            Self::DiskGap => Some(Tier::DISK),
            Self::ExternalGap => Some(Tier::EXTERNAL),
            _ => None,
        }
    }

    /// Returns the reason that puts a holder's blocks in `tier` in doubt, but no blocks in nearer tiers. `None` for the
    /// device and for tiers above [`Tier::EXTERNAL`], because no reason names these tiers.
    pub fn of_tier(tier: Tier) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.tier() == Some(tier))
    }

    /// Whether the reason makes the answer to a query by `key` uncertain. `is_listed` says whether the answer lists the
    /// holder.
    fn concerns(self, key: &QueryKey, is_listed: bool) -> bool {
        let (has_salt, has_adapter, is_by_tokens) = match key {
            QueryKey::Tokens {
                lora_name,
                cache_salt,
                ..
            } => (is_named(cache_salt.as_ref()), is_named(lora_name.as_ref()), true),
            _ => (false, false, false),
        };
        match self {
            // Hashes may be of a prompt with a salt or an adapter. If a query by hashes finds blocks of the holder, they are
            // not, and were computed as the engine computes them.
            Self::UntoldSalts => has_salt || !is_by_tokens && !is_listed,
            Self::UntoldAdapters => has_adapter || !is_by_tokens && !is_listed,
            Self::LooksAhead => !is_by_tokens && !is_listed,
            Self::HashesPairs => false,
            _ => true,
        }
    }
}

/// Set of reasons. It is empty if the state is certain. On the wire it is an array of words.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct DegradedReasons(u32);

impl DegradedReasons {
    /// Returns the set with every reason.
    pub fn all() -> Self {
        DegradedReason::ALL.into_iter().fold(Self::default(), Self::with)
    }

    /// Returns the set with one reason.
    pub fn of(reason: DegradedReason) -> Self {
        Self(reason as u32)
    }

    /// Whether the set is empty, that is, whether the state is certain.
    // serde's `skip_serializing_if` passes a reference.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Whether the set has reasons, and each of them only says that events were waiting or being applied during the
    /// query.
    pub fn are_of_the_moment(self) -> bool {
        !self.is_empty() && self.iter().all(DegradedReason::is_of_the_moment)
    }

    /// Whether `reason` is in the set.
    pub fn contains(self, reason: DegradedReason) -> bool {
        self.0 & reason as u32 != 0
    }

    /// Returns the reasons in the set that make every query uncertain.
    #[must_use]
    pub fn of_all_queries(self) -> Self {
        self.filtered(|reason| !reason.is_of_some_queries())
    }

    /// Returns the reasons in the set that make only some queries uncertain.
    #[must_use]
    pub fn of_some_queries(self) -> Self {
        self.filtered(DegradedReason::is_of_some_queries)
    }

    /// Returns the reasons in the set that make the answer to a query by `key` uncertain. `is_listed` says whether the
    /// answer lists the holder.
    #[must_use]
    pub fn for_query(self, key: &QueryKey, is_listed: bool) -> Self {
        // Most holders have no reason.
        match self.is_empty() {
            true => self,
            false => self.filtered(|reason| reason.concerns(key, is_listed)),
        }
    }

    /// Returns the reasons in the set, without those that put only tiers beyond `tier` in doubt. If no reason is left,
    /// the blocks in `tier` and in nearer tiers are certain.
    #[must_use]
    pub fn up_to(self, tier: Tier) -> Self {
        self.filtered(|reason| reason.tier().is_none_or(|doubted| doubted <= tier))
    }

    /// Returns the reasons in the set that are the publisher's doubts about its own blocks.
    #[must_use]
    pub fn upstream(self) -> Self {
        self.filtered(DegradedReason::is_upstream)
    }

    /// Returns the set with all reasons of `others` added.
    #[must_use]
    pub fn union(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Returns the set with `reason` added.
    #[must_use]
    pub fn with(self, reason: DegradedReason) -> Self {
        Self(self.0 | reason as u32)
    }

    /// Returns the set with `reason` removed.
    #[must_use]
    pub fn without(self, reason: DegradedReason) -> Self {
        Self(self.0 & !(reason as u32))
    }

    /// Returns the reasons in the set that satisfy `is_wanted`.
    #[must_use]
    pub fn filtered(self, is_wanted: impl Fn(DegradedReason) -> bool) -> Self {
        self.iter()
            .filter(|reason| is_wanted(*reason))
            .fold(Self::default(), Self::with)
    }

    /// Returns the reasons in the set, in a fixed order.
    pub fn iter(self) -> impl Iterator<Item = DegradedReason> {
        DegradedReason::ALL
            .into_iter()
            .filter(move |reason| self.contains(*reason))
    }

    /// Returns the set as a number, for a snapshot. Bit values must be kept stable.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Returns the set for a number that [`Self::bits`] gave. Bits of a later version become
    /// [`DegradedReason::Unknown`].
    pub fn from_bits(bits: u32) -> Self {
        let known = Self::all().0;
        match bits & !known {
            0 => Self(bits),
            _ => Self(bits & known).with(DegradedReason::Unknown),
        }
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
                    // A later daemon may have reasons that this client does not know.
                    let reason = DegradedReason::of_word(&word).unwrap_or(DegradedReason::Unknown);
                    reasons = reasons.with(reason);
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
    }

    #[test]
    fn reasons_of_a_later_version_stay_doubts_about_every_query_and_tier() {
        let host_gap = DegradedReasons::of(DegradedReason::HostGap);
        let expected = host_gap.with(DegradedReason::Unknown);
        let of_words: DegradedReasons = serde_json::from_str(r#"["tired","host_gap"]"#).unwrap();
        let of_bits = DegradedReasons::from_bits(host_gap.bits() | 1 << 21);
        for reasons in [of_words, of_bits] {
            assert_eq!(reasons, expected);
            let unknown = DegradedReasons::of(DegradedReason::Unknown);
            assert_eq!(
                (reasons.of_all_queries(), reasons.up_to(Tier::DEVICE)),
                (unknown, unknown)
            );
        }
    }
}
