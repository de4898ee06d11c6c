//! Writes the configuration in force, and the reference of the settings.

use std::fmt::Write as _;

use super::file::{NAMESPACE_DEFAULTS, NAMESPACES};
use super::kind::Value;
use super::layers::{Effective, Entry};
use super::settings::{SETTINGS, Setting, sections};

/// The values in force as a TOML file, each with its help and its origin.
pub(super) fn to_toml(effective: &Effective) -> String {
    let mut document = String::from("# The configuration in force. Secrets are left out: give them again.\n");
    for section in sections() {
        push(&mut document, format_args!("\n[{section}]\n"));
        for setting in SETTINGS.iter().filter(|setting| setting.section() == section) {
            if let Some(entry) = effective.entry(setting.key) {
                push(&mut document, format_args!("# {}.\n", setting.help));
                push_entry(&mut document, setting, entry);
            }
        }
    }
    for (name, table) in &effective.namespaces {
        push(&mut document, format_args!("\n[{NAMESPACES}.{name}]\n"));
        for setting in SETTINGS
            .iter()
            .filter(|setting| setting.section() == NAMESPACE_DEFAULTS)
        {
            if let Some(entry) = table
                .entries
                .get(setting.key)
                .or_else(|| effective.entry(setting.key))
            {
                push_entry(&mut document, setting, entry);
            }
        }
    }
    document
}

fn push_entry(document: &mut String, setting: &Setting, entry: &Entry) {
    // A set secret stays a comment: as a value, its stars would become the password.
    let is_hidden = matches!(&entry.value, Value::Secret(secret) if !secret.expose().is_empty());
    let comment = if is_hidden { "# " } else { "" };
    push(document, format_args!("# From {}.\n", entry.origin));
    push(
        document,
        format_args!(
            "{comment}{} = {}\n",
            setting.name(),
            setting.kind.to_toml(&entry.value)
        ),
    );
}

/// The reference of all settings as a Markdown table, for the documentation.
pub fn settings_markdown() -> String {
    let mut table = String::from("| Setting | Default | What it does | Allowed |\n|---|---|---|---|\n");
    for setting in SETTINGS {
        let flags = match setting.alias {
            Some(alias) => format!("`--{}`, `--{alias}`", setting.flag),
            None => format!("`--{}`", setting.flag),
        };
        let default = match setting.default {
            "" => "unset".to_owned(),
            default => format!("`{default}`"),
        };
        push(
            &mut table,
            format_args!(
                "| `{}`<br>{flags}<br>`{}` | {default} | {}. | {} |\n",
                setting.key,
                setting.variable,
                setting.help,
                setting.kind.allowed()
            ),
        );
    }
    table
}

/// Appends formatted text.
fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail: `fmt::Write` is fallible for other writers.
    let _ = text.write_fmt(arguments);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_has_a_row_for_every_setting() {
        let table = settings_markdown();
        assert_eq!(table.lines().count(), 2 + SETTINGS.len());
        for line in table.lines() {
            assert_eq!(line.matches('|').count(), 5, "{line}");
        }
    }
}
