//! Kinds of attacks. Each sends its messages, of at most 1 MiB, one after another.

use kvatlas_core::hash::{Position, PositionalLineageHash, SequenceHash};
use kvatlas_core::index::{Capacity, Hashing, IndexLimits};
use kvatlas_core::wire::{BlockContent, BlockNames, Event, RemovedBlocks, Resumable, StoredBlocks, Tier};

/// Maximum number of blocks of an event.
const EVENT: u64 = 65_536;
/// Maximum number of events of a batch.
const BATCH: u64 = 4096;

/// Kind of attack.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) messages: u64,
    pub(crate) hashing: Hashing,
    pub(crate) limits: IndexLimits,
    /// Returns the tier and the events of message number `n`.
    pub(crate) events: fn(u64) -> (Tier, Vec<Event>),
}

/// Returns a number that looks like a hash.
pub(crate) fn mix(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// Returns a number with a short encoding: 3 bytes if possible, else 5.
fn short(number: u64) -> u64 {
    number + 256
}

fn hashes(hashes: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    hashes.into_iter().map(SequenceHash).collect()
}

fn sequence(parent: Option<u64>, position: Option<u64>, blocks: Vec<SequenceHash>) -> StoredBlocks {
    let position = position.and_then(|position| Position::new(position).ok());
    StoredBlocks::by_sequence(parent.map(SequenceHash), position, blocks)
}

fn stored(parent: Option<u64>, blocks: impl IntoIterator<Item = u64>) -> Event {
    Event::Stored(sequence(parent, None, hashes(blocks)))
}

fn named(parent: Option<u64>, blocks: Vec<SequenceHash>, names: Vec<u64>) -> Event {
    let mut stored = sequence(parent, None, blocks);
    stored.engine_hashes = Some(names);
    Event::Stored(stored)
}

fn lineage(position: u64, parent: u64, own: u64) -> PositionalLineageHash {
    let position = Position::new(position).unwrap();
    PositionalLineageHash::at(position, SequenceHash(parent), SequenceHash(own))
}

fn by_lineage(keys: Vec<PositionalLineageHash>) -> Event {
    Event::Stored(StoredBlocks {
        names: BlockNames::Lineage(keys),
        content: None,
        engine_hashes: None,
        resumable: Resumable::ALL,
    })
}

fn removed(blocks: impl IntoIterator<Item = u64>) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(hashes(blocks)))
}

fn on_device(events: Vec<Event>) -> (Tier, Vec<Event>) {
    (Tier::DEVICE, events)
}

fn attack(name: &'static str, messages: u64, events: fn(u64) -> (Tier, Vec<Event>)) -> Attack {
    Attack {
        name,
        messages,
        hashing: Hashing::Engine,
        limits: IndexLimits::default(),
        events,
    }
}

fn bounded(attack: &Attack, name: &'static str) -> Attack {
    let capacity = Capacity {
        blocks_max: 200_000,
        bytes_max: 64 << 20,
    };
    let limits = IndexLimits {
        capacity,
        ..attack.limits
    };
    Attack {
        name,
        limits,
        ..*attack
    }
}

pub(crate) fn all() -> Vec<Attack> {
    let mut all = shapes();
    all.extend(names());
    all.extend(absent_parents());
    all.extend(removals());
    all.extend(bounds());
    all
}

