//! A bridge that ends, and the bridge that takes its place. With a state directory, the new bridge loses no block, as
//! long as the engine's replay socket still has the batches since the last saved state.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use kvatlas_core::wire::{QueryKey, SingleQuery};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::python::{Publishers, Spec, python};
use super::{Site, namespace, removed, stored, tokens};
use crate::support::http::HttpClient;
use crate::support::metrics::metric;
use crate::support::process::{Process, message};
use crate::support::{Client, broker_on, eventually, http_get, lasting_port};

/// Value that [`Asking`] has in place of a number of blocks while this number changes: any answer is right.
const ANY: u32 = u32::MAX;

/// Task that queries sequences 1 and 2 all the time. It fails if an answer that is marked exact is wrong.
pub struct Asking {
    /// Number of blocks that the engine has of sequence 1, and of sequence 2. It is [`ANY`] while the test changes it.
    truth: Arc<[AtomicU32; 2]>,
    task: JoinHandle<u64>,
}

impl Asking {
    pub fn start(site: &Site, first: u32, second: u32) -> Self {
        let truth = Arc::new([AtomicU32::new(first), AtomicU32::new(second)]);
        let url = site.broker.url().to_owned();
        let known = Arc::clone(&truth);
        let task = tokio::spawn(async move {
            let client = Client::connect(&url).await;
            let mut exact = 0;
            while known[0].load(Ordering::Acquire) != 0 {
                for which in [1, 2] {
                    exact += ask(&client, which, &known[which as usize - 1]).await;
                }
                tokio::task::yield_now().await;
            }
            exact
        });
        Self { truth, task }
    }

    pub fn expect(&self, which: usize, blocks: u32) {
        self.truth[which - 1].store(blocks, Ordering::Release);
    }

    /// Ends the task, and returns the number of exact answers.
    pub async fn end(self) -> u64 {
        self.expect(1, 0);
        self.task.await.unwrap()
    }
}

/// Queries sequence `which` once. Returns 1 if the answer was exact and right, and 0 if it was not exact or if `truth`
/// may have changed. Panics if the answer was exact and wrong.
async fn ask(client: &Client, which: u32, truth: &AtomicU32) -> u64 {
    let key = QueryKey::Tokens {
        tokens: tokens(which, 0, 64),
        lora_name: None,
        cache_salt: None,
    };
    let before = truth.load(Ordering::Acquire);
    let Ok(reply) = client.queries.query(&namespace(), SingleQuery::new(key)).await else {
        return 0;
    };
    let after = truth.load(Ordering::Acquire);
    let holder = reply.holders.first();
    let is_exact = match holder {
        Some(holder) => holder.exact,
        None => reply.doubtful_holders == 0,
    };
    // The truth is not known if it may have changed during the query, or if the task is to end.
    let is_known = before == after && before != ANY && (which, before) != (1, 0);
    if !is_exact || !is_known {
        return 0;
    }
    let found = holder.map_or(0, |holder| holder.matched_blocks);
    assert_eq!(
        found, before,
        "sequence {which} is called exact, and wrong: {reply:?}"
    );
    1
}

/// Starts a bridge in a process of its own.
pub fn bridge(site: &Site, publishers: &Publishers, more: &[&str]) -> Process {
    let engine = format!("--engine={}", publishers.flag(0, "gpu-0"));
    let mut arguments = vec!["--model", "m", "--block-size", "4", engine.as_str()];
    arguments.extend_from_slice(more);
    Process::bridge(site.broker.url(), &arguments)
}

fn state_of(folder: &Path) -> String {
    format!("--state={}", folder.display())
}

fn engine_file(folder: &Path) -> PathBuf {
    folder.join("m.gpu-0.0.engine")
}

/// Publishes the blocks of sequences 1 and 2, each in a batch of its own. Then publishes other batches, ten more than
/// the replay socket keeps.
fn publish_more_than_is_kept(publishers: &mut Publishers, buffer: u32) -> u64 {
    for part in 0..10 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
        publishers.publish(0, &json!([stored(2, part, 1)]));
    }
    publish_others(publishers, 3, buffer - 20);
    20 + u64::from(buffer - 20)
}

fn publish_others(publishers: &mut Publishers, which: u32, count: u32) {
    for part in 0..count {
        publishers.publish(0, &json!([stored(which, part, 1)]));
    }
}

