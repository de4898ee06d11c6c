//! Queries of the wire contract over HTTP, as JSON. Fields, limits, answers and errors are the same as over NATS.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Query, State};
use axum::response::Response;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use kvatlas_core::wire::{
    ErrorCode, ModelKey, NamespaceName, QUERY_FIELDS, QueryFields, QueryRequest, QueryResult, WireError,
    WireLimits,
};

use crate::queries::{AnyReply, described};

use super::error::HttpRefusal;
use super::fields::{self, refused};
use super::shared::{HttpShared, Payload, json_response};

/// Fields of a request, or of one query of a batch, as JSON.
#[derive(Debug, Default)]
struct RequestJson {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
    v: Option<u64>,
    queries: Option<Queries>,
    fields: QueryFields,
}

impl<'de> Deserialize<'de> for RequestJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = RequestJson;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("an object with the fields of a query")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RequestJson, A::Error> {
                let mut request = RequestJson::default();
                let mut seen: Vec<&'static str> = Vec::new();
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    let Some(key) = known_key(&name) else {
                        // An unknown key is refused: ignoring it would change the answer without notice.
                        let known: Vec<&str> = known_keys().collect();
                        return Err(A::Error::custom(refused(&name, &known)));
                    };
                    if seen.contains(&key) {
                        return Err(A::Error::duplicate_field(key));
                    }
                    seen.push(key);
                    request.read(key, &mut map)?;
                }
                Ok(request)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// Keys that only a whole request may have, not a single query of a batch.
const REQUEST_KEYS: [&str; 5] = ["namespace", "model", "tenant", "v", "queries"];

fn known_keys() -> impl Iterator<Item = &'static str> {
    let query_keys = QUERY_FIELDS.iter().map(|field| field.key);
    REQUEST_KEYS.into_iter().chain(query_keys)
}

fn known_key(name: &str) -> Option<&'static str> {
    known_keys().find(|key| *key == name)
}

impl RequestJson {
    fn names_cache(&self) -> bool {
        self.namespace.is_some() || self.model.is_some() || self.tenant.is_some()
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &'static str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "namespace" => self.namespace = map.next_value()?,
            "model" => self.model = map.next_value()?,
            "tenant" => self.tenant = map.next_value()?,
            "v" => self.v = map.next_value()?,
            "queries" => self.queries = map.next_value()?,
            // The caller has already checked that the key is a known field.
            _ => drop(self.fields.take(key, map)?),
        }
        Ok(())
    }

    fn into_contract(self, limits: &WireLimits) -> Result<QueryRequest, HttpRefusal> {
        let queries = self.queries.map(|queries| queries.0);
        Ok(self.fields.into_request_within(self.v, queries, limits)?)
    }
}

/// Maximum number of queries in a body: the largest value that `queries.max_batch` may have. A query takes as little as
/// two bytes of a body, but some hundreds of bytes of memory. So further queries are refused while the body is read.
const QUERIES_MAX: usize = 65_536;

/// List of the queries of a batch.
#[derive(Debug)]
struct Queries(Vec<QueryFields>);

impl<'de> Deserialize<'de> for Queries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bounded;

        impl<'de> Visitor<'de> for Bounded {
            type Value = Queries;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(formatter, "a list of at most {QUERIES_MAX} queries")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Queries, A::Error> {
                let mut queries = Vec::new();
                while let Some(query) = items.next_element::<RequestJson>()? {
                    if queries.len() == QUERIES_MAX {
                        return Err(A::Error::invalid_length(QUERIES_MAX + 1, &self));
                    }
                    if query.names_cache() {
                        let text =
                            "one of the queries names a cache of its own; all are asked of the request's";
                        return Err(A::Error::custom(text));
                    }
                    if query.queries.is_some() {
                        return Err(A::Error::custom("one of the queries has queries of its own"));
                    }
                    queries.push(query.fields);
                }
                Ok(Queries(queries))
            }
        }

        deserializer.deserialize_seq(Bounded)
    }
}

/// Returns the namespace that a request names, by the namespace's name or by its model and tenant.
pub(super) fn namespace_of(
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
) -> Result<NamespaceName, HttpRefusal> {
    match (namespace, model) {
        (Some(_), Some(_)) => Err(HttpRefusal::BadRequest(
            "send namespace or model, not both".to_owned(),
        )),
        (Some(_), None) if tenant.is_some() => {
            let text = "tenant goes with model; a namespace has its tenant in its name";
            Err(HttpRefusal::BadRequest(text.to_owned()))
        }
        (Some(name), None) => {
            NamespaceName::new(&name).map_err(|error| HttpRefusal::name("namespace", &error))
        }
        (None, Some(model)) => {
            let key = ModelKey::of_tenant(model, tenant.unwrap_or_default());
            key.namespace()
                .map_err(|error| HttpRefusal::name("model", &error))
        }
        (None, None) => Err(HttpRefusal::BadRequest(
            "namespace or model is missing".to_owned(),
        )),
    }
}

