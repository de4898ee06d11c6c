//! Reads the layer of the TOML file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Origin};
use super::kind::Kind;
use super::layers::{Entry, Layers, NamespaceTable};
use super::settings::{SETTINGS, Setting, sections};

/// The table of tables that holds the settings of single namespaces.
pub(super) const NAMESPACES: &str = "namespaces";

/// The section whose keys a namespace may override.
pub(super) const NAMESPACE_DEFAULTS: &str = "namespace_defaults";

/// Lays the file's values over `layers`.
pub(super) fn read(path: &Path, layers: &mut Layers) {
    match std::fs::read_to_string(path) {
        Ok(text) => FileReader {
            path,
            text: &text,
            layers,
        }
        .read(),
        Err(error) => {
            layers.has_lost_input = true;
            layers.errors.push(ConfigError::Unreadable {
                path: path.to_owned(),
                reason: error.to_string(),
            });
        }
    }
}

struct FileReader<'a> {
    path: &'a Path,
    text: &'a str,
    layers: &'a mut Layers,
}

impl FileReader<'_> {
    fn read(mut self) {
        let (document, syntax_errors) = DeTable::parse_recoverable(self.text);
        for error in syntax_errors {
            self.layers.has_lost_input = true;
            self.layers.errors.push(ConfigError::Syntax {
                path: self.path.to_owned(),
                line: self.line(error.span().map_or(0, |span| span.start)),
                // Not the whole display, which quotes the line and so could show a password.
                reason: error.message().to_owned(),
            });
        }
        for (section, value) in document.get_ref() {
            let name: &str = section.get_ref();
            let origin = self.origin(section, name);
            let is_known = name == NAMESPACES || sections().contains(&name);
            match value.get_ref() {
                _ if !is_known => {
                    let allowed = [&sections()[..], &[NAMESPACES]].concat().join(", ");
                    self.layers.errors.push(ConfigError::Unknown { origin, allowed });
                }
                DeValue::Table(table) if name == NAMESPACES => self.read_namespaces(table),
                DeValue::Table(table) => self.read_section(name, table),
                other => self.push_no_table(origin, other),
            }
        }
        self.forget_artefacts();
        // The parser's tables are ordered by name.
        self.layers.errors.sort_by_key(ConfigError::line);
    }

    /// Keeps only the syntax error of a line that has one: what the parser made of the rest of the line, such as an empty key,
    /// nobody has written. After a broken section header it is not known either whose keys follow.
    fn forget_artefacts(&mut self) {
        let is_syntax = |error: &ConfigError| matches!(error, ConfigError::Syntax { .. });
        let broken: BTreeSet<_> = self
            .layers
            .errors
            .iter()
            .filter(|error| is_syntax(error))
            .filter_map(ConfigError::line)
            .collect();
        let is_header = |line: &usize| {
            let text = self.text.lines().nth(line.saturating_sub(1));
            text.is_some_and(|text| text.trim_start().starts_with('['))
        };
        let lost_section = broken.iter().copied().find(is_header);
        self.layers.errors.retain(|error| {
            let line = error.line().unwrap_or_default();
            let is_homeless =
                matches!(error, ConfigError::Unknown { .. }) && lost_section.is_some_and(|lost| line > lost);
            is_syntax(error) || !(broken.contains(&line) || is_homeless)
        });
    }

    fn read_section(&mut self, section: &str, table: &DeTable<'_>) {
        for (name, value) in table {
            let key = format!("{section}.{}", name.get_ref());
            let origin = self.origin(name, key.clone());
            let Some(setting) = Setting::find(&key) else {
                self.push_unknown(origin, section);
                continue;
            };
            let (kind, value) = (setting.kind, value.get_ref());
            self.layers
                .give(setting, kind.parse_toml(value), || kind.show_toml(value), origin);
        }
    }

    fn read_namespaces(&mut self, table: &DeTable<'_>) {
        for (name, value) in table {
            let (span, name): (_, &str) = (name, name.get_ref());
            let origin = self.origin(span, format!("{NAMESPACES}.{name}"));
            let is_named = Kind::Name.parse(name).is_some();
            if !is_named {
                let allowed = format!("named with {}", Kind::Name.allowed());
                self.layers
                    .errors
                    .push(ConfigError::value(origin.clone(), allowed, Kind::Name.show(name)));
            }
            let DeValue::Table(table) = value.get_ref() else {
                self.push_no_table(origin, value.get_ref());
                continue;
            };
            let entries = self.read_namespace(name, table);
            if is_named {
                let table = NamespaceTable { origin, entries };
                self.layers.effective.namespaces.insert(name.to_owned(), table);
            }
        }
    }

    fn read_namespace(&mut self, namespace: &str, table: &DeTable<'_>) -> BTreeMap<&'static str, Entry> {
        let mut entries = BTreeMap::new();
        for (name, value) in table {
            let origin = self.origin(name, format!("{NAMESPACES}.{namespace}.{}", name.get_ref()));
            let Some(setting) = Setting::find(&format!("{NAMESPACE_DEFAULTS}.{}", name.get_ref())) else {
                self.push_unknown(origin, NAMESPACE_DEFAULTS);
                continue;
            };
            let value = value.get_ref();
            if let Some(value) = setting.kind.parse_toml(value) {
                entries.insert(setting.key, Entry { value, origin });
            } else {
                let (allowed, found) = (setting.kind.allowed(), setting.kind.show_toml(value));
                self.layers
                    .errors
                    .push(ConfigError::value(origin, allowed, found));
            }
        }
        entries
    }

    fn push_unknown(&mut self, origin: Origin, section: &str) {
        let names = SETTINGS
            .iter()
            .filter(|setting| setting.section() == section)
            .map(Setting::name);
        let allowed = names.collect::<Vec<_>>().join(", ");
        self.layers.errors.push(ConfigError::Unknown { origin, allowed });
    }

    fn push_no_table(&mut self, origin: Origin, value: &DeValue<'_>) {
        let found = format!("of type {}", value.type_str());
        self.layers
            .errors
            .push(ConfigError::value(origin, "a table of settings".into(), found));
    }

    fn origin<T>(&self, at: &Spanned<T>, key: impl Into<String>) -> Origin {
        Origin::file(self.path, self.line(at.span().start), key)
    }

    /// The line of a byte offset, from 1.
    fn line(&self, offset: usize) -> usize {
        1 + self
            .text
            .bytes()
            .take(offset)
            .filter(|byte| *byte == b'\n')
            .count()
    }
}
