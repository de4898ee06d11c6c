//! Tests of a translator, with a brute-force model of an engine that has several groups of layers. After every step,
//! both must give the same prefix that a request could reuse.

use std::collections::{BTreeMap, BTreeSet};

use kvatlas_core::hash::SequenceHash;
use kvatlas_engines::{Format, GroupKind, Translation, Translator};
use proptest::prelude::*;

use crate::common::{Change, Engine, Naive, Store, contract_chain, decode, restarted, settings, translator};

/// Tokens in a block of main attention.
const SIZE: u32 = 8;
/// Blocks of main attention in the longest prompt.
const DEPTH: u32 = 8;

/// A group of layers.
#[derive(Debug, Clone, Copy)]
struct Group {
    kind: GroupKind,
    /// Tokens in a block.
    block: u32,
    /// Number of the first step in which the group has events.
    since: usize,
}

impl Group {
    fn word(self) -> &'static str {
        match self.kind {
            GroupKind::Window(_) => "sliding_window",
            GroupKind::State => "mamba",
            _ => "full_attention",
        }
    }

    /// Number of the group's last blocks that a request needs; `None` if it needs all blocks.
    fn need(self) -> Option<u32> {
        match self.kind {
            GroupKind::Window(tokens) => Some((tokens - 1).div_ceil(self.block)),
            GroupKind::State => Some(1),
            _ => None,
        }
    }
}

/// The rule by which a group keeps some of the blocks that a request has computed.
#[derive(Debug, Clone, Copy)]
enum Kept {
    All,
    /// Only the blocks that a request needs to continue after certain strides of the prompt. A stride is as long as a
    /// block of the group with the largest blocks. Bit n selects all strides whose number modulo 8 is n.
    Tails(u8),
}

/// One thing that happens in a step.
#[derive(Debug, Clone)]
enum Operation {
    /// A request computes `strides` strides of a prompt, from stride `from` on. A stride is as long as the largest group's block.
    Serve {
        prompt: Prompt,
        from: u32,
        strides: u32,
        kept: Kept,
    },
    /// A request computes the tokens `from..to` of a prompt, which may end within a block. All blocks that are then whole are
    /// kept.
    Compute {
        prompt: Prompt,
        from: u32,
        to: u32,
    },
    /// A group loses a copy of a block of a prompt, if it has one.
    Lose {
        prompt: Prompt,
        group: usize,
        block: u32,
    },
    /// Blocks of main attention are copied to the host, or removed there.
    Offload {
        prompt: Prompt,
        blocks: u32,
    },
    Onload {
        prompt: Prompt,
        block: u32,
    },
    Clear,
}

/// A prompt, with one bit for each of its [`PARTS`]. The bit chooses between two contents of the part. So prompts
/// share prefixes.
type Prompt = u8;

/// The beginnings of the parts of a prompt. Some parts begin within a block, so that different blocks share their first
/// tokens.
const PARTS: [u32; 8] = [0, 5, 16, 21, 30, 40, 47, 56];

fn tokens(prompt: Prompt) -> Vec<u32> {
    let part = |token: &u32| PARTS.iter().filter(|start| *start <= token).count() - 1;
    let value = |token: u32| u32::from(prompt >> part(&token) & 1) * 100 + token % SIZE;
    (0..DEPTH * SIZE).map(value).collect()
}

/// The engine's name for the first `end` tokens of a prompt: an arbitrary function of these tokens.
fn name(prompt: Prompt, end: u32) -> u64 {
    let step = |name: u64, token: &u32| {
        (name ^ u64::from(*token))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(23)
    };
    tokens(prompt)[..end as usize].iter().fold(17, step)
}

/// Brute-force model of the engine's caches.
#[derive(Debug)]
struct Cache {
    groups: Vec<Group>,
    /// Numbers of the groups of layers that an event has named.
    known: BTreeSet<usize>,
    /// Whether blocks were stored before the first event of a group with small blocks (blocks smaller than those of
    /// main attention). It is then unknown which small blocks make up the earlier blocks.
    is_late: bool,
    /// The copies of each block of each group, by its name.
    copies: BTreeMap<(usize, u64), u32>,
    host: BTreeSet<u64>,
}

