//! Contexts of the `nats` command line. A context is a named set of settings by which a NATS server is reached.
//!
//! A context is a JSON file, `nats/context/NAME.json` in the user's configuration directory. The file
//! `nats/context.txt` names the context that `nats context select` has chosen. Flags and `KVATLAS_NATS_…` variables
//! override a context that was only chosen in this way.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use kvatlas_config::Setting;
use serde_json::Value;

use super::failure::Failure;

/// Maximum number of bytes that are read of a context's file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Environment variable that names the context, as for the `nats` command line.
const NAME_VARIABLE: &str = "NATS_CONTEXT";

/// Supported fields of a context, each with the kvatlas setting of the same meaning. A field for a file holds the
/// file's path.
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
/// Fields that hold a path. In such a path a leading `~` is the user's home.
const PATHS: [&str; 5] = ["creds", "nkey", "ca", "cert", "key"];
/// Fields that kvatlas does not support. A context with such a field is refused, because kvatlas would reach the server
/// in another way than the context says.
const NOT_SUPPORTED: [&str; 4] = ["nsc", "user_jwt", "socks_proxy", "windows_cert_store"];

/// Places and names that decide which context of the `nats` command line is used. They come from the process's
/// environment.
#[derive(Debug, Clone, Default)]
pub(super) struct Surroundings {
    /// The directory `nats` in the user's configuration directory.
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

    /// Returns the places that contexts have for a user with the home directory `home`. No environment variable names a
    /// context.
    #[cfg(test)]
    pub(super) fn in_home(home: &Path) -> Self {
        Self {
            directory: Some(home.join(".config/nats")),
            home: Some(home.to_owned()),
            named: None,
        }
    }

    /// Returns the settings of the context that `flag` names. Without a flag, uses the context that the environment
    /// names, or else the one that `nats context select` has chosen. Returns no settings if there is no such context
    /// name.
    ///
    /// # Errors
    ///
    /// [`Failure`] of wrong usage if the context cannot be used.
    pub(super) fn settings(&self, flag: Option<&str>) -> Result<BTreeMap<String, String>, Failure> {
        let name = match flag.map(str::to_owned).or_else(|| self.named.clone()) {
            Some(name) => name,
            None => match self.chosen() {
                Some(name) => name,
                None => return Ok(BTreeMap::new()),
            },
        };
        self.read(&name)
    }

    /// Returns the name of the context that `nats context select` has chosen.
    fn chosen(&self) -> Option<String> {
        let text = read_bounded(&self.directory.as_ref()?.join("context.txt")).ok()?;
        let name = text.trim();
        (!name.is_empty()).then(|| name.to_owned())
    }

    fn read(&self, name: &str) -> Result<BTreeMap<String, String>, Failure> {
        if name.is_empty() || name.contains(['/', '\\', '\0']) || name.contains("..") {
            return Err(Failure::usage(format_args!(
                "{name:?} is not the name of a context of the nats command line; see: nats context ls"
            )));
        }
        let no_home =
            || Failure::usage("there are no contexts without HOME or XDG_CONFIG_HOME; give --nats-url");
        let directory = self.directory.as_ref().ok_or_else(no_home)?;
        let path = directory.join("context").join(format!("{name}.json"));
        let shown = path.display();
        let text = read_bounded(&path).map_err(|error| {
            Failure::usage(format_args!(
                "the context {name}: cannot read {shown}: {error}; see: nats context ls"
            ))
        })?;
        let context: Value = serde_json::from_str(&text).map_err(|error| {
            Failure::usage(format_args!("the context {name}: {shown} is no context: {error}"))
        })?;
        self.settings_of(name, &context)
    }

    fn settings_of(&self, name: &str, context: &Value) -> Result<BTreeMap<String, String>, Failure> {
        let field = |field: &str| context[field].as_str().filter(|text| !text.is_empty());
        let not_supported = |field: &str| {
            Failure::usage(format_args!(
                "the context {name} has {field}, which kvatlas does not support; give --nats-url and KVATLAS_NATS_… variables"
            ))
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

    /// Makes a home directory with the given contexts. The first of them is the chosen context.
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
        let nowhere = Surroundings::default().settings(Some("site")).unwrap_err();
        assert!(nowhere.to_string().contains("without HOME"), "{nowhere}");
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
        assert!(error("broken").to_string().contains("broken.json is no context"));
        let absent = error("absent").to_string();
        assert!(
            absent.contains("context/absent.json") && absent.contains("nats context ls"),
            "{absent}"
        );
        for name in ["", "../site", "a/b", "a\\b"] {
            let error = error(name).to_string();
            let expected = format!("{name:?} is not the name of a context");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
