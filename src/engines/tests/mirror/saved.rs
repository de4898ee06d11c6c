//! Mirrors in their saved form: restored completely, or refused.

use kvatlas_engines::SavedError;
use serde_json::{Value, json};

use super::*;

#[test]
fn what_is_kept_is_taken_up_as_far_as_there_is_room() {
    let (mut sides, mut router) = (Sides::new(1 << 20, false), Router::default());
    sides.apply(&[stored(1, 0, 4), removed(11)]);
    let mut later = sides.kept(sides.mirror.bytes() / 2);
    later.mirror.regain_sight();
    assert!(later.tell(&mut router));
    assert_eq!(router.held, paths(1, 0..1));
}

/// Saves and restores blocks of all kinds. They are the same afterwards, with the same tokens and names.
#[test]
fn what_is_kept_is_the_same_when_it_is_taken_up() {
    let mut cache = Cache::default();
    let mut sides = Sides::new(1 << 20, true);
    for kind in [Kind::Plain, Kind::Salted, Kind::Adapter, Kind::Image] {
        let change = cache.store([0, 1, 0, 1, 0], kind, (0, 4), true, 0);
        sides.apply(&[change.unwrap()]);
    }
    sides.apply(&[stored(1, 0, 4), stored(2, 0, 2), removed(11)]);
    sides.mirror.take_changes();
    let saved = sides.mirror.save();
    let mut later = Mirror::restore(mirror_settings(1 << 20, true), &saved).unwrap();
    assert_eq!(later.bytes(), sides.mirror.bytes());
    assert!(later.take_changes().is_none(), "routers are given all anew");
    later.regain_sight();
    later.take_changes();
    let [mut before, mut after] = [Router::default(), Router::default()];
    before.apply(&sides.mirror.all());
    after.apply(&later.all());
    assert!(!before.held.is_empty());
    assert_eq!((&after.held, &after.names), (&before.held, &before.names));
    assert_eq!(after.adapters, before.adapters);
}

#[test]
fn what_is_kept_and_damaged_is_refused_or_harmless() {
    let mut sides = Sides::new(1 << 20, true);
    sides.apply(&[stored(1, 0, 4), stored(2, 0, 2), removed(11)]);
    let whole = rmp_serde::to_vec(&sides.mirror.save()).unwrap();
    let mut refused = 0;
    for place in 0..whole.len() {
        for change in [1, 2, 0x10, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[place] ^= change;
            let Ok(saved) = rmp_serde::from_slice::<SavedMirror>(&bytes) else {
                continue;
            };
            match Mirror::restore(mirror_settings(1 << 20, true), &saved) {
                Ok(mut mirror) => {
                    mirror.regain_sight();
                    mirror.take_changes();
                    mirror.all();
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 0);
    for cut in 0..whole.len() {
        assert!(
            rmp_serde::from_slice::<SavedMirror>(&whole[..cut]).is_err(),
            "cut at {cut}"
        );
    }
    let other = MirrorSettings {
        block_size: BlockSize::new(SIZE * 2).unwrap(),
        ..mirror_settings(1 << 20, true)
    };
    assert!(Mirror::restore(other, &sides.mirror.save()).is_err());
    assert!(Mirror::restore(mirror_settings(1 << 20, false), &sides.mirror.save()).is_err());
}

/// Function that changes a part of a saved form.
type Part<'a> = &'a dyn Fn(&Value) -> Value;

/// Returns the saved form of `mirror`, with the value at the JSON pointer `place` changed.
fn changed(mirror: &Mirror, place: &str, change: impl Fn(&Value) -> Value) -> SavedMirror {
    let mut saved = serde_json::to_value(mirror.save()).unwrap();
    let part = saved.pointer_mut(place).unwrap();
    *part = change(part);
    serde_json::from_value(saved).unwrap()
}

#[test]
fn what_is_kept_is_refused_with_other_tokens_or_in_a_place_that_cannot_be() {
    let mut sides = Sides::new(1 << 20, false);
    sides.apply(&[stored(1, 0, 4), stored(2, 0, 2)]);
    let blocks = sides.mirror.save();
    let other = |number: &Value| json!(number.as_u64().unwrap() ^ 1);
    for place in 0..6 * SIZE {
        let saved = changed(&sides.mirror, &format!("/tokens/{place}"), other);
        let refused = Mirror::restore(mirror_settings(1 << 20, false), &saved).unwrap_err();
        assert_eq!(
            refused,
            SavedError::Contradiction("a block has other tokens"),
            "token {place}"
        );
    }
    let beyond = |_: &Value| json!(6);
    let none = |_: &Value| json!([]);
    let fewer = |tokens: &Value| json!(tokens.as_array().unwrap()[1..]);
    let first = |_: &Value| serde_json::to_value(&blocks).unwrap()["blocks"][0].clone();
    let changes: [(&str, Part<'_>); 7] = [
        ("/blocks/0/sequence", &other),
        ("/blocks/1/parent", &beyond),
        ("/blocks/1", &first),
        ("/blocks/0/cache", &beyond),
        ("/caches/0/0", &other),
        ("/caches", &none),
        ("/tokens", &fewer),
    ];
    for (place, change) in changes {
        let saved = changed(&sides.mirror, place, change);
        let refused = Mirror::restore(mirror_settings(1 << 20, false), &saved).unwrap_err();
        assert!(
            matches!(refused, SavedError::Contradiction(_)),
            "{place}: {refused}"
        );
    }
}