impl Cache {
    fn stride(&self) -> u32 {
        let blocks = self.groups.iter().map(|group| group.block);
        blocks.fold(SIZE, u32::max)
    }

    fn has(&self, group: usize, name: u64) -> bool {
        self.copies.contains_key(&(group, name))
    }

    fn mains(&self) -> impl Iterator<Item = usize> {
        self.known
            .iter()
            .copied()
            .filter(|group| self.groups[*group].need().is_none())
    }

    /// Number of leading blocks of a prompt that all groups of main attention hold.
    fn matched(&self, prompt: Prompt) -> u32 {
        let has = |block: &u32| {
            self.mains()
                .all(|group| self.has(group, name(prompt, block * SIZE)))
        };
        if self.mains().next().is_none() {
            0
        } else {
            u32::try_from((1..=DEPTH).take_while(has).count()).unwrap()
        }
    }

    /// Number of leading blocks of a prompt that a request would reuse.
    fn usable(&self, prompt: Prompt) -> u32 {
        let stride = self
            .known
            .iter()
            .map(|group| self.groups[*group].block)
            .fold(SIZE, u32::max);
        let can_resume = |block: &u32| {
            let end = block * SIZE;
            let has_all = |group: &usize| {
                let Group { block, .. } = self.groups[*group];
                let need = self.groups[*group].need().unwrap_or_default();
                (0..need.min(end / block)).all(|before| self.has(*group, name(prompt, end - before * block)))
            };
            end.is_multiple_of(stride) && self.known.iter().all(has_all)
        };
        (1..=self.matched(prompt))
            .rev()
            .find(can_resume)
            .unwrap_or_default()
    }

    /// Applies an operation of step number `step`, and returns the engine's events about it.
    fn apply(&mut self, operation: &Operation, step: usize) -> Vec<Change> {
        match *operation {
            Operation::Serve {
                prompt,
                from,
                strides,
                kept,
            } => {
                let (stride, last) = (self.stride(), DEPTH * SIZE / self.stride());
                let (from, to) = (from % last, (from % last + strides).min(last));
                self.compute(prompt, from * stride, to * stride, kept, step)
            }
            Operation::Compute { prompt, from, to } => self.compute(prompt, from, to, Kept::All, step),
            Operation::Lose { prompt, group, block } => self.lose(prompt, group % self.groups.len(), block),
            Operation::Offload { prompt, blocks } => self.offload(prompt, blocks),
            Operation::Onload { prompt, block } => {
                let name = name(prompt, block * SIZE);
                let medium = Some("CPU");
                let remove = |_| Change::Remove {
                    names: vec![name],
                    medium,
                    group: None,
                };
                self.host.take(&name).map(remove).into_iter().collect()
            }
            Operation::Clear => {
                self.copies.clear();
                self.host.clear();
                vec![Change::Clear]
            }
        }
    }

    /// Whether the group has the parent of the first block that a request from token `from` on computes. Such a
    /// request already holds the parent.
    fn has_parent(&self, group: usize, prompt: Prompt, from: u32) -> bool {
        let Group { block, .. } = self.groups[group];
        let parent = from / block * block;
        let name = name(prompt, parent);
        let has_end = parent.is_multiple_of(SIZE) && self.mains().any(|group| self.has(group, name));
        parent == 0 || has_end || self.has(group, name)
    }

    fn compute(&mut self, prompt: Prompt, from: u32, to: u32, kept: Kept, step: usize) -> Vec<Change> {
        let (stride, last) = (self.stride(), DEPTH * SIZE / self.stride());
        let there: Vec<usize> = (0..self.groups.len())
            .filter(|group| self.groups[*group].since <= step)
            .collect();
        let can_follow = there.iter().all(|group| self.has_parent(*group, prompt, from));
        let from = if can_follow { from } else { 0 };
        let mut changes = Vec::new();
        for group in there {
            let Group { kind, block, .. } = self.groups[group];
            let need = self.groups[group].need();
            let is_kept = |end: &u32| match (need, kept) {
                (None, _) | (_, Kept::All) => true,
                (Some(need), Kept::Tails(tails)) => (1..=last).any(|boundary| {
                    let boundary_end = boundary * stride;
                    tails >> (boundary % 8) & 1 == 1
                        && *end <= boundary_end
                        && *end + need * block > boundary_end
                }),
            };
            let (from, to) = (from / block * block, to / block * block);
            if from >= to {
                continue;
            }
            self.known.insert(group);
            let ends = (from / block + 1..=to / block).map(|end| end * block);
            let names: Vec<u64> = ends.filter(is_kept).map(|end| name(prompt, end)).collect();
            for name in &names {
                *self.copies.entry((group, *name)).or_default() += 1;
            }
            let parent = (from > 0).then(|| name(prompt, from));
            let mut store = Store::new(&names, parent, &tokens(prompt)[from as usize..to as usize], block);
            store.group = Some((u32::try_from(group).unwrap(), Some(self.groups[group].word())));
            if let GroupKind::Window(tokens) = kind {
                store.window = Some(tokens);
            }
            changes.push(Change::Store(store));
        }
        changes
    }