/// Answers `POST /v1/query`: one query, or a batch of queries about one namespace.
pub(super) async fn query(
    State(shared): State<Arc<HttpShared>>,
    payload: Payload,
) -> Result<Response, HttpRefusal> {
    let started = Instant::now();
    let index = shared.index()?;
    let mut asked: RequestJson = fields::whole(payload.object()?)?;
    let namespace = namespace_of(asked.namespace.take(), asked.model.take(), asked.tenant.take())?;
    let request = asked.into_contract(&index.source.limits())?;
    let reply = index
        .source
        .answer(&namespace, &request, shared.reply_bytes_max())
        .await;
    let reply = reply.inspect_err(|error| index.errors.failed(error.code, &error.text))?;
    let (kind, queries) = described(&request);
    index
        .metrics
        .count(&namespace, kind, queries, started.elapsed(), reply.prompts());
    Ok(match &reply {
        AnyReply::Single(reply) => json_response(reply, Some(reply.is_exact())),
        AnyReply::Batch(reply) => json_response(reply, Some(are_exact(&reply.results))),
    })
}

/// Whether all results of a batch are exact. An error is not.
fn are_exact(results: &[QueryResult]) -> bool {
    results
        .iter()
        .all(|result| matches!(result, QueryResult::Reply(reply) if reply.is_exact()))
}

/// Parameters of `GET /v1/status`: the namespace, by its name or by model and tenant.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StatusQuery {
    namespace: Option<String>,
    model: Option<String>,
    tenant: Option<String>,
}

