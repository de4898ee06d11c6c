//! Trust in a holder's state: the holder's own reasons for doubt, and doubts about the stream.

use crate::wire::{DegradedReason, DegradedReasons};

use crate::stream::HolderStatus;
use crate::stream::StreamTrust;

#[test]
fn a_holder_is_trusted_only_when_a_batch_of_the_current_generation_confirmed_it() {
    let trust = StreamTrust::default();
    let status = HolderStatus::default();
    assert_eq!(
        status.reasons(&trust),
        DegradedReasons::of(DegradedReason::Unverified)
    );
    status.confirm(trust.generation());
    assert!(status.reasons(&trust).is_empty());
    let before = trust.generation();
    trust.doubt();
    assert!(status.reasons(&trust).contains(DegradedReason::Unverified));
    // A batch that was received before the doubt proves nothing about the time after it.
    status.confirm(before);
    assert!(status.reasons(&trust).contains(DegradedReason::Unverified));
    status.confirm(trust.generation());
    status.confirm(before);
    assert!(status.reasons(&trust).is_empty());
    status.unconfirm();
    assert!(status.reasons(&trust).contains(DegradedReason::Unverified));
}

#[test]
fn nobody_is_trusted_during_a_stall_and_everybody_as_before_after_it() {
    let trust = StreamTrust::default();
    let (confirmed, unconfirmed) = (HolderStatus::default(), HolderStatus::default());
    confirmed.confirm(trust.generation());
    let (first, second) = (trust.stall(), trust.stall());
    assert_eq!(trust.current_stall(), Some(second));
    trust.end_stall(first);
    assert!(confirmed.reasons(&trust).contains(DegradedReason::Unverified));
    trust.end_stall(second);
    assert!(confirmed.reasons(&trust).is_empty() && !trust.is_stalled());
    assert!(unconfirmed.reasons(&trust).contains(DegradedReason::Unverified));
    // Ending a stall that is already over does not end a later stall.
    let third = trust.stall();
    trust.end_stall(first);
    assert_eq!(trust.current_stall(), Some(third));
}

#[test]
fn a_reader_never_sees_the_confirmation_without_the_reason_before_it() {
    let trust = StreamTrust::default();
    let holders: Vec<HolderStatus> = (0..200_000).map(|_| HolderStatus::default()).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for holder in &holders {
                holder.degrade(DegradedReason::Gap);
                holder.confirm(trust.generation());
            }
        });
        for holder in &holders {
            loop {
                let reasons = holder.reasons(&trust);
                assert!(!reasons.is_empty(), "the gap was not seen");
                if !reasons.contains(DegradedReason::Unverified) {
                    break;
                }
            }
        }
    });
}

#[test]
fn reasons_stay_until_the_state_is_replaced() {
    let status = HolderStatus::default();
    assert!(status.degrade(DegradedReason::Gap));
    assert!(!status.degrade(DegradedReason::Gap));
    assert!(status.degrade(DegradedReason::Stale));
    assert!(status.own_reasons().contains(DegradedReason::Stale));
    assert!(status.degrade(DegradedReason::Capacity));
    assert_eq!(
        status.lasting_reasons(),
        DegradedReasons::of(DegradedReason::Gap).with(DegradedReason::Capacity)
    );
    status.reset_reasons(DegradedReasons::default());
    assert!(status.lasting_reasons().is_empty());
}

#[test]
fn a_stream_is_followed_again_only_with_a_subscription_of_its_generation() {
    let trust = StreamTrust::default();
    assert_eq!(trust.followed(), None);
    let first = trust.generation();
    trust.follow(first);
    assert_eq!(trust.followed(), Some(first));
    let second = trust.doubt();
    assert_eq!(trust.followed(), None);
    // A subscription that was made before the doubt does not help.
    trust.follow(first);
    assert_eq!(trust.followed(), None);
    trust.follow(second);
    assert_eq!(trust.followed(), Some(second));
}

#[test]
fn not_every_publisher_is_known_while_some_are_unheard() {
    let trust = StreamTrust::default();
    assert!(trust.is_listed());
    trust.set_unheard(true);
    trust.note_listed(trust.generation());
    assert!(trust.has_unheard() && !trust.is_listed());
    trust.set_unheard(false);
    assert!(trust.is_listed());
}
