//! Tests of mirrors, with brute-force models of an engine and of a router that follows vLLM's events.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use kvatlas_core::hash::BlockSize;
use kvatlas_engines::{
    EventList, Format, Mirror, MirrorOmissions, MirrorSettings, Reason, SavedMirror, Translation, Translator,
    TranslatorSettings,
};
use proptest::prelude::*;
use serde::Deserialize;

use crate::common::{Change, Engine, Store, decode, settings};

mod saved;

const SIZE: u32 = 2;
const DEPTH: usize = 5;
/// Bytes of a block with its two tokens.
const BLOCK_BYTES: usize = 44;

/// The tokens of all blocks of a prefix.
type Path = Vec<Vec<u32>>;

/// An event as vLLM's router reads it: an unknown field is an error.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    r#type: String,
    #[serde(default)]
    block_hashes: Vec<u64>,
    #[serde(default)]
    parent_block_hash: Option<u64>,
    #[serde(default)]
    token_ids: Vec<u32>,
    #[serde(default)]
    block_size: Option<u32>,
    #[serde(default)]
    lora_id: Option<u64>,
    #[serde(default)]
    medium: Option<String>,
    #[serde(default)]
    lora_name: Option<String>,
}

/// A model of vLLM's router. It keeps prefixes only by their tokens, and never forgets a name.
#[derive(Debug, Default)]
struct Router {
    names: HashMap<u64, Path>,
    held: BTreeSet<Path>,
    adapters: BTreeSet<String>,
}

impl Router {
    fn apply(&mut self, lists: &[EventList]) {
        for list in lists {
            let payload = list.payload(1.5, 3);
            assert!(payload.len() <= 16 << 20);
            let (_, events, rank): (f64, Vec<Fields>, u32) = rmp_serde::from_slice(&payload).unwrap();
            assert_eq!(rank, 3);
            assert!(!events.is_empty() && events.len() <= 4096);
            events.into_iter().for_each(|event| self.apply_event(event));
        }
    }

    fn apply_event(&mut self, event: Fields) {
        if event.r#type == "AllBlocksCleared" {
            return self.held.clear();
        }
        assert_eq!((event.medium.as_deref(), event.lora_id), (Some("GPU"), None));
        assert!(!event.block_hashes.is_empty() && event.block_hashes.len() <= 2000);
        if event.r#type == "BlockRemoved" {
            for name in &event.block_hashes {
                self.held.remove(&self.names[name]);
            }
            return;
        }
        assert_eq!(event.r#type, "BlockStored");
        assert_eq!(event.block_size, Some(SIZE));
        assert_eq!(event.token_ids.len(), event.block_hashes.len() * SIZE as usize);
        self.adapters.extend(event.lora_name);
        // vLLM's router would take an unknown parent for the root, so the name must be known here.
        let mut path = event
            .parent_block_hash
            .map_or_else(Path::new, |name| self.names[&name].clone());
        for (name, tokens) in event
            .block_hashes
            .iter()
            .zip(event.token_ids.chunks(SIZE as usize))
        {
            path.push(tokens.to_vec());
            self.names.insert(*name, path.clone());
            self.held.insert(path.clone());
        }
    }
}

/// The kinds of prompts whose blocks may have the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Salted,
    Adapter,
    /// A prompt with an image in its block number 2.
    Image,
}

/// One change in an engine. To choose the copy that a `Remove` removes, its number is taken modulo the number of
/// existing copies.
#[derive(Debug, Clone)]
enum Step {
    Store {
        blocks: [u8; DEPTH],
        kind: Kind,
        from: usize,
        to: usize,
        device: bool,
        group: usize,
    },
    Remove(usize),
    Clear,
}

fn steps() -> impl Strategy<Value = Step> {
    let kinds = prop::sample::select(vec![
        Kind::Plain,
        Kind::Plain,
        Kind::Plain,
        Kind::Salted,
        Kind::Adapter,
        Kind::Image,
    ]);
    let places = (0..DEPTH, 1..=DEPTH, prop::bool::weighted(0.8), 0..3_usize);
    let store = (prop::array::uniform5(0_u8..2), kinds, places);
    let store = store.prop_map(|(blocks, kind, (from, to, device, group))| Step::Store {
        blocks,
        kind,
        from,
        to,
        device,
        group,
    });
    prop_oneof![
        20 => store,
        20 => any::<usize>().prop_map(Step::Remove),
        1 => Just(Step::Clear),
    ]
}

