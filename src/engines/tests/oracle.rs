//! Tests of a translator, with a brute-force model of an engine's cache.

use std::collections::{BTreeMap, BTreeSet};

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{BlockNames, Event};
use kvatlas_engines::{Format, Reason, Translation};
use proptest::prelude::*;

use crate::common::{
    Change, Engine, Naive, Names, Shape, Store, contract_chain, decode, restarted, settings, translator,
};

const SIZE: u32 = 2;
const DEPTH: usize = 6;
const MEDIA: [&str; 3] = ["GPU", "CPU", "DISK"];

/// One thing that happens to the cache.
#[derive(Debug, Clone)]
enum Operation {
    /// Stores some consecutive blocks of a prompt in a tier: `blocks` blocks, the first of which is block number
    /// `from`.
    Store {
        prompt: Prompt,
        from: usize,
        blocks: usize,
        tier: usize,
    },
    /// Blocks of a prompt are removed from a tier, whether or not they are there.
    Remove {
        prompt: Prompt,
        from: usize,
        blocks: usize,
        tier: usize,
    },
    Clear,
}

/// A prompt: a number for the content of each block, a salt and an adapter. There are few values of each, so that prompts share
/// prefixes.
#[derive(Debug, Clone)]
struct Prompt {
    blocks: [u8; DEPTH],
    salt: Option<&'static str>,
    lora: Option<&'static str>,
}

impl Prompt {
    fn tokens(&self) -> Vec<u32> {
        self.blocks
            .iter()
            .flat_map(|block| [u32::from(*block), 7])
            .collect()
    }

    /// The engine's names for the blocks. A name is a function of the prefix, the salt and the adapter.
    fn names(&self) -> Vec<u64> {
        let mut name = 17_u64;
        for text in [self.salt, self.lora].into_iter().flatten() {
            let add = |name: u64, byte: u8| name.wrapping_mul(1_000_003) ^ u64::from(byte);
            name = text.bytes().fold(name.rotate_left(9), add);
        }
        let step = |name: &mut u64, block: &u8| {
            *name = (*name ^ u64::from(*block) ^ 0x55)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23);
            Some(*name)
        };
        self.blocks.iter().scan(name, step).collect()
    }

    fn chain(&self) -> Vec<SequenceHash> {
        contract_chain(&self.tokens(), SIZE, self.lora, self.salt)
    }
}

fn prompts() -> impl Strategy<Value = Prompt> {
    let salt = prop::sample::select(vec![None, Some("tenant-a"), Some("tenant-b")]);
    let lora = prop::sample::select(vec![None, None, Some("adapter")]);
    (prop::array::uniform6(0_u8..2), salt, lora).prop_map(|(blocks, salt, lora)| Prompt {
        blocks,
        salt,
        lora,
    })
}

fn operations() -> impl Strategy<Value = Operation> {
    let part = || (prompts(), 0..DEPTH, 1..DEPTH, 0..MEDIA.len());
    let store = |(prompt, from, blocks, tier): (Prompt, usize, usize, usize)| Operation::Store {
        prompt,
        from,
        blocks: blocks.min(DEPTH - from),
        tier,
    };
    prop_oneof![
        // Most stores begin at the root, as otherwise few of them would have a parent.
        5 => part().prop_map(move |(prompt, _, blocks, tier)| store((prompt, 0, blocks, tier))),
        5 => part().prop_map(store),
        6 => part().prop_map(|(prompt, from, blocks, tier)| Operation::Remove {
            prompt,
            from,
            blocks: blocks.min(DEPTH - from),
            tier,
        }),
        1 => Just(Operation::Clear),
    ]
}

fn engines() -> impl Strategy<Value = Engine> {
    let shape = prop::sample::select(vec![
        Shape::Map,
        Shape::Array(9),
        Shape::Array(12),
        Shape::Array(14),
    ]);
    let names = prop::sample::select(vec![Names::Unsigned, Names::Signed, Names::Bytes]);
    (shape, names).prop_map(|(shape, names)| Engine { shape, names })
}

