//! The routes and the fields of a query beside the document that describes them.

use std::collections::BTreeSet;

use kvatlas_core::wire::{FieldKind, QUERY_FIELDS};

use super::openapi::DOCUMENT;
use super::routes::paths;
use crate::daemon::metrics::labels::HttpRoute;
use crate::daemon::pages::require_part;

#[test]
fn the_document_has_all_routes_and_no_other() {
    let document: serde_json::Value = serde_json::from_str(DOCUMENT).unwrap();
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

/// The type of a field in the page of the contract, and in the OpenAPI document.
fn described(kind: FieldKind) -> (&'static str, &'static str) {
    match kind {
        FieldKind::Tokens => (
            "list of tokens",
            r#"{"type": "array", "items": {"type": "integer"}}"#,
        ),
        FieldKind::Hashes => (
            "list of 64-bit hashes",
            r##"{"type": "array", "items": {"$ref": "#/components/schemas/Hash"}}"##,
        ),
        FieldKind::LineageHashes => (
            "list of lineage hashes",
            r#"{"type": "array", "items": {"type": "string"}}"#,
        ),
        FieldKind::Positions => (
            "list of unsigned 32-bit, optional",
            r#"{"type": "array", "items": {"type": "integer"}}"#,
        ),
        FieldKind::Names => (
            "array of texts",
            r#"{"type": "array", "items": {"type": "string"}}"#,
        ),
        FieldKind::Text => ("text, optional", r#"{"type": "string"}"#),
        FieldKind::Number => ("unsigned, optional", r#"{"type": "integer"}"#),
        FieldKind::Number32 => ("unsigned 32-bit", r#"{"type": "integer"}"#),
        FieldKind::Flag => ("boolean", r#"{"type": "boolean"}"#),
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
    let own =
        ["namespace", "model", "tenant"].map(|key| format!("          \"{key}\": {{\"type\": \"string\"}}"));
    let contracts = QUERY_FIELDS.iter().map(|field| {
        let (_, of_document) = described(field.kind);
        format!("          \"{}\": {of_document}", field.key)
    });
    let version = "          \"v\": {\"type\": \"integer\", \"const\": 1}".to_owned();
    let all: Vec<String> = [version].into_iter().chain(own).chain(contracts).collect();
    require_part(
        "src/daemon/http/openapi.json",
        "\"QueryFields\": {\n        \"type\": \"object\",\n        \"properties\": {\n",
        "\n        }\n      },\n      \"QueryRequest\"",
        &all.join(",\n"),
    );
}
