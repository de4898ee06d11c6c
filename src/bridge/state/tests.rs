use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvatlas_core::wire::{NamespaceName, WorkerName};
use kvatlas_engines::{Translator, TranslatorSettings};

use super::file::FileError;
use super::*;
use crate::republish::PortPlaces;
use crate::{EngineDefaults, parse_engine};
use kvatlas_process::registry::GivenEngine;
use kvatlas_process::storage::StorageFile;
use kvatlas_telemetry::rendered;

mod earlier;

const INTERVAL: Duration = Duration::from_secs(5);

fn engine(text: &str) -> NewEngine {
    match given(text) {
        GivenEngine::Publisher(engine) => engine,
        GivenEngine::Server(server) => panic!("{server:?}"),
    }
}

fn given(text: &str) -> GivenEngine {
    let defaults = EngineDefaults {
        model: Some("m".to_owned()),
        ..EngineDefaults::default()
    };
    parse_engine(text, &defaults).unwrap().remove(0)
}

fn holder() -> PublishedHolder {
    PublishedHolder {
        namespace: NamespaceName::new("m").unwrap(),
        worker: WorkerName::new("gpu-0").unwrap(),
        rank: 3,
    }
}

/// Maximum size of an engine's file, in bytes.
const BYTES_MAX: u64 = 1 << 20;

fn kept(cache: &str) -> KeptEngine {
    let mut continuity = Continuity::default();
    continuity.applied(0, b"a", true);
    KeptEngine {
        cache: cache.to_owned(),
        epoch: 9,
        rank: Some(3),
        topic: Some(b"kv".to_vec()),
        continuity,
        blocks: Translator::new(TranslatorSettings::default()).save(),
        republished: None,
    }
}

fn write(directory: &StateDirectory, kept: &KeptEngine) -> bool {
    directory.write_engine(&holder(), kept, BYTES_MAX, &BridgeMetrics::new())
}

fn keeper_of(directory: &StateDirectory, rank: Rank) -> Keeper {
    let holder = PublishedHolder { rank, ..holder() };
    let metrics = Arc::new(BridgeMetrics::new());
    Keeper::new(directory.clone(), holder, BYTES_MAX, false, metrics)
}

fn open(path: &Path) -> StateDirectory {
    StateDirectory::open(path, INTERVAL).unwrap()
}

#[test]
fn what_is_kept_of_an_engine_is_read_again_for_the_same_cache_only() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(&folder.path().join("made"));
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
    write(&directory, &kept("cache"));
    let read = directory.engine(&holder(), "cache", BYTES_MAX).unwrap();
    assert_eq!(
        (read.epoch, read.rank, read.topic),
        (9, Some(3), Some(b"kv".to_vec()))
    );
    assert_eq!(read.continuity.last(), Some(0));
    assert!(directory.engine(&holder(), "other", BYTES_MAX).is_none());
    let other = PublishedHolder { rank: 0, ..holder() };
    assert!(directory.engine(&other, "cache", BYTES_MAX).is_none());
    directory.forget_engine(&holder(), &BridgeMetrics::new());
    directory.forget_engine(&holder(), &BridgeMetrics::new());
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
}

/// Storage on the disk from which nothing can be read while the flag is set. It records the mode of each file when the
/// file gets its final name.
#[derive(Debug, Default)]
struct WatchedDisk {
    is_unreadable: AtomicBool,
    /// Lock that each opening of a file waits for.
    hang: Mutex<()>,
    /// Number of openings that were waiting, or had waited, for [`Self::hang`].
    opening: AtomicU64,
    #[cfg(unix)]
    modes: Mutex<Vec<u32>>,
}

impl WatchedDisk {
    fn set_unreadable(&self, is_unreadable: bool) {
        self.is_unreadable.store(is_unreadable, Ordering::Relaxed);
    }
}

