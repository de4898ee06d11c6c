//! Mixing two words with a secret key, so that nobody can construct collisions.

/// Returns a random odd number: the secret key of a hash table, without which nobody can construct collisions.
pub(crate) fn random_key(number: u64) -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(number) | 1
}

/// Mixes two words into one: multiplies the words and combines the two halves of the product by XOR. Every caller
/// puts a secret key into one of the words.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "both halves are used")]
pub(crate) fn fold(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    product as u64 ^ (product >> 64) as u64
}
