//! Shards: the division of the workers among daemons.
//!
//! With `count` shards, a worker belongs to shard `XXH3-64(name as UTF-8, seed 1337) mod count`, in every namespace.
//! The rule is part of the contract, so that anyone can compute which shard knows a worker's blocks.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::subject::WorkerName;

/// Header of every reply of a sharded daemon, including errors. Its value is the daemon's [`Shard`] as text, such as
/// `0/3`.
pub const SHARD_HEADER: &str = "Kvatlas-Shard";

/// Maximum number of shards.
pub const SHARDS_MAX: u32 = 256;

/// Seed of the hash that assigns a worker to a shard. It is the same as the seed of block hashes.
const SHARD_SEED: u64 = 1337;

/// Error for a text that does not name a shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a shard; write its index, from 0, and how many there are, at most {SHARDS_MAX}: 0/3"
)]
pub struct ShardError {
    /// The refused text, shortened.
    text: String,
}

/// Shard: one of the `count` parts into which the workers are divided. Its number is `index`, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard {
    index: u32,
    count: u32,
}

impl Shard {
    /// Returns shard number `index`, from 0, of `count` shards. `None` if `index` is not below `count`, or if `count`
    /// is above [`SHARDS_MAX`].
    pub fn new(index: u32, count: u32) -> Option<Self> {
        (index < count && count <= SHARDS_MAX).then_some(Self { index, count })
    }

    /// Number of the shard, from 0.
    pub fn index(self) -> u32 {
        self.index
    }

    /// Number of all shards, at least 1.
    pub fn count(self) -> u32 {
        self.count
    }

    /// Whether `worker` belongs to this shard.
    pub fn owns(self, worker: &WorkerName) -> bool {
        self.owns_text(worker.as_str())
    }

    /// Whether a worker belongs to this shard whose name is `text`, or would be if it were accepted.
    pub fn owns_text(self, text: &str) -> bool {
        let hash = xxh3_64_with_seed(text.as_bytes(), SHARD_SEED);
        hash % u64::from(self.count) == u64::from(self.index)
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let digits = |digits: &str| {
            // `u32::from_str` would let a leading plus pass.
            let are_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
            are_digits.then(|| digits.parse().ok()).flatten()
        };
        let parse = |(index, count)| Self::new(digits(index)?, digits(count)?);
        text.split_once('/').and_then(parse).ok_or_else(|| ShardError {
            text: text.chars().take(40).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn worker(name: &str) -> WorkerName {
        WorkerName::new(name).unwrap()
    }

    #[test]
    fn a_shard_is_written_as_it_is_read() {
        let shard: Shard = "2/3".parse().unwrap();
        assert_eq!(
            (shard.index(), shard.count(), shard.to_string()),
            (2, 3, "2/3".to_owned())
        );
        for text in [
            "",
            "1",
            "/",
            "3/3",
            "0/0",
            "-1/3",
            "+1/3",
            "1/3/5",
            "0/257",
            "a/b",
            " 0/3",
            "0/99999999999",
        ] {
            assert!(text.parse::<Shard>().is_err(), "{text:?}");
        }
    }

    /// Checks fixed values of the assignment. The documentation contains these values, so they must not change.
    #[test]
    fn the_assignment_is_pinned() {
        let shard_of = |name: &str| {
            let of_three = |index| Shard::new(index, 3).unwrap();
            (0..3).find(|index| of_three(*index).owns(&worker(name))).unwrap()
        };
        let assigned: Vec<u32> = ["gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5"]
            .map(shard_of)
            .into();
        assert_eq!(assigned, [1, 1, 2, 0, 0, 1]);
    }

    proptest! {
        #[test]
        fn every_worker_has_exactly_one_shard(name in "[A-Za-z0-9_-]{1,64}", count in 1..=SHARDS_MAX) {
            let owners = (0..count).filter(|index| Shard::new(*index, count).unwrap().owns(&worker(&name)));
            prop_assert_eq!(owners.count(), 1);
        }

        #[test]
        fn any_text_is_answered(text in ".{0,12}") {
            if let Ok(shard) = text.parse::<Shard>() {
                prop_assert!(shard.index() < shard.count());
            }
        }
    }
}
