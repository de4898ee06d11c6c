//! The mapping from model names to names of namespaces, and from instance names to names of workers.
//!
//! A namespace is a subject token of at most 64 bytes. A model name such as `meta-llama/Llama-3.1-8B-Instruct` is no
//! such token, so this mapping makes a token from it. People can still read the token, and it can be decoded to the
//! model name. Letters, digits and `-` stand for themselves; `_` begins a code:
//!
//! | code | stands for |
//! |---|---|
//! | `__` | `/` |
//! | `_d` | `.` |
//! | `_u` | `_` |
//! | `_c` | `:` |
//! | `_t` | the end of the model; the tenant follows |
//! | `_s` | the end of model and tenant; the scheme follows |
//! | `_xHH` | any other byte of the UTF-8 text, in lower-case hexadecimal |
//!
//! A worker's name that begins with `_p` is a pool: storage that every worker of the namespace can load from.
//!
//! So the model above has the namespace `meta-llama__Llama-3_d1-8B-Instruct`. For tenant `acme` its namespace is
//! `meta-llama__Llama-3_d1-8B-Instruct_tacme`. The tenant `default` is not written. Adapters need no namespace of their
//! own: they share the namespace of their base model, and their names enter the block hashes.
//!
//! If a namespace does not use the contract's hashes, its name contains the scheme:
//! `meta-llama__Llama-3_d1-8B-Instruct_sllm-d-xxh64_c42` uses the [`Scheme`] `llm-d-xxh64:42`. So a client that knows
//! the name can hash tokens as the namespace does.

use std::fmt;

use crate::hash::{Scheme, SchemeChains};
use serde::{Deserialize, Serialize};

use super::subject::{NameError, NamespaceName, WorkerName};

/// Name of the tenant that applies if no tenant is given.
pub const DEFAULT_TENANT: &str = "default";

/// Names the cache of a model: by the model's name, and by the tenant or routing group that has a cache of its own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelKey {
    /// Name under which the model is served. For an adapter this is the name of its base model.
    pub model: String,
    /// Tenant or routing group. [`DEFAULT_TENANT`] if there is none.
    pub tenant: String,
    /// Scheme of the rolling hash that names the blocks. `None` for the contract's hashes.
    #[serde(default)]
    pub scheme: Option<Scheme>,
}

impl ModelKey {
    /// Returns the key of the cache of `model` for the default tenant.
    pub fn new(model: impl Into<String>) -> Self {
        Self::of_tenant(model, DEFAULT_TENANT)
    }

    /// Returns the key of the cache of `model` for `tenant`. An empty tenant is the default tenant.
    pub fn of_tenant(model: impl Into<String>, tenant: impl Into<String>) -> Self {
        let tenant: String = tenant.into();
        let is_unnamed = tenant.is_empty();
        Self {
            model: model.into(),
            tenant: if is_unnamed {
                DEFAULT_TENANT.to_owned()
            } else {
                tenant
            },
            scheme: None,
        }
    }

    /// Returns the same key with another hash scheme: the blocks of the cache are then named by the hashes of `scheme`.
    #[must_use]
    pub fn speaking(self, scheme: Option<Scheme>) -> Self {
        Self { scheme, ..self }
    }

    /// Whether both keys stand for the same cache, apart from their hash schemes.
    pub fn is_same_cache(&self, other: &Self) -> bool {
        (&self.model, &self.tenant) == (&other.model, &other.tenant)
    }

    /// Returns the hash chains of the cache in its scheme. `None` if the cache uses the contract's hashes.
    pub fn chains(&self) -> Option<SchemeChains> {
        let scheme = self.scheme.clone()?;
        Some(SchemeChains::new(scheme, &self.model))
    }

    /// Returns the name of the cache's namespace.
    ///
    /// # Errors
    ///
    /// [`NameError::Empty`] for a model without a name. [`NameError::TooLong`] if the encoded name takes more than 64
    /// bytes; in that case, serve the model under a shorter name.
    pub fn namespace(&self) -> Result<NamespaceName, NameError> {
        if self.model.is_empty() {
            return NamespaceName::new("");
        }
        let mut name = String::with_capacity(self.model.len() + 16);
        encode(&self.model, &mut name);
        if self.tenant != DEFAULT_TENANT {
            name.push_str("_t");
            encode(&self.tenant, &mut name);
        }
        if let Some(scheme) = &self.scheme {
            name.push_str("_s");
            encode(&scheme.to_string(), &mut name);
        }
        NamespaceName::new(&name)
    }

