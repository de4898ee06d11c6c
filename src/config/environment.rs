//! Reads the values of the environment variables.

use super::declare::{ENVIRONMENT_PREFIX, Setting};
use super::error::{ConfigError, Origin};
use super::layers::Layers;
use super::settings::{CONFIG_VARIABLE, SETTINGS};
use super::suggest;

/// Prefix of the variables that control kvatlas's own tests. Programs that the tests start inherit these variables.
const TEST_PREFIX: &str = "KVATLAS_TEST_";
/// Variable that names the program which the scripts in `deploy` use. Programs that they start inherit it.
const PROGRAM_VARIABLE: &str = "KVATLAS_BIN";

/// Returns the environment variables of this process that begin with [`ENVIRONMENT_PREFIX`].
///
/// Bytes that are not Unicode are replaced by U+FFFD. [`Config::load`](super::Config::load) refuses values with that character.
pub fn process_environment() -> Vec<(String, String)> {
    // `std::env::vars` would panic at a variable that is not Unicode, even one that is not ours.
    std::env::vars_os()
        .map(|(name, value)| {
            (
                name.to_string_lossy().into_owned(),
                value.to_string_lossy().into_owned(),
            )
        })
        .filter(|(name, _)| name.starts_with(ENVIRONMENT_PREFIX))
        .collect()
}

/// Overrides the values in `layers` with those of the environment. Ignores variables of other programs.
pub(super) fn read(environment: impl Iterator<Item = (String, String)>, layers: &mut Layers) {
    let ours =
        environment.filter(|(name, text)| name.starts_with(ENVIRONMENT_PREFIX) && !is_of_others(name, text));
    for (name, text) in ours {
        let Some(setting) = SETTINGS.iter().find(|setting| setting.variable == name) else {
            let allowed = neighbours(&name);
            // The prefix that all have in common would make them alike.
            let bare = |variable: &str| variable.strip_prefix(ENVIRONMENT_PREFIX).map(str::to_owned);
            let variables: Vec<String> = SETTINGS
                .iter()
                .filter_map(|setting| bare(&setting.variable))
                .collect();
            let meant = bare(&name)
                .and_then(|bare| suggest::meant(&bare, variables.iter().map(String::as_str)))
                .map(|meant| format!("{ENVIRONMENT_PREFIX}{meant}"));
            layers.errors.push(ConfigError::Unknown {
                origin: Origin::Environment(name),
                allowed,
                meant,
            });
            continue;
        };
        let origin = Origin::Environment(name);
        if text.contains(char::REPLACEMENT_CHARACTER) {
            layers.give(setting, None, || "not UTF-8".into(), origin);
        } else {
            layers.give_text(setting, &text, origin);
        }
    }
}

/// Whether a variable of the value `text` has the settings' prefix but is for another purpose.
///
/// Kubernetes gives every container variables about the services of its namespace. The daemon must start even if a
/// service is named `kvatlas` or `kvatlas-admin`. The value of `KVATLAS_PORT` is a URL then, such as
/// `tcp://10.0.0.1:9464`.
fn is_of_others(name: &str, text: &str) -> bool {
    let is_service_url = ["tcp://", "udp://", "sctp://"]
        .iter()
        .any(|scheme| text.starts_with(scheme));
    let is_service_port = name.contains("_PORT_")
        && ["_TCP", "_UDP", "_SCTP", "_ADDR", "_PORT", "_PROTO"]
            .iter()
            .any(|end| name.ends_with(end));
    name == CONFIG_VARIABLE
        || name == PROGRAM_VARIABLE
        || name.starts_with(TEST_PREFIX)
        || name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.ends_with("_PORT") && is_service_url)
        || is_service_port
}

/// Finds the section whose prefix `name` begins with, and returns the names of the section's variables, joined by
/// commas. If there is no such section, returns the prefixes of all sections.
fn neighbours(name: &str) -> String {
    let section = |setting: &Setting| setting.variable.len() - setting.name().len();
    let near: Vec<_> = SETTINGS
        .iter()
        .filter(|setting| {
            setting
                .variable
                .get(..section(setting))
                .is_some_and(|begin| name.starts_with(begin))
        })
        .map(|setting| setting.variable.as_str())
        .collect();
    if near.is_empty() {
        let mut beginnings: Vec<_> = SETTINGS
            .iter()
            .filter_map(|setting| Some(format!("{}...", setting.variable.get(..section(setting))?)))
            .collect();
        beginnings.dedup();
        return beginnings.join(", ");
    }
    near.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_setting_is_taken_for_a_variable_of_others() {
        for setting in SETTINGS.iter() {
            for text in ["x", "tcp://10.0.0.1:9464"] {
                assert!(!is_of_others(&setting.variable, text), "{}", setting.variable);
            }
        }
    }

    #[test]
    fn variables_of_services_are_passed_over() {
        let names = [
            "KVATLAS_SERVICE_HOST",
            "KVATLAS_SERVICE_PORT",
            "KVATLAS_SERVICE_PORT_METRICS",
            "KVATLAS_PORT",
            "KVATLAS_PORT_9464_TCP",
            "KVATLAS_PORT_9464_TCP_ADDR",
            "KVATLAS_ADMIN_SERVICE_HOST",
            "KVATLAS_CONFIG",
            "KVATLAS_BIN",
            "KVATLAS_TEST_OLD_NATS_SERVER",
            "PATH",
        ];
        let mut layers = Layers::new();
        read(
            names
                .iter()
                .map(|name| (name.to_string(), "tcp://10.0.0.1:9464".to_string())),
            &mut layers,
        );
        assert_eq!(layers.errors, []);
    }

    #[test]
    fn a_port_that_is_no_services_is_unknown() {
        for name in ["KVATLAS_ADMIN_PORT", "KVATLAS_ADMIN_LISTEN_PORT", "KVATLAS_PORT"] {
            let mut layers = Layers::new();
            read(
                std::iter::once((name.to_string(), "9464".to_string())),
                &mut layers,
            );
            assert_eq!(layers.errors.len(), 1, "{name}");
        }
    }

    #[test]
    fn an_unknown_variable_is_answered_with_its_neighbours() {
        assert_eq!(
            neighbours("KVATLAS_LOGGING_LEVLE"),
            "KVATLAS_LOGGING_FORMAT, KVATLAS_LOGGING_LEVEL"
        );
        assert!(neighbours("KVATLAS_X").starts_with("KVATLAS_NATS_..., KVATLAS_SUBJECTS_..."));
    }

    #[test]
    fn a_replaced_byte_is_refused() {
        let mut layers = Layers::new();
        let variable = ("KVATLAS_NATS_USER".to_string(), "m\u{fffd}".to_string());
        read(std::iter::once(variable), &mut layers);
        assert_eq!(layers.errors.len(), 1);
    }
}
