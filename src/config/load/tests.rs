mod refused;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use tempfile::NamedTempFile;

use super::*;
use crate::kind::Kind;
use crate::{Authentication, NamespaceConfig};
use kvatlas_core::index::Hashing;

/// A valid file that uses every type of value and every section.
const EXAMPLE: &str = r#"
[nats]
url = "nats://10.0.0.1:4222, tls://nats.example:4222"
user = "mapper"
password = "hunter2"
tls_required = true
[subjects]
prefix = "prod.kvatlas"
[events]
lanes = 4
lane_queue_bytes = "128 MiB"
max_message_bytes = 2_097_152
parked_ttl_ms = 500
[queries]
connections = 2
[limits]
max_namespaces = 2
[namespace_defaults]
block_size = 32
[namespaces.llama]
hashing = "recompute"
[namespaces.qwen]
block_size = 64
[snapshots]
directory = "/var/lib/kvatlas \"quoted\""
[admin]
listen = "[::1]:0"
[logging]
format = "json"
level = "warn,kvatlas=debug"
[shutdown]
drain_seconds = 3
"#;

fn file(text: impl AsRef<[u8]>) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_ref()).unwrap();
    file
}

fn load(flags: &[(&str, &str)], environment: &[(&str, &str)], text: &str) -> Result<Config, ConfigErrors> {
    let own = |(name, text): &(&str, &str)| (name.to_string(), text.to_string());
    let file = file(text);
    Config::load(
        flags.iter().map(own).collect(),
        environment.iter().map(own),
        Some(file.path()),
    )
}

/// Loads a configuration that must be refused, and returns the errors.
fn refuse(flags: &[(&str, &str)], environment: &[(&str, &str)], text: &str) -> Vec<ConfigError> {
    load(flags, environment, text).unwrap_err().as_slice().to_vec()
}

/// Name of the key, the variable or the flag with the mistake. Empty for a mistake of the file as a whole.
fn place(error: &ConfigError) -> &str {
    match error {
        ConfigError::Unknown { origin, .. }
        | ConfigError::Value { origin, .. }
        | ConfigError::Combination { origin, .. } => match origin {
            Origin::Default => "default",
            Origin::File { key, .. } => key,
            // Behind a flag's name, there may be a short name in brackets.
            Origin::Environment(name) | Origin::Flag(name) => name.split(' ').next().unwrap_or_default(),
        },
        ConfigError::Unreadable { .. } | ConfigError::Syntax { .. } | ConfigError::Table { .. } => "",
    }
}

#[track_caller]
fn assert_one(errors: &[ConfigError], name: &str, is_meant: impl Fn(&ConfigError) -> bool) {
    let hits = errors
        .iter()
        .filter(|error| place(error) == name && is_meant(error));
    assert_eq!(hits.count(), 1, "{name} in {errors:#?}");
}

/// Requires one error about the value of `name`, with these parts of the words for the allowed values and for the value.
#[track_caller]
fn assert_value(errors: &[ConfigError], name: &str, expected: &str, value: &str) {
    assert_one(
        errors,
        name,
        |error| matches!(error, ConfigError::Value { allowed, found, .. } if allowed.contains(expected) && found.contains(value)),
    );
}

/// Requires one error about the unknown name `name`, with this part of the allowed names, and with this guess.
#[track_caller]
fn assert_unknown(errors: &[ConfigError], name: &str, expected: &str, guess: Option<&str>) {
    assert_one(
        errors,
        name,
        |error| matches!(error, ConfigError::Unknown { allowed, meant, .. } if allowed.contains(expected) && meant.as_deref() == guess),
    );
}

/// Requires one error about the combination of `name` with other settings, with this part of the broken rule.
#[track_caller]
fn assert_combination(errors: &[ConfigError], name: &str, expected: &str) {
    assert_one(
        errors,
        name,
        |error| matches!(error, ConfigError::Combination { rule, .. } if rule.contains(expected)),
    );
}