impl Storage for WatchedDisk {
    fn open(&self, path: &Path) -> io::Result<Box<dyn io::Read>> {
        self.opening.fetch_add(1, Ordering::AcqRel);
        drop(self.hang.lock());
        match self.is_unreadable.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::PermissionDenied.into()),
            false => Disk.open(path),
        }
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Disk.create(path)
    }

    fn create_private(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Disk.create_private(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        #[cfg(unix)]
        self.modes.lock().push(mode_of(from));
        Disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Disk.remove(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        Disk.list(directory)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        Disk.create_directory(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        Disk.sync_directory(path)
    }
}

#[cfg(unix)]
fn mode_of(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().unwrap().permissions().mode() & 0o777
}

#[cfg(unix)]
#[test]
fn only_the_owner_may_read_files_and_those_that_are_being_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(engine_file(&holder()));
    // In an earlier version, the umask decided the file's mode.
    std::fs::write(&path, b"x").unwrap();
    let storage = Arc::new(WatchedDisk::default());
    let directory = StateDirectory::open_on(folder.path(), INTERVAL, Arc::clone(&storage) as _).unwrap();
    assert!(write(&directory, &kept("cache")));
    assert_eq!(storage.modes.lock().as_slice(), [0o600], "while it is written");
    assert_eq!(mode_of(&path), 0o600);
}

#[tokio::test]
async fn a_file_that_could_not_be_read_is_not_written_over_before_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(WatchedDisk::default());
    let directory =
        StateDirectory::open_on(folder.path(), Duration::ZERO, Arc::clone(&storage) as _).unwrap();
    assert!(write(&directory, &kept("cache")));
    let doubtful = KeptEngine {
        epoch: 10,
        ..kept("cache")
    };
    storage.set_unreadable(true);
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
    let mut keeper = keeper_of(&directory, 3);
    assert!(!write(&directory, &doubtful) && keeper.turn(1).is_none());
    assert!(keeper.last_turn(1).await.is_none());
    let mut read_again = async || {
        // The first call only begins to read.
        assert!(keeper.read_late("cache").is_none() && keeper.turn(1).is_none());
        while keeper.is_reading() {
            if let Some(last) = keeper.read_late("cache") {
                return Some(last);
            }
            tokio::task::yield_now().await;
        }
        None
    };
    assert_eq!(read_again().await, None);
    storage.set_unreadable(false);
    let last = kept("cache").continuity.last_batch();
    assert!(last.is_some());
    assert_eq!(read_again().await, last);
    assert_eq!(keeper.read_late("cache"), last, "until it may be written over");
    assert!(keeper.turn(1).is_none());
    let read = directory.engine(&holder(), "cache", BYTES_MAX).unwrap();
    assert_eq!(read.epoch, 9);
    assert!(write(&directory, &doubtful), "it has been read");
    // All of the engine's blocks are known, so the file is of no use.
    storage.set_unreadable(true);
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
    keeper.write_over();
    assert!(
        directory
            .late_engine(&holder(), "cache", BYTES_MAX, &BridgeMetrics::new())
            .is_none()
    );
    assert!(
        write(&directory, &kept("cache")),
        "a reading that began before ended after it"
    );
}

#[test]
fn registered_engines_that_could_not_be_read_are_read_later() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(WatchedDisk::default());
    let directory = StateDirectory::open_on(folder.path(), INTERVAL, Arc::clone(&storage) as _).unwrap();
    let metrics = BridgeMetrics::new();
    let engines = vec![given("gpu-0=tcp://a:1")];
    Registered::open(directory.clone())
        .1
        .keep(|| Some(engines.clone()), &metrics);
    storage.set_unreadable(true);
    let (none, registered) = Registered::open(directory.clone());
    assert!(none.is_none() && registered.is_behind());
    registered.keep(|| None, &metrics);
    assert!(registered.read_late(&metrics).is_none() && registered.is_behind());
    storage.set_unreadable(false);
    assert_eq!(registered.read_late(&metrics), Some(engines));
    registered.keep(|| None, &metrics);
    assert!(registered.is_behind(), "its engines are not in the list yet");
    // A list that is empty by now is written, too.
    registered.keep(|| Some(Vec::new()), &metrics);
    assert!(!registered.is_behind());
    assert_eq!(Registered::open(directory).0, Some(Vec::new()));
}

