//! Cutting of events into pieces that one message may carry.

use kvatlas_core::hash::Position;
use kvatlas_core::wire::{
    BlockContent, BlockNames, Event, RUN_BYTES, RemovedBlocks, ResumableBlocks, StoredBlocks,
};

use super::sizes::{BATCH_BYTES, EVENT_BYTES, event_bytes};

/// Bounds on one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutBounds {
    /// Maximum number of events in one message.
    pub events_max: usize,
    /// Approximate maximum size of one message, in bytes. A single block is sent even if it is larger.
    pub bytes_max: usize,
}

/// Spreads `events` over as few messages as possible, in order. An event that is too large for one message is cut between its
/// blocks. An event that tells a doubt, at the end, stays in the message of its preceding event, and is in all other messages, too.
pub fn cut_events(events: Vec<Event>, bounds: CutBounds) -> Vec<Vec<Event>> {
    let doubt = match events.last() {
        Some(Event::Doubted(reasons)) if !reasons.is_empty() => Some(Event::Doubted(*reasons)),
        _ => None,
    };
    let of_doubt = doubt.as_ref().map_or(0, event_bytes);
    let room = bounds.bytes_max.saturating_sub(BATCH_BYTES + of_doubt);
    let mut messages = Vec::new();
    let mut open = Vec::new();
    let mut bytes = 0;
    for event in events {
        for piece in cut_event(event, room) {
            let more = event_bytes(&piece);
            let is_full = open.len() >= bounds.events_max || bytes + more > room;
            if is_full && !open.is_empty() && !matches!(piece, Event::Doubted(_)) {
                messages.push(std::mem::take(&mut open));
                bytes = 0;
            }
            bytes += more;
            open.push(piece);
        }
    }
    if let Some(doubt) = doubt {
        // Daemons apply each message on its own, and none of these is more certain than all together.
        for message in &mut messages {
            message.push(doubt.clone());
        }
    }
    if !open.is_empty() {
        messages.push(open);
    }
    messages
}

/// Cuts an event into pieces. A piece takes at most `bytes_max` bytes, unless it has only one block.
fn cut_event(event: Event, bytes_max: usize) -> Vec<Event> {
    let bytes = event_bytes(&event);
    if bytes <= bytes_max {
        return vec![event];
    }
    match event {
        Event::Stored(stored) => {
            let blocks = stored.names.len();
            // Each piece repeats the texts.
            let of_lists = bytes - EVENT_BYTES - stored.text_bytes();
            let room = bytes_max.saturating_sub(bytes - of_lists);
            // In the worst case, one piece has the lengths of all runs of resumable blocks.
            let of_runs = if stored.resumable.is_all() {
                0
            } else {
                RUN_BYTES * blocks
            };
            let pieces = StoredPieces {
                rest: Some(stored),
                blocks: blocks_in(room, of_lists + of_runs, blocks),
            };
            pieces.map(Event::Stored).collect()
        }
        Event::Removed(removed) => cut_named(removed, bytes_max).map(Event::Removed).collect(),
        Event::Resumable(blocks) => {
            let resumable = blocks.resumable;
            let named = RemovedBlocks {
                hashes: blocks.hashes,
                lineage_hashes: blocks.lineage_hashes,
            };
            let piece = |named: RemovedBlocks| ResumableBlocks {
                hashes: named.hashes,
                lineage_hashes: named.lineage_hashes,
                resumable,
            };
            cut_named(named, bytes_max)
                .map(piece)
                .map(Event::Resumable)
                .collect()
        }
        small => vec![small],
    }
}

/// Cuts a list of removed blocks into pieces of at most about `bytes_max` bytes.
fn cut_named(named: RemovedBlocks, bytes_max: usize) -> impl Iterator<Item = RemovedBlocks> {
    let RemovedBlocks {
        hashes,
        lineage_hashes,
    } = named;
    let room = bytes_max.saturating_sub(EVENT_BYTES);
    let of_sequence = hashes.chunks(blocks_in(room, size_of_val(&hashes[..]), hashes.len()));
    let bytes = size_of_val(&lineage_hashes[..]);
    let of_lineage = lineage_hashes.chunks(blocks_in(room, bytes, lineage_hashes.len()));
    let by_sequence = of_sequence.map(|hashes| RemovedBlocks::by_sequence(hashes.to_vec()));
    let by_lineage = of_lineage.map(|hashes| RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: hashes.to_vec(),
    });
    by_sequence.chain(by_lineage).collect::<Vec<_>>().into_iter()
}

