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

/// Names of the namespaces that a gateway's shards used when they were last asked. Stays empty in a daemon with an
/// index of its own.
#[derive(Debug, Default)]
pub(super) struct KnownNames(Mutex<Option<ToldNames>>);

/// Answer of the shards to a request for their namespaces.
#[derive(Debug)]
struct ToldNames {
    /// Time at which the answer came, or at which the request failed.
    told: Instant,
    names: Result<BTreeSet<NamespaceName>, WireError>,
}

impl ToldNames {
    /// Whether the answer is of use to a caller that came at the time `came`. A failure is shared by those that came
    /// before it, so that they do not ask one after the other. Later callers ask again.
    fn is_for(&self, came: Instant) -> bool {
        self.told >= came || (self.names.is_ok() && self.told.elapsed() < AGE_MAX)
    }
}

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

    /// Returns the names of namespaces that a gateway's shards use. If the names are older than [`AGE_MAX`], asks the shards first.
    /// Callers that wait at the same time share one request, also if it fails.
    async fn of_shards(&self, asker: &ShardAsker) -> Result<Vec<NamespaceName>, WireError> {
        let ask = async || {
            let _place = asker.enter()?;
            Ok(asker.names_so_far().await?.used())
        };
        let names = self.shared(ask).await?;
        Ok(names.into_iter().filter(is_of_llmd).collect())
    }

    /// Returns the names that are known, or else those that `ask` returns.
    async fn shared(
        &self,
        ask: impl AsyncFnOnce() -> Result<BTreeSet<NamespaceName>, WireError>,
    ) -> Result<BTreeSet<NamespaceName>, WireError> {
        let came = Instant::now();
        let mut known = self.0.lock().await;
        if let Some(told) = known.as_ref().filter(|told| told.is_for(came)) {
            return told.names.clone();
        }
        let names = ask().await;
        *known = Some(ToldNames {
            told: Instant::now(),
            names: names.clone(),
        });
        names
    }
}

fn is_of_llmd(name: &NamespaceName) -> bool {
    let chains = ModelKey::of_namespace(name).and_then(|model| model.chains());
    chains.is_some_and(|chains| chains.algorithm().is_of_llmd())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use kvatlas_core::wire::ErrorCode;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn callers_that_wait_share_a_failure_and_later_ones_ask_again() {
        let (known, asked, gate) = (KnownNames::default(), AtomicUsize::new(0), Semaphore::new(0));
        let fail = async || {
            asked.fetch_add(1, Ordering::Relaxed);
            gate.acquire().await.unwrap().forget();
            Err(WireError::new(ErrorCode::Unavailable, "late"))
        };
        let all = join_all((0..40).map(|_| known.shared(fail)));
        // All callers have come when the last future has been polled.
        let open = async { gate.add_permits(1) };
        let (answers, ()) = tokio::join!(all, open);
        assert!(answers.iter().all(Result::is_err));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        let names = async || Ok(BTreeSet::new());
        assert_eq!(known.shared(names).await, Ok(BTreeSet::new()));
        assert_eq!(known.shared(fail).await, Ok(BTreeSet::new()));
    }
}
