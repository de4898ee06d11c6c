//! All designs, by name.

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
    /// One of the seven designs, in the order in which they came about.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Design {
        /// 1: [`NestedDictionary`].
        NestedDictionary => "nested dictionary",
        /// 2: [`Actor`] around the nested dictionary.
        Actor => "actor",
        /// 3: [`InvertedIndex`].
        InvertedIndex => "inverted index",
        /// 4: [`RadixTree`].
        RadixTree => "radix tree",
        /// 5: [`ConcurrentRadixTree`] in a thread pool.
        ConcurrentRadixTree => "concurrent radix tree",
        /// 6: [`JumpIndex`] in a thread pool.
        JumpIndex => "positional, jump search",
        /// 7: [`LineageIndex`], ours, in a thread pool.
        LineageIndex => "lineage (ours)",
    }
}

impl Design {
    /// Whether the design's answers are exact. Designs that are not exact conflate blocks of equal content.
    pub fn is_exact(self) -> bool {
        match self {
            Self::NestedDictionary | Self::Actor | Self::InvertedIndex => false,
            Self::RadixTree | Self::ConcurrentRadixTree | Self::JumpIndex | Self::LineageIndex => true,
        }
    }

    /// Makes an empty index of this design. In a design with a pool, `lanes` threads apply the events.
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
