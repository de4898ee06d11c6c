//! Mistakes in a configuration, and their origins.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Source from which a value came. The variants are sorted by strength: a value of a later variant overrides one of an earlier
/// variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The default in the declaration of the setting.
    Default,
    /// The configuration file sets the value.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Dotted key of the setting.
        key: String,
    },
    /// An environment variable, by its name.
    Environment(String),
    /// A flag, by its name without the dashes. If the flag has a short name too, that name follows in brackets.
    Flag(String),
}

impl Origin {
    /// Makes the origin of a setting in a file, or of a part of a setting.
    pub(super) fn file(path: &Path, line: usize, key: impl Into<String>) -> Origin {
        Origin::File {
            path: path.to_owned(),
            line,
            key: key.into(),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => formatter.write_str("the default"),
            Origin::File { path, line, key } => {
                // Debug formatting keeps a strange path from breaking out of its line.
                write!(formatter, "file {path:?} line {line}, key {}", key.escape_debug())
            }
            Origin::Environment(name) => write!(formatter, "environment {}", name.escape_debug()),
            Origin::Flag(name) => write!(formatter, "flag --{}", name.escape_debug()),
        }
    }
}

/// One mistake in a configuration. No message holds a secret.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("file {path:?}: cannot be read ({reason}); name a readable file of UTF-8 text")]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        reason: String,
    },
    /// The file is not TOML.
    #[error("file {path:?} line {line}: not valid TOML: {reason}")]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The parser's message.
        reason: String,
    },
    /// A key, variable or flag that names no setting.
    #[error("{origin}: there is no such setting;{} allowed here: {allowed}", guess(meant.as_deref()))]
    Unknown {
        /// Origin of the unknown name.
        origin: Origin,
        /// Names that are allowed in place of the unknown name.
        allowed: String,
        /// Name that the user probably wanted to write; `None` if no allowed name is similar enough.
        meant: Option<String>,
    },
    /// A value of the wrong type or out of range.
    #[error("{origin}: must be {allowed}; it is {found}")]
    Value {
        /// Origin of the value.
        origin: Origin,
        /// Allowed values, in words.
        allowed: String,
        /// Description of the value. Secrets are hidden.
        found: String,
    },
    /// A value that is allowed by itself, but not together with the value of another setting.
    #[error("{origin}: {rule}")]
    Combination {
        /// Origin of the value.
        origin: Origin,
        /// The broken rule, and the way to comply with it.
        rule: String,
    },
    /// A defect of kvatlas itself: the code reads a setting that is not declared, or the bounds of a setting exceed its type.
    #[error("setting {key}: the table of settings and the loader disagree; please report this")]
    Table {
        /// Dotted key of the setting.
        key: &'static str,
    },
}

/// Returns the part of an error message that suggests the name `meant`. Empty if `meant` is `None`.
fn guess(meant: Option<&str>) -> String {
    meant.map_or_else(String::new, |meant| format!(" did you mean {meant}?"))
}

impl ConfigError {
    pub(super) fn value(origin: Origin, allowed: String, found: String) -> ConfigError {
        ConfigError::Value {
            origin,
            allowed,
            found,
        }
    }

    /// Returns the number of the file's line that has the mistake, from 1. `None` if the mistake is not in a line of the file.
    pub fn line(&self) -> Option<usize> {
        match self {
            ConfigError::Syntax { line, .. } => Some(*line),
            ConfigError::Unknown { origin, .. }
            | ConfigError::Value { origin, .. }
            | ConfigError::Combination { origin, .. } => match origin {
                Origin::File { line, .. } => Some(*line),
                Origin::Default | Origin::Environment(_) | Origin::Flag(_) => None,
            },
            ConfigError::Unreadable { .. } | ConfigError::Table { .. } => None,
        }
    }

    pub(super) fn combination(origin: &Origin, rule: impl Into<String>) -> ConfigError {
        ConfigError::Combination {
            origin: origin.clone(),
            rule: rule.into(),
        }
    }
}

/// All mistakes in a configuration; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(Vec<ConfigError>);

impl ConfigErrors {
    /// Returns `Err` if there are any errors.
    pub(super) fn check(errors: Vec<ConfigError>) -> Result<(), ConfigErrors> {
        if errors.is_empty() {
            Ok(())
        } else {
            Err(ConfigErrors(errors))
        }
    }

    /// Returns the errors. Errors of the file come first, sorted by line. Then come errors of the environment, of the
    /// flags, and of combinations.
    pub fn as_slice(&self) -> &[ConfigError] {
        &self.0
    }
}

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> ConfigErrors {
        ConfigErrors(vec![error])
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "" } else { "s" };
        write!(formatter, "{} error{plural} in the configuration:", self.0.len())?;
        for error in &self.0 {
            write!(formatter, "\n  - {error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}
