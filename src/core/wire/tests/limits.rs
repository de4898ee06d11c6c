//! Tests of every limit: a message just within the limit is accepted, and a message with one more element is refused.

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, lineage_hashes};

use super::super::{
    BlockContent, BlockNames, DecodeError, ErrorCode, Event, EventBatch, QueryKey, QueryOptions,
    QueryRequest, RemovedBlocks, Resumable, ResumableBlocks, SingleQuery, StoredBlocks, Tier, WireError,
    WireLimits, WorkerName,
};

fn batch(events: Vec<Event>) -> Vec<u8> {
    let batch = EventBatch {
        epoch: 1,
        seq: 1,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    };
    batch.encode()
}

fn chain(length: usize) -> Vec<SequenceHash> {
    (1..=length as u64).map(SequenceHash).collect()
}

fn keys(length: usize) -> Vec<PositionalLineageHash> {
    lineage_hashes(&chain(length)).collect::<Result<_, _>>().unwrap()
}

fn query(key: QueryKey) -> Vec<u8> {
    QueryRequest::Single(SingleQuery::new(key)).encode()
}

fn is_too_large<T: std::fmt::Debug>(decoded: Result<T, DecodeError>) -> bool {
    let error = decoded.unwrap_err();
    let is_length = matches!(
        error,
        DecodeError::TooLong { .. } | DecodeError::TextTooLong { .. } | DecodeError::Oversized { .. }
    );
    is_length && WireError::from(error).code == ErrorCode::TooLarge
}

/// Checks that `payload(n)` is accepted if the limit is n, and refused if the limit is n - 1.
fn check_events(payload: impl Fn(usize) -> Vec<u8>, limit: impl Fn(&mut WireLimits) -> &mut usize) {
    let mut limits = WireLimits::default();
    for count in [2, 3, 20] {
        *limit(&mut limits) = count;
        EventBatch::decode(&payload(count), &limits).unwrap();
        assert!(
            is_too_large(EventBatch::decode(&payload(count + 1), &limits)),
            "{count}"
        );
    }
}

fn check_queries(payload: impl Fn(usize) -> Vec<u8>, limit: impl Fn(&mut WireLimits) -> &mut usize) {
    let mut limits = WireLimits::default();
    for count in [2, 3, 20] {
        *limit(&mut limits) = count;
        QueryRequest::decode(&payload(count), &limits).unwrap();
        assert!(
            is_too_large(QueryRequest::decode(&payload(count + 1), &limits)),
            "{count}"
        );
    }
}

#[test]
fn messages_are_bounded() {
    let mut limits = WireLimits::default();
    let (events, request) = (
        batch(vec![Event::Cleared; 9]),
        query(QueryKey::SequenceHashes(chain(9))),
    );
    limits.message_bytes_max = events.len();
    EventBatch::decode(&events, &limits).unwrap();
    limits.message_bytes_max -= 1;
    assert!(is_too_large(EventBatch::decode(&events, &limits)));
    limits.message_bytes_max = request.len();
    QueryRequest::decode(&request, &limits).unwrap();
    limits.message_bytes_max -= 1;
    assert!(is_too_large(QueryRequest::decode(&request, &limits)));
}

#[test]
fn events_of_a_batch_are_bounded() {
    check_events(
        |count| batch(vec![Event::Cleared; count]),
        |limits| &mut limits.events_max,
    );
}

#[test]
fn blocks_of_an_event_are_bounded() {
    fn blocks(limits: &mut WireLimits) -> &mut usize {
        &mut limits.blocks_per_event_max
    }
    let stored = |count| StoredBlocks::by_sequence(None, None, chain(count));
    check_events(|count| batch(vec![Event::Stored(stored(count))]), blocks);
    check_events(
        |count| batch(vec![Event::Removed(RemovedBlocks::by_sequence(chain(count)))]),
        blocks,
    );
    let by_lineage = |count| StoredBlocks {
        names: BlockNames::Lineage(keys(count)),
        ..stored(0)
    };
    check_events(|count| batch(vec![Event::Stored(by_lineage(count))]), blocks);
    let removed = |count| RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: keys(count),
    };
    check_events(|count| batch(vec![Event::Removed(removed(count))]), blocks);
    // Other lists are as long as the list of names, but a decoder may read them before the names.
    let engine = |count| StoredBlocks {
        engine_hashes: Some(vec![7; count]),
        ..stored(count)
    };
    check_events(|count| batch(vec![Event::Stored(engine(count))]), blocks);
    let content = |count| Some(BlockContent::BlockHashes(vec![BlockHash(7); count]));
    let beside = |count| StoredBlocks {
        content: content(count),
        ..stored(count)
    };
    check_events(|count| batch(vec![Event::Stored(beside(count))]), blocks);
    let resumable = |count| ResumableBlocks::by_sequence(chain(count), true);
    check_events(|count| batch(vec![Event::Resumable(resumable(count))]), blocks);
}

/// The limit on run lengths is the limit on blocks plus one, because the first run may be empty. The sum of the run
/// lengths is checked against the event's blocks.
#[test]
fn runs_of_resumable_blocks_are_bounded() {
    let limits = WireLimits {
        blocks_per_event_max: 4,
        ..WireLimits::default()
    };
    let with_runs = |runs: usize| {
        let stored = StoredBlocks {
            resumable: Resumable::from_runs(vec![1; runs], runs).unwrap(),
            ..StoredBlocks::by_sequence(None, None, chain(4))
        };
        EventBatch::decode(&batch(vec![Event::Stored(stored)]), &limits)
    };
    with_runs(4).unwrap();
    assert!(matches!(with_runs(5), Err(DecodeError::LengthMismatch { .. })));
    assert!(is_too_large(with_runs(6)));
}

