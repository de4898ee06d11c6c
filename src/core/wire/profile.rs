//! Profiles: the address for requests to a holder, and the holder's labels. `profile_fields.rs` reads and writes them.
//!
//! A publisher sends a profile in a batch; the last profile sent counts. All texts are printable ASCII and limited in
//! length, so that they can be shown anywhere.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum length of an address, in bytes.
pub(super) const ADDRESS_BYTES_MAX: usize = 256;
/// Maximum number of labels of a holder.
pub(super) const LABELS_MAX: usize = 16;
/// Maximum length of the key of a label, in bytes.
pub(super) const LABEL_KEY_BYTES_MAX: usize = 64;
/// Maximum length of the value of a label, in bytes.
pub(super) const LABEL_VALUE_BYTES_MAX: usize = 128;
/// Maximum number of bytes of all labels of a holder, keys and values together.
const LABEL_BYTES_MAX: usize = 512;
/// Label that tells which kinds of layers the holder's model has in addition to full attention: `windows`, `states`,
/// or both joined by a plus.
pub const LAYERS_LABEL: &str = "kvatlas/layers";
/// Label in which the publisher tells people why the holder is not exact. Absent if the publisher has no reason to
/// give.
pub const TROUBLE_LABEL: &str = "kvatlas/trouble";
/// URL schemes that an address may have.
const SCHEMES: [&str; 4] = ["http://", "https://", "grpc://", "grpcs://"];

/// Reason why an address or labels cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// The address is longer than allowed.
    #[error("address has {bytes} bytes; at most {ADDRESS_BYTES_MAX} are allowed")]
    AddressTooLong {
        /// Length of the address, in bytes.
        bytes: usize,
    },
    /// The address does not have the required form.
    #[error(
        "address is neither HOST:PORT nor a URL with http, https, grpc or grpcs, without a user, a query or a fragment"
    )]
    Address,
    /// There are more labels than allowed.
    #[error("labels has more than {LABELS_MAX} labels")]
    TooManyLabels,
    /// The key of a label does not have the required form.
    #[error("labels has a key that is not 1 to {LABEL_KEY_BYTES_MAX} characters out of A-Z a-z 0-9 . _ - /")]
    LabelKey,
    /// The value of a label does not have the required form.
    #[error("labels has a value that is not at most {LABEL_VALUE_BYTES_MAX} printable characters of ASCII")]
    LabelValue,
    /// All labels together are longer than allowed.
    #[error("labels has {bytes} bytes; at most {LABEL_BYTES_MAX} are allowed")]
    LabelsTooLong {
        /// Length of all keys and values together, in bytes.
        bytes: usize,
    },
}

/// Address for requests to a holder: `HOST:PORT`, or a URL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(Arc<str>);

impl Address {
    /// Checks `text` and makes it an address.
    ///
    /// # Errors
    ///
    /// [`ProfileError`] for a text that is not an address.
    pub fn new(text: &str) -> Result<Self, ProfileError> {
        if text.len() > ADDRESS_BYTES_MAX {
            return Err(ProfileError::AddressTooLong { bytes: text.len() });
        }
        let scheme = SCHEMES.iter().find(|scheme| text.starts_with(**scheme));
        let is_address = match scheme {
            None => is_authority(text, true),
            Some(scheme) => {
                let rest = text.get(scheme.len()..).unwrap_or_default();
                let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                is_authority(authority, false) && path.bytes().all(is_path_byte)
            }
        };
        match is_address {
            true => Ok(Self(text.into())),
            false => Err(ProfileError::Address),
        }
    }

    /// Returns the address as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a text is a host with a port. The port may be missing, unless the caller `needs_port`.
fn is_authority(text: &str, needs_port: bool) -> bool {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, rest)) if host.parse::<Ipv6Addr>().is_ok() => {
                (None, rest.strip_prefix(':').ok_or(rest))
            }
            _ => return false,
        },
        None => match text.split_once(':') {
            Some((host, port)) => (Some(host), Ok(port)),
            None => (Some(text), Err("")),
        },
    };
    let is_host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let is_host = host.is_none_or(|host| !host.is_empty() && host.bytes().all(is_host_byte));
    let is_port = match port {
        Ok(port) => {
            port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0)
        }
        Err(rest) => rest.is_empty() && !needs_port,
    };
    is_host && is_port
}

