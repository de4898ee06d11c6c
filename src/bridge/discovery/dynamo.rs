//! Event planes of Dynamo, read from the records of its discovery. The records say which publishers there are, over what they
//! publish, and which model a component serves.
//!
//! | key | what the record says |
//! |---|---|
//! | `v1/event_channels/SCOPE/topic/kv-events/PUBLISHER` | the publisher's address on ZeroMQ, or its subject on NATS |
//! | `v1/mdc/NAMESPACE/COMPONENT/ENDPOINT/INSTANCE` | the model of the endpoint, and the size of its blocks |
//!
//! On ZeroMQ each publisher is a plane (a source of events) of its own. It counts as gone when its record is gone. On NATS all
//! publishers of an endpoint share one subject.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvatlas_core::wire::{ModelKey, worker_of_instance};
use kvatlas_engines::Format;
use serde::Deserialize;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use kvatlas_process::registry::{EngineKey, GivenEngine, NewEngine};

use super::super::dynamo::{CHANNELS, Pair, RecordsError, look_at};
use super::super::spec::EngineDefaults;
use super::reports::Reports;
use super::spec::DynamoPlace;

const MODELS: &str = "v1/mdc/";
const TOPIC: &str = "kv-events";

/// Transport over which a publisher sends its events.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PublisherTransport {
    /// ZeroMQ, with the publisher's address.
    Zmq(String),
    /// NATS, with the first words of the publisher's subject.
    Nats(String),
}

/// A publisher's record: its scope, such as `namespace/n/component/c/endpoint/e`, its number, and how it publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Channel {
    scope: String,
    publisher: String,
    transport: PublisherTransport,
    card: ScopeCard,
    /// Key of the model's record that gave `card`.
    record: Option<String>,
}

/// A model's record: the model that an endpoint serves, and the number of tokens in a block.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Card {
    model: String,
    block_size: Option<u32>,
}

/// Card of a scope, as all models' records of the scope together give it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ScopeCard {
    /// The scope has no record.
    Unknown,
    /// All records of the scope say the same.
    Known(Card),
    /// Records of the scope differ, as while workers are replaced by those of another model. Nothing says which record
    /// belongs to which publisher.
    Several,
}

/// Records that count, by their keys. Each is as it was when it could last be read.
#[derive(Debug, Default)]
struct KnownRecords {
    channels: BTreeMap<String, Channel>,
    /// Models' records, each with its scope.
    cards: BTreeMap<String, (String, Card)>,
}

impl KnownRecords {
    /// Gives each publisher the card of its scope. A publisher that is one process keeps the card that it had before,
    /// in two cases:
    ///
    /// - The records of the scope differ.
    /// - The scope's card is another one, and the record that gave the earlier card is gone. The process then still
    ///   serves the earlier model, while others serve the new one.
    fn give_cards(&mut self) {
        let mut cards: BTreeMap<&str, (&String, ScopeCard)> = BTreeMap::new();
        for (key, (scope, card)) in &self.cards {
            let card = ScopeCard::Known(card.clone());
            let (_, known) = cards.entry(scope).or_insert_with(|| (key, card.clone()));
            if *known != card {
                *known = ScopeCard::Several;
            }
        }
        for channel in self.channels.values_mut() {
            let (record, card) = match cards.get(channel.scope.as_str()) {
                Some((record, card)) => (Some(*record), card.clone()),
                None => (None, ScopeCard::Unknown),
            };
            let is_process = matches!(channel.transport, PublisherTransport::Zmq(_));
            let is_known = matches!(channel.card, ScopeCard::Known(_));
            channel
                .record
                .take_if(|record| !self.cards.contains_key(record.as_str()));
            let may_be_other = card == ScopeCard::Several || channel.record.is_none();
            if is_process && is_known && card != channel.card && may_be_other {
                continue;
            }
            channel.card = card;
            channel.record = channel.record.take().or_else(|| record.cloned());
        }
    }
}

/// Looks at the records of `place` every `interval`, for ever, and reports the engines.
pub(super) async fn run(
    place: &DynamoPlace,
    defaults: &EngineDefaults,
    interval: Duration,
    reports: &Reports,
) {
    let mut known = KnownRecords::default();
    loop {
        match look(place, &mut known).await {
            Ok(()) => {
                let (engines, troubles) = engines(place, known.channels.values(), defaults);
                reports.know(engines);
                if let Some(trouble) = troubles.first() {
                    reports.fail(trouble);
                }
            }
            Err(error) => reports.fail(&format!("Dynamo's records cannot be read: {error}")),
        }
        tokio::time::sleep(interval).await;
    }
}

