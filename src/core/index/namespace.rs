//! Namespaces: indexes by name.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::hash::{BlockSize, SchemeAlgorithm, SchemeChains};
use crate::stream::RefusedHolders;
use crate::wire::{ModelKey, NamespaceName, PROBE_NAME};

use super::indexer::PositionalIndexer;
use super::settings::{Capacity, Hashing, IndexLimits, NamespaceSettings};
use super::shared::TotalUsage;

/// One namespace and its index.
#[derive(Debug)]
pub struct Namespace {
    /// Name of the namespace.
    pub name: NamespaceName,
    /// The index, which has the blocks of the namespace's holders.
    pub indexer: PositionalIndexer,
    /// Whether the configuration names the namespace. If so, the namespace is never removed and keeps its settings.
    pub is_configured: bool,
    /// Hash chains with which the namespace's publishers hash tokens. `None` if the publishers use the contract's
    /// hashes. The namespace's name tells the scheme.
    pub chains: Option<SchemeChains>,
    /// Numbers of answers given about the namespace so far: all answers, and the answers that were not exact.
    pub answers: AnswerTally,
    /// Time since which the namespace has had no holder, on the clock of [`Namespaces::forget_empty`]. It is 0 while
    /// the namespace has a holder, or a publisher whose batches are dropped.
    empty_since_us: AtomicU64,
}

/// Counter of all answers, and of the answers that were not exact.
#[derive(Debug, Default)]
pub struct AnswerTally {
    all: AtomicU64,
    inexact: AtomicU64,
}

impl AnswerTally {
    /// Counts an answer.
    pub fn count(&self, is_exact: bool) {
        self.all.fetch_add(1, Ordering::Relaxed);
        if !is_exact {
            self.inexact.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of all answers, and the number of answers that were not exact.
    pub fn counts(&self) -> (u64, u64) {
        // The inexact answers are read first. If an answer is counted between the two reads, the number of inexact
        // answers may be too small, but it never exceeds the number of all answers.
        let inexact = self.inexact.load(Ordering::Relaxed);
        (self.all.load(Ordering::Relaxed), inexact)
    }
}

impl Namespace {
    fn new(name: NamespaceName, indexer: PositionalIndexer, is_configured: bool) -> Arc<Self> {
        Arc::new(Self {
            chains: chains_of(&name),
            name,
            indexer,
            is_configured,
            answers: AnswerTally::default(),
            empty_since_us: AtomicU64::new(0),
        })
    }

    /// Whether the namespace has no holder and is not named by the configuration. If so, a batch may give it another
    /// block size.
    pub fn is_free(&self) -> bool {
        !self.is_configured && self.indexer.shared.slots.load().workers == 0
    }

    /// Whether the namespace has had no holder for at least `empty_us_max` microseconds. Publishers whose batches are
    /// dropped count as holders. Stores the time of the first call that finds the namespace empty. `now_us` is never 0.
    fn is_long_empty(&self, now_us: u64, empty_us_max: u64) -> bool {
        let since = &self.empty_since_us;
        if !self.is_free() || self.indexer.refused().count(None) > 0 {
            since.store(0, Ordering::Relaxed);
            return false;
        }
        let begun = since.compare_exchange(0, now_us, Ordering::Relaxed, Ordering::Relaxed);
        begun.is_err_and(|since| now_us.saturating_sub(since) >= empty_us_max)
    }
}

/// Whether a namespace of this name is the one in which `kvatlas doctor` makes its probes.
fn is_of_probes(name: &NamespaceName) -> bool {
    name.as_str() == PROBE_NAME
}

/// Returns the hash chains of the hash scheme that a namespace's name gives. `None` if the name gives no scheme.
fn chains_of(name: &NamespaceName) -> Option<SchemeChains> {
    ModelKey::of_namespace(name)?.chains()
}

/// Returns `settings`, adapted to a namespace of this name. If the name contains a hash scheme, the engine's hashes are
/// used as they are: the contract's chain is not computed.
fn settings_of(name: &NamespaceName, settings: NamespaceSettings) -> NamespaceSettings {
    match chains_of(name) {
        None => settings,
        Some(_) => NamespaceSettings {
            hashing: Hashing::Engine,
            has_scheme: true,
            ..settings
        },
    }
}

/// Reason why a namespace cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceRefused {
    /// The maximum number of namespaces exists already.
    #[error("{namespaces} namespaces exist; no more are allowed (limits.max_namespaces)")]
    LimitReached {
        /// Maximum number of namespaces.
        namespaces: usize,
    },
    /// Only namespaces of the configuration may exist.
    #[error("the configuration does not name it (limits.named_namespaces_only)")]
    NotNamed,
    /// Only namespaces of the configuration may have a block size other than the default.
    #[error(
        "its blocks have {told} tokens, and here they would have {configured}: a shard has sizes from its \
         configuration only (namespaces.NAME.block_size)"
    )]
    OtherBlockSize {
        /// Block size that the batch gives.
        told: BlockSize,
        /// Block size of the configuration.
        configured: BlockSize,
    },
}

