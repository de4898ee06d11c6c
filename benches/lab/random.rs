//! A small random generator with a seed. One seed is enough to repeat a whole test run.

#![allow(
    clippy::should_implement_trait,
    clippy::unwrap_used,
    clippy::panic,
    reason = "for tests and benches alone"
)]

/// Random generator by the algorithm SplitMix64.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Makes a generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a random number below `end`, which must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    /// Returns true with a probability of `percent` percent.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// Puts a list into a random order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below(last + 1));
        }
    }
}

/// Returns a number in which each bit depends on all bits of `number`.
pub fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// Returns the number in an environment variable, or `default` if the variable is not set. Tests take seeds and
/// lengths of runs from such variables.
pub fn setting(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}; set it to a number"))
    })
}
