//! Arbitrary messages, as proptest strategies.

use proptest::collection::{btree_map, vec};
use proptest::option::of;
use proptest::prelude::*;

use crate::hash::{
    BlockHash, BlockSize, Position, PositionalLineageHash, SequenceHash, Token, lineage_hashes,
};
use crate::wire::DegradedReasons;

use super::super::{
    Address, BatchReply, BlockContent, BlockNames, DropOut, ErrorBody, Event, EventBatch, Gathered,
    HolderMatch, HolderStatusReply, Labels, Limit, PredictedHolder, Profile, QueryKey, QueryOptions,
    QueryReply, QueryRequest, QueryResult, RemovedBlocks, Resumable, ResumableBlocks, SingleQuery,
    StatusReply, StoredBlocks, Tier, WorkerName,
};

/// Returns numbers, often small ones, so that integers of every width are encoded.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..300_u64, 0..100_000_u64, any::<u64>()]
}

fn sequence_hash() -> impl Strategy<Value = SequenceHash> {
    number().prop_map(SequenceHash)
}

fn position() -> impl Strategy<Value = Position> {
    prop_oneof![0..300_u64, 65_000..66_000_u64, 0..(1_u64 << 24)]
        .prop_map(|position| Position::new(position).unwrap())
}

pub(super) fn lineage_hash() -> impl Strategy<Value = PositionalLineageHash> {
    (position(), any::<u64>(), any::<u64>()).prop_map(|(position, parent, current)| {
        PositionalLineageHash::at(position, SequenceHash(parent), SequenceHash(current))
    })
}

pub(super) fn worker() -> impl Strategy<Value = WorkerName> {
    "[A-Za-z0-9_-]{1,64}".prop_map(|name| WorkerName::new(&name).unwrap())
}

fn tier() -> impl Strategy<Value = Tier> {
    (0..Tier::COUNT).prop_map(|tier| Tier::new(tier).unwrap())
}

/// Returns names of blocks by sequence hashes, with a parent and a position that fit together.
fn sequence_names() -> impl Strategy<Value = BlockNames> {
    let start = prop_oneof![
        Just((None, None)),
        Just((None, Some(Position::ZERO))),
        sequence_hash().prop_map(|parent| (Some(parent), None)),
        (sequence_hash(), 1..1_000_000_u64)
            .prop_map(|(parent, position)| (Some(parent), Some(Position::new(position).unwrap()))),
    ];
    (start, vec(sequence_hash(), 0..20)).prop_map(|((parent, position), hashes)| BlockNames::Sequence {
        parent,
        position,
        hashes,
    })
}

fn content(blocks: usize) -> impl Strategy<Value = Option<BlockContent>> {
    let text = || of("[a-z\u{e9}\u{4e2d}]{0,40}");
    prop_oneof![
        Just(None),
        vec(any::<u64>().prop_map(BlockHash), blocks)
            .prop_map(|hashes| Some(BlockContent::BlockHashes(hashes))),
        (0..4_usize, text(), text(), any::<Token>()).prop_map(move |(size, lora_name, cache_salt, token)| {
            // The number of tokens is a multiple of the number of blocks.
            let tokens = (0..blocks * size)
                .map(|index| token.wrapping_mul(u32::try_from(index).unwrap()))
                .collect();
            Some(BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt,
            })
        }),
    ]
}

fn resumable(blocks: usize) -> impl Strategy<Value = Resumable> {
    let count = u32::try_from(blocks).unwrap();
    let all = if count == 0 { vec![] } else { vec![0, count] };
    prop_oneof![
        Just(Resumable::ALL),
        Just(Resumable::none()),
        vec(any::<bool>(), blocks).prop_map(Resumable::from_flags),
        // Run lengths in their long forms: no block is resumable, and all blocks after a first run of 0 are.
        Just(Resumable::from_runs(vec![count], blocks).unwrap()),
        Just(Resumable::from_runs(all, blocks).unwrap()),
    ]
}

fn stored() -> impl Strategy<Value = StoredBlocks> {
    let names = prop_oneof![
        sequence_names(),
        vec(lineage_hash(), 0..20).prop_map(BlockNames::Lineage)
    ];
    names.prop_flat_map(|names| {
        let blocks = names.len();
        let engine_hashes = of(vec(any::<u64>(), blocks));
        (content(blocks), engine_hashes, resumable(blocks)).prop_map(
            move |(content, engine_hashes, resumable)| StoredBlocks {
                names: names.clone(),
                content,
                engine_hashes,
                resumable,
            },
        )
    })
}

