//! Brute-force oracle, whose answer every index must give.

use rustc_hash::FxHashMap;

/// Workers that hold each sequence hash, one bit for each worker.
#[derive(Debug, Default)]
pub struct Oracle {
    holders: FxHashMap<u64, u128>,
}

impl Oracle {
    /// Records that `worker` holds these blocks.
    pub fn store(&mut self, worker: u32, sequence: &[u64]) {
        for &hash in sequence {
            *self.holders.entry(hash).or_default() |= 1 << worker;
        }
    }

    /// Records that `worker` no longer holds these blocks.
    pub fn remove(&mut self, worker: u32, sequence: &[u64]) {
        for hash in sequence {
            if let Some(holders) = self.holders.get_mut(hash) {
                *holders &= !(1 << worker);
                if *holders == 0 {
                    self.holders.remove(hash);
                }
            }
        }
    }

    /// Returns the holders, each with the number of leading blocks that it holds without a hole, ordered by holder.
    pub fn answer(&self, sequence: &[u64]) -> Vec<(u32, u32)> {
        let mut answer = Vec::new();
        let mut alive = u128::MAX;
        let mut depth = 0;
        for hash in sequence {
            let holders = self.holders.get(hash).copied().unwrap_or_default();
            if depth > 0 {
                report(&mut answer, alive & !holders, depth);
            }
            alive &= holders;
            if alive == 0 {
                break;
            }
            depth += 1;
        }
        if depth > 0 {
            report(&mut answer, alive, depth);
        }
        answer.sort_unstable();
        answer
    }
}

fn report(answer: &mut Vec<(u32, u32)>, mut workers: u128, depth: u32) {
    while workers != 0 {
        answer.push((workers.trailing_zeros(), depth));
        workers &= workers - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_ends_what_a_holder_matches() {
        let mut oracle = Oracle::default();
        oracle.store(0, &[1, 2, 3]);
        oracle.store(1, &[1, 2, 3]);
        oracle.store(2, &[2, 3]);
        oracle.remove(1, &[2]);
        assert_eq!(oracle.answer(&[1, 2, 3, 4]), [(0, 3), (1, 1)]);
        assert_eq!(oracle.answer(&[4]), []);
        assert_eq!(oracle.answer(&[]), []);
    }
}
