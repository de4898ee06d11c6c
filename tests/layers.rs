//! The layers of the crate: a module imports only from layers below its own.
//!
//! Reads the sources as text, without comments, literals and test modules, and looks for paths that begin at the crate's root.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The layers, lowest first. Modules of one layer don't know each other.
const LAYERS: &[&[&str]] = &[
    &["hash", "trie"],
    &["tracking", "vocabulary"],
    &["wire"],
    &["index"],
    &["baselines"],
    &["snapshot"],
    &["config", "telemetry", "connection"],
    &["client", "publisher", "ingest", "admin"],
    &["query_service", "snapshotter"],
    &["daemon"],
    &["simulation"],
    &["cli"],
];

/// Imports within a layer that are meant: importer, imported.
const WITHIN_A_LAYER: &[(&str, &str)] = &[("connection", "config")];

/// Modules for tests and benches alone: no other may import them.
const FOR_COMPARISON: &[&str] = &["baselines"];

fn layer_of(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

fn may_import(importer: &str, imported: &str) -> bool {
    if importer != imported && FOR_COMPARISON.contains(&imported) {
        return false;
    }
    match (layer_of(importer), layer_of(imported)) {
        (Some(above), Some(below)) => {
            importer == imported || below < above || WITHIN_A_LAYER.contains(&(importer, imported))
        }
        // What has no layer is reported by its own test.
        _ => true,
    }
}

/// The modules of the crate's root that `source` names; `depth` is how many modules the file lies below the root.
fn imports(source: &str, depth: usize) -> BTreeSet<String> {
    let code = without_test_items(&without_comments_and_literals(source));
    let tokens = tokens(&code);
    let mut found = BTreeSet::new();
    for (start, token) in tokens.iter().enumerate() {
        if start > 0 && tokens[start - 1] == "::" {
            continue;
        }
        let steps_up = tokens[start..]
            .chunks(2)
            .take_while(|pair| pair[0] == "super")
            .count();
        let is_root = matches!(token.as_str(), "crate" | "kvatlas") || (steps_up == depth && depth > 0);
        let end = start + 2 * steps_up.max(1);
        if is_root && tokens.get(end - 1).is_some_and(|token| token == "::") {
            found.extend(names_at(&tokens[end..]));
        }
    }
    found.retain(|name| layer_of(name).is_some());
    found
}

/// The first names of a path's rest: one, or those of a list in braces.
fn names_at(tokens: &[String]) -> Vec<String> {
    match tokens.first().map(String::as_str) {
        Some("{") => {}
        Some(name) => return vec![name.to_owned()],
        None => return Vec::new(),
    }
    let mut names = Vec::new();
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        let begins = depth == 1 && (index == 1 || tokens[index - 1] == ",");
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            name if begins => names.push(name.to_owned()),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names
}

fn tokens(code: &str) -> Vec<String> {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let end = match first {
            _ if is_word(first) => rest.find(|character| !is_word(character)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            _ => first.len_utf8(),
        };
        tokens.push(rest[..end].to_owned());
        rest = rest[end..].trim_start();
    }
    tokens
}

/// Comments and literals become blanks.
fn without_comments_and_literals(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    let mut before = ' ';
    while let Some(first) = rest.chars().next() {
        // An `r` at the end of a word begins no raw text.
        let is_inside_word = first == 'r' && (before.is_alphanumeric() || before == '_');
        let skipped = comment(rest)
            .or_else(|| literal(rest))
            .filter(|_| !is_inside_word);
        code.push(if skipped.is_some() { ' ' } else { first });
        before = first;
        rest = &rest[skipped.unwrap_or(first.len_utf8())..];
    }
    code
}

/// How long the comment at the start of `text` is.
fn comment(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    let is_block = text.starts_with("/*");
    is_block.then(|| text.find("*/").map_or(text.len(), |end| end + 2))
}

/// How long the text or character at the start of `text` is.
fn literal(text: &str) -> Option<usize> {
    if let Some(raw) = text.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let end = format!("\"{}", "#".repeat(hashes));
        let start = 1 + hashes + 1;
        return raw[hashes..].starts_with('"').then(|| {
            let found = text[start..].find(&end);
            found.map_or(text.len(), |found| start + found + end.len())
        });
    }
    if text.starts_with('"') {
        let mut is_escaped = false;
        for (offset, character) in text.char_indices().skip(1) {
            match character {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                '"' => return Some(offset + 1),
                _ => {}
            }
        }
        return Some(text.len());
    }
    // A character, not a lifetime.
    let inner = text.strip_prefix('\'')?;
    if inner.starts_with('\\') {
        return inner[2..].find('\'').map(|end| 1 + 2 + end + 1);
    }
    let width = inner.chars().next()?.len_utf8();
    inner[width..].starts_with('\'').then_some(2 + width)
}

