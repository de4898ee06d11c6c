//! SGLang's components (full attention, windows, states): the blocks that each component holds, and the prefix that a
//! request can reuse.

use std::collections::BTreeSet;

use kvatlas_core::hash::BlockSize;
use kvatlas_engines::{Format, GroupFacts, Reason, Translation, Translator, TranslatorSettings};
use serde_json::{Value, json};

use crate::common::{Naive, contract_chain, decode, translator};

const SIZE: u32 = 4;

/// One engine, and the blocks that a daemon knows from the engine's events.
struct Followed {
    translator: Translator,
    naive: Naive,
    last: Translation,
}

impl Followed {
    /// An engine whose configuration states groups of these kinds.
    fn new(kinds: &[&str]) -> Self {
        let groups = GroupFacts {
            kinds: GroupFacts::read_kinds(kinds.iter().copied()).unwrap(),
            ..GroupFacts::default()
        };
        let settings = TranslatorSettings {
            block_size: BlockSize::new(SIZE).unwrap(),
            groups,
            ..TranslatorSettings::for_format(Format::Sglang)
        };
        Self {
            translator: Translator::new(settings),
            naive: Naive::default(),
            last: Translation::default(),
        }
    }

    /// Translates a batch. Returns whether it is known, after the batch, how much a request can reuse.
    fn hear(&mut self, events: &[Value]) -> bool {
        let batch = decode(Format::Sglang, json!([1.5, events, 0]).to_string().as_bytes());
        self.last.clear();
        self.translator.translate(&batch, &mut self.last);
        self.naive.apply(&self.last);
        assert_eq!(self.translator.doubt(), None);
        !self.translator.hides_groups()
    }

    /// Token positions at which blocks on the device end. The first set is for all held blocks, the second only for
    /// resumable blocks.
    fn blocks(&self) -> (BTreeSet<u32>, BTreeSet<u32>) {
        let chain = contract_chain(&tokens(0, 400), SIZE, None, None);
        let held = self.naive.blocks(0);
        let ends = |is_wanted: &dyn Fn(u32) -> bool| {
            (1..=100)
                .filter(|block| is_wanted(*block))
                .map(|block| block * SIZE)
                .collect()
        };
        let hash = |block: u32| chain[block as usize - 1];
        let is_held = |block: u32| held.contains(&hash(block));
        let is_usable = |block: u32| is_held(block) && !self.naive.barred.contains(&(0, hash(block)));
        (ends(&is_held), ends(&is_usable))
    }

    fn held(&self) -> BTreeSet<u32> {
        self.blocks().0
    }

    fn usable(&self) -> BTreeSet<u32> {
        self.blocks().1
    }
}

