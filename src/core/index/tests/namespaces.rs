//! Which namespaces may come, and when they go.

use crate::wire::{HolderId, NamespaceName, WorkerName};

use super::api::{Capacity, IndexLimits, NamespaceRefused, NamespaceSettings, Namespaces};

fn name(name: &str) -> NamespaceName {
    NamespaceName::new(name).unwrap()
}

fn namespaces() -> Namespaces {
    let settings = NamespaceSettings::default();
    let configured = [(name("configured"), settings)];
    Namespaces::new(
        Capacity::UNBOUNDED,
        settings,
        configured,
        IndexLimits::default(),
        3,
    )
}

#[test]
fn an_empty_namespace_gives_its_place_back_after_a_while() {
    let namespaces = namespaces();
    let (busy, empty) = (name("busy"), name("empty"));
    let worker = WorkerName::new("w").unwrap();
    let id = HolderId { worker, rank: 0 };
    let writer = namespaces
        .get_or_create(&busy)
        .unwrap()
        .indexer
        .register(&id)
        .unwrap();
    drop(namespaces.get_or_create(&empty).unwrap());
    let refused = namespaces.get_or_create(&name("other")).unwrap_err();
    assert_eq!(refused, NamespaceRefused::LimitReached { namespaces: 3 });
    assert!(namespaces.forget_empty(0, 10).is_empty(), "not long enough");
    // Somebody is about to use it.
    let used = namespaces.get(&empty).unwrap();
    assert!(namespaces.forget_empty(11, 10).is_empty());
    assert!(namespaces.get(&empty).is_some());
    drop(used);
    let gone = namespaces.forget_empty(11, 10);
    assert_eq!(gone.iter().map(|gone| &gone.name).collect::<Vec<_>>(), [&empty]);
    assert!(namespaces.get(&empty).is_none());
    namespaces.get_or_create(&name("other")).unwrap();
    assert!(namespaces.get(&busy).is_some() && namespaces.get(&name("configured")).is_some());
    // The time begins when the last holder leaves.
    writer.retire();
    assert!(namespaces.forget_empty(1_000, 10).is_empty());
    let gone = namespaces.forget_empty(1_010, 10);
    assert!(gone.iter().any(|gone| gone.name == busy));
}

#[test]
fn where_only_named_ones_may_exist_no_other_is_made() {
    let namespaces = namespaces().closed();
    assert!(namespaces.get_or_create(&name("configured")).is_ok());
    let refused = namespaces.get_or_create(&name("other")).unwrap_err();
    assert_eq!(refused, NamespaceRefused::NotNamed);
}

#[test]
fn who_was_refused_is_remembered_until_there_is_room() {
    let namespaces = namespaces();
    let (second, third) = (name("second"), name("third"));
    assert_eq!(namespaces.refusal(&third), None);
    for made in [&second, &third] {
        drop(namespaces.get_or_create(made).unwrap());
    }
    let wanted = name("wanted");
    assert_eq!(namespaces.refusal(&wanted), None, "nobody has wanted it yet");
    let refused = namespaces.get_or_create(&wanted).unwrap_err();
    assert_eq!(namespaces.refusal(&wanted), Some(refused));
    assert_eq!(namespaces.refusal(&name("other")), None);
    // Of very many, not all are remembered: any may be one of them.
    for number in 0..2000 {
        namespaces
            .get_or_create(&name(&format!("n{number}")))
            .unwrap_err();
    }
    for name in ["n1999", "other"].map(name) {
        assert!(namespaces.refusal(&name).is_some(), "{name}");
    }
    namespaces.forget_empty(0, 10);
    assert_eq!(namespaces.forget_empty(11, 10).len(), 2);
    assert_eq!(namespaces.refusal(&wanted), None);
    namespaces.get_or_create(&wanted).unwrap();
}
