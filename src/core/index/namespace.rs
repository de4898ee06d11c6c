//! Namespaces: indexes by name.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

use crate::hash::{BlockSize, SchemeAlgorithm, SchemeChains};
use crate::wire::{ModelKey, NamespaceName};

use super::indexer::PositionalIndexer;
use super::settings::{Capacity, Hashing, IndexLimits, NamespaceSettings};
use super::shared::TotalUsage;

/// One namespace and its index.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: NamespaceName,
    /// Its index.
    pub indexer: PositionalIndexer,
    /// Whether the configuration names it. Then it stays, as it is.
    pub is_configured: bool,
    /// The chains that hash tokens as its publishers do, where its name says that they do not speak the contract's hashes.
    pub chains: Option<SchemeChains>,
    /// The answers about it that were given so far.
    pub answers: AnswerTally,
    /// Since when it has had no holder, on the clock of [`Namespaces::forget_empty`]; 0 while it has some.
    empty_since_us: AtomicU64,
}

/// A count of the answers that were given.
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

    /// The number of all answers, and of those that were not exact.
    pub fn counts(&self) -> (u64, u64) {
        // Those that are not exact first: an answer in between makes them fewer than they are, and never more than all.
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

    /// Whether nobody has a holder in it, and the configuration does not name it: another block size may be told.
    pub fn is_free(&self) -> bool {
        !self.is_configured && self.indexer.shared.slots.load().workers == 0
    }

    /// Whether it has had no holder for so long; `now_us` is never 0.
    fn is_long_empty(&self, now_us: u64, empty_us_max: u64) -> bool {
        let since = &self.empty_since_us;
        if !self.is_free() {
            since.store(0, Ordering::Relaxed);
            return false;
        }
        let begun = since.compare_exchange(0, now_us, Ordering::Relaxed, Ordering::Relaxed);
        begun.is_err_and(|since| now_us.saturating_sub(since) >= empty_us_max)
    }
}

/// The chains of a namespace that is called so; none where its hashes are the contract's.
fn chains_of(name: &NamespaceName) -> Option<SchemeChains> {
    ModelKey::of_namespace(name)?.chains()
}

/// The settings as they hold for a namespace that is called so: hashes of a scheme are never computed from the contract's.
fn settings_of(name: &NamespaceName, settings: NamespaceSettings) -> NamespaceSettings {
    match chains_of(name) {
        None => settings,
        Some(_) => NamespaceSettings {
            hashing: Hashing::Engine,
            ..settings
        },
    }
}

/// Why a namespace cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceRefused {
    /// As many exist as may exist.
    #[error("{namespaces} namespaces exist; no more are allowed (limits.max_namespaces)")]
    LimitReached {
        /// The limit.
        namespaces: usize,
    },
    /// Only those of the configuration may exist.
    #[error("the configuration does not name it (limits.named_namespaces_only)")]
    NotNamed,
    /// Only those of the configuration may have another block size than the default.
    #[error(
        "its blocks have {told} tokens, and here they would have {configured}: a shard has sizes from its \
         configuration only (namespaces.NAME.block_size)"
    )]
    OtherBlockSize {
        /// That of the batch.
        told: BlockSize,
        /// That of the configuration.
        configured: BlockSize,
    },
}

/// Most names of refused namespaces that are remembered. Where more have come, every name may be one of them.
const REFUSED_MAX: usize = 1024;

/// All namespaces. They come into being with their first event, or are there from the start where the configuration
/// names them.
#[derive(Debug)]
pub struct Namespaces {
    current: RwLock<HashMap<NamespaceName, Arc<Namespace>>>,
    defaults: NamespaceSettings,
    limits: IndexLimits,
    namespaces_max: usize,
    /// Whether others than those of the configuration may exist. True at first.
    pub is_open: bool,
    /// Whether those others may have a block size that their batches tell. True at first.
    pub takes_sizes: bool,
    /// Namespaces that were to be made, and why they were refused.
    refused: RwLock<HashMap<NamespaceName, NamespaceRefused>>,
    total: Arc<TotalUsage>,
}