/// Answers `GET /v1/status` with the state of each holder of a namespace.
pub(super) async fn holders_status(
    State(shared): State<Arc<HttpShared>>,
    query: Result<Query<StatusQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, HttpRefusal> {
    let Query(query) = query.map_err(|error| HttpRefusal::BadRequest(error.body_text()))?;
    let index = shared.index()?;
    let namespace = namespace_of(query.namespace, query.model, query.tenant)?;
    let reply = index.source.status(&namespace).await?;
    if reply.holders.len() > STATUS_HOLDERS_MAX {
        let text = format!(
            "the namespace has {} holders, a status at most {STATUS_HOLDERS_MAX}; ask the admin listener for /workers",
            reply.holders.len()
        );
        return Err(WireError::new(ErrorCode::TooLarge, text).into());
    }
    Ok(json_response(&reply, Some(reply.is_exact())))
}

/// Maximum number of holders in one status reply.
const STATUS_HOLDERS_MAX: usize = 100_000;

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::{Position, PositionalLineageHash};
    use kvatlas_core::wire::{QueryKey, SingleQuery, WorkerName};

    use super::*;

    fn parsed(text: &str) -> Result<QueryRequest, HttpRefusal> {
        let request: RequestJson = serde_json::from_str(text).unwrap();
        request.into_contract(&WireLimits::default())
    }

    #[test]
    fn lineage_hashes_are_texts() {
        let asked = |hash: &str| format!(r#"{{"model":"m","lineage_hashes":[{hash}]}}"#);
        let lineage = PositionalLineageHash::from_u128(0x1a2b_3c4d_5e6f).unwrap();
        let expected = SingleQuery::new(QueryKey::LineageHashes(vec![lineage]));
        let read = parsed(&asked(r#""000000000000000000001a2b3c4d5e6f""#));
        assert_eq!(read.unwrap(), QueryRequest::Single(expected));
        assert!(serde_json::from_str::<RequestJson>(&asked("7")).is_err());
    }

    #[test]
    fn json_says_what_the_contract_says() {
        let single = parsed(r#"{"model":"m","tokens":[1,2,4294967295],"lora_name":"a","limit":3}"#).unwrap();
        let mut expected = SingleQuery::new(QueryKey::Tokens {
            tokens: vec![1, 2, u32::MAX],
            lora_name: Some("a".to_owned()),
            cache_salt: None,
        });
        expected.options.limit = Some(3);
        assert_eq!(single, QueryRequest::Single(expected));
        assert!(serde_json::from_str::<RequestJson>(r#"{"model":"m","tokens":[1],"x":1}"#).is_err());
        let batch = parsed(r#"{"queries":[{"sequence_hashes":[-1]},{"block_hashes":["0x7"]}]}"#).unwrap();
        let QueryRequest::Batch(queries) = batch else {
            panic!("not a batch");
        };
        assert_eq!(queries[0].key, QueryKey::SequenceHashes(vec![u64::MAX.into()]));
        assert_eq!(queries[1].key, QueryKey::BlockHashes(vec![7.into()]));
    }

    #[test]
    fn the_contract_refuses_what_it_refuses_on_nats() {
        for text in [
            "{}",
            r#"{"tokens":[1],"block_hashes":[1]}"#,
            r#"{"queries":[{"tokens":[1]}],"tokens":[1]}"#,
            r#"{"queries":[{"tokens":[1]}],"lora_name":"a"}"#,
            r#"{"queries":[{"tokens":[1]}],"workers":[]}"#,
            r#"{"queries":[{"block_hashes":[1],"lora_name":"a"}]}"#,
            r#"{"block_hashes":[1],"cache_salt":"a"}"#,
            r#"{"tokens":[1],"v":2}"#,
            r#"{"sequence_hashes":[1,2],"positions":[5]}"#,
        ] {
            assert!(matches!(parsed(text), Err(HttpRefusal::Contract(_))), "{text}");
        }
        for text in [
            r#"{"tokens":[1],"workers":["a b"]}"#,
            r#"{"tokens":[1],"tokens":[1]}"#,
            r#"{"queries":[{"model":"m","tokens":[1]}]}"#,
            r#"{"queries":[{"queries":[{"tokens":[1]}]}]}"#,
        ] {
            assert!(serde_json::from_str::<RequestJson>(text).is_err(), "{text}");
        }
    }

    /// Returns queries of several kinds, with up to `count` blocks, up to `count` names, and texts of `count` bytes.
    /// Tests pass counts below, at and above the limits.
    fn queries_of(count: usize) -> Vec<SingleQuery> {
        let hashes = 0..count as u64;
        let lineage = PositionalLineageHash::at(Position::default(), 1.into(), 1.into());
        let keys = [
            QueryKey::SequenceHashes(hashes.clone().map(Into::into).collect()),
            QueryKey::BlockHashes(hashes.clone().map(Into::into).collect()),
            QueryKey::LineageHashes(vec![lineage]),
            QueryKey::Tokens {
                tokens: vec![1; 4 * count],
                lora_name: Some("a".repeat(count)),
                cache_salt: Some("é".repeat(count / 2)),
            },
        ];
        let mut queries: Vec<SingleQuery> = keys.into_iter().map(SingleQuery::new).collect();
        let [first, second, ..] = queries.as_mut_slice() else {
            return queries;
        };
        let names = hashes
            .clone()
            .map(|number| WorkerName::new(&format!("w{number}")).unwrap());
        first.options.workers = Some(names.collect());
        first.positions = Some(hashes.map(|position| Position::new(position).unwrap()).collect());
        (second.options.limit, second.options.min_blocks) = (Some(1), 2);
        (second.options.explain, second.options.tiers, second.token_count) = (true, true, Some(99));
        queries
    }

    #[test]
    fn what_is_beyond_a_limit_is_refused_as_on_nats() {
        let limits = WireLimits {
            message_bytes_max: 200,
            tokens_per_block_max: 4,
            query_depth_max: 6,
            queries_max: 3,
            filter_workers_max: 5,
            name_bytes_max: 8,
            text_bytes_max: 4,
            ..WireLimits::default()
        };
        let mut refused = [0, 0];
        for count in 1..40 {
            let queries = queries_of(count).into_iter();
            let batch = (count < 6).then(|| QueryRequest::Batch(vec![queries_of(1)[1].clone(); count]));
            for request in queries.map(QueryRequest::Single).chain(batch) {
                let on_nats = QueryRequest::decode(&request.encode(), &limits).map_err(HttpRefusal::from);
                let asked: RequestJson =
                    serde_json::from_str(&serde_json::to_string(&request).unwrap()).unwrap();
                let over_http = asked.into_contract(&limits);
                refused[usize::from(on_nats.is_err())] += 1;
                match (&on_nats, &over_http) {
                    // On NATS, the bound on a message counts the keys too. Over HTTP, the bound counts only the values.
                    (Err(_), Ok(_)) => assert!(request.encode().len() > limits.message_bytes_max),
                    (Err(HttpRefusal::Contract(one)), Err(HttpRefusal::Contract(other))) => {
                        assert_eq!(one.code, other.code, "{one:?} {other:?}");
                    }
                    _ => assert_eq!(over_http, on_nats, "{request:?}"),
                }
            }
        }
        assert!(refused.iter().all(|count| *count > 9), "{refused:?}");
    }

    #[test]
    fn a_namespace_has_one_name() {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let named = |namespace, model, tenant| {
            namespace_of(owned(namespace), owned(model), owned(tenant)).map(|name| name.to_string())
        };
        assert_eq!(named(Some("a"), None, None), Ok("a".to_owned()));
        assert_eq!(
            named(None, Some("o/m-1.5"), Some("t")),
            Ok("o__m-1_d5_tt".to_owned())
        );
        assert!(named(Some("a"), Some("a"), None).is_err());
        assert!(named(Some("a"), None, Some("t")).is_err());
        assert!(named(Some("a.b"), None, None).is_err());
        assert!(named(None, None, None).is_err());
    }
}
