//! The routes beside the document that describes them.

use std::collections::BTreeSet;

use super::openapi::DOCUMENT;
use super::routes::paths;
use crate::daemon::metrics::labels::HttpRoute;

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