/// A disk from which a read never comes back must not keep registrations waiting.
#[test]
fn registrations_do_not_wait_for_a_late_read() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(WatchedDisk::default());
    let directory = StateDirectory::open_on(folder.path(), INTERVAL, Arc::clone(&storage) as _).unwrap();
    storage.set_unreadable(true);
    let metrics = BridgeMetrics::new();
    let (_, registered) = Registered::open(directory);
    let (reading, opened) = (storage.hang.lock(), storage.opening.load(Ordering::Acquire));
    std::thread::scope(|scope| {
        let late = scope.spawn(|| registered.read_late(&metrics));
        while storage.opening.load(Ordering::Acquire) == opened {
            std::thread::yield_now();
        }
        registered.keep(|| None, &metrics);
        drop(reading);
        assert_eq!(late.join().unwrap(), None);
    });
}

#[test]
fn each_late_read_that_fails_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(WatchedDisk::default());
    let directory = StateDirectory::open_on(folder.path(), INTERVAL, Arc::clone(&storage) as _).unwrap();
    assert!(write(&directory, &kept("cache")));
    storage.set_unreadable(true);
    let page = rendered(|| {
        let metrics = BridgeMetrics::new();
        assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
        for _ in 0..2 {
            assert!(
                directory
                    .late_engine(&holder(), "cache", BYTES_MAX, &metrics)
                    .is_none()
            );
        }
    });
    assert!(page.contains("kvatlas_bridge_state_failures_total 2"), "{page}");
}

#[tokio::test]
async fn a_table_of_ports_that_could_not_be_read_gives_no_ports_before_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(WatchedDisk::default());
    let directory = StateDirectory::open_on(folder.path(), INTERVAL, Arc::clone(&storage) as _).unwrap();
    let kept = KeptPlaces::of(Some(&directory));
    let metrics = Arc::new(BridgeMetrics::new());
    let give = async |engine: &str, known: PortPlaces| {
        let mut given = None;
        let change = |places: &mut PortPlaces| given = places.give(engine, 2, |_| true);
        let changed = kept.change((0, known), change, &metrics).await;
        changed.map(|(_, places)| (given, places))
    };
    give("gpu-0", PortPlaces::default()).await.unwrap();
    storage.set_unreadable(true);
    let unread = kept.read();
    let refused = give("gpu-1", unread.clone()).await.unwrap_err();
    assert!(matches!(refused, PlacesError::Unread), "{refused}");
    storage.set_unreadable(false);
    let (given, places) = give("gpu-1", unread).await.unwrap();
    assert_eq!(given, Some(1), "the first place is the other engine's");
    assert_eq!(kept.read(), places);
}

#[tokio::test]
async fn the_table_of_ports_is_read_again_and_a_damaged_one_is_empty() {
    let folder = tempfile::tempdir().unwrap();
    let kept = KeptPlaces::of(Some(&open(folder.path())));
    let metrics = Arc::new(BridgeMetrics::new());
    assert_eq!(kept.read(), PortPlaces::default());
    let mut given = None;
    let change = |places: &mut PortPlaces| given = places.give("gpu-0", 2, |_| true);
    let (revision, places) = kept
        .change((4, PortPlaces::default()), change, &metrics)
        .await
        .unwrap();
    assert_eq!((given, revision), (Some(0), 5));
    assert_eq!(kept.read(), places);
    std::fs::write(folder.path().join("ports"), b"something else").unwrap();
    assert_eq!(kept.read(), PortPlaces::default());
}

