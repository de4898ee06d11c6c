//! Messages whose namespaces do not exist, and publishers without a holder, as the pool of lanes tells of them.

use std::sync::Arc;

use kvatlas_client::unix_time_us;
use kvatlas_core::index::Namespace;
use kvatlas_core::wire::NamespaceName;

use super::pool::LanePool;
use super::unheld::{Stray, Strays};

impl LanePool {
    /// Returns the namespaces that do not exist although messages for them came in the last 300 seconds.
    pub(crate) fn strays(&self) -> Vec<Stray> {
        let exists = |name: &NamespaceName| self.namespaces.get(name).is_some();
        self.unheld.strays.lately(unix_time_us(), exists)
    }

    /// Returns the record of namespaces that do not exist although messages for them came.
    pub(crate) fn stray_names(&self) -> Arc<Strays> {
        Arc::clone(&self.unheld.strays)
    }

    /// Whether messages of the last 300 seconds were dropped because their namespace does not exist. Only names that
    /// satisfy `is_meant` count, and names that are not remembered.
    pub(crate) fn lacks_any(&self, is_meant: impl Fn(&NamespaceName) -> bool) -> bool {
        let mut strays = self.strays().into_iter();
        strays.any(|stray| is_meant(stray.namespace())) || self.unheld.strays.lacks_some(unix_time_us())
    }

    /// Whether publishers' batches are being dropped, so that these publishers have no holders.
    pub(crate) fn drops_some(&self) -> bool {
        let refuses = |namespace: &Arc<Namespace>| namespace.indexer.refused().count(None) > 0;
        self.namespaces.all().iter().any(refuses) || !self.strays().is_empty()
    }
}
