//! Rules that concern several settings together.
//!
//! A rule is checked only when each of its settings is [settled](Layers::are_settled). So one mistake is reported once,
//! not again as a broken rule.

use std::net::SocketAddr;

use super::declare::Setting;
use super::effective::{SettingEntries, SettingEntry};
use super::error::{ConfigError, Origin};
use super::layers::Layers;

/// Keys of the settings that each give a way to authenticate to NATS. At most one of them may be given.
const AUTHENTICATION: [&str; 4] = [
    "nats.credentials_file",
    "nats.nkey_seed_file",
    "nats.token",
    "nats.user",
];

/// Keys of the settings for a certificate and its private key. Neither may be given without the other.
const CERTIFICATE: [&str; 2] = ["nats.tls_cert_file", "nats.tls_key_file"];

/// Keys of the settings about an external NATS server. None of these settings may be given while `nats.embedded` is on.
pub(super) const NOT_FOR_EMBEDDED: [&str; 11] = [
    "nats.url",
    "nats.credentials_file",
    "nats.nkey_seed_file",
    "nats.token",
    "nats.user",
    "nats.password",
    "nats.tls_required",
    "nats.tls_first",
    "nats.tls_ca_file",
    "nats.tls_cert_file",
    "nats.tls_key_file",
];

/// Keys of the settings about an index. None of these settings may be given for a gateway, because a gateway has no index.
const NOT_FOR_GATEWAY: [&str; 3] = ["sharding.shard", "snapshots.directory", "grpc.writing"];

/// Keys of the settings that hold the addresses of the daemon's listeners.
const LISTENERS: [&str; 5] = [
    "http.listen",
    "admin.listen",
    "dynamo.listen",
    "redis.listen",
    "grpc.listen",
];

const STALE_AFTER: &str = "namespace_defaults.stale_after_ms";
const REMOVE_AFTER: &str = "namespace_defaults.remove_after_ms";

/// Checks every rule about several settings, and adds the broken ones to the errors.
pub(super) fn check(layers: &mut Layers) {
    let errors = [
        check_authentication(layers),
        check_certificate(layers),
        check_excluded(layers, "nats.embedded", &NOT_FOR_EMBEDDED, |embedded| {
            format!("is not for the embedded NATS server that {embedded} asks for; give one of the two")
        }),
        check_excluded(layers, "gateway.enabled", &NOT_FOR_GATEWAY, |gateway| {
            format!("is not for a gateway, which {gateway} asks for: it has no index; give one of the two")
        }),
        check_excluded(
            layers,
            "sharding.shard",
            &["dynamo.components", "redis.listen", "grpc.listen"],
            |shard| {
                format!(
                    "is not for a shard, which {shard} asks for: these routers ask one process about all workers; give it to the gateway"
                )
            },
        ),
        check_lane_queue(layers),
        check_resync(layers),
        check_silence(layers),
        check_object_store(layers),
        check_listeners(layers),
        check_namespaces(layers),
        check_asked_gateway(layers),
        check_writing(layers),
    ];
    layers.errors.extend(errors.into_iter().flatten());
}

fn check_authentication(layers: &Layers) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    if !layers.are_settled(&AUTHENTICATION) || !layers.are_settled(&["nats.password"]) {
        return errors;
    }
    for (key, other) in [("nats.user", "nats.password"), ("nats.password", "nats.user")] {
        errors.extend(check_needed(layers, key, other, ""));
    }
    let mut ways = AUTHENTICATION.iter().filter_map(|key| given(layers, key));
    if let (Some(first), Some(second)) = (ways.next(), ways.next()) {
        let rule = format!(
            "a second way to authenticate to NATS, beside {first}; give one of {}",
            AUTHENTICATION.join(", ")
        );
        errors.push(ConfigError::combination(second, rule));
    }
    errors
}

fn check_certificate(layers: &Layers) -> Vec<ConfigError> {
    if !layers.are_settled(&CERTIFICATE) {
        return Vec::new();
    }
    let [certificate, key] = CERTIFICATE;
    let pairs = [(certificate, key), (key, certificate)];
    let check = |(key, other)| check_needed(layers, key, other, "");
    pairs.into_iter().flat_map(check).collect()
}