pub(super) fn event() -> impl Strategy<Value = Event> {
    let removed =
        (vec(sequence_hash(), 0..20), vec(lineage_hash(), 0..20)).prop_map(|(hashes, lineage_hashes)| {
            RemovedBlocks {
                hashes,
                lineage_hashes,
            }
        });
    let resumable = (
        vec(sequence_hash(), 0..20),
        vec(lineage_hash(), 0..20),
        any::<bool>(),
    )
        .prop_map(|(hashes, lineage_hashes, resumable)| ResumableBlocks {
            hashes,
            lineage_hashes,
            resumable,
        });
    prop_oneof![
        4 => stored().prop_map(Event::Stored),
        3 => removed.prop_map(Event::Removed),
        2 => resumable.prop_map(Event::Resumable),
        1 => Just(Event::Cleared),
        1 => (0_u32..=u32::MAX)
            .prop_map(|bits| Event::Doubted(DegradedReasons::from_bits(bits).upstream())),
        1 => Just(Event::Goodbye),
    ]
}

/// Returns a profile, which may be empty.
fn profile() -> impl Strategy<Value = Profile> {
    let address = prop_oneof![
        "[a-z0-9.-]{1,20}:[1-9][0-9]{0,3}",
        "https?://[a-z0-9.-]{1,20}(/[a-z/]{0,9})?"
    ];
    let labels = btree_map("[a-z./_-]{1,20}", "[ -~]{0,20}", 0..4);
    (of(address), labels).prop_map(|(address, labels)| Profile {
        address: address.map(|text| Address::new(&text).unwrap()),
        labels: Labels::new(labels).unwrap(),
    })
}

pub(super) fn batch() -> impl Strategy<Value = EventBatch> {
    (
        number(),
        number(),
        any::<u32>(),
        of(number()),
        tier(),
        of((1..=BlockSize::TOKENS_MAX).prop_map(|tokens| BlockSize::new(tokens).unwrap())),
        of(profile()),
        vec(event(), 0..5),
    )
        .prop_map(
            |(epoch, seq, rank, time_us, tier, block_size, profile, events)| EventBatch {
                epoch,
                seq: seq.max(1),
                rank,
                time_us,
                tier,
                block_size,
                profile,
                events,
            },
        )
}

fn query_key() -> impl Strategy<Value = QueryKey> {
    let text = || of("[ -~]{0,40}");
    let chain = vec(any::<u64>().prop_map(SequenceHash), 0..30);
    prop_oneof![
        (vec(any::<Token>(), 0..60), text(), text()).prop_map(|(tokens, lora_name, cache_salt)| {
            QueryKey::Tokens {
                tokens,
                lora_name,
                cache_salt,
            }
        }),
        vec(any::<u64>().prop_map(BlockHash), 0..30).prop_map(QueryKey::BlockHashes),
        vec(sequence_hash(), 0..30).prop_map(QueryKey::SequenceHashes),
        chain.prop_map(|chain| QueryKey::LineageHashes(
            lineage_hashes(&chain).collect::<Result<_, _>>().unwrap()
        )),
    ]
}

fn query() -> impl Strategy<Value = SingleQuery> {
    let options = (
        of(vec(worker(), 0..4)),
        of(any::<u32>()),
        any::<u32>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            |(workers, limit, min_blocks, explain, tiers, predicted)| QueryOptions {
                workers,
                limit,
                min_blocks,
                explain,
                tiers,
                predicted,
            },
        );
    (asked(), of(number()), options).prop_map(|((key, positions), token_count, options)| SingleQuery {
        token_count: token_count.map(|count| match &key {
            QueryKey::Tokens { tokens, .. } => count.max(tokens.len() as u64),
            _ => count,
        }),
        key,
        options: QueryOptions {
            explain: options.explain && positions.is_none(),
            tiers: options.tiers && positions.is_none(),
            predicted: options.predicted && positions.is_none(),
            ..options
        },
        positions,
    })
}

/// Returns the blocks of a query: a whole prefix, or chosen blocks of a prefix with their positions.
fn asked() -> impl Strategy<Value = (QueryKey, Option<Vec<Position>>)> {
    let chosen = || vec(any::<bool>(), 1..30);
    let is_lineage = any::<bool>();
    let compressed = (vec(sequence_hash(), 30), chosen(), is_lineage).prop_filter_map(
        "no block is chosen",
        |(chain, chosen, is_lineage)| {
            let pick = |place: usize| chosen.get(place) == Some(&true);
            let places: Vec<usize> = (0..chain.len()).filter(|place| pick(*place)).collect();
            let positions = places
                .iter()
                .map(|place| Position::new(*place as u64).unwrap())
                .collect();
            let key = if is_lineage {
                let lineage: Vec<_> = lineage_hashes(&chain).collect::<Result<_, _>>().unwrap();
                QueryKey::LineageHashes(places.iter().map(|place| lineage[*place]).collect())
            } else {
                QueryKey::SequenceHashes(places.iter().map(|place| chain[*place]).collect())
            };
            (!places.is_empty()).then_some((key, Some(positions)))
        },
    );
    prop_oneof![3 => query_key().prop_map(|key| (key, None)), 1 => compressed]
}

pub(super) fn request() -> impl Strategy<Value = QueryRequest> {
    prop_oneof![
        query().prop_map(QueryRequest::Single),
        vec(query(), 0..5).prop_map(QueryRequest::Batch)
    ]
}

