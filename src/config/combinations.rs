//! Rules that concern several settings together.
//!
//! A rule is checked only if each of its settings is [settled](Layers::are_settled): its value is neither wrong nor
//! possibly lost to a syntax error. So a wrong value is reported once, and does not break a rule as well.

use std::collections::HashSet;
use std::net::SocketAddr;

use super::declare::Setting;
use super::effective::{SettingEntries, SettingEntry};
use super::error::{ConfigError, Origin};
use super::kind::parse_components;
use super::layers::Layers;

/// Keys of the settings that each give a way to authenticate to NATS. At most one of them may be given.
pub const AUTHENTICATION: [&str; 4] = [
    "nats.credentials_file",
    "nats.nkey_seed_file",
    "nats.token",
    "nats.user",
];

/// End of the error message about settings for Dynamo where no component is given.
const NO_COMPONENT: &str = ": without one, no router of Dynamo is answered";

/// Triples of a setting, another setting that must be given together with it, and a text that ends the error message.
const NEEDED: [(&str, &str, &str); 9] = [
    ("nats.user", "nats.password", ""),
    ("nats.password", "nats.user", ""),
    ("nats.tls_cert_file", "nats.tls_key_file", ""),
    ("nats.tls_key_file", "nats.tls_cert_file", ""),
    (
        "snapshots.object_store",
        "snapshots.directory",
        ": snapshots are written and fetched there",
    ),
    ("grpc.writing", "grpc.namespace", ": reports name no model"),
    ("dynamo.listen", "dynamo.components", NO_COMPONENT),
    ("dynamo.discovery", "dynamo.components", NO_COMPONENT),
    (
        "dynamo.advertise",
        "dynamo.listen",
        ": it is told with the listener's port",
    ),
];

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
        check_all_needed(layers),
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
        check_order(
            layers,
            ["events.lane_queue_bytes", "events.max_message_bytes"],
            Option::ge,
            "events.lane_queue_bytes must be at least events.max_message_bytes, or a lane could never take the largest message",
        ),
        check_order(
            layers,
            ["redis.max_receiving_bytes", "redis.max_command_bytes"],
            Option::ge,
            "redis.max_receiving_bytes must be at least redis.max_command_bytes, or the longest command could never be taken",
        ),
        check_order(
            layers,
            ["http.max_receiving_bytes", "http.max_body_bytes"],
            is_twice,
            "http.max_receiving_bytes must be at least twice http.max_body_bytes: a body takes up to twice its length while it comes",
        ),
        check_order(
            layers,
            ["grpc.max_receiving_bytes", "grpc.max_message_bytes"],
            is_twice,
            "grpc.max_receiving_bytes must be at least twice grpc.max_message_bytes: a question takes up to twice its length while it comes",
        ),
        check_order(
            layers,
            ["resync.retry_min_ms", "resync.retry_max_ms"],
            Option::le,
            "resync.retry_min_ms must be at most resync.retry_max_ms",
        ),
        check_silence(layers),
        check_listeners(layers),
        check_told_address(layers),
        check_reached_address(layers),
        check_components(layers),
        check_namespaces(layers),
    ];
    layers.errors.extend(errors.into_iter().flatten());
}