/// Runs a scenario of two bridges, one after the other, which keep their state at `state`. When `is_kept` is true and
/// the engine has published further batches, the first bridge ends by `signal`.
///
/// The replay socket no longer has the engine's first batches. So the second bridge must take their blocks from the
/// kept state, and the changes since then from the replay socket. At no time may an exact answer be wrong.
pub async fn ends_and_goes_on(site: &Site, signal: Signal, state: &str, is_kept: impl AsyncFn() -> bool) {
    let Some(python) = python() else { return };
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(90)]);
    let known = publish_more_than_is_kept(&mut publishers, 90);
    let first = bridge(site, &publishers, &[state]);
    site.settles("gpu-0", known, &[]).await;
    eventually("its state is kept", async || is_kept().await.then_some(())).await;
    let asking = Asking::start(site, 10, 10);
    // The replay socket no longer has the first batches, and the kept state is older than the last batches.
    publish_others(&mut publishers, 4, 60);
    site.settles("gpu-0", known + 60, &[]).await;
    asking.expect(2, ANY);
    publishers.publish(0, &json!([removed(2, 5, 5)]));
    site.settles("gpu-0", known + 55, &[]).await;
    asking.expect(2, 5);
    first.signal(signal);
    drop(first);
    publishers.publish(0, &json!([stored(5, 0, 3)]));
    let second = bridge(site, &publishers, &[state]);
    site.settles("gpu-0", known + 58, &[]).await;
    assert_eq!(site.depth(1, "gpu-0").await, 10);
    assert_eq!(site.depth(2, "gpu-0").await, 5);
    asking.expect(2, ANY);
    publishers.publish(0, &json!([stored(2, 5, 2)]));
    site.settles("gpu-0", known + 60, &[]).await;
    asking.expect(2, 7);
    assert!(asking.end().await > 0);
    drop(second);
}

/// A bridge with a state directory ends by SIGTERM, and in another round by SIGKILL. The next bridge must know all
/// blocks that the first bridge knew.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_bridge_knows_what_the_one_before_did() {
    for signal in [Signal::TERM, Signal::KILL] {
        let folder = tempfile::tempdir().unwrap();
        let site = Site::new(&[]).await;
        let is_kept = async || engine_file(folder.path()).exists();
        ends_and_goes_on(&site, signal, &state_of(folder.path()), is_kept).await;
    }
}

/// A bridge stops after it has saved two batches of an engine. Then a new process takes the engine's place, and has
/// published no batch, as many as the old one, or more. The next bridge must report only the blocks of the new process.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_kept_of_another_process_is_refused() {
    let Some(python) = python() else { return };
    for batches in [0, 2, 5] {
        let folder = tempfile::tempdir().unwrap();
        let state = state_of(folder.path());
        let site = Site::new(&[]).await;
        let mut publishers = Publishers::start(&python, &[Spec::default()]);
        publishers.publish(0, &json!([stored(1, 0, 1)]));
        publishers.publish(0, &json!([stored(1, 1, 1)]));
        let first = bridge(&site, &publishers, &[&state]);
        site.settles("gpu-0", 2, &[]).await;
        let (code, log) = first.stop();
        assert_eq!(code, Some(0), "{log}");
        assert!(engine_file(folder.path()).exists());
        publishers = publishers.restart(&python);
        for part in 0..batches {
            publishers.publish(0, &json!([stored(2, part, 1)]));
        }
        let _second = bridge(&site, &publishers, &[&state]);
        site.settles("gpu-0", batches.into(), &[]).await;
        assert_eq!(
            (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
            (0, batches)
        );
    }
}

/// No bridge runs for longer than files of forgotten engines are kept. The replay socket no longer has the engine's first
/// batches.
#[tokio::test(flavor = "multi_thread")]
async fn state_of_an_engine_that_was_idle_for_long_is_of_use() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let state = state_of(folder.path());
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(4)]);
    let first = bridge(&site, &publishers, &[&state]);
    publish_others(&mut publishers, 1, 1);
    site.settles("gpu-0", 1, &[]).await;
    for part in 1..10 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
        site.settles("gpu-0", u64::from(part) + 1, &[]).await;
    }
    let week = Duration::from_secs(7 * 24 * 3600);
    let mut before = Some(first);
    for _ in 0..2 {
        let (code, log) = before.take().unwrap().stop();
        assert_eq!(code, Some(0), "{log}");
        let file = std::fs::File::options()
            .write(true)
            .open(engine_file(folder.path()))
            .unwrap();
        let written = file.metadata().unwrap().modified().unwrap();
        assert!(
            written.elapsed().unwrap_or_default() < week,
            "each bridge writes it at its end"
        );
        file.set_modified(SystemTime::now() - week * 2).unwrap();
        before = Some(bridge(&site, &publishers, &[&state]));
        site.settles("gpu-0", 10, &[]).await;
    }
}

/// An engine comes back as another process, with another topic, while no bridge runs.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_may_come_back_under_another_topic() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let state = state_of(folder.path());
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish_under(0, "kv-events", &json!([stored(1, 0, 1)]));
    let first = bridge(&site, &publishers, &[&state]);
    site.settles("gpu-0", 1, &[]).await;
    publishers.publish_under(0, "kv-events", &json!([stored(1, 1, 1)]));
    site.settles("gpu-0", 2, &[]).await;
    first.stop();
    publishers = publishers.restart(&python);
    publishers.publish_under(0, "kv", &json!([stored(2, 0, 3)]));
    let _second = bridge(&site, &publishers, &[&state]);
    site.settles("gpu-0", 3, &[]).await;
    publishers.publish_under(0, "kv", &json!([stored(2, 3, 1)]));
    site.settles("gpu-0", 4, &[]).await;
}