    /// Returns the key of the cache whose namespace is called `namespace`. `None` if no cache has a namespace of this
    /// name.
    pub fn of_namespace(namespace: &NamespaceName) -> Option<Self> {
        let (model, mut rest) = decode(namespace.as_str())?;
        let mut tenant = DEFAULT_TENANT.to_owned();
        if let Some(End::Tenant(text)) = rest {
            let is_canonical = |tenant: &str| !tenant.is_empty() && tenant != DEFAULT_TENANT;
            (tenant, rest) = decode(text)?;
            is_canonical(&tenant).then_some(())?;
        }
        let scheme = match rest {
            None => None,
            Some(End::Scheme(text)) => match decode(text)? {
                (scheme, None) => Some(scheme.parse().ok()?),
                _ => return None,
            },
            // A name has only one tenant.
            Some(End::Tenant(_)) => return None,
        };
        (!model.is_empty()).then_some(Self {
            model,
            tenant,
            scheme,
        })
    }
}

impl fmt::Display for ModelKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.model)?;
        if self.tenant != DEFAULT_TENANT {
            write!(formatter, " (tenant {})", self.tenant)?;
        }
        match &self.scheme {
            Some(scheme) => write!(formatter, " in hashes of {scheme}"),
            None => Ok(()),
        }
    }
}

/// Returns the number that `text` is in its usual form (no sign, no leading zeros); `None` if it is no such number.
pub fn usual_number(text: &str) -> Option<u64> {
    text.parse()
        .ok()
        .filter(|number: &u64| number.to_string() == text)
}

/// Returns the worker's name for the instance that a gateway calls `instance`, encoded with the same codes.
///
/// # Errors
///
/// The errors of [`ModelKey::namespace`].
pub fn worker_of_instance(instance: &str) -> Result<WorkerName, NameError> {
    let mut name = String::with_capacity(instance.len() + 8);
    encode(instance, &mut name);
    WorkerName::new(&name)
}

/// Prefix of the names of pools. No encoded instance name begins with it.
const POOL_PREFIX: &str = "_p";

/// Returns the worker's name for the pool that a gateway calls `instance`. A pool is storage that every worker of the
/// namespace can load from.
///
/// # Errors
///
/// The errors of [`ModelKey::namespace`].
pub fn pool_of_instance(instance: &str) -> Result<WorkerName, NameError> {
    let mut name = String::from(POOL_PREFIX);
    encode(instance, &mut name);
    WorkerName::new(&name)
}

/// Whether `worker` is the name of a pool.
pub fn is_pool(worker: &WorkerName) -> bool {
    worker.as_str().starts_with(POOL_PREFIX)
}

/// Returns the name that a gateway uses for `worker`, which may be a pool. If `worker` is not an encoded instance name,
/// returns `worker` unchanged.
pub fn instance_of_worker(worker: &WorkerName) -> String {
    let name = worker.as_str();
    match decode(name.strip_prefix(POOL_PREFIX).unwrap_or(name)) {
        Some((instance, None)) => instance,
        _ => worker.as_str().to_owned(),
    }
}

/// Returns the name that a gateway uses for `worker` where other workers are known, too. This is
/// [`instance_of_worker`], but the worker's own name if another known worker goes by that name: a publisher can be
/// called `gpu_0`, and the instance `gpu_0` is the worker `gpu_u0`. No two known workers get the same name.
pub fn instance_among(worker: &WorkerName, is_known: &dyn Fn(&WorkerName) -> bool) -> String {
    let instance = instance_of_worker(worker);
    let is_taken = WorkerName::new(&instance).is_ok_and(|other| {
        other != *worker && is_known(&other) && instance_among(&other, is_known) == instance
    });
    if is_taken { worker.to_string() } else { instance }
}

