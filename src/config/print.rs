//! Prints the configuration in force.

use std::fmt::Write as _;

use super::declare::Setting;
use super::effective::{Effective, NAMESPACES, SettingEntry};
use super::kind::SettingValue;
use super::namespaces::of_namespaces;
use super::settings::{SETTINGS, sections};

/// Returns the values in force as a TOML file, each with its help and its origin in comments.
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
        for setting in of_namespaces() {
            let own = table.entries.get(setting.key);
            if let Some(entry) = own.or_else(|| effective.entry(setting.key)) {
                push_entry(&mut document, setting, entry);
            }
        }
    }
    document
}

fn push_entry(document: &mut String, setting: &Setting, entry: &SettingEntry) {
    // The line of a secret that is set is commented out. As a value, its stars would be loaded back as the password.
    let is_hidden = matches!(&entry.value, SettingValue::Secret(secret) if !secret.expose().is_empty());
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

/// Appends formatted text.
pub(super) fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    // Writing to a string never fails.
    let _ = text.write_fmt(arguments);
}
