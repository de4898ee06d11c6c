//! Comparison of a daemon's reply with the truth, that is, with the blocks that the simulated workers really hold.

use std::collections::HashMap;

use kvatlas_core::wire::{HolderMatch, QueryReply, WorkerName};

use super::fleet::{ExpectedHolder, RANK};

/// Returns the first difference between a reply and the truth, in words, or `None` if the reply is right.
///
/// `expected` is in the order that a reply must have. A reply is right if it has the same holders with the same depths in the
/// same order, each marked exact.
pub fn difference(query_blocks: usize, expected: &[ExpectedHolder], reply: &QueryReply) -> Option<String> {
    if usize::try_from(reply.query_blocks) != Ok(query_blocks) {
        let answered = reply.query_blocks;
        return Some(format!(
            "{query_blocks} blocks were asked for, the reply says {answered}"
        ));
    }
    if let Some(HolderMatch { worker, rank, .. }) = reply.holders.iter().find(|holder| holder.rank != RANK) {
        return Some(format!("the reply has {worker}/{rank}, which nobody simulates"));
    }
    holder_difference(expected, &reply.holders).or_else(|| {
        let in_order = reply
            .holders
            .iter()
            .map(|holder| &holder.worker)
            .eq(expected.iter().map(|holder| &holder.worker));
        let is_complete = usize::try_from(reply.holders_total) == Ok(expected.len());
        let text = "the holders are not ordered by matched blocks and name";
        (!in_order || !is_complete).then(|| text.to_owned())
    })
}

fn holder_difference(expected: &[ExpectedHolder], answered: &[HolderMatch]) -> Option<String> {
    // A depth of 0 means that the holder is not listed.
    let wrong = |worker: &WorkerName, expected: usize, answered: u32| {
        format!("{worker} holds {expected} leading blocks, the reply says {answered}")
    };
    let mut open: HashMap<&WorkerName, usize> = expected
        .iter()
        .map(|holder| (&holder.worker, holder.matched_blocks))
        .collect();
    for holder in answered {
        let expected = open.remove(&holder.worker).unwrap_or_default();
        if usize::try_from(holder.matched_blocks) != Ok(expected) {
            return Some(wrong(&holder.worker, expected, holder.matched_blocks));
        }
        if !holder.exact || !holder.degraded.is_empty() {
            let reasons: Vec<_> = holder.degraded.iter().map(|reason| reason.as_str()).collect();
            return Some(format!("{} is not exact: {}", holder.worker, reasons.join(", ")));
        }
    }
    let (worker, expected) = open.into_iter().min()?;
    Some(wrong(worker, expected, 0))
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

    fn found(change: impl FnOnce(&mut QueryReply)) -> Option<String> {
        let mut reply = reply();
        change(&mut reply);
        difference(6, &expected(), &reply)
    }

    fn mismatch(worker: &str, expected: usize, answered: u32) -> Option<String> {
        Some(format!(
            "{worker} holds {expected} leading blocks, the reply says {answered}"
        ))
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
        let order = Some("the holders are not ordered by matched blocks and name".to_owned());
        assert_eq!(found(|reply| reply.holders.swap(0, 1)), order);
        assert_eq!(found(|reply| reply.holders_total = 4), order);
        assert_eq!(
            found(|reply| reply.holders[1].rank = 1).as_deref(),
            Some("the reply has b/1, which nobody simulates")
        );
        assert_eq!(
            found(|reply| reply.query_blocks = 5).as_deref(),
            Some("6 blocks were asked for, the reply says 5")
        );
    }

    #[test]
    fn a_right_answer_without_certainty_is_not_right() {
        let reasons = DegradedReasons::of(DegradedReason::Gap);
        let uncertain = found(|reply| {
            reply.holders[1].exact = false;
            reply.holders[1].degraded = reasons;
        });
        assert_eq!(uncertain.as_deref(), Some("b is not exact: gap"));
        assert!(found(|reply| reply.holders[0].exact = false).is_some());
    }
}
