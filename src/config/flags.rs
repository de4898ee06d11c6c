//! The flags of all settings, in a form that can be flattened into a clap command.

use std::collections::BTreeMap;
use std::fmt;

use clap::error::Error;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::declare::Setting;
use super::kind::Kind;
use super::load::is_for_clients;
use super::settings::SETTINGS;

/// The flags that were given, as texts that are not yet checked.
///
/// Flatten this type into a command: `#[command(flatten)] settings: SettingFlags`.
/// [`Config::load`](super::Config::load) checks the values, and reports a wrong flag together with all other mistakes.
/// A flag for yes or no may stand alone (`--nats-tls-required`) or have a value (`--nats-tls-required=false`).
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SettingFlags {
    given: BTreeMap<String, String>,
}

impl SettingFlags {
    /// Returns the texts of the flags, by the dotted keys of their settings.
    pub fn into_given(self) -> BTreeMap<String, String> {
        self.given
    }
}

impl fmt::Debug for SettingFlags {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Only the keys are shown, because a value could be a password.
        formatter.debug_set().entries(self.given.keys()).finish()
    }
}

/// The flags of the settings by which a client reaches NATS, except `nats.url`: a command has a flag of its own for
/// that. The texts are not yet checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReachFlags {
    flags: SettingFlags,
}

impl ReachFlags {
    /// Returns the texts of the flags, by the dotted keys of their settings.
    pub fn given(&self) -> &BTreeMap<String, String> {
        &self.flags.given
    }
}

impl Args for ReachFlags {
    fn augment_args(command: Command) -> Command {
        let is_meant = |setting: &&Setting| {
            is_for_clients(setting) && setting.section() == "nats" && setting.key != "nats.url"
        };
        command.args(SETTINGS.iter().filter(is_meant).map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ReachFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let flags = SettingFlags::from_arg_matches(matches)?;
        Ok(Self { flags })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.flags.update_from_arg_matches(matches)
    }
}

impl Args for SettingFlags {
    fn augment_args(command: Command) -> Command {
        command.args(SETTINGS.iter().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut flags = SettingFlags::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        for setting in SETTINGS.iter() {
            // An error means that the command was built without these arguments, so no such flag is given.
            if let Ok(Some(text)) = matches.try_get_one::<String>(setting.key) {
                self.given.insert(setting.key.to_owned(), text.clone());
            }
        }
        Ok(())
    }
}

/// Keys of the settings that most users give. `-h` shows only these; `--help` shows all.
const COMMON: [&str; 11] = [
    "nats.url",
    "nats.credentials_file",
    "nats.embedded",
    "events.transport",
    "sharding.shard",
    "gateway.enabled",
    "namespace_defaults.block_size",
    "snapshots.directory",
    "admin.listen",
    "http.listen",
    "logging.level",
];

fn argument(setting: &'static Setting) -> Arg {
    let argument = Arg::new(setting.key)
        .long(setting.flag.as_str())
        .action(ArgAction::Set)
        .value_name(value_name(setting.kind))
        .help(help(setting))
        .hide_short_help(!COMMON.contains(&setting.key))
        .help_heading(setting.section());
    let argument = match setting.alias {
        Some(alias) => argument.visible_alias(alias),
        None => argument,
    };
    match setting.kind {
        Kind::Boolean => argument
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        _ => argument,
    }
}

fn value_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Boolean => "BOOLEAN",
        Kind::Integer { .. } => "NUMBER",
        Kind::Bytes { .. } => "BYTES",
        Kind::Choice(_) => "WORD",
        Kind::ServerUrls => "URLS",
        Kind::SubjectPrefix => "PREFIX",
        Kind::Name | Kind::OptionalName => "NAME",
        Kind::ListenAddress => "ADDRESS",
        Kind::LogFilter => "FILTER",
        Kind::OptionalText | Kind::Secret => "TEXT",
        Kind::OptionalHttpUrl => "URL",
        Kind::Components => "NAMES",
        Kind::OptionalDiscovery => "PLACE",
        Kind::OptionalShard => "INDEX/COUNT",
        Kind::OptionalPath | Kind::OptionalFile => "PATH",
    }
}

