//! Blocks of one engine, as its relay, its publisher and other engines' relays share them.

use kvatlas_client::publish::FullState;
use kvatlas_core::wire::{Event, Tier};
use kvatlas_engines::{Translation, Translator};
use tokio::sync::Mutex;

/// Blocks that one engine has. The publisher gives them to daemons that need the full state.
pub(crate) struct Blocks(pub(super) Translator);

impl Blocks {
    pub(crate) fn translator(&self) -> &Translator {
        &self.0
    }
}

/// The blocks of an engine, as the tasks of a bridge share them.
pub(crate) type SharedBlocks = Mutex<Blocks>;

impl FullState for Blocks {
    fn full_state(&mut self) -> Vec<(Tier, Event)> {
        let mut all = Translation::default();
        self.0.full_state(&mut all);
        let parts = all.parts.into_iter();
        parts
            .flat_map(|part| part.events.into_iter().map(move |event| (part.tier, event)))
            .collect()
    }
}
