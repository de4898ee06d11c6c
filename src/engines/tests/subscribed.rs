//! Recorded streams of `SubscribeKvEvents`, compared with the final content of the engines' own caches.

use std::collections::{BTreeMap, BTreeSet};

use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::Rank;
use kvatlas_engines::subscribe::KvEventFrame;
use kvatlas_engines::{
    DecodeLimits, EngineBatch, EngineChange, Format, GroupFacts, GroupKind, HashMode, Reason, Translation,
    Translator, TranslatorSettings,
};
use prost::Message;

use crate::fixtures::shared_folder;

/// The frames of a recording. Each is stored as its length, a little-endian u32, and that many bytes.
fn frames(name: &str) -> Vec<KvEventFrame> {
    let Some(folder) = shared_folder("partners/smg") else {
        return Vec::new();
    };
    let recorded = std::fs::read(folder.join(name)).unwrap();
    let mut rest = recorded.as_slice();
    let mut frames = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let (frame, behind) = behind.split_at(u32::from_le_bytes(*length) as usize);
        frames.push(KvEventFrame::decode(frame).unwrap());
        rest = behind;
    }
    frames
}

/// State of one rank after a recording was translated: the translator, and the number of copies under each name of
/// the engine.
struct RankState {
    last: u64,
    copies: BTreeMap<u64, u32>,
    translator: Translator,
}

impl RankState {
    fn new(last: u64, settings: TranslatorSettings) -> Self {
        Self {
            last,
            copies: BTreeMap::new(),
            translator: Translator::new(settings),
        }
    }

    fn apply(&mut self, batch: &EngineBatch) {
        let mut output = Translation::default();
        self.translator.translate(batch, &mut output);
        for event in batch.events() {
            match event.change {
                EngineChange::Stored(stored) => {
                    for name in batch.hashes(stored.names) {
                        *self.copies.entry(*name).or_default() += 1;
                    }
                }
                EngineChange::Removed(removed) => {
                    for name in batch.hashes(removed.names) {
                        let copies = self.copies.get_mut(name).expect("it was stored");
                        *copies -= 1;
                        if *copies == 0 {
                            self.copies.remove(name);
                        }
                    }
                }
                EngineChange::Cleared => self.copies.clear(),
                EngineChange::Created(_) | EngineChange::Moved { .. } => panic!("such streams move nothing"),
            }
        }
    }
}

/// The settings for an engine with blocks of `size` tokens.
fn settings(size: u32) -> TranslatorSettings {
    TranslatorSettings {
        block_size: BlockSize::new(size).unwrap(),
        mode: HashMode::Recompute,
        ..TranslatorSettings::for_server(Format::Vllm)
    }
}

/// Translates all frames of a recording. Returns the state of each rank, and how many frames reported load.
fn play(name: &str, settings: &TranslatorSettings) -> (BTreeMap<Rank, RankState>, usize) {
    let (mut ranks, mut loads) = (BTreeMap::<Rank, RankState>::new(), 0);
    let mut batch = EngineBatch::default();
    for frame in frames(name) {
        if frame.is_load() {
            loads += 1;
            continue;
        }
        let (rank, number) = (frame.rank().unwrap_or_default(), frame.number());
        let is_first_chunk = frame.snapshot().is_some_and(|chunk| chunk.index == 0);
        frame.read(&DecodeLimits::default(), &mut batch);
        assert!(batch.reasons.is_empty(), "{name}: {:?}", batch.reasons);
        let state = ranks
            .entry(rank)
            .or_insert_with(|| RankState::new(number.wrapping_sub(1), settings.clone()));
        if is_first_chunk {
            *state = RankState::new(number.wrapping_sub(1), settings.clone());
        }
        assert_eq!(
            number,
            state.last.wrapping_add(1),
            "{name}: the numbers of rank {rank} go on"
        );
        state.last = number;
        state.apply(&batch);
    }
    (ranks, loads)
}