#[test]
fn tokens_of_an_event_are_bounded() {
    let with_tokens = |tokens: usize| {
        let content = BlockContent::Tokens {
            tokens: vec![7; tokens],
            lora_name: None,
            cache_salt: None,
        };
        let stored = StoredBlocks::by_sequence(None, None, chain(1));
        batch(vec![Event::Stored(StoredBlocks {
            content: Some(content),
            ..stored
        })])
    };
    let mut limits = WireLimits {
        blocks_per_event_max: 2,
        tokens_per_block_max: 8,
        ..WireLimits::default()
    };
    EventBatch::decode(&with_tokens(16), &limits).unwrap();
    assert!(is_too_large(EventBatch::decode(&with_tokens(17), &limits)));
    // The product of two large limits does not wrap.
    limits.blocks_per_event_max = usize::MAX;
    EventBatch::decode(&with_tokens(17), &limits).unwrap();
}

#[test]
fn texts_are_bounded_in_bytes() {
    let text = |bytes: usize| Some("x".repeat(bytes));
    let stored = |lora_name, cache_salt| {
        let content = BlockContent::Tokens {
            tokens: vec![7; 4],
            lora_name,
            cache_salt,
        };
        let stored = StoredBlocks::by_sequence(None, None, chain(1));
        batch(vec![Event::Stored(StoredBlocks {
            content: Some(content),
            ..stored
        })])
    };
    let asked = |lora_name, cache_salt| {
        query(QueryKey::Tokens {
            tokens: vec![7; 4],
            lora_name,
            cache_salt,
        })
    };
    fn limit(limits: &mut WireLimits) -> &mut usize {
        &mut limits.text_bytes_max
    }
    check_events(|count| stored(text(count), None), limit);
    check_events(|count| stored(None, text(count)), limit);
    check_queries(|count| asked(text(count), None), limit);
    check_queries(|count| asked(None, text(count)), limit);
}

#[test]
fn queries_are_bounded_in_depth() {
    fn depth(limits: &mut WireLimits) -> &mut usize {
        &mut limits.query_depth_max
    }
    check_queries(|count| query(QueryKey::SequenceHashes(chain(count))), depth);
    check_queries(
        |count| query(QueryKey::BlockHashes(vec![BlockHash(7); count])),
        depth,
    );
    check_queries(|count| query(QueryKey::LineageHashes(keys(count))), depth);
    let tokens = |tokens| QueryKey::Tokens {
        tokens: vec![7; tokens],
        lora_name: None,
        cache_salt: None,
    };
    let limits = WireLimits {
        query_depth_max: 3,
        tokens_per_block_max: 5,
        ..WireLimits::default()
    };
    QueryRequest::decode(&query(tokens(15)), &limits).unwrap();
    assert!(is_too_large(QueryRequest::decode(&query(tokens(16)), &limits)));
}

#[test]
fn queries_of_a_request_are_bounded() {
    let one = SingleQuery::new(QueryKey::SequenceHashes(chain(1)));
    let request = |count| QueryRequest::Batch(vec![one.clone(); count]).encode();
    check_queries(request, |limits| &mut limits.queries_max);
    let limits = WireLimits {
        query_depth_max: 1,
        ..WireLimits::default()
    };
    let deep = SingleQuery::new(QueryKey::SequenceHashes(chain(2)));
    let refused = QueryRequest::decode(&QueryRequest::Batch(vec![one, deep]).encode(), &limits).unwrap_err();
    let refused = WireError::from(refused);
    assert_eq!(refused.code, ErrorCode::TooLarge);
    assert!(refused.text.starts_with("queries[1]: "), "{refused}");
}

/// Returns a query for one block of these workers.
fn query_of(workers: Vec<WorkerName>) -> Vec<u8> {
    let options = QueryOptions {
        workers: Some(workers),
        ..QueryOptions::default()
    };
    let query = SingleQuery {
        options,
        ..SingleQuery::new(QueryKey::SequenceHashes(chain(1)))
    };
    QueryRequest::Single(query).encode()
}

#[test]
fn workers_of_a_filter_are_bounded() {
    let request = |count| {
        let name = WorkerName::new("w").unwrap();
        query_of(vec![name; count])
    };
    check_queries(request, |limits| &mut limits.filter_workers_max);
}

#[test]
fn names_are_bounded_in_bytes() {
    let request = |bytes: usize| {
        let name = WorkerName::new(&"w".repeat(bytes)).unwrap();
        query_of(vec![name])
    };
    check_queries(request, |limits| &mut limits.name_bytes_max);
}

/// A test that a low limit on the length of names does not apply to the words of event types, such as `goodbye`.
#[test]
fn a_low_limit_on_names_leaves_event_types_alone() {
    let limits = WireLimits {
        name_bytes_max: 1,
        ..WireLimits::default()
    };
    let events = vec![Event::Cleared, Event::Goodbye];
    assert_eq!(
        EventBatch::decode(&batch(events.clone()), &limits)
            .unwrap()
            .events,
        events
    );
}

#[test]
fn the_last_block_needs_a_position_too() {
    let stored = |position, length| {
        let position = Position::new(position).unwrap();
        let run = StoredBlocks::by_sequence(Some(SequenceHash(1)), Some(position), chain(length));
        EventBatch::decode(&batch(vec![Event::Stored(run)]), &WireLimits::default())
    };
    let last = Position::MAX.as_u64();
    stored(last, 1).unwrap();
    stored(last - 1, 2).unwrap();
    // A run without blocks ends where it begins.
    stored(last, 0).unwrap();
    assert!(matches!(stored(last, 2), Err(DecodeError::Position(_))));
    assert!(matches!(stored(last - 1, 3), Err(DecodeError::Position(_))));
}
