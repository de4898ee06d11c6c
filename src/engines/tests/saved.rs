//! Tests that saved forms with faults of every kind are refused: no translator can be restored from such a form.

use fastrand::Rng;
use kvatlas_engines::{SavedError, SavedTranslator, Translation, Translator, TranslatorSettings};
use serde_json::{Value, json};

use crate::common::{Change, Naive, Store, feed, settings, translator};

fn filled() -> Translator {
    let mut translator = translator(2);
    let main = Store::new(&[1, 2, 3], None, &[1, 2, 3, 4, 5, 6], 2);
    let mut window = Store::new(&[2, 3], None, &[1, 2, 3, 4, 5, 6], 2);
    window.group = Some((1, Some("sliding_window")));
    window.window = Some(3);
    let mut host = Store::new(&[1], None, &[1, 2], 2);
    host.medium = Some("CPU");
    feed(
        &mut translator,
        &[Change::Store(main), Change::Store(window), Change::Store(host)],
    );
    translator
}

fn as_json() -> Value {
    serde_json::to_value(filled().save()).unwrap()
}

fn restore(saved: Value, settings: TranslatorSettings) -> Result<Translator, SavedError> {
    let saved: SavedTranslator = serde_json::from_value(saved).unwrap();
    Translator::restore(settings, saved)
}

#[test]
fn what_contradicts_itself_is_refused() {
    let contradictions: [(&str, Value); 9] = [
        ("/chain/kept/1/block/position", json!(1 << 24)),
        ("/chain/kept/1/block/position", json!(0)),
        (
            "/chain/kept/1/block/sequence",
            as_json()["chain"]["kept"][0]["block"]["sequence"].clone(),
        ),
        ("/chain/kept/1", Value::Null),
        ("/groups/lanes/0/1/0/1", json!(3)),
        ("/groups/lanes/0/1/0/2", json!([0, 0, 0, 0])),
        ("/windows/all/0/names/0/2", json!(0)),
        ("/windows/all/0/kind", json!("Other")),
        ("/windows/unlisted", json!([u32::MAX])),
    ];
    for (place, value) in contradictions {
        let mut saved = as_json();
        *saved.pointer_mut(place).unwrap() = value;
        let refused = restore(saved, settings(2)).unwrap_err();
        assert!(
            matches!(refused, SavedError::Contradiction(_)),
            "{place}: {refused}"
        );
    }
    let mut twice = as_json();
    let lane = twice["groups"]["lanes"][0].clone();
    twice["groups"]["lanes"].as_array_mut().unwrap().push(lane);
    assert!(restore(twice, settings(2)).is_err());
}

#[test]
fn what_is_of_other_settings_is_refused() {
    let other_size = restore(as_json(), settings(4)).unwrap_err();
    assert_eq!(
        other_size,
        SavedError::BlockSize {
            found: 2,
            expected: 4
        }
    );
    let small = TranslatorSettings {
        blocks_max: 4,
        ..settings(2)
    };
    let too_many = restore(as_json(), small).unwrap_err();
    assert_eq!(
        too_many,
        SavedError::TooMany {
            names: 5,
            names_max: 4
        }
    );
}

/// Restores forms with random damage. Using them must end neither in a panic nor in an endless loop.
#[test]
fn numbers_that_nobody_saved_do_no_harm() {
    let mut random = Rng::with_seed(7);
    let whole = rmp_serde::to_vec(&filled().save()).unwrap();
    let mut restored = 0;
    for _ in 0..20_000 {
        let mut damaged = whole.clone();
        for _ in 0..random.usize(1..4) {
            let place = random.usize(..damaged.len());
            damaged[place] = random.u8(..);
        }
        let Ok(saved) = rmp_serde::from_slice::<SavedTranslator>(&damaged) else {
            continue;
        };
        let Ok(mut translator) = Translator::restore(settings(2), saved) else {
            continue;
        };
        restored += 1;
        let more = Store::new(&[4, 5], Some(3), &[7, 8, 9, 10], 2);
        let remove = |names: &[u64]| Change::Remove {
            names: names.to_vec(),
            medium: Some("GPU"),
            group: None,
        };
        feed(&mut translator, &[Change::Store(more), remove(&[1, 3])]);
        translator.full_state(&mut Translation::default());
        feed(&mut translator, &[Change::Clear]);
        assert_eq!((translator.blocks(), translator.names()), (0, 0));
    }
    assert!(restored > 1000, "{restored}");
}

#[test]
fn what_was_told_before_is_not_told_again() {
    let mut first = translator(2);
    let mut naive = Naive::default();
    let store = Store::new(&[1, 2], None, &[1, 2, 3, 4], 2);
    naive.apply(&feed(&mut first, &[Change::Store(store.clone())]));
    let mut second = restore(serde_json::to_value(first.save()).unwrap(), settings(2)).unwrap();
    // A second copy of the blocks, and its removal, cause no event.
    assert!(feed(&mut second, &[Change::Store(store)]).parts.is_empty());
    let remove = Change::Remove {
        names: vec![2],
        medium: Some("GPU"),
        group: None,
    };
    naive.apply(&feed(&mut second, std::slice::from_ref(&remove)));
    assert_eq!(naive.blocks(0).len(), 2);
    naive.apply(&feed(&mut second, &[remove]));
    assert_eq!(naive.blocks(0).len(), 1);
}
