//! Namespaces: indexes by name.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::hash::BlockSize;
use crate::wire::NamespaceName;

use super::capacity::{Capacity, TotalUsage};
use super::indexer::{IndexLimits, PositionalIndexer};

/// Whose chain the index is keyed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hashing {
    /// The sequence hashes in events are the contract's chain, or queries use the same foreign one.
    #[default]
    Engine,
    /// The sequence hashes in events are opaque names; the chain is computed from the block hashes or tokens beside them.
    Recompute,
}

impl Hashing {
    /// The word in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Recompute => "recompute",
        }
    }
}

/// How the index of a namespace is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IndexKind {
    /// Runs of blocks, addressed by hash: a query costs a handful of look-ups, at any depth.
    #[default]
    Lineage,
    /// A concurrent radix tree: a query follows one pointer a block. Exact for every stream, as the other is, but several times
    /// as large and slow; it forgets nothing at a [`Capacity`], and answers no compressed chains. It is there to check the other
    /// against, in production too, and for hashes that are no chain, on which its answers and their cost do not depend.
    Radix,
}

impl IndexKind {
    /// The word in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lineage => "lineage",
            Self::Radix => "radix",
        }
    }
}

/// What all caches of a namespace have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceSettings {
    /// Tokens in a block.
    pub block_size: BlockSize,
    /// Whose chain the index is keyed by.
    pub hashing: Hashing,
    /// How the index is built.
    pub index: IndexKind,
}

impl Default for NamespaceSettings {
    fn default() -> Self {
        Self {
            block_size: BlockSize::DEFAULT,
            hashing: Hashing::default(),
            index: IndexKind::default(),
        }
    }
}

/// One namespace and its index.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: NamespaceName,
    /// Its index.
    pub indexer: PositionalIndexer,
}

/// As many namespaces exist as may exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{namespaces} namespaces exist; no more are allowed (limits.max_namespaces)")]
pub struct NamespaceLimitReached {
    /// The limit.
    pub namespaces: usize,
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
            (name.clone(), Arc::new(Namespace { name, indexer }))
        };
        let current: HashMap<_, _> = configured.into_iter().map(make).collect();
        Self {
            current: ArcSwap::from_pointee(current),
            changing: Mutex::new(()),
            defaults,
            limits,
            namespaces_max,
            total,
        }
    }

    /// The namespace called `name`, if anyone has named it.
    pub fn get(&self, name: &NamespaceName) -> Option<Arc<Namespace>> {
        self.current.load().get(name).cloned()
    }

    /// The namespace called `name`, made if it does not exist.
    pub fn get_or_create(&self, name: &NamespaceName) -> Result<Arc<Namespace>, NamespaceLimitReached> {
        if let Some(found) = self.get(name) {
            return Ok(found);
        }
        let _changing = self.changing.lock();
        let current = self.current.load();
        if let Some(found) = current.get(name) {
            return Ok(Arc::clone(found));
        }
        if current.len() >= self.namespaces_max {
            return Err(NamespaceLimitReached {
                namespaces: self.namespaces_max,
            });
        }
        let indexer = PositionalIndexer::sharing(self.defaults, self.limits, &self.total);
        let created = Arc::new(Namespace {
            name: name.clone(),
            indexer,
        });
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