    /// Applies all operations of step number `step`, one after the other, and returns the engine's events about them.
    fn apply_all(&mut self, operations: &[Operation], step: usize) -> Vec<Change> {
        let had_blocks = !self.copies.is_empty() || !self.host.is_empty();
        let known = self.known.clone();
        let changes = operations
            .iter()
            .flat_map(|operation| self.apply(operation, step))
            .collect();
        let has_new = self
            .known
            .difference(&known)
            .any(|group| self.groups[*group].block < SIZE);
        let has_cleared = operations
            .iter()
            .any(|operation| matches!(operation, Operation::Clear));
        self.is_late = !has_cleared && (self.is_late || has_new && had_blocks);
        changes
    }

    fn lose(&mut self, prompt: Prompt, group: usize, block: u32) -> Vec<Change> {
        let size = self.groups[group].block;
        let name = name(prompt, (block * size).min(DEPTH * SIZE / size * size));
        let Some(copies) = self.copies.get_mut(&(group, name)) else {
            return Vec::new();
        };
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(&(group, name));
        }
        vec![Change::Remove {
            names: vec![name],
            medium: Some("GPU"),
            group: Some(u32::try_from(group).unwrap()),
        }]
    }

    fn offload(&mut self, prompt: Prompt, blocks: u32) -> Vec<Change> {
        let names: Vec<u64> = (1..=blocks).map(|block| name(prompt, block * SIZE)).collect();
        if names.iter().any(|name| self.host.contains(name)) {
            return Vec::new();
        }
        self.host.extend(&names);
        let mut store = Store::new(&names, None, &tokens(prompt)[..(blocks * SIZE) as usize], SIZE);
        store.medium = Some("CPU");
        vec![Change::Store(store)]
    }
}

fn groups() -> impl Strategy<Value = Vec<Group>> {
    let main = (0_usize..3).prop_map(|since| Group {
        kind: GroupKind::Main,
        block: SIZE,
        since: since.saturating_sub(1),
    });
    let window = (1_u32..40).prop_map(GroupKind::Window);
    let block = prop::sample::select(vec![1, 2, 4, SIZE, SIZE, SIZE, 2 * SIZE]);
    let beside = (
        prop_oneof![3 => window, 1 => Just(GroupKind::State)],
        block,
        0_usize..5,
    );
    let beside = beside.prop_map(|(kind, block, since)| Group {
        kind,
        block,
        since: since.saturating_sub(2),
    });
    (
        prop::collection::vec(beside, 0..4),
        prop::collection::vec(main, 0..2),
        0_usize..5,
    )
        .prop_map(|(mut groups, others, place)| {
            let first = Group {
                kind: GroupKind::Main,
                block: SIZE,
                since: 0,
            };
            groups.insert(place.min(groups.len()), first);
            groups.extend(others);
            groups
        })
}

