//! Simulated etcd for tests of Dynamo's records: keys, leases and range queries, over the HTTP gateway of etcd.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by it")]

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::http::Uri;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

/// Value of a key, with its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdValue {
    /// Bytes of the value.
    pub value: Vec<u8>,
    /// Number of the lease under which the value was written; empty if there is no lease.
    pub lease: String,
}

/// Contents of a simulated etcd. Nothing expires automatically: a test removes keys and leases.
#[derive(Debug, Default)]
pub struct Etcd {
    /// Values by key.
    pub kept: BTreeMap<String, EtcdValue>,
    /// Seconds that each lease has left, by the lease's number.
    pub leases: BTreeMap<String, i64>,
    /// Number of writes through the HTTP gateway.
    pub writes: usize,
    granted: u32,
    lease_seconds: i64,
}

impl Etcd {
    /// Writes a key without a lease.
    pub fn put(&mut self, key: &str, value: impl Into<Vec<u8>>) {
        let (value, lease) = (value.into(), String::new());
        self.kept.insert(key.to_owned(), EtcdValue { value, lease });
    }

    fn answer(&mut self, method: &str, question: &Value) -> Value {
        let id = question["ID"].as_str().unwrap_or_default();
        match method {
            "lease/grant" => {
                self.granted += 1;
                self.lease_seconds = question["TTL"].as_i64().unwrap();
                let id = self.granted.to_string();
                self.leases.insert(id.clone(), self.lease_seconds);
                json!({"ID": id, "TTL": self.lease_seconds.to_string()})
            }
            "lease/keepalive" => match self.leases.get_mut(id) {
                Some(left) => {
                    *left = self.lease_seconds;
                    json!({"result": {"ID": id, "TTL": left.to_string()}})
                }
                None => json!({"result": {"ID": id}}),
            },
            "lease/timetolive" => json!({"TTL": self.leases.get(id).unwrap_or(&-1).to_string()}),
            "kv/range" => self.range(question),
            "kv/put" => {
                self.writes += 1;
                let key = String::from_utf8(field(question, "key")).unwrap();
                let lease = question["lease"].as_str().unwrap_or_default().to_owned();
                let value = field(question, "value");
                self.kept.insert(key, EtcdValue { value, lease });
                json!({})
            }
            other => panic!("{other} is not asked"),
        }
    }

    /// Returns the answer to a range query: the value of one key, or of all keys from `key` up to `range_end`.
    /// Returns at most `limit` keys.
    fn range(&self, question: &Value) -> Value {
        let (first, end) = (field(question, "key"), field(question, "range_end"));
        let limit = question["limit"].as_u64().unwrap_or(u64::MAX);
        let is_meant = |key: &[u8]| match end.is_empty() {
            true => key == first,
            false => first.as_slice() <= key && key < end.as_slice(),
        };
        let found = self.kept.iter().filter(|(key, _)| is_meant(key.as_bytes()));
        let pairs = found.map(|(key, kept)| {
            let texts = [
                ("key", STANDARD.encode(key)),
                ("value", STANDARD.encode(&kept.value)),
                ("lease", kept.lease.clone()),
            ];
            // The gateway leaves empty fields out.
            let texts = texts.into_iter().filter(|(_, text)| !text.is_empty());
            let pair: Map<String, Value> = texts.map(|(name, text)| (name.to_owned(), json!(text))).collect();
            Value::Object(pair)
        });
        let pairs: Vec<Value> = pairs.take(usize::try_from(limit).unwrap_or(usize::MAX)).collect();
        match pairs.is_empty() {
            true => json!({}),
            false => json!({ "kvs": pairs }),
        }
    }
}

/// Returns the bytes of a request's field in base64. Empty if the field is missing.
fn field(question: &Value, name: &str) -> Vec<u8> {
    STANDARD
        .decode(question[name].as_str().unwrap_or_default())
        .unwrap()
}

/// Serves a simulated etcd on a free local port. Returns the etcd and its `HOST:PORT`.
pub async fn serve() -> (Arc<Mutex<Etcd>>, String) {
    let etcd = Arc::new(Mutex::new(Etcd::default()));
    let known = Arc::clone(&etcd);
    let answer = async move |uri: Uri, Json(question): Json<Value>| {
        let method = uri.path().strip_prefix("/v3/").unwrap_or_default().to_owned();
        Json(known.lock().answer(&method, &question))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let router = axum::Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(listener, router).await });
    (etcd, authority)
}
