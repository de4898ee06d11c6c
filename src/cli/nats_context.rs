//! The contexts of the `nats` command line: how to reach a server, under a name.
//!
//! A context is a JSON file, `nats/context/NAME.json` in the user's configuration directory; `nats/context.txt` has the name of the one
//! that `nats context select` has chosen. What is given to us by flag or by a `KVATLAS_NATS_…` variable goes over the chosen one.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use kvatlas_config::Setting;
use serde_json::Value;

/// Largest file of a context.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Names a context, as for the `nats` command line.
const NAME_VARIABLE: &str = "NATS_CONTEXT";

/// The fields of a context, and the settings that mean the same. Files are named by their paths.
const FIELDS: [(&str, &str); 10] = [
    ("url", "nats.url"),
    ("token", "nats.token"),
    ("user", "nats.user"),
    ("password", "nats.password"),
    ("creds", "nats.credentials_file"),
    ("nkey", "nats.nkey_seed_file"),
    ("ca", "nats.tls_ca_file"),
    ("cert", "nats.tls_cert_file"),
    ("key", "nats.tls_key_file"),
    ("inbox_prefix", "nats.inbox_prefix"),
];
/// Fields of which a path begins with `~` for the user's home.
const PATHS: [&str; 5] = ["creds", "nkey", "ca", "cert", "key"];
/// Fields without which the server is not reached as the context says.
const NOT_SUPPORTED: [&str; 4] = ["nsc", "user_jwt", "socks_proxy", "windows_cert_store"];

/// Why a context cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ContextError {
    /// The name is none of a file.
    #[error("{0:?} is not the name of a context of the nats command line; see: nats context ls")]
    Name(String),
    /// There is no directory of contexts.
    #[error("there are no contexts without HOME or XDG_CONFIG_HOME; give --nats-url")]
    NoHome,
    /// The file cannot be read.
    #[error("the context {name}: cannot read {path}: {reason}; see: nats context ls")]
    Read {
        /// The context.
        name: String,
        /// Its file.
        path: String,
        /// The system's words.
        reason: String,
    },
    /// The file is no context.
    #[error("the context {name}: {path} is no context: {reason}")]
    Form {
        /// The context.
        name: String,
        /// Its file.
        path: String,
        /// The reason, in words.
        reason: String,
    },
    /// The context says something that we cannot do.
    #[error(
        "the context {name} has {field}, which kvatlas does not support; give --nats-url and KVATLAS_NATS_… variables"
    )]
    NotSupported {
        /// The context.
        name: String,
        /// Its field.
        field: String,
    },
}

/// The places of contexts, and which one is named, of this process's environment.
#[derive(Debug, Clone, Default)]
pub(super) struct Surroundings {
    /// `nats` in the user's configuration directory.
    directory: Option<PathBuf>,
    home: Option<PathBuf>,
    named: Option<String>,
}

impl Surroundings {
    pub(super) fn of_process() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let configuration = variable("XDG_CONFIG_HOME").map(PathBuf::from);
        let configuration = configuration.or_else(|| Some(home.as_ref()?.join(".config")));
        Self {
            directory: configuration.map(|directory| directory.join("nats")),
            home,
            named: variable(NAME_VARIABLE).map(|name| name.to_string_lossy().into_owned()),
        }
    }

    /// The surroundings of a user whose home is this, and who names no context.
    #[cfg(test)]
    pub(super) fn in_home(home: &Path) -> Self {
        Self {
            directory: Some(home.join(".config/nats")),
            home: Some(home.to_owned()),
            named: None,
        }
    }

    /// The settings of the context that is named by flag, or else of that of the environment or the chosen one. None where there is none.
    ///
    /// # Errors
    ///
    /// [`ContextError`].
    pub(super) fn settings(&self, flag: Option<&str>) -> Result<BTreeMap<String, String>, ContextError> {
        let name = match flag.map(str::to_owned).or_else(|| self.named.clone()) {
            Some(name) => name,
            None => match self.chosen() {
                Some(name) => name,
                None => return Ok(BTreeMap::new()),
            },
        };
        self.read(&name)
    }

    /// The name that `nats context select` has written.
    fn chosen(&self) -> Option<String> {
        let text = read_bounded(&self.directory.as_ref()?.join("context.txt")).ok()?;
        let name = text.trim();
        (!name.is_empty()).then(|| name.to_owned())
    }

    fn read(&self, name: &str) -> Result<BTreeMap<String, String>, ContextError> {
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name.contains("..") {
            return Err(ContextError::Name(name.to_owned()));
        }
        let directory = self.directory.as_ref().ok_or(ContextError::NoHome)?;
        let path = directory.join("context").join(format!("{name}.json"));
        let text = read_bounded(&path).map_err(|error| ContextError::Read {
            name: name.to_owned(),
            path: path.display().to_string(),
            reason: error.to_string(),
        })?;
        let context: Value = serde_json::from_str(&text).map_err(|error| ContextError::Form {
            name: name.to_owned(),
            path: path.display().to_string(),
            reason: error.to_string(),
        })?;
        self.settings_of(name, &context)
    }

    fn settings_of(&self, name: &str, context: &Value) -> Result<BTreeMap<String, String>, ContextError> {
        let field = |field: &str| context[field].as_str().filter(|text| !text.is_empty());
        let not_supported = |field: &str| ContextError::NotSupported {
            name: name.to_owned(),
            field: field.to_owned(),
        };
        if let Some(found) = NOT_SUPPORTED.into_iter().find(|name| field(name).is_some()) {
            return Err(not_supported(found));
        }
        let mut settings = BTreeMap::new();
        for (known, key) in FIELDS {
            let Some(text) = field(known) else { continue };
            if Setting::find(key).is_none() {
                return Err(not_supported(known));
            }
            let text = match PATHS.contains(&known) {
                true => self.at_home(text),
                false => text.to_owned(),
            };
            settings.insert(key.to_owned(), text);
        }
        if context["tls_first"].as_bool().unwrap_or_default() {
            settings.insert("nats.tls_first".to_owned(), "true".to_owned());
        }
        Ok(settings)
    }

    fn at_home(&self, path: &str) -> String {
        let below = path.strip_prefix('~').zip(self.home.as_ref());
        match below {
            Some((below, home)) if below.is_empty() || below.starts_with('/') => {
                format!("{}{below}", home.display())
            }
            _ => path.to_owned(),
        }
    }
}

