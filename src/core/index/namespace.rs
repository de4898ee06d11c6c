//! Namespaces: indexes by name.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::wire::NamespaceName;

use super::indexer::PositionalIndexer;
use super::settings::{Capacity, IndexLimits, NamespaceSettings};
use super::shared::TotalUsage;

/// One namespace and its index.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: NamespaceName,
    /// Its index.
    pub indexer: PositionalIndexer,
    /// Whether the configuration names it. Then it stays.
    is_configured: bool,
    /// Whether it is being forgotten: nobody may begin to use it.
    is_closed: AtomicBool,
    /// Since when it has had no holder, on the clock of [`Namespaces::forget_empty`]; 0 while it has some.
    empty_since_us: AtomicU64,
}

impl Namespace {
    fn new(name: NamespaceName, indexer: PositionalIndexer, is_configured: bool) -> Arc<Self> {
        Arc::new(Self {
            name,
            indexer,
            is_configured,
            is_closed: AtomicBool::new(false),
            empty_since_us: AtomicU64::new(0),
        })
    }

    /// Whether it has had no holder for so long; `now_us` is never 0.
    fn is_long_empty(&self, now_us: u64, empty_us_max: u64) -> bool {
        if self.is_configured || self.indexer.has_holders() {
            self.empty_since_us.store(0, Ordering::Relaxed);
            return false;
        }
        let begun = self
            .empty_since_us
            .compare_exchange(0, now_us, Ordering::Relaxed, Ordering::Relaxed);
        begun.is_err_and(|since| now_us.saturating_sub(since) >= empty_us_max)
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
}

/// All namespaces. They come into being with their first event, or are there from the start where the configuration
/// names them; reading takes no lock.
#[derive(Debug)]
pub struct Namespaces {
    current: ArcSwap<HashMap<NamespaceName, Arc<Namespace>>>,
    changing: Mutex<()>,
    defaults: NamespaceSettings,
    limits: IndexLimits,
    namespaces_max: usize,
    /// Whether others than those of the configuration may exist.
    is_open: bool,
    total: Arc<TotalUsage>,
}

impl Namespaces {
    /// The namespaces in `configured`, and room for others with the `defaults`, `namespaces_max` in all; without a bound on the size
    /// of all together.
    pub fn new(
        defaults: NamespaceSettings,
        configured: impl IntoIterator<Item = (NamespaceName, NamespaceSettings)>,
        limits: IndexLimits,
        namespaces_max: usize,
    ) -> Self {
        Self::within(Capacity::UNBOUNDED, defaults, configured, limits, namespaces_max)
    }

    /// As [`Self::new`], with a bound on the size of all together.
    pub fn within(
        capacity: Capacity,
        defaults: NamespaceSettings,
        configured: impl IntoIterator<Item = (NamespaceName, NamespaceSettings)>,
        limits: IndexLimits,
        namespaces_max: usize,
    ) -> Self {
        let total = Arc::new(TotalUsage::of(capacity));
        let make = |(name, settings): (NamespaceName, NamespaceSettings)| {
            let indexer = PositionalIndexer::sharing(settings, limits, &total);
            (name.clone(), Namespace::new(name, indexer, true))
        };
        let current: HashMap<_, _> = configured.into_iter().map(make).collect();
        Self {
            current: ArcSwap::from_pointee(current),
            changing: Mutex::new(()),
            defaults,
            limits,
            namespaces_max,
            is_open: true,
            total,
        }
    }

    /// The same, with no others than those of the configuration.
    #[must_use]
    pub fn closed(self) -> Self {
        Self {
            is_open: false,
            ..self
        }
    }

    /// The namespace called `name`, if anyone has named it.
    pub fn get(&self, name: &NamespaceName) -> Option<Arc<Namespace>> {
        let found = self.current.load().get(name).cloned()?;
        // Either this is seen as a use, or the mark of whoever forgets it is seen here: see `forget_empty`.
        fence(Ordering::SeqCst);
        (!found.is_closed.load(Ordering::Relaxed)).then_some(found)
    }

    /// Forgets namespaces that have had no holder for `empty_us_max`, and gives them back; those of the configuration stay. `now_us` is
    /// a clock in microseconds that does not run backwards. To be called now and then.
    pub fn forget_empty(&self, now_us: u64, empty_us_max: u64) -> Vec<Arc<Namespace>> {
        let _changing = self.changing.lock();
        let current = self.current.load_full();
        let mut forgotten = Vec::new();
        for (name, namespace) in current.iter() {
            if !namespace.is_long_empty(now_us.max(1), empty_us_max) {
                continue;
            }
            namespace.is_closed.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            // Whoever is about to register a holder has a reference, too.
            if Arc::strong_count(namespace) > 1 {
                namespace.is_closed.store(false, Ordering::Relaxed);
            } else {
                forgotten.push(name.clone());
            }
        }
        if forgotten.is_empty() {
            return Vec::new();
        }
        let mut next = HashMap::clone(&current);
        let gone = forgotten.iter().filter_map(|name| next.remove(name)).collect();
        self.current.store(Arc::new(next));
        gone
    }

    /// The namespace called `name`, made if it does not exist.
    pub fn get_or_create(&self, name: &NamespaceName) -> Result<Arc<Namespace>, NamespaceRefused> {
        if let Some(found) = self.get(name) {
            return Ok(found);
        }
        let _changing = self.changing.lock();
        let current = self.current.load();
        if let Some(found) = current.get(name) {
            return Ok(Arc::clone(found));
        }
        if !self.is_open {
            return Err(NamespaceRefused::NotNamed);
        }
        if current.len() >= self.namespaces_max {
            return Err(NamespaceRefused::LimitReached {
                namespaces: self.namespaces_max,
            });
        }
        let indexer = PositionalIndexer::sharing(self.defaults, self.limits, &self.total);
        let created = Namespace::new(name.clone(), indexer, false);
        let mut next = HashMap::clone(&current);
        next.insert(name.clone(), Arc::clone(&created));
        self.current.store(Arc::new(next));
        Ok(created)
    }

    /// All namespaces, by name.
    pub fn all(&self) -> Vec<Arc<Namespace>> {
        let mut all: Vec<_> = self.current.load().values().cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }
}
