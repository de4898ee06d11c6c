//! Kinds of values. A kind tells which texts are allowed, how they are read, and how they are written back.

use std::fmt;
use std::net::SocketAddr;

use toml::de::DeValue;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use kvatlas_core::wire::{SHARDS_MAX, Shard};

use super::dynamo::{Discovery, DynamoComponent};

/// Text that is shown in place of a secret.
pub(super) const REDACTED: &str = "***";

/// Maximum number of characters of a refused value that an error shows.
const SHOWN_CHARACTERS_MAX: usize = 80;

/// Largest length of a subject prefix, in bytes.
const SUBJECT_PREFIX_BYTES_MAX: usize = 64;

/// Largest length of a name, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Units of a size, largest first.
const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// A text that is never shown: its `Debug` is `***` and it has no `Display`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Makes a secret of `text`, so that it is never shown.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// Returns the text of the secret. Use it only to send it to a server.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(REDACTED)
    }
}

/// Reads a list of Dynamo's components joined by commas; an empty text is an empty list. `None` if a component cannot be read.
pub(super) fn parse_components(text: &str) -> Option<Vec<DynamoComponent>> {
    match text {
        "" => Some(Vec::new()),
        text => text.split(',').map(|component| component.parse().ok()).collect(),
    }
}

/// A value that its [`Kind`] allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SettingValue {
    /// A value of `true` or `false`.
    Boolean(bool),
    /// A whole number, or a number of bytes.
    Integer(u64),
    /// A text that may be shown; an empty text means unset.
    Text(String),
    /// A text that must not be shown; an empty text means unset.
    Secret(Secret),
}

impl SettingValue {
    /// Returns the number, if the value is one.
    pub(super) fn integer(&self) -> Option<u64> {
        match self {
            SettingValue::Integer(number) => Some(*number),
            _ => None,
        }
    }

    /// Returns the text, if the value is a text that may be shown.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            SettingValue::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The set of values that a setting allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`.
    Boolean,
    /// A whole number within bounds, both included.
    Integer {
        /// The least value allowed.
        minimum: u64,
        /// The greatest value allowed.
        maximum: u64,
    },
    /// A number of bytes within bounds, both included. A text may have a unit, as in `64 MiB`.
    Bytes {
        /// The least value allowed, in bytes.
        minimum: u64,
        /// The greatest value allowed, in bytes.
        maximum: u64,
    },
    /// One word of a fixed list.
    Choice(&'static [&'static str]),
    /// `nats://` or `tls://` URLs joined by commas, without a user or password.
    ServerUrls,
    /// Tokens of a NATS subject joined by dots.
    SubjectPrefix,
    /// A name: letters, digits, `_` and `-`.
    Name,
    /// A name, or empty for unset.
    OptionalName,
    /// An IP address and a port, or `off`.
    ListenAddress,
    /// A filter of log lines as `tracing_subscriber::EnvFilter` reads it.
    LogFilter,
    /// Any text, or empty for unset.
    OptionalText,
    /// An `http://` URL without a user or password, or empty for unset.
    OptionalHttpUrl,
    /// A shard's index and the number of shards, as `0/3`, or empty for unset.
    OptionalShard,
    /// Components of Dynamo joined by commas, or empty for none.
    Components,
    /// A place where Dynamo's processes find each other, or empty for unset.
    OptionalDiscovery,
    /// A path, or empty for unset. It need not exist yet.
    OptionalPath,
    /// The path of a file that exists, or empty for unset.
    OptionalFile,
    /// A text that is never shown, or empty for unset.
    Secret,
}

impl Kind {
    /// Returns the allowed values, in words that complete "must be ...".
    pub fn allowed(&self) -> String {
        match self {
            Kind::Boolean => "true or false".into(),
            Kind::Integer { minimum, maximum } => format!("a whole number from {minimum} to {maximum}"),
            Kind::Bytes { minimum, maximum } => format!(
                "a number of bytes from {} to {}, such as 65536 or \"64 KiB\"",
                show_bytes(*minimum),
                show_bytes(*maximum)
            ),
            Kind::Choice(words) => format!("one of {}", words.join(", ")),
            Kind::ServerUrls => {
                "nats:// or tls:// URLs joined by commas, with neither user nor password in them: nats.user and nats.password (--nats-user, --nats-password) take these".into()
            }
            Kind::SubjectPrefix => format!(
                "tokens of A-Z, a-z, 0-9, _ and -, joined by dots, at most {SUBJECT_PREFIX_BYTES_MAX} bytes"
            ),
            Kind::Name | Kind::OptionalName => format!("1 to {NAME_BYTES_MAX} of A-Z, a-z, 0-9, _ and -"),
            Kind::ListenAddress => "an IP address and a port, such as 127.0.0.1:9464, or off".into(),
            Kind::LogFilter => {
                "a level (off, error, warn, info, debug, trace) or a filter without spaces, such as info,kvatlas=debug".into()
            }
            Kind::OptionalText | Kind::Secret => "a text".into(),
            Kind::OptionalHttpUrl => "an http:// URL, such as http://127.0.0.1:4318/v1/traces, with neither user nor password in it".into(),
            Kind::OptionalShard => format!("a shard's index, from 0, and their number, at most {SHARDS_MAX}, such as 0/3"),
            Kind::Components => "NAMESPACE.COMPONENT or NAMESPACE.COMPONENT=TENANT, several joined by commas".into(),
            Kind::OptionalDiscovery => "etcd:http://HOST:PORT or file:DIRECTORY".into(),
            Kind::OptionalPath => "a path".into(),
            Kind::OptionalFile => "the path of a file that exists".into(),
        }
    }