/// The NATS server goes away. The bridge cannot tell daemons of the engine, and must not call it exact meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_nobody_is_told_of_is_not_called_exact() {
    let Some(python) = python() else { return };
    let port = lasting_port();
    let mut site = Site::at(broker_on(port).await, &[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    let bridge = bridge(&site, &publishers, &[]);
    site.settles("gpu-0", 2, &[]).await;
    let mut admin = HttpClient::connect(bridge.admin_address()).await;
    drop(site.broker);
    publishers.publish(0, &json!([stored(1, 2, 1)]));
    eventually("it is told as untold", async || {
        let engines: Value = admin.get("/workers").await.json();
        let engine = &engines["engines"][0];
        let is_told = engine["last_error"] == "daemons are not told: NATS is away";
        (is_told && engine["status"] == "degraded").then_some(())
    })
    .await;
    let exact = "kvatlas_bridge_engine_exact{namespace=\"m\",engine=\"gpu-0/0\"}";
    eventually("the metric follows", async || {
        (metric(&bridge, exact) == 0).then_some(())
    })
    .await;
    site.broker = broker_on(port).await;
    site.settles("gpu-0", 3, &[]).await;
    eventually("it is exact again", async || {
        (metric(&bridge, exact) == 1).then_some(())
    })
    .await;
}

/// The bridge has no usable state file, and the replay socket no longer has some of the engine's batches. The blocks in
/// these batches are then in doubt, and the log and the list of engines must say why.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_begins_too_late_is_told_with_its_numbers() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let state = state_of(folder.path());
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(4)]);
    publish_others(&mut publishers, 1, 4);
    let first = bridge(&site, &publishers, &[&state]);
    site.settles("gpu-0", 4, &[]).await;
    first.stop();
    let needed = |begins: u32, needed: u32| {
        format!("the replay begins at {begins}, needed {needed}: raise buffer_steps")
    };
    // While no bridge runs, the engine publishes more batches than the replay socket keeps.
    for part in 4..10 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    for (is_damaged, text) in [(false, needed(6, 4)), (true, needed(6, 0))] {
        if is_damaged {
            std::fs::write(engine_file(folder.path()), b"KVBRIDGE and then nothing").unwrap();
        }
        let mut next = bridge(&site, &publishers, &[&state]);
        if is_damaged {
            next.wait_for_line(|line| message(line).starts_with("what was kept is of no use"));
        }
        next.wait_for_line(|line| line["message"].as_str() == Some(&text));
        let mut admin = HttpClient::connect(next.admin_address()).await;
        eventually("it is told why", async || {
            let engines: Value = admin.get("/workers").await.json();
            let error = engines["engines"][0]["last_error"].as_str()?.to_owned();
            error.starts_with("the replay begins at 6").then_some(())
        })
        .await;
        let holder = site.holder("gpu-0").await.unwrap();
        assert!(!holder.exact, "{holder:?}");
        // Daemons give the same reason.
        eventually("daemons tell why", async || {
            let (_, workers) = http_get(site.daemon.admin_address()?, "/workers?worker=gpu-0");
            let workers: Value = serde_json::from_str(&workers).ok()?;
            let detail = workers["holders"][0]["detail"].as_str()?.to_owned();
            detail.starts_with("the replay begins at 6").then_some(())
        })
        .await;
        // The kill leaves the kept state unchanged.
        next.kill();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_were_registered_are_followed_by_the_next_bridge() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let state = state_of(folder.path());
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(1, 0, 3)]));
    let started = || {
        let arguments = [state.as_str(), "--http-listen=127.0.0.1:0"];
        let mut bridge = Process::bridge(site.broker.url(), &arguments);
        let line = bridge.wait_for_line(|line| line["message"] == "query listener started");
        let address = line["local_addr"].as_str().unwrap().parse().unwrap();
        (bridge, address)
    };
    let (first, address) = started();
    let mut http = HttpClient::connect(address).await;
    for (engine, name) in [(0, "gpu-0"), (1, "gpu-1")] {
        let body = json!({"instance_id": name, "endpoint": publishers.endpoint(engine), "replay_endpoint": publishers.replay(engine),
            "model_name": "m", "block_size": 4});
        assert_eq!(http.post("/register", &body).await.status, 201);
    }
    site.settles("gpu-0", 2, &[]).await;
    site.settles("gpu-1", 3, &[]).await;
    let gone = json!({"instance_id": "gpu-1", "model_name": "m"});
    assert_eq!(http.post("/unregister", &gone).await.status, 200);
    eventually("it is forgotten", async || {
        site.holder("gpu-1").await.is_none().then_some(())
    })
    .await;
    first.kill();
    publishers.publish(0, &json!([stored(2, 0, 5)]));
    let (_second, address) = started();
    site.settles("gpu-0", 7, &[]).await;
    let mut http = HttpClient::connect(address).await;
    let workers = http.get("/workers").await.json();
    assert_eq!(workers.as_array().unwrap().len(), 1, "{workers}");
}