#[test]
fn every_default_loads() {
    let config = Config::load(BTreeMap::new(), std::iter::empty(), None).unwrap();
    assert_eq!(config.nats.urls, ["nats://127.0.0.1:4222".parse().unwrap()]);
    assert_eq!(**config.nats.authentication.now(), Authentication::Anonymous);
    assert_eq!(config.events.lane_queue_bytes, 64 << 20);
    assert_eq!(config.events.parked_ttl, Duration::from_secs(30));
    assert_eq!(config.limits.max_blocks_per_holder, 16_777_216);
    assert_eq!(
        config.namespaces.of("any"),
        NamespaceConfig {
            block_size: 16,
            hashing: Hashing::Engine,
            stale_after: Some(Duration::from_secs(3)),
            remove_after: Some(Duration::from_secs(600)),
        }
    );
    assert_eq!(config.snapshots.directory, None);
    assert_eq!(
        config.admin.listen,
        Some(SocketAddr::from(([127, 0, 0, 1], 9464)))
    );
    assert_eq!(config.logging.level, "info");
}

#[test]
fn the_bounds_of_every_setting_fit_its_type() {
    for setting in SETTINGS.iter() {
        let (Kind::Integer { minimum, maximum } | Kind::Bytes { minimum, maximum }) = setting.kind else {
            continue;
        };
        for bound in [minimum, maximum] {
            let mut layers = Layers::new();
            let origin = Origin::Flag(setting.flag_names());
            layers.give_text(setting, &bound.to_string(), origin);
            assert_eq!(layers.errors, [], "{}", setting.key);
            assert!(Config::read(layers.effective).is_ok(), "{}", setting.key);
        }
    }
}

#[test]
fn a_gateway_has_neither_a_shard_nor_snapshots() {
    let config = load(
        &[("sharding.shard", "1/3"), ("gateway.deadline_ms", "7")],
        &[],
        "",
    )
    .unwrap();
    assert_eq!(config.sharding.shard, kvatlas_core::wire::Shard::new(1, 3));
    assert_eq!(
        (config.gateway.enabled, config.gateway.deadline),
        (false, Duration::from_millis(7))
    );
    for other in [
        ("sharding.shard", "1/3"),
        ("snapshots.directory", "/var/lib/kvatlas"),
        ("grpc.writing", "open"),
    ] {
        let errors = refuse(&[("gateway.enabled", "true"), other], &[], "");
        let flag = other.0.replace(['.', '_'], "-");
        assert_combination(&errors, &flag, "it has no index; give one of the two");
    }
    assert!(load(&[("sharding.shard", "3/3")], &[], "").is_err());
    let grpc = ("grpc.listen", "127.0.0.1:50051");
    let errors = refuse(&[grpc, ("gateway.enabled", "true")], &[], "");
    assert_combination(&errors, "grpc-listen", "needs grpc.namespace");
    for router in [
        grpc,
        ("redis.listen", "127.0.0.1:6379"),
        ("dynamo.components", "dynamo.backend"),
    ] {
        let errors = refuse(&[router, ("sharding.shard", "0/2")], &[], "");
        assert_combination(&errors, &router.0.replace('.', "-"), "is not for a shard");
        if router != grpc {
            load(&[router, ("gateway.enabled", "true")], &[], "").unwrap();
        }
    }
}

#[test]
fn two_listeners_have_two_addresses() {
    let listen = |address| load(&[("http.listen", address), ("admin.listen", address)], &[], "");
    let errors = listen("127.0.0.1:9000").unwrap_err();
    assert_combination(errors.as_slice(), "http-listen", "are one address");
    assert!(listen("127.0.0.1:0").is_ok() && listen("off").is_ok());
    let default = load(&[("http.listen", "127.0.0.1:9464")], &[], "");
    assert!(default.is_err(), "admin.listen is there by default");
}

