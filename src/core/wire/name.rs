//! Names that travel as subject tokens: namespaces and workers, and the holder they make with a rank.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Why a text is not a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text has no characters.
    #[error("a name must not be empty; use 1 to {max} characters out of A-Z a-z 0-9 _ -")]
    Empty {
        /// The longest name allowed, in bytes.
        max: usize,
    },
    /// The text is longer than allowed.
    #[error("a name of {bytes} bytes is too long; use at most {max}")]
    TooLong {
        /// Length of the text.
        bytes: usize,
        /// The longest name allowed, in bytes.
        max: usize,
    },
    /// The text has a character outside `[A-Za-z0-9_-]`.
    #[error("a name may only have the characters A-Z a-z 0-9 _ -; byte {offset} is another")]
    Character {
        /// Offset in bytes of the first such character.
        offset: usize,
    },
}

/// Longest name that any configuration can allow, in bytes.
const NAME_BYTES_MAX: usize = 64;

fn check(text: &str, max: usize) -> Result<(), NameError> {
    let max = max.min(NAME_BYTES_MAX);
    if text.is_empty() {
        return Err(NameError::Empty { max });
    }
    if text.len() > max {
        return Err(NameError::TooLong {
            bytes: text.len(),
            max,
        });
    }
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    match text.bytes().position(|byte| !is_allowed(byte)) {
        Some(offset) => Err(NameError::Character { offset }),
        None => Ok(()),
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `text` and makes it a name: 1 to 64 characters out of `[A-Za-z0-9_-]`.
            pub fn new(text: &str) -> Result<Self, NameError> {
                Self::bounded(text, NAME_BYTES_MAX)
            }

            /// As [`Self::new`], with a lower limit on the length in bytes.
            pub fn bounded(text: &str, bytes_max: usize) -> Result<Self, NameError> {
                check(text, bytes_max)?;
                Ok(Self(Arc::from(text)))
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "{:?}", &*self.0)
            }
        }

        impl std::str::FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::new(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                Self::new(&text).map_err(serde::de::Error::custom)
            }
        }
    };
}

name_type! {
    /// A namespace: one pool of compatible caches (same model, block size and hash contract).
    NamespaceName
}

name_type! {
    /// A worker: one inference server. With a data-parallel rank it is a holder.
    WorkerName
}

/// A data-parallel rank within a worker.
pub type Rank = u32;

/// A holder of blocks: a worker and one of its data-parallel ranks.
///
/// Orders by worker, then rank; replies break ties in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderId {
    /// The worker.
    pub worker: WorkerName,
    /// The data-parallel rank, 0 where the engine has only one.
    pub rank: Rank,
}

impl fmt::Display for HolderId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.worker, self.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_subject_tokens() {
        assert!(WorkerName::new("gpu-07_A").is_ok());
        assert_eq!(WorkerName::new(""), Err(NameError::Empty { max: 64 }));
        assert_eq!(WorkerName::new("a.b"), Err(NameError::Character { offset: 1 }));
        assert_eq!(WorkerName::new("ab*"), Err(NameError::Character { offset: 2 }));
        assert_eq!(
            WorkerName::new(&"x".repeat(65)),
            Err(NameError::TooLong { bytes: 65, max: 64 })
        );
        assert_eq!(
            NamespaceName::bounded("abc", 2),
            Err(NameError::TooLong { bytes: 3, max: 2 })
        );
    }

    #[test]
    fn a_decoded_name_is_checked_like_any_other() {
        assert!(serde_json::from_str::<WorkerName>("\"w1\"").is_ok());
        assert!(serde_json::from_str::<WorkerName>("\"w 1\"").is_err());
    }
}
