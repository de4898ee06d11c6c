//! The reference of the settings: the page `deploy/settings.md`.

use kvatlas_lab::pages::require_page;

use super::declare::Setting;
use super::print::push;
use super::settings::{SETTINGS, sections};

const INTRODUCTION: &str = r#"# Settings

This page is made from the declarations in `src/config/settings.rs`.

A flag covers its environment variable, which covers the TOML file (`--config`, or `KVATLAS_CONFIG`), which covers the
default. Unknown keys, variables and flags are errors, and all mistakes are reported at once.
A running `kvatlas serve` takes what is marked *Live* at SIGHUP, without a restart ([when](operating.md#reloading)).
`kvatlas serve --check-config` only checks. `kvatlas serve --print-config` prints the values in force, each with its origin.

In the file, the part of a setting's name before the dot is the table. Namespaces may have contracts of their own, in the
file only:

```toml
[nats]
url = "nats://nats-1.example:4222,nats://nats-2.example:4222"
credentials_file = "/etc/kvatlas/kvatlas.creds"

[snapshots]
directory = "/var/lib/kvatlas"

[namespaces.llama-70b]
block_size = 64
hashing = "recompute"
```

Other commands that connect to NATS take the variables of the sections `nats` and `subjects`, too: `query`, `publish`,
`admin`, `bridge`, `fleet`, `replay` and `doctor`. In the daemon's environment they find it without a flag. `kvatlas up` and
`kvatlas doctor --config` take all settings. `kvatlas demo` and `kvatlas replay --embedded` start everything themselves, and
take `KVATLAS_NATS_SERVER_BINARY` only.
"#;

/// Returns the reference of all settings in Markdown: a table for each section.
fn settings_markdown() -> String {
    let mut page = String::from(INTRODUCTION);
    for section in sections() {
        let settings = SETTINGS.iter().filter(|setting| setting.section() == section);
        let about = settings.clone().next().map_or("", |setting| setting.about);
        push(&mut page, format_args!("\n## {section}\n\n{about}\n\n"));
        page.push_str("| Setting | Default | What it does | Allowed |\n|---|---|---|---|\n");
        settings.for_each(|setting| push_row(&mut page, setting));
    }
    page
}

fn push_row(page: &mut String, setting: &Setting) {
    let flags = match setting.alias {
        Some(alias) => format!("`--{}`, `--{alias}`", setting.flag),
        None => format!("`--{}`", setting.flag),
    };
    let default = match setting.default {
        "" => "unset".to_owned(),
        default => format!("`{default}`"),
    };
    let live = if setting.is_live { " *Live.*" } else { "" };
    let (key, variable, help, allowed) = (
        setting.key,
        &setting.variable,
        setting.help,
        setting.kind.allowed(),
    );
    push(
        page,
        format_args!("| `{key}`<br>{flags}<br>`{variable}` | {default} | {help}.{live} | {allowed} |\n"),
    );
}

#[test]
fn the_page_of_the_settings_is_true() {
    require_page("settings.md", &settings_markdown());
}

#[test]
fn the_reference_has_a_row_for_every_setting() {
    let page = settings_markdown();
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    assert_eq!(rows.clone().count(), SETTINGS.len());
    for row in rows {
        assert_eq!(row.matches('|').count(), 5, "{row}");
    }
}
