//! Interface that every index under comparison must have, and the indexes there are.

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
    /// The hashes that the index itself searches by: sequence hashes for kvatlas, block hashes for the others.
    Native,
    /// Block hashes for all; kvatlas computes the rolling chain in the timed region.
    BlockHashes,
    /// Tokens for all, 16 a block; everybody hashes in the timed region.
    Tokens,
}

impl Form {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Native, Self::BlockHashes, Self::Tokens];

    /// The word in a table's title.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Native => "the form that each index needs",
            Self::BlockHashes => "block hashes",
            Self::Tokens => "tokens, 16 a block",
        }
    }
}

/// Shape in which an answer is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// The leanest form that the index offers: groups, or a callback per holder.
    Lean,
    /// One record a holder, in a collection that the caller owns.
    List,
}

/// The reading side of an index.
pub trait Reader {
    /// A query in the form that the index takes.
    type Query;

    /// The shapes of answers that the index offers, with the word for each in the tables.
    const SHAPES: &'static [(Shape, &'static str)];

    /// The query for `prompt`. Whatever is done here is outside the timed region.
    fn query(form: Form, prompt: &Prompt) -> Self::Query;

    /// Asks, and returns a number that depends on the whole answer. An index that consumes its query may leave it empty.
    fn find(&self, query: &mut Self::Query, shape: Shape) -> usize;

    /// Asks, and returns holders with matched blocks, ordered by holder.
    fn answer(&self, query: &mut Self::Query, shape: Shape) -> Vec<(u32, u32)>;
}

/// A run of blocks in an event.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Sequence hash of the block before the run; absent at the start of a sequence.
    pub parent: Option<u64>,
    /// Position of the first block.
    pub position: u32,
    /// Block hashes.
    pub blocks: &'a [u64],
    /// Sequence hashes.
    pub sequence: &'a [u64],
}

/// The writing side of an index, for all its holders.
pub trait Writer {
    /// An event in the form that the index takes.
    type Event: Send;

    /// `worker` has stored a run of blocks.
    fn stored(worker: u32, run: Run<'_>) -> Self::Event;

    /// `worker` has removed these blocks, given by sequence hash, deepest first as engines free them.
    fn removed(worker: u32, sequence: &[u64]) -> Self::Event;

    /// Applies the events in order.
    fn apply(&mut self, events: Vec<Self::Event>, timing: Timing) -> Applied;

    /// Does what whoever uses the index is to do now and then.
    fn upkeep(&mut self) {}
}

/// A writing side of which two threads can have a part each.
pub trait TwoLanes: Writer + Send + Sized {
    /// A writer for the workers with even numbers, and one for those with odd numbers.
    fn split(self) -> [Self; 2];
}

/// One value for each worker, of all workers or of each second one.
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

/// An index under comparison.
pub trait Contender {
    /// Its name in the tables.
    const NAME: &'static str;
    /// Its reading side.
    type Reader: Reader;
    /// Its writing side.
    type Writer: Writer;

    /// How many workers the index can have.
    const WORKERS_MAX: u32 = u32::MAX;

    /// An empty index for workers 0 to `workers` − 1.
    fn build(workers: u32) -> (Self::Reader, Self::Writer);
}

/// The name of a row: the contender, and the shape of its answers where it has several.
pub fn row<C: Contender>(shape: Shape) -> String {
    let shapes = <C::Reader as Reader>::SHAPES;
    let word = shapes.iter().find(|(other, _)| *other == shape);
    format!("{}, {}", C::NAME, word.map_or("", |(_, word)| word))
}

/// The names of all contenders, in the order of the tables.
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

/// The rows of all contenders and shapes, in the order of the tables.
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