    /// Checks whether this kind allows a text. This is for flags that are not settings.
    ///
    /// # Errors
    ///
    /// A message that tells which texts are allowed, and shows the text.
    pub fn check(&self, text: &str) -> Result<(), String> {
        match self.parse(text) {
            Some(_) => Ok(()),
            None => Err(format!("must be {}; it is {}", self.allowed(), self.show(text))),
        }
    }

    /// Reads the text of a flag or variable. `None` if this kind does not allow the text.
    pub(super) fn parse(&self, text: &str) -> Option<SettingValue> {
        let is_allowed = match self {
            Kind::Boolean => return text.parse().ok().map(SettingValue::Boolean),
            Kind::Integer { .. } => return self.bounded(parse_digits(text)?),
            Kind::Bytes { .. } => return self.bounded(parse_bytes(text)?),
            Kind::Secret => return Some(SettingValue::Secret(Secret::new(text))),
            Kind::Choice(words) => words.contains(&text),
            Kind::ServerUrls => text.split(',').all(|url| parse_server(url).is_some()),
            Kind::SubjectPrefix => text.len() <= SUBJECT_PREFIX_BYTES_MAX && text.split('.').all(is_token),
            Kind::Name => text.len() <= NAME_BYTES_MAX && is_token(text),
            Kind::OptionalName => text.is_empty() || Kind::Name.parse(text).is_some(),
            Kind::ListenAddress => text == "off" || text.parse::<SocketAddr>().is_ok(),
            Kind::LogFilter => is_log_filter(text),
            Kind::OptionalFile => text.is_empty() || std::path::Path::new(text).is_file(),
            Kind::OptionalHttpUrl => text.is_empty() || is_http_url(text),
            Kind::Components => parse_components(text).is_some(),
            Kind::OptionalDiscovery => text.is_empty() || text.parse::<Discovery>().is_ok(),
            Kind::OptionalShard => text.is_empty() || text.parse::<Shard>().is_ok(),
            Kind::OptionalText | Kind::OptionalPath => true,
        };
        is_allowed.then(|| SettingValue::Text(text.to_owned()))
    }

    /// Reads a value of the file. `None` if the value has the wrong type, or is not allowed.
    pub(super) fn parse_toml(&self, value: &DeValue<'_>) -> Option<SettingValue> {
        match (self, value) {
            (Kind::Boolean, DeValue::Boolean(value)) => Some(SettingValue::Boolean(*value)),
            (Kind::Integer { .. } | Kind::Bytes { .. }, DeValue::Integer(digits)) => {
                self.bounded(u64::from_str_radix(digits.as_str(), digits.radix()).ok()?)
            }
            (Kind::Boolean | Kind::Integer { .. }, _) => None,
            (_, DeValue::String(text)) => self.parse(text),
            _ => None,
        }
    }

    /// Returns the form in which an error shows a text that is not allowed. Secrets are hidden, and long texts are cut.
    pub(super) fn show(&self, text: &str) -> String {
        let may_hold_password = match self {
            Kind::ServerUrls => !text.split(',').all(is_plain_address),
            Kind::OptionalHttpUrl => text.contains(['@', '?']),
            _ => false,
        };
        if *self == Kind::Secret || may_hold_password {
            REDACTED.into()
        } else {
            show_text(text)
        }
    }

