//! Replay sockets that belong to another engine, and engines that become another process on the same sockets.

use kvatlas_process::registry::EngineRegistry;
use serde_json::json;

use super::python::{Publishers, Spec, python};
use super::{Site, follow_text, stored};
use crate::support::proxy::{Network, Proxy};
use crate::support::{eventually, reasons};

/// Makes the bridge follow engine 0 under the name `name`, but gives it the replay socket of engine 1.
fn follow_crossed(site: &Site, publishers: &Publishers, name: &str) {
    let replay = publishers.replay(1).unwrap();
    follow_text(
        &site.bridge,
        &format!("{name}={},replay={replay}", publishers.endpoint(0)),
    );
}

fn last_error(site: &Site) -> String {
    site.bridge.engines()[0].last_error.clone().unwrap_or_default()
}

/// Waits until the holder is in doubt, and has no blocks of sequence `foreign`, which belongs to another engine.
async fn is_free_of(site: &Site, name: &str, foreign: u32) {
    eventually("the other engine's blocks are gone", async || {
        let holder = site.holder(name).await?;
        (!holder.exact && site.depth(foreign, name).await == 0).then_some(())
    })
    .await;
}

/// The bridge has been given the replay socket of another engine. The followed engine has published three batches, and
/// the other engine 9, 4, 3, 1 or 0. After the next batch of the followed engine, the holder must be in doubt, and free
/// of the other engine's blocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_socket_of_another_engine_is_noticed_by_the_first_batch_that_is_published() {
    let Some(python) = python() else { return };
    for others in [9, 4, 3, 1, 0] {
        let site = Site::new(&[]).await;
        let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
        for part in 0..3 {
            publishers.publish(0, &json!([stored(1, part, 1)]));
        }
        for part in 0..others {
            publishers.publish(1, &json!([stored(2, part, 1)]));
        }
        follow_crossed(&site, &publishers, "gpu-0");
        site.settles("gpu-0", others.into(), &[]).await;
        publishers.wait_for_subscriber(0);
        publishers.publish(0, &json!([stored(1, 3, 1)]));
        publishers.publish(0, &json!([stored(3, 0, 1)]));
        is_free_of(&site, "gpu-0", 2).await;
        if others > 0 {
            eventually("the replay socket is named", async || {
                let error = last_error(&site);
                (error.contains("replay socket") && error.contains("other batches")).then_some(())
            })
            .await;
        }
        // The batch that the engine itself publishes is applied. All else is in doubt.
        eventually("its own blocks are known", async || {
            (site.depth(3, "gpu-0").await == 1).then_some(())
        })
        .await;
        assert!(site.ask(3, 1).await.iter().all(|holder| !holder.exact));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_only_the_replay_socket_has_are_not_believed_for_long() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    follow_crossed(&site, &publishers, "gpu-0");
    site.settles("gpu-0", 0, &[]).await;
    let mut parts = 0..;
    eventually("an engine that publishes nothing of it is in doubt", async || {
        publishers.publish(1, &json!([stored(2, parts.next()?, 1)]));
        let holder = site.holder("gpu-0").await?;
        (holder.blocks > 0 && reasons(&holder).contains(&"upstream_lost")).then_some(())
    })
    .await;
    eventually("that is said", async || {
        last_error(&site).contains("does not publish").then_some(())
    })
    .await;
}

/// Another process takes over both sockets of an engine while the connection stays open, and its first batches do not
/// reach the bridge. When its replay socket and a published batch agree, the engine must be exact, with the blocks of
/// the new process only.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_socket_that_agrees_again_makes_the_engine_exact() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    for part in 0..3 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    site.settles("gpu-0", 3, &[]).await;
    // Another process is now at both sockets, but the open connection does not show it.
    publishers.count_anew(0, usize::MAX >> 1);
    for part in 0..3 {
        publishers.publish_lost(0, &json!([stored(2, part, 1)]));
    }
    is_free_of(&site, "gpu-0", 1).await;
    publishers.publish(0, &json!([stored(2, 3, 1)]));
    site.settles("gpu-0", 4, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
        (0, 4)
    );
}

