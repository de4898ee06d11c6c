//! Garbage on every subject. The answer is a clear error or a counted drop, and stored blocks are not lost.

use crate::support::metrics::total;
use crate::support::process::Process;
use crate::support::{
    Client, broker, config, daemon, eventually, hashes, http_get, lasting_port, matches, namespace, skipped,
    stored, subjects, worker,
};
use kvatlas_client::ClientError;
use kvatlas_core::wire::{
    ErrorCode, Hint, NamespaceName, QueryKey, QueryRequest, QueryResult, SingleQuery, WireError,
};
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};

/// Sends a raw payload on a subject. Returns the code and the text of the error reply.
async fn refusal(client: &Client, subject: &str, payload: Vec<u8>) -> (String, String) {
    let reply = client
        .nats
        .request(subject.to_owned(), payload.into())
        .await
        .unwrap();
    let headers = reply.headers.unwrap_or_default();
    let header = |name: &str| {
        headers
            .get(name)
            .map(|value| value.as_str().to_owned())
            .unwrap_or_default()
    };
    (header("Nats-Service-Error-Code"), header("Nats-Service-Error"))
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_told_what_to_change() {
    let broker = broker().await;
    let daemon = Process::serve(
        broker.url(),
        &[("queries.max_depth_blocks", "100"), ("queries.max_batch", "4")],
    );
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 4))])
        .await;
    let query = subjects().query(&namespace());
    let ask =
        |count| QueryRequest::Single(SingleQuery::new(QueryKey::SequenceHashes(hashes(10, count)))).encode();
    let batch = |count| {
        QueryRequest::Batch(vec![
            SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 1)));
            count
        ])
        .encode()
    };
    let mut future = ask(2);
    let version = future.iter().position(|byte| *byte == b'v').unwrap() + 1;
    future[version] = 9;
    let cases: Vec<(&str, Vec<u8>, &str, &str)> = vec![
        ("empty", Vec::new(), "400", "ends inside a value"),
        ("garbage", b"garbage".to_vec(), "400", "a map with text keys"),
        ("truncated", ask(5)[..20].to_vec(), "400", "ends inside a value"),
        (
            "ragged",
            b"\x81\xafsequence_hashes\xc4\x03abc".to_vec(),
            "400",
            "not a multiple of 8",
        ),
        ("nothing asked", b"\x80".to_vec(), "400", "nothing is asked for"),
        (
            "nested",
            [vec![0x81, 0xa1, b'x'], vec![0x91; 100_000]].concat(),
            "400",
            "ends inside a value",
        ),
        ("too deep", ask(101), "413", "at most 100 are allowed"),
        ("too many", batch(5), "413", "at most 4 are allowed"),
        ("future version", future, "505", "send v = 1"),
    ];
    for (what, payload, code, text) in cases {
        let (found_code, found_text) = refusal(&client, &query, payload).await;
        assert_eq!(found_code, code, "{what}: {found_text}");
        assert!(found_text.contains(text), "{what}: {found_text}");
    }
    let (code, text) = refusal(&client, "kvatlas.v1.query.two.tokens", ask(1)).await;
    assert_eq!(
        (code.as_str(), text.contains("A-Z a-z 0-9")),
        ("400", true),
        "{text}"
    );

    client.listed().await;
    let nobody = NamespaceName::new("nobody").unwrap();
    let error = client
        .queries
        .query(&nobody, SingleQuery::new(QueryKey::SequenceHashes(hashes(1, 1))))
        .await;
    let Err(ClientError::Refused(WireError {
        code: ErrorCode::UnknownNamespace,
        ..
    })) = error
    else {
        panic!("{error:?}");
    };
    assert_eq!(
        matches(&client.ask(hashes(10, 4)).await),
        [("gpu-0".to_owned(), 0, 4, true)]
    );
    assert!(total(&daemon, "kvatlas_query_errors_total", "bad_request") >= 7.0);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_query_of_a_batch_spoils_only_itself() {
    let broker = broker().await;
    let daemon = daemon(
        broker.url(),
        &[
            ("queries.max_depth_blocks", "1000"),
            ("namespace_defaults.block_size", "1"),
        ],
    )
    .await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 4))])
        .await;
    let tokens = QueryKey::Tokens {
        tokens: vec![1; 2000],
        lora_name: None,
        cache_salt: None,
    };
    let queries = vec![
        SingleQuery::new(tokens),
        SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 4))),
    ];
    let results = client.queries.query_batch(&namespace(), queries).await.unwrap();
    assert!(
        matches!(&results[0], QueryResult::Error(error) if error.code == 413),
        "{results:?}"
    );
    assert!(
        matches!(&results[1], QueryResult::Reply(reply) if reply.holders.len() == 1),
        "{results:?}"
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_events_are_counted_by_reason() {
    let broker = broker().await;
    let settings = [
        ("limits.max_namespaces", "2"),
        ("limits.max_workers_per_namespace", "2"),
        ("limits.max_ranks_per_worker", "1"),
        ("events.max_message_bytes", "4096"),
    ];
    let daemon = Process::serve(broker.url(), &settings);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 4))])
        .await;
    let publish =
        async |subject: String, payload: Vec<u8>| client.nats.publish(subject, payload.into()).await.unwrap();
    let good = publisher_payload();
    publish("kvatlas.v1.events.llama".to_owned(), good.clone()).await;
    publish("kvatlas.v1.events.llama.gpu-0.more".to_owned(), good.clone()).await;
    publish(
        subjects().events(&namespace(), &worker("gpu-1")),
        b"garbage".to_vec(),
    )
    .await;
    publish(subjects().events(&namespace(), &worker("gpu-1")), vec![0; 5000]).await;
    publish(subjects().events(&namespace(), &worker("gpu-1")), good.clone()).await;
    // Workers are assigned to lanes in turn, so the second worker must be known before the third one comes.
    eventually("gpu-1 is known", async || client.holder("gpu-1", 0).await).await;
    publish(subjects().events(&namespace(), &worker("gpu-2")), good.clone()).await;
    let mut other_rank = client.publisher("gpu-1", 1);
    other_rank
        .publish(kvatlas_core::wire::Tier::DEVICE, Vec::new())
        .await
        .unwrap();
    // Garbage for invented namespaces takes up no room for namespaces.
    for number in 0..5 {
        let invented = NamespaceName::new(&format!("invented-{number}")).unwrap();
        publish(
            subjects().events(&invented, &worker("gpu-0")),
            b"garbage".to_vec(),
        )
        .await;
    }
    for name in ["second", "third"] {
        publish(
            subjects().events(&NamespaceName::new(name).unwrap(), &worker("gpu-0")),
            good.clone(),
        )
        .await;
    }
    for (reason, count) in [
        ("bad_subject", 2.0),
        ("undecodable", 1.0),
        ("oversized", 1.0),
        ("too_many_workers", 1.0),
        ("too_many_ranks", 1.0),
        ("too_many_namespaces", 1.0),
    ] {
        let label = format!("reason=\"{reason}\"");
        eventually(&label, async || {
            (total(&daemon, "kvatlas_batches_dropped_total", &label) >= count).then_some(())
        })
        .await;
    }
    let second = client
        .queries
        .status(&NamespaceName::new("second").unwrap())
        .await;
    assert_eq!(
        second.unwrap().holders.len(),
        1,
        "the second namespace still had room"
    );
    assert_eq!(
        matches(&client.ask(hashes(10, 4)).await)[0],
        ("gpu-0".to_owned(), 0, 4, true)
    );
    client.listed().await;
    // The daemon knows nothing about the refused worker.
    let mut of_refused = SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 4)));
    of_refused.options.workers = Some(vec![worker("gpu-2")]);
    let reply = client.ask_with(of_refused).await.unwrap();
    assert_eq!((reply.holders.len(), reply.doubtful_holders), (0, 1));
    daemon.stop();
}

