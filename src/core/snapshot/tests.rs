//! Tests of the snapshot format: a written snapshot is read back unchanged, and any other file is refused.

use crate::hash::SequenceHash;
use crate::wire::{Event, EventBatch, Labels, NamespaceName, StoredBlocks, Tier, WireLimits, WorkerName};

use super::*;

fn holder(rank: Rank, blocks: u64) -> HolderFrame {
    HolderFrame {
        namespace: NamespaceName::new("llama").unwrap(),
        worker: WorkerName::new("gpu-0").unwrap(),
        rank,
        epoch: 7,
        seq: 42,
        degraded_bits: 1,
        blocks,
        hashing: Hashing::Recompute,
        block_size: 16,
        is_size_told: false,
        foreign_chain: true,
        made_us: Some(9),
        seen_us: Some(8),
        address: None,
        labels: Labels::NONE,
        forest: None,
    }
}

fn batch(first: u64) -> Vec<u8> {
    let blocks = StoredBlocks::by_sequence(None, None, vec![SequenceHash(first), SequenceHash(first + 1)]);
    let events = vec![Event::Stored(blocks)];
    EventBatch {
        epoch: 7,
        seq: 42,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    }
    .encode()
}

fn cursor(stream: &str) -> StreamCursor {
    StreamCursor {
        stream: stream.to_owned(),
        created_us: 99,
        sequence: 17,
        digest: None,
        intake: Some(3),
        has_all: true,
        server: None,
    }
}

fn sample() -> Vec<u8> {
    let mut writer = SnapshotWriter::new(Vec::new(), 123).unwrap();
    writer.write_stream(&cursor("EVENTS")).unwrap();
    writer.write_holder(&holder(0, 4)).unwrap();
    writer.write_batch(&batch(10)).unwrap();
    writer.write_batch(&batch(20)).unwrap();
    writer.write_holder(&holder(1, 2)).unwrap();
    writer.write_batch(&batch(30)).unwrap();
    let (bytes, totals, length) = writer.finish().unwrap();
    assert_eq!(totals, TOTALS);
    assert_eq!(length, bytes.len() as u64);
    bytes
}

const TOTALS: SnapshotTotals = SnapshotTotals {
    holders: 2,
    batches: 3,
    blocks: 6,
    forest_runs: 0,
    forest_blocks: 0,
};

fn check(bytes: &[u8]) -> Result<SnapshotSummary, SnapshotError> {
    summarise(bytes, &WireLimits::default())
}

fn header(version: u32) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend_from_slice(&version.to_le_bytes());
    header.extend_from_slice(&123_u64.to_le_bytes());
    header.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&header).to_le_bytes());
    header
}

/// Returns the bytes of a frame with any payload.
fn frame(number: u64, kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_le_bytes();
    let checksum = frame_checksum(number, length, kind, payload);
    [&length[..], &[kind], payload, &checksum.to_le_bytes()].concat()
}

/// Returns the frames of the sample snapshot, as bytes, without a stream frame.
fn frames() -> Vec<Vec<u8>> {
    let named = |holder: &HolderFrame| rmp_serde::to_vec_named(holder).unwrap();
    let payloads = [
        (1, named(&holder(0, 4))),
        (2, batch(10)),
        (2, batch(20)),
        (1, named(&holder(1, 2))),
        (2, batch(30)),
        (3, rmp_serde::to_vec_named(&TOTALS).unwrap()),
    ];
    let numbered = (0_u64..).zip(payloads);
    numbered
        .map(|(number, (kind, payload))| frame(number, kind, &payload))
        .collect()
}

/// Returns a file whose compressed part is `content`.
fn compressed(content: &[u8]) -> Vec<u8> {
    [header(FORMAT_VERSION), zstd::encode_all(content, 1).unwrap()].concat()
}

#[test]
fn what_is_written_reads_back() {
    let bytes = sample();
    let summary = check(&bytes).unwrap();
    assert_eq!((summary.content.version, summary.content.created_us), (3, 123));
    assert_eq!(summary.content.streams, [cursor("EVENTS")]);
    assert_eq!(summary.holders.len(), 2);
    assert_eq!(
        summary.holders[0],
        HolderSummary {
            holder: holder(0, 4),
            batches: 2
        }
    );
    assert_eq!(
        verify(bytes.as_slice(), &WireLimits::default()).unwrap(),
        summary.content
    );
    let mut reader = SnapshotReader::new(bytes.as_slice()).unwrap();
    assert_eq!(
        reader.next_frame().unwrap(),
        Some(Frame::Stream(cursor("EVENTS")))
    );
    assert_eq!(reader.next_frame().unwrap(), Some(Frame::Holder(holder(0, 4))));
    assert_eq!(reader.next_frame().unwrap(), Some(Frame::Batch(batch(10))));
}

