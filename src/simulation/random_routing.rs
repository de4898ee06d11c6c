//! Routing without knowledge of the caches: the baseline to which other routing is compared.

use kvatlas_core::wire::NameError;

use super::fleet::{Fleet, FleetSize};
use super::report::ratio;
use super::request::Request;
use fastrand::Rng;

/// Returns the share of the requests' blocks that are cached already when each request goes to a worker drawn at random.
///
/// # Errors
///
/// The errors of [`Fleet::new`].
pub(super) fn random_routing_hit_rate(
    requests: &[Request],
    size: FleetSize,
    seed: u64,
) -> Result<f64, NameError> {
    let mut fleet = Fleet::new(size, seed)?;
    let mut random = Rng::with_seed(seed);
    let (mut hits, mut blocks) = (0, 0);
    for request in requests {
        let worker = random.usize(..size.workers.get());
        hits += fleet.serve_with(worker, request).admission.hit_blocks;
        blocks += request.chain.len();
    }
    Ok(ratio(hits, blocks))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::super::synthetic::SyntheticLoad;
    use super::*;

    fn size(workers: usize, blocks_per_worker: usize) -> FleetSize {
        FleetSize {
            workers: NonZeroUsize::new(workers).unwrap(),
            blocks_per_worker: NonZeroUsize::new(blocks_per_worker).unwrap(),
        }
    }

    #[test]
    fn random_routing_finds_less() {
        let requests: Vec<_> = SyntheticLoad::new(3).take(600).collect();
        let alone = random_routing_hit_rate(&requests, size(1, 100_000), 3).unwrap();
        let spread = random_routing_hit_rate(&requests, size(8, 100_000), 3).unwrap();
        assert!(spread < alone, "{spread} {alone}");
        assert_eq!(
            spread,
            random_routing_hit_rate(&requests, size(8, 100_000), 3).unwrap()
        );
    }
}
