//! Comparison of a daemon's reply with the truth, that is, with the blocks that the simulated workers really hold.

use std::collections::HashMap;
use std::fmt;

use kvatlas_core::wire::{HolderMatch, QueryReply, WorkerName};

use super::fleet::{ExpectedHolder, RANK};

/// Difference between a daemon's reply and the truth that the simulator knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Difference {
    /// The daemon refused a valid query. Holds the daemon's error text.
    Refused(String),
    /// The reply answers a query of another length.
    QueryBlocks {
        /// Number of blocks in the query.
        expected: usize,
        /// Number of blocks in the query, according to the reply.
        answered: u32,
    },
    /// A holder is missing, is listed wrongly, or has a wrong depth. A depth of 0 means that the holder is not listed.
    MatchedBlocks {
        /// Worker that the reply describes wrongly.
        worker: WorkerName,
        /// Number of leading blocks that the worker really holds.
        expected: usize,
        /// Number of leading blocks that the worker holds according to the reply.
        answered: u32,
    },
    /// The reply has a holder that does not exist in the simulation.
    Stranger(String),
    /// The reply does not mark a holder as exact.
    NotExact {
        /// Worker that the reply describes wrongly.
        worker: WorkerName,
        /// Reasons why the reply calls the holder degraded, as words of the wire format.
        reasons: Vec<&'static str>,
    },
    /// Every listed holder is right, but the order of the list or the total number of holders is wrong.
    Order,
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(text) => write!(formatter, "the query was refused: {text}"),
            Self::QueryBlocks { expected, answered } => {
                write!(
                    formatter,
                    "{expected} blocks were asked for, the reply says {answered}"
                )
            }
            Self::MatchedBlocks {
                worker,
                expected,
                answered,
            } => write!(
                formatter,
                "{worker} holds {expected} leading blocks, the reply says {answered}"
            ),
            Self::Stranger(holder) => write!(formatter, "the reply has {holder}, which nobody simulates"),
            Self::NotExact { worker, reasons } => {
                write!(formatter, "{worker} is not exact: {}", reasons.join(", "))
            }
            Self::Order => formatter.write_str("the holders are not ordered by matched blocks and name"),
        }
    }
}

/// Returns the first difference between a reply and the truth, or `None` if the reply is right.
///
/// `expected` is in the order that a reply must have. A reply is right if it has the same holders with the same depths in the
/// same order, each marked exact.
pub fn difference(
    query_blocks: usize,
    expected: &[ExpectedHolder],
    reply: &QueryReply,
) -> Option<Difference> {
    if usize::try_from(reply.query_blocks) != Ok(query_blocks) {
        return Some(Difference::QueryBlocks {
            expected: query_blocks,
            answered: reply.query_blocks,
        });
    }
    if let Some(stranger) = reply.holders.iter().find(|holder| holder.rank != RANK) {
        let holder = format!("{}/{}", stranger.worker, stranger.rank);
        return Some(Difference::Stranger(holder));
    }
    holder_difference(expected, &reply.holders).or_else(|| {
        let in_order = reply
            .holders
            .iter()
            .map(|holder| &holder.worker)
            .eq(expected.iter().map(|holder| &holder.worker));
        let is_complete = usize::try_from(reply.holders_total) == Ok(expected.len());
        (!in_order || !is_complete).then_some(Difference::Order)
    })
}

fn holder_difference(expected: &[ExpectedHolder], answered: &[HolderMatch]) -> Option<Difference> {
    let mut open: HashMap<&WorkerName, usize> = expected
        .iter()
        .map(|holder| (&holder.worker, holder.matched_blocks))
        .collect();
    for holder in answered {
        let expected = open.remove(&holder.worker).unwrap_or_default();
        if usize::try_from(holder.matched_blocks) != Ok(expected) {
            return Some(Difference::MatchedBlocks {
                worker: holder.worker.clone(),
                expected,
                answered: holder.matched_blocks,
            });
        }
        if !holder.exact || !holder.degraded.is_empty() {
            return Some(Difference::NotExact {
                worker: holder.worker.clone(),
                reasons: holder.degraded.iter().map(|reason| reason.as_str()).collect(),
            });
        }
    }
    open.into_iter()
        .min()
        .map(|(worker, expected)| Difference::MatchedBlocks {
            worker: worker.clone(),
            expected,
            answered: 0,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_core::wire::{DegradedReason, DegradedReasons};

    fn name(text: &str) -> WorkerName {
        WorkerName::new(text).unwrap()
    }

    fn expected() -> Vec<ExpectedHolder> {
        [("a", 5), ("b", 5), ("c", 2)]
            .map(|(worker, matched_blocks)| ExpectedHolder {
                worker: name(worker),
                matched_blocks,
            })
            .to_vec()
    }

    fn reply() -> QueryReply {
        let holder = |worker: &str, matched_blocks| HolderMatch::new(name(worker), 0, matched_blocks);
        QueryReply {
            behind_us: 0,
            predicted: Vec::new(),
            v: 1,
            query_blocks: 6,
            block_size: 16,
            holders: vec![holder("a", 5), holder("b", 5), holder("c", 2)],
            holders_total: 3,
            foreign_holders: 0,
            doubtful_holders: 0,
            gathered: None,
            unseen_blocks_max: 0,
        }
    }

    fn found(change: impl FnOnce(&mut QueryReply)) -> Option<Difference> {
        let mut reply = reply();
        change(&mut reply);
        difference(6, &expected(), &reply)
    }

    fn mismatch(worker: &str, expected: usize, answered: u32) -> Option<Difference> {
        Some(Difference::MatchedBlocks {
            worker: name(worker),
            expected,
            answered,
        })
    }

    #[test]
    fn the_truth_is_right() {
        assert_eq!(found(|_| ()), None);
    }

    #[test]
    fn every_kind_of_error_is_seen() {
        assert_eq!(
            found(|reply| reply.holders[2].matched_blocks = 3),
            mismatch("c", 2, 3)
        );
        assert_eq!(found(|reply| drop(reply.holders.remove(1))), mismatch("b", 5, 0));
        assert_eq!(
            found(|reply| reply.holders[2].worker = name("d")),
            mismatch("d", 0, 2)
        );
        let twice = found(|reply| reply.holders.push(reply.holders[0].clone()));
        assert_eq!(twice, mismatch("a", 0, 5));
        assert_eq!(found(|reply| reply.holders.swap(0, 1)), Some(Difference::Order));
        assert_eq!(found(|reply| reply.holders_total = 4), Some(Difference::Order));
        assert_eq!(
            found(|reply| reply.holders[1].rank = 1),
            Some(Difference::Stranger("b/1".to_owned()))
        );
        assert_eq!(
            found(|reply| reply.query_blocks = 5),
            Some(Difference::QueryBlocks {
                expected: 6,
                answered: 5
            })
        );
    }

    #[test]
    fn a_right_answer_without_certainty_is_not_right() {
        let reasons = DegradedReasons::of(DegradedReason::Gap);
        let uncertain = found(|reply| {
            reply.holders[1].exact = false;
            reply.holders[1].degraded = reasons;
        });
        assert_eq!(
            uncertain,
            Some(Difference::NotExact {
                worker: name("b"),
                reasons: vec!["gap"]
            })
        );
        assert!(found(|reply| reply.holders[0].exact = false).is_some());
    }
}
