//! Tests that the OpenAPI document describes the routes and the fields of a query.

use std::collections::BTreeSet;

use kvatlas_core::wire::{FieldKind, QUERY_FIELDS};
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde_json::Value;

use super::dialect::QueryJson;
use super::lookup::LookupJson;
use super::openapi::DOCUMENT;
use super::registration::{RegisterJson, UnregisterJson};
use super::routes::paths;
use kvatlas_lab::pages::require_part;
use kvatlas_telemetry::labels::HttpRoute;

#[test]
fn the_document_has_all_routes_and_no_other() {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    let described: BTreeSet<(String, String)> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().keys();
            methods.map(|method| (method.to_ascii_uppercase(), path.clone()))
        })
        .collect();
    let served: BTreeSet<(String, String)> = paths()
        .into_iter()
        .map(|(method, path)| (method.to_owned(), path.to_owned()))
        .collect();
    assert_eq!(described, served);
}

#[test]
fn every_route_is_counted_by_itself() {
    let counted: BTreeSet<usize> = paths()
        .into_iter()
        .map(|(_, path)| HttpRoute::of_path(path) as usize)
        .collect();
    assert_eq!(counted.len(), paths().len());
    assert!(!counted.contains(&(HttpRoute::Other as usize)));
}

/// Returns the type of a field in two forms: the words for it on the contract's page, and its schema in the OpenAPI
/// document.
fn described(kind: FieldKind) -> (&'static str, &'static str) {
    match kind {
        FieldKind::Tokens => (
            "list of tokens",
            r##"{"type": ["array", "null"], "items": {"$ref": "#/components/schemas/Token"}}"##,
        ),
        FieldKind::Hashes => (
            "list of 64-bit hashes",
            r##"{"type": ["array", "null"], "items": {"$ref": "#/components/schemas/Hash"}}"##,
        ),
        FieldKind::LineageHashes => (
            "list of lineage hashes",
            r##"{"type": ["array", "null"], "items": {"$ref": "#/components/schemas/LineageHash"}}"##,
        ),
        FieldKind::Positions => (
            "list of unsigned 32-bit, optional",
            r#"{"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}"#,
        ),
        FieldKind::Names => (
            "array of texts",
            r#"{"type": ["array", "null"], "items": {"type": "string"}}"#,
        ),
        FieldKind::Text => ("text, optional", r#"{"type": ["string", "null"]}"#),
        FieldKind::Number => (
            "unsigned, optional",
            r#"{"type": ["integer", "null"], "minimum": 0}"#,
        ),
        FieldKind::Number32 => (
            "unsigned 32-bit",
            r#"{"type": ["integer", "null"], "minimum": 0}"#,
        ),
        FieldKind::Flag => ("boolean", r#"{"type": ["boolean", "null"]}"#),
    }
}

#[test]
fn the_page_of_the_contract_has_the_fields_of_a_query() {
    let rows: String = QUERY_FIELDS
        .iter()
        .map(|field| {
            let (of_page, _) = described(field.kind);
            format!("| `{}` | {of_page} | {} |\n", field.key, field.meaning)
        })
        .collect();
    let head = "| key | type | meaning |\n|---|---|---|\n| `v` | unsigned | version of the contract; 1 where absent |\n";
    require_part(
        "deploy/wire-contract.md",
        "<!-- The fields of a query, from src/core/wire/query.rs: -->\n\n",
        "\n<!-- End of the fields. -->",
        &format!("{head}{rows}"),
    );
}

#[test]
fn the_document_as_a_page_has_the_fields_of_a_query() {
    let contracts = QUERY_FIELDS.iter().map(|field| {
        let (_, of_document) = described(field.kind);
        format!("          \"{}\": {of_document}", field.key)
    });
    let all: Vec<String> = contracts.collect();
    require_part(
        "src/daemon/http/openapi.json",
        "\"QueryFields\": {\n        \"type\": \"object\",\n        \"properties\": {\n",
        "\n        }\n      },\n      \"QueryRequest\"",
        &all.join(",\n"),
    );
}

/// Deserializer that collects the names of a struct's fields, and reads no values.
struct FieldNames<'a>(&'a mut BTreeSet<String>);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(Error::custom("this is no struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Self::Error> {
        self.0.extend(fields.iter().map(|field| (*field).to_owned()));
        Err(Error::custom("only the names are wanted"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}

/// Returns all names that the fields of a request may have.
fn fields_of<'de, T: Deserialize<'de>>() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    assert!(T::deserialize(FieldNames(&mut names)).is_err());
    names
}

/// Returns the names of the fields that the document lists for `schemas`.
fn described_fields(document: &Value, schemas: &[&str]) -> BTreeSet<String> {
    let names = |schema: &&str| {
        let properties = document["components"]["schemas"][*schema]["properties"].as_object();
        properties.unwrap().keys().cloned().collect::<Vec<String>>()
    };
    schemas.iter().flat_map(names).collect()
}

const REQUESTS: [&str; 9] = [
    "QueryFields",
    "QueryRequest",
    "MooncakeQuery",
    "DynamoQuery",
    "MooncakeQueryByHash",
    "DynamoQueryByHash",
    "Registration",
    "Unregistration",
    "Lookup",
];

#[test]
fn the_document_has_the_fields_of_every_request() {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    let described = |schemas: &[&str]| described_fields(&document, schemas);
    assert_eq!(described(&REQUESTS[2..6]), fields_of::<QueryJson>());
    assert_eq!(described(&["Registration"]), fields_of::<RegisterJson>());
    assert_eq!(described(&["Unregistration"]), fields_of::<UnregisterJson>());
    assert_eq!(described(&["Lookup"]), fields_of::<LookupJson>());
}

#[test]
fn what_a_request_need_not_have_may_be_null() {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    for name in REQUESTS {
        let schema = &document["components"]["schemas"][name];
        let required = schema["required"].as_array();
        for (field, described) in schema["properties"].as_object().unwrap() {
            let is_required = required.is_some_and(|names| names.iter().any(|name| name == field));
            let types = described["type"].as_array().or(described["enum"].as_array());
            let takes_null = described["type"] == "null"
                || types.is_some_and(|types| types.iter().any(|kind| kind == "null" || kind.is_null()));
            assert_eq!(takes_null, !is_required, "{field} of {name}");
        }
    }
}

#[test]
fn what_an_answer_always_has_is_required() {
    let document: Value = serde_json::from_str(DOCUMENT).unwrap();
    for (name, optional) in [
        ("MooncakeFigures", &["addresses"][..]),
        ("DynamoFigures", &[]),
        ("DynamoScores", &["addresses"]),
        ("Layout", &["addresses"]),
        ("QueryReply", &["gathered", "predicted"]),
        (
            "HolderMatch",
            &[
                "kind",
                "device_blocks",
                "host_blocks",
                "device_usable_blocks",
                "host_usable_blocks",
                "limited_by",
                "dropped_out",
                "address",
                "labels",
            ],
        ),
        ("HolderStatus", &["address", "labels", "since_us"]),
        ("StatusReply", &["gathered"]),
        ("PredictedHolder", &["address"]),
        ("Worker", &["exact", "scheme", "addresses", "labels"]),
        ("Listener", &["last_error"]),
    ] {
        let required = document["components"]["schemas"][name]["required"].as_array();
        let required = required.unwrap().iter().map(|name| name.as_str().unwrap());
        let known: BTreeSet<String> = required
            .chain(optional.iter().copied())
            .map(str::to_owned)
            .collect();
        assert_eq!(known, described_fields(&document, &[name]), "{name}");
    }
}
