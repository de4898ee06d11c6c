//! The fast path for batches in the usual form, which [`EventBatch::encode`] writes: the keys in a fixed order, and the
//! numbers in common encodings.
//!
//! Each key is compared at the place where it is expected, without any look-up. If a batch or an event has another
//! form, or a mistake, the decoder for all forms reads that batch or event again from its beginning. So the result
//! always equals the result of the decoder for all forms; the fuzz tests compare the two.

use crate::hash::{BlockSize, Position};
use crate::wire::error::DecodeError;
use crate::wire::event::{Event, RemovedBlocks, StoredBlocks, check_start};
use crate::wire::limits::WireLimits;
use crate::wire::reader::Reader;
use crate::wire::resumable::{Resumable, ResumableBlocks};
use crate::wire::tier::Tier;

use super::EventBatch;

/// Reads the beginning of a batch, up to its list of events. Returns the batch without events, and the number of events
/// that follow. `None` if the batch is not in the usual form.
pub(super) fn head(reader: &mut Reader<'_>) -> Option<(EventBatch, usize)> {
    let entries = reader.short_map()?;
    let epoch = reader.behind(b"\xa1v\x01\xa5epoch")?.plain_number()?;
    let seq = reader.behind(b"\xa3seq")?.plain_number()?;
    let rank = u32::try_from(reader.behind(b"\xa4rank")?.plain_number()?).ok()?;
    // Five entries are always there: the version, the epoch, the number, the rank and the events.
    let (mut read, mut time_us, mut tier, mut block_size) = (5, None, Tier::DEVICE, None);
    if let Some(reader) = reader.behind(b"\xa7time_us") {
        (time_us, read) = (Some(reader.plain_number()?), read + 1);
    }
    if let Some(reader) = reader.behind(b"\xa4tier") {
        let number = u8::try_from(reader.plain_number()?).ok()?;
        (tier, read) = (Tier::new(number)?, read + 1);
    }
    if let Some(reader) = reader.behind(b"\xaablock_size") {
        let number = u32::try_from(reader.plain_number()?).ok()?;
        (block_size, read) = (Some(BlockSize::new(number).ok()?), read + 1);
    }
    let count = reader.behind(b"\xa6events")?.short_array()?;
    let batch = EventBatch {
        epoch,
        seq,
        rank,
        time_us,
        tier,
        block_size,
        profile: None,
        events: Vec::new(),
    };
    (read == entries && seq > 0).then_some((batch, count))
}

/// Reads the next event, in any form.
pub(super) fn event(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Event, DecodeError> {
    let mut ahead = reader.clone();
    match plain_event(&mut ahead, limits) {
        Some(event) => {
            *reader = ahead;
            Ok(event)
        }
        None => Event::decode(reader, limits),
    }
}

/// Reads an event in the usual form. Such an event names blocks by sequence hashes, and has no other field except the
/// marks of resumable blocks. `None` for any other form.
fn plain_event(reader: &mut Reader<'_>, limits: &WireLimits) -> Option<Event> {
    const HASHES: &str = "sequence_hashes";
    let entries = reader.short_map()?;
    let mut read = 2;
    if reader.behind(b"\xa4type\xa7removed\xafsequence_hashes").is_some() {
        if read != entries {
            return None;
        }
        let hashes = reader.list(HASHES, limits.blocks_per_event_max).ok()?;
        return Some(Event::Removed(RemovedBlocks::by_sequence(hashes)));
    }
    if reader
        .behind(b"\xa4type\xa9resumable\xafsequence_hashes")
        .is_some()
    {
        let hashes = reader.list(HASHES, limits.blocks_per_event_max).ok()?;
        let resumable = reader.behind(b"\xa9resumable")?.boolean("resumable").ok()?;
        let blocks = ResumableBlocks::by_sequence(hashes, resumable);
        return (entries == 3).then_some(Event::Resumable(blocks));
    }
    reader.behind(b"\xa4type\xa6stored")?;
    let (mut parent, mut position) = (None, None);
    if let Some(reader) = reader.behind(b"\xa6parent") {
        (parent, read) = (Some(reader.plain_number()?.into()), read + 1);
    }
    if let Some(reader) = reader.behind(b"\xa8position") {
        let number = reader.plain_number()?;
        (position, read) = (Some(Position::new(number).ok()?), read + 1);
    }
    let hashes: Vec<_> = reader
        .behind(b"\xafsequence_hashes")?
        .list(HASHES, limits.blocks_per_event_max)
        .ok()?;
    check_start(parent, position, hashes.len()).ok()?;
    let mut stored = StoredBlocks::by_sequence(parent, position, hashes);
    if read < entries {
        let runs = reader.behind(b"\xa9resumable")?;
        let runs = runs
            .list("resumable", limits.blocks_per_event_max.saturating_add(1))
            .ok()?;
        stored.resumable = Resumable::from_runs(runs, stored.names.len()).ok()?;
        read += 1;
    }
    (read == entries).then_some(Event::Stored(stored))
}
