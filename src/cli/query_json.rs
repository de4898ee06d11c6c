//! Queries as JSON lines: one query a line, with the keys of the wire contract; unknown ones are errors.
//!
//! ```json
//! {"tokens":[1,2,3,4],"lora_name":"my-lora","workers":["gpu-0"],"limit":3}
//! {"sequence_hashes":["ea06fc71a5ee6e88","ad01835a37dd294c"],"min_blocks":2,"explain":true}
//! {"sequence_hashes":["ea06fc71a5ee6e88","5d1f6a0c9b7e2f31"],"positions":[0,63]}
//! ```

use kvatlas::hash::{Position, Token};
use kvatlas::wire::{PositionsError, QueryKey, QueryOptions, SingleQuery, WorkerName, check_positions};
use serde::Deserialize;

use super::hash_text::{HashText, LineageText};

/// What is asked for, in exactly one form. Flags and JSON lines both become this first.
#[derive(Debug, Default)]
pub(super) struct KeyForms {
    pub(super) tokens: Option<Vec<Token>>,
    pub(super) block_hashes: Option<Vec<HashText>>,
    pub(super) sequence_hashes: Option<Vec<HashText>>,
    pub(super) lineage_hashes: Option<Vec<LineageText>>,
    pub(super) lora_name: Option<String>,
    pub(super) cache_salt: Option<String>,
}

/// Why a query does not say one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum KeyFormError {
    /// None or several forms.
    #[error("give exactly one of tokens, block_hashes, sequence_hashes and lineage_hashes")]
    NotOne,
    /// A name or salt beside hashes, which have it in them already.
    #[error("lora_name and cache_salt belong to tokens; leave them out")]
    SaltedHashes,
}

impl KeyForms {
    /// The one form that was given.
    pub(super) fn into_key(self) -> Result<QueryKey, KeyFormError> {
        if self.tokens.is_none() && (self.lora_name.is_some() || self.cache_salt.is_some()) {
            return Err(KeyFormError::SaltedHashes);
        }
        match (
            self.tokens,
            self.block_hashes,
            self.sequence_hashes,
            self.lineage_hashes,
        ) {
            (Some(tokens), None, None, None) => Ok(QueryKey::Tokens {
                tokens,
                lora_name: self.lora_name,
                cache_salt: self.cache_salt,
            }),
            (None, Some(hashes), None, None) => Ok(QueryKey::BlockHashes(from_texts(hashes))),
            (None, None, Some(hashes), None) => Ok(QueryKey::SequenceHashes(from_texts(hashes))),
            (None, None, None, Some(hashes)) => Ok(QueryKey::LineageHashes(
                hashes.into_iter().map(|text| text.0).collect(),
            )),
            _ => Err(KeyFormError::NotOne),
        }
    }
}