fn operations() -> impl Strategy<Value = Operation> {
    let kept = prop_oneof![1 => Just(Kept::All), 4 => any::<u8>().prop_map(Kept::Tails)];
    let usual = prop::sample::select(vec![0_u8, 1, 2, 3, 16, 64, 128, 192, 255]);
    let prompt = || prop_oneof![5 => usual.clone(), 1 => any::<u8>()];
    let compute = (prompt(), 0..DEPTH * SIZE, 1..=DEPTH * SIZE);
    let serve = (prompt(), 0_u32..3, 1..=DEPTH, kept);
    prop_oneof![
        6 => serve.prop_map(|(prompt, from, strides, kept)| Operation::Serve { prompt, from, strides, kept }),
        2 => compute.prop_map(|(prompt, from, to)| Operation::Compute { prompt, from, to }),
        9 => (prompt(), 0_usize..6, 1..=8 * DEPTH).prop_map(|(prompt, group, block)| Operation::Lose { prompt, group, block }),
        1 => (prompt(), 1..=DEPTH).prop_map(|(prompt, blocks)| Operation::Offload { prompt, blocks }),
        1 => (prompt(), 1..=DEPTH).prop_map(|(prompt, block)| Operation::Onload { prompt, block }),
        1 => Just(Operation::Clear),
    ]
}

/// The answer of a daemon for a prompt with the sequence hashes `chain`: how many leading blocks the device has, and
/// how many of these a request reuses.
fn answer(naive: &Naive, chain: &[SequenceHash]) -> (u32, u32) {
    let held = naive.blocks(0);
    let matched = chain.iter().take_while(|hash| held.contains(hash)).count();
    let resumable = chain[..matched]
        .iter()
        .rposition(|hash| !naive.barred.contains(&(0, *hash)));
    let small = |blocks: usize| u32::try_from(blocks).unwrap();
    (small(matched), resumable.map_or(0, |place| small(place) + 1))
}

/// Checks a translator's answers against the cache, for all prompts. If it is unknown to the translator how much a
/// request can reuse, the answer may be too low, but never too high.
fn agrees(translator: &Translator, naive: &Naive, cache: &Cache) -> Result<(), TestCaseError> {
    for prompt in 0..=u8::MAX {
        let chain = contract_chain(&tokens(prompt), SIZE, None, None);
        let (matched, usable) = answer(naive, &chain);
        prop_assert_eq!(matched, cache.matched(prompt), "prompt {:08b}", prompt);
        prop_assert!(
            usable <= cache.usable(prompt),
            "prompt {:08b}: {}",
            prompt,
            usable
        );
        if !translator.hides_groups() {
            prop_assert_eq!(usable, cache.usable(prompt), "prompt {:08b}", prompt);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn what_a_request_reuses_is_what_all_groups_have(
        groups in groups(),
        steps in prop::collection::vec(prop::collection::vec(operations(), 1..6), 1..14),
        restarts in any::<u16>(),
    ) {
        let has_windows = groups.iter().any(|group| group.need().is_some());
        let mut cache = Cache { groups, known: BTreeSet::new(), is_late: false, copies: BTreeMap::new(), host: BTreeSet::new() };
        let (mut translator, mut naive, mut output) = (translator(SIZE), Naive::default(), Translation::default());
        for (step, operations) in steps.iter().enumerate() {
            if restarts >> step & 1 == 1 {
                translator = restarted(&translator, settings(SIZE));
            }
            let changes = cache.apply_all(operations, step);
            output.clear();
            translator.translate(&decode(Format::Vllm, &Engine::PLAIN.payload(&changes)), &mut output);
            naive.apply(&output);
            prop_assert_eq!(translator.doubt(), None);
            // If the blocks of a state are smaller than those of main attention, cache hits end within blocks of main
            // attention.
            let is_inner = |group: &usize| cache.groups[*group].kind == GroupKind::State && cache.groups[*group].block < SIZE;
            let is_inner = cache.known.iter().any(is_inner);
            let is_told = !is_inner && !cache.is_late && (cache.known.is_empty() || cache.mains().next().is_some());
            prop_assert!(!is_told || !translator.hides_groups(), "{:?}", output.reasons);
            agrees(&translator, &naive, &cache)?;
            let on_host = naive.blocks(1);
            let is_barred = |hash: &SequenceHash| naive.barred.contains(&(1, *hash));
            let has_learned = has_windows && cache.known.iter().any(|group| cache.groups[*group].need().is_some());
            prop_assert!(on_host.iter().all(|hash| is_barred(hash) == has_learned));
        }
        let mut full = Translation::default();
        translator.full_state(&mut full);
        let mut restored = Naive::default();
        restored.apply(&full);
        prop_assert_eq!(restored, naive);
    }
}