fn degraded() -> impl Strategy<Value = DegradedReasons> {
    any::<u32>().prop_map(DegradedReasons::from_bits)
}

fn limit() -> impl Strategy<Value = Limit> {
    use Limit::{FullAttention, LastToken, Other, WindowOrState};
    proptest::sample::select(vec![FullAttention, WindowOrState, LastToken, Other])
}

fn holder_match() -> impl Strategy<Value = HolderMatch> {
    let dropped_out =
        (any::<u32>(), lineage_hash(), any::<u32>()).prop_map(|(position, key, other_holders)| DropOut {
            position,
            lineage_hash: key,
            other_holders,
        });
    (
        worker(),
        any::<u32>(),
        (any::<u32>(), [(); 2].map(|()| of(any::<u32>()))),
        of((any::<[u32; 2]>(), [(); 2].map(|()| of(any::<u32>())))),
        any::<bool>(),
        degraded(),
        of(dropped_out),
        of(limit()),
        profile(),
    )
        .prop_map(
            |(
                worker,
                rank,
                (matched_blocks, [max, usable]),
                near,
                exact,
                degraded,
                dropped_out,
                limited_by,
                profile,
            )| {
                HolderMatch {
                    matched_blocks_max: max,
                    usable_blocks: usable,
                    device_blocks: near.map(|([device, _], _)| device),
                    host_blocks: near.map(|([_, host], _)| host),
                    device_usable_blocks: near.and_then(|(_, [device, _])| device),
                    host_usable_blocks: near.and_then(|(_, [_, host])| host),
                    exact,
                    degraded,
                    dropped_out,
                    limited_by,
                    ..HolderMatch::new(worker, rank, matched_blocks).with_profile(profile)
                }
            },
        )
}

pub(super) fn query_reply() -> impl Strategy<Value = QueryReply> {
    (
        any::<u32>(),
        vec(holder_match(), 0..5),
        any::<u32>(),
        [(); 2].map(|()| prop_oneof![Just(0), any::<u32>()]),
        prop_oneof![Just(0), any::<u32>()],
        gathered(),
        vec(predicted(), 0..3),
    )
        .prop_map(
            |(
                query_blocks,
                holders,
                holders_total,
                [foreign_holders, doubtful_holders],
                unseen_blocks_max,
                gathered,
                predicted,
            )| {
                QueryReply {
                    behind_us: 0,
                    predicted,
                    v: 1,
                    query_blocks,
                    block_size: query_blocks / 2,
                    holders,
                    holders_total,
                    foreign_holders,
                    doubtful_holders,
                    gathered,
                    unseen_blocks_max,
                }
            },
        )
}

fn predicted() -> impl Strategy<Value = PredictedHolder> {
    (worker(), any::<u32>(), any::<u32>(), profile()).prop_map(|(worker, rank, blocks, profile)| {
        PredictedHolder {
            worker,
            rank,
            blocks,
            address: profile.address,
        }
    })
}

fn gathered() -> impl Strategy<Value = Option<Gathered>> {
    let gathered =
        (any::<u32>(), vec(any::<u32>(), 0..3)).prop_map(|(shards, missing)| Gathered { shards, missing });
    proptest::option::of(gathered)
}

pub(super) fn batch_reply() -> impl Strategy<Value = BatchReply> {
    let error =
        (any::<u16>(), ".{0,40}").prop_map(|(code, text)| QueryResult::Error(ErrorBody { code, text }));
    let result = prop_oneof![query_reply().prop_map(QueryResult::Reply), error];
    vec(result, 0..4).prop_map(|results| BatchReply { v: 1, results })
}

pub(super) fn status_reply() -> impl Strategy<Value = StatusReply> {
    let holder = (
        worker(),
        any::<u32>(),
        (number(), number(), number(), number()),
        any::<u32>(),
        any::<(bool, bool)>(),
        (degraded(), of(number())),
        profile(),
    )
        .prop_map(
            |(
                worker,
                rank,
                (epoch, seq, blocks, epoch_ahead_s),
                parked_events,
                (foreign_chain, exact),
                (degraded, since_us),
                Profile { address, labels },
            )| {
                HolderStatusReply {
                    worker,
                    rank,
                    epoch,
                    seq,
                    blocks,
                    parked_events,
                    foreign_chain,
                    epoch_ahead_s,
                    exact,
                    degraded,
                    since_us,
                    address,
                    labels,
                }
            },
        );
    (
        any::<(u32, u32)>(),
        number(),
        number(),
        vec(holder, 0..5),
        gathered(),
    )
        .prop_map(
            |((block_size, unsized_holders), distinct_blocks, batches_waiting, holders, gathered)| {
                StatusReply {
                    behind_us: 0,
                    v: 1,
                    block_size,
                    distinct_blocks,
                    batches_waiting,
                    unsized_holders,
                    refused_holders: unsized_holders / 2,
                    unheard_holders: unsized_holders / 3,
                    holders,
                    gathered,
                }
            },
        )
}
