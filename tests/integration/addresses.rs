//! Addresses and labels of holders: publishers and registrations give them, and every answer shows them.

use std::time::Duration;

use kvatlas_bridge::{Bridge, BridgeOptions, EngineDefaults, StateDirectory, parse_engine};
use kvatlas_client::publish::{HolderPublisher, PublisherOptions};
use kvatlas_core::hash::{BlockSize, HashSeed, block_hashes, sequence_hashes};
use kvatlas_core::wire::{
    EventBatch, HolderMatch, Labels, NamespaceName, Profile, QueryResult, TROUBLE_LABEL, Tier,
};
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use kvatlas_process::registry::{EngineKey, EngineRegistry, GivenEngine, MeantEngines, ServerKey};
use serde_json::{Value, json};

use crate::support::http::HttpClient;
use crate::support::{
    Client, broker, by_sequence, daemon, engine, eventually, hashes, http_get, namespace, snapshots_in,
    stored, subjects,
};

fn profile(address: &str, labels: Value) -> Profile {
    Profile {
        address: address.parse().ok(),
        labels: serde_json::from_value(labels).unwrap(),
    }
}

/// Starts the publisher of an engine with three blocks and this profile (address and labels).
async fn publisher(client: &Client, profile: Profile) -> HolderPublisher {
    let options = PublisherOptions {
        profile,
        ..PublisherOptions::default()
    };
    let publisher = engine(client.nats.clone(), &subjects(), "gpu-0", options).await;
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(10, 3))])
        .await
        .unwrap();
    client.applied("gpu-0", 0, publisher.flush().await.unwrap()).await;
    publisher
}

/// Queries three blocks, and returns the only holder in the answer.
async fn asked(client: &Client) -> HolderMatch {
    client.ask(hashes(10, 3)).await.holders.remove(0)
}

