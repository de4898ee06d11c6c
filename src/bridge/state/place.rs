//! Place where a bridge keeps its state: a directory, or buckets of JetStream.

use std::path::PathBuf;
use std::str::FromStr;

/// Prefix of a text that names a place in JetStream.
const NATS: &str = "nats:";

/// Place where a bridge keeps its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatePlace {
    /// A directory that only this bridge uses.
    Directory(PathBuf),
    /// Buckets of JetStream.
    Bucket {
        /// Name of the buckets.
        bucket: String,
        /// Name of the set of files in the buckets; `None` if the set has the name of the lease.
        set: Option<String>,
    },
}

/// Error for a name that neither a bucket nor a key can have.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no name of a bucket or of a set in it: use letters, digits, - and _, such as nats:BUCKET/NAME"
)]
pub struct PlaceError(String);

impl FromStr for StatePlace {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        let Some(rest) = text.strip_prefix(NATS) else {
            return Ok(Self::Directory(text.into()));
        };
        let (bucket, set) = match rest.split_once('/') {
            Some((bucket, set)) => (bucket, Some(checked(set)?)),
            None => (rest, None),
        };
        Ok(Self::Bucket {
            bucket: checked(bucket)?,
            set,
        })
    }
}

/// Returns the name if it can be part of a bucket's name and of a key.
pub(super) fn checked(name: &str) -> Result<String, PlaceError> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    match !name.is_empty() && name.bytes().all(is_plain) {
        true => Ok(name.to_owned()),
        false => Err(PlaceError(name.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_directory_unless_it_names_buckets() {
        let bucket = |set: Option<&str>| StatePlace::Bucket {
            bucket: "kvatlas-bridge".to_owned(),
            set: set.map(str::to_owned),
        };
        let read = |text: &str| text.parse::<StatePlace>();
        assert_eq!(
            read("/var/lib/x").unwrap(),
            StatePlace::Directory("/var/lib/x".into())
        );
        assert_eq!(read("nats:kvatlas-bridge").unwrap(), bucket(None));
        assert_eq!(read("nats:kvatlas-bridge/a_1").unwrap(), bucket(Some("a_1")));
        for refused in [
            "nats:",
            "nats:a.b",
            "nats:a/",
            "nats:a/b/c",
            "nats:/b",
            "nats:a/*",
        ] {
            assert!(read(refused).is_err(), "{refused}");
        }
    }
}