    /// Returns the form in which an error shows a value of the file that is not allowed.
    pub(super) fn show_toml(&self, value: &DeValue<'_>) -> String {
        match value {
            DeValue::String(text) => self.show(text),
            DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) if *self == Kind::Secret => {
                format!("{REDACTED} ({})", value.type_str())
            }
            DeValue::Integer(number) => number.to_string(),
            DeValue::Float(number) => number.to_string(),
            DeValue::Boolean(value) => value.to_string(),
            other => format!("of type {}", other.type_str()),
        }
    }

    /// Returns a value as TOML that [`Kind::parse_toml`] reads back. A secret that is set becomes `"***"`.
    pub(super) fn to_toml(self, value: &SettingValue) -> String {
        match value {
            SettingValue::Boolean(value) => value.to_string(),
            SettingValue::Integer(number) if matches!(self, Kind::Bytes { .. }) => {
                format!("\"{}\"", show_bytes(*number))
            }
            SettingValue::Integer(number) => number.to_string(),
            SettingValue::Text(text) => toml::Value::String(text.clone()).to_string(),
            SettingValue::Secret(secret) if secret.expose().is_empty() => "\"\"".into(),
            SettingValue::Secret(_) => format!("\"{REDACTED}\""),
        }
    }

    fn bounded(&self, number: u64) -> Option<SettingValue> {
        let (Kind::Integer { minimum, maximum } | Kind::Bytes { minimum, maximum }) = self else {
            return None;
        };
        (minimum..=maximum)
            .contains(&&number)
            .then_some(SettingValue::Integer(number))
    }
}

/// Returns the server that a `nats://` or `tls://` URL names. `None` for any other text, and for a URL with a user or password.
pub(super) fn parse_server(url: &str) -> Option<async_nats::ServerAddr> {
    let url = url.trim();
    let has_scheme = url.starts_with("nats://") || url.starts_with("tls://");
    if !has_scheme || url.contains('@') {
        return None;
    }
    url.parse::<async_nats::ServerAddr>()
        .ok()
        .filter(|server| !server.host().is_empty())
}

/// Whether a refused text is a plain address, with or without a scheme. Such a text holds no password, so an error may show it.
fn is_plain_address(text: &str) -> bool {
    let address = text.trim();
    let address = match address.split_once("://") {
        Some((scheme, address)) if scheme.bytes().all(|byte| byte.is_ascii_alphabetic()) => address,
        _ => address,
    };
    let is_made_of = |text: &str, others: &[u8]| {
        text.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || others.contains(&byte))
    };
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    // In `USER:PASSWORD` alone, the password stands in place of the port. So the port must be at most five digits.
    let is_port = port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => is_made_of(host, b":"),
        None => is_made_of(host, b".-"),
    };
    is_port && is_host
}

/// Returns a text in quotes, shortened, and with control characters escaped.
fn show_text(text: &str) -> String {
    let mut characters = text.chars();
    let shown: String = characters.by_ref().take(SHOWN_CHARACTERS_MAX).collect();
    let rest = if characters.next().is_some() { "..." } else { "" };
    format!("{shown:?}{rest}")
}

/// Returns a number of bytes in the largest unit that divides it.
fn show_bytes(bytes: u64) -> String {
    UNITS
        .iter()
        .find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit))
        .map_or_else(
            || bytes.to_string(),
            |(name, unit)| format!("{} {name}", bytes / unit),
        )
}

fn is_log_filter(text: &str) -> bool {
    // tracing-subscriber 0.3.23 counts bytes in a trimmed directive and then cuts the untrimmed one. At a space, it
    // silently takes a wrong target; at a wide space, it panics.
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    // A word that is no level would be read as a target. Nothing has that target, and all other lines would be off.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let are_levels = text
        .split(',')
        .filter(|part| !part.contains(['=', '[', ']', '{', '}']))
        .all(is_level);
    is_plain && are_levels && EnvFilter::try_new(text).is_ok()
}

/// Whether a text is an `http://` URL with a host, and without `@`, so that it has no user or password.
fn is_http_url(text: &str) -> bool {
    let Ok(url) = text.parse::<hyper::Uri>() else {
        return false;
    };
    let has_host = url.host().is_some_and(|host| !host.is_empty());
    url.scheme_str() == Some("http") && has_host && !text.contains('@')
}

fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

