//! The namespaces that a daemon knows, and whether there may be others.

use kvatlas_core::index::Namespace;
use kvatlas_core::wire::{ModelKey, NamespaceName, NamespacesReply, PROTOCOL_VERSION};

use crate::lanes::LanePool;

use super::Answerer;

/// Whether a namespace has a holder, or a publisher whose batches are dropped.
pub(in super::super) fn is_used(namespace: &Namespace) -> bool {
    let indexer = &namespace.indexer;
    indexer.holder_count() > 0 || indexer.refused().count(None) > 0
}

/// Whether a namespace of this name has the contract's own hashes. A namespace of another scheme repeats the blocks of a
/// model that has a namespace already.
fn has_own_hashes(name: &NamespaceName) -> bool {
    ModelKey::of_namespace(name).is_none_or(|model| model.chains().is_none())
}

impl Answerer {
    /// Returns the names of the known namespaces, and whether there may be others. `pool` has the lanes, which note the
    /// events that are dropped.
    pub(in super::super) fn known_namespaces(&self, pool: &LanePool) -> NamespacesReply {
        // Read before the names: a namespace that comes into being in between is then among them.
        let complete = self.trust.is_listed()
            && !self.freshness.is_everybody_behind()
            && !pool.lacks_any(has_own_hashes);
        let known = self.namespaces.all();
        let unused = known.iter().filter(|namespace| !is_used(namespace));
        NamespacesReply {
            v: PROTOCOL_VERSION,
            namespaces: known.iter().map(|namespace| namespace.name.clone()).collect(),
            unused: Some(unused.map(|namespace| namespace.name.clone()).collect()),
            complete: Some(complete),
        }
    }
}