/// Returns attacks whose blocks have a position, parent or hash that is costly for the index.
fn shapes() -> Vec<Attack> {
    vec![
        attack("one chain", 16, |number| {
            let parent = number.checked_sub(1).map(|_| mix(number * EVENT - 1));
            on_device(vec![stored(
                parent,
                (number * EVENT..(number + 1) * EVENT).map(mix),
            )])
        }),
        attack("a chain, one block an event", 16, |number| {
            let parent = |block: u64| block.checked_sub(1).map(short);
            let block = |block: u64| stored(parent(block), [short(block)]);
            on_device((number * BATCH..(number + 1) * BATCH).map(block).collect())
        }),
        attack("first blocks alone, an event each", 16, |number| {
            let block = |block: u64| stored(None, [short(block)]);
            on_device((number * BATCH..(number + 1) * BATCH).map(block).collect())
        }),
        attack("first blocks alone, by lineage hash", 16, |number| {
            let blocks = number * (EVENT - 100)..(number + 1) * (EVENT - 100);
            on_device(vec![by_lineage(
                blocks.map(|block| lineage(0, 0, mix(block))).collect(),
            )])
        }),
        attack("a branch at each block", 16, |number| {
            let trunk = |block: u64| mix(number << 32 | block);
            let twig = |block: u64| lineage(block + 1, trunk(block), mix(1 << 60 | number << 32 | block));
            on_device(vec![
                stored(None, (0..30_000).map(trunk)),
                by_lineage((0..30_000).map(twig).collect()),
            ])
        }),
        attack(
            "a deep tree of short runs, then its trunk alone goes",
            17,
            deep_forest,
        ),
        attack("first blocks equal in 59 bits", 4, |number| {
            let block = |block: u64| {
                stored(
                    None,
                    [((block % 32) << 59) | (mix((number << 20) | (block / 32)) >> 5)],
                )
            };
            on_device((0..BATCH).map(block).collect())
        }),
        attack("8,192 branches equal in 51 bits", 3, |number| {
            if number == 0 {
                return on_device(vec![
                    stored(None, (0..EVENT).map(mix)),
                    stored(Some(mix(EVENT - 1)), (EVENT..EVENT + 10).map(mix)),
                ]);
            }
            let block = |block: u64| stored(Some(mix(EVENT + 9)), [block << 51 | 77]);
            on_device(((number - 1) * BATCH..number * BATCH).map(block).collect())
        }),
        attack("one hash for all blocks, named apart", 16, |number| {
            let names = number * EVENT..(number + 1) * EVENT;
            let parent = number.checked_sub(1).map(|_| short(number * EVENT - 1));
            on_device(vec![named(
                parent,
                hashes((0..EVENT).map(|_| 7)),
                names.map(short).collect(),
            )])
        }),
        attack("a hash under many parents", 8, |number| {
            let pair = |block: u64| stored(None, [short(number * BATCH + block), 7]);
            on_device((0..BATCH).map(pair).collect())
        }),
    ]
}

/// Number of levels of the deep tree in one message. Each level stores two blocks.
const LEVELS: u64 = 16_000;

/// Returns one of 17 messages. Each of the first 16 stores two blocks under each block of a chain, so that the index
/// cannot keep consecutive blocks together (as a run). Then it removes all blocks of the message except the last block
/// of the chain, and the block on which the message has built. The 17th message removes the last block of the chain.
fn deep_forest(number: u64) -> (Tier, Vec<Event>) {
    let (trunk, side) = (|level: u64| mix(level), |level: u64| mix(1 << 40 | level));
    if number == 16 {
        return on_device(vec![removed([trunk(16 * LEVELS - 1)])]);
    }
    let levels = number * LEVELS..(number + 1) * LEVELS;
    let mut events = Vec::new();
    let pairs = levels.clone().flat_map(|level| {
        let parent = level.checked_sub(1).map_or(0, trunk);
        [
            lineage(level, parent, side(level)),
            lineage(level, parent, trunk(level)),
        ]
    });
    events.push(by_lineage(pairs.collect()));
    let gone = levels
        .clone()
        .map(|level| lineage(level, level.checked_sub(1).map_or(0, trunk), side(level)));
    events.push(Event::Removed(RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: gone.collect(),
    }));
    let above = levels.filter_map(|level| {
        let level = level.checked_sub(1)?;
        Some(lineage(
            level,
            level.checked_sub(1).map_or(0, trunk),
            trunk(level),
        ))
    });
    events.push(Event::Removed(RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: above.collect(),
    }));
    on_device(events)
}

/// Returns attacks whose blocks have names that are costly for the index.
fn names() -> Vec<Attack> {
    vec![
        attack("own names", 8, |number| {
            let blocks = number * EVENT..(number + 1) * EVENT;
            let parent = number.checked_sub(1).map(|_| short(number * EVENT - 1));
            on_device(vec![named(
                parent,
                hashes(blocks.clone().map(|block| block % 100)),
                blocks.map(short).collect(),
            )])
        }),
        attack("one name for all blocks", 8, |number| {
            on_device(vec![
                stored(None, (0..EVENT).map(|_| number)),
                stored(None, (0..EVENT).map(|_| 99)),
            ])
        }),
        attack("sixteen names a block", 17, |number| {
            let names = number * EVENT..(number + 1) * EVENT;
            on_device(vec![named(
                None,
                hashes((0..EVENT).map(|block| block % 100)),
                names.map(short).collect(),
            )])
        }),
        attack("two names a block, which change places", 8, |number| {
            let name = |block: u64| short(block ^ (number % 2));
            let blocks = || hashes((0..EVENT).map(|block| block % 100));
            on_device(vec![
                named(None, blocks(), (0..EVENT).map(name).collect()),
                named(
                    None,
                    blocks(),
                    (0..EVENT).map(|block| short(EVENT + block)).collect(),
                ),
            ])
        }),
        attack("eight tiers, another one for each block", 16, |number| {
            let tier = Tier::new(u8::try_from(number % 8).unwrap()).unwrap();
            let all = stored(None, (0..20_000).map(mix));
            let some = removed((0..20_000).filter(|block| (block + number) % 3 == 0).map(mix));
            (tier, vec![all, some])
        }),
    ]
}

