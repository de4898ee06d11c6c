//! Tests of the format: what is written reads back, and nothing else does.

use crate::hash::SequenceHash;
use crate::wire::{Event, EventBatch, NamespaceName, StoredBlocks, Tier, WireLimits, WorkerName};

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
        foreign_chain: true,
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
        events,
    }
    .encode()
}

fn sample() -> Vec<u8> {
    let mut writer = SnapshotWriter::new(Vec::new(), 123).unwrap();
    writer.write_holder(&holder(0, 4)).unwrap();
    writer.write_batch(&batch(10)).unwrap();
    writer.write_batch(&batch(20)).unwrap();
    writer.write_holder(&holder(1, 2)).unwrap();
    writer.write_batch(&batch(30)).unwrap();
    let (bytes, totals, length) = writer.finish().unwrap();
    assert_eq!(
        totals,
        SnapshotTotals {
            holders: 2,
            batches: 3,
            blocks: 6
        }
    );
    assert_eq!(length, bytes.len() as u64);
    bytes
}

fn check(bytes: &[u8]) -> Result<SnapshotSummary, SnapshotError> {
    summarise(bytes, &WireLimits::default())
}

/// The frames of `bytes`, as (start, end).
fn frames(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut frames = Vec::new();
    let mut start = HEADER_BYTES;
    while start < bytes.len() {
        let length = u32::from_le_bytes(bytes[start..start + 4].try_into().unwrap());
        let end = start + 13 + length as usize;
        frames.push((start, end));
        start = end;
    }
    frames
}

#[test]
fn what_is_written_reads_back() {
    let bytes = sample();
    let summary = check(&bytes).unwrap();
    assert_eq!(summary.created_us, 123);
    assert_eq!(summary.holders.len(), 2);
    assert_eq!(
        summary.holders[0],
        HolderSummary {
            holder: holder(0, 4),
            batches: 2
        }
    );
    let mut reader = SnapshotReader::new(bytes.as_slice()).unwrap();
    assert_eq!(reader.next_frame().unwrap(), Some(Frame::Holder(holder(0, 4))));
    assert_eq!(reader.next_frame().unwrap(), Some(Frame::Batch(batch(10))));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let bytes = sample();
    for length in 0..bytes.len() {
        assert!(check(&bytes[..length]).is_err(), "cut at {length}");
    }
}

#[test]
fn every_flipped_bit_is_found() {
    let bytes = sample();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(check(&damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn lost_repeated_and_swapped_frames_are_found() {
    let bytes = sample();
    let frames = frames(&bytes);
    let rebuild = |order: &[usize]| {
        let mut rebuilt = bytes[..HEADER_BYTES].to_vec();
        for frame in order {
            rebuilt.extend_from_slice(&bytes[frames[*frame].0..frames[*frame].1]);
        }
        rebuilt
    };
    assert!(check(&rebuild(&[0, 1, 2, 3, 4, 5])).is_ok());
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
fn a_later_version_is_named() {
    let mut bytes = sample();
    bytes[8] = 2;
    assert!(matches!(
        check(&bytes),
        Err(SnapshotError::Version { version: 2 })
    ));
}

#[test]
fn a_length_that_lies_takes_no_memory() {
    let mut bytes = sample();
    bytes[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(check(&bytes), Err(SnapshotError::FrameTooLong { .. })));
    let most = u32::try_from(FRAME_BYTES_MAX).unwrap();
    bytes[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&most.to_le_bytes());
    assert!(matches!(
        check(&bytes),
        Err(SnapshotError::Truncated { frame: 0 })
    ));
}

#[test]
fn bytes_after_the_end_are_refused() {
    let mut bytes = sample();
    bytes.push(0);
    assert!(matches!(check(&bytes), Err(SnapshotError::TrailingBytes)));
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