/// A store of blocks `from..to` of a prompt in a tier.
#[derive(Debug, Clone)]
struct Blocks {
    prompt: Prompt,
    from: usize,
    to: usize,
    tier: usize,
}

/// Brute-force model of the cache: the number of copies of each block in each tier.
#[derive(Debug, Default)]
struct Cache {
    copies: BTreeMap<(usize, u64), (u32, SequenceHash)>,
    unknown_parents: u64,
    not_held: u64,
    /// Names of blocks that were removed after the first event about a tier beyond the device. Later events about
    /// such tiers may still use these names.
    past: BTreeSet<u64>,
    is_beyond: bool,
    /// Blocks of tiers beyond the device that were stored before their parents were known. They wait for the end of
    /// the batch.
    late: Vec<Blocks>,
    late_removed: Vec<(usize, u64)>,
}

impl Cache {
    fn has(&self, name: u64) -> bool {
        (0..MEDIA.len()).any(|tier| self.copies.contains_key(&(tier, name)))
    }

    fn knows(&self, name: u64) -> bool {
        self.has(name) || self.past.contains(&name)
    }

    /// Whether events so far tell where in their sequence the blocks stand.
    fn is_placed(&self, blocks: &Blocks) -> bool {
        let names = blocks.prompt.names();
        let Some(parent) = blocks.from.checked_sub(1).map(|parent| names[parent]) else {
            return true;
        };
        match blocks.tier {
            0 => self.has(parent),
            // The name of the first block tells its place, too.
            _ => self.knows(parent) || self.knows(names[blocks.from]),
        }
    }

    fn add(&mut self, blocks: &Blocks) {
        let (names, chain) = (blocks.prompt.names(), blocks.prompt.chain());
        for place in blocks.from..blocks.to {
            let new = (0, chain[place]);
            self.copies.entry((blocks.tier, names[place])).or_insert(new).0 += 1;
        }
    }

    /// Removes one copy of the block `name` from a tier. Returns whether there was one.
    fn take(&mut self, tier: usize, name: u64) -> bool {
        match self.copies.get_mut(&(tier, name)) {
            None => return false,
            Some((1, _)) => {
                self.copies.remove(&(tier, name));
            }
            Some((copies, _)) => *copies -= 1,
        }
        if self.is_beyond && !self.has(name) {
            self.past.insert(name);
        }
        true
    }

    /// Ends a batch. Adds those waiting blocks whose place is known by now, and drops the other waiting blocks. Then
    /// applies the waiting removals.
    fn settle(&mut self) {
        loop {
            let late = std::mem::take(&mut self.late);
            let before = late.len();
            for blocks in late {
                match self.is_placed(&blocks) {
                    true => self.add(&blocks),
                    false => self.late.push(blocks),
                }
            }
            if self.late.len() == before {
                break;
            }
        }
        self.unknown_parents += self.late.len() as u64;
        self.late.clear();
        for (tier, name) in std::mem::take(&mut self.late_removed) {
            self.take(tier, name);
        }
    }

    /// Applies the operation, and returns the engine's event about it.
    fn apply(&mut self, operation: &Operation) -> Change {
        match operation {
            Operation::Store {
                prompt,
                from,
                blocks,
                tier,
            } => self.store(prompt, *from, *blocks, *tier),
            Operation::Remove {
                prompt,
                from,
                blocks,
                tier,
            } => {
                let names = prompt.names()[*from..from + blocks].to_vec();
                for name in &names {
                    if !self.take(*tier, *name) {
                        self.not_held += 1;
                        let has = |late: &Blocks| late.prompt.names()[late.from..late.to].contains(name);
                        if self.late.iter().any(has) {
                            self.late_removed.push((*tier, *name));
                        }
                    }
                }
                Change::Remove {
                    names,
                    medium: Some(MEDIA[*tier]),
                    group: None,
                }
            }
            Operation::Clear => {
                self.copies.clear();
                self.past.clear();
                self.late.clear();
                self.late_removed.clear();
                Change::Clear
            }
        }
    }

