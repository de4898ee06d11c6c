//! Tests of the lineage hash, in a file of their own, so that the file with the layout stays short.

use proptest::prelude::*;

use super::*;

const CURRENT: SequenceHash = SequenceHash(0xfedc_ba98_7654_3210);
const PARENT: SequenceHash = SequenceHash(0x0123_4567_89ab_cdef);

/// Positions of every mode. Positions near the mode boundaries are drawn often.
fn positions() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..3,
        254_u64..258,
        65_534_u64..65_538,
        0_u64..0x100,
        0x100_u64..0x1_0000,
        0x1_0000_u64..0x100_0000,
        Position::MAX.as_u64() - 2..=Position::MAX.as_u64(),
    ]
}

fn sequence_hashes() -> impl Strategy<Value = SequenceHash> {
    prop_oneof![any::<u64>(), Just(0), Just(u64::MAX)].prop_map(SequenceHash)
}

/// Returns the lineage hash of a block at any position. At position 0, `parent` is ignored.
fn lineage(current: SequenceHash, parent: SequenceHash, position: u64) -> PositionalLineageHash {
    let parent = (position > 0).then_some(parent);
    PositionalLineageHash::new(current, parent, position).unwrap()
}

#[test]
fn lineage_hashes_match_the_contract_vectors() {
    let last_of_mode_0 = lineage(CURRENT, PARENT, 255);
    assert_eq!(last_of_mode_0.to_string(), "3fc91a2b3c4d5e6f785cba9876543210");
    let first_of_mode_1 = lineage(CURRENT, PARENT, 256);
    assert_eq!(first_of_mode_1.to_string(), "404011a2b3c4d5e6f7dcba9876543210");
    assert_eq!(
        format!("{first_of_mode_1:?}"),
        "PositionalLineageHash(404011a2b3c4d5e6f7dcba9876543210 at 256)"
    );
}

/// Compares hashes with values worked out by hand from the layout table, in cases that the contract vectors leave out.
#[test]
fn the_layout_is_the_documented_one() {
    let ones = SequenceHash(u64::MAX);
    assert_eq!(
        lineage(ones, ones, 0).to_string(),
        "000000000000000007ffffffffffffff"
    );
    assert_eq!(
        lineage(ones, ones, 1).to_string(),
        "007fffffffffffffffffffffffffffff"
    );
    assert_eq!(
        lineage(ones, ones, 65_535).to_string(),
        "7fffffffffffffffff87ffffffffffff"
    );
    assert_eq!(
        lineage(ones, ones, 65_536).to_string(),
        "8040003fffffffffffffffffffffffff"
    );
    assert_eq!(
        lineage(ones, ones, 16_777_215).to_string(),
        "bfffffffffffffffffffffffffffffff"
    );
}

#[test]
fn the_last_position_of_a_mode_is_cut_beforehand() {
    let bits = |position| {
        let position = Position::new(position).unwrap();
        let fields = PositionalLineageHash::fragment_bits(position);
        (fields, PositionalLineageHash::current_fragment_bits(position))
    };
    assert_eq!(bits(0), (59, 59));
    assert_eq!(bits(254), (59, 59));
    assert_eq!(bits(255), (59, 55));
    assert_eq!(bits(256), (55, 55));
    assert_eq!(bits(65_534), (55, 55));
    assert_eq!(bits(65_535), (55, 51));
    assert_eq!(bits(65_536), (51, 51));
    assert_eq!(bits(16_777_215), (51, 51));
}

#[test]
fn parts_that_contradict_each_other_are_refused() {
    for position in [1 << 24, 1 << 32, u64::MAX] {
        let error = LineageError::PositionOutOfRange(PositionError { position });
        assert_eq!(
            PositionalLineageHash::new(CURRENT, Some(PARENT), position),
            Err(error)
        );
        assert_eq!(PositionalLineageHash::new(CURRENT, None, position), Err(error));
    }
    let position = Position::new(7).unwrap();
    assert_eq!(
        PositionalLineageHash::new(CURRENT, None, 7),
        Err(LineageError::ParentMissing { position })
    );
    assert_eq!(
        PositionalLineageHash::new(CURRENT, Some(PARENT), 0),
        Err(LineageError::ParentAtRoot)
    );
}