/// Returns how many blocks fit into `room` bytes, but at least one. The size of a block is taken as the average of
/// `blocks` blocks that take `bytes` bytes together.
fn blocks_in(room: usize, bytes: usize, blocks: usize) -> usize {
    let of_one = bytes.div_ceil(blocks.max(1)).max(1);
    (room / of_one).max(1)
}

/// Iterator that cuts stored blocks into pieces. The last block of a piece is the parent of the next piece.
struct StoredPieces {
    rest: Option<StoredBlocks>,
    blocks: usize,
}

impl Iterator for StoredPieces {
    type Item = StoredBlocks;

    fn next(&mut self) -> Option<StoredBlocks> {
        let mut first = self.rest.take()?;
        if first.names.len() > self.blocks {
            self.rest = Some(split_off(&mut first, self.blocks));
        }
        Some(first)
    }
}

/// Cuts an event after its first `at` blocks, of which it has more. `stored` keeps these blocks; the returned event has
/// the others.
fn split_off(stored: &mut StoredBlocks, at: usize) -> StoredBlocks {
    let blocks = stored.names.len();
    let names = match &mut stored.names {
        BlockNames::Sequence { position, hashes, .. } => {
            let rest = hashes.split_off(at);
            BlockNames::Sequence {
                parent: hashes.last().copied(),
                position: position.and_then(|first| Position::new(first.as_u64() + at as u64).ok()),
                hashes: rest,
            }
        }
        BlockNames::Lineage(hashes) => BlockNames::Lineage(hashes.split_off(at)),
    };
    let content = stored.content.as_mut().map(|content| match content {
        BlockContent::BlockHashes(hashes) => BlockContent::BlockHashes(hashes.split_off(at)),
        BlockContent::Tokens {
            tokens,
            lora_name,
            cache_salt,
        } => {
            let of_block = tokens.len() / blocks.max(1);
            BlockContent::Tokens {
                tokens: tokens.split_off((at * of_block).min(tokens.len())),
                lora_name: lora_name.clone(),
                cache_salt: cache_salt.clone(),
            }
        }
    });
    let resumable = stored.resumable.part(at..blocks, blocks);
    stored.resumable = stored.resumable.part(0..at, blocks);
    StoredBlocks {
        names,
        content,
        engine_hashes: stored
            .engine_hashes
            .as_mut()
            .map(|hashes| hashes.split_off(at.min(hashes.len()))),
        resumable,
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::{BlockHash, SequenceHash};
    use kvatlas_core::wire::{DegradedReason, DegradedReasons};

    use super::*;

    fn bounds(bytes_max: usize) -> CutBounds {
        CutBounds {
            events_max: 8,
            bytes_max,
        }
    }

    fn hashes(count: u64) -> Vec<SequenceHash> {
        (1..=count).map(SequenceHash).collect()
    }

    /// Joins the stored blocks of all messages into one event. Checks that each piece continues where its predecessor ended.
    fn joined(messages: Vec<Vec<Event>>, bytes_max: usize) -> StoredBlocks {
        let mut all: Option<StoredBlocks> = None;
        for message in messages {
            let bytes: usize = message.iter().map(event_bytes).sum();
            assert!(bytes + BATCH_BYTES <= bytes_max, "{bytes}");
            for event in message {
                let Event::Stored(piece) = event else {
                    panic!("{event:?}")
                };
                all = Some(match all {
                    None => piece,
                    Some(before) => append(before, piece),
                });
            }
        }
        all.unwrap()
    }

    fn append(mut before: StoredBlocks, piece: StoredBlocks) -> StoredBlocks {
        let blocks = before.names.len() as u64;
        match (&mut before.names, piece.names) {
            (
                BlockNames::Sequence { position, hashes, .. },
                BlockNames::Sequence {
                    parent,
                    position: of_piece,
                    hashes: rest,
                },
            ) => {
                assert_eq!(parent, hashes.last().copied());
                let due = position.map(|first| first.as_u64() + blocks);
                assert_eq!(of_piece.map(Position::as_u64), due);
                hashes.extend(rest);
            }
            (BlockNames::Lineage(hashes), BlockNames::Lineage(rest)) => hashes.extend(rest),
            other => panic!("{other:?}"),
        }
        match (&mut before.content, piece.content) {
            (None, None) => {}
            (Some(BlockContent::BlockHashes(all)), Some(BlockContent::BlockHashes(rest))) => all.extend(rest),
            (
                Some(BlockContent::Tokens {
                    tokens,
                    lora_name,
                    cache_salt,
                }),
                Some(BlockContent::Tokens {
                    tokens: rest,
                    lora_name: lora,
                    cache_salt: salt,
                }),
            ) => {
                assert_eq!((&*lora_name, &*cache_salt), (&lora, &salt));
                tokens.extend(rest);
            }
            other => panic!("{other:?}"),
        }
        match (&mut before.engine_hashes, piece.engine_hashes) {
            (Some(all), Some(rest)) => all.extend(rest),
            (None, None) => {}
            other => panic!("{other:?}"),
        }
        before
    }

    #[test]
    fn a_large_event_is_cut_between_its_blocks() {
        let tokens = BlockContent::Tokens {
            tokens: (0..400).collect(),
            lora_name: Some("adapter".to_owned()),
            cache_salt: Some("salt".to_owned()),
        };
        let block_hashes = BlockContent::BlockHashes((1..=100).map(BlockHash).collect());
        for (content, position) in [
            (None, None),
            (Some(tokens), Some(7)),
            (Some(block_hashes), Some(0)),
        ] {
            let parent = position.filter(|first| *first > 0).map(SequenceHash);
            let position = position.map(|first| Position::new(first).unwrap());
            let stored = StoredBlocks {
                content,
                engine_hashes: Some((1..=100).collect()),
                ..StoredBlocks::by_sequence(parent, position, hashes(100))
            };
            let messages = cut_events(vec![Event::Stored(stored.clone())], bounds(700));
            assert!(messages.len() > 2, "{messages:?}");
            assert_eq!(joined(messages, 700), stored);
        }
    }

    #[test]
    fn removed_blocks_are_cut_and_one_block_is_always_carried() {
        let removed = Event::Removed(RemovedBlocks::by_sequence(hashes(100)));
        let cut = cut_events(vec![removed], bounds(400));
        let found: Vec<SequenceHash> = cut
            .iter()
            .flatten()
            .flat_map(|event| match event {
                Event::Removed(removed) => removed.hashes.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!((cut.len() > 3, found), (true, hashes(100)));
        let stored = Event::Stored(StoredBlocks::by_sequence(None, None, hashes(3)));
        assert_eq!(cut_events(vec![stored], bounds(1)).len(), 3);
    }

    #[test]
    fn what_fits_stays_together_and_a_doubt_stays_with_its_clear() {
        let doubt = Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamGap));
        let mut events = vec![Event::Cleared; 8];
        assert_eq!(cut_events(events.clone(), bounds(4096)), [events.clone()]);
        events.push(doubt);
        assert_eq!(cut_events(events.clone(), bounds(4096)), [events.clone()]);
        events.push(Event::Cleared);
        assert_eq!(cut_events(events, bounds(4096)).len(), 2);
    }

    #[test]
    fn every_part_of_what_is_doubted_is_in_doubt() {
        let gap = DegradedReasons::of(DegradedReason::UpstreamGap);
        let stored = Event::Stored(StoredBlocks::by_sequence(None, None, hashes(100)));
        let of = |reasons| vec![Event::Cleared, stored.clone(), Event::Doubted(reasons)];
        let cut = cut_events(of(gap), bounds(400));
        assert!(cut.len() > 2);
        for message in cut {
            assert_eq!(message.last(), Some(&Event::Doubted(gap)));
            assert!(BATCH_BYTES + message.iter().map(event_bytes).sum::<usize>() <= 400);
        }
        // A doubt ends only behind all.
        let none = DegradedReasons::default();
        let cut = cut_events(of(none), bounds(400));
        let ends = cut
            .iter()
            .flatten()
            .filter(|event| **event == Event::Doubted(none));
        assert_eq!(ends.count(), 1);
    }
}