/// Reads the records, and writes those that count to `known`.
///
/// - If a record cannot be read, its earlier value counts.
/// - A publisher's record that is gone no longer counts.
/// - A model's record that is gone still counts for the publishers that it has counted for, while their scope has no
///   other one. A program that replaces a record may remove it first.
async fn look(place: &DynamoPlace, known: &mut KnownRecords) -> Result<(), RecordsError> {
    let channels = look_at(&place.records, CHANNELS).await?;
    let cards = look_at(&place.records, MODELS).await?;
    let mut before = std::mem::take(known);
    // Scopes of publishers that were known before.
    let mut served = BTreeSet::new();
    let is_of_plane = |(key, _): &Pair| key.contains(&format!("/topic/{TOPIC}/"));
    for (key, value) in channels.into_iter().filter(is_of_plane) {
        let earlier = before.channels.remove(&key);
        served.extend(earlier.iter().map(|channel| channel.scope.clone()));
        // If a record cannot be read, it may be half written at this moment.
        let former = earlier.clone();
        if let Some(mut channel) = read_channel(&key, &value).or(earlier) {
            if let Some(former) = former {
                (channel.card, channel.record) = (former.card, former.record);
            }
            known.channels.insert(key, channel);
        }
    }
    for (key, value) in cards {
        if let Some(card) = read_card(&value).or_else(|| before.cards.remove(&key)) {
            known.cards.insert(key, card);
        }
    }
    for (scope, _) in known.cards.values() {
        served.remove(scope);
    }
    before.cards.retain(|_, (scope, _)| served.contains(scope));
    known.cards.append(&mut before.cards);
    known.give_cards();
    Ok(())
}

/// Returns the engines of the publishers in `channels`, and texts that say why some of these publishers are not
/// followed.
fn engines<'a>(
    place: &DynamoPlace,
    channels: impl Iterator<Item = &'a Channel>,
    defaults: &EngineDefaults,
) -> (Vec<GivenEngine>, Vec<String>) {
    let (mut engines, mut troubles) = (BTreeMap::new(), BTreeSet::new());
    for channel in channels.filter(|channel| place.is_meant(&channel.scope)) {
        let card = match &channel.card {
            ScopeCard::Unknown => None,
            ScopeCard::Known(card) => Some(card),
            ScopeCard::Several => {
                let scope = &channel.scope;
                troubles.insert(format!(
                    "the model cards of {scope} differ: new publishers are followed once they agree"
                ));
                continue;
            }
        };
        let model = match (card, &defaults.model) {
            // The operator asked for another model than the one that the endpoint serves.
            (Some(card), Some(given)) if card.model != *given => continue,
            (Some(card), _) => &card.model,
            (None, Some(given)) => given,
            (None, None) => {
                let scope = &channel.scope;
                troubles.insert(format!("no record says which model {scope} serves: give --model"));
                continue;
            }
        };
        let Some((name, endpoint, topic)) = source_of(place, channel) else {
            troubles.insert(format!(
                "{} publishes over NATS: say where, with nats=nats://HOST:PORT",
                channel.scope
            ));
            continue;
        };
        let block_size = defaults.block_size.or_else(|| card?.block_size);
        let engine = NewEngine {
            key: EngineKey {
                instance: name.clone(),
                // The events of a plane have no tokens. So an engine with a scheme is refused later, with an error
                // text.
                model: ModelKey::of_tenant(model, defaults.tenant.clone().unwrap_or_default())
                    .speaking(defaults.scheme.clone()),
                rank: 0,
            },
            endpoint,
            replay: None,
            format: Format::Dynamo,
            block_size: block_size.unwrap_or(defaults.untold_block_size),
            topic,
            beside: Default::default(),
            groups: Default::default(),
            profile: Default::default(),
            discovery: Some(place.records.clone()),
            ttl: None,
        };
        engines.insert(name, GivenEngine::Publisher(engine));
    }
    (engines.into_values().collect(), troubles.into_iter().collect())
}