fn help(setting: &Setting) -> String {
    let words = match setting.kind {
        Kind::Choice(words) => format!(" [values: {}]", words.join(", ")),
        _ => String::new(),
    };
    let default = match setting.default {
        "" => String::new(),
        default => format!(" [default: {default}]"),
    };
    format!(
        "{}{words}{default} [environment: {}]",
        setting.help, setting.variable
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Example {
        #[command(flatten)]
        settings: SettingFlags,
    }

    fn given(arguments: &[&str]) -> BTreeMap<String, String> {
        let arguments = std::iter::once(&"example").chain(arguments);
        Example::try_parse_from(arguments).unwrap().settings.into_given()
    }

    #[test]
    fn the_command_is_sound() {
        <Example as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn the_short_help_shows_what_most_give() {
        let help = <Example as clap::CommandFactory>::command()
            .render_help()
            .to_string();
        assert!(
            COMMON
                .iter()
                .all(|key| SETTINGS.iter().any(|known| known.key == *key))
        );
        for setting in SETTINGS.iter() {
            let flag = format!("--{}", setting.flag);
            let is_shown = help.split([' ', '=', '[']).any(|word| word == flag);
            assert_eq!(is_shown, COMMON.contains(&setting.key), "{flag}");
        }
    }

    #[test]
    fn only_the_flags_given_are_yielded() {
        assert_eq!(given(&[]), BTreeMap::new());
        let expected = [
            ("nats.url".to_owned(), "nats://a".to_owned()),
            ("events.lanes".into(), "x".into()),
        ];
        assert_eq!(
            given(&["--nats-url", "nats://a", "--events-lanes=x"]),
            BTreeMap::from(expected)
        );
    }

    #[test]
    fn a_boolean_stands_alone_or_has_a_value() {
        for (argument, key, text) in [
            ("--nats-tls-required", "nats.tls_required", "true"),
            ("--nats-tls-required=false", "nats.tls_required", "false"),
            ("--embedded", "nats.embedded", "true"),
            ("--nats-embedded", "nats.embedded", "true"),
            ("--embedded=maybe", "nats.embedded", "maybe"),
        ] {
            assert_eq!(
                given(&[argument]).get(key).map(String::as_str),
                Some(text),
                "{argument}"
            );
        }
    }

    #[test]
    fn help_shows_the_default_and_the_variable() {
        let help = <Example as clap::CommandFactory>::command()
            .render_long_help()
            .to_string();
        for setting in SETTINGS.iter() {
            assert!(help.contains(&format!("--{}", setting.flag)), "{}", setting.flag);
            assert!(help.contains(&setting.variable), "{}", setting.variable);
        }
        assert!(help.contains("[default: nats://127.0.0.1:4222]"));
        assert!(help.contains("[values: engine, recompute]"));
    }

    #[test]
    fn an_unknown_flag_is_refused() {
        assert!(Example::try_parse_from(["example", "--nats-urll", "x"]).is_err());
    }

    #[derive(Debug, Parser)]
    struct Client {
        #[command(flatten)]
        flags: ReachFlags,
    }

    #[test]
    fn a_client_takes_what_reaches_nats_and_nothing_else() {
        let parse = |flag| Client::try_parse_from(["client", flag]);
        let flags = parse("--nats-user=me").unwrap().flags;
        let expected = [("nats.user".to_owned(), "me".to_owned())];
        assert_eq!(flags.given(), &BTreeMap::from(expected));
        for flag in [
            "--nats-password=x",
            "--nats-inbox-prefix=x",
            "--nats-tls-ca-file=x",
        ] {
            assert!(parse(flag).is_ok(), "{flag}");
        }
        for flag in [
            "--nats-url=x",
            "--nats-embedded",
            "--events-lanes=1",
            "--subjects-prefix=x",
        ] {
            assert!(parse(flag).is_err(), "{flag}");
        }
    }

    #[test]
    fn debug_shows_no_value() {
        let example = Example::try_parse_from(["example", "--nats-token", "hunter2"]).unwrap();
        let shown = format!("{example:?}");
        assert!(
            shown.contains("nats.token") && !shown.contains("hunter2"),
            "{shown}"
        );
    }
}