#[test]
fn a_holder_is_stale_before_it_is_removed() {
    let both = "[namespace_defaults]\nstale_after_ms = 5000\nremove_after_ms = 5000\n";
    assert!(load(&[], &[], both).is_err());
    let never_removed = "[namespace_defaults]\nstale_after_ms = 5000\nremove_after_ms = 0\n";
    let config = load(&[], &[], never_removed).unwrap();
    assert_eq!(
        config.namespaces.of("any").stale_after,
        Some(Duration::from_secs(5))
    );
    assert_eq!(config.namespaces.of("any").remove_after, None);
    let of_one = "[namespaces.llama]\nstale_after_ms = 1000\nremove_after_ms = 2000\n";
    let config = load(&[], &[], of_one).unwrap();
    assert_eq!(
        config.namespaces.of("llama").remove_after,
        Some(Duration::from_secs(2))
    );
    let against_the_default = "[namespaces.llama]\nremove_after_ms = 2000\n";
    assert!(load(&[], &[], against_the_default).is_err());
}

#[test]
fn the_pauses_of_a_resync_are_ordered() {
    let wrong = "[resync]\nretry_min_ms = 500\nretry_max_ms = 499\n";
    assert!(load(&[], &[], wrong).is_err());
}

#[test]
fn the_file_is_read() {
    let config = load(&[], &[], EXAMPLE).unwrap();
    assert_eq!(config.nats.urls.len(), 2);
    assert!(matches!(&**config.nats.authentication.now(),
        Authentication::UserPassword { user, password } if user == "mapper" && password.expose() == "hunter2"));
    assert_eq!(config.events.max_message_bytes, 2 << 20);
    assert_eq!(
        config.namespaces.of("llama"),
        NamespaceConfig {
            block_size: 32,
            hashing: Hashing::Recompute,
            stale_after: Some(Duration::from_secs(3)),
            remove_after: Some(Duration::from_secs(600)),
        }
    );
    assert_eq!(
        config.namespaces.of("qwen"),
        NamespaceConfig {
            block_size: 64,
            hashing: Hashing::Engine,
            stale_after: Some(Duration::from_secs(3)),
            remove_after: Some(Duration::from_secs(600)),
        }
    );
    assert_eq!(
        config.snapshots.directory,
        Some(PathBuf::from("/var/lib/kvatlas \"quoted\""))
    );
    assert_eq!(config.shutdown.drain, Duration::from_secs(3));
}

#[test]
fn flags_cover_environment_covers_file_covers_default() {
    let text = "[snapshots]\nkeep = 5\ninterval_seconds = 5\n[events]\nlanes = 5\n";
    let variables = [
        ("KVATLAS_SNAPSHOTS_KEEP", "6"),
        ("KVATLAS_SNAPSHOTS_INTERVAL_SECONDS", "6"),
        ("PATH", "/bin"),
    ];
    let config = load(&[("snapshots.keep", "7")], &variables, text).unwrap();
    assert_eq!(config.snapshots.keep, 7);
    assert_eq!(config.snapshots.interval, Duration::from_secs(6));
    assert_eq!(config.events.lanes, 5);
    assert_eq!(config.shutdown.drain, Duration::from_secs(10));
    let printed = config.to_toml();
    for line in [
        "From flag --snapshots-keep.",
        "From environment KVATLAS_SNAPSHOTS_INTERVAL_SECONDS.",
    ] {
        assert!(printed.contains(line), "{printed}");
    }
    assert!(
        printed.contains("line 5, key events.lanes.") && printed.contains("From the default."),
        "{printed}"
    );
}

