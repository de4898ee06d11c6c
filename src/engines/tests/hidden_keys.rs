//! Hidden keys: one content under two names. The engine tells blocks apart by something that its events do not tell.

use kvatlas_core::hash::BlockSize;
use kvatlas_engines::{Format, Reason, TranslatorSettings};
use serde_json::json;

use crate::common::restarted;
use crate::doubts::{Followed, SIZE, removed, stored, with};

#[test]
fn one_content_under_two_names_is_in_doubt_until_it_has_gone() {
    let mut engine = Followed::new(Format::Sglang);
    engine.hear(&[stored(&[1, 2], None, 0, SIZE)]);
    assert_eq!(
        engine.hear(&[stored(&[11, 12], None, 0, SIZE)]),
        Some(Reason::HiddenKey)
    );
    assert_eq!(engine.hear(&[removed(&[1])]), Some(Reason::HiddenKey));
    assert_eq!(engine.blocks(), 2);
    // Neither prefix has both blocks now.
    assert_eq!(engine.hear(&[removed(&[12])]), Some(Reason::HiddenKey));
    assert_eq!(engine.blocks(), 2);
    let settings = TranslatorSettings {
        block_size: BlockSize::new(SIZE).unwrap(),
        ..TranslatorSettings::for_format(Format::Sglang)
    };
    engine.translator = restarted(&engine.translator, settings);
    assert_eq!(engine.hear(&[removed(&[2])]), Some(Reason::HiddenKey));
    assert_eq!(engine.hear(&[removed(&[11])]), None);
    assert_eq!((engine.blocks(), engine.translator.names()), (0, 0));
}

#[test]
fn one_content_under_two_names_is_in_doubt_after_its_way_over_the_host() {
    let on = |names: &[u64], medium| with(stored(names, None, 0, SIZE), json!({"medium": medium}));
    let off = |names: &[u64], medium| with(removed(names), json!({"medium": medium}));
    let mut engine = Followed::new(Format::Sglang);
    let both = [on(&[1], "GPU"), on(&[2], "GPU"), on(&[1], "CPU"), on(&[2], "CPU")];
    assert_eq!(engine.hear(&both), Some(Reason::HiddenKey));
    assert_eq!(engine.hear(&[off(&[1, 2], "GPU")]), None);
    // One of the two comes back, and nobody knows which content it has.
    assert_eq!(engine.hear(&[on(&[2], "GPU")]), Some(Reason::HiddenKey));
    assert_eq!(engine.hear(&[off(&[2], "GPU"), off(&[1, 2], "CPU")]), None);
    assert_eq!(engine.hear(&[on(&[2], "GPU")]), None);
}
