//! Why a holder's state is not certain, as replies and metrics say it.

use std::fmt;

use serde::de::{SeqAccess, Visitor};
use serde::ser::SerializeSeq;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Tier;
use super::query::QueryKey;

/// Whether a text is one that enters the hashes.
fn is_named(text: Option<&String>) -> bool {
    text.is_some_and(|text| !text.is_empty())
}

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
    /// Batches of a lower epoch come: two publishers claim the holder. Nobody knows whose blocks it has.
    Contested = 1 << 12,
    /// The publisher does not know all groups of layers of the engine. What full attention has is known; what a request can reuse is not.
    UnknownGroups = 1 << 13,
    /// The engine's events do not tell salts: nothing is certain for a query with one.
    UntoldSalts = 1 << 14,
    /// The engine's events do not tell, or not surely, which adapter a block is of: nothing is certain for a query with one.
    UntoldAdapters = 1 << 15,
    /// The engine hashes each block with the token behind it. Queries by tokens find its blocks. Queries by hashes do only where these are
    /// computed so.
    LooksAhead = 1 << 16,
    /// The publisher does not know all that the engine has on the host. What the device has is known.
    HostGap = 1 << 17,
    /// As [`Self::HostGap`], on a local disk. What device and host have is known.
    DiskGap = 1 << 18,
    /// As [`Self::HostGap`], in remote storage. What nearer tiers have is known.
    ExternalGap = 1 << 19,
}

impl DegradedReason {
    /// All reasons, in the order in which replies list them.
    pub const ALL: [Self; 20] = [
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
        Self::Contested,
        Self::UnknownGroups,
        Self::UntoldSalts,
        Self::UntoldAdapters,
        Self::LooksAhead,
        Self::HostGap,
        Self::DiskGap,
        Self::ExternalGap,
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
            Self::Contested => "contested",
            Self::UnknownGroups => "unknown_groups",
            Self::UntoldSalts => "untold_salts",
            Self::UntoldAdapters => "untold_adapters",
            Self::LooksAhead => "looks_ahead",
            Self::HostGap => "host_gap",
            Self::DiskGap => "disk_gap",
            Self::ExternalGap => "external_gap",
        }
    }

    /// Whether the reason is a fact about the blocks. Such a reason outlives a restart; the others describe the moment.
    pub fn is_lasting(self) -> bool {
        !self.is_of_the_moment()
            && !matches!(
                self,
                Self::Unverified | Self::Resyncing | Self::Stale | Self::Contested
            )
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
        let is_of_all = matches!(self, Self::UpstreamGap | Self::UpstreamLost | Self::UnknownGroups);
        is_of_all || self.is_of_some_queries()
    }

    /// Whether the reason is one for some queries only: what the holder has is certain for all others.
    pub fn is_of_some_queries(self) -> bool {
        let is_of_a_form = matches!(self, Self::UntoldSalts | Self::UntoldAdapters | Self::LooksAhead);
        is_of_a_form || self.tier().is_some()
    }

    /// The tier of which the holder's blocks are in doubt, for reasons about one beyond the device. Such a reason is none for a query of which
    /// nearer tiers have all blocks.
    pub fn tier(self) -> Option<Tier> {
        match self {
            Self::HostGap => Some(Tier::HOST),
            Self::DiskGap => Some(Tier::DISK),
            Self::ExternalGap => Some(Tier::EXTERNAL),
            _ => None,
        }
    }

    /// The reason for a doubt about what lies in `tier` alone; none for the device, whose blocks others stand behind.
    pub fn of_tier(tier: Tier) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.tier() == Some(tier))
    }

    /// Whether the reason is one for a query by `key`, in whose answer the holder `is_listed` or not.
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
            Self::UntoldSalts => has_salt,
            Self::UntoldAdapters => has_adapter,
            // Hashes that find blocks there have been computed so.
            Self::LooksAhead => !is_by_tokens && !is_listed,
            _ => true,
        }
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

    /// The reasons that leave nothing certain for any query.
    #[must_use]
    pub fn of_all_queries(self) -> Self {
        self.filtered(|reason| !reason.is_of_some_queries())
    }

    /// The reasons that leave something uncertain for some queries only.
    #[must_use]
    pub fn of_some_queries(self) -> Self {
        self.filtered(DegradedReason::is_of_some_queries)
    }

    /// The reasons that count for a query by `key`, in whose answer the holder `is_listed` or not.
    #[must_use]
    pub fn for_query(self, key: &QueryKey, is_listed: bool) -> Self {
        // Mostly there is none.
        match self.is_empty() {
            true => self,
            false => self.filtered(|reason| reason.concerns(key, is_listed)),
        }
    }

    /// The reasons that say something of `tier` or nearer ones. Without any, all that lies there is known for certain.
    #[must_use]
    pub fn up_to(self, tier: Tier) -> Self {
        self.filtered(|reason| reason.tier().is_none_or(|doubted| doubted <= tier))
    }

    /// The reasons that are the publisher's own doubts.
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