#[test]
fn combinations_are_checked() {
    let token = ("nats.token", "hunter2");
    let errors = refuse(&[("nats.user", "u"), ("nats.password", "p"), token], &[], "");
    let rule = "a second way to authenticate to NATS, beside flag --nats-token";
    assert_combination(&errors, "nats-user", rule);
    // Any file that exists.
    let seed = ("nats.nkey_seed_file", "Cargo.toml");
    let errors = refuse(&[seed, token], &[], "");
    assert_combination(&errors, "nats-token", "a second way to authenticate");
    let errors = refuse(&[("nats.tls_cert_file", "Cargo.toml")], &[], "");
    assert_combination(
        &errors,
        "nats-tls-cert-file",
        "nats.tls_cert_file needs nats.tls_key_file",
    );
    let errors = refuse(&[("nats.tls_key_file", "Cargo.toml")], &[], "");
    assert_combination(
        &errors,
        "nats-tls-key-file",
        "nats.tls_key_file needs nats.tls_cert_file",
    );

    let errors = refuse(
        &[("nats.embedded", "true")],
        &[],
        "[nats]\nurl = \"nats://a\"\ntls_required = true",
    );
    for key in ["nats.url", "nats.tls_required"] {
        let rule = "is not for the embedded NATS server that flag --nats-embedded (--embedded)";
        assert_combination(&errors, key, rule);
    }
    assert!(load(&[("nats.embedded", "false")], &[], "[nats]\nurl = \"nats://a\"").is_ok());

    let errors = refuse(&[("events.lane_queue_bytes", "64 KiB")], &[], "");
    assert_combination(
        &errors,
        "events-lane-queue-bytes",
        "at least events.max_message_bytes",
    );

    for (key, value, rule) in [
        (
            "http.max_body_bytes",
            "33 MiB",
            "http.max_receiving_bytes must be at least twice",
        ),
        (
            "grpc.max_message_bytes",
            "33 MiB",
            "grpc.max_receiving_bytes must be at least twice",
        ),
    ] {
        let errors = refuse(&[(key, value)], &[], "");
        assert_combination(&errors, &key.replace(['.', '_'], "-"), rule);
    }
    let small = [
        ("redis.max_receiving_bytes", "1 MiB"),
        ("redis.max_command_bytes", "8 MiB"),
    ];
    let errors = refuse(&small, &[], "");
    let rule = "redis.max_receiving_bytes must be at least redis.max_command_bytes";
    assert_combination(&errors, "redis-max-receiving-bytes", rule);

    let errors = refuse(&[("grpc.writing", "token")], &[], "");
    for needed in ["grpc.namespace", "grpc.writing_token_file"] {
        assert_combination(&errors, "grpc-writing", &format!("grpc.writing needs {needed}"));
    }
    let reported = [("grpc.namespace", "m"), ("grpc.writing", "open")];
    assert!(load(&reported, &[], "").is_ok());

    let errors = refuse(&[("snapshots.object_store", "warm")], &[], "");
    assert_combination(&errors, "snapshots-object-store", "needs snapshots.directory");

    let errors = refuse(
        &[("limits.max_namespaces", "2"), ("limits.max_name_bytes", "16")],
        &[],
        &format!("{EXAMPLE}[namespaces.a-name-of-17-byte]\n"),
    );
    assert_combination(&errors, "namespaces.qwen", "3 namespaces are configured");
    assert_combination(
        &errors,
        "namespaces.a-name-of-17-byte",
        "the name is longer than limits.max_name_bytes",
    );
}

#[test]
fn one_mistake_is_not_reported_twice() {
    let errors = refuse(
        &[("events.lane_queue_bytes", "1")],
        &[("KVATLAS_EVENTS_LANE_QUEUE_BYTES", "64 KiB")],
        "",
    );
    assert_eq!(errors.len(), 1, "{errors:#?}");
    let long = format!("[namespaces.{}]", "a".repeat(65));
    assert_eq!(refuse(&[], &[], &long).len(), 1);
}

#[test]
fn an_unknown_flag_is_an_error() {
    let errors = refuse(&[("nats.urls", "x")], &[], "");
    assert_unknown(&errors, "nats.urls", "nats.url", Some("nats.url"));
}

#[test]
fn what_is_printed_loads_back() {
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[], ""),
        (&[("events.lanes", "9"), ("admin.listen", "off")], EXAMPLE),
        (
            &[("nats.embedded", "true"), ("nats.server_binary", "Cargo.toml")],
            "[namespaces.a-B_9]",
        ),
    ];
    for (flags, text) in cases {
        let config = load(flags, &[], text).unwrap();
        let printed = config.to_toml();
        let secrets: &[_] = if text == EXAMPLE {
            &[("KVATLAS_NATS_PASSWORD", "hunter2")]
        } else {
            &[]
        };
        let again = load(&[], secrets, &printed).unwrap();
        assert_eq!(again, config, "{printed}");
        assert_ne!(load(&[], &[], "[events]\nlanes = 1").unwrap(), config);
        for setting in SETTINGS.iter() {
            assert!(
                printed.contains(&format!("{} = ", setting.name())),
                "{}",
                setting.key
            );
        }
    }
}