/// Returns the name, the endpoint and the topic of the event plane over which a publisher sends its events. `None` if
/// the plane is on NATS and the address of its NATS server is not given.
fn source_of(place: &DynamoPlace, channel: &Channel) -> Option<(String, String, String)> {
    match &channel.transport {
        PublisherTransport::Zmq(endpoint) => {
            let name = format!("dynamo-{}", channel.publisher);
            Some((name, endpoint.clone(), String::new()))
        }
        PublisherTransport::Nats(prefix) => {
            let subject = format!("{prefix}.{TOPIC}");
            let words: Vec<&str> = channel.scope.split('/').skip(1).step_by(2).collect();
            let name = words.join(".");
            // A scope that is too long for a name is replaced by a hash.
            let name = match worker_of_instance(&name) {
                Ok(_) => name,
                Err(_) => format!("dynamo-{:x}", xxh3_64(subject.as_bytes())),
            };
            Some((name, place.nats.clone()?, subject))
        }
    }
}

/// Reads a publisher's record; `None` if it has another form.
fn read_channel(key: &str, value: &[u8]) -> Option<Channel> {
    let (scope, rest) = key.strip_prefix(CHANNELS)?.rsplit_once("/topic/")?;
    let (_, publisher) = rest.split_once('/')?;
    let value: Value = serde_json::from_slice(value).ok()?;
    let config = |name: &str| value.pointer(&format!("/transport/config/{name}"))?.as_str();
    let transport = match config("endpoint") {
        Some(endpoint) => PublisherTransport::Zmq(endpoint.to_owned()),
        None => PublisherTransport::Nats(config("subject_prefix")?.to_owned()),
    };
    Some(Channel {
        scope: scope.to_owned(),
        publisher: publisher.to_owned(),
        transport,
        card: ScopeCard::Unknown,
        record: None,
    })
}