/// A copy of a block: its medium, its group of layers, its name.
type Copy = (bool, usize, u64);

/// A model of an engine's cache that counts copies. Like vLLM, it stores a block on the device only while it holds all blocks
/// before it there.
#[derive(Debug, Default)]
struct Cache {
    has_groups: bool,
    copies: BTreeMap<Copy, u32>,
    /// For each plain block (one without salt, adapter and image), by its name, the tokens of the prefix that ends
    /// with the block.
    plain: BTreeMap<u64, Path>,
    main_groups: BTreeSet<usize>,
}

impl Cache {
    /// The number of a group, and its kind: full attention for the groups 0 and 1, a window for the group 2. `None`
    /// if the engine's events name no groups.
    fn group(&self, group: usize) -> Option<(u32, Option<&'static str>)> {
        let kinds = ["full_attention", "full_attention", "sliding_window"];
        let number = u32::try_from(group).unwrap();
        self.has_groups.then(|| (number, Some(kinds[group])))
    }

    fn holds(&self, name: u64) -> bool {
        let has = |group: &usize| self.copies.contains_key(&(true, *group, name));
        !self.main_groups.is_empty() && self.main_groups.iter().all(has)
    }

    /// The change that a step makes; `None` if it changes nothing.
    fn step(&mut self, step: &Step) -> Option<Change> {
        match step {
            Step::Store {
                blocks,
                kind,
                from,
                to,
                device,
                group,
            } => self.store(*blocks, *kind, (*from, *to), *device, *group),
            Step::Remove(number) => {
                let number = number % self.copies.len().max(1);
                let (copy, left) = self.copies.iter_mut().nth(number)?;
                let (device, group, name) = *copy;
                *left -= 1;
                let copy = *copy;
                if *left == 0 {
                    self.copies.remove(&copy);
                }
                Some(Change::Remove {
                    names: vec![name],
                    medium: Some(if device { "GPU" } else { "CPU" }),
                    group: self.group(group).map(|(number, _)| number),
                })
            }
            Step::Clear => {
                self.copies.clear();
                Some(Change::Clear)
            }
        }
    }

    fn store(
        &mut self,
        blocks: [u8; DEPTH],
        kind: Kind,
        (from, to): (usize, usize),
        device: bool,
        group: usize,
    ) -> Option<Change> {
        let group = if self.has_groups && device { group } else { 0 };
        let tokens: Path = blocks.iter().map(|block| vec![u32::from(*block), 7]).collect();
        let first = 1000 * (1 + kind as u64);
        let step = |name: &mut u64, block: &u8| {
            *name = *name * 2 + u64::from(*block);
            Some(*name)
        };
        // In a prompt with an image, the blocks before the image are those of plain prompts.
        let names = blocks.iter().scan(1, step).enumerate().map(|(place, name)| {
            let is_plain = kind == Kind::Plain || kind == Kind::Image && place < 2;
            if is_plain { name } else { name + first }
        });
        let names: Vec<u64> = names.collect();
        let reached = names.iter().take_while(|name| self.holds(**name)).count();
        let from = from.min(reached).min(to);
        if from >= to || device && group == 2 && from + 1 < to {
            return None;
        }
        if group < 2 {
            self.main_groups.insert(group);
        }
        for (place, name) in names.iter().enumerate().take(to).skip(from) {
            *self.copies.entry((device, group, *name)).or_default() += 1;
            if *name < 1000 {
                self.plain.insert(*name, tokens[..=place].to_vec());
            }
        }
        let mut store = Store::new(
            &names[from..to],
            from.checked_sub(1).map(|before| names[before]),
            &tokens[from..to].concat(),
            SIZE,
        );
        store.medium = Some(if device { "GPU" } else { "CPU" });
        store.group = self.group(group);
        store.window = (self.has_groups && group == 2).then_some(SIZE);
        match kind {
            Kind::Plain => {}
            Kind::Salted => store.salt_key = (from == 0).then(|| "tenant".to_owned()),
            Kind::Adapter => store.lora_name = Some("adapter".to_owned()),
            Kind::Image if (from..to).contains(&2) => store.images = vec![(2 - from, "cat".to_owned())],
            Kind::Image => {}
        }
        Some(Change::Store(store))
    }