/// Returns attacks whose blocks arrive without or before their parents.
fn absent_parents() -> Vec<Attack> {
    vec![
        attack("blocks without a parent", 8, |number| {
            let blocks = number * EVENT..(number + 1) * EVENT;
            let chain = sequence(Some(1), Some(1 + number * EVENT), hashes(blocks.map(short)));
            on_device(vec![Event::Stored(chain)])
        }),
        attack("the same, in 3 bytes each", 1, |_| {
            let chain = sequence(Some(1), Some(1), hashes((0..EVENT - 256).map(short)));
            on_device(vec![Event::Stored(chain)])
        }),
        attack("the same, with names in 3 bytes", 1, |_| {
            let blocks = 0..EVENT - 256;
            let mut chain = sequence(Some(1), Some(1), hashes(blocks.clone().map(|_| 0)));
            chain.engine_hashes = Some(blocks.map(short).collect());
            on_device(vec![Event::Stored(chain)])
        }),
        attack("the same, by lineage hash", 8, |number| {
            let blocks = number * (EVENT - 100)..(number + 1) * (EVENT - 100);
            let keys = blocks.map(|block| lineage(2, mix(block), mix(1 << 40 | block)));
            on_device(vec![by_lineage(keys.collect())])
        }),
        attack("children before their first parent", 9, |number| {
            if number == 8 {
                return on_device(vec![stored(None, [short(0)])]);
            }
            let from = 1 + number * EVENT;
            // The messages are sent in reverse order, so that children come before their parents.
            let from = 1 + (7 * EVENT) - (from - 1);
            let chain = sequence(
                Some(short(from - 1)),
                Some(from),
                hashes((from..from + EVENT).map(short)),
            );
            on_device(vec![Event::Stored(chain)])
        }),
        attack("children of one parent before it", 9, |number| {
            if number == 8 {
                return on_device(vec![by_lineage(vec![lineage(0, 0, 1)])]);
            }
            let blocks = number * (EVENT - 100)..(number + 1) * (EVENT - 100);
            on_device(vec![by_lineage(
                blocks.map(|block| lineage(1, 1, mix(block))).collect(),
            )])
        }),
        attack("64 events that wait for each other", 16, waiting),
        attack("removals while events wait", 8, |number| {
            let wait = stored(Some(1 << 40), [1 << 41]);
            let gone = number * EVENT..(number + 1) * EVENT;
            on_device(vec![wait, removed(gone.map(short))])
        }),
        Attack {
            hashing: Hashing::Recompute,
            ..attack("tokens that wait", 64, |number| {
                let blocks = 60_000 / 64;
                let mut stored = sequence(Some(1 << 40 | number), None, hashes((0..blocks).map(short)));
                stored.content = Some(BlockContent::Tokens {
                    tokens: (0..blocks * 16)
                        .map(|token| u32::try_from(token % 100).unwrap())
                        .collect(),
                    lora_name: None,
                    cache_salt: None,
                });
                on_device(vec![Event::Stored(stored)])
            })
        },
    ]
}

/// Makes a message of events in reverse order: each event needs a block that only the next event stores, and so has to
/// wait. The last event can be applied at once, and lets all others go on.
fn waiting(number: u64) -> (Tier, Vec<Event>) {
    let block = |event: u64, block: u64| 1 + (number * 64 + event) * 1024 + block;
    let mut events: Vec<Event> = (1..64)
        .rev()
        .map(|event| {
            stored(
                Some(block(event - 1, 1023)),
                (0..1024).map(|own| block(event, own)),
            )
        })
        .collect();
    events.push(stored(None, (0..1024).map(|own| block(0, own))));
    on_device(events)
}