/// Maximum number of refused namespaces whose names are remembered. Once this many names are remembered, any other
/// name may have been refused, too.
const REFUSED_MAX: usize = 1024;

/// All namespaces. A namespace is made for its first event, or from the start if the configuration names it.
#[derive(Debug)]
pub struct Namespaces {
    current: RwLock<HashMap<NamespaceName, Arc<Namespace>>>,
    defaults: NamespaceSettings,
    limits: IndexLimits,
    namespaces_max: usize,
    /// Whether namespaces that the configuration does not name may exist. True at first. The namespace called
    /// [`PROBE_NAME`] may always exist.
    pub is_open: bool,
    /// Whether namespaces that the configuration does not name may take their block size from their batches. True at
    /// first.
    pub takes_sizes: bool,
    /// Names of the namespaces that batches asked for and that could not be made, each with the reason.
    refused: RwLock<HashMap<NamespaceName, NamespaceRefused>>,
    total: Arc<TotalUsage>,
}

impl Namespaces {
    /// Makes the namespaces in `configured`. Later namespaces get the settings in `defaults`. `namespaces_max` bounds
    /// the number of all namespaces, except the one called [`PROBE_NAME`]. `capacity` bounds the size of all namespaces
    /// together.
    pub fn new(
        capacity: Capacity,
        defaults: NamespaceSettings,
        configured: impl IntoIterator<Item = (NamespaceName, NamespaceSettings)>,
        limits: IndexLimits,
        namespaces_max: usize,
    ) -> Self {
        let total = Arc::new(TotalUsage::of(capacity));
        let make = |(name, settings): (NamespaceName, NamespaceSettings)| {
            let indexer = PositionalIndexer::sharing(settings_of(&name, settings), limits, &total);
            (name.clone(), Namespace::new(name, indexer, true))
        };
        Self {
            current: RwLock::new(configured.into_iter().map(make).collect()),
            defaults,
            limits,
            namespaces_max,
            is_open: true,
            takes_sizes: true,
            refused: RwLock::default(),
            total,
        }
    }

    /// Returns the namespace with this name, if it exists.
    pub fn get(&self, name: &NamespaceName) -> Option<Arc<Namespace>> {
        self.current.read().get(name).cloned()
    }

    /// Removes the namespaces that have had no holder for `empty_us_max` microseconds, and returns them. A namespace
    /// stays while batches of a publisher are dropped, because its blocks are unknown. Removes the
    /// namespace called [`PROBE_NAME`] as soon as it has no holder. Namespaces of the configuration stay. `now_us` is
    /// the time in microseconds, of a clock that does not run backwards. The caller calls this function regularly.
    pub fn forget_empty(&self, now_us: u64, empty_us_max: u64) -> Vec<Arc<Namespace>> {
        let is_forgotten = |name: &NamespaceName, namespace: &mut Arc<Namespace>| {
            let empty_us_max = if is_of_probes(name) { 0 } else { empty_us_max };
            // A thread that is about to register a holder has a reference of its own. No thread can get one while the
            // lock is held.
            namespace.is_long_empty(now_us.max(1), empty_us_max) && Arc::strong_count(namespace) == 1
        };
        let mut current = self.current.write();
        let gone = current.extract_if(is_forgotten);
        gone.map(|(_, namespace)| namespace).collect()
    }

    /// Returns the settings for a new namespace. `told` is the block size that the namespace's first batch gives.
    pub fn settings_for(&self, told: Option<BlockSize>) -> NamespaceSettings {
        let mut settings = self.defaults;
        if let Some(told) = told.filter(|told| self.takes_sizes && *told != settings.block_size) {
            (settings.block_size, settings.is_size_told) = (told, true);
        }
        settings
    }

    /// Returns the namespace called `name`, for a batch with the block size `told`. Makes the namespace if it is
    /// absent. If the present namespace is not in use and this batch needs other settings, replaces the namespace by a
    /// new one, which keeps the list of publishers whose batches are dropped.
    pub fn get_or_create(
        &self,
        name: &NamespaceName,
        told: Option<BlockSize>,
    ) -> Result<Arc<Namespace>, NamespaceRefused> {
        self.get_or_create_with(name, told, |_| ())
    }

