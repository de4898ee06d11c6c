//! Typed rules. A rule tells which values a setting allows, and converts them to the type that the daemon reads.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::dynamo::DynamoComponent;
use super::kind::{Kind, Secret, SettingValue, parse_components, parse_server};

/// Rule of a setting: the kind of values that the setting allows, and their conversion to `T`.
pub(super) struct Rule<T> {
    pub(super) kind: Kind,
    /// Converts a value to a `T`; `None` if the value does not fit into a `T`. A unit test tries the bounds of every setting.
    pub(super) read: fn(&SettingValue) -> Option<T>,
}

/// A type with one value for each word that a setting allows.
pub(super) trait Choice: Sized {
    /// All words that are allowed.
    const WORDS: &'static [&'static str];

    /// Returns the value that a word stands for.
    fn of(word: &str) -> Option<Self>;
}

/// Implements [`Choice`] for types that [`kvatlas_core::worded`] has declared.
macro_rules! choices {
    ($($type:ty),+) => {$(
        impl $crate::rule::Choice for $type {
            const WORDS: &'static [&'static str] = &Self::WORDS;

            fn of(word: &str) -> Option<Self> {
                Self::of_word(word)
            }
        }
    )+};
}
pub(super) use choices;

pub(super) fn boolean() -> Rule<bool> {
    Rule {
        kind: Kind::Boolean,
        read: |value| match value {
            SettingValue::Boolean(value) => Some(*value),
            _ => None,
        },
    }
}

/// A whole number within bounds, both included.
pub(super) fn integer<T: TryFrom<u64>>(minimum: u64, maximum: u64) -> Rule<T> {
    Rule {
        kind: Kind::Integer { minimum, maximum },
        read: |value| T::try_from(value.integer()?).ok(),
    }
}

/// A size in bytes within bounds, both included.
pub(super) fn bytes<T: TryFrom<u64>>(minimum: u64, maximum: u64) -> Rule<T> {
    Rule {
        kind: Kind::Bytes { minimum, maximum },
        ..integer(minimum, maximum)
    }
}

/// A time in milliseconds within bounds, both included.
pub(super) fn milliseconds(minimum: u64, maximum: u64) -> Rule<Duration> {
    Rule {
        kind: Kind::Integer { minimum, maximum },
        read: |value| value.integer().map(Duration::from_millis),
    }
}

/// A time in milliseconds up to a bound; 0 means never and reads as `None`.
pub(super) fn milliseconds_or_never(maximum: u64) -> Rule<Option<Duration>> {
    Rule {
        kind: Kind::Integer { minimum: 0, maximum },
        read: |value| {
            let milliseconds = value.integer()?;
            Some((milliseconds > 0).then(|| Duration::from_millis(milliseconds)))
        },
    }
}

/// A time in seconds within bounds, both included.
pub(super) fn seconds(minimum: u64, maximum: u64) -> Rule<Duration> {
    Rule {
        kind: Kind::Integer { minimum, maximum },
        read: |value| value.integer().map(Duration::from_secs),
    }
}

/// One of the words of a [`Choice`].
pub(super) fn choice<T: Choice>() -> Rule<T> {
    Rule {
        kind: Kind::Choice(T::WORDS),
        read: |value| T::of(value.text()?),
    }
}

/// A text of this kind as it was given; an empty text means unset.
pub(super) fn text(kind: Kind) -> Rule<String> {
    Rule {
        kind,
        read: |value| value.text().map(str::to_owned),
    }
}

/// A path of this kind; `None` if the text is empty.
pub(super) fn path(kind: Kind) -> Rule<Option<PathBuf>> {
    Rule {
        kind,
        read: |value| {
            let text = value.text()?;
            Some((!text.is_empty()).then(|| PathBuf::from(text)))
        },
    }
}

/// A text of this kind; `None` if it is empty.
pub(super) fn optional_text(kind: Kind) -> Rule<Option<String>> {
    Rule {
        kind,
        read: |value| {
            let text = value.text()?;
            Some((!text.is_empty()).then(|| text.to_owned()))
        },
    }
}

/// A text that is never shown; `None` if it is empty.
pub(super) fn secret() -> Rule<Option<Secret>> {
    Rule {
        kind: Kind::Secret,
        read: |value| match value {
            SettingValue::Secret(secret) => Some((!secret.expose().is_empty()).then(|| secret.clone())),
            _ => None,
        },
    }
}

/// A list of NATS servers, at least one.
pub(super) fn server_urls() -> Rule<Vec<async_nats::ServerAddr>> {
    Rule {
        kind: Kind::ServerUrls,
        read: |value| value.text()?.split(',').map(parse_server).collect(),
    }
}

/// A value of type `T`, which is read from a text of this kind; `None` if the text is empty.
pub(super) fn optional<T: FromStr>(kind: Kind) -> Rule<Option<T>> {
    Rule {
        kind,
        read: |value| match value.text()? {
            "" => Some(None),
            text => text.parse().ok().map(Some),
        },
    }
}

/// A list of Dynamo's components; empty if the text is empty.
pub(super) fn components() -> Rule<Vec<DynamoComponent>> {
    Rule {
        kind: Kind::Components,
        read: |value| parse_components(value.text()?),
    }
}

/// An address to listen on; `None` for the word `off`.
pub(super) fn listen_address() -> Rule<Option<SocketAddr>> {
    Rule {
        kind: Kind::ListenAddress,
        read: |value| match value.text()? {
            "off" => Some(None),
            address => address.parse().ok().map(Some),
        },
    }
}