/// Cuts items behind `#[cfg(test)]`.
fn without_test_items(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(start) = rest.find("#[cfg(test)]") {
        kept.push_str(&rest[..start]);
        let item = &rest[start..];
        let end = item.find(['{', ';']).unwrap_or(item.len());
        let mut depth = 0_usize;
        let length = item[end..].char_indices().find_map(|(offset, character)| {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            (depth == 0).then_some(end + offset + 1)
        });
        rest = &item[length.unwrap_or(item.len())..];
    }
    kept + rest
}

fn source_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

/// All source files below `directory` that are not test modules.
fn source_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = stem(&path);
        if name == "tests" || name.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            source_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The modules from the crate's root to the file; none for `lib.rs` and `main.rs`.
fn module_path(file: &Path) -> Vec<String> {
    let relative = file.strip_prefix(source_directory()).unwrap().with_extension("");
    let mut path: Vec<String> = relative
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    let is_root = path.len() == 1 && (path[0] == "lib" || path[0] == "main");
    if is_root || path.last().is_some_and(|last| last == "mod") {
        path.pop();
    }
    path
}

#[test]
fn imports_point_down() {
    let mut files = Vec::new();
    source_files(&source_directory(), &mut files);
    assert!(files.len() > 50, "the sources were not found");
    let mut violations = Vec::new();
    let mut checked = 0;
    for file in &files {
        let path = module_path(file);
        // The root and the command may know everything.
        let Some(importer) = path.first() else { continue };
        for imported in imports(&std::fs::read_to_string(file).unwrap(), path.len()) {
            checked += 1;
            if !may_import(importer, &imported) {
                violations.push(format!("{}: {importer} imports {imported}", file.display()));
            }
        }
    }
    assert!(checked > 50, "only {checked} imports were found");
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn every_module_has_a_layer() {
    for entry in std::fs::read_dir(source_directory()).unwrap() {
        let path = entry.unwrap().path();
        let name = stem(&path);
        if path.is_dir() || (name != "lib" && name != "main") {
            let has_layer = layer_of(&name).is_some();
            assert!(has_layer, "src/{name} has no layer: add it to LAYERS, or move it");
        }
    }
}

fn found(source: &str, depth: usize) -> Vec<String> {
    imports(source, depth).into_iter().collect()
}

#[test]
fn planted_imports_are_found() {
    for source in [
        "use crate::index::Search;",
        "use crate :: index;",
        "pub use crate::{hash::Position, index::{Search, wire::X}};",
        "use crate::{\n    hash::Position, // one\n    index,\n};",
        "fn f() -> crate::index::Matches { todo() }",
        "fn f(matches: &'a crate::index::Matches<'a>) {}",
        "use kvatlas::index::Search;",
        "const QUOTE: char = '\"'; use crate::index::X; const OTHER: char = '\"';",
        "const ESCAPED: char = '\\''; use crate::index::X; fn f<'a>(a: &'a str) {}",
        "#[cfg(test)] mod tests { fn f() {} } use crate::index::X;",
        "#[cfg(test)]\nmod tests;\nuse crate::index::X;",
        "use super::super::index::X;",
        "use super::super::{hash::X, index::Y};",
    ] {
        let found = found(source, 2);
        assert!(found.contains(&"index".to_owned()), "{source:?}: {found:?}");
        assert!(!found.contains(&"wire".to_owned()), "{source:?}: {found:?}");
    }
    assert!(!may_import("wire", "index"));
    assert!(!may_import("config", "telemetry"));
    assert!(may_import("connection", "config") && !may_import("config", "connection"));
    assert!(may_import("baselines", "index") && !may_import("daemon", "baselines"));
    assert!(may_import("index", "wire") && may_import("index", "index"));
}

#[test]
fn what_is_no_import_is_passed_over() {
    for source in [
        "// use crate::index::Search;",
        "/// See [`crate::index`].",
        "/* use crate::index; */",
        "const TEXT: &str = \"crate::index::X \\\" crate::index\";",
        "const TEXT: &str = r#\"crate::index::\"X\"#;",
        "#[cfg(test)]\nmod tests { use crate::index::X; mod inner { use crate::index::Y; } }",
        "#[cfg(test)] use crate::index::X;",
        "use super::index::X;",
        "use super::super::super::index::X;",
        "use other_crate::index::X;",
        "use std::index::X; mod index;",
        "pub(crate) fn index() {}",
    ] {
        assert_eq!(found(source, 2), Vec::<String>::new(), "{source:?}");
    }
}