#[test]
fn encodings_that_no_encoder_writes_are_refused() {
    let position = |position| Position::new(position).unwrap();
    let cases = [
        (3_u128 << 126, LineageError::UnknownMode),
        (u128::MAX, LineageError::UnknownMode),
        (
            1 << 126 | 255 << 110,
            LineageError::WrongMode {
                mode: 1,
                position: position(255),
            },
        ),
        (
            2 << 126 | 65_535 << 102,
            LineageError::WrongMode {
                mode: 2,
                position: position(65_535),
            },
        ),
        (
            2 << 126,
            LineageError::WrongMode {
                mode: 2,
                position: Position::ZERO,
            },
        ),
        (1 << 59, LineageError::ParentAtRoot),
        (
            255 << 118 | 1 << 55,
            LineageError::FragmentTooWide {
                position: position(255),
                bits: 55,
            },
        ),
        (
            1 << 126 | 65_535 << 110 | 1 << 51,
            LineageError::FragmentTooWide {
                position: position(65_535),
                bits: 51,
            },
        ),
    ];
    for (packed, error) in cases {
        assert_eq!(
            PositionalLineageHash::from_u128(packed),
            Err(error),
            "{packed:032x}"
        );
        assert_eq!(
            PositionalLineageHash::from_be_bytes(packed.to_be_bytes()),
            Err(error)
        );
        assert_eq!(PositionalLineageHash::try_from(packed), Err(error));
    }
}

#[test]
fn a_chain_ends_at_the_last_position() {
    let last = lineage(CURRENT, PARENT, Position::MAX.as_u64());
    assert_eq!(last.child(CURRENT), Err(PositionError { position: 1 << 24 }));

    let sequence = [PARENT, CURRENT, PARENT];
    let mut chain = lineage_hashes_from(Position::MAX.as_u64() - 1, Some(CURRENT), &sequence);
    assert!(chain.next().unwrap().is_ok());
    assert_eq!(
        chain.next().unwrap(),
        Ok(lineage(CURRENT, PARENT, Position::MAX.as_u64()))
    );
    let error = LineageError::PositionOutOfRange(PositionError { position: 1 << 24 });
    assert_eq!(chain.next(), Some(Err(error)));
    assert_eq!(chain.next(), None);
    assert_eq!(
        lineage_hashes_from(u64::MAX, Some(PARENT), &sequence)
            .filter(Result::is_err)
            .count(),
        3
    );
}

#[test]
fn a_chain_checks_that_its_start_fits_its_parent() {
    let position = Position::new(3).unwrap();
    let mut orphan = lineage_hashes_from(3, None, &[CURRENT]);
    assert_eq!(orphan.next(), Some(Err(LineageError::ParentMissing { position })));
    let mut rooted = lineage_hashes_from(0, Some(PARENT), &[CURRENT]);
    assert_eq!(rooted.next(), Some(Err(LineageError::ParentAtRoot)));
    assert_eq!(lineage_hashes(&[]).next(), None);
}

/// Checks a chain long enough to cross both mode boundaries. Each hash is a child of the previous hash, equals the
/// result of `child`, and sorts after the previous hash.
#[test]
fn a_chain_aligns_across_both_mode_boundaries() {
    let sequence: Vec<_> = (0..65_600_u64)
        .map(|index| SequenceHash(index.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) | 1 << 63))
        .collect();
    let chain: Vec<_> = lineage_hashes(&sequence).collect::<Result<_, _>>().unwrap();
    assert_eq!(chain.len(), sequence.len());
    for (position, pair) in chain.windows(2).enumerate() {
        assert!(
            pair[1].is_child_of(&pair[0]),
            "{:?} follows {:?}",
            pair[1],
            pair[0]
        );
        assert_eq!(pair[0].child(sequence[position + 1]), Ok(pair[1]));
        assert!(pair[0] < pair[1]);
    }
}