/// Returns the value at a JSON pointer in the answer to a GET request.
async fn got(http: &mut HttpClient, path: &str, pointer: &str) -> Value {
    let answer = http.get(path).await.json();
    let found = answer.pointer(pointer);
    found.unwrap_or_else(|| panic!("{pointer} of {answer}")).clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_says_where_a_holder_is() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("http.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let here = profile("10.0.0.7:8000", json!({"role": "prefill", "zone": "a"}));
    let publisher = publisher(&client, here.clone()).await;
    assert_eq!(asked(&client).await.profile(), here);
    let twice = vec![by_sequence(&hashes(10, 3)), by_sequence(&hashes(10, 2))];
    let results = client.queries.query_batch(&namespace(), twice).await.unwrap();
    let told = results.iter().map(|result| match result {
        QueryResult::Reply(reply) => reply.holders[0].profile(),
        QueryResult::Error(error) => panic!("{error:?}"),
    });
    assert_eq!(told.collect::<Vec<_>>(), [here.clone(), here.clone()]);
    let status = client.holder("gpu-0", 0).await.unwrap();
    assert_eq!(
        (status.address, status.labels),
        (here.address, here.labels.clone())
    );

    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    // A look-up without a model waits until the daemon knows all publishers.
    client.listed().await;
    let both = json!({"address": "10.0.0.7:8000", "labels": {"role": "prefill", "zone": "a"}});
    let said = |holder: &Value| json!({"address": holder["address"], "labels": holder["labels"]});
    let wanted = json!({"namespace": "llama", "sequence_hashes": [10, 11]});
    let found = http.post("/v1/query", &wanted).await.json();
    assert_eq!(said(&found["holders"][0]), both);
    let holder = got(&mut http, "/v1/status?namespace=llama", "/holders/0").await;
    assert_eq!(said(&holder), both);
    let workers = got(&mut http, "/workers", "/0").await;
    assert_eq!(workers["addresses"], json!({"0": "10.0.0.7:8000"}));
    assert_eq!(workers["labels"], json!({"0": both["labels"]}));
    // On this route, the query gives tokens, from which kvatlas computes its own block hashes. The stored hashes are
    // others, so nothing is found.
    let asked_for = json!({"model_name": "llama", "token_ids": [1, 2, 3]});
    let dynamo = http.post("/query", &asked_for).await.json();
    assert_eq!(dynamo.get("addresses"), None, "{dynamo}");
    let tokens: Vec<u32> = (1..=16).collect();
    let blocks = block_hashes(&tokens, BlockSize::DEFAULT, HashSeed::for_cache(None, None));
    let of_tokens = vec![stored(sequence_hashes(blocks).collect())];
    publisher.publish(Tier::DEVICE, of_tokens).await.unwrap();
    client.applied("gpu-0", 0, publisher.flush().await.unwrap()).await;
    for (path, body) in [
        ("/query", json!({"model_name": "llama", "token_ids": tokens})),
        ("/lookup", json!({"tokens": tokens})),
    ] {
        let answer = http.post(path, &body).await.json();
        assert_eq!(
            answer["addresses"],
            json!({"gpu-0": {"0": "10.0.0.7:8000"}}),
            "{path}: {answer}"
        );
    }
    let (_, body) = http_get(daemon.admin_address().unwrap(), "/workers");
    let admin: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(said(&admin["holders"][0]), both);

    // The last profile counts. An empty profile takes the earlier one back.
    for next in [profile("https://gpu-0.example/v1", json!({})), Profile::default()] {
        publisher.set_profile(next.clone()).await.unwrap();
        client.applied("gpu-0", 0, publisher.flush().await.unwrap()).await;
        assert_eq!(asked(&client).await.profile(), next);
    }
    let holder = got(&mut http, "/v1/status?namespace=llama", "/holders/0").await;
    assert_eq!((holder.get("address"), holder.get("labels")), (None, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_outlasts_the_daemon_and_goes_with_its_holder() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let start = async |settings: &[(&str, &str)]| -> Daemon { daemon(broker.url(), settings).await };
    let client = Client::connect(broker.url()).await;
    let first = start(&[(key, &directory)]).await;
    let here = profile("[fd00::7]:8000", json!({"model": "o/m"}));
    // The heartbeat interval is longer than the test, so no heartbeat repeats the profile.
    let options = PublisherOptions {
        profile: here.clone(),
        heartbeat_interval: std::time::Duration::from_secs(3600),
        ..PublisherOptions::default()
    };
    let publisher = engine(client.nats.clone(), &subjects(), "gpu-0", options).await;
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(10, 3))])
        .await
        .unwrap();
    client.applied("gpu-0", 0, publisher.flush().await.unwrap()).await;
    // A further batch does not contain the profile.
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(20, 1))])
        .await
        .unwrap();
    client.applied("gpu-0", 0, publisher.flush().await.unwrap()).await;
    first.stop().await;
    // The second daemon has only the snapshot, and the third daemon only the publisher's full state.
    let second = start(&[(key, &directory), ("resync.concurrency", "0")]).await;
    assert_eq!(asked(&client).await.profile(), here);
    second.stop().await;
    let third = start(&[]).await;
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(30, 1))])
        .await
        .unwrap();
    client.exact("gpu-0", 0).await;
    assert_eq!(asked(&client).await.profile(), here);

    // A new epoch begins without labels.
    publisher.set_profile(Profile::default()).await.unwrap();
    publisher.begin_epoch().await.unwrap();
    client.applied("gpu-0", 0, publisher.flush().await.unwrap()).await;
    assert_eq!(client.holder("gpu-0", 0).await.unwrap().labels, Labels::NONE);
    publisher.say_goodbye().await.unwrap();
    eventually("the holder has gone", async || {
        client.holder("gpu-0", 0).await.is_none().then_some(())
    })
    .await;
    third.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_is_too_long_goes_without_addresses() {
    const HOLDERS: u32 = 200;
    let options = BrokerOptions {
        config_lines: vec!["max_payload: 65536".to_owned()],
        ..crate::support::own_port()
    };
    let broker = EmbeddedBroker::start_with(&crate::support::server(), options)
        .await
        .unwrap();
    let settings = [
        ("limits.max_ranks_per_worker", "1024"),
        ("resync.concurrency", "0"),
    ];
    let _daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let value = "v".repeat(128);
    let labels = json!({"a": value, "b": value, "c": value, "d": "v".repeat(100)});
    let profile = profile(&format!("http://{}:80/", "h".repeat(240)), labels);
    let batch = |rank| EventBatch {
        epoch: 1,
        seq: 1,
        rank,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: Some(profile.clone()),
        events: vec![stored(hashes(10, 2))],
    };
    for rank in 0..HOLDERS {
        let subject = subjects().events(&namespace(), &"gpu-0".parse().unwrap());
        client
            .nats
            .publish(subject, batch(rank).encode().into())
            .await
            .unwrap();
    }
    let limited = || {
        let mut query = by_sequence(&hashes(10, 2));
        query.options.limit = Some(10);
        query
    };
    eventually("all are known", async || {
        let reply = client.queries.query(&namespace(), limited()).await.ok()?;
        (reply.holders_total == HOLDERS).then_some(())
    })
    .await;
    let told = |holders: &[HolderMatch]| holders.iter().filter(|holder| holder.address.is_some()).count();
    // With 800 bytes of labels for each holder, the answer would exceed the 64 KiB that the server accepts.
    let whole = client.ask(hashes(10, 2)).await.holders;
    assert_eq!((whole.len(), told(&whole)), (HOLDERS as usize, 0));
    let some = client
        .queries
        .query(&namespace(), limited())
        .await
        .unwrap()
        .holders;
    assert_eq!((some.len(), told(&some)), (10, 10));
    let status = client.status().await.unwrap().holders;
    assert!(status.len() == HOLDERS as usize && status.iter().all(|holder| holder.address.is_none()));
}

