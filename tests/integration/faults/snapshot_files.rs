//! Damaged snapshot files: cut at any length, with flipped bits, or empty.

use std::path::{Path, PathBuf};

use super::{answers, pause, runs};
use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::Restartable;
use crate::support::truth::Workload;
use crate::support::way::Way;
use crate::support::{Client, daemon, server, snapshots_in};

/// Number of leading bytes for which a test cuts the file at each length. The first frame begins there. In the rest of
/// the file, the test cuts at random places only.
const HEADER_BYTES: usize = 64;
/// Number of random places per round at which a test cuts the file and flips a bit.
const PLACES: u64 = 8;

fn snapshots(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut snapshots: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"))
        .collect();
    snapshots.sort();
    snapshots
}

/// Returns damaged versions of a complete file, each with a name.
fn damages(whole: &[u8], dice: &mut Workload, rounds: u64) -> Vec<(String, Vec<u8>)> {
    let cut = |length: usize| (format!("cut at {length}"), whole[..length].to_vec());
    let mut damages: Vec<_> = (0..HEADER_BYTES.min(whole.len())).map(cut).collect();
    for _ in 0..PLACES * rounds {
        let at = usize::try_from(dice.below(whole.len() as u64)).unwrap();
        damages.push(cut(at));
        let (at, bit) = (
            usize::try_from(dice.below(whole.len() as u64)).unwrap(),
            dice.below(8),
        );
        let mut flipped = whole.to_vec();
        flipped[at] ^= 1 << bit;
        damages.push((format!("bit {bit} of byte {at} flipped"), flipped));
    }
    damages
}

async fn damaged(way: Way) {
    let broker = Restartable::start(&server()).await;
    let kept = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(kept.path());
    let settings = way.settings(&[(key, &directory)]);
    let url = broker.url();
    let first = daemon(url, &settings).await;
    let mut fleet = Fleet::through(url, way.publishers(), 3, 1).await;
    let mut tally = fleet.under_load(&OneDaemon, pause(100)).await;
    fleet.settle(&mut tally).await;
    first.stop().await;
    let second = daemon(url, &settings).await;
    tally.add(fleet.under_load(&OneDaemon, pause(100)).await);
    fleet.settle(&mut tally).await;
    second.stop().await;
    let files = snapshots(kept.path());
    let (newest, older) = files.split_last().unwrap();
    let whole = std::fs::read(newest).unwrap();
    let mut longest = std::time::Duration::ZERO;
    for (what, damage) in damages(&whole, &mut Workload::new(runs(), 1), runs()) {
        let folder = tempfile::tempdir().unwrap();
        let (key, directory) = snapshots_in(folder.path());
        for path in older {
            std::fs::copy(path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
        std::fs::write(folder.path().join(newest.file_name().unwrap()), damage).unwrap();
        println!("snapshot {what} ({way})");
        let damaged = daemon(url, &way.settings(&[(key, &directory)])).await;
        answers(&Client::connect(url).await).await;
        let mut started = fleet.under_load(&OneDaemon, pause(5)).await;
        fleet.settle(&mut started).await;
        longest = longest.max(started.time_to_exactness.unwrap());
        tally.add(started);
        assert_eq!(
            tally.wrong, 0,
            "{what}: answers were wrong: {:#?}",
            tally.examples
        );
        damaged.stop().await;
    }
    tally.time_to_exactness = Some(longest);
    tally.report(&format!("damaged snapshots ({way})"));
    tally.require_sight();
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_snapshots() {
    Box::pin(damaged(Way::Core)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_snapshots_before_a_stream() {
    Box::pin(damaged(Way::Stream)).await;
}
