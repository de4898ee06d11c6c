//! Files that an earlier program has written are taken up.
//!
//! Where the form of a file has to change, its version is raised, and the test says with which words the earlier files are refused.

use kvatlas_engines::Format;

use super::*;

/// Files of an optimised program of November 2026: of an engine of vLLM with gpt-oss, and of one that was registered.
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
        engines,
        [given("gpu-1=tcp://127.0.0.1:22903,replay=tcp://127.0.0.1:22904")]
    );
}