fn tokens(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn set<const N: usize>(ends: [u32; N]) -> BTreeSet<u32> {
    BTreeSet::from(ends)
}

/// A stored event of the pages (SGLang's blocks) from token `first` to `end`. A page that ends after n tokens of the sequence has
/// the name n. With `first` 0, the event has no parent.
fn pages(first: u32, end: u32, more: &Value) -> Value {
    let names: Vec<u32> = (first / SIZE + 1..=end / SIZE).map(|page| page * SIZE).collect();
    let mut event = json!({
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": (first > 0).then_some(first),
        "token_ids": tokens(first, end - first), "block_size": SIZE, "lora_id": null, "medium": "GPU",
    });
    let fields = event.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    event
}

fn part(component: &str, first: u32, end: u32) -> Value {
    pages(first, end, &json!({"component_type": component}))
}

fn parts(components: &Value, first: u32, end: u32) -> Value {
    pages(first, end, &json!({"component_types": components}))
}

/// A stored event of the recurrent state that ends at token `end`: one page (SGLang's block), without a parent.
fn state(end: u32) -> Value {
    let mut event = part("mamba", end - SIZE, end);
    event["parent_block_hash"] = Value::Null;
    event
}

fn removed(names: &[u32], component: Option<&str>) -> Value {
    let mut event = json!({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"});
    if let Some(component) = component {
        event["component_type"] = json!(component);
    }
    event
}

/// The event as an array. `is_in_front` tells whether its component comes before its medium or after it.
fn as_array(event: &Value, is_in_front: bool) -> Value {
    let fields: &[&str] = match event["type"] == "BlockStored" {
        true => &[
            "type",
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
        ],
        false => &["type", "block_hashes"],
    };
    let component = ["component_type", "component_types"]
        .into_iter()
        .find(|key| event.get(*key).is_some());
    let last = [component.unwrap_or("component_type"), "medium"];
    let last = if is_in_front { last } else { [last[1], last[0]] };
    json!(
        fields
            .iter()
            .chain(&last)
            .map(|key| event[*key].clone())
            .collect::<Vec<_>>()
    )
}

#[test]
fn a_window_is_known_where_its_size_is_stated() {
    // A window of nine tokens needs two pages (blocks).
    let events = [
        vec![part("full", 0, 24), part("swa", 0, 24)],
        vec![removed(&[4, 8, 12, 16], Some("swa"))],
        vec![part("full", 24, 32), part("swa", 24, 32)],
        vec![removed(&[32], Some("swa")), removed(&[32], Some("full"))],
        vec![part("swa", 8, 16)],
    ];
    let usable = [
        set([4, 8, 12, 16, 20, 24]),
        set([24]),
        set([24, 28, 32]),
        set([24, 28]),
        set([16, 20, 24, 28]),
    ];
    for form in 0..3 {
        let (mut stated, mut unstated) = (Followed::new(&["full", "window:9"]), Followed::new(&[]));
        for (number, (events, usable)) in events.iter().zip(&usable).enumerate() {
            let events: Vec<Value> = match form {
                0 => events.clone(),
                _ => events.iter().map(|event| as_array(event, form == 1)).collect(),
            };
            assert!(stated.hear(&events), "{form} {number}");
            assert_eq!(stated.usable(), *usable, "{form} {number}");
            // The blocks of main attention are known although the window's size is not.
            assert!(!unstated.hear(&events), "{form} {number}");
            assert_eq!(unstated.held(), stated.held(), "{form} {number}");
        }
        assert_eq!(stated.held(), set([4, 8, 12, 16, 20, 24, 28]));
        // A window's block that is stored again has no second copy.
        assert!(stated.hear(&[part("swa", 8, 16)]) && stated.hear(&[removed(&[12], Some("swa"))]));
        assert_eq!(stated.usable(), set([20, 24, 28]));
    }
}

#[test]
fn a_state_is_at_the_end_of_its_page() {
    let mut followed = Followed::new(&[]);
    // The model may have states of which no event has told yet.
    assert!(!followed.hear(&[part("full", 0, 8)]));
    assert_eq!(followed.held(), set([4, 8]));
    assert!(followed.hear(&[part("full", 8, 24), state(24)]));
    assert_eq!(followed.usable(), set([24]));
    assert!(followed.hear(&[state(8), removed(&[24], Some("mamba"))]));
    assert_eq!((followed.usable(), followed.held().len()), (set([8]), 6));
    // No event has told where this page (block) stands.
    let stray = pages(
        40,
        44,
        &json!({"component_type": "mamba", "parent_block_hash": null}),
    );
    assert!(!followed.hear(&[stray]));
    assert!(followed.hear(&[json!({"type": "AllBlocksCleared"})]) && followed.held().is_empty());
}

#[test]
fn a_list_says_all_that_holds_the_blocks() {
    let forms: [fn(&[&str]) -> Value; 2] = [
        |names| json!(names),
        |names| {
            json!(
                names
                    .iter()
                    .map(|name| match *name {
                        "full" => 1,
                        "swa" => 2,
                        _ => 4,
                    })
                    .sum::<u64>()
            )
        },
    ];
    for (form, array) in [
        (forms[0], false),
        (forms[1], false),
        (forms[0], true),
        (forms[1], true),
    ] {
        let list = |names: &[&str], first, end| {
            let event = parts(&form(names), first, end);
            if array { as_array(&event, false) } else { event }
        };
        let (mut stated, mut unstated) = (Followed::new(&["full", "window:5"]), Followed::new(&[]));
        let steps = [
            (vec![list(&["full", "swa"], 0, 16)], set([4, 8, 12, 16]), 4),
            // The window drops two blocks. Then all components drop one.
            (
                vec![list(&["full"], 4, 12), list(&["full", "swa"], 12, 16)],
                set([4, 16]),
                4,
            ),
            (vec![removed(&[16], None)], set([4]), 3),
            // The block is stored again, and the window is not in the list.
            (vec![list(&["full"], 12, 16)], set([4]), 4),
            (
                vec![list(&["full", "swa"], 12, 16), list(&[], 0, 4)],
                set([16]),
                3,
            ),
        ];
        for (number, (events, usable, held)) in steps.iter().enumerate() {
            assert!(stated.hear(events), "{number}");
            assert_eq!(
                (stated.usable(), stated.held().len()),
                (usable.clone(), *held),
                "{number}"
            );
            assert!(!unstated.hear(events), "{number}");
            assert_eq!(unstated.held(), stated.held(), "{number}");
        }
    }
}

#[test]
fn without_components_nothing_changes() {
    for event in [
        pages(0, 8, &json!({})),
        pages(0, 8, &json!({"component_type": null, "component_types": null})),
    ] {
        for event in [event.clone(), as_array(&event, false)] {
            let mut followed = Followed::new(&[]);
            assert!(followed.hear(&[event]));
            assert_eq!(followed.usable(), set([4, 8]));
            assert!(followed.hear(&[removed(&[8], None)]));
            assert_eq!(followed.usable(), set([4]));
        }
    }
    // A tree that has only main attention may name it as a component.
    let mut full = Followed::new(&["full"]);
    assert!(full.hear(&[part("full", 0, 8)]));
    assert_eq!(full.usable(), set([4, 8]));
}

#[test]
fn what_is_not_known_of_components_is_not_exact() {
    for stray in [
        part("c128", 0, 8),
        part("of a later version", 0, 8),
        parts(&json!(["full", "swa", "of a later version"]), 0, 8),
        parts(&json!(15), 0, 8),
        // A request would load the window's block from the host.
        pages(0, 8, &json!({"component_type": "swa", "medium": "CPU_PINNED"})),
    ] {
        let mut followed = Followed::new(&["full", "window:9"]);
        assert!(followed.hear(&[part("full", 0, 8), part("swa", 0, 8)]));
        assert!(!followed.hear(std::slice::from_ref(&stray)), "{stray}");
        assert_eq!(followed.held(), set([4, 8]));
    }
    // The settings state a window, but no event has told of it.
    assert!(!Followed::new(&["full", "window:9"]).hear(&[part("full", 0, 8)]));
    for wrong in [json!([1]), json!("full"), json!({"full": true}), json!(-1)] {
        let event = parts(&wrong, 0, 8);
        let batch = decode(Format::Sglang, json!([1.5, [event], 0]).to_string().as_bytes());
        let mut translator = translator(SIZE);
        translator.translate(&batch, &mut Translation::default());
        assert_eq!(
            (translator.doubt(), translator.blocks()),
            (Some(Reason::Malformed), 0)
        );
    }
}