impl Namespaces {
    /// The namespaces in `configured`, and room for others with the `defaults`, `namespaces_max` in all. `capacity` bounds the size of
    /// all together.
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

    /// The namespace called `name`, if anyone has named it.
    pub fn get(&self, name: &NamespaceName) -> Option<Arc<Namespace>> {
        self.current.read().get(name).cloned()
    }

    /// Forgets namespaces that have had no holder for `empty_us_max`, and gives them back; those of the configuration stay. `now_us` is
    /// a clock in microseconds that does not run backwards. To be called now and then.
    pub fn forget_empty(&self, now_us: u64, empty_us_max: u64) -> Vec<Arc<Namespace>> {
        let is_forgotten = |_: &NamespaceName, namespace: &mut Arc<Namespace>| {
            // Whoever is about to register a holder has a reference, too, and nobody gets one now.
            namespace.is_long_empty(now_us.max(1), empty_us_max) && Arc::strong_count(namespace) == 1
        };
        let mut current = self.current.write();
        let gone = current.extract_if(is_forgotten);
        gone.map(|(_, namespace)| namespace).collect()
    }

    /// The settings of a new namespace whose first batch tells this block size.
    pub fn settings_for(&self, told: Option<BlockSize>) -> NamespaceSettings {
        let mut settings = self.defaults;
        if let Some(told) = told.filter(|told| self.takes_sizes && *told != settings.block_size) {
            (settings.block_size, settings.is_size_told) = (told, true);
        }
        settings
    }

    /// The namespace called `name`, for a batch that tells this block size. Made if it is not there, or if nobody uses it and its size differs.
    pub fn get_or_create(
        &self,
        name: &NamespaceName,
        told: Option<BlockSize>,
    ) -> Result<Arc<Namespace>, NamespaceRefused> {
        let settings = settings_of(name, self.settings_for(told));
        let mut current = self.current.write();
        let known = current.get(name);
        let is_used = |found: &Arc<Namespace>| !found.is_free() || Arc::strong_count(found) > 1;
        if let Some(found) = known.filter(|found| is_used(found) || *found.indexer.settings() == settings) {
            return Ok(Arc::clone(found));
        }
        let others = current.len() - usize::from(known.is_some());
        let other_size = told.filter(|_| !settings.takes(told));
        let other_size = other_size.map(|told| NamespaceRefused::OtherBlockSize {
            told,
            configured: settings.block_size,
        });
        if let Some(refused) = self.refuses(others).or(other_size) {
            drop(current);
            self.note_refused(name, &refused);
            return Err(refused);
        }
        self.refused.write().remove(name);
        let indexer = PositionalIndexer::sharing(settings, self.limits, &self.total);
        let created = Namespace::new(name.clone(), indexer, false);
        current.insert(name.clone(), Arc::clone(&created));
        Ok(created)
    }

    /// Why no further namespace can be made where there are so many; none where one can.
    fn refuses(&self, namespaces: usize) -> Option<NamespaceRefused> {
        let limit = self.namespaces_max;
        match self.is_open {
            false => Some(NamespaceRefused::NotNamed),
            true if namespaces >= limit => Some(NamespaceRefused::LimitReached { namespaces: limit }),
            true => None,
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

    /// Why the namespace called `name` does not exist although somebody has wanted to make it; none where nobody has, or where it could be
    /// made by now. Where more than 1,024 were refused, it may be one of them.
    pub fn refusal(&self, name: &NamespaceName) -> Option<NamespaceRefused> {
        let now = self.refuses(self.current.read().len());
        let refused = self.refused.read();
        let is_lasting =
            |reason: &&NamespaceRefused| matches!(reason, NamespaceRefused::OtherBlockSize { .. });
        match refused.get(name) {
            Some(reason) => now.or_else(|| Some(reason).filter(is_lasting).cloned()),
            None if refused.len() < REFUSED_MAX => None,
            None => now.or_else(|| refused.values().find(is_lasting).cloned()),
        }
    }

    /// The names of those that speak the hashes of a scheme that `is_meant`, in order.
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

    /// All namespaces, by name.
    pub fn all(&self) -> Vec<Arc<Namespace>> {
        let mut all: Vec<_> = self.current.read().values().cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }
}