    /// The plain blocks (without salt, adapter and image) on the device. A router must know exactly these.
    fn expected(&self) -> BTreeSet<Path> {
        let held = self.plain.iter().filter(|(name, _)| self.holds(**name));
        held.map(|(_, path)| path.clone()).collect()
    }
}

/// A translator and its mirror.
struct Sides {
    translator: Translator,
    mirror: Mirror,
    output: Translation,
}

fn translator_settings() -> TranslatorSettings {
    TranslatorSettings {
        proves_ancestors: true,
        ..settings(SIZE)
    }
}

fn mirror_settings(bytes_max: usize, has_special: bool) -> MirrorSettings {
    MirrorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        bytes_max,
        has_special,
        proves_ancestors: true,
    }
}

impl Sides {
    fn new(bytes_max: usize, has_special: bool) -> Self {
        Self {
            mirror: Mirror::new(mirror_settings(bytes_max, has_special)),
            translator: Translator::new(translator_settings()),
            output: Translation::default(),
        }
    }

    /// The translator and the mirror after a restart: both are saved, and restored from their saved forms. The new
    /// mirror has room for `bytes_max` bytes.
    fn kept(&self, bytes_max: usize) -> Self {
        let written = rmp_serde::to_vec(&self.mirror.save()).unwrap();
        let read: SavedMirror = rmp_serde::from_slice(&written).unwrap();
        Self {
            mirror: Mirror::restore(mirror_settings(bytes_max, false), &read).unwrap(),
            translator: Translator::restore(translator_settings(), self.translator.save()).unwrap(),
            output: Translation::default(),
        }
    }

    fn apply(&mut self, changes: &[Change]) {
        self.apply_payload(&Engine::PLAIN.payload(changes));
    }

    fn apply_payload(&mut self, payload: &[u8]) {
        let batch = decode(Format::Vllm, payload);
        self.mirror
            .translate(&mut self.translator, &batch, &mut self.output);
    }

    /// Gives a router the mirror's changes since the last call, or all blocks if the mirror requires that. Returns
    /// whether it was all blocks.
    fn tell(&mut self, router: &mut Router) -> bool {
        let changes = self.mirror.take_changes();
        let is_all = changes.is_none();
        router.apply(&changes.unwrap_or_else(|| self.mirror.all()));
        is_all
    }