fn is_path_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"/.-_~%".contains(&byte)
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl std::str::FromStr for Address {
    type Err = ProfileError;

    fn from_str(text: &str) -> Result<Self, ProfileError> {
        Self::new(text)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::new(&text).map_err(serde::de::Error::custom)
    }
}

/// Labels of a holder, such as its role, zone and model. Cloning them is cheap.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>")]
pub struct Labels(Option<Arc<BTreeMap<String, String>>>);

impl Labels {
    /// The empty set of labels.
    pub const NONE: Self = Self(None);

    /// Checks `map` and makes labels from it.
    ///
    /// # Errors
    ///
    /// [`ProfileError`] if there are too many labels or bytes, or if a key or value does not have the required form.
    pub fn new(map: BTreeMap<String, String>) -> Result<Self, ProfileError> {
        if map.len() > LABELS_MAX {
            return Err(ProfileError::TooManyLabels);
        }
        let is_key_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
        let is_key =
            |key: &String| (1..=LABEL_KEY_BYTES_MAX).contains(&key.len()) && key.bytes().all(is_key_byte);
        if !map.keys().all(is_key) {
            return Err(ProfileError::LabelKey);
        }
        let is_printable = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
        let is_value =
            |value: &String| value.len() <= LABEL_VALUE_BYTES_MAX && value.bytes().all(is_printable);
        if !map.values().all(is_value) {
            return Err(ProfileError::LabelValue);
        }
        let bytes = map.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > LABEL_BYTES_MAX {
            return Err(ProfileError::LabelsTooLong { bytes });
        }
        Ok(Self((!map.is_empty()).then(|| Arc::new(map))))
    }

    /// Returns a copy of the labels in which `key` has the value `value`.
    ///
    /// # Errors
    ///
    /// [`ProfileError`], as for [`Self::new`].
    pub fn with(&self, key: &str, value: &str) -> Result<Self, ProfileError> {
        let mut map = self.0.as_deref().cloned().unwrap_or_default();
        map.insert(key.to_owned(), value.to_owned());
        Self::new(map)
    }

    /// Returns `text` as a valid value of a label: without characters that labels must not have, and cut to the
    /// maximum length.
    pub fn value_of(text: &str) -> String {
        const CUT: &str = "...";
        let is_printable = |character: &char| *character == ' ' || character.is_ascii_graphic();
        let mut value: String = text.chars().filter(is_printable).collect();
        if value.len() > LABEL_VALUE_BYTES_MAX {
            value.truncate(LABEL_VALUE_BYTES_MAX - CUT.len());
            value.push_str(CUT);
        }
        value
    }

    /// Whether there are no labels.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Number of labels.
    pub fn len(&self) -> usize {
        self.iter().len()
    }

    /// Returns the value of the label `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns the labels as pairs of key and value, ordered by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &str)> {
        static EMPTY: BTreeMap<String, String> = BTreeMap::new();
        let map = self.0.as_deref().unwrap_or(&EMPTY);
        map.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl TryFrom<BTreeMap<String, String>> for Labels {
    type Error = ProfileError;

    fn try_from(map: BTreeMap<String, String>) -> Result<Self, ProfileError> {
        Self::new(map)
    }
}

impl Serialize for Labels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl fmt::Display for Labels {
    /// Writes the labels as `key=value`, joined by commas.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(formatter, "{comma}{key}={value}")?;
        }
        Ok(())
    }
}

/// Address and labels of a holder.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Profile {
    /// Address for requests to the holder. `None` if it is not known.
    pub address: Option<Address>,
    /// Labels of the holder.
    pub labels: Labels,
}

impl Profile {
    /// Whether neither an address nor any label is known.
    pub fn is_empty(&self) -> bool {
        self.address.is_none() && self.labels.is_empty()
    }

