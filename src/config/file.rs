//! Reads the values of the TOML file.

use std::collections::BTreeSet;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::declare::Setting;
use super::effective::{NAMESPACES, NamespaceEntries, SettingEntries, SettingEntry};
use super::error::{ConfigError, Origin};
use super::kind::Kind;
use super::layers::Layers;
use super::namespaces::of_namespaces;
use super::settings::{SETTINGS, sections};
use super::suggest;

/// Overrides the values in `layers` with those of the file.
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

/// Returns the key of a line whose value is probably a text that lacks its quotes, such as a URL, a path or a word. `None` for
/// any other line.
fn lacks_quotes(line: Option<&str>) -> Option<&str> {
    let (key, value) = line?.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    let is_key = !key.is_empty()
        && key
            .chars()
            .all(|character| character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.'));
    let is_text = value.starts_with(|character: char| {
        character.is_ascii_alphabetic() || matches!(character, '/' | '.' | '~')
    });
    let word = value
        .split(|character: char| character.is_whitespace() || character == '#')
        .next()?;
    (is_key && is_text && !matches!(word, "true" | "false" | "inf" | "nan")).then_some(key)
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
            let line = self.line(error.span().map_or(0, |span| span.start));
            self.layers.errors.push(ConfigError::Syntax {
                path: self.path.to_owned(),
                line,
                // The error's full text would quote the line, and could show a password.
                reason: match lacks_quotes(self.text.lines().nth(line.saturating_sub(1))) {
                    Some(key) => format!("the value is a text, which needs quotes: {key} = \"...\""),
                    None => error.message().to_owned(),
                },
            });
        }
        for (section, value) in document.get_ref() {
            let name: &str = section.get_ref();
            let origin = self.origin(section, name);
            let known = [sections(), vec![NAMESPACES]].concat();
            match value.get_ref() {
                _ if !known.contains(&name) => self.push_unknown(origin, name, &known),
                DeValue::Table(table) if name == NAMESPACES => self.read_namespaces(table),
                DeValue::Table(table) => self.read_section(name, table),
                other => self.push_no_table(origin, other),
            }
        }
        self.forget_artefacts();
        // The parser's tables are ordered by name, so the errors are not yet in the order of lines.
        self.layers.errors.sort_by_key(ConfigError::line);
    }

    /// Removes errors that are only consequences of a syntax error. The parser invents the rest of a line with a syntax
    /// error, such as an empty key, so all other errors of that line are removed. If the header of a section has a
    /// syntax error, the section of the following keys is not known. So errors about unknown keys after such a header
    /// are removed, too.
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
        let settings = || SETTINGS.iter().filter(|setting| setting.section() == section);
        for (name, value) in table {
            let origin = self.origin(name, format!("{section}.{}", name.get_ref()));
            let Some(setting) = settings().find(|setting| setting.name() == name.get_ref()) else {
                let known: Vec<_> = settings().map(Setting::name).collect();
                self.push_unknown(origin, name.get_ref(), &known);
                continue;
            };
            let (kind, value) = (setting.kind, value.get_ref());
            self.layers
                .give(setting, kind.parse_toml(value), || kind.show_toml(value), origin);
        }
    }

    /// Reads the tables of namespaces, such as `[namespaces.llama]`.
    fn read_namespaces(&mut self, tables: &DeTable<'_>) {
        for (name, value) in tables {
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
                let tables = &mut self.layers.effective.namespaces;
                tables.insert(name.to_owned(), NamespaceEntries { origin, entries });
            }
        }
    }

    fn read_namespace(&mut self, namespace: &str, table: &DeTable<'_>) -> SettingEntries {
        let mut entries = SettingEntries::new();
        for (name, value) in table {
            let origin = self.origin(name, format!("{NAMESPACES}.{namespace}.{}", name.get_ref()));
            let Some(setting) = of_namespaces().find(|setting| setting.name() == name.get_ref()) else {
                let known: Vec<_> = of_namespaces().map(Setting::name).collect();
                self.push_unknown(origin, name.get_ref(), &known);
                continue;
            };
            let value = value.get_ref();
            if let Some(value) = setting.kind.parse_toml(value) {
                entries.insert(setting.key, SettingEntry { value, origin });
            } else {
                let (allowed, found) = (setting.kind.allowed(), setting.kind.show_toml(value));
                self.layers
                    .errors
                    .push(ConfigError::value(origin, allowed, found));
            }
        }
        entries
    }

    fn push_unknown(&mut self, origin: Origin, name: &str, known: &[&'static str]) {
        let allowed = known.join(", ");
        let meant = suggest::meant(name, known.iter().copied()).or_else(|| suggest::elsewhere(name));
        self.layers.errors.push(ConfigError::Unknown {
            origin,
            allowed,
            meant,
        });
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

    /// Returns the number of the line at a byte offset of the file. The first line is 1.
    fn line(&self, offset: usize) -> usize {
        1 + self
            .text
            .bytes()
            .take(offset)
            .filter(|byte| *byte == b'\n')
            .count()
    }
}
