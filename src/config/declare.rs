//! The means to declare settings: one row gives a setting its key, type, default, bounds and help.
//!
//! [`tables!`] turns rows into a struct and into [`Setting`]s. Every other use of a setting follows from its [`Setting`].

use std::collections::BTreeMap;

use super::effective::Values;
use super::error::ConfigError;
use super::kind::Kind;

/// The beginning of every setting's environment variable.
pub const ENVIRONMENT_PREFIX: &str = "KVATLAS_";

/// One setting of the daemon.
#[derive(Debug)]
pub struct Setting {
    /// The dotted key: the table of the file, then the key in it.
    pub key: &'static str,
    /// The long flag, without its two dashes.
    pub flag: String,
    /// The environment variable.
    pub variable: String,
    /// A second, shorter flag, without its two dashes.
    pub alias: Option<&'static str>,
    /// Which values are allowed.
    pub kind: Kind,
    /// The default, written as in an environment variable. Empty means unset.
    pub default: &'static str,
    /// The help, in one line, without a full stop.
    pub help: &'static str,
    /// The help of its section, as a sentence.
    pub about: &'static str,
    /// The table of the file whose named tables may override the setting, such as `namespaces`.
    pub named_in: Option<&'static str>,
}

impl Setting {
    /// The table of the configuration file that holds the setting.
    pub fn section(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(section, _)| section)
    }

    /// The key within its [section](Setting::section).
    pub fn name(&self) -> &'static str {
        self.key.split_once('.').map_or(self.key, |(_, name)| name)
    }

    /// Its long flag and the short one, if it has one: nobody knows which of them was written.
    pub(super) fn flag_names(&self) -> String {
        let short = self.alias.map(|alias| format!(" (--{alias})"));
        format!("{}{}", self.flag, short.unwrap_or_default())
    }

    /// A setting whose names follow from its key.
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
            named_in: None,
        }
    }
}

/// A group of settings that the daemon reads as one value.
pub(super) trait Table: Sized {
    /// The settings, in the order of their rows.
    fn settings() -> Vec<Setting>;

    /// Reads the values in force.
    fn read(values: Values<'_>) -> Result<Self, ConfigError>;
}

/// A [`Table`] that named tables of the file may override.
pub(super) trait NamedTable: Table {
    /// The table of the file that holds the named tables.
    const NAMED_IN: &'static str;
}

/// Values that hold by default, and those of each named table.
///
/// A named table overrides the keys that it has. The other keys keep the default:
///
/// ```toml
/// [namespace_defaults]
/// block_size = 32
///
/// [namespaces.llama]
/// hashing = "recompute"
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named<T> {
    /// The values without a named table.
    pub default: T,
    /// The values by the name of their table.
    pub overrides: BTreeMap<String, T>,
}

impl<T: Copy> Named<T> {
    /// The values that hold for this name.
    pub fn of(&self, name: &str) -> T {
        self.overrides.get(name).copied().unwrap_or(self.default)
    }
}

impl<T: NamedTable> Table for Named<T> {
    fn settings() -> Vec<Setting> {
        let mut settings = T::settings();
        for setting in &mut settings {
            setting.named_in = Some(T::NAMED_IN);
        }
        settings
    }

    fn read(values: Values<'_>) -> Result<Self, ConfigError> {
        let overrides = values.named(T::NAMED_IN);
        Ok(Named {
            default: T::read(values)?,
            overrides: overrides
                .map(|(name, values)| Ok((name.clone(), T::read(values)?)))
                .collect::<Result<_, ConfigError>>()?,
        })
    }
}

/// Declares tables of settings, each a struct with one field for each row.
///
/// A row is a sentence of help, then `field: Type = default, rule;`. Its key is the section and the field's name;
/// `field as key` gives it another. `flag "word"` at its end adds a shorter flag. A row without a default holds the
/// rows of another [`Table`]. `named in [tables]` lets named tables of the file override the settings: see [`Named`].
macro_rules! tables {
    ($(
        $(#[doc = $about:literal])+
        $visibility:vis $table:ident in [$section:ident] $(named in [$named_in:ident])? {
            $(
                $(#[doc = $help:literal])+
                $field:ident $(as $name:ident)?: $type:ty $(= $default:literal, $rule:expr $(, flag $alias:literal)?)?;
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

        impl Table for $table {
            fn settings() -> Vec<Setting> {
                let mut settings = Vec::new();
                $(
                    settings.extend(tables!(
                        @settings ($section $field $($name)?) $type, concat!($($help),+) $(, $default, $rule $(, $alias)?)?
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
        }

        $(
            impl NamedTable for $table {
                const NAMED_IN: &'static str = stringify!($named_in);
            }
        )?
    )+ };

    (@key ($section:ident $field:ident)) => { concat!(stringify!($section), ".", stringify!($field)) };
    (@key ($section:ident $field:ident $name:ident)) => { concat!(stringify!($section), ".", stringify!($name)) };

    (@settings $key:tt $type:ty, $help:expr) => { <$type as Table>::settings() };
    (@settings $key:tt $type:ty, $help:expr, $default:literal, $rule:expr) => {{
        let rule: Rule<$type> = $rule;
        [Setting::new(tables!(@key $key), rule.kind, $default, $help)]
    }};
    (@settings $key:tt $type:ty, $help:expr, $default:literal, $rule:expr, $alias:literal) => {
        tables!(@settings $key $type, $help, $default, $rule).map(|setting| Setting { alias: Some($alias), ..setting })
    };

    (@read $values:ident $key:tt $type:ty) => { <$type as Table>::read($values) };
    (@read $values:ident $key:tt $type:ty, $rule:expr) => {{
        let rule: Rule<$type> = $rule;
        $values.get(tables!(@key $key), &rule)
    }};
}
pub(super) use tables;

/// Declares the configuration: one table for each section.
macro_rules! configuration {
    ($($section:ident: $type:ty,)+) => {
        /// A configuration in which every value is allowed, alone and beside the others.
        ///
        /// Two are equal when their values are, whatever their origins.
        #[derive(Debug, Clone)]
        pub struct Config {
            $(
                #[doc = concat!("The section `", stringify!($section), "`.")]
                pub $section: $type,
            )+
            /// The values as they were given, for printing.
            pub(super) effective: Effective,
        }

        impl Config {
            /// The settings of every section.
            fn settings() -> Vec<Setting> {
                let mut settings = Vec::new();
                $(settings.extend(<$type as Table>::settings());)+
                settings
            }

            /// Reads the typed values out of the values in force.
            pub(super) fn read(effective: Effective) -> Result<Config, ConfigError> {
                let values = Values::new(&effective);
                Ok(Config {
                    $($section: <$type as Table>::read(values)?,)+
                    effective,
                })
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
