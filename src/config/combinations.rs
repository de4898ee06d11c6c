//! Rules about several settings at once.
//!
//! A rule is looked at only when each of its settings is [settled](Layers::are_settled), so that one mistake
//! is reported once.

use super::build::{INDEX, RADIX, REMOVE_AFTER, STALE_AFTER};
use super::error::{ConfigError, Origin};
use super::kind::Value;
use super::layers::{Entry, Layers};
use super::settings::Setting;

/// The ways to authenticate to NATS, of which one may be given.
const AUTHENTICATION: [&str; 3] = ["nats.credentials_file", "nats.token", "nats.user"];

/// What an embedded server does without.
const NOT_FOR_EMBEDDED: [&str; 7] = [
    "nats.url",
    "nats.credentials_file",
    "nats.token",
    "nats.user",
    "nats.password",
    "nats.tls_required",
    "nats.tls_ca_file",
];

/// Checks every rule.
pub(super) fn check(layers: &mut Layers) {
    let errors = [
        check_authentication(layers),
        check_embedded(layers),
        check_gateway(layers),
        check_lane_queue(layers),
        check_resync(layers),
        check_silence(layers),
        check_object_store(layers),
        check_namespaces(layers),
        check_radix(layers),
    ];
    layers.errors.extend(errors.into_iter().flatten());
}

fn check_authentication(layers: &Layers) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    if !layers.are_settled(&AUTHENTICATION) || !layers.are_settled(&["nats.password"]) {
        return errors;
    }
    for (key, other) in [("nats.user", "nats.password"), ("nats.password", "nats.user")] {
        if let (Some(origin), None) = (given(layers, key), given(layers, other)) {
            errors.push(ConfigError::combination(
                origin,
                format!("{key} needs {other} beside it"),
            ));
        }
    }
    let ways: Vec<_> = AUTHENTICATION
        .iter()
        .filter_map(|key| given(layers, key))
        .collect();
    if let [first, second, ..] = ways[..] {
        let rule = format!(
            "a second way to authenticate to NATS, beside {first}; give one of {}",
            AUTHENTICATION.join(", ")
        );
        errors.push(ConfigError::combination(second, rule));
    }
    errors
}

fn check_embedded(layers: &Layers) -> Vec<ConfigError> {
    if !layers.are_settled(&["nats.embedded"]) {
        return Vec::new();
    }
    let Some(embedded) = given(layers, "nats.embedded") else {
        return Vec::new();
    };
    let rule = format!("is not for the embedded NATS server that {embedded} asks for; give one of the two");
    NOT_FOR_EMBEDDED
        .iter()
        .filter(|key| layers.are_settled(&[key]))
        .filter_map(|key| given(layers, key))
        .map(|origin| ConfigError::combination(origin, rule.clone()))
        .collect()
}

/// A gateway has no index, so nothing of what an index would be for.
fn check_gateway(layers: &Layers) -> Vec<ConfigError> {
    if !layers.are_settled(&["gateway.enabled"]) {
        return Vec::new();
    }
    let Some(gateway) = given(layers, "gateway.enabled") else {
        return Vec::new();
    };
    let rule =
        format!("is not for a gateway, which {gateway} asks for: it has no index; give one of the two");
    ["sharding.shard", "snapshots.directory"]
        .iter()
        .filter(|key| layers.are_settled(&[key]))
        .filter_map(|key| given(layers, key))
        .map(|origin| ConfigError::combination(origin, rule.clone()))
        .collect()
}

fn check_lane_queue(layers: &Layers) -> Vec<ConfigError> {
    let (queue, message) = ("events.lane_queue_bytes", "events.max_message_bytes");
    if !layers.are_settled(&[queue, message]) || integer(layers, queue) >= integer(layers, message) {
        return Vec::new();
    }
    let stronger = given(layers, queue)
        .or_else(|| given(layers, message))
        .unwrap_or(&Origin::Default);
    let rule = format!("{queue} must be at least {message}, or a lane could never take the largest message");
    vec![ConfigError::combination(stronger, rule)]
}

fn check_resync(layers: &Layers) -> Vec<ConfigError> {
    let (least, most) = ("resync.retry_min_ms", "resync.retry_max_ms");
    if !layers.are_settled(&[least, most]) || integer(layers, least) <= integer(layers, most) {
        return Vec::new();
    }
    let stronger = given(layers, least)
        .or_else(|| given(layers, most))
        .unwrap_or(&Origin::Default);
    let rule = format!("{least} must be at most {most}");
    vec![ConfigError::combination(stronger, rule)]
}

