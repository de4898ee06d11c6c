//! Interface of every compared index (contender), and the list of contenders.

mod chain_index;
mod dynamo_compressed;
mod dynamo_event;
mod dynamo_positional;
mod dynamo_radix;
mod kvatlas;
mod modes;
mod smg_radix;

use crate::measure::{Applied, Timing};
use crate::workload::Prompt;

pub use chain_index::ChainIndex;
pub use dynamo_compressed::CompressedTree;
pub use dynamo_positional::{Binary, Positional, Strided};
pub use dynamo_radix::RadixTree;
pub use kvatlas::Kvatlas;
pub use modes::{Copies, Holes, InMode, Names, TwoTiers};
pub use smg_radix::SmgTree;

/// Form in which a query is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Hashes by which the index itself searches: sequence hashes for kvatlas, block hashes for the others.
    Native,
    /// Block hashes for all contenders. kvatlas computes the sequence hashes within the timed region.
    BlockHashes,
    /// Tokens for all contenders, 16 in a block. All compute their hashes within the timed region.
    Tokens,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Native, Self::BlockHashes, Self::Tokens];

    /// Returns the word for the form in the title of a table.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Native => "the form that each index needs",
            Self::BlockHashes => "block hashes",
            Self::Tokens => "tokens, 16 a block",
        }
    }
}

/// Shape in which an answer is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// The form that costs the index least: groups of holders, or a callback for each holder.
    Lean,
    /// One record for each holder, in a collection that the caller owns.
    List,
}

/// Reading side of an index.
pub trait Reader {
    /// Type of a query, in the form that the index takes.
    type Query;

    /// Shapes of answers that the index offers, each with its word in the tables.
    const SHAPES: &'static [(Shape, &'static str)];

    /// Makes the query for `prompt`, outside of the timed region.
    fn query(form: Form, prompt: &Prompt) -> Self::Query;

    /// Searches, and returns a number that depends on the whole answer. Some indexes take the hashes out of the query,
    /// so `query` may be empty afterwards.
    fn find(&self, query: &mut Self::Query, shape: Shape) -> usize;

    /// Searches, and returns the holders with their matched blocks, ordered by holder.
    fn answer(&self, query: &mut Self::Query, shape: Shape) -> Vec<(u32, u32)>;
}

/// Run of blocks in an event.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Sequence hash of the block before the run; `None` at the beginning of a sequence.
    pub parent: Option<u64>,
    /// Position of the first block.
    pub position: u32,
    /// Block hashes of the run.
    pub blocks: &'a [u64],
    /// Sequence hashes of the run.
    pub sequence: &'a [u64],
}

/// Writing side of an index, for all its holders.
pub trait Writer {
    /// Type of an event, in the form that the index takes.
    type Event: Send;

    /// Makes the event that `worker` has stored a run of blocks.
    fn stored(worker: u32, run: Run<'_>) -> Self::Event;

    /// Makes the event that `worker` has removed these blocks, given by sequence hash, the deepest first, as engines
    /// free them.
    fn removed(worker: u32, sequence: &[u64]) -> Self::Event;

    /// Applies the events in order.
    fn apply(&mut self, events: Vec<Self::Event>, timing: Timing) -> Applied;

    /// Does the maintenance that a user of the index has to do at intervals.
    fn upkeep(&mut self) {}
}

/// Writing side that can be divided between two threads.
pub trait TwoLanes: Writer + Send + Sized {
    /// Returns a writer for workers with even numbers, and one for workers with odd numbers.
    fn split(self) -> [Self; 2];
}

/// One value for each worker. It has either all workers, or only those with even numbers, or only those with odd
/// numbers.
pub struct ByWorker<T> {
    each: Vec<T>,
    step: usize,
}

impl<T> ByWorker<T> {
    fn of_all(each: impl Iterator<Item = T>) -> Self {
        Self {
            each: each.collect(),
            step: 1,
        }
    }

    fn of(&mut self, worker: u32) -> &mut T {
        &mut self.each[worker as usize / self.step]
    }

    fn split(self) -> [Self; 2] {
        let (mut even, mut odd) = (Vec::new(), Vec::new());
        for (number, one) in self.each.into_iter().enumerate() {
            if number % 2 == 0 { &mut even } else { &mut odd }.push(one);
        }
        [even, odd].map(|each| Self { each, step: 2 })
    }
}

/// Compared index.
pub trait Contender {
    /// Name of the contender in the tables.
    const NAME: &'static str;
    /// Reading side of the index.
    type Reader: Reader;
    /// Writing side of the index.
    type Writer: Writer;

    /// Maximum number of workers of the index.
    const WORKERS_MAX: u32 = u32::MAX;

    /// Makes an empty index for the workers 0 to `workers` − 1.
    fn build(workers: u32) -> (Self::Reader, Self::Writer);
}

/// Returns the name of a row: the contender, and the shape of its answers if it has several.
pub fn row<C: Contender>(shape: Shape) -> String {
    let shapes = <C::Reader as Reader>::SHAPES;
    let word = shapes.iter().find(|(other, _)| *other == shape);
    format!("{}, {}", C::NAME, word.map_or("", |(_, word)| word))
}

/// Returns the names of all contenders, in the order of the tables.
pub fn names() -> Vec<String> {
    [
        Kvatlas::NAME,
        ChainIndex::NAME,
        SmgTree::NAME,
        CompressedTree::NAME,
        Positional::<Strided>::NAME,
        Positional::<Binary>::NAME,
        RadixTree::NAME,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Returns the rows of all contenders and shapes, in the order of the tables.
pub fn rows() -> Vec<String> {
    fn of<C: Contender>() -> Vec<String> {
        let shapes = <C::Reader as Reader>::SHAPES;
        shapes.iter().map(|&(shape, _)| row::<C>(shape)).collect()
    }
    [
        of::<Kvatlas>(),
        of::<InMode<Names>>(),
        of::<InMode<TwoTiers>>(),
        of::<ChainIndex>(),
        of::<SmgTree>(),
        of::<CompressedTree>(),
        of::<Positional<Strided>>(),
        of::<Positional<Binary>>(),
        of::<RadixTree>(),
    ]
    .concat()
}