/// Returns attacks that remove or clear blocks.
fn removals() -> Vec<Attack> {
    vec![
        attack("each second block removed", 16, |number| {
            if number % 2 == 0 {
                return on_device(vec![stored(
                    None,
                    (0..EVENT).map(|block| short(number / 2 * EVENT + block)),
                )]);
            }
            let blocks = (0..EVENT).step_by(2);
            on_device(vec![removed(
                blocks.map(|block| short(number / 2 * EVENT + block)),
            )])
        }),
        attack("the first block goes and comes back", 8, |number| {
            if number == 0 {
                return on_device(vec![stored(None, (0..EVENT).map(mix))]);
            }
            let pair = |_| [removed([mix(0)]), stored(None, [mix(0)])];
            on_device((0..BATCH / 2).flat_map(pair).collect())
        }),
        attack("a million first blocks, removed at random", 32, |number| {
            let blocks = 60_000;
            if number < 16 {
                let keys = (number * blocks..(number + 1) * blocks).map(|block| lineage(0, 0, mix(block)));
                return on_device(vec![by_lineage(keys.collect())]);
            }
            let any = |block: u64| lineage(0, 0, mix(block * 7919 % (16 * blocks)));
            let lineage_hashes = ((number - 16) * blocks..(number - 15) * blocks)
                .map(any)
                .collect();
            let removed = RemovedBlocks {
                hashes: Vec::new(),
                lineage_hashes,
            };
            on_device(vec![Event::Removed(removed)])
        }),
        attack("a million first blocks, cleared", 17, |number| {
            if number == 16 {
                return on_device(vec![Event::Cleared]);
            }
            let keys = (number * 65_000..(number + 1) * 65_000).map(|block| lineage(0, 0, mix(block)));
            on_device(vec![by_lineage(keys.collect())])
        }),
        attack("half a million blocks without a parent, cleared", 9, |number| {
            if number == 8 {
                return on_device(vec![Event::Cleared]);
            }
            let blocks = number * EVENT..(number + 1) * EVENT;
            let chain = sequence(Some(1), Some(1 + number * EVENT), hashes(blocks.map(short)));
            on_device(vec![Event::Stored(chain)])
        }),
        attack("two million blocks, then the first lineage hash", 33, |number| {
            if number == 32 {
                let removed = RemovedBlocks {
                    hashes: Vec::new(),
                    lineage_hashes: vec![lineage(0, 0, 5)],
                };
                return on_device(vec![Event::Removed(removed)]);
            }
            let blocks = number * EVENT..(number + 1) * EVENT;
            let names = blocks.clone().map(short).collect();
            let parent = number.checked_sub(1).map(|_| short(number * EVENT - 1));
            on_device(vec![named(
                parent,
                hashes(blocks.map(|block| short(block ^ 1))),
                names,
            )])
        }),
        attack("removal of what is not there", 8, |number| {
            on_device(vec![removed(
                (0..EVENT).map(|block| short(number * EVENT + block)),
            )])
        }),
    ]
}

/// Returns attacks on an index with limits of 200,000 blocks and 64 MiB.
fn bounds() -> Vec<Attack> {
    vec![
        bounded(
            &attack("", 16, |number| {
                on_device(vec![stored(
                    None,
                    (0..EVENT).map(|block| mix(number << 32 | block)),
                )])
            }),
            "bounded: chains of 65,536",
        ),
        bounded(
            &attack("", 16, |number| {
                let blocks = number * (EVENT - 100)..(number + 1) * (EVENT - 100);
                on_device(vec![by_lineage(
                    blocks.map(|block| lineage(0, 0, mix(block))).collect(),
                )])
            }),
            "bounded: first blocks alone",
        ),
        bounded(
            &attack("", 16, |number| {
                let blocks = number * EVENT..(number + 1) * EVENT;
                let chain = sequence(Some(1), Some(1 + number * EVENT), hashes(blocks.map(short)));
                on_device(vec![Event::Stored(chain)])
            }),
            "bounded: blocks without a parent",
        ),
        bounded(
            &attack("", 17, |number| {
                if number == 16 {
                    return on_device(vec![stored(None, [5])]);
                }
                let blocks = number * (EVENT - 100)..(number + 1) * (EVENT - 100);
                on_device(vec![by_lineage(
                    blocks.map(|block| lineage(0, 0, mix(block))).collect(),
                )])
            }),
            "bounded: blocks without a name, then a name",
        ),
        bounded(
            &attack("", 16, |number| {
                let blocks = (0..EVENT).map(|block| short(number * EVENT + block));
                let lost = (0..5).map(|_| stored(Some(1 << 50), blocks.clone().take(28_000)));
                let first = stored(None, blocks.clone());
                on_device(std::iter::once(first).chain(lost).collect())
            }),
            "bounded: what follows forgotten blocks",
        ),
    ]
}
