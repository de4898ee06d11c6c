//! Differences by class, with their explanations.

use std::collections::BTreeMap;

use crate::meaning::{Meaning, Traits};
use crate::traits_of;

/// Maximum number of unexplained differences that are shown.
const SHOWN_MAX: usize = 10;

/// Counts of one run.
#[derive(Debug, Default)]
pub struct Report {
    batches: [[u64; 2]; 3],
    equal: u64,
    nothing: u64,
    classes: BTreeMap<&'static str, u64>,
    unexplained: u64,
}

impl Report {
    /// Counts whether each side could read a whole payload. `ours` is `None` if kvatlas refuses the batch, and false if
    /// it cannot read some event.
    pub fn count_batch(&mut self, ours: Option<bool>, theirs: bool) {
        let row = match ours {
            Some(true) => 0,
            Some(false) => 1,
            None => 2,
        };
        self.batches[row][usize::from(!theirs)] += 1;
    }

    /// Compares the meanings that kvatlas (`ours`) and Dynamo (`theirs`) give to the event `bytes`, and counts the
    /// result.
    pub fn compare(&mut self, ours: &Meaning, theirs: &Meaning, bytes: &[u8]) {
        if ours == theirs {
            self.equal += 1;
        } else if ours.is_nothing() && theirs.is_nothing() {
            self.nothing += 1;
        } else {
            match class_of(ours, theirs, &traits_of(bytes)) {
                Some(class) => *self.classes.entry(class).or_default() += 1,
                None => self.show(ours, theirs, bytes),
            }
        }
    }

    fn show(&mut self, ours: &Meaning, theirs: &Meaning, bytes: &[u8]) {
        self.unexplained += 1;
        if self.unexplained <= SHOWN_MAX as u64 {
            println!("UNEXPLAINED\n  ours   {ours:?}\n  theirs {theirs:?}\n  event  {bytes:02x?}");
        }
    }

    /// Returns the number of unexplained differences.
    pub fn unexplained(&self) -> u64 {
        self.unexplained
    }

    /// Prints Markdown tables.
    pub fn print(&self, title: &str) {
        println!("\n{title}, as batches:\n\n| | Dynamo reads it | Dynamo refuses it |\n|---|---|---|");
        for (row, name) in self.batches.iter().zip([
            "kvatlas reads it",
            "kvatlas leaves out events that can't be read",
            "kvatlas refuses it",
        ]) {
            println!("| {name} | {} | {} |", row[0], row[1]);
        }
        println!("\n{title}, event by event:\n\n| meaning | events |\n|---|---|");
        println!(
            "| the same | {} |\n| nothing, for reasons of each side's own | {} |",
            self.equal, self.nothing
        );
        for (class, count) in &self.classes {
            println!("| {class} | {count} |");
        }
        println!("| unexplained | {} |", self.unexplained);
    }
}

/// Returns the class of a difference; `None` if nothing explains it.
fn class_of(ours: &Meaning, theirs: &Meaning, traits: &Traits) -> Option<&'static str> {
    match (ours, theirs) {
        (_, Meaning::BatchLost) if traits.has_byte_names => {
            Some("names of bytes: kvatlas folds them to their last 8, Dynamo loses the batch")
        }
        (Meaning::Stored { .. }, Meaning::Stored { .. }) => class_of_stores(ours, theirs, traits),
        _ => class_of_others(ours, theirs, traits),
    }
}

fn class_of_stores(ours: &Meaning, theirs: &Meaning, traits: &Traits) -> Option<&'static str> {
    let (
        Meaning::Stored { tier, parent, blocks },
        Meaning::Stored {
            tier: their_tier,
            parent: their_parent,
            blocks: their_blocks,
        },
    ) = (ours, theirs)
    else {
        return None;
    };
    let names = |blocks: &[(u64, u64)]| blocks.iter().map(|block| block.0).collect::<Vec<_>>();
    if (tier, parent) != (their_tier, their_parent) || names(blocks) != names(their_blocks) {
        return None;
    }
    // Both sides give the same blocks, but with different hashes.
    if traits.looks_ahead {
        Some("tokens looked ahead to enter kvatlas's hash only")
    } else if traits.has_objects {
        Some("images that Dynamo's frontend has not marked, and prompt embeddings, enter kvatlas's hash only")
    } else if traits.has_salt_key {
        Some("a salt among the extra keys without Dynamo's prefix enters kvatlas's hash only")
    } else {
        None
    }
}

fn class_of_others(ours: &Meaning, theirs: &Meaning, traits: &Traits) -> Option<&'static str> {
    match (ours, theirs) {
        (Meaning::Nothing("unnamed_adapter"), _) => Some(
            "an adapter with a number and no name: kvatlas leaves it out, Dynamo takes it for the base model",
        ),
        (Meaning::Nothing("token_count"), Meaning::Stored { .. }) => {
            Some("tokens that don't fit: kvatlas leaves the event out, Dynamo keeps blocks that are filled")
        }
        (Meaning::Nothing("malformed"), _) => Some(
            "a field of a wrong type, or one too few or twice: kvatlas leaves the event out, Dynamo passes over the field",
        ),
        (Meaning::Removed { .. } | Meaning::Cleared, Meaning::BatchLost) if !traits.is_array => Some(
            "what only a store has, of a wrong type in another event: kvatlas passes over it, Dynamo loses the batch",
        ),
        (Meaning::Stored { .. } | Meaning::Removed { .. }, Meaning::Nothing("non_local_locality")) => {
            Some("an empty locality: kvatlas takes it for none, as engines mean it, Dynamo for another place")
        }
        (_, Meaning::Nothing("unknown_medium")) => {
            Some("a medium in other letters: kvatlas knows it, Dynamo does not")
        }
        (
            Meaning::Stored { .. } | Meaning::Removed { .. },
            Meaning::Nothing("unlearned_group_idx" | "unknown_kind" | "unknown_ownership"),
        )
        | (
            Meaning::Nothing("other_group" | "unknown_group" | "remote" | "other_owner"),
            Meaning::Stored { .. } | Meaning::Removed { .. },
        ) if traits.is_array => Some(
            "an array with unusual types in its last slots: kvatlas goes by the slot, Dynamo by the type",
        ),
        _ => None,
    }
}
