//! The namespaces that a router of llm-d is told of, which names none itself: all that speak its hashes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use kvatlas_core::hash::SchemeAlgorithm;
use kvatlas_core::wire::{ModelKey, NamespaceName, WireError};

use crate::queries::{ShardAsker, Source};

/// Time after which a gateway's shards are asked again which namespaces they know.
const AGE_MAX: Duration = Duration::from_secs(1);

/// Names of the namespaces that a gateway's shards knew when they were last asked. A daemon with an index needs none.
#[derive(Debug, Default)]
pub(super) struct KnownNames(Mutex<Option<(Instant, BTreeSet<NamespaceName>)>>);

impl KnownNames {
    /// Returns the names, in order, of the namespaces of `source` that speak llm-d's hashes. At a gateway, a new namespace is among them
    /// [`AGE_MAX`] later, and one that only a missing shard knows is not.
    pub(super) async fn of(&self, source: &Source) -> Result<Vec<NamespaceName>, WireError> {
        match source {
            Source::Here(index) => Ok(index.answerer.namespaces().speaking(SchemeAlgorithm::is_of_llmd)),
            Source::Shards(shards) => self.of_shards(&shards.asker).await,
        }
    }

    /// Returns the shards' names. Names that are too old are asked for first, once for all that wait.
    async fn of_shards(&self, asker: &ShardAsker) -> Result<Vec<NamespaceName>, WireError> {
        let mut known = self.0.lock().await;
        let is_old = |(asked, _): &(Instant, _)| asked.elapsed() >= AGE_MAX;
        if known.as_ref().is_none_or(is_old) {
            let _place = asker.enter()?;
            let names = asker.names_so_far().await?;
            *known = Some((Instant::now(), names));
        }
        let names = known.iter().flat_map(|(_, names)| names);
        Ok(names.filter(|name| is_of_llmd(name)).cloned().collect())
    }
}

fn is_of_llmd(name: &NamespaceName) -> bool {
    let chains = ModelKey::of_namespace(name).and_then(|model| model.chains());
    chains.is_some_and(|chains| chains.algorithm().is_of_llmd())
}