#[test]
fn an_engine_elsewhere_may_be_the_same_and_one_with_other_blocks_is_not() {
    let cache = |text: &str| cache_of(&engine(text));
    let here = cache("gpu-0=tcp://a:1,replay=tcp://a:2");
    assert_eq!(cache("gpu-0=tcp://b:1"), here);
    for other in [
        "gpu-0=tcp://a:1,block_size=4",
        "gpu-0=tcp://a:1,model=n",
        "gpu-0=tcp://a:1,groups=full",
    ] {
        assert_ne!(cache(other), here, "{other}");
    }
}

#[test]
fn a_file_that_is_damaged_or_foreign_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path());
    write(&directory, &kept("cache"));
    let path = folder.path().join(engine_file(&holder()));
    let whole = std::fs::read(&path).unwrap();
    let error = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
        read_file::<KeptEngine>(&Disk, &path, StateFileKind::Engine, 1 << 20).unwrap_err()
    };
    for cut in 8..whole.len() {
        let error = error(&whole[..cut]);
        assert!(matches!(error, FileError::Damaged), "cut at {cut}: {error}");
    }
    for place in 12..whole.len() {
        let mut damaged = whole.clone();
        damaged[place] ^= 0x10;
        let error = error(&damaged);
        assert!(matches!(error, FileError::Damaged), "changed at {place}: {error}");
    }
    assert!(matches!(error(b"something else"), FileError::Foreign));
    let mut newer = whole;
    newer[8] = 2;
    assert!(matches!(error(&newer), FileError::OtherVersion(2)));
    let large = error(&vec![0; (1 << 20) + 1]);
    assert!(matches!(large, FileError::TooLarge(1_048_576)), "{large}");
    // A file of another kind takes the engine's place.
    let none = Vec::<NewEngine>::new();
    directory.write(
        "registered",
        StateFileKind::Registered,
        &none,
        1 << 20,
        &BridgeMetrics::new(),
    );
    let registered = std::fs::read(folder.path().join("registered")).unwrap();
    assert!(matches!(error(&registered), FileError::Foreign));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
}

#[test]
fn bounds_of_any_size_give_a_bound() {
    assert_eq!(engine_bytes_max(0, 0), 1 << 20);
    assert_eq!(engine_bytes_max(usize::MAX, usize::MAX), u64::MAX);
    assert_eq!(engine_bytes_max(0, usize::MAX), u64::MAX);
}

#[test]
fn a_file_that_cannot_be_written_leaves_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path());
    write(&directory, &kept("cache"));
    let large = KeptEngine {
        topic: Some(vec![200; 2 << 20]),
        ..kept("cache")
    };
    write(&directory, &large);
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_some());
    let left = |entry: std::io::Result<std::fs::DirEntry>| {
        entry
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with(TEMPORARY_PREFIX)
    };
    assert!(!std::fs::read_dir(folder.path()).unwrap().any(left));
}

#[test]
fn a_directory_is_of_one_bridge_and_is_cleaned() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path());
    let taken = StateDirectory::open(folder.path(), INTERVAL).unwrap_err();
    let own = format!("the bridge of process {}", std::process::id());
    assert!(
        matches!(&taken, StateError::Taken { path, owner } if path == folder.path() && *owner == own),
        "{taken}"
    );
    write(&directory, &kept("cache"));
    drop(directory);
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file(".new-x.engine"), b"x").unwrap();
    std::fs::write(file("old.engine"), b"x").unwrap();
    let ages = |name: &str| {
        let file = std::fs::File::options().write(true).open(file(name)).unwrap();
        file.set_modified(SystemTime::now() - FORGOTTEN_AFTER * 2)
            .unwrap();
    };
    ages("old.engine");
    ages(&engine_file(&holder()));
    let directory = open(folder.path());
    assert!(!file(".new-x.engine").exists() && file("old.engine").exists());
    // The engine of the other file is followed.
    directory.remove_forgotten(&[holder()], &BridgeMetrics::new());
    assert!(!file("old.engine").exists());
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_some());
    directory.remove_forgotten(&[], &BridgeMetrics::new());
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_none());
}