    /// The blocks that a new router knows after it was given all blocks of the mirror.
    fn joined(&self) -> BTreeSet<Path> {
        let mut router = Router::default();
        router.apply(&self.mirror.all());
        router.held
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_router_has_what_the_device_has(
        has_groups in any::<bool>(),
        history in prop::collection::vec((steps(), any::<bool>(), any::<bool>(), prop::bool::weighted(0.2)), 1..80),
    ) {
        let mut cache = Cache { has_groups, ..Cache::default() };
        let (mut sides, mut router) = (Sides::new(1 << 20, false), Router::default());
        let mut batch = Vec::new();
        for (step, ends_batch, is_told, restarts) in history {
            batch.extend(cache.step(&step));
            if ends_batch {
                sides.apply(&std::mem::take(&mut batch));
                if restarts {
                    sides = sides.kept(1 << 20);
                    prop_assert!(sides.tell(&mut router));
                    prop_assert!(router.held.is_empty(), "the engine has not been seen");
                    sides.mirror.regain_sight();
                }
                if is_told {
                    prop_assert!(!sides.tell(&mut router));
                    prop_assert_eq!(&router.held, &cache.expected());
                    prop_assert_eq!(&sides.joined(), &cache.expected());
                }
            }
        }
        prop_assert_eq!(sides.translator.doubt(), None);
    }

    #[test]
    fn a_full_mirror_takes_no_more(
        blocks_max in 0_usize..12,
        history in prop::collection::vec(steps(), 1..80),
    ) {
        let mut cache = Cache::default();
        let (mut sides, mut router) = (Sides::new(blocks_max * BLOCK_BYTES, false), Router::default());
        for step in history {
            let is_clear = matches!(step, Step::Clear);
            sides.apply(&cache.step(&step).into_iter().collect::<Vec<_>>());
            sides.tell(&mut router);
            prop_assert!(sides.mirror.bytes() <= blocks_max * BLOCK_BYTES);
            prop_assert!(router.held.is_subset(&cache.expected()));
            prop_assert_eq!(&sides.joined(), &router.held);
            prop_assert!(!is_clear || sides.mirror.bytes() == 0);
        }
        let left_out = cache.expected().len() > router.held.len();
        prop_assert!(!left_out || sides.mirror.take_omissions().full > 0);
    }
}

/// A store of the blocks `from..to` of the prompt number `first`. Block n of the prompt has the tokens `[first, n]` and the name
/// `10 * first + n`.
fn stored(first: u32, from: u32, to: u32) -> Change {
    let names: Vec<u64> = (from..to).map(|place| u64::from(10 * first + place)).collect();
    let tokens: Vec<u32> = (from..to).flat_map(|place| [first, place]).collect();
    let parent = from.checked_sub(1).map(|before| u64::from(10 * first + before));
    Change::Store(Store::new(&names, parent, &tokens, SIZE))
}

fn removed(name: u64) -> Change {
    Change::Remove {
        names: vec![name],
        medium: Some("GPU"),
        group: None,
    }
}

fn paths(first: u32, blocks: impl IntoIterator<Item = u32>) -> BTreeSet<Path> {
    let path = |last| (0..=last).map(|place| vec![first, place]).collect();
    blocks.into_iter().map(path).collect()
}

#[test]
fn after_a_doubt_only_what_is_stored_again_is_held() {
    let (mut sides, mut router) = (Sides::new(1 << 20, false), Router::default());
    sides.apply(&[stored(1, 0, 4), stored(2, 0, 3)]);
    assert!(!sides.tell(&mut router));
    assert_eq!(router.held.len(), 7);
    sides.translator.note_doubt(Reason::LostBatches);
    sides.mirror.doubt();
    assert!(sides.tell(&mut router), "all is told anew");
    assert!(router.held.is_empty() && sides.joined().is_empty());
    // A new block after block 2 proves that blocks 0 to 2 are held. It proves nothing about the blocks after them.
    sides.apply(&[Change::Store(Store::new(&[19], Some(12), &[9, 9], SIZE))]);
    assert!(!sides.tell(&mut router));
    let mut expected = paths(1, 0..3);
    let longest = expected.last().unwrap().clone();
    expected.insert([longest, vec![vec![9, 9]]].concat());
    assert_eq!((&router.held, &sides.joined()), (&expected, &expected));
    // A removal takes effect on certain and on doubted blocks.
    sides.apply(&[removed(13), removed(19)]);
    sides.tell(&mut router);
    assert_eq!(router.held, paths(1, 0..3));
    sides.apply(&[Change::Clear, stored(2, 0, 2)]);
    assert!(!sides.tell(&mut router));
    assert_eq!(
        (&router.held, &sides.joined()),
        (&paths(2, 0..2), &paths(2, 0..2))
    );
}

#[test]
fn a_block_behind_an_unknown_one_leaves_the_others() {
    let (mut sides, mut router) = (Sides::new(1 << 20, false), Router::default());
    sides.apply(&[stored(1, 0, 4), stored(2, 1, 3)]);
    assert!(!sides.tell(&mut router));
    assert_eq!(sides.translator.doubt(), Some(Reason::UnknownParent));
    assert_eq!(
        (&router.held, &sides.joined()),
        (&paths(1, 0..4), &paths(1, 0..4))
    );
    assert_eq!(sides.mirror.take_omissions().unknown, 2);
    // The part that cannot be read may have been a removal.
    let nameless = serde_json::json!([1.5, [{"type": "BlockRemoved", "medium": "GPU"}], 0]);
    sides.apply_payload(&rmp_serde::to_vec(&nameless).unwrap());
    assert!(sides.tell(&mut router) && router.held.is_empty());
}

#[test]
fn an_engine_out_of_sight_is_believed_again_when_it_comes_back() {
    let (mut sides, mut router) = (Sides::new(1 << 20, false), Router::default());
    sides.apply(&[stored(1, 0, 4)]);
    sides.tell(&mut router);
    sides.mirror.lose_sight();
    assert!(sides.tell(&mut router) && router.held.is_empty());
    sides.apply(&[removed(13)]);
    sides.mirror.regain_sight();
    sides.tell(&mut router);
    assert_eq!(
        (&router.held, &sides.joined()),
        (&paths(1, 0..3), &paths(1, 0..3))
    );
    // If events were lost, `regain_sight` does not make doubted blocks held again.
    sides.mirror.lose_sight();
    sides.mirror.doubt();
    sides.mirror.regain_sight();
    sides.tell(&mut router);
    assert!(router.held.is_empty());
}

#[test]
fn what_was_doubted_before_it_was_out_of_sight_stays_in_doubt() {
    let (mut sides, mut router) = (Sides::new(1 << 20, false), Router::default());
    sides.apply(&[stored(1, 0, 4)]);
    sides.translator.note_doubt(Reason::LostBatches);
    sides.mirror.doubt();
    sides.apply(&[stored(2, 0, 2)]);
    sides.mirror.lose_sight();
    for mut later in [sides.kept(1 << 20), sides] {
        assert!(later.tell(&mut router) && router.held.is_empty());
        later.mirror.regain_sight();
        later.tell(&mut router);
        assert_eq!(router.held, paths(2, 0..2));
    }
}

#[test]
fn blocks_that_only_some_prompts_have_are_among_all() {
    let mut cache = Cache::default();
    let (mut sides, mut router) = (Sides::new(1 << 20, true), Router::default());
    for kind in [Kind::Salted, Kind::Adapter, Kind::Image] {
        let changes = cache.store([0, 1, 0, 1, 0], kind, (0, 4), true, 0);
        sides.apply(&[changes.unwrap()]);
    }
    sides.tell(&mut router);
    assert_eq!(router.held.len(), 4, "their tokens are the same");
    assert_eq!(
        router.names.len(),
        12,
        "but for the blocks before the image, they are others"
    );
    assert_eq!(router.adapters, BTreeSet::from(["adapter".to_owned()]));
    assert_eq!(sides.mirror.take_omissions(), MirrorOmissions::default());
    let mut plain = Sides::new(1 << 20, false);
    let change = Cache::default().store([0, 1, 0, 1, 0], Kind::Image, (0, 4), true, 0);
    plain.apply(&[change.unwrap()]);
    let special = MirrorOmissions {
        special: 2,
        ..MirrorOmissions::default()
    };
    assert_eq!(plain.mirror.take_omissions(), special);
}

#[test]
fn much_is_told_in_several_lists() {
    let mut sides = Sides::new(64 << 20, false);
    for prompt in 0..5000_u32 {
        let names = [u64::from(prompt) * 2, u64::from(prompt) * 2 + 1];
        let tokens = [prompt, 1, 2, 3];
        sides.apply(&[Change::Store(Store::new(&names, None, &tokens, SIZE))]);
    }
    sides.mirror.take_changes();
    assert_eq!(sides.mirror.all().len(), 2, "a batch has 4,000 events at most");
    assert_eq!(sides.joined().len(), 10_000);
}

/// The block of a prompt with a salt of its own, with its name and salt made from `user`.
fn of_user(user: u32) -> Change {
    let mut store = Store::new(&[u64::from(user)], None, &[1, 2], SIZE);
    store.salt_key = Some(format!("user-{user}"));
    Change::Store(store)
}

#[test]
fn salts_whose_blocks_are_gone_give_their_places_back() {
    let mut sides = Sides::new(1 << 20, true);
    sides.apply(&[of_user(0)]);
    for user in 1..5000 {
        sides.apply(&[of_user(user)]);
        assert_eq!(sides.mirror.take_changes().unwrap().len(), 1, "{user}");
        sides.apply(&[removed(u64::from(user))]);
        sides.mirror.take_changes();
    }
    assert_eq!(sides.mirror.take_omissions(), MirrorOmissions::default());
    assert_eq!(sides.joined().len(), 1, "the first is still there");
}

#[test]
fn blocks_with_too_many_salts_are_counted_for_themselves() {
    let mut sides = Sides::new(1 << 20, true);
    for user in 0..4100 {
        sides.apply(&[of_user(user)]);
        sides.mirror.take_changes();
    }
    let omissions = MirrorOmissions {
        salts: 4,
        ..MirrorOmissions::default()
    };
    assert_eq!(sides.mirror.take_omissions(), omissions);
}