/// Reads a model's record. Returns its scope, and the model's [`Card`]; `None` if it is an adapter's record, or has another form.
fn read_card(value: &[u8]) -> Option<(String, Card)> {
    #[derive(Deserialize)]
    struct Record {
        namespace: String,
        component: String,
        endpoint: String,
        card_json: CardJson,
    }
    #[derive(Deserialize)]
    struct CardJson {
        display_name: String,
        #[serde(default)]
        kv_cache_block_size: Option<u32>,
        #[serde(default)]
        lora: Option<Value>,
    }

    let record: Record = serde_json::from_slice(value).ok()?;
    let Record {
        namespace,
        component,
        endpoint,
        card_json,
    } = record;
    let card = Card {
        model: card_json.display_name,
        block_size: card_json.kv_cache_block_size.filter(|size| *size > 0),
    };
    let scope = format!("namespace/{namespace}/component/{component}/endpoint/{endpoint}");
    card_json.lora.is_none().then_some((scope, card))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use serde_json::json;

    use super::*;

    const SCOPE: &str = "namespace/dynamo/component/backend/endpoint/generate";

    fn place(text: &str) -> DynamoPlace {
        DynamoPlace::parse(text).unwrap()
    }

    /// A record as Dynamo 1.6.1 writes it.
    fn channel(publisher: &str, kind: &str, config: &Value) -> Channel {
        let value = json!({"type": "EventChannel", "topic": "kv-events", "instance_id": 1, "transport": {"kind": kind, "config": config}});
        let key = format!("{CHANNELS}{SCOPE}/topic/kv-events/{publisher}");
        read_channel(&key, value.to_string().as_bytes()).unwrap()
    }

    /// A model's record as Dynamo 1.6.1 writes it.
    fn model(name: &str, size: u32, lora: &Value) -> String {
        let value = json!({"type": "Model", "namespace": "dynamo", "component": "backend", "endpoint": "generate", "instance_id": 9,
            "card_json": {"display_name": name, "slug": name, "kv_cache_block_size": size, "lora": lora}});
        value.to_string()
    }

    fn card(size: u32) -> Card {
        let lora = model("sql", size, &json!({"name": "sql"}));
        assert_eq!(read_card(lora.as_bytes()), None);
        let (scope, card) = read_card(model("m", size, &Value::Null).as_bytes()).unwrap();
        assert_eq!(scope, SCOPE);
        card
    }

    fn found(
        place: &DynamoPlace,
        channels: &[Channel],
        defaults: &EngineDefaults,
        size: u32,
    ) -> (Vec<NewEngine>, Vec<String>) {
        let card = ScopeCard::Known(card(size));
        let channel = |channel: &Channel| Channel {
            card: card.clone(),
            ..channel.clone()
        };
        let channels: Vec<Channel> = channels.iter().map(channel).collect();
        let (engines, troubles) = engines(place, channels.iter(), defaults);
        let publisher = |engine| match engine {
            GivenEngine::Publisher(engine) => engine,
            GivenEngine::Server(server) => panic!("{server:?}"),
        };
        (engines.into_iter().map(publisher).collect(), troubles)
    }

    #[test]
    fn each_publisher_on_zeromq_is_a_plane() {
        let channels = ["a1", "b2"].map(|publisher| {
            channel(
                publisher,
                "Zmq",
                &json!({"endpoint": format!("tcp://10.0.0.7:{}", publisher.len())}),
            )
        });
        let place = place("etcd:http://e:2379");
        let (engines, troubles) = found(&place, &channels, &EngineDefaults::default(), 64);
        assert!(troubles.is_empty());
        let names: Vec<_> = engines
            .iter()
            .map(|engine| engine.key.instance.as_str())
            .collect();
        assert_eq!(names, ["dynamo-a1", "dynamo-b2"]);
        let engine = &engines[0];
        assert_eq!((engine.key.model.model.as_str(), engine.block_size), ("m", 64));
        assert_eq!(
            (engine.endpoint.as_str(), engine.format),
            ("tcp://10.0.0.7:2", Format::Dynamo)
        );
        assert_eq!(engine.discovery.as_ref(), Some(&place.records));
        // The source is told to look for another model, or for another component.
        let other = EngineDefaults {
            model: Some("other".to_owned()),
            ..EngineDefaults::default()
        };
        assert_eq!(found(&place, &channels, &other, 64).0, []);
        let elsewhere = super::tests::place("etcd:http://e:2379,component=dynamo.prefill");
        assert_eq!(
            found(&elsewhere, &channels, &EngineDefaults::default(), 64),
            (vec![], vec![])
        );
        let (_, troubles) = super::engines(&place, channels.iter(), &EngineDefaults::default());
        assert!(troubles[0].contains("--model"), "{troubles:?}");
    }

    #[test]
    fn publishers_on_nats_share_a_plane() {
        let prefix = json!({"subject_prefix": "namespace.dynamo.component.backend.endpoint.generate"});
        let channels = ["a1", "b2"].map(|publisher| channel(publisher, "Nats", &prefix));
        let (engines, troubles) = found(&place("file:/d"), &channels, &EngineDefaults::default(), 16);
        assert!(
            engines.is_empty() && troubles.len() == 1 && troubles[0].contains("nats=nats://"),
            "{troubles:?}"
        );
        let place = place("file:/d,nats=nats://n:4222,component=dynamo.backend");
        let (engines, troubles) = found(&place, &channels, &EngineDefaults::default(), 16);
        assert!(troubles.is_empty());
        let [engine] = engines.as_slice() else {
            panic!("{engines:?}");
        };
        assert_eq!(engine.key.instance, "dynamo.backend.generate");
        assert_eq!(
            (engine.endpoint.as_str(), engine.topic.as_str()),
            (
                "nats://n:4222",
                "namespace.dynamo.component.backend.endpoint.generate.kv-events"
            )
        );
    }

    /// Returns the file of a record in discovery's folder.
    fn file(folder: &Path, bucket: &str, rest: &str) -> PathBuf {
        let bucket = folder.join(bucket);
        std::fs::create_dir_all(&bucket).unwrap();
        bucket.join(rest.replace('/', "%2F").replace('-', "%2D"))
    }

    #[tokio::test]
    async fn a_record_that_is_written_just_now_is_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let file = |topic: &str| file(folder.path(), CHANNELS, &format!("{SCOPE}/topic/{topic}/a1"));
        let value = json!({"transport": {"kind": "Zmq", "config": {"endpoint": "tcp://h:1"}}}).to_string();
        for topic in [TOPIC, "kv_metrics"] {
            std::fs::write(file(topic), &value).unwrap();
        }
        let place = place(&format!("file:{}", folder.path().display()));
        let mut known = KnownRecords::default();
        look(&place, &mut known).await.unwrap();
        let expected = channel("a1", "Zmq", &json!({"endpoint": "tcp://h:1"}));
        assert_eq!(known.channels.values().collect::<Vec<_>>(), [&expected]);
        std::fs::write(file(TOPIC), "{").unwrap();
        look(&place, &mut known).await.unwrap();
        assert_eq!(known.channels.values().collect::<Vec<_>>(), [&expected]);
        std::fs::remove_file(file(TOPIC)).unwrap();
        look(&place, &mut known).await.unwrap();
        assert!(known.channels.is_empty());
    }

    #[tokio::test]
    async fn an_engine_whose_model_is_written_just_now_is_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let publisher = file(folder.path(), CHANNELS, &format!("{SCOPE}/topic/{TOPIC}/a1"));
        let value = json!({"transport": {"kind": "Zmq", "config": {"endpoint": "tcp://h:1"}}});
        std::fs::write(&publisher, value.to_string()).unwrap();
        let models = file(folder.path(), MODELS, "dynamo/backend/generate/9");
        let place = place(&format!("file:{}", folder.path().display()));
        let given = EngineDefaults {
            model: Some("m".to_owned()),
            ..EngineDefaults::default()
        };
        let mut known = KnownRecords::default();
        let mut sizes = async || {
            look(&place, &mut known).await.unwrap();
            [&EngineDefaults::default(), &given].map(|defaults| {
                let (engines, _) = engines(&place, known.channels.values(), defaults);
                let size = |engine: &GivenEngine| match engine {
                    GivenEngine::Publisher(engine) => engine.block_size,
                    GivenEngine::Server(server) => panic!("{server:?}"),
                };
                engines.iter().map(size).collect::<Vec<_>>()
            })
        };
        let text = model("m", 64, &Value::Null);
        std::fs::write(&models, &text).unwrap();
        assert_eq!(sizes().await, [[64], [64]]);
        std::fs::write(&models, &text[..text.len() / 2]).unwrap();
        assert_eq!(sizes().await, [[64], [64]]);
        std::fs::remove_file(&models).unwrap();
        assert_eq!(sizes().await, [[64], [64]]);
        std::fs::write(&models, model("m", 32, &Value::Null)).unwrap();
        assert_eq!(sizes().await, [[32], [32]]);
        // A model's record that is gone does not count for another publisher.
        for gone in [&models, &publisher] {
            std::fs::remove_file(gone).unwrap();
        }
        let other = file(folder.path(), CHANNELS, &format!("{SCOPE}/topic/{TOPIC}/b2"));
        std::fs::write(other, value.to_string()).unwrap();
        let untold = EngineDefaults::default().untold_block_size;
        assert_eq!(sizes().await, [vec![], vec![untold]]);
    }

    #[tokio::test]
    async fn publishers_that_come_while_model_cards_differ_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let write = |bucket: &str, rest: &str, text: &str| {
            std::fs::write(file(folder.path(), bucket, rest), text).unwrap();
        };
        let publisher = |name: &str, transport: &Value| {
            let value = json!({"transport": transport}).to_string();
            write(CHANNELS, &format!("{SCOPE}/topic/{TOPIC}/{name}"), &value);
        };
        let zmq = json!({"kind": "Zmq", "config": {"endpoint": "tcp://h:1"}});
        publisher("a1", &zmq);
        write(MODELS, "dynamo/backend/generate/9", &model("m", 16, &Value::Null));
        let place = place(&format!("file:{},nats=nats://n:4222", folder.path().display()));
        let mut known = KnownRecords::default();
        let mut found = async || {
            look(&place, &mut known).await.unwrap();
            let (engines, troubles) = engines(&place, known.channels.values(), &EngineDefaults::default());
            let size = |engine: &GivenEngine| match engine {
                GivenEngine::Publisher(engine) => (engine.key.instance.clone(), engine.block_size),
                GivenEngine::Server(server) => panic!("{server:?}"),
            };
            (engines.iter().map(size).collect::<Vec<_>>(), troubles)
        };
        let sized = |name: &str, size: u32| (name.to_owned(), size);
        let first = sized("dynamo-a1", 16);
        assert_eq!(found().await, (vec![first.clone()], vec![]));
        write(MODELS, "dynamo/backend/generate/a", &model("m", 64, &Value::Null));
        publisher("b2", &zmq);
        publisher("c3", &json!({"kind": "Nats", "config": {"subject_prefix": "s"}}));
        let (found_now, troubles) = found().await;
        assert_eq!(found_now, std::slice::from_ref(&first));
        assert!(
            troubles.len() == 1 && troubles[0].contains("differ"),
            "{troubles:?}"
        );
        std::fs::remove_file(file(folder.path(), MODELS, "dynamo/backend/generate/9")).unwrap();
        let others = [sized("dynamo-b2", 64), sized("dynamo.backend.generate", 64)];
        // The process of the first publisher has not changed, although its model's record is gone.
        for _ in 0..2 {
            let expected = [vec![first.clone()], others.to_vec()].concat();
            assert_eq!(found().await, (expected, vec![]));
        }
        // The record that gave the others their card is written anew.
        write(MODELS, "dynamo/backend/generate/a", &model("m", 32, &Value::Null));
        let others = others.map(|(name, _)| sized(&name, 32));
        assert_eq!(found().await, ([vec![first], others.to_vec()].concat(), vec![]));
    }
}