/// Returns the description of an engine that does not exist, so that the bridge knows only the facts in the
/// description.
fn new_engine(endpoint: &str, text: &str) -> GivenEngine {
    let defaults = EngineDefaults {
        model: Some("m".to_owned()),
        ..EngineDefaults::default()
    };
    parse_engine(&format!("gpu-0={endpoint}{text}"), &defaults)
        .unwrap()
        .remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_tells_the_address_that_an_engine_was_registered_with_last() {
    let broker = broker().await;
    let _daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let bridge = Bridge::new(subjects(), BridgeOptions::default());
    bridge.start(&client.nats);
    let model = NamespaceName::new("m").unwrap();
    let becomes = async |expected: Profile| {
        eventually("the address is told", async || {
            let status = client.queries.status(&model).await.ok()?;
            let holder = status.holders.into_iter().next()?;
            // No engine listens at the socket. The bridge adds a label that says so.
            let given = holder.labels.iter().filter(|(key, _)| *key != TROUBLE_LABEL);
            let given = given.map(|(key, value)| (key.to_owned(), value.to_owned()));
            let told = Profile {
                address: holder.address,
                labels: Labels::new(given.collect()).unwrap(),
            };
            (told == expected).then_some(holder.epoch)
        })
        .await
    };
    let register = |text: &str| bridge.register_given(new_engine("tcp://127.0.0.1:1", text));
    register(",address=10.0.0.7:8000,label=role:decode").unwrap();
    let epoch = becomes(profile("10.0.0.7:8000", json!({"role": "decode"}))).await;
    // A change of the address or labels does not begin a new epoch.
    register(",address=10.0.0.8:8000").unwrap();
    assert_eq!(becomes(profile("10.0.0.8:8000", json!({}))).await, epoch);
    let given = [new_engine("tcp://127.0.0.1:1", "")];
    bridge.replace("flags", &given).unwrap();
    assert_eq!(becomes(Profile::default()).await, epoch);
    assert!(register(",topic=kv").is_err());
    bridge.stop(true).await;
}

fn unregister_server(bridge: &Bridge, key: &ServerKey) {
    let key = EngineKey {
        instance: key.instance.clone(),
        model: key.cache(),
        rank: 0,
    };
    bridge.unregister(&MeantEngines::One(key));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_registered_has_an_address_and_the_next_bridge_asks_it() {
    let folder = tempfile::tempdir().unwrap();
    let bridge = || {
        let state = StateDirectory::open(folder.path(), Duration::from_secs(5)).unwrap();
        let state = Some(state);
        let options = BridgeOptions {
            state,
            ..BridgeOptions::default()
        };
        Bridge::new(subjects(), options)
    };
    let register =
        |bridge: &Bridge, text: &str| bridge.register_given(new_engine("http://127.0.0.1:1", text));
    let first = bridge();
    register(&first, ",address=10.0.0.7:8000,label=role:decode").unwrap();
    let profiles = |bridge: &Bridge| -> Vec<Profile> {
        let servers = bridge.servers().into_iter();
        servers.map(|state| state.server.profile).collect()
    };
    assert_eq!(
        profiles(&first),
        [profile("10.0.0.7:8000", json!({"role": "decode"}))]
    );
    // A change of the address does not change how the server is asked.
    register(&first, ",address=10.0.0.8:8000").unwrap();
    let changed = [profile("10.0.0.8:8000", json!({}))];
    assert_eq!(profiles(&first), changed);
    assert!(register(&first, ",block_size=64").is_err());
    // With another scheme, the same server has another cache.
    register(&first, ",scheme=llm-d-xxh64:7").unwrap();
    assert_eq!(first.servers().len(), 2);
    let servers = first.servers().into_iter().map(|state| state.server.key());
    let is_of_scheme = |key: &ServerKey| key.scheme.is_some();
    servers
        .filter(is_of_scheme)
        .for_each(|key| unregister_server(&first, &key));
    assert_eq!(profiles(&first), changed);
    first.stop(false).await;
    drop(first);
    let next = bridge();
    assert!(next.servers().is_empty());
    next.take_up_registered();
    assert_eq!(profiles(&next), changed);
    next.stop(false).await;
}

/// An engine without a stated address must get the host and port of its server, unless the server is on this machine or
/// the endpoint is an engine's own socket. The bridge must take the address from the URL, because no server answers
/// here.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_an_address_is_at_its_server_unless_that_is_this_machine() {
    let bridge = Bridge::new(subjects(), BridgeOptions::default());
    let register = |endpoint: &str, text: &str| {
        bridge.register_given(new_engine(endpoint, text)).unwrap();
        let servers = bridge.servers().into_iter().map(|state| state.server.profile);
        let engines = bridge.engines().into_iter().map(|state| state.engine.profile);
        let profile = servers.chain(engines).next().unwrap();
        profile.address.map(|address| address.to_string())
    };
    for (endpoint, text, expected) in [
        ("http://192.0.2.7:8000", "", Some("192.0.2.7:8000")),
        (
            "grpcs://gpu-0.invalid:50051",
            "",
            Some("grpcs://gpu-0.invalid:50051"),
        ),
        ("http://127.0.0.1:1", "", None),
        (
            "http://192.0.2.7:8000",
            ",format=tensorrt-llm",
            Some("192.0.2.7:8000"),
        ),
        ("tcp://192.0.2.7:5557", "", None),
    ] {
        assert_eq!(register(endpoint, text).as_deref(), expected, "{endpoint}");
        // A given address overrides the server's own address. When it is taken back, the server's address counts again.
        let told = register(endpoint, &format!("{text},address=gpu-0:80"));
        assert_eq!(told.as_deref(), Some("gpu-0:80"), "{endpoint}");
        assert_eq!(register(endpoint, text).as_deref(), expected, "{endpoint}");
        for state in bridge.engines() {
            bridge.unregister(&MeantEngines::One(state.engine.key));
        }
        for state in bridge.servers() {
            unregister_server(&bridge, &state.server.key());
        }
    }
    bridge.stop(false).await;
}
