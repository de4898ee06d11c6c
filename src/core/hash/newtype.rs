//! The common definition of the 64-bit hash newtypes.

/// Defines a newtype for a 64-bit hash. In forms that people read, the hash is written as 16 hexadecimal digits.
macro_rules! hash_newtype {
    ($(#[$documentation:meta])* $name:ident) => {
        $(#[$documentation])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The hash as a plain integer.
            #[inline]
            pub const fn as_u64(self) -> u64 {
                self.0
            }
        }

        #[allow(unsafe_code, reason = "so that a list of hashes is a list of numbers without a copy")]
        // SAFETY: the type is `repr(transparent)`, its only field is the `u64`, and every `u64` is a hash.
        unsafe impl bytemuck::TransparentWrapper<u64> for $name {}

        impl From<u64> for $name {
            #[inline]
            fn from(value: u64) -> Self {
                Self(value)
            }
        }

        impl From<$name> for u64 {
            #[inline]
            fn from(hash: $name) -> Self {
                hash.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::hash::HashTextError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                $crate::hash::text::parse_hash(text).map(Self)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::hash::text::serialize_hash(self.0, serializer)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::hash::text::deserialize_hash(deserializer).map(Self)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(formatter, "{:016x}", self.0)
            }
        }

        impl std::fmt::LowerHex for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                if formatter.alternate() {
                    formatter.write_str("0x")?;
                }
                write!(formatter, "{:016x}", self.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(formatter, concat!(stringify!($name), "({:016x})"), self.0)
            }
        }
    };
}

pub(super) use hash_newtype;

#[cfg(test)]
mod tests {
    use crate::hash::{BlockHash, SequenceHash};

    #[test]
    fn hashes_read_as_sixteen_hex_digits() {
        let hash = BlockHash(0xab);
        assert_eq!(hash.to_string(), "00000000000000ab");
        assert_eq!(format!("{hash:x}"), "00000000000000ab");
        assert_eq!(format!("{hash:#x}"), "0x00000000000000ab");
        assert_eq!(format!("{hash:?}"), "BlockHash(00000000000000ab)");
        assert_eq!(
            format!("{:?}", SequenceHash(u64::MAX)),
            "SequenceHash(ffffffffffffffff)"
        );
    }
}
