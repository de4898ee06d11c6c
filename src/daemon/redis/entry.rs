//! Fields of llm-d's Redis hashes. Each field is the JSON of an entry, which says that a pod (llm-d's word for a
//! worker) holds the block.

use serde::{Deserialize, Serialize};

/// Maximum length of a field (the JSON of one entry) that is kept, in bytes.
pub(super) const FIELD_BYTES_MAX: usize = 1024;

/// Names of the tiers in llm-d's entries, the nearest tier first. They are the names of vLLM's storage media, in lower
/// case. Blocks beyond the disk count as blocks on the disk.
pub(super) const TIERS: [&str; 3] = ["gpu", "cpu", "storage"];

/// Members of an entry's JSON, in llm-d's order.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct RedisEntry<'a> {
    pod_identifier: &'a str,
    device_tier: &'a str,
    speculative: bool,
    has_group: bool,
    group_idx: i64,
}

/// Returns the field which says that `pod` holds a block in `tier`, as known from its engine's events.
pub(super) fn field(pod: &str, tier: &str) -> Vec<u8> {
    let entry = RedisEntry {
        pod_identifier: pod,
        device_tier: tier,
        speculative: false,
        has_group: false,
        group_idx: 0,
    };
    // Texts and numbers can always be written as JSON.
    serde_json::to_vec(&entry).unwrap_or_default()
}

/// Origin of an entry's field: a router's guess, or an engine's event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// Field is a router's guess.
    Guess,
    /// Field was made from an engine's event, which a process other than kvatlas has received.
    Engine,
}

/// Returns the origin of a field, or `None` if the field is not an entry.
pub(super) fn word_of(field: &[u8]) -> Option<Word> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Told {
        // An owned text, because a name with escapes cannot be borrowed.
        #[expect(dead_code, reason = "an entry names a pod")]
        pod_identifier: String,
        #[serde(default)]
        speculative: bool,
    }
    if field.len() > FIELD_BYTES_MAX {
        return None;
    }
    let told: Told = serde_json::from_slice(field).ok()?;
    Some(match told.speculative {
        true => Word::Guess,
        false => Word::Engine,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_what_llm_d_writes() {
        let expected =
            br#"{"PodIdentifier":"10.0.0.1:8000","DeviceTier":"gpu","Speculative":false,"HasGroup":false,"GroupIdx":0}"#;
        assert_eq!(field("10.0.0.1:8000", "gpu"), expected);
        assert_eq!(word_of(expected), Some(Word::Engine));
    }

    #[test]
    fn guesses_are_told_from_what_engines_say() {
        let guess =
            br#"{"PodIdentifier":"10.0.0.2:8000","DeviceTier":"","Speculative":true,"HasGroup":false,"GroupIdx":0}"#;
        assert_eq!(word_of(guess), Some(Word::Guess));
        assert_eq!(word_of(br#"{"PodIdentifier":"a\n"}"#), Some(Word::Engine));
        let long = format!(
            r#"{{"PodIdentifier":"{}","Speculative":true}}"#,
            "a".repeat(FIELD_BYTES_MAX)
        );
        for field in [&b""[..], b"x", b"[]", br#"{"Speculative":true}"#, long.as_bytes()] {
            assert_eq!(word_of(field), None);
        }
    }
}
