//! Knowledge of an engine that outlives the process of a bridge.

use kvatlas_core::wire::Rank;
use kvatlas_engines::{SavedMirror, SavedTranslator, Translator};

/// Knowledge that an earlier bridge had of an engine, and the last epoch in which it reported the engine to daemons.
pub(in super::super) struct Before {
    pub(in super::super) blocks: Translator,
    /// The rank that the engine's batches named.
    pub(in super::super) rank: Option<Rank>,
    /// The holder's last epoch.
    pub(in super::super) epoch: u64,
}

/// Knowledge of an engine, saved for the next bridge.
pub(in super::super) struct SavedRelay {
    pub(in super::super) blocks: SavedTranslator,
    /// The blocks that are republished to routers; `None` if the engine is not republished.
    pub(in super::super) republished: Option<SavedMirror>,
    pub(in super::super) rank: Option<Rank>,
    pub(in super::super) epoch: u64,
}
