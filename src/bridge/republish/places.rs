//! Places of engines in a range of ports. Each place is a pair of ports, counted from the beginning of the range.
//!
//! An engine keeps its place as long as the table is kept. A new engine gets an unused place. If every place is taken,
//! the new engine takes over a place of an engine that is no longer followed: the one that was given longest ago. Until
//! then, the ports of an engine that is gone stay unused, so a router that still connects to them meets no other
//! engine.

use serde::{Deserialize, Serialize};

/// Maximum number of places (pairs of ports) in a table, so that the table fits into one message.
pub(super) const PLACES_MAX: usize = 1024;

/// Place that was given to an engine: a pair of ports from the range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PortPlace {
    engine: String,
    /// Serial number of the assignment: places that were given later have higher numbers.
    given: u64,
}

/// Table of the places (pairs of ports) that were given to engines.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct PortPlaces {
    /// The given places, by their numbers from 0 on.
    places: Vec<PortPlace>,
    /// Number of assignments so far.
    givings: u64,
}

impl PortPlaces {
    /// Returns the number of an engine's place (pair of ports); `None` if it has none.
    pub(super) fn of(&self, engine: &str) -> Option<usize> {
        self.places.iter().position(|place| place.engine == engine)
    }

    /// Returns whether this place (pair of ports) belongs to the engine.
    pub(super) fn is_of(&self, place: usize, engine: &str) -> bool {
        self.places.get(place).is_some_and(|place| place.engine == engine)
    }

    /// Returns the number of an engine's place (pair of ports). If the engine has none, gives it one of `count` places:
    /// an unused one, or one of an engine for which `is_known` does not hold. `None` if there is no such place.
    pub(in super::super) fn give(
        &mut self,
        engine: &str,
        count: usize,
        is_known: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        // The range may have been wider.
        self.places.truncate(count);
        if let Some(own) = self.of(engine) {
            return Some(own);
        }
        let fresh = PortPlace {
            engine: engine.to_owned(),
            given: self.givings + 1,
        };
        let number = match self.places.len() < count {
            true => {
                self.places.push(fresh);
                self.places.len() - 1
            }
            false => {
                let left = self.places.iter_mut().enumerate();
                let left = left.filter(|(_, place)| !is_known(&place.engine));
                let (number, place) = left.min_by_key(|(_, place)| place.given)?;
                *place = fresh;
                number
            }
        };
        self.givings += 1;
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_keeps_its_place_until_all_others_have_been_given() {
        let mut places = PortPlaces::default();
        let mut give = |engine: &str, known: &[&str]| places.give(engine, 3, |other| known.contains(&other));
        assert_eq!(give("a", &[]), Some(0));
        assert_eq!(give("b", &["a"]), Some(1));
        assert_eq!(give("a", &[]), Some(0));
        assert_eq!(give("c", &[]), Some(2), "never given");
        assert_eq!(give("b", &["c"]), Some(1), "it was away, and is back");
        assert_eq!(give("d", &["a", "b", "c"]), None);
        assert_eq!(give("d", &["c", "b"]), Some(0));
        assert_eq!(give("a", &["d"]), Some(1), "the one that was given longest ago");
        assert!(places.is_of(0, "d") && !places.is_of(0, "a") && !places.is_of(3, "a"));
        assert_eq!(places.of("b"), None);
    }

    #[test]
    fn a_range_that_is_narrower_by_now_has_the_first_places() {
        let mut places = PortPlaces::default();
        for engine in ["a", "b", "c"] {
            places.give(engine, 3, |_| true);
        }
        assert_eq!(places.give("b", 2, |_| true), Some(1));
        assert_eq!(places.give("c", 2, |_| true), None);
        assert_eq!(places.give("c", 3, |_| true), Some(2));
    }
}