fn from_texts<T: From<u64>>(texts: Vec<HashText>) -> Vec<T> {
    texts.into_iter().map(|text| T::from(text.0)).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueryLine {
    tokens: Option<Vec<Token>>,
    block_hashes: Option<Vec<HashText>>,
    sequence_hashes: Option<Vec<HashText>>,
    lineage_hashes: Option<Vec<LineageText>>,
    positions: Option<Vec<u32>>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    workers: Option<Vec<WorkerName>>,
    limit: Option<u32>,
    min_blocks: Option<u32>,
    explain: Option<bool>,
}

/// Reads one line. What it does not say about the reply is taken from `defaults`.
pub(super) fn parse_query(line: &str, defaults: &QueryOptions) -> Result<SingleQuery, String> {
    // serde would take an array for an object with its keys in order.
    if !line.starts_with('{') {
        return Err("not a query; write a JSON object".to_owned());
    }
    let line: QueryLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let options = QueryOptions {
        workers: line.workers.or_else(|| defaults.workers.clone()),
        limit: line.limit.or(defaults.limit),
        min_blocks: line.min_blocks.unwrap_or(defaults.min_blocks),
        explain: line.explain.unwrap_or(defaults.explain),
    };
    let forms = KeyForms {
        tokens: line.tokens,
        block_hashes: line.block_hashes,
        sequence_hashes: line.sequence_hashes,
        lineage_hashes: line.lineage_hashes,
        lora_name: line.lora_name,
        cache_salt: line.cache_salt,
    };
    let key = forms.into_key().map_err(|error| error.to_string())?;
    if line.positions.is_some() && options.explain {
        return Err("explain needs the whole chain; leave out positions or explain".to_owned());
    }
    let positions = line.positions.map(|positions| place(&key, &positions));
    Ok(SingleQuery {
        key,
        positions: positions.transpose().map_err(|error| error.to_string())?,
        options,
    })
}

/// The positions of the hashes in `key`, if they fit.
pub(super) fn place(key: &QueryKey, positions: &[u32]) -> Result<Vec<Position>, PositionsError> {
    let positions = positions
        .iter()
        .map(|position| Position::new(u64::from(*position)));
    let positions: Vec<Position> = positions.collect::<Result<_, _>>()?;
    check_positions(key, &positions)?;
    Ok(positions)
}

#[cfg(test)]
mod tests {
    use kvatlas::hash::{BlockHash, SequenceHash};

    use super::*;

    fn parse(line: &str) -> Result<SingleQuery, String> {
        let defaults = QueryOptions {
            limit: Some(9),
            explain: true,
            ..QueryOptions::default()
        };
        parse_query(line, &defaults)
    }

    #[test]
    fn a_line_says_what_is_asked_for_in_one_form() {
        let key = |line: &str| parse(line).unwrap().key;
        assert_eq!(
            key(r#"{"tokens":[1,2],"lora_name":"a"}"#),
            QueryKey::Tokens {
                tokens: vec![1, 2],
                lora_name: Some("a".into()),
                cache_salt: None
            }
        );
        assert_eq!(
            key(r#"{"block_hashes":["0x1",2]}"#),
            QueryKey::BlockHashes(vec![BlockHash(1), BlockHash(2)])
        );
        assert_eq!(
            key(r#"{"sequence_hashes":["ea06fc71a5ee6e88"]}"#),
            QueryKey::SequenceHashes(vec![SequenceHash(0xea06_fc71_a5ee_6e88)])
        );
        let lineage = key(r#"{"lineage_hashes":["3fc91a2b3c4d5e6f785cba9876543210"]}"#);
        assert_eq!(lineage.kind(), "lineage_hashes");
        let chosen =
            parse(r#"{"sequence_hashes":["0x1","0x2"],"positions":[0,63],"explain":false}"#).unwrap();
        let positions = [0, 63].map(|position| Position::new(position).unwrap());
        assert_eq!(chosen.positions, Some(positions.to_vec()));
    }

    #[test]
    fn a_line_covers_the_defaults() {
        let options = parse(r#"{"tokens":[],"limit":2,"workers":["a"],"min_blocks":3,"explain":false}"#)
            .unwrap()
            .options;
        let expected = QueryOptions {
            workers: Some(vec![WorkerName::new("a").unwrap()]),
            limit: Some(2),
            min_blocks: 3,
            explain: false,
        };
        assert_eq!(options, expected);
        let options = parse(r#"{"tokens":[]}"#).unwrap().options;
        assert_eq!((options.limit, options.explain), (Some(9), true));
    }

    #[test]
    fn every_fault_is_named() {
        for (line, part) in [
            ("[[1]]", "write a JSON object"),
            ("{}", "exactly one of"),
            (r#"{"tokens":[],"block_hashes":[]}"#, "exactly one of"),
            (r#"{"block_hashes":[],"cache_salt":"a"}"#, "belong to tokens"),
            (r#"{"sequence_hashes":["0x1"],"positions":[1]}"#, "explain needs"),
            (
                r#"{"sequence_hashes":["0x1"],"positions":[1,2],"explain":false}"#,
                "2 elements for 1 hashes",
            ),
            (
                r#"{"block_hashes":["0x1"],"positions":[1],"explain":false}"#,
                "belong to sequence_hashes",
            ),
            (r#"{"token":[]}"#, "unknown field `token`"),
            (r#"{"tokens":[],"workers":["a b"]}"#, "a name may only have"),
            (r#"{"tokens":[-1]}"#, "u32"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