    /// Does the same as [`Self::get_or_create`]. If the namespace is made, calls `prepare` with its publishers whose
    /// batches are dropped, before any other thread sees the namespace.
    pub fn get_or_create_with(
        &self,
        name: &NamespaceName,
        told: Option<BlockSize>,
        prepare: impl FnOnce(&RefusedHolders),
    ) -> Result<Arc<Namespace>, NamespaceRefused> {
        let settings = settings_of(name, self.settings_for(told));
        let mut current = self.current.write();
        let known = current.get(name);
        let is_used = |found: &Arc<Namespace>| !found.is_free() || Arc::strong_count(found) > 1;
        if let Some(found) = known.filter(|found| is_used(found) || *found.indexer.settings() == settings) {
            return Ok(Arc::clone(found));
        }
        let other_size = told.filter(|_| !settings.takes(told));
        let other_size = other_size.map(|told| NamespaceRefused::OtherBlockSize {
            told,
            configured: settings.block_size,
        });
        if let Some(refused) = self.refuses(name, &current).or(other_size) {
            drop(current);
            self.note_refused(name, &refused);
            return Err(refused);
        }
        self.refused.write().remove(name);
        let limits = match is_of_probes(name) {
            true => self.limits.of_probes(),
            false => self.limits,
        };
        let indexer = PositionalIndexer::sharing(settings, limits, &self.total);
        if let Some(replaced) = known {
            indexer.refused().adopt(replaced.indexer.refused());
        }
        prepare(indexer.refused());
        let created = Namespace::new(name.clone(), indexer, false);
        current.insert(name.clone(), Arc::clone(&created));
        Ok(created)
    }

    /// Returns the reason why the namespace called `name` cannot be made in addition to the `current` ones; `None` if
    /// it can.
    ///
    /// The namespace of `kvatlas doctor`'s probes can always be made, and does not count in the number of namespaces.
    /// It has bounds of its own.
    fn refuses(
        &self,
        name: &NamespaceName,
        current: &HashMap<NamespaceName, Arc<Namespace>>,
    ) -> Option<NamespaceRefused> {
        let limit = self.namespaces_max;
        let counts = |(known, namespace): &(&NamespaceName, &Arc<Namespace>)| {
            *known != name && (namespace.is_configured || !is_of_probes(known))
        };
        match self.is_open {
            _ if is_of_probes(name) => None,
            false => Some(NamespaceRefused::NotNamed),
            // A quick test: the namespaces that count are at most all of them.
            true if current.len() < limit => None,
            true if current.iter().filter(counts).count() < limit => None,
            true => Some(NamespaceRefused::LimitReached { namespaces: limit }),
        }
    }

    fn note_refused(&self, name: &NamespaceName, reason: &NamespaceRefused) {
        let is_noted = |known: &HashMap<_, _>| match known.get(name) {
            Some(known) => known == reason,
            None => known.len() >= REFUSED_MAX,
        };
        if !is_noted(&self.refused.read()) {
            self.refused.write().insert(name.clone(), reason.clone());
        }
    }

    /// Returns the reason why the namespace called `name` could not be made when a batch came for it. `None` if no
    /// batch came for it, or if it could be made now. At most 1,024 refused names are remembered. Once so many are
    /// remembered, every other name counts as possibly refused.
    pub fn refusal(&self, name: &NamespaceName) -> Option<NamespaceRefused> {
        let now = self.refuses(name, &self.current.read());
        let refused = self.refused.read();
        let is_lasting =
            |reason: &&NamespaceRefused| matches!(reason, NamespaceRefused::OtherBlockSize { .. });
        match refused.get(name) {
            Some(reason) => now.or_else(|| Some(reason).filter(is_lasting).cloned()),
            None if refused.len() < REFUSED_MAX => None,
            None => now.or_else(|| refused.values().find(is_lasting).cloned()),
        }
    }

    /// Returns the names, in order, of the namespaces whose hash scheme satisfies `is_meant`.
    pub fn speaking(&self, is_meant: impl Fn(SchemeAlgorithm) -> bool) -> Vec<NamespaceName> {
        let current = self.current.read();
        let speak = current.values().filter(|namespace| {
            let chains = namespace.chains.as_ref();
            chains.is_some_and(|chains| is_meant(chains.algorithm()))
        });
        let mut names: Vec<_> = speak.map(|namespace| namespace.name.clone()).collect();
        names.sort();
        names
    }

    /// Returns all namespaces, in the order of their names.
    pub fn all(&self) -> Vec<Arc<Namespace>> {
        let mut all: Vec<_> = self.current.read().values().cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }
}