/// Returns the workers that [`instance_among`] may call `instance`, and the known workers that decide it.
///
/// # Errors
///
/// The errors of [`ModelKey::namespace`], if no worker can be called `instance`.
pub fn workers_of_instance(instance: &str) -> Result<Vec<WorkerName>, NameError> {
    let encoded = worker_of_instance(instance);
    let mut workers: Vec<WorkerName> = encoded.iter().cloned().collect();
    let mut raw = WorkerName::new(instance);
    while let Ok(worker) = raw {
        if workers.contains(&worker) {
            break;
        }
        raw = WorkerName::new(&instance_of_worker(&worker));
        workers.push(worker);
    }
    if workers.is_empty() {
        encoded.map(|worker| vec![worker])
    } else {
        Ok(workers)
    }
}

fn encode(text: &str, name: &mut String) {
    for byte in text.bytes() {
        match byte {
            b'/' => name.push_str("__"),
            b'.' => name.push_str("_d"),
            b'_' => name.push_str("_u"),
            b':' => name.push_str("_c"),
            b'-' => name.push('-'),
            byte if byte.is_ascii_alphanumeric() => name.push(char::from(byte)),
            byte => {
                name.push_str("_x");
                for digit in [byte >> 4, byte & 15] {
                    name.push(char::from_digit(digit.into(), 16).unwrap_or('0'));
                }
            }
        }
    }
}

