//! All designs, each with its name.

use std::io;

use kvatlas_core::wire::WorkerName;
use kvatlas_core::worded;

use super::actor::Actor;
use super::concurrent_radix::ConcurrentRadixTree;
use super::inverted::InvertedIndex;
use super::jump::JumpIndex;
use super::lineage::LineageIndex;
use super::nested::NestedDictionary;
use super::pool::ThreadPool;
use super::prefix_index::PrefixIndex;
use super::radix::RadixTree;

worded! {
    /// The seven designs, in the order in which they were designed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Design {
        /// Design 1: [`NestedDictionary`].
        NestedDictionary => "nested dictionary",
        /// Design 2: [`Actor`] that owns a nested dictionary.
        Actor => "actor",
        /// Design 3: [`InvertedIndex`].
        InvertedIndex => "inverted index",
        /// Design 4: [`RadixTree`].
        RadixTree => "radix tree",
        /// Design 5: [`ConcurrentRadixTree`] in a thread pool.
        ConcurrentRadixTree => "concurrent radix tree",
        /// Design 6: [`JumpIndex`] in a thread pool.
        JumpIndex => "positional, jump search",
        /// Design 7: [`LineageIndex`], kvatlas's own index, in a thread pool.
        LineageIndex => "lineage (ours)",
    }
}

impl Design {
    /// Whether the design's answers are exact. Designs that are not exact confuse blocks with equal content.
    pub fn is_exact(self) -> bool {
        match self {
            Self::NestedDictionary | Self::Actor | Self::InvertedIndex => false,
            Self::RadixTree | Self::ConcurrentRadixTree | Self::JumpIndex | Self::LineageIndex => true,
        }
    }

    /// Makes an empty index of this design. In a design with a thread pool, `lanes` threads apply the events.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn build(self, lanes: usize) -> io::Result<Box<dyn PrefixIndex>> {
        Ok(match self {
            Self::NestedDictionary => Box::new(NestedDictionary::default()),
            Self::Actor => Box::new(Actor::new(NestedDictionary::default)?),
            Self::InvertedIndex => Box::new(InvertedIndex::default()),
            Self::RadixTree => Box::new(RadixTree::default()),
            Self::ConcurrentRadixTree => Box::new(ThreadPool::new(ConcurrentRadixTree::default(), lanes)?),
            Self::JumpIndex => Box::new(ThreadPool::new(JumpIndex::default(), lanes)?),
            Self::LineageIndex => {
                let worker = WorkerName::new("baseline").map_err(io::Error::other)?;
                Box::new(ThreadPool::new(LineageIndex::new(worker), lanes)?)
            }
        })
    }
}
