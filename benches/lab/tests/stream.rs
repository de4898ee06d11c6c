//! Random streams of operations.

use crate::random::Random;
use kvatlas_core::hash::SequenceHash;

use super::oracle::{Oracle, Prefix};
use crate::HolderNumber;

/// Block contents from which a stream chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// A given number of different contents. If it is small, the same content occurs after different prefixes and at
    /// different positions.
    Of(usize),
    /// Contents that each occur in one block only. The parent of every store is held. In this case the designs that
    /// confuse equal contents are exact, too.
    Distinct,
}

/// Size and kind of a stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) alphabet: Alphabet,
    pub(super) holders: usize,
    pub(super) paths: usize,
    pub(super) depth_max: usize,
    pub(super) operations: usize,
}

/// Prompts of a stream. Many of them share a prefix.
#[derive(Debug)]
pub(super) struct Paths {
    pub(super) all: Vec<Prefix>,
    alphabet: Alphabet,
    symbols_used: u32,
}

impl Paths {
    pub(super) fn new(random: &mut Random, shape: &Shape) -> Self {
        let mut paths = Self {
            all: Vec::new(),
            alphabet: shape.alphabet,
            symbols_used: 0,
        };
        for _ in 0..shape.paths {
            let path = paths.branch(random, shape.depth_max);
            paths.all.push(path);
        }
        paths
    }

    fn symbol(&mut self, random: &mut Random) -> u32 {
        match self.alphabet {
            Alphabet::Of(symbols) => u32::try_from(random.below(symbols)).unwrap(),
            Alphabet::Distinct => {
                self.symbols_used += 1;
                self.symbols_used
            }
        }
    }

    /// Returns a prompt that usually shares a prefix with an earlier prompt and then differs.
    pub(super) fn branch(&mut self, random: &mut Random, depth_max: usize) -> Prefix {
        let mut path = Vec::new();
        if !self.all.is_empty() && random.chance(80) {
            let other = &self.all[random.below(self.all.len())];
            path.extend_from_slice(&other[..random.below(other.len() + 1)]);
        }
        let depth = 1 + random.below(depth_max);
        while path.len() < depth {
            let symbol = self.symbol(random);
            path.push(symbol);
        }
        // One block differs, and all blocks after it have the same contents under another prefix.
        if self.alphabet != Alphabet::Distinct && random.chance(30) {
            let place = random.below(path.len());
            path[place] = self.symbol(random);
        }
        path
    }
}

/// One change in a stream of random changes.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    Store {
        holder: HolderNumber,
        path: Prefix,
        from: usize,
    },
    Remove {
        holder: HolderNumber,
        prefixes: Vec<Prefix>,
        unknown: Vec<SequenceHash>,
    },
    Clear {
        holder: HolderNumber,
    },
}

impl Operation {
    /// Returns a random operation for one of the first `joined` holders.
    pub(super) fn random(
        random: &mut Random,
        shape: &Shape,
        paths: &Paths,
        oracle: &Oracle,
        joined: usize,
    ) -> Self {
        let number = random.below(joined);
        let holder = HolderNumber(u32::try_from(number).unwrap());
        // The same prompt comes up often for a holder, so that long chains build up.
        let path = if random.chance(50) {
            number % paths.all.len()
        } else {
            random.below(paths.all.len())
        };
        let path = paths.all[path].clone();
        match random.below(1000) {
            0..4 => Self::Clear { holder },
            4..550 => {
                let mut from = if random.chance(50) {
                    0
                } else {
                    random.below(path.len())
                };
                if shape.alphabet == Alphabet::Distinct && !oracle.holds(holder, &path[..from]) {
                    from = 0;
                }
                let end = from + random.below(path.len() - from + 1);
                let path = path[..end].to_vec();
                Self::Store { holder, path, from }
            }
            _ => Self::remove(random, holder, &path),
        }
    }

    fn remove(random: &mut Random, holder: HolderNumber, path: &[u32]) -> Self {
        let depth = path.len();
        let range = match random.below(5) {
            // The removed range is the tail (as engines evict), the head, a stretch in the middle, or one block.
            0 | 1 => random.below(depth)..depth,
            2 => 0..1 + random.below(depth),
            3 => {
                let from = random.below(depth);
                from..from + random.below(depth - from + 1)
            }
            _ => {
                let one = random.below(depth);
                one..one + 1
            }
        };
        let mut prefixes: Vec<Prefix> = range.map(|index| path[..=index].to_vec()).collect();
        if random.chance(50) {
            random.shuffle(&mut prefixes);
        }
        if random.chance(10) {
            prefixes.extend(prefixes.first().cloned());
        }
        let unknown = if random.chance(10) {
            vec![SequenceHash(random.next())]
        } else {
            Vec::new()
        };
        Self::Remove {
            holder,
            prefixes,
            unknown,
        }
    }
}
