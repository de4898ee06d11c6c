//! The namespaces that are searched for a router of llm-d, whose requests name none: all namespaces that speak llm-d's hashes.

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
    /// Returns the names, in order, of the namespaces of `source` that speak llm-d's hashes. At a gateway, a new namespace
    /// appears up to [`AGE_MAX`] late. A namespace that only a missing shard knows is left out.
    pub(super) async fn of(&self, source: &Source) -> Result<Vec<NamespaceName>, WireError> {
        match source {
            Source::Here(index) => Ok(index.answerer.namespaces().speaking(SchemeAlgorithm::is_of_llmd)),
            Source::Shards(shards) => self.of_shards(&shards.asker).await,
        }
    }

    /// Returns the names that a gateway's shards know. Names older than [`AGE_MAX`] are asked for again first, once for all
    /// callers that wait.
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