/// Returns a valid payload of a new worker's first batch.
fn publisher_payload() -> Vec<u8> {
    let events = vec![stored(hashes(10, 1))];
    let batch = kvatlas_core::wire::EventBatch {
        epoch: 1,
        seq: 1,
        rank: 0,
        time_us: None,
        tier: kvatlas_core::wire::Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    };
    batch.encode()
}

/// Starts a broker that accepts messages of at most 2048 bytes.
async fn narrow_broker() -> EmbeddedBroker {
    // A later line of the configuration overrides the embedded default.
    let options = BrokerOptions {
        config_lines: vec!["max_payload: 2048".to_owned()],
        ..crate::support::own_port()
    };
    EmbeddedBroker::start_with(&crate::support::server(), options)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_no_server_would_take_is_an_error_with_its_sizes() {
    let broker = narrow_broker().await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let before = publisher.cursor();
    let told = publisher
        .publish(kvatlas_core::wire::Tier::DEVICE, vec![stored(hashes(1, 500))])
        .await
        .unwrap_err();
    // The batch was not sent, so the next batch gets its number.
    assert_eq!(publisher.cursor(), before);
    let asked = client
        .ask_with(SingleQuery::new(QueryKey::SequenceHashes(hashes(1, 500))))
        .await
        .unwrap_err();
    let query = SingleQuery::new(QueryKey::SequenceHashes(hashes(1, 500)));
    let hint = Hint {
        worker: worker("gpu-0"),
        rank: 0,
        prompt: query.clone(),
    };
    let hinted = client
        .queries
        .tell_hints(&namespace(), vec![hint])
        .await
        .unwrap_err();
    let gathering = client.queries.clone().gathering().await.unwrap();
    let gathered = gathering.query(&namespace(), query).await.unwrap_err();
    for error in [told, asked, hinted, gathered] {
        let ClientError::TooLarge { bytes, bytes_max, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(bytes_max, 2048);
        assert!(bytes > 500 * 8, "{bytes}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_no_server_would_take_is_an_error_with_advice() {
    let broker = narrow_broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    for number in 0..60 {
        let name = format!("worker-{number}");
        let mut publisher = client.publisher(&name, 0);
        publisher
            .publish(kvatlas_core::wire::Tier::DEVICE, vec![stored(hashes(10, 1))])
            .await
            .unwrap();
    }
    // The status reply would be too large, too, so the admin listener is asked.
    eventually("all workers are known", async || {
        let (_, body) = http_get(daemon.admin_address().unwrap(), "/index");
        body.contains("\"holders\":60").then_some(())
    })
    .await;
    let error = client
        .ask_with(SingleQuery::new(QueryKey::SequenceHashes(hashes(10, 1))))
        .await;
    let Err(ClientError::Refused(WireError {
        code: ErrorCode::TooLarge,
        text,
    })) = error
    else {
        panic!("{error:?}");
    };
    assert!(text.contains("set limit"), "{text}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_not_there_yet_is_waited_for() {
    let port = lasting_port();
    let url = format!("nats://127.0.0.1:{port}");
    let daemon = Daemon::start(config(&url, &[])).await.unwrap();
    let (code, body) = http_get(daemon.admin_address().unwrap(), "/readyz");
    assert_eq!(code, 503, "{body}");
    assert!(body.contains("waiting for the NATS server"), "{body}");
    eventually("the probe says what is wrong", async || {
        let (_, body) = http_get(daemon.admin_address().unwrap(), "/readyz");
        let named = format!("NATS: cannot connect to 127.0.0.1:{port}");
        (body.contains(&named) && body.contains("trying again")).then_some(())
    })
    .await;
    assert_eq!(http_get(daemon.admin_address().unwrap(), "/livez").0, 200);
    let second = crate::support::broker_on(port).await;
    tokio::time::timeout(crate::support::PATIENCE, daemon.ready())
        .await
        .expect("ready once the broker is there");
    assert_eq!(http_get(daemon.admin_address().unwrap(), "/readyz").0, 200);
    daemon.stop().await;
    second.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_pass_promtool() {
    let broker = broker().await;
    let daemon = Process::serve(broker.url(), &[]);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 4))])
        .await;
    client.ask(hashes(10, 4)).await;
    let (code, text) = http_get(daemon.admin_address(), "/metrics");
    assert_eq!(code, 200);
    for series in [
        "kvatlas_distinct_blocks{namespace=\"llama\"}",
        "kvatlas_queries_total{namespace=\"llama\"",
    ] {
        assert!(text.contains(series), "{series} is missing:\n{text}");
    }
    daemon.stop();
    check_with_promtool(&text);
}

fn check_with_promtool(text: &str) {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut promtool = Command::new("promtool");
    let promtool = promtool.args(["check", "metrics"]).stdin(Stdio::piped());
    let spawned = promtool.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut child) = spawned else {
        skipped("promtool, which checks the page of metrics, is not installed");
        return;
    };
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
