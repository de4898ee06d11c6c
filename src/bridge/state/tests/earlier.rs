//! This program uses files that an earlier program has written. An earlier program reads this program's files, or
//! refuses them with an error.
//!
//! If the format of a file has to change, its version is raised. The test then states the error text with which this
//! program refuses earlier files.

use kvatlas_core::hash::BlockSize;
use kvatlas_engines::{Format, Mirror, MirrorSettings};
use kvatlas_process::registry::Discovered;

use super::super::file::FileError;
use super::*;

/// Files that a release build of November 2026 has written: the state of a vLLM engine with gpt-oss, and the list of
/// one registered engine.
const ENGINE: &[u8] = include_bytes!("earlier/engine");
const REGISTERED: &[u8] = include_bytes!("earlier/registered");

#[test]
fn what_an_earlier_program_has_kept_of_an_engine_is_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path());
    let holder = PublishedHolder { rank: 0, ..holder() };
    std::fs::write(folder.path().join(engine_file(&holder)), ENGINE).unwrap();
    let cache = cache_of(&engine("gpu-0=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:2"));
    let kept = directory
        .engine(&holder, &cache, engine_bytes_max(1000, 0))
        .unwrap();
    assert_eq!((kept.epoch, kept.rank), (1_795_759_194_617_698, Some(0)));
    assert_eq!(kept.continuity.last(), Some(7));
    let blocks = Translator::restore(TranslatorSettings::for_format(Format::Vllm), kept.blocks).unwrap();
    assert_eq!((blocks.blocks(), blocks.doubt()), (13, None));
}

#[test]
fn what_an_earlier_program_has_kept_of_registrations_is_taken_up() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("registered"), REGISTERED).unwrap();
    let (engines, _) = Registered::open(open(folder.path()));
    assert_eq!(
        engines.unwrap(),
        [given("gpu-1=tcp://127.0.0.1:22903,replay=tcp://127.0.0.1:22904")]
    );
}

/// State of an engine, in the form that earlier programs read: without tokens.
#[derive(Debug, Deserialize)]
#[expect(dead_code, reason = "a file is read as a whole")]
struct EarlierEngine {
    cache: String,
    epoch: u64,
    rank: Option<Rank>,
    topic: Option<Vec<u8>>,
    continuity: Continuity,
    blocks: SavedTranslator,
}

fn read_by_an_earlier_program(folder: &Path) -> Result<Option<EarlierEngine>, FileError> {
    let path = folder.join(engine_file(&holder()));
    read_file(&Disk, &path, StateFileKind::Engine, BYTES_MAX)
}

#[test]
fn an_earlier_program_reads_a_file_without_tokens_and_refuses_one_with_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let directory = open(folder.path());
    assert!(write(&directory, &kept("cache")));
    let read = read_by_an_earlier_program(folder.path()).unwrap().unwrap();
    assert_eq!((read.epoch, read.cache.as_str()), (9, "cache"));
    let mirror = Mirror::new(MirrorSettings {
        block_size: BlockSize::new(16).unwrap(),
        bytes_max: 1 << 20,
        has_special: false,
        proves_ancestors: true,
    });
    let republished = KeptEngine {
        republished: Some(mirror.save()),
        ..kept("cache")
    };
    assert!(write(&directory, &republished));
    let read = directory.engine(&holder(), "cache", BYTES_MAX).unwrap();
    assert_eq!(read.republished, Some(mirror.save()));
    let refused = read_by_an_earlier_program(folder.path()).unwrap_err();
    assert!(matches!(refused, FileError::Unreadable(_)), "{refused}");
}

#[test]
fn what_an_earlier_program_has_kept_of_a_source_is_taken_up() {
    let earlier = rmp_serde::to_vec(&("uid", std::collections::BTreeMap::from([("app", "vllm")]))).unwrap();
    let read: Discovered = rmp_serde::from_slice(&earlier).unwrap();
    assert_eq!((read.identity.as_str(), read.object.as_str()), ("uid", ""));
    assert_eq!(read.labels["app"], "vllm");
    assert_eq!(
        rmp_serde::to_vec(&read).unwrap(),
        earlier,
        "and an earlier program reads it"
    );
}