/// A holder cannot be removed before it is stale: in the defaults, and in what each namespace makes of them.
fn check_silence(layers: &Layers) -> Vec<ConfigError> {
    if !layers.are_settled(&[STALE_AFTER, REMOVE_AFTER]) {
        return Vec::new();
    }
    let rule =
        "a holder must be stale before it is removed: remove_after_ms must be above stale_after_ms, or 0";
    let number = |entry: Option<&Entry>| match entry.map(|entry| &entry.value) {
        Some(Value::Integer(number)) => *number,
        _ => 0,
    };
    let is_wrong = |stale: Option<&Entry>, remove: Option<&Entry>| {
        let (stale, remove) = (number(stale), number(remove));
        remove > 0 && remove <= stale
    };
    let defaults = [STALE_AFTER, REMOVE_AFTER].map(|key| layers.effective.entry(key));
    let mut errors = Vec::new();
    if is_wrong(defaults[0], defaults[1]) {
        let stronger = given(layers, REMOVE_AFTER)
            .or_else(|| given(layers, STALE_AFTER))
            .unwrap_or(&Origin::Default);
        errors.push(ConfigError::combination(stronger, rule.to_owned()));
    }
    for table in layers.effective.namespaces.values() {
        let own = [STALE_AFTER, REMOVE_AFTER].map(|key| table.entries.get(key));
        let Some(origin) = own[1].or(own[0]).map(|entry| &entry.origin) else {
            continue;
        };
        if is_wrong(own[0].or(defaults[0]), own[1].or(defaults[1])) {
            errors.push(ConfigError::combination(origin, rule.to_owned()));
        }
    }
    errors
}

fn check_object_store(layers: &Layers) -> Vec<ConfigError> {
    let (store, directory) = ("snapshots.object_store", "snapshots.directory");
    if !layers.are_settled(&[store, directory]) || given(layers, directory).is_some() {
        return Vec::new();
    }
    let rule = format!("{store} needs {directory} beside it: snapshots are written and fetched there");
    given(layers, store)
        .map(|origin| ConfigError::combination(origin, rule))
        .into_iter()
        .collect()
}

fn check_namespaces(layers: &Layers) -> Vec<ConfigError> {
    let mut errors = Vec::new();
    let namespaces = &layers.effective.namespaces;
    let count = u64::try_from(namespaces.len()).unwrap_or(u64::MAX);
    if let (Some(max), Some((_, last))) = (
        integer(layers, "limits.max_namespaces"),
        namespaces.last_key_value(),
    ) && layers.are_settled(&["limits.max_namespaces"])
        && count > max
    {
        let rule = format!("{count} namespaces are configured, but limits.max_namespaces is {max}; raise it");
        errors.push(ConfigError::combination(&last.origin, rule));
    }
    if let Some(max) = integer(layers, "limits.max_name_bytes")
        && layers.are_settled(&["limits.max_name_bytes"])
    {
        let too_long = |name: &str| u64::try_from(name.len()).unwrap_or(u64::MAX) > max;
        for (_, table) in namespaces.iter().filter(|(name, _)| too_long(name)) {
            let rule = format!("the name is longer than limits.max_name_bytes, which is {max}");
            errors.push(ConfigError::combination(&table.origin, rule));
        }
    }
    errors
}

/// A radix tree forgets nothing, so nothing can bound it: in the defaults, and in what each namespace makes of them.
fn check_radix(layers: &Layers) -> Vec<ConfigError> {
    let bounds = [
        "limits.max_blocks_per_namespace",
        "limits.max_bytes_per_namespace",
    ];
    let given_bounds = bounds.iter().filter(|key| layers.are_settled(&[key]));
    let Some(bound) = given_bounds.filter_map(|key| given(layers, key)).next() else {
        return Vec::new();
    };
    let rule = format!(
        "a radix tree forgets no blocks, so it cannot keep to the bound that {bound} sets on every namespace; take out one of \
         the two"
    );
    let own = layers.effective.namespaces.values();
    own.map(|table| table.entries.get(INDEX))
        .chain([layers
            .effective
            .entry(INDEX)
            .filter(|_| layers.are_settled(&[INDEX]))])
        .flatten()
        .filter(|entry| matches!(&entry.value, Value::Text(kind) if kind == RADIX))
        .map(|entry| ConfigError::combination(&entry.origin, rule.clone()))
        .collect()
}

/// Who gave the setting another value than its default; `None` if nobody did.
///
/// A default that is spelt out counts for nothing, so that a printed configuration loads back.
fn given<'a>(layers: &'a Layers, key: &str) -> Option<&'a Origin> {
    let entry = layers.effective.entry(key)?;
    let setting = Setting::find(key)?;
    (setting.kind.parse(setting.default).as_ref() != Some(&entry.value)).then_some(&entry.origin)
}

fn integer(layers: &Layers, key: &str) -> Option<u64> {
    match layers.effective.entry(key)?.value {
        Value::Integer(number) => Some(number),
        _ => None,
    }
}