/// The engine's replay socket cannot be reached at first, and a published batch is lost meanwhile. When the replay
/// socket can be reached, the bridge must get the lost batch from it, although the engine publishes all the time.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_socket_that_comes_late_makes_up_for_what_was_lost() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    let port = publishers.replay(0).unwrap();
    let port = port.rsplit_once(':').unwrap().1;
    let proxy = Proxy::to(port.parse().unwrap()).await;
    proxy.set(Network {
        is_cut: true,
        ..Network::default()
    });
    let late = proxy.url().replace("nats:", "tcp:");
    follow_text(
        &site.bridge,
        &format!("gpu-0={},replay={late}", publishers.endpoint(0)),
    );
    let mut others = 10..;
    eventually("it is followed without the replay socket", async || {
        publishers.publish(0, &json!([stored(others.next()?, 0, 1)]));
        (site.holder("gpu-0").await?.blocks > 0).then_some(())
    })
    .await;
    publishers.publish_lost(0, &json!([stored(1, 0, 1)]));
    publishers.publish(0, &json!([stored(1, 1, 1)]));
    eventually("it is in doubt", async || {
        let holder = site.holder("gpu-0").await?;
        reasons(&holder).contains(&"upstream_gap").then_some(())
    })
    .await;
    proxy.heal();
    eventually("nothing is missing", async || {
        publishers.publish(0, &json!([stored(others.next()?, 0, 1)]));
        let holder = site.holder("gpu-0").await?;
        (holder.exact && site.depth(1, "gpu-0").await == 2).then_some(())
    })
    .await;
}

/// The engine's replay socket keeps no batches (`buffer_steps` is 0), and its connection breaks while it is idle. After
/// the reconnect, the holder must stay in doubt, because the bridge cannot learn whether it has missed a batch.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_replay_socket_keeps_nothing_is_followed_without_it() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(0)]);
    let port = publishers.endpoint(0).rsplit_once(':').unwrap().1.to_owned();
    let proxy = Proxy::to(port.parse().unwrap()).await;
    let (through, replay) = (
        proxy.url().replace("nats:", "tcp:"),
        publishers.replay(0).unwrap(),
    );
    follow_text(&site.bridge, &format!("gpu-0={through},replay={replay}"));
    publishers.wait_for_subscriber(0);
    for part in 0..3 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    site.settles("gpu-0", 3, &[]).await;
    eventually("the replay socket is named", async || {
        last_error(&site).contains("keeps no batches").then_some(())
    })
    .await;
    proxy.set(Network {
        is_cut: true,
        ..Network::default()
    });
    eventually("it is out of sight", async || {
        (!site.holder("gpu-0").await?.exact).then_some(())
    })
    .await;
    proxy.heal();
    publishers.wait_for_subscriber(0);
    for _ in 0..50 {
        let holder = site.holder("gpu-0").await.unwrap();
        assert!(!holder.exact && holder.blocks == 3, "{holder:?}");
    }
    publishers.publish(0, &json!([stored(1, 3, 1)]));
    site.settles("gpu-0", 4, &["upstream_gap"]).await;
}

/// The batch numbers of an engine begin again on an open connection, as if a proxy kept it open for a new process. The
/// bridge must drop the blocks of the old process, and get the first batches of the new one from the replay socket.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_begin_anew_on_a_connection_that_stays_are_another_process() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    for part in 0..50 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    site.settles("gpu-0", 50, &[]).await;
    publishers.count_anew(0, usize::MAX >> 1);
    publishers.publish_lost(0, &json!([stored(2, 0, 1)]));
    publishers.publish(0, &json!([stored(2, 1, 1)]));
    site.settles("gpu-0", 2, &[]).await;
    publishers.publish(0, &json!([stored(2, 2, 1)]));
    site.settles("gpu-0", 3, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
        (0, 3)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_whose_first_number_is_the_next_one_is_another_process() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    for part in 0..3 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    site.settles("gpu-0", 3, &[]).await;
    // The first batches of the new process are lost before the bridge has asked for them.
    publishers.become_another(
        0,
        &[
            json!([stored(2, 0, 1)]),
            json!([stored(2, 1, 1)]),
            json!([stored(2, 2, 1)]),
        ],
        &json!([stored(2, 3, 1)]),
    );
    site.settles("gpu-0", 4, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
        (0, 4)
    );
}