fn check_authentication(layers: &Layers) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    if !layers.are_settled(&AUTHENTICATION) {
        return errors;
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

/// Checks that no setting is given without another setting that it needs. A gateway does not know which namespaces
/// exist, so its `grpc.listen` needs `grpc.namespace`.
fn check_all_needed(layers: &Layers) -> Vec<ConfigError> {
    let switch = "gateway.enabled";
    let is_gateway = layers.are_settled(&[switch]) && given(layers, switch).is_some();
    let reason = " at a gateway: it does not know which namespaces there are";
    let at_gateway = is_gateway.then_some(("grpc.listen", "grpc.namespace", reason));
    let writing = layers.effective.entry("grpc.writing");
    let is_token = writing.and_then(|entry| entry.value.text()) == Some("token");
    let reason = "; open takes reports from all that may ask";
    let for_token = is_token.then_some(("grpc.writing", "grpc.writing_token_file", reason));
    let needed = NEEDED.into_iter().chain(at_gateway).chain(for_token);
    needed
        .filter_map(|(key, other, reason)| check_needed(layers, key, other, reason))
        .collect()
}

/// Checks that no two listeners have the same address. Port 0 is a different free port for each listener.
fn check_listeners(layers: &Layers) -> Vec<ConfigError> {
    let before = |place: usize| LISTENERS.iter().take(place);
    let pairs = LISTENERS.iter().enumerate();
    let pairs = pairs.flat_map(|(place, other)| before(place).map(|one| [*one, *other]));
    pairs.flat_map(|pair| check_addresses(layers, pair)).collect()
}

/// Checks that Dynamo's routers are told an address to which they can connect. A listener on all addresses has none.
fn check_told_address(layers: &Layers) -> Vec<ConfigError> {
    let keys = ["dynamo.listen", "dynamo.discovery", "dynamo.advertise"];
    let listen = address(layers, "dynamo.listen");
    let is_everywhere = listen.is_some_and(|listen| listen.ip().is_unspecified());
    let is_told = given(layers, "dynamo.discovery").is_some() && given(layers, "dynamo.advertise").is_none();
    check_together(layers, &keys, !(is_everywhere && is_told), || {
        "dynamo.listen on all addresses needs dynamo.advertise beside it: the host that routers are told"
            .to_owned()
    })
}

/// Checks that the doctor is told no other address of an admin listener that only its own machine reaches, or that is off.
fn check_reached_address(layers: &Layers) -> Vec<ConfigError> {
    let keys = ["admin.advertise", "admin.listen"];
    let is_reached = address(layers, "admin.listen").is_some_and(|listen| !listen.ip().is_loopback());
    let is_told = given(layers, "admin.advertise").is_some();
    check_together(layers, &keys, is_reached || !is_told, || {
        "admin.advertise needs an admin.listen that other machines reach beside it: nobody listens there else"
            .to_owned()
    })
}

/// Checks that no component of Dynamo is given twice: its routers could be answered for one tenant only.
fn check_components(layers: &Layers) -> Vec<ConfigError> {
    let key = "dynamo.components";
    let entry = layers.effective.entry(key);
    let components = entry.and_then(|entry| parse_components(entry.value.text()?));
    let mut seen = HashSet::new();
    let twice = components.unwrap_or_default().into_iter().find_map(|one| {
        let component = format!("{}.{}", one.namespace, one.name);
        (!seen.insert(component.clone())).then_some(component)
    });
    let rule = |component| format!("the component {component} is there twice; give it once");
    twice.map_or_else(Vec::new, |component| {
        check_together(layers, &[key], false, || rule(component))
    })
}

/// Returns the address that is the value of a setting; `None` if the setting has no such value.
fn address(layers: &Layers, key: &str) -> Option<SocketAddr> {
    let entry = layers.effective.entry(key)?;
    entry.value.text()?.parse().ok()
}

fn check_addresses(layers: &Layers, keys: [&'static str; 2]) -> Vec<ConfigError> {
    let [one, other] = keys.map(|key| address(layers, key));
    let is_right = one.is_none() || one != other || one.is_some_and(|address| address.port() == 0);
    check_together(layers, &keys, is_right, || {
        let [one, other] = keys;
        format!("{one} and {other} are one address; give each a port of its own, or off")
    })
}

/// Checks that the setting `other` is given whenever the setting `key` is given. `reason` ends the error message.
fn check_needed(layers: &Layers, key: &str, other: &str, reason: &str) -> Option<ConfigError> {
    let is_missing = layers.are_settled(&[key, other]) && given(layers, other).is_none();
    let origin = given(layers, key).filter(|_| is_missing)?;
    let rule = format!("{key} needs {other} beside it{reason}");
    Some(ConfigError::combination(origin, rule))
}

/// Checks that no `excluded` setting is given while the setting `switch` is on. `rule` writes the error message; its
/// argument is the place where the switch is set.
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

/// Checks that the numbers of two settings are in this order.
fn check_order(
    layers: &Layers,
    keys: [&str; 2],
    is_right: fn(&Option<u64>, &Option<u64>) -> bool,
    rule: &str,
) -> Vec<ConfigError> {
    let [one, other] = keys.map(|key| integer(layers, key));
    check_together(layers, &keys, is_right(&one, &other), || rule.to_owned())
}

fn is_twice(one: &Option<u64>, other: &Option<u64>) -> bool {
    *one >= other.map(|other| other.saturating_mul(2))
}

/// Reports a broken rule about some settings. Reports nothing if the rule holds (`is_right`), or if a value is not
/// [settled](Layers::are_settled). The error has the origin of the first of `keys` that is given.
fn check_together(
    layers: &Layers,
    keys: &[&str],
    is_right: bool,
    rule: impl FnOnce() -> String,
) -> Vec<ConfigError> {
    if is_right || !layers.are_settled(keys) {
        return Vec::new();
    }
    let origin = keys.iter().find_map(|key| given(layers, key));
    vec![ConfigError::combination(
        origin.unwrap_or(&Origin::Default),
        rule(),
    )]
}

/// Checks that the time after which a silent holder is stale is shorter than the time after which it is removed. The
/// rule holds for the defaults, and for each named namespace.
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
    let mut errors = check_together(layers, &keys, is_right(&none), || RULE.to_owned());
    for table in layers.effective.namespaces.values() {
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