#[test]
fn registered_engines_are_written_when_they_change() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path());
    let metrics = BridgeMetrics::new();
    let (none, registered) = Registered::open(directory.clone());
    assert_eq!(none, Some(Vec::new()));
    let engines = vec![
        given("gpu-0=tcp://a:1,replay=tcp://a:2,groups=full/window:9,adapters=1:x"),
        given("gpu-1=http://a:1,groups=full,adapters=1:x,scheme=llm-d-xxh64:7,address=a:2,label=x:y"),
    ];
    registered.keep(|| Some(engines.clone()), &metrics);
    let path = folder.path().join("registered");
    std::fs::remove_file(&path).unwrap();
    registered.keep(|| Some(engines.clone()), &metrics);
    assert!(!path.exists(), "nothing has changed");
    registered.keep(|| Some(Vec::new()), &metrics);
    registered.keep(|| Some(engines.clone()), &metrics);
    let (again, _) = Registered::open(directory.clone());
    assert_eq!(again, Some(engines));
    std::fs::write(&path, b"KVBRIDGE").unwrap();
    assert_eq!(Registered::open(directory).0, Some(Vec::new()));
}

#[tokio::test]
async fn a_file_is_written_when_it_is_time_and_something_has_changed() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StateDirectory::open(folder.path(), Duration::ZERO).unwrap();
    let mut keeper = keeper_of(&directory, 3);
    assert!(keeper.turn(0).is_none(), "nothing has changed");
    let turn = keeper.turn(1).unwrap();
    let mut other = keeper_of(&directory, 0);
    assert!(other.turn(1).is_none(), "another one is being written");
    keeper.write(turn, 1, kept("cache"));
    assert!(keeper.last_turn(1).await.is_none(), "it has been written");
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_some());
    assert!(other.last_turn(1).await.is_some());
    let slow = StateDirectory::open(&folder.path().join("slow"), Duration::from_secs(3600)).unwrap();
    let mut keeper = keeper_of(&slow, 3);
    assert!(keeper.turn(1).is_none(), "it is not time");
    assert!(keeper.last_turn(1).await.is_some());
}

#[tokio::test]
async fn an_unchanged_file_is_written_again_when_it_may_be_old() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StateDirectory::open(folder.path(), Duration::ZERO).unwrap();
    let metrics = || Arc::new(BridgeMetrics::new());
    let taken_up = || Keeper::new(directory.clone(), holder(), BYTES_MAX, true, metrics());
    // An earlier bridge has written the file, nobody knows when.
    assert!(taken_up().last_turn(0).await.is_some());
    let mut keeper = taken_up();
    let turn = keeper.turn(0).unwrap();
    keeper.write(turn, 0, kept("cache"));
    assert!(keeper.last_turn(0).await.is_none());
    assert!(keeper.turn(0).is_none(), "it is new");
    keeper.refresh_at = Some(std::time::Instant::now());
    assert!(keeper.turn(0).is_some(), "it is a day old");
    assert!(keeper.last_turn(0).await.is_some());
}

#[tokio::test]
async fn a_file_that_was_not_written_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gone");
    let directory = StateDirectory::open(&path, Duration::ZERO).unwrap();
    let mut keeper = keeper_of(&directory, 3);
    std::fs::remove_dir_all(&path).unwrap();
    let turn = keeper.turn(1).unwrap();
    keeper.write(turn, 1, kept("cache"));
    let turn = keeper.last_turn(1).await.expect("it was not written");
    std::fs::create_dir(&path).unwrap();
    keeper.write(turn, 1, kept("cache"));
    assert!(keeper.last_turn(1).await.is_none());
    assert!(directory.engine(&holder(), "cache", BYTES_MAX).is_some());
}