fn parse_digits(text: &str) -> Option<u64> {
    // `u64::from_str` would let a leading plus pass.
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?.trim_end_matches(' '), *unit)))
        .unwrap_or((text, 1));
    parse_digits(digits)?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: Kind = Kind::Bytes {
        minimum: 1,
        maximum: u64::MAX,
    };

    #[test]
    fn bytes_take_a_unit() {
        for (text, bytes) in [
            ("1024", 1024),
            ("64 MiB", 64 << 20),
            ("4GiB", 4 << 30),
            ("3 KiB", 3072),
        ] {
            assert_eq!(BYTES.parse(text), Some(SettingValue::Integer(bytes)), "{text}");
        }
        for text in [
            "",
            "MiB",
            "-1",
            "+1",
            "1.5 MiB",
            "1 MB",
            "1 mib",
            "0",
            "99999999999 GiB",
            " 1",
        ] {
            assert_eq!(BYTES.parse(text), None, "{text}");
        }
    }

    #[test]
    fn bounds_are_included() {
        let kind = Kind::Integer {
            minimum: 2,
            maximum: 4,
        };
        let allowed: Vec<_> = (0..7)
            .filter(|number| kind.parse(&number.to_string()).is_some())
            .collect();
        assert_eq!(allowed, [2, 3, 4]);
    }

    #[test]
    fn server_urls_hold_no_password() {
        for text in [
            "nats://a:4222",
            "tls://a",
            "nats://a,nats://b:1",
            "nats://[::1]:4222, nats://b",
        ] {
            assert!(Kind::ServerUrls.parse(text).is_some(), "{text}");
        }
        for text in [
            "",
            "a:4222",
            "http://a",
            "nats://",
            "nats://u:p@a",
            "nats://a,",
            "nats://a:99999",
        ] {
            assert!(Kind::ServerUrls.parse(text).is_none(), "{text}");
        }
        for text in [
            "nats://u:hunter2@a",
            "u:hunter2@a",
            "u:hunter2",
            "nats://u:hunter2",
            "u:hunter2%40a",
            "nats://a,u:hunter2@b",
            "nats://hunter2@a/",
            "http://a/?token=hunter2",
            "hunter2 nats://a",
            "u:hunter:2222",
            "u:123456",
        ] {
            assert_eq!(Kind::ServerUrls.show(text), REDACTED, "{text}");
        }
        for text in ["a.example:4222", "http://a", "a,b:1", "nats://[::1]:99999", ""] {
            assert_eq!(Kind::ServerUrls.show(text), format!("{text:?}"));
        }
    }

    #[test]
    fn texts_keep_to_their_grammar() {
        let cases: [(Kind, &[&str], &[&str]); 7] = [
            (
                Kind::OptionalHttpUrl,
                &["", "http://a:4318/v1/traces", "http://[::1]:1", "http://a"],
                &[
                    "a:4318",
                    "https://a",
                    "http://u:p@a/",
                    "http://",
                    "/v1/traces",
                    "http://a b",
                ],
            ),
            (
                Kind::SubjectPrefix,
                &["kvatlas", "a.b-c._"],
                &["", "a..b", ".a", "a.*", "a b", ">"],
            ),
            (Kind::Name, &["a", "A-9_"], &["", "a.b", "é"]),
            (Kind::OptionalName, &["", "A-9_"], &["a.b", "é"]),
            (
                Kind::ListenAddress,
                &["off", "0.0.0.0:0", "[::1]:80"],
                &["", "80", "localhost:80", "1.2.3.4"],
            ),
            (
                Kind::LogFilter,
                &["info", "warn,kvatlas=debug", "off,kvatlas[a{b}]=debug"],
                &[
                    "",
                    " ",
                    "kvatlas=loud",
                    "loud",
                    "kvatlas=debug,verbose",
                    "info, kvatlas=debug",
                    "\u{2003}kvatlas=debug",
                ],
            ),
            (Kind::OptionalFile, &["", "Cargo.toml"], &["no/such/file", "src"]),
        ];
        for (kind, allowed, refused) in cases {
            for text in allowed {
                assert!(kind.parse(text).is_some(), "{kind:?} {text:?}");
            }
            for text in refused {
                assert!(kind.parse(text).is_none(), "{kind:?} {text:?}");
            }
        }
        assert!(Kind::SubjectPrefix.parse(&"a".repeat(64)).is_some());
        assert!(Kind::SubjectPrefix.parse(&"a".repeat(65)).is_none());
        assert!(Kind::Name.parse(&"a".repeat(65)).is_none());
    }

    #[test]
    fn a_refused_text_is_shown_escaped_and_short() {
        assert_eq!(show_text("a\u{1b}[2J"), "\"a\\u{1b}[2J\"");
        assert!(show_text(&"é".repeat(1000)).chars().count() < 100);
    }

    proptest! {
        #[test]
        fn bytes_are_read_back(bytes in 1u64..) {
            prop_assert_eq!(BYTES.parse(&show_bytes(bytes)), Some(SettingValue::Integer(bytes)));
        }

        #[test]
        fn any_text_is_read_back_from_toml(text in any::<String>()) {
            let value = SettingValue::Text(text);
            let line = Kind::OptionalText.to_toml(&value);
            let document = format!("key = {line}");
            let table = toml::de::DeTable::parse(&document).unwrap();
            let parsed = table.get_ref().get("key").and_then(|toml| Kind::OptionalText.parse_toml(toml.get_ref()));
            prop_assert_eq!(parsed, Some(value));
        }
    }
}
