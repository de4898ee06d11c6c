//! Unknown fields in JSON bodies. Most unknown fields are typing errors, which would change the answer without notice.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result as Formatted};

use serde::de::{DeserializeOwned, Deserializer, Error, IgnoredAny, Visitor};
use serde::forward_to_deserialize_any;

use kvatlas_config::meant;

use super::error::HttpRefusal;

/// Treatment of fields that a route does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unknown {
    /// Unknown fields are refused, because the contract lists all fields.
    Refused,
    /// Unknown fields are ignored, because gateways of other projects send fields of their own. Exception: a field
    /// whose name looks like a known one is refused.
    Ignored,
}

/// Reads a JSON object.
///
/// # Errors
///
/// [`HttpRefusal::BadRequest`] if the bytes are not an object of this form, or if a field is refused.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8], unknown: Unknown) -> Result<T, HttpRefusal> {
    let body = whole(bytes)?;
    let keys: BTreeMap<String, IgnoredAny> = whole(bytes)?;
    let known = fields_of::<T>();
    let mut strange = keys.keys().filter(|key| !known.contains(&key.as_str()));
    let refusal = match unknown {
        Unknown::Refused => strange.next().map(|key| refused(key, known)),
        Unknown::Ignored => strange
            .by_ref()
            .take(IGNORED_MAX)
            .find_map(|key| guessed(key, known))
            .or_else(|| {
                strange
                    .next()
                    .map(|_| format!("more than {IGNORED_MAX} fields are unknown"))
            }),
    };
    match refusal {
        Some(text) => Err(HttpRefusal::BadRequest(text)),
        None => Ok(body),
    }
}

/// Reads JSON as a type that has its own check for unknown fields.
pub(super) fn whole<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, HttpRefusal> {
    serde_json::from_slice(bytes)
        .map_err(|error| HttpRefusal::BadRequest(format!("the body is not what this route takes: {error}")))
}

/// Maximum number of unknown fields that are ignored. There is a maximum because comparing an unknown field with all
/// known fields takes time.
const IGNORED_MAX: usize = 64;
/// Maximum number of characters of an unknown field's name that an error repeats.
const NAME_CHARACTERS_MAX: usize = 64;

/// Returns an error text that asks whether the client meant a field of `known` with a similar name. `None` if no name
/// in `known` is similar to `name`.
fn guessed(name: &str, known: &[&'static str]) -> Option<String> {
    let name: String = name.chars().take(NAME_CHARACTERS_MAX).collect();
    let known = meant(&name, known.iter().copied())?;
    Some(format!("there is no field {name:?}: did you mean {known}?"))
}

/// Returns the error text for a field `name` that is not among `known`.
pub(super) fn refused(name: &str, known: &[&'static str]) -> String {
    guessed(name, known).unwrap_or_else(|| {
        let name: String = name.chars().take(NAME_CHARACTERS_MAX).collect();
        format!("there is no field {name:?}; GET /openapi.json has them all")
    })
}

/// Returns the names of a struct's fields, as serde reads them.
fn fields_of<T: DeserializeOwned>() -> &'static [&'static str] {
    match T::deserialize(FieldNamesDeserializer) {
        Err(ExpectedFields(names)) => names,
        Ok(_) => &[],
    }
}

/// Deserializer that reads no data. Its only use is to find a struct's field names: when serde asks for these fields,
/// it fails with their names.
struct FieldNamesDeserializer;

#[derive(Debug)]
struct ExpectedFields(&'static [&'static str]);

impl Display for ExpectedFields {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Formatted {
        write!(formatter, "{:?}", self.0)
    }
}

impl std::error::Error for ExpectedFields {}

impl Error for ExpectedFields {
    fn custom<D: Display>(_: D) -> Self {
        Self(&[])
    }
}

impl<'de> Deserializer<'de> for FieldNamesDeserializer {
    type Error = ExpectedFields;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ExpectedFields> {
        Err(ExpectedFields(&[]))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, ExpectedFields> {
        Err(ExpectedFields(fields))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq, Eq)]
    struct Query {
        token_ids: Vec<u32>,
        lora_name: Option<String>,
    }

    fn asked(body: &str, unknown: Unknown) -> Result<Query, String> {
        read(body.as_bytes(), unknown).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_that_look_like_known_ones_are_refused_and_others_where_the_contract_says_so() {
        let query = Query {
            token_ids: vec![1],
            lora_name: None,
        };
        for unknown in [Unknown::Refused, Unknown::Ignored] {
            assert_eq!(asked(r#"{"token_ids":[1]}"#, unknown).as_ref(), Ok(&query));
            let error = asked(r#"{"token_ids":[1],"lora_nam":"a"}"#, unknown).unwrap_err();
            assert!(
                error.contains(r#"there is no field "lora_nam": did you mean lora_name?"#),
                "{error}"
            );
            assert!(asked(r#"{"token_ids":[1]} {}"#, unknown).is_err());
            assert!(asked(r#"{"token_ids":["#, unknown).is_err());
        }
        let many = |count: usize| {
            let fields: String = (0..count).map(|number| format!(r#","x{number}":1"#)).collect();
            asked(&format!(r#"{{"token_ids":[1]{fields}}}"#), Unknown::Ignored)
        };
        assert!(many(IGNORED_MAX).is_ok());
        assert!(
            many(IGNORED_MAX + 1)
                .unwrap_err()
                .contains("more than 64 fields are unknown")
        );
        let own = r#"{"token_ids":[1],"x_gateway_trace":{"lora_nam":1}}"#;
        assert_eq!(asked(own, Unknown::Ignored), Ok(query));
        assert!(
            asked(own, Unknown::Refused)
                .unwrap_err()
                .contains("x_gateway_trace")
        );
    }
}