    /// Upper bound on the bytes that the profile takes in a message.
    pub fn bytes(&self) -> usize {
        const KEYS: usize = 32;
        const TEXT: usize = 3;
        let address = self.address.as_ref().map_or(0, |address| address.as_str().len());
        let labels = self.labels.iter();
        let labels: usize = labels
            .map(|(key, value)| 2 * TEXT + key.len() + value.len())
            .sum();
        KEYS + address + labels
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn any_text_becomes_the_value_of_a_label() {
        for text in [
            "",
            "the replay begins at 5",
            "é\n\u{1b}[31m",
            &"x".repeat(128),
            &"y".repeat(1000),
        ] {
            let value = Labels::value_of(text);
            let labels = Labels::NONE.with(TROUBLE_LABEL, &value).unwrap();
            assert_eq!(labels.get(TROUBLE_LABEL), Some(value.as_str()));
            assert!(
                value == text || value.ends_with("...") || value == "[31m",
                "{value}"
            );
        }
    }

    #[test]
    fn addresses_are_hosts_with_ports_and_urls() {
        for text in [
            "10.0.0.7:8000",
            "vllm-0.vllm.llm.svc:8000",
            "[fd00::7]:8000",
            "http://10.0.0.7",
            "https://gpu_7.example:8443/v1",
            "grpc://[::1]:50051",
            "grpcs://h",
        ] {
            assert_eq!(
                Address::new(text).map(|address| address.to_string()),
                Ok(text.to_owned())
            );
        }
        let long = format!("{}:80", "a".repeat(254));
        for text in [
            "",
            "host",
            ":80",
            "host:",
            "host:0",
            "host:65536",
            "host:+8",
            "host:8 0",
            "a:b:80",
            "[fd00::7]",
            "[fd00::7]8000",
            "[host]:80",
            "fd00::7",
            "http://",
            "http://:80",
            "http://user@host:80",
            "http://user:secret@host:80",
            "http://host:80?x=1",
            "http://host/#a",
            "http://host/a b",
            "javascript:8000",
            "javascript://host:80",
            "ftp://host:80",
            "HTTP://host:80",
            "http://host:80\n",
            "ho\u{7}st:80",
            "h\u{202e}st:80",
            &long,
        ] {
            let is_name = text == "javascript:8000";
            assert_eq!(Address::new(text).is_ok(), is_name, "{text:?}");
        }
    }

    fn labels(list: &[(&str, &str)]) -> Result<Labels, ProfileError> {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Labels::new(list.iter().map(owned).collect())
    }

    #[test]
    fn labels_are_bounded() {
        let known = labels(&[("topology.kubernetes.io/zone", "eu 1a"), ("role", "")]).unwrap();
        assert_eq!(known.to_string(), "role=,topology.kubernetes.io/zone=eu 1a");
        assert_eq!(
            (known.len(), known.get("role"), known.get("x")),
            (2, Some(""), None)
        );
        assert_eq!(labels(&[]), Ok(Labels::NONE));
        for key in ["", "a b", "a=b", "ä", &"k".repeat(65)] {
            assert_eq!(labels(&[(key, "")]), Err(ProfileError::LabelKey), "{key:?}");
        }
        for value in ["a\n", "\u{1b}[2J", "ä", &"v".repeat(129)] {
            assert_eq!(
                labels(&[("a", value)]),
                Err(ProfileError::LabelValue),
                "{value:?}"
            );
        }
        let value = "v".repeat(127);
        let four = ["1", "2", "3", "4"].map(|key| (key, value.as_str()));
        assert!(labels(&four).is_ok());
        let five = [four.as_slice(), &[("5", "")]].concat();
        assert_eq!(labels(&five), Err(ProfileError::LabelsTooLong { bytes: 513 }));
        let keys: Vec<String> = (0..17).map(|key| key.to_string()).collect();
        let many: Vec<(&str, &str)> = keys.iter().map(|key| (key.as_str(), "")).collect();
        assert_eq!(labels(&many), Err(ProfileError::TooManyLabels));
        assert_eq!(
            known.with("role", "decode").unwrap().get("role"),
            Some("decode"),
            "a value is replaced"
        );
        assert_eq!(
            labels(&many[1..]).unwrap().with("k", "v"),
            Err(ProfileError::TooManyLabels)
        );
        assert!(labels(&many[1..]).is_ok());
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_printable_and_short(text in "\\PC{0,40}|[a-z:/\\[\\]0-9.@?#]{0,24}") {
            if let Ok(address) = Address::new(&text) {
                prop_assert!(address.as_str().bytes().all(|byte| byte.is_ascii_graphic()));
                prop_assert!(!address.as_str().contains('@'));
            }
        }
    }
}
