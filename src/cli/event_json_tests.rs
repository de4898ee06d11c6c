use proptest::option;
use proptest::prelude::*;

use super::*;

fn parse(line: &str) -> Result<LineBatch, String> {
    LineBatch::parse(line).map_err(|error| error.to_string())
}

#[test]
fn an_event_is_a_batch_of_one() {
    let line = r#"{"type":"stored","parent":"00000000000000aa","position":1,
        "sequence_hashes":["00000000000000ab", 172],"block_hashes":["0x1","0x2"],"engine_hashes":[7,8]}"#;
    let batch = parse(line).unwrap();
    let expected = StoredBlocks {
        names: BlockNames::Sequence {
            parent: Some(SequenceHash(0xaa)),
            position: Some(Position::new(1).unwrap()),
            hashes: vec![SequenceHash(0xab), SequenceHash(172)],
        },
        content: Some(BlockContent::BlockHashes(vec![BlockHash(1), BlockHash(2)])),
        engine_hashes: Some(vec![7, 8]),
    };
    assert_eq!(batch.events, [Event::Stored(expected)]);
    assert_eq!((batch.tier, batch.blocks()), (Tier::DEVICE, 2));
}

#[test]
fn a_batch_has_events_in_order_and_a_tier() {
    let line = r#"{"tier":1,"events":[{"type":"removed","sequence_hashes":["0x1"]},{"type":"cleared"},{"type":"goodbye"}]}"#;
    let batch = parse(line).unwrap();
    let removed = RemovedBlocks::by_sequence(vec![SequenceHash(1)]);
    assert_eq!(batch.tier.as_u8(), 1);
    assert_eq!(
        batch.events,
        [Event::Removed(removed), Event::Cleared, Event::Goodbye]
    );
    assert_eq!(parse(r#"{"events":[]}"#).unwrap().events, []);
}

#[test]
fn every_fault_is_named() {
    for (line, part) in [
        ("", "neither an event nor a batch"),
        ("[1,2]", "neither an event nor a batch"),
        ("{", "EOF"),
        ("{}", "neither an event nor a batch"),
        (r#"{"type":"evicted"}"#, "unknown variant `evicted`"),
        (r#"{"type":"cleared","tier":1}"#, "unknown field `tier`"),
        (
            r#"{"type":"stored","sequence_hash":[]}"#,
            "unknown field `sequence_hash`",
        ),
        (r#"{"events":[],"seq":1}"#, "unknown field `seq`"),
        (r#"{"events":[],"events":[]}"#, "duplicate field"),
        (r#"{"events":[],"tier":8}"#, "tier is 8; at most 7"),
        (r#"{"type":"stored"}"#, "sequence_hashes is missing"),
        (r#"{"type":"removed"}"#, "sequence_hashes is missing"),
        (
            r#"{"type":"stored","sequence_hashes":["12"]}"#,
            "write 16 hexadecimal digits",
        ),
        (r#"{"type":"stored","sequence_hashes":[-1]}"#, "a hash"),
        (
            r#"{"type":"stored","sequence_hashes":[1],"position":3}"#,
            "needs a parent",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"position":16777216,"parent":1}"#,
            "16777215",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1,2],"block_hashes":[1]}"#,
            "1 elements for 2 blocks",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"engine_hashes":[]}"#,
            "0 elements for 1 blocks",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"block_hashes":[1],"tokens":[1]}"#,
            "not both",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"lora_name":"a"}"#,
            "belong to tokens",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[1],"tokens":[4294967296]}"#,
            "u32",
        ),
        (
            r#"{"type":"stored","sequence_hashes":[],"lineage_hashes":[]}"#,
            "not both",
        ),
        (
            r#"{"type":"stored","lineage_hashes":[],"parent":1}"#,
            "leave out parent",
        ),
    ] {
        let error = parse(line).unwrap_err();
        assert!(error.contains(part), "{line}: {error}");
    }
}

fn lineage_hash() -> impl Strategy<Value = PositionalLineageHash> {
    (any::<u64>(), any::<u64>(), 0..=0xff_ffff_u64).prop_map(|(current, parent, position)| {
        PositionalLineageHash::at(
            Position::new(position).unwrap(),
            SequenceHash(parent),
            SequenceHash(current),
        )
    })
}

fn names(blocks: usize) -> impl Strategy<Value = BlockNames> {
    let hashes = prop::collection::vec(any::<u64>().prop_map(SequenceHash), blocks);
    let start = prop_oneof![
        Just((None, None)),
        Just((None, Some(Position::ZERO))),
        any::<u64>().prop_map(|parent| (Some(SequenceHash(parent)), None)),
        (any::<u64>(), 1..0xff_0000_u64).prop_map(|(parent, position)| {
            (Some(SequenceHash(parent)), Some(Position::new(position).unwrap()))
        }),
    ];
    prop_oneof![
        (start, hashes).prop_map(|((parent, position), hashes)| BlockNames::Sequence {
            parent,
            position,
            hashes
        }),
        prop::collection::vec(lineage_hash(), blocks).prop_map(BlockNames::Lineage),
    ]
}

fn content(blocks: usize) -> impl Strategy<Value = BlockContent> {
    prop_oneof![
        prop::collection::vec(any::<u64>().prop_map(BlockHash), blocks).prop_map(BlockContent::BlockHashes),
        (
            prop::collection::vec(any::<Token>(), blocks * 4),
            option::of("\\PC{0,9}"),
            option::of("\\PC{0,9}")
        )
            .prop_map(|(tokens, lora_name, cache_salt)| BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt
            }),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let stored = (0_usize..5).prop_flat_map(|blocks| {
        let engine_hashes = option::of(prop::collection::vec(any::<u64>(), blocks));
        (names(blocks), option::of(content(blocks)), engine_hashes).prop_map(
            |(names, content, engine_hashes)| StoredBlocks {
                names,
                content,
                engine_hashes,
            },
        )
    });
    let removed = (
        prop::collection::vec(any::<u64>().prop_map(SequenceHash), 0..4),
        prop::collection::vec(lineage_hash(), 0..4),
    )
        .prop_map(|(hashes, lineage_hashes)| RemovedBlocks {
            hashes,
            lineage_hashes,
        });
    prop_oneof![
        stored.prop_map(Event::Stored),
        removed.prop_map(Event::Removed),
        Just(Event::Cleared),
        Just(Event::Goodbye),
    ]
}

proptest! {
    #[test]
    fn a_batch_is_read_back(tier in 0..Tier::COUNT, events in prop::collection::vec(event(), 0..5)) {
        let batch = LineBatch { tier: Tier::new(tier).unwrap(), events };
        let line = batch.to_json().unwrap();
        prop_assert_eq!(parse(&line), Ok(batch), "{}", line);
    }
}