#[test]
fn holders_that_share_blocks_share_their_bytes() {
    let mut writer = SnapshotWriter::new(Vec::new(), 123).unwrap();
    let hashes = (0..4096_u64).map(|number| SequenceHash(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    let shared = StoredBlocks::by_sequence(None, None, hashes.collect());
    let payload = EventBatch {
        profile: None,
        events: vec![Event::Stored(shared)],
        ..EventBatch::decode(&batch(1), &WireLimits::default()).unwrap()
    };
    let payload = payload.encode();
    for rank in 0..8 {
        writer.write_holder(&holder(rank, 4096)).unwrap();
        writer.write_batch(&payload).unwrap();
    }
    let (bytes, ..) = writer.finish().unwrap();
    assert!(bytes.len() < 2 * payload.len(), "{} bytes", bytes.len());
    assert_eq!(check(&bytes).unwrap().holders.len(), 8);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = sample();
    for length in 0..bytes.len() {
        assert!(check(&bytes[..length]).is_err(), "cut at {length}");
    }
    let content = frames().concat();
    for length in 0..content.len() {
        let bytes = compressed(&content[..length]);
        assert!(check(&bytes).is_err(), "the content is cut at {length}");
    }
}

#[test]
fn a_flipped_bit_is_found_or_changes_nothing() {
    let content = frames().concat();
    for bit in 0..content.len() * 8 {
        let bytes = compressed(&flipped(&content, bit));
        assert!(check(&bytes).is_err(), "bit {bit} of the content");
    }
    let header_bits = HEADER_BYTES * 8;
    for bit in 0..header_bits {
        assert!(
            check(&flipped(&sample(), bit)).is_err(),
            "bit {bit} of the header"
        );
    }
    // If a flipped bit of the compressed part is not noticed, the decompressed content must be the same.
    let bytes = sample();
    let whole = check(&bytes).unwrap();
    let unnoticed = (0..bytes.len() * 8).filter(|bit| match check(&flipped(&bytes, *bit)) {
        Ok(summary) => {
            assert_eq!(summary, whole, "bit {bit}");
            true
        }
        Err(_) => false,
    });
    let unnoticed = unnoticed.count();
    assert!(unnoticed < 16, "{unnoticed} bits");
}

fn flipped(bytes: &[u8], bit: usize) -> Vec<u8> {
    let mut damaged = bytes.to_vec();
    damaged[bit / 8] ^= 1 << (bit % 8);
    damaged
}

#[test]
fn lost_repeated_and_swapped_frames_are_found() {
    let frames = frames();
    let rebuild = |order: &[usize]| {
        let content: Vec<u8> = order.iter().flat_map(|frame| frames[*frame].clone()).collect();
        compressed(&content)
    };
    check(&rebuild(&[0, 1, 2, 3, 4, 5])).unwrap();
    for order in [
        &[0, 1, 3, 4, 5][..],
        &[0, 1, 1, 2, 3, 4, 5],
        &[0, 2, 1, 3, 4, 5],
        &[0, 1, 2, 5],
    ] {
        assert!(
            matches!(check(&rebuild(order)), Err(SnapshotError::FrameChecksum { .. })),
            "{order:?}"
        );
    }
}

#[test]
fn another_version_is_refused_by_its_number() {
    let content = &sample()[HEADER_BYTES..];
    for other in [0, 1, 2, 4, u32::MAX] {
        let bytes = [&header(other)[..], content].concat();
        assert!(matches!(check(&bytes), Err(SnapshotError::Version { version }) if version == other));
    }
}

#[test]
fn a_length_that_lies_takes_no_memory() {
    let most = u32::try_from(FRAME_BYTES_MAX).unwrap();
    let mut content = frames().concat();
    content[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(
        check(&compressed(&content)),
        Err(SnapshotError::FrameTooLong { .. })
    ));
    content[..4].copy_from_slice(&most.to_le_bytes());
    assert!(matches!(
        check(&compressed(&content)),
        Err(SnapshotError::Truncated { frame: 0 })
    ));
}

#[test]
fn a_window_larger_than_a_reader_grants_is_refused() {
    let mut encoder = zstd::stream::write::Encoder::new(header(FORMAT_VERSION), 1).unwrap();
    encoder.window_log(WINDOW_LOG + 1).unwrap();
    std::io::Write::write_all(&mut encoder, &frames().concat()).unwrap();
    assert!(matches!(
        check(&encoder.finish().unwrap()),
        Err(SnapshotError::Compression { frame: 0, .. })
    ));
}

#[test]
fn a_file_that_never_ends_is_given_up() {
    let bytes = sample();
    let mut reader = SnapshotReader::new(bytes.as_slice()).unwrap();
    reader.content_bytes = CONTENT_BYTES_MAX;
    assert!(matches!(reader.next_frame(), Err(SnapshotError::TooLong)));
}

#[test]
fn bytes_after_the_end_are_refused() {
    let after = |mut bytes: Vec<u8>, more: &[u8]| {
        bytes.extend_from_slice(more);
        matches!(check(&bytes), Err(SnapshotError::TrailingBytes))
    };
    assert!(after(sample(), &[0]));
    // A second compressed frame is no part of the format.
    assert!(after(sample(), &zstd::encode_all(&b"more"[..], 1).unwrap()));
    assert!(matches!(
        check(&compressed(&[frames().concat(), vec![0]].concat())),
        Err(SnapshotError::TrailingBytes)
    ));
}

#[test]
fn streams_are_named_before_the_holders_and_few() {
    let mut writer = SnapshotWriter::new(Vec::new(), 0).unwrap();
    writer.write_holder(&holder(0, 0)).unwrap();
    writer.write_stream(&cursor("EVENTS")).unwrap();
    let (bytes, ..) = writer.finish().unwrap();
    assert!(matches!(
        check(&bytes),
        Err(SnapshotError::MisplacedStream { frame: 1 })
    ));
    let mut writer = SnapshotWriter::new(Vec::new(), 0).unwrap();
    for _ in 0..=STREAMS_MAX {
        writer.write_stream(&cursor("EVENTS")).unwrap();
    }
    let (bytes, ..) = writer.finish().unwrap();
    assert!(matches!(
        check(&bytes),
        Err(SnapshotError::MisplacedStream { frame: STREAMS_MAX })
    ));
}

#[test]
fn a_batch_that_is_no_batch_is_refused_although_its_checksum_matches() {
    let mut writer = SnapshotWriter::new(Vec::new(), 0).unwrap();
    writer.write_holder(&holder(0, 0)).unwrap();
    writer.write_batch(b"garbage").unwrap();
    let (bytes, ..) = writer.finish().unwrap();
    assert!(matches!(
        check(&bytes),
        Err(SnapshotError::Undecodable { frame: 1, .. })
    ));
    let mut writer = SnapshotWriter::new(Vec::new(), 0).unwrap();
    writer.write_batch(&batch(1)).unwrap();
    let (bytes, ..) = writer.finish().unwrap();
    assert!(matches!(
        check(&bytes),
        Err(SnapshotError::BatchWithoutHolder { frame: 0 })
    ));
}

proptest::proptest! {
    #[test]
    fn no_content_makes_the_reader_panic(
        kinds in proptest::collection::vec((0_u8..6, proptest::collection::vec(proptest::num::u8::ANY, 0..40)), 0..8),
    ) {
        let numbered = (0_u64..).zip(&kinds);
        let content: Vec<u8> = numbered.flat_map(|(number, (kind, payload))| frame(number, *kind, payload)).collect();
        proptest::prop_assert!(check(&compressed(&content)).is_err());
        proptest::prop_assert!(check(&[header(FORMAT_VERSION), content].concat()).is_err());
    }
}

#[test]
fn forests_stand_behind_the_frames_of_their_holders() {
    let in_forest = |rank, number| HolderFrame {
        forest: Some(InForest {
            number,
            tier: Tier::DEVICE,
        }),
        ..holder(rank, 2)
    };
    let chunk = |flags, numbers: &[u8]| {
        let payload = [&[flags], numbers, &[1, 1, 0, 1], &[7; 16]].concat();
        crate::snapshot::forest::ForestFrame {
            payload,
            runs: 1,
            blocks: 2,
        }
    };
    let both = chunk(3, &[2, 0, 0]);
    let written = |write: &dyn Fn(&mut SnapshotWriter<Vec<u8>>)| {
        let mut writer = SnapshotWriter::new(Vec::new(), 0).unwrap();
        write(&mut writer);
        check(&writer.finish().unwrap().0)
    };
    let whole = |writer: &mut SnapshotWriter<Vec<u8>>| {
        writer.write_holder(&in_forest(0, 0)).unwrap();
        writer.write_holder(&in_forest(1, 1)).unwrap();
        writer.write_forest(&both).unwrap();
        writer.write_holder(&holder(2, 2)).unwrap();
        writer.write_batch(&batch(1)).unwrap();
    };
    let summary = written(&whole).unwrap();
    assert_eq!(summary.content.version, 3);
    let totals = summary.content.totals;
    assert_eq!(
        (totals.forest_runs, totals.forest_blocks, totals.batches),
        (1, 2, 1)
    );
    assert_eq!(summary.holders[1].holder, in_forest(1, 1));

    let misplaced = |error| matches!(error, Err(SnapshotError::MisplacedForest { .. }));
    // The numbers of holders must follow the order in the file.
    assert!(misplaced(written(&|writer| {
        writer.write_holder(&in_forest(0, 1)).unwrap();
    })));
    // No other frame may come within a forest. A forest may only have holders whose frames came before, and no batch
    // may follow for such a holder.
    assert!(misplaced(written(&|writer| {
        writer.write_holder(&in_forest(0, 0)).unwrap();
        writer.write_forest(&chunk(1, &[1, 0])).unwrap();
    })));
    assert!(matches!(
        written(&|writer| {
            writer.write_holder(&in_forest(0, 0)).unwrap();
            writer.write_forest(&both).unwrap();
        }),
        Err(SnapshotError::Forest { .. })
    ));
    assert!(matches!(
        written(&|writer| {
            writer.write_holder(&in_forest(0, 0)).unwrap();
            writer.write_forest(&chunk(3, &[1, 0])).unwrap();
            writer.write_batch(&batch(1)).unwrap();
        }),
        Err(SnapshotError::BatchWithoutHolder { .. })
    ));
}