#[test]
fn no_secret_is_shown() {
    let config = load(&[("nats.user", "u"), ("nats.password", "hunter2")], &[], "").unwrap();
    for shown in [format!("{config:?}"), config.to_toml()] {
        assert!(shown.contains("***") && !shown.contains("hunter2"), "{shown}");
    }
    for text in [
        "[nats]\npassword = \"hunter2",
        "[nats]\npassword = [\"hunter2\"]",
        "[nats]\ntoken = hunter2",
        "[nats]\ntoken = \"hunter2\" \"hunter2\"",
        "[nats]\ntoken = \"hunter2\"\nurl = \"nats://u:hunter2@host\"\nuser = 1",
    ] {
        let told = load(&[], &[], text).unwrap_err().to_string();
        assert!(!told.contains("hunter2"), "{told}");
    }
    let numbers = "[nats]\npassword = 271828\ntoken = 31415.9";
    let told = load(&[], &[], numbers).unwrap_err().to_string();
    assert!(!told.contains("271828") && !told.contains("31415"), "{told}");
}

#[test]
fn a_reload_takes_live_settings_and_no_others() {
    let (begun, again) = (load(&[], &[], "").unwrap(), load(&[], &[], EXAMPLE).unwrap());
    let mut expected = begun.clone();
    expected
        .nats
        .authentication
        .clone_from(&again.nats.authentication);
    expected.events.max_message_bytes = 2_097_152;
    expected.logging.level.clone_from(&again.logging.level);
    assert!(expected != begun && expected != again);
    assert_eq!(begun.with_live(&again), expected);
    // The call of `with_live` has not changed `begun`.
    assert_eq!(begun, load(&[], &[], "").unwrap());
}

#[test]
fn the_page_about_reloading_names_every_live_setting() {
    let page = include_str!("../../../deploy/operating.md");
    let (_, reloading) = page.split_once("\n## Reloading\n").unwrap();
    let (reloading, _) = reloading.split_once("\n## ").unwrap();
    let (live, others): (Vec<_>, Vec<_>) = SETTINGS.iter().partition(|setting| setting.is_live);
    assert!(!live.is_empty());
    let is_named = |setting: &&Setting| reloading.contains(&format!("`{}`", setting.key));
    for setting in live {
        assert!(is_named(&setting), "{}", setting.key);
    }
    let table = reloading.lines().filter(|line| line.starts_with("| `"));
    let table: String = table.collect();
    let named = others
        .iter()
        .find(|setting| table.contains(&format!("`{}`", setting.key)));
    assert!(named.is_none(), "{named:?}");
}

#[test]
fn automatic_lanes_are_half_the_cores() {
    let mut events = load(&[], &[], "").unwrap().events;
    assert_eq!(
        [0, 1, 2, 9, 4096].map(|cores| events.lane_count(cores)),
        [1, 1, 1, 4, 256]
    );
    events.lanes = 3;
    assert_eq!(events.lane_count(64), 3);
}

proptest! {
    #[test]
    fn a_mutated_file_never_panics(
        edits in prop::collection::vec((0..EXAMPLE.len(), 0..3_u8, any::<u8>()), 1..12),
    ) {
        let mut bytes = EXAMPLE.as_bytes().to_vec();
        for (at, edit, byte) in edits {
            let at = at.min(bytes.len() - 1);
            match edit {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => { bytes.remove(at); }
            }
        }
        let file = file(&bytes);
        if let Err(errors) = Config::load(BTreeMap::new(), std::iter::empty(), Some(file.path())) {
            prop_assert!(!errors.as_slice().is_empty());
            prop_assert!(!errors.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn any_texts_are_answered(texts in prop::collection::vec(".{0,12}", SETTINGS.len())) {
        let flags = SETTINGS.iter().map(|setting| setting.key.to_owned()).zip(texts).collect();
        if let Err(errors) = Config::load(flags, std::iter::empty(), None) {
            let is_table = |error: &ConfigError| matches!(error, ConfigError::Table { .. });
            prop_assert!(!errors.as_slice().iter().any(is_table));
        }
    }
}