fn check_object_store(layers: &Layers) -> Vec<ConfigError> {
    let (store, directory) = ("snapshots.object_store", "snapshots.directory");
    if !layers.are_settled(&[store, directory]) {
        return Vec::new();
    }
    check_needed(
        layers,
        store,
        directory,
        ": snapshots are written and fetched there",
    )
}

/// Checks that no two listeners have the same address. Port 0 is a different free port for each listener.
fn check_listeners(layers: &Layers) -> Vec<ConfigError> {
    let before = |place: usize| LISTENERS.iter().take(place);
    let pairs = LISTENERS.iter().enumerate();
    let pairs = pairs.flat_map(|(place, other)| before(place).map(|one| [*one, *other]));
    pairs.flat_map(|pair| check_addresses(layers, pair)).collect()
}

fn check_addresses(layers: &Layers, keys: [&'static str; 2]) -> Vec<ConfigError> {
    let [one, other] = keys.map(|key| {
        let entry = layers.effective.entry(key)?;
        entry.value.text()?.parse::<SocketAddr>().ok()
    });
    let is_right = one.is_none() || one != other || one.is_some_and(|address| address.port() == 0);
    check_pair(layers, keys, is_right, || {
        let [one, other] = keys;
        format!("{one} and {other} are one address; give each a port of its own, or off")
    })
}

/// Checks that the setting `other` is given whenever the setting `key` is given. `reason` ends the error message.
fn check_needed(layers: &Layers, key: &str, other: &str, reason: &str) -> Vec<ConfigError> {
    let origin = given(layers, key).filter(|_| given(layers, other).is_none());
    let error = |origin| ConfigError::combination(origin, format!("{key} needs {other} beside it{reason}"));
    origin.map(error).into_iter().collect()
}

/// Checks that no `excluded` setting is given while the setting `switch` is on. `rule` makes the error message from the switch's
/// origin.
fn check_excluded(
    layers: &Layers,
    switch: &str,
    excluded: &[&str],
    rule: impl Fn(&Origin) -> String,
) -> Vec<ConfigError> {
    if !layers.are_settled(&[switch]) {
        return Vec::new();
    }
    let Some(switched_on_by) = given(layers, switch) else {
        return Vec::new();
    };
    excluded
        .iter()
        .filter(|key| layers.are_settled(&[key]))
        .filter_map(|key| given(layers, key))
        .map(|origin| ConfigError::combination(origin, rule(switched_on_by)))
        .collect()
}

/// Checks that a gateway with `grpc.listen` has `grpc.namespace`, because a gateway does not know which namespaces exist.
fn check_asked_gateway(layers: &Layers) -> Vec<ConfigError> {
    let (switch, listen, namespace) = ("gateway.enabled", "grpc.listen", "grpc.namespace");
    if !layers.are_settled(&[switch, listen, namespace]) || given(layers, switch).is_none() {
        return Vec::new();
    }
    check_needed(
        layers,
        listen,
        namespace,
        " at a gateway: it does not know which namespaces there are",
    )
}

/// Checks that `grpc.namespace` is given if `grpc.writing` is, because reports name no model. If `grpc.writing` is `token`,
/// `grpc.writing_token_file` must be given, too.
fn check_writing(layers: &Layers) -> Vec<ConfigError> {
    let (writing, namespace, token) = ("grpc.writing", "grpc.namespace", "grpc.writing_token_file");
    if !layers.are_settled(&[writing, namespace, token]) {
        return Vec::new();
    }
    let mut errors = check_needed(layers, writing, namespace, ": reports name no model");
    let wants = layers
        .effective
        .entry(writing)
        .and_then(|entry| entry.value.text());
    if wants == Some("token") {
        let reason = "; open takes reports from all that may ask";
        errors.extend(check_needed(layers, writing, token, reason));
    }
    errors
}

fn check_lane_queue(layers: &Layers) -> Vec<ConfigError> {
    let (queue, message) = ("events.lane_queue_bytes", "events.max_message_bytes");
    let is_right = integer(layers, queue) >= integer(layers, message);
    check_pair(layers, [queue, message], is_right, || {
        format!("{queue} must be at least {message}, or a lane could never take the largest message")
    })
}

fn check_resync(layers: &Layers) -> Vec<ConfigError> {
    let (least, most) = ("resync.retry_min_ms", "resync.retry_max_ms");
    let is_right = integer(layers, least) <= integer(layers, most);
    check_pair(layers, [least, most], is_right, || {
        format!("{least} must be at most {most}")
    })
}

/// Reports a broken rule about two settings. Reports nothing if the rule holds (`is_right`), or if a value is not
/// [settled](Layers::are_settled). The error has the origin of the first of `keys` that is given.
fn check_pair(
    layers: &Layers,
    keys: [&str; 2],
    is_right: bool,
    rule: impl FnOnce() -> String,
) -> Vec<ConfigError> {
    if is_right || !layers.are_settled(&keys) {
        return Vec::new();
    }
    let origin = keys.iter().find_map(|key| given(layers, key));
    vec![ConfigError::combination(
        origin.unwrap_or(&Origin::Default),
        rule(),
    )]
}

/// Checks that holders become stale before they are removed. The rule holds for the defaults, and for each named namespace.
fn check_silence(layers: &Layers) -> Vec<ConfigError> {
    if !layers.are_settled(&[STALE_AFTER, REMOVE_AFTER]) {
        return Vec::new();
    }
    const RULE: &str =
        "a holder must be stale before it is removed: remove_after_ms must be above stale_after_ms, or 0";
    let none = SettingEntries::new();
    let is_right = |own: &SettingEntries| {
        let number = |key| {
            let entry = own.get(key).or_else(|| layers.effective.entry(key));
            entry.and_then(number_of).unwrap_or_default()
        };
        number(REMOVE_AFTER) == 0 || number(REMOVE_AFTER) > number(STALE_AFTER)
    };
    let keys = [REMOVE_AFTER, STALE_AFTER];
    let mut errors = check_pair(layers, keys, is_right(&none), || RULE.to_owned());
    for (_, table) in &layers.effective.namespaces {
        let own = keys.iter().find_map(|key| table.entries.get(key));
        if let Some(entry) = own
            && !is_right(&table.entries)
        {
            errors.push(ConfigError::combination(&entry.origin, RULE));
        }
    }
    errors
}

fn check_namespaces(layers: &Layers) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    let limit = |key| integer(layers, key).filter(|_| layers.are_settled(&[key]));
    let length = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
    let namespaces = &layers.effective.namespaces;
    let count = length(namespaces.len());
    if let Some(max) = limit("limits.max_namespaces")
        && let Some(last) = namespaces.values().last()
        && count > max
    {
        let rule = format!("{count} namespaces are configured, but limits.max_namespaces is {max}; raise it");
        errors.push(ConfigError::combination(&last.origin, rule));
    }
    if let Some(max) = limit("limits.max_name_bytes") {
        for (_, table) in namespaces.iter().filter(|(name, _)| length(name.len()) > max) {
            let rule = format!("the name is longer than limits.max_name_bytes, which is {max}");
            errors.push(ConfigError::combination(&table.origin, rule));
        }
    }
    errors
}

/// Returns the origin of a setting's value if the value differs from the default; else `None`.
///
/// A default that a source spells out counts as not given, so that a printed configuration loads back.
pub(super) fn given<'a>(layers: &'a Layers, key: &str) -> Option<&'a Origin> {
    let entry = layers.effective.entry(key)?;
    let setting = Setting::find(key)?;
    (setting.kind.parse(setting.default).as_ref() != Some(&entry.value)).then_some(&entry.origin)
}

fn integer(layers: &Layers, key: &str) -> Option<u64> {
    layers.effective.entry(key).and_then(number_of)
}

fn number_of(entry: &SettingEntry) -> Option<u64> {
    entry.value.integer()
}
