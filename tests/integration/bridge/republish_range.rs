//! Engines that are found in a file and get ports from a range, at which their events are republished.

use std::path::Path;
use std::time::Duration;

use kvatlas_bridge::{Bridge, BridgeOptions, RepublishOptions, RouterQuestion, StateDirectory};
use kvatlas_process::registry::EngineRegistry;
use serde_json::json;

use super::discovery::{discover, replace};
use super::python::{Publishers, Spec, python};
use super::republish::{Router, free_ports, paths};
use super::servers::{Answers, Server};
use super::{Site, options, stored};
use crate::support::{eventually, subjects};

/// Starts a bridge that follows the engines in the folder's file. It has ports for two engines, from `first` on.
fn bridge(site: &Site, folder: &Path, first: u16) -> Bridge {
    let bridge = Bridge::new(
        subjects(),
        BridgeOptions {
            republish: Some(RepublishOptions {
                addresses: vec![format!("tcp://127.0.0.1:{first}-{}", first + 3).parse().unwrap()],
                has_special: false,
                bytes_max: 1 << 20,
            }),
            state: Some(StateDirectory::open(&folder.join("state"), Duration::ZERO).unwrap()),
            ..options()
        },
    );
    bridge.start(&site.client.nats);
    discover(&bridge, &format!("file:{}", folder.join("engines").display()));
    bridge
}

/// Returns the port of an engine's republished events, or the reason why the engine has no port.
fn port_of(bridge: &Bridge, name: &str) -> Option<Result<u16, String>> {
    let engines = bridge.engines();
    let found = engines.iter().find(|state| state.engine.key.instance == name)?;
    let sockets = bridge.republished_at(&found.engine)?;
    Some(sockets.map(|sockets| sockets.events().rsplit_once(':').unwrap().1.parse().unwrap()))
}

async fn has_port(bridge: &Bridge, name: &str) -> u16 {
    eventually(&format!("{name} has ports"), async || port_of(bridge, name)?.ok()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_are_found_have_ports_of_a_range_and_keep_them() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(); 3]);
    let mut servers = Vec::new();
    for engine in 0..3 {
        publishers.publish(engine, &json!([stored(u32::try_from(engine).unwrap() + 1, 0, 2)]));
        servers.push(Server::start(Answers::vllm(&publishers, &[engine])).await);
    }
    let urls: Vec<String> = servers.iter().map(Server::url).collect();
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("engines")).unwrap();
    let list = |engines: &[usize]| {
        let table = |engine: &usize| {
            let url = &urls[*engine];
            format!(
                "[[engine]]\nname = \"gpu-{engine}\"\nendpoint = \"{url}\"\naddress = \"10.0.0.{engine}:8000\"\n"
            )
        };
        let path = folder.path().join("engines/a.toml");
        replace(&path, &engines.iter().map(table).collect::<String>());
    };
    let first = free_ports(4);
    list(&[0]);
    let bridge = self::bridge(&site, folder.path(), first);
    assert_eq!(has_port(&bridge, "gpu-0").await, first);
    list(&[0, 1]);
    assert_eq!(has_port(&bridge, "gpu-1").await, first + 2);
    Router::start(first).await.reaches(&paths(1, 0..2)).await;
    Router::start(first + 2).await.reaches(&paths(2, 0..2)).await;
    // No ports are left for a third engine, and the bridge says so.
    list(&[0, 1, 2]);
    eventually("it is said that the range is used up", async || {
        let error = port_of(&bridge, "gpu-2")?.err()?;
        error.contains("all 2 pairs of ports").then_some(())
    })
    .await;
    // The router's flags name the engines that have ports, with the addresses for requests.
    let question = RouterQuestion::parse(Some("host=kvatlas")).unwrap();
    let flags = bridge.router_flags(&question).unwrap();
    let [events, replay] = [first, first + 1];
    let [other_events, other_replay] = [first + 2, first + 3];
    assert_eq!(
        flags,
        format!(
            "--worker-urls http://10.0.0.0:8000 http://10.0.0.1:8000 \
             --kv-event-source http://10.0.0.0:8000=tcp://kvatlas:{events} \
             --kv-event-replay-source http://10.0.0.0:8000=tcp://kvatlas:{replay} \
             --kv-event-source http://10.0.0.1:8000=tcp://kvatlas:{other_events} \
             --kv-event-replay-source http://10.0.0.1:8000=tcp://kvatlas:{other_replay}\n"
        )
    );
    // When an engine is gone, another engine gets its ports.
    list(&[1, 2]);
    assert_eq!(has_port(&bridge, "gpu-2").await, first);
    Router::start(first).await.reaches(&paths(3, 0..2)).await;
    bridge.stop(false).await;
    drop(bridge);
    // The next bridge finds the engines in another order.
    list(&[2]);
    let next = self::bridge(&site, folder.path(), first);
    assert_eq!(has_port(&next, "gpu-2").await, first);
    list(&[2, 1]);
    assert_eq!(has_port(&next, "gpu-1").await, first + 2);
    Router::start(first + 2).await.reaches(&paths(2, 0..2)).await;
    next.stop(false).await;
}