proptest! {
    #[test]
    fn parts_come_back(current in sequence_hashes(), parent in sequence_hashes(), position in positions()) {
        let hash = lineage(current, parent, position);
        let typed = Position::new(position).unwrap();
        let (mode, field_bits) = match position {
            0..256 => (0, 59),
            256..65_536 => (1, 55),
            _ => (2, 51),
        };
        let current_bits = match position {
            255 => 55,
            65_535 => 51,
            _ => field_bits,
        };
        let parent_fragment = if position == 0 { 0 } else { parent.as_u64() % (1 << field_bits) };
        prop_assert_eq!(hash.mode(), mode);
        prop_assert_eq!(hash.position(), position);
        prop_assert_eq!(Position::from(hash), typed);
        prop_assert_eq!(hash.parent_hash_fragment(), parent_fragment);
        prop_assert_eq!(hash.current_hash_fragment(), current.as_u64() % (1 << current_bits));
        prop_assert_eq!(PositionalLineageHash::at(typed, parent, current), hash);
        prop_assert_eq!(PositionalLineageHash::from_u128(hash.as_u128()), Ok(hash));
        prop_assert_eq!(PositionalLineageHash::from_be_bytes(hash.to_be_bytes()), Ok(hash));
    }

    #[test]
    fn a_child_knows_its_parent(
        hashes in prop::array::uniform3(sequence_hashes()),
        position in positions().prop_filter("has a next", |position| *position < Position::MAX.as_u64()),
    ) {
        let [grandparent, parent, current] = hashes;
        let older = lineage(parent, grandparent, position);
        let younger = lineage(current, parent, position + 1);
        prop_assert!(younger.is_child_of(&older));
        prop_assert_eq!(older.child(current), Ok(younger));
        prop_assert!(!older.is_child_of(&younger));
        prop_assert!(!older.is_child_of(&older));
    }

    #[test]
    fn another_parent_or_position_is_no_parent(
        parent: u64,
        flipped_bit in 0_u32..51,
        position in positions().prop_filter("has a next", |position| *position < Position::MAX.as_u64()),
    ) {
        let younger = lineage(CURRENT, SequenceHash(parent), position + 1);
        let other = lineage(SequenceHash(parent ^ 1 << flipped_bit), PARENT, position);
        prop_assert!(!younger.is_child_of(&other));
        let older = lineage(SequenceHash(parent), PARENT, position);
        let far = PositionalLineageHash::new(CURRENT, Some(SequenceHash(parent)), position + 2);
        prop_assert!(far.is_err() || !far.unwrap().is_child_of(&older));
    }

    #[test]
    fn an_integer_is_refused_or_round_trips(
        packed in prop_oneof![
            any::<u128>(),
            (0_u128..4, positions(), any::<u128>()).prop_map(|(mode, position, rest)| {
                let position_bits = 8 * (mode.min(2) as u32 + 1);
                mode << 126 | u128::from(position) << (126 - position_bits) | rest >> (position_bits + 2)
            }),
        ],
    ) {
        if let Ok(hash) = PositionalLineageHash::from_u128(packed) {
            let parent = SequenceHash(hash.parent_hash_fragment());
            let again = lineage(SequenceHash(hash.current_hash_fragment()), parent, hash.position());
            prop_assert_eq!(again.as_u128(), packed);
        }
    }

    #[test]
    fn order_is_by_position_first(one in positions(), other in positions(), hashes: (u64, u64)) {
        prop_assume!(one != other);
        let first = lineage(SequenceHash(hashes.0), SequenceHash(hashes.1), one);
        let second = lineage(SequenceHash(hashes.1), SequenceHash(hashes.0), other);
        prop_assert_eq!(first.cmp(&second), one.cmp(&other));
        prop_assert_eq!(first.to_be_bytes().cmp(&second.to_be_bytes()), one.cmp(&other));
    }
}