/// A new process takes the place of an engine, and its batch numbers continue those of the old process or leave a gap.
/// The bridge cannot get its first batches: there is no replay socket, or the socket keeps too few. Then the holder
/// must be in doubt until the engine clears its cache.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_missed_from_its_start_is_never_exact_with_the_old_blocks() {
    let Some(python) = python() else { return };
    let short = Spec::with_buffer(2);
    for (spec, missed) in [
        (Spec::without_replay(), 3),
        (Spec::without_replay(), 9),
        (short, 3),
        (short, 9),
    ] {
        let site = Site::new(&[]).await;
        let mut publishers = Publishers::start(&python, &[spec]);
        site.follow(&publishers, 0, "gpu-0");
        publishers.wait_for_subscriber(0);
        for part in 0..3 {
            publishers.publish(0, &json!([stored(1, part, 1)]));
        }
        site.settles("gpu-0", 3, &[]).await;
        publishers.kill();
        eventually("nobody says that the old blocks are exact", async || {
            let holder = site.holder("gpu-0").await?;
            (!holder.exact).then_some(())
        })
        .await;
        publishers = publishers.restart(&python);
        for part in 0..missed {
            publishers.publish_lost(0, &json!([stored(2, part, 1)]));
        }
        publishers.wait_for_subscriber(0);
        publishers.publish(0, &json!([stored(3, 0, 1)]));
        eventually(
            "its blocks are known, and are in doubt all the time",
            async || {
                let holder = site.holder("gpu-0").await?;
                assert!(!holder.exact, "{missed} missed: {holder:?}");
                let is_known = site.depth(3, "gpu-0").await == 1;
                (is_known && reasons(&holder) == ["upstream_gap"]).then_some(())
            },
        )
        .await;
        publishers.publish(0, &json!([["AllBlocksCleared"], stored(4, 0, 2)]));
        site.settles("gpu-0", 2, &[]).await;
        assert_eq!(site.depth(4, "gpu-0").await, 2);
    }
}

/// Batches under another topic arrive on an open connection, as if another engine had come behind a proxy. The bridge
/// must not believe these batches, and must drop the blocks of the first engine.
#[tokio::test(flavor = "multi_thread")]
async fn another_topic_behind_a_standing_connection_is_another_engine() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    publishers.publish_under(0, "first", &json!([stored(1, 0, 1)]));
    site.settles("gpu-0", 1, &[]).await;
    publishers.count_anew(0, usize::MAX >> 1);
    publishers.publish_under(0, "other", &json!([stored(2, 0, 1)]));
    eventually("batches of another model are not believed", async || {
        let holder = site.holder("gpu-0").await?;
        assert_eq!(site.depth(2, "gpu-0").await, 0);
        (holder.blocks == 0 && reasons(&holder) == ["upstream_gap"]).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_topic_behind_the_same_address_is_another_engine() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(1, 0, 1)]));
    site.settles("gpu-0", 1, &[]).await;
    publishers.publish_under(0, "other", &json!([stored(2, 0, 1)]));
    let is_doubted = async || {
        let holder = site.holder("gpu-0").await?;
        (reasons(&holder) == ["upstream_gap"] && last_error(&site) == "other_engine").then_some(())
    };
    eventually("batches under another topic are not believed", &is_doubted).await;
    // The same holds when the engine restarts once more.
    publishers = publishers.restart(&python);
    eventually("its old blocks are gone", async || {
        (site.depth(1, "gpu-0").await == 0).then_some(())
    })
    .await;
    publishers.wait_for_subscriber(0);
    publishers.publish_under(0, "other", &json!([stored(2, 0, 1)]));
    eventually("nor are those of another process", &is_doubted).await;
}
