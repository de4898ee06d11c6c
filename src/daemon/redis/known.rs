//! Namespaces that are searched for a router of llm-d. Its requests name no namespace, so all namespaces with llm-d's
//! hashes are searched.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use kvatlas_core::hash::SchemeAlgorithm;
use kvatlas_core::wire::{ModelKey, NamespaceName, WireError};

use crate::queries::{ShardAsker, Source};

/// Age at which the names that a gateway knows are outdated. The gateway then asks its shards for the names again.
const AGE_MAX: Duration = Duration::from_secs(1);

/// Names of the namespaces that a gateway's shards knew when they were last asked. Stays empty in a daemon with an
/// index of its own.
#[derive(Debug, Default)]
pub(super) struct KnownNames(Mutex<Option<(Instant, BTreeSet<NamespaceName>)>>);

impl KnownNames {
    /// Returns, in order, the names of the namespaces of `source` that use llm-d's hashes. In a gateway, a new
    /// namespace appears up to [`AGE_MAX`] late. If a shard does not answer, the namespaces that only this shard knows
    /// are left out.
    pub(super) async fn of(&self, source: &Source) -> Result<Vec<NamespaceName>, WireError> {
        match source {
            Source::Here(index) => Ok(index.answerer.namespaces().speaking(SchemeAlgorithm::is_of_llmd)),
            Source::Shards(shards) => self.of_shards(&shards.asker).await,
        }
    }

    /// Returns the names that a gateway's shards know. If the names are older than [`AGE_MAX`], asks the shards first.
    /// Callers that wait at the same time share one request.
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