fn read_bounded(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A home with the contexts that are given, the first of which is chosen.
    fn home(contexts: &[(&str, &str)]) -> (tempfile::TempDir, Surroundings) {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join(".config/nats");
        std::fs::create_dir_all(directory.join("context")).unwrap();
        for (name, text) in contexts {
            std::fs::write(directory.join("context").join(format!("{name}.json")), text).unwrap();
        }
        if let Some((name, _)) = contexts.first() {
            std::fs::write(directory.join("context.txt"), format!("{name}\n")).unwrap();
        }
        let surroundings = Surroundings::in_home(home.path());
        (home, surroundings)
    }

    const SITE: &str = r#"{"description":"the site","url":"nats://one:4222,nats://two:4222","token":"","user":"","password":"",
        "creds":"~/site.creds","nkey":"","cert":"","key":"","ca":"/etc/ca.pem","nsc":"","jetstream_domain":"",
        "jetstream_api_prefix":"","jetstream_event_prefix":"","inbox_prefix":"_INBOX_ME","user_jwt":"","color_scheme":""}"#;

    #[test]
    fn the_chosen_context_is_read_unless_another_is_named() {
        let other = r#"{"url":"nats://other:4222","user":"me","password":"secret","tls_first":true}"#;
        let (home, mut surroundings) = home(&[("site", SITE), ("other", other)]);
        let site = surroundings.settings(None).unwrap();
        let creds = home.path().join("site.creds").display().to_string();
        let expected = [
            ("nats.credentials_file", creds.as_str()),
            ("nats.inbox_prefix", "_INBOX_ME"),
            ("nats.tls_ca_file", "/etc/ca.pem"),
            ("nats.url", "nats://one:4222,nats://two:4222"),
        ];
        let plain: Vec<_> = site
            .iter()
            .map(|(key, text)| (key.as_str(), text.as_str()))
            .collect();
        assert_eq!(plain, expected);
        let named = surroundings.settings(Some("other")).unwrap();
        assert_eq!(named["nats.user"], "me");
        assert_eq!(named["nats.tls_first"], "true");
        surroundings.named = Some("other".to_owned());
        assert_eq!(surroundings.settings(None).unwrap(), named);
        assert_eq!(surroundings.settings(Some("site")).unwrap(), site);
    }

    #[test]
    fn nothing_is_chosen_where_there_is_nothing() {
        let (_home, surroundings) = home(&[]);
        assert_eq!(surroundings.settings(None), Ok(BTreeMap::new()));
        assert_eq!(Surroundings::default().settings(None), Ok(BTreeMap::new()));
        let nowhere = Surroundings::default().settings(Some("site"));
        assert_eq!(nowhere, Err(ContextError::NoHome));
    }

    #[test]
    fn what_cannot_be_used_is_said() {
        let (_home, surroundings) = home(&[
            ("nsc", r#"{"url":"nats://a","nsc":"nsc://operator/account/user"}"#),
            ("broken", "{"),
        ]);
        let error = |name| surroundings.settings(Some(name)).unwrap_err();
        assert!(
            error("nsc")
                .to_string()
                .contains("nsc, which kvatlas does not support")
        );
        assert!(matches!(error("broken"), ContextError::Form { .. }));
        let absent = error("absent").to_string();
        assert!(
            absent.contains("context/absent.json") && absent.contains("nats context ls"),
            "{absent}"
        );
        for name in ["", "../site", "a/b", "a\\b"] {
            assert_eq!(error(name), ContextError::Name(name.to_owned()));
        }
    }
}
