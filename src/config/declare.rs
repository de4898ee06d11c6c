//! Declares settings: one row gives a setting its key, type, default, bounds and help.
//!
//! [`tables!`] turns rows into a struct and into [`Setting`]s. Every other use of a setting, such as its flag, follows
//! from its [`Setting`].

use super::effective::Values;
use super::error::ConfigError;
use super::kind::Kind;

/// Prefix of every setting's environment variable.
pub const ENVIRONMENT_PREFIX: &str = "KVATLAS_";

/// The declaration of one setting.
#[derive(Debug)]
pub struct Setting {
    /// Dotted key: the table of the file, then the key in the table.
    pub key: &'static str,
    /// Name of the flag, without its two dashes.
    pub flag: String,
    /// Name of the environment variable.
    pub variable: String,
    /// Name of a second, shorter flag, without its two dashes.
    pub alias: Option<&'static str>,
    /// Kind of values that the setting allows.
    pub kind: Kind,
    /// Default, written as in an environment variable. An empty text means unset.
    pub default: &'static str,
    /// Help text, in one line, without a full stop.
    pub help: &'static str,
    /// Help text of the setting's section, as a sentence.
    pub about: &'static str,
    /// Whether a running daemon takes the setting at a reload, without a restart.
    pub is_live: bool,
}

impl Setting {
    /// Returns the table of the configuration file that holds the setting.
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(section, _)| section)
    }

    /// Returns the key within its [section](Setting::section).
    pub fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    /// Returns the name of the long flag, with the short flag in brackets if there is one. Messages name both, because
    /// the loader does not know which of them was written.
    pub(super) fn flag_names(&self) -> String {
        let short = self.alias.map(|alias| format!(" (--{alias})"));
        format!("{}{}", self.flag, short.unwrap_or_default())
    }

    /// Makes a setting whose flag and variable follow from its key.
    pub(super) fn new(key: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Setting {
        Setting {
            key,
            flag: key.replace(['.', '_'], "-"),
            variable: format!(
                "{ENVIRONMENT_PREFIX}{}",
                key.replace('.', "_").to_ascii_uppercase()
            ),
            alias: None,
            kind,
            default,
            help: help.trim().trim_end_matches('.'),
            about: "",
            is_live: false,
        }
    }
}

/// A type whose fields are a group of settings.
pub(super) trait SettingTable: Sized {
    /// Returns the declarations of the group's settings, in the order of their rows.
    fn settings() -> Vec<Setting>;

    /// Converts the values in force to this type.
    fn read(values: Values<'_>) -> Result<Self, ConfigError>;

    /// Takes over the values of the live settings (those that a reload may change) from `other`.
    fn take_live(&mut self, other: &Self);
}

/// Declares tables of settings. Each table becomes a struct with one field for each row.
///
/// A row is a help sentence as doc comment, then `field: Type = default, rule;`. The setting's key is the section and
/// the field's name; `field as key` gives another key.
///
/// - `flag "word"` at the end of a row adds a shorter flag.
/// - `=> live` tells that a running daemon takes the setting at a reload.
/// - A row without a default holds the rows of another [`SettingTable`].
macro_rules! tables {
    ($(
        $(#[doc = $about:literal])+
        $visibility:vis $table:ident in [$section:ident] {
            $(
                $(#[doc = $help:literal])+
                $field:ident $(as $name:ident)?: $type:ty $(= $default:literal, $rule:expr $(, flag $alias:literal)? $(=> $live:ident)?)?;
            )+
        }
    )+) => { $(
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq, Eq)]
        $visibility struct $table {
            $(
                $(#[doc = $help])+
                pub $field: $type,
            )+
        }

        impl SettingTable for $table {
            fn settings() -> Vec<Setting> {
                let mut settings = Vec::new();
                $(
                    settings.extend(tables!(
                        @settings ($section $field $($name)?) $type, concat!($($help),+) $(, $default, $rule, [$($alias)?] [$($live)?])?
                    ));
                )+
                for setting in &mut settings {
                    setting.about = concat!($($about),+).trim();
                }
                settings
            }

            fn read(values: Values<'_>) -> Result<Self, ConfigError> {
                Ok(Self {
                    $($field: tables!(@read values ($section $field $($name)?) $type $(, $rule)?)?,)+
                })
            }

            fn take_live(&mut self, other: &Self) {
                // Most sections have no live setting, and `other` would then be an unused parameter.
                let _ = other;
                $(tables!(@take_live self.$field, other.$field $(, $default [$($live)?])?);)+
            }
        }

    )+ };

    (@key ($section:ident $field:ident)) => { concat!(stringify!($section), ".", stringify!($field)) };
    (@key ($section:ident $field:ident $name:ident)) => { concat!(stringify!($section), ".", stringify!($name)) };

    (@settings $key:tt $type:ty, $help:expr) => { <$type as SettingTable>::settings() };
    (@settings $key:tt $type:ty, $help:expr, $default:literal, $rule:expr, [$($alias:literal)?] [$($live:ident)?]) => {{
        let rule: Rule<$type> = $rule;
        [Setting {
            alias: None$(.or(Some($alias)))?,
            is_live: tables!(@is_live $($live)?),
            ..Setting::new(tables!(@key $key), rule.kind, $default, $help)
        }]
    }};

    (@is_live) => { false };
    (@is_live live) => { true };

    (@read $values:ident $key:tt $type:ty) => { <$type as SettingTable>::read($values) };
    (@read $values:ident $key:tt $type:ty, $rule:expr) => {{
        let rule: Rule<$type> = $rule;
        $values.get(tables!(@key $key), &rule)
    }};

    (@take_live $own:expr, $other:expr) => { $own.take_live(&$other) };
    (@take_live $own:expr, $other:expr, $default:literal []) => {};
    (@take_live $own:expr, $other:expr, $default:literal [live]) => { $own.clone_from(&$other) };
}
pub(super) use tables;

/// Declares the struct `Config`: one table of settings for each section.
macro_rules! configuration {
    ($($section:ident: $type:ty,)+) => {
        /// A configuration that has been checked: each value is allowed, and all values are allowed together.
        ///
        /// Two configurations are equal if their values are equal, even if the values come from other sources.
        #[derive(Debug, Clone)]
        pub struct Config {
            $(
                #[doc = concat!("The section `", stringify!($section), "`.")]
                pub $section: $type,
            )+
            /// Values with their origins, for printing.
            pub(super) effective: Effective,
        }

        impl Config {
            /// Returns the settings of every section.
            fn settings() -> Vec<Setting> {
                let mut settings = Vec::new();
                $(settings.extend(<$type as SettingTable>::settings());)+
                settings
            }

            /// Converts the values in force to their types.
            pub(super) fn read(effective: Effective) -> Result<Config, ConfigError> {
                let values = Values::new(&effective);
                Ok(Config {
                    $($section: <$type as SettingTable>::read(values)?,)+
                    effective,
                })
            }

            /// Returns this configuration with the live settings (those that a reload may change) of `other`. All other
            /// settings keep their values.
            #[must_use]
            pub fn with_live(&self, other: &Config) -> Config {
                let mut config = self.clone();
                $(config.$section.take_live(&other.$section);)+
                config
            }
        }

        impl PartialEq for Config {
            fn eq(&self, other: &Config) -> bool {
                $(self.$section == other.$section)&&+
            }
        }

        impl Eq for Config {}
    };
}
pub(super) use configuration;