/// Code that ends one part of an encoded name, and the part of the name after the code.
#[derive(Debug, PartialEq, Eq)]
enum End<'a> {
    /// Marker `_t`, before the tenant. The value is the rest of the name, still encoded.
    Tenant(&'a str),
    /// Marker `_s`, before the hash scheme. The value is the rest of the name, still encoded.
    Scheme(&'a str),
}

/// Decodes `name` up to the code that begins the tenant or the scheme. Returns the decoded text, and this code with the
/// rest of the name. `None` if [`encode`] never produces such a name.
fn decode(name: &str) -> Option<(String, Option<End<'_>>)> {
    let mut text = Vec::with_capacity(name.len());
    let mut rest = name;
    let mut end = None;
    while let Some(first) = rest.bytes().next() {
        rest = rest.get(1..)?;
        if first != b'_' {
            text.push(first);
            continue;
        }
        let code = rest.bytes().next()?;
        rest = rest.get(1..)?;
        match code {
            b'_' => text.push(b'/'),
            b'd' => text.push(b'.'),
            b'u' => text.push(b'_'),
            b'c' => text.push(b':'),
            b't' | b's' => {
                end = Some(if code == b't' {
                    End::Tenant(rest)
                } else {
                    End::Scheme(rest)
                });
                break;
            }
            b'x' => {
                let digits = rest.get(..2)?;
                rest = rest.get(2..)?;
                text.push(other_byte(digits)?);
            }
            _ => return None,
        }
    }
    Some((String::from_utf8(text).ok()?, end))
}

/// Returns the byte that the code `_x` stands for, from the two hexadecimal `digits` after the `_x`. `None` for a byte
/// that is written in another way, such as `/`.
fn other_byte(digits: &str) -> Option<u8> {
    let is_lower = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
    let byte = digits.bytes().all(is_lower).then_some(digits)?;
    let byte = u8::from_str_radix(byte, 16).ok()?;
    let has_own_code = byte.is_ascii_alphanumeric() || b"/._:-".contains(&byte);
    (!has_own_code).then_some(byte)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Checks fixed values of the mapping. The documentation and clients in other languages contain these values, so
    /// they must not change.
    #[test]
    fn the_mapping_is_pinned() {
        for (model, tenant, namespace) in [
            ("llama", "default", "llama"),
            (
                "meta-llama/Llama-3.1-8B-Instruct",
                "default",
                "meta-llama__Llama-3_d1-8B-Instruct",
            ),
            ("Qwen/Qwen3:latest", "acme", "Qwen__Qwen3_clatest_tacme"),
            ("my_model", "a_b", "my_umodel_ta_ub"),
            ("ä", "default", "_xc3_xa4"),
        ] {
            let key = ModelKey::of_tenant(model, tenant);
            assert_eq!(key.namespace().unwrap().as_str(), namespace);
        }
        assert_eq!(
            worker_of_instance("10.0.0.1:8000").unwrap().as_str(),
            "10_d0_d0_d1_c8000"
        );
        for (tenant, scheme, namespace) in [
            (DEFAULT_TENANT, "llm-d-xxh64", "o__m_sllm-d-xxh64"),
            ("acme", "llm-d-cbor-fnv:4_2", "o__m_tacme_sllm-d-cbor-fnv_c4_u2"),
        ] {
            let key = ModelKey::of_tenant("o/m", tenant).speaking(Some(scheme.parse().unwrap()));
            assert_eq!(key.namespace().unwrap().as_str(), namespace);
        }
    }

    #[test]
    fn names_that_no_model_has_are_told() {
        for name in [
            "a_",
            "a_q",
            "_x2",
            "_x2d",
            "_xC3_xa4",
            "_xff",
            "a_t",
            "a_tdefault",
            "a_tb_tc",
            "_ta",
            "a_s",
            "a_stuff",
            "a_sllm-d-xxh64_tb",
            "a_sllm-d-xxh64_sllm-d-xxh64",
            "a_sllm-d-xxh64_c",
            "_sllm-d-xxh64",
        ] {
            let namespace = NamespaceName::new(name).unwrap();
            assert_eq!(ModelKey::of_namespace(&namespace), None, "{name}");
        }
        assert!(ModelKey::new("").namespace().is_err());
        let long = ModelKey::new(".".repeat(33)).namespace();
        assert_eq!(long, Err(NameError::TooLong { bytes: 66, max: 64 }));
        let worker = WorkerName::new("a_q").unwrap();
        assert_eq!(instance_of_worker(&worker), "a_q");
    }

    proptest! {
        #[test]
        fn every_name_leads_back_to_its_model(
            model in ".{1,24}",
            tenant in ".{0,8}",
            scheme in prop::option::of("llm-d-xxh64|llm-d-cbor-fnv:[a-z_.]{1,4}"),
        ) {
            let scheme = scheme.map(|scheme| scheme.parse().unwrap());
            let key = ModelKey::of_tenant(model, tenant).speaking(scheme);
            if let Ok(namespace) = key.namespace() {
                prop_assert_eq!(ModelKey::of_namespace(&namespace), Some(key));
            }
        }

        #[test]
        fn no_two_models_share_a_name(name in "[a-c_tdux0-9-]{1,12}(_sllm-d-xxh64)?") {
            let namespace = NamespaceName::new(&name).unwrap();
            if let Some(key) = ModelKey::of_namespace(&namespace) {
                prop_assert_eq!(key.namespace(), Ok(namespace));
            }
        }

        #[test]
        fn no_two_known_workers_share_an_instance(names in prop::collection::btree_set("[ad0_u-]{1,4}", 1..40)) {
            let known: BTreeSet<WorkerName> = names.iter().map(|name| WorkerName::new(name).unwrap()).collect();
            let is_known = |worker: &WorkerName| known.contains(worker);
            let called: BTreeSet<String> = known.iter().map(|worker| instance_among(worker, &is_known)).collect();
            prop_assert_eq!(called.len(), known.len());
            for worker in &known {
                let instance = instance_among(worker, &is_known);
                let searched = workers_of_instance(&instance).unwrap();
                let is_found = |one: &WorkerName| is_known(one) && searched.contains(one);
                let own = searched.iter().filter(|one| is_found(one) && instance_among(one, &is_found) == instance);
                prop_assert_eq!(own.collect::<Vec<_>>(), [worker]);
            }
        }

        #[test]
        fn every_worker_leads_back_to_its_instance(instance in ".{1,24}") {
            if let Ok(worker) = worker_of_instance(&instance) {
                prop_assert!(!is_pool(&worker));
                prop_assert_eq!(instance_of_worker(&worker), instance.clone());
            }
            if let Ok(pool) = pool_of_instance(&instance) {
                prop_assert!(is_pool(&pool));
                prop_assert_eq!(instance_of_worker(&pool), instance);
            }
        }
    }
}