#[test]
fn a_recorded_stream_leaves_what_the_cache_held() {
    let Some(folder) = shared_folder("partners/smg") else {
        return;
    };
    for (name, ranks, loads) in [("subscribe-stream", 2, 2), ("subscribe-snapshot", 2, 0)] {
        let (found, reported) = play(&format!("{name}.bin"), &settings(16));
        let truth = std::fs::read(folder.join(format!("{name}.truth.json"))).unwrap();
        let truth: serde_json::Value = serde_json::from_slice(&truth).unwrap();
        assert!(found.len() <= ranks && !found.is_empty(), "{name}");
        assert_eq!(reported, loads, "{name}");
        for (rank, state) in &found {
            let held: BTreeSet<i64> = state.copies.keys().map(|name| name.cast_signed()).collect();
            let names = truth["ranks"][rank.to_string()].as_array().unwrap();
            let expected: BTreeSet<i64> = names.iter().map(|name| name.as_i64().unwrap()).collect();
            assert_eq!(held, expected, "{name}, rank {rank}");
            assert_eq!(state.translator.doubt(), None, "{name}, rank {rank}");
            assert!(state.translator.hides_groups(), "{name}, rank {rank}");
        }
        let groups = GroupFacts {
            kinds: vec![GroupKind::Main],
            ..GroupFacts::default()
        };
        let stated = TranslatorSettings {
            groups,
            ..settings(16)
        };
        for state in play(&format!("{name}.bin"), &stated).0.values() {
            assert!(!state.translator.hides_groups(), "{name}");
        }
    }
}