    fn store(&mut self, prompt: &Prompt, from: usize, blocks: usize, tier: usize) -> Change {
        let names = prompt.names();
        let parent = from.checked_sub(1).map(|parent| names[parent]);
        let size = SIZE as usize;
        let tokens = &prompt.tokens()[from * size..(from + blocks) * size];
        let mut store = Store::new(&names[from..from + blocks], parent, tokens, SIZE);
        store.medium = Some(MEDIA[tier]);
        store.lora_name = prompt.lora.map(str::to_owned);
        if from == 0 {
            store.salt_key = prompt.salt.map(str::to_owned);
        }
        let told = Blocks {
            prompt: prompt.clone(),
            from,
            to: from + blocks,
            tier,
        };
        self.is_beyond |= tier > 0;
        match (self.is_placed(&told), tier) {
            (true, _) => self.add(&told),
            // The place of such blocks cannot be known. An engine sends no such event, but one arrives if an earlier
            // batch was lost.
            (false, 0) => self.unknown_parents += 1,
            (false, _) => self.late.push(told),
        }
        Change::Store(store)
    }

    fn held(&self, tier: usize) -> BTreeSet<SequenceHash> {
        let of_tier = self.copies.iter().filter(|((at, _), _)| *at == tier);
        of_tier.map(|(_, (_, hash))| *hash).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn events_add_up_to_the_cache(
        engine in engines(),
        batches in prop::collection::vec(prop::collection::vec(operations(), 1..8), 1..12),
        restarts in any::<u16>(),
    ) {
        let mut cache = Cache::default();
        let mut translator = translator(SIZE);
        let mut naive = Naive::default();
        let mut output = Translation::default();
        let (mut unknown_parents, mut not_held) = (0, 0);
        for (number, batch) in batches.iter().enumerate() {
            if restarts >> number & 1 == 1 {
                translator = restarted(&translator, settings(SIZE));
            }
            let changes: Vec<Change> = batch.iter().map(|operation| cache.apply(operation)).collect();
            cache.settle();
            let decoded = decode(Format::Vllm, &engine.payload(&changes));
            output.clear();
            translator.translate(&decoded, &mut output);
            naive.apply(&output);
            unknown_parents += output.reasons.of(Reason::UnknownParent);
            not_held += output.reasons.of(Reason::NotHeld);
            for tier in 0..MEDIA.len() {
                prop_assert_eq!(naive.blocks(u8::try_from(tier).unwrap()), cache.held(tier));
            }
        }
        prop_assert_eq!((unknown_parents, not_held), (cache.unknown_parents, cache.not_held));
        let mut full = Translation::default();
        translator.full_state(&mut full);
        let mut restored = Naive::default();
        restored.apply(&full);
        prop_assert_eq!(&restored, &naive);
        prop_assert!(parents_come_first(&full, &naive));
    }
}

/// Whether every block comes after its parent in the full state. Blocks whose parent is not in the same tier don't
/// matter.
fn parents_come_first(full: &Translation, held: &Naive) -> bool {
    let mut seen = BTreeSet::new();
    full.parts.iter().all(|part| {
        let tier = part.tier.as_u8();
        part.events.iter().all(|event| {
            let Event::Stored(stored) = event else {
                return false;
            };
            let BlockNames::Sequence { parent, hashes, .. } = &stored.names else {
                return false;
            };
            let is_ready = parent
                .is_none_or(|parent| seen.contains(&(tier, parent)) || !held.blocks(tier).contains(&parent));
            seen.extend(hashes.iter().map(|hash| (tier, *hash)));
            is_ready
        })
    })
}
