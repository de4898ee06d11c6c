//! Facts about an engine's blocks that the engine's events do not tell, because they depend on the engine's
//! configuration. Operators give these facts in flags or files, and clients in registrations.

use std::collections::BTreeMap;

use kvatlas_core::hash::Scheme;
use serde::{Deserialize, Serialize};

/// Word in a flag or a file which says that the engine distinguishes blocks by a property that its events leave out.
const UNTOLD: &str = "untold";
/// Word in a flag or a file which says that no request has a salt.
const NONE: &str = "none";
/// Word in a flag or a file which says that the engine's events tell a fact.
const TOLD: &str = "told";

/// The facts about an engine's blocks that are not in its events.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BesideEvents {
    /// Names of adapters by their numbers, for engines whose events have only the numbers.
    pub adapters: BTreeMap<u64, String>,
    /// Whether the engine distinguishes blocks by a property that its events leave out: an adapter, a salt, or tokens
    /// after the block. If so, it is never certain which blocks the engine holds.
    pub is_untold: bool,
    /// Whether all requests to the engine come without a salt and without an adapter. This is needed for connectors
    /// whose events tell neither.
    #[serde(default)]
    pub has_no_salts: bool,
    /// Whether the events about tiers beyond the device (host, disk, remote storage) tell each removal, and tell
    /// which blocks can be loaded alone. Has to be given only for Dynamo's event plane, and for vLLM's servers that pass
    /// events on over gRPC: for others, the format decides.
    #[serde(default)]
    pub tells_beyond: bool,
}

impl BesideEvents {
    /// Reads the facts from the words of flags, files and registrations. `adapters` is `untold`, or a list such as
    /// `1:sql+2:chat`; `salts` is `untold` or `none`; `lookahead` is `untold`; `tiers` is `told`.
    ///
    /// # Errors
    ///
    /// A text that tells which word cannot be understood.
    pub fn parse(
        adapters: Option<&str>,
        salts: Option<&str>,
        lookahead: Option<&str>,
        tiers: Option<&str>,
    ) -> Result<Self, String> {
        let mut beside = Self::default();
        match salts {
            None => {}
            Some(UNTOLD) => beside.is_untold = true,
            Some(NONE) => beside.has_no_salts = true,
            Some(word) => return Err(format!("salts is {word:?}; write {UNTOLD} or {NONE}")),
        }
        match lookahead {
            None => {}
            Some(UNTOLD) => beside.is_untold = true,
            Some(word) => return Err(format!("lookahead is {word:?}; the only word is {UNTOLD}")),
        }
        match tiers {
            None => {}
            Some(TOLD) => beside.tells_beyond = true,
            Some(word) => return Err(format!("tiers is {word:?}; the only word is {TOLD}")),
        }
        match adapters {
            None => {}
            Some(UNTOLD) => beside.is_untold = true,
            Some(list) => beside.adapters = parse_adapters(list)?,
        }
        Ok(beside)
    }
}

/// Returns the scheme of block hashes that a word of a flag, a file or a registration names.
///
/// # Errors
///
/// A text that tells which schemes are known.
pub fn read_scheme(word: &str) -> Result<Scheme, String> {
    word.parse()
        .map_err(|error| format!("scheme is {word:?}: {error}"))
}

fn parse_adapters(list: &str) -> Result<BTreeMap<u64, String>, String> {
    let mut adapters = BTreeMap::new();
    for adapter in list.split('+') {
        let refused = || format!("adapters has {adapter:?}; write NUMBER:NAME, joined by +, or {UNTOLD}");
        let (number, name) = adapter.split_once(':').ok_or_else(refused)?;
        let number: u64 = number.parse().map_err(|_| refused())?;
        let is_taken = adapters.insert(number, name.to_owned()).is_some();
        if name.is_empty() || is_taken {
            return Err(refused());
        }
    }
    Ok(adapters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_have_numbers_and_names() {
        let parsed = BesideEvents::parse(Some("1:sql+7:org/chat:v2"), None, None, None).unwrap();
        let expected = [(1, "sql".to_owned()), (7, "org/chat:v2".to_owned())];
        assert_eq!(parsed.adapters, BTreeMap::from(expected));
        assert!(!parsed.is_untold);
        for refused in ["", "sql", "x:sql", "1:", "1:a+1:b", "1:a+"] {
            assert!(
                BesideEvents::parse(Some(refused), None, None, None).is_err(),
                "{refused}"
            );
        }
    }

    #[test]
    fn what_events_leave_out_is_untold() {
        for words in [
            [Some("untold"), None, None],
            [None, Some("untold"), None],
            [None, None, Some("untold")],
        ] {
            let [adapters, salts, lookahead] = words;
            assert!(
                BesideEvents::parse(adapters, salts, lookahead, None)
                    .unwrap()
                    .is_untold
            );
        }
        assert!(BesideEvents::parse(None, Some("told"), None, None).is_err());
        assert!(BesideEvents::parse(None, None, Some("none"), None).is_err());
        let saltless = BesideEvents::parse(None, Some("none"), None, None).unwrap();
        let told = BesideEvents::parse(None, None, None, Some("told")).unwrap();
        assert!(told.tells_beyond && !told.is_untold);
        assert!(BesideEvents::parse(None, None, None, Some("untold")).is_err());
        assert!(saltless.has_no_salts && !saltless.is_untold);
        assert_eq!(
            BesideEvents::parse(None, None, None, None),
            Ok(BesideEvents::default())
        );
    }
}