#[test]
fn a_snapshot_of_several_chunks_has_all_its_blocks() {
    let recorded = frames("subscribe-snapshot-chunks.bin");
    let chunks: Vec<_> = recorded.iter().filter_map(KvEventFrame::snapshot).collect();
    if recorded.is_empty() {
        return;
    }
    assert_eq!(
        chunks.iter().map(|chunk| chunk.index).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert_eq!(
        (chunks[0].count, chunks[0].blocks, chunks[0].unknown_before),
        (3, 4_787, 0)
    );
    let (ranks, _) = play("subscribe-snapshot-chunks.bin", &settings(16));
    let state = &ranks[&0];
    assert_eq!(state.translator.doubt(), None);
    assert!(!state.copies.is_empty());
}

/// A recording of a model that has several groups of layers, or only windows; with the facts that a test expects of
/// it.
struct Hybrid {
    name: &'static str,
    block_size: u32,
    /// Whether the server passes on the events about blocks of full attention. Such a server silently leaves out the
    /// blocks of other groups.
    has_main: bool,
    /// Number of block names that the engine's own block pool held at the end of the recording, and the XOR of these
    /// names. Only the group of layers whose events the server passes on counts.
    held: (usize, u64),
}

const HYBRIDS: [Hybrid; 3] = [
    Hybrid {
        name: "subscribe-gpt-oss.bin",
        block_size: 16,
        has_main: true,
        held: (1_193, 0xa830_5ede_046e_6c77),
    },
    Hybrid {
        name: "subscribe-qwen3-next.bin",
        block_size: 64,
        has_main: true,
        held: (1_071, 0xbd9f_df75_267d_ccff),
    },
    Hybrid {
        name: "subscribe-all-window.bin",
        block_size: 16,
        has_main: false,
        held: (1_498, 0x695a_13a2_481c_9468),
    },
];

#[test]
fn a_recorded_stream_of_several_groups_leaves_what_its_group_held_and_never_says_what_is_reused() {
    if shared_folder("partners/smg").is_none() {
        return;
    }
    for hybrid in HYBRIDS {
        let name = hybrid.name;
        // If a recording has only windows, their events show that main attention is missing. If other groups are left
        // out, nothing shows that, but such a server may have left some out.
        let (ranks, loads) = play(name, &settings(hybrid.block_size));
        assert_eq!((ranks.len(), loads), (1, 0), "{name}");
        let state = &ranks[&0];
        let held = state.copies.keys().fold(0, |all, name| all ^ name);
        assert_eq!((state.copies.len(), held), hybrid.held, "{name}");
        assert!(state.translator.hides_groups(), "{name}");
        if hybrid.has_main {
            assert_eq!(state.translator.names(), state.copies.len(), "{name}");
            assert_eq!(state.translator.doubt(), None, "{name}");
        }
    }
}

/// One block of a stored event, as servers send it over gRPC.
#[derive(Clone, PartialEq, Message)]
struct OneBlock {
    #[prost(int64, tag = "1")]
    block_hash: i64,
    #[prost(uint32, repeated, tag = "2")]
    token_ids: Vec<u32>,
    #[prost(int32, tag = "3")]
    block_size: i32,
}

#[derive(Clone, PartialEq, Message)]
struct OneStored {
    #[prost(message, repeated, tag = "1")]
    blocks: Vec<OneBlock>,
    #[prost(string, optional, tag = "4")]
    medium: Option<String>,
    #[prost(string, optional, tag = "9")]
    ownership: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct OneEvent {
    #[prost(message, optional, tag = "2")]
    stored: Option<OneStored>,
}

#[derive(Clone, PartialEq, Message)]
struct OneFrame {
    #[prost(message, repeated, tag = "3")]
    events: Vec<OneEvent>,
}

/// The doubts of a translator about single tiers after a frame. The frame has one stored block for each element of
/// `told`, which gives the block's number of tokens, medium and owner. An empty owner is left out.
fn tier_doubts(told: &[(u32, &str, &str)], settings: TranslatorSettings) -> Vec<(u8, Reason)> {
    let event = |(size, medium, owner): &(u32, &str, &str)| OneEvent {
        stored: Some(OneStored {
            blocks: vec![OneBlock {
                block_hash: 7,
                token_ids: (0..*size).collect(),
                block_size: i32::try_from(*size).unwrap(),
            }],
            medium: Some((*medium).to_owned()),
            ownership: (!owner.is_empty()).then(|| (*owner).to_owned()),
        }),
    };
    let events = told.iter().map(event).collect();
    let frame = KvEventFrame::decode(OneFrame { events }.encode_to_vec().as_slice()).unwrap();
    let mut batch = EngineBatch::default();
    frame.read(&DecodeLimits::default(), &mut batch);
    let mut translator = Translator::new(settings);
    translator.translate(&batch, &mut Translation::default());
    assert_eq!(translator.doubt(), None);
    let doubts = translator.tier_doubts();
    doubts.map(|(tier, reason)| (tier.as_u8(), reason)).collect()
}

#[test]
fn what_a_server_hands_on_of_other_tiers_leaves_those_in_doubt() {
    let device = (16, "GPU", "");
    let settings = || TranslatorSettings::for_format(Format::Vllm);
    let told = [device, (0, "CPU", ""), (16, "CPU", "")];
    assert_eq!(tier_doubts(&told, settings()), []);
    let cases = [
        ((0, "CPU", ""), (1, Reason::Placeholder)),
        ((16, "cpu", ""), (1, Reason::NoRemovals)),
        ((16, "STORAGE", "kvcr"), (2, Reason::OtherOwner)),
        ((16, "FS", ""), (3, Reason::UnknownMedium)),
    ];
    for (told, doubted) in cases {
        assert_eq!(tier_doubts(&[told], settings()), [doubted], "{told:?}");
    }
}

/// A connector of vLLM tells blocks by name only, unless it is set up otherwise. Such events never come.
#[test]
fn what_a_server_of_vllm_leaves_out_of_other_tiers_leaves_those_in_doubt() {
    let told = [(16, "GPU", "")];
    let relayed = || TranslatorSettings::for_server(Format::Vllm);
    let doubted = [1, 2, 3].map(|tier| (tier, Reason::NoRemovals));
    assert_eq!(tier_doubts(&told, relayed()), doubted);
    let stated = TranslatorSettings {
        tells_beyond: true,
        ..relayed()
    };
    assert_eq!(tier_doubts(&told, stated), []);
    assert_eq!(
        tier_doubts(&told, TranslatorSettings::for_server(Format::Sglang)),
        []
    );
}
