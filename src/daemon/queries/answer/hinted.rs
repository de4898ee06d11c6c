//! Hints of routers: keeping them, and adding the holders that they predict to answers.

use std::time::Instant;

use kvatlas_core::index::{Match, Namespace, PositionalIndexer, QueryChain, Search};
use kvatlas_core::wire::{
    DegradedReason, ErrorCode, HINTS_MAX, Hint, HolderId, NamespaceName, PredictedHolder, QueryOptions,
    WireError, WorkerName,
};

use super::ahead::{chain_ahead, key_ahead};
use super::spoken::spoken;
use super::{Answerer, profile_of, saturating_u32};
use crate::hints::{Hints, KeptHint};

impl Answerer {
    /// Keeps hints about the namespace `name`, from `now` on. Returns the number of kept hints. Hints about workers of
    /// other shards are passed over. Hints whose prompts are not valid are left out and counted.
    ///
    /// # Errors
    ///
    /// [`WireError`] if the settings take no hints, if there are too many hints, or if the namespace is not known. Also if
    /// prompts are not valid and no hint is kept.
    pub(crate) fn take_hints(
        &self,
        name: &NamespaceName,
        hints: &[Hint],
        now: Instant,
    ) -> Result<usize, WireError> {
        let Some(kept) = &self.hints else {
            let text = "hints are not taken here; hints.ttl_ms says for how long they are";
            return Err(WireError::new(ErrorCode::BadRequest, text));
        };
        if hints.len() > HINTS_MAX {
            let text = format!(
                "{} hints are more than the {HINTS_MAX} of a report; send several",
                hints.len()
            );
            return Err(WireError::new(ErrorCode::TooLarge, text));
        }
        let own = || hints.iter().filter(|hint| kept.are_about(&hint.worker));
        let namespace = self.namespace(name).inspect_err(|_| {
            kept.unknown_namespace(name, own().count());
        })?;
        let (mut taken, mut refused) = (0, None);
        for hint in own() {
            match self.take_hint(kept, &namespace, hint, now) {
                Ok(is_kept) => taken += usize::from(is_kept),
                Err(error) => {
                    kept.undecodable(&error);
                    refused.get_or_insert(error);
                }
            }
        }
        match refused {
            Some(error) if taken == 0 => Err(error),
            _ => Ok(taken),
        }
    }

    /// Checks which hints have come true, that is, whether the hint's holder has all blocks of the hint. Checks at most
    /// `max` hints of each namespace.
    pub(crate) fn look_at_hints(&self, max: usize, now: Instant) {
        if let Some(hints) = &self.hints {
            hints.look(max, now, |name, hint| {
                let namespace = self.namespaces.get(name);
                namespace.is_some_and(|namespace| has_all(&namespace.indexer, hint))
            });
        }
    }

    fn take_hint(
        &self,
        kept: &Hints,
        namespace: &Namespace,
        hint: &Hint,
        now: Instant,
    ) -> Result<bool, WireError> {
        if hint.prompt.positions.is_some() {
            let text = "a hint needs the whole chain; leave out positions";
            return Err(WireError::new(ErrorCode::BadRequest, text));
        }
        let indexer = &namespace.indexer;
        let key = spoken(namespace, &hint.prompt.key)?;
        let mut chain = self.chain(indexer, &key)?;
        let holder = HolderId {
            worker: hint.worker.clone(),
            rank: hint.rank,
        };
        if looks_ahead(indexer, &holder) {
            // The holder's blocks have the hashes of the same prompt that look ahead.
            let key = key_ahead(namespace, &hint.prompt.key);
            if let Some(mut chain) = key.as_deref().and_then(|key| chain_ahead(indexer, key)) {
                return Ok(kept.add(&namespace.name, holder, &mut chain, now));
            }
        }
        Ok(kept.add(&namespace.name, holder, &mut chain, now))
    }

    /// Returns the holders that, according to hints, will soon have more blocks of `chain` than the index shows. Empty
    /// unless the query asks for predictions. Holders that the index does not know are left out.
    pub(super) fn predicted(
        &self,
        namespace: &Namespace,
        options: &QueryOptions,
        chain: &mut QueryChain<'_>,
    ) -> Vec<PredictedHolder> {
        let Some(hints) = self.hints.as_ref().filter(|_| options.predicted) else {
            return Vec::new();
        };
        let mut hinted = hints.find(&namespace.name, chain, Instant::now());
        if let Some(workers) = &options.workers {
            hinted.retain(|(hint, _)| workers.contains(&hint.holder.worker));
        }
        let workers: Vec<WorkerName> = hinted
            .iter()
            .map(|(hint, _)| hint.holder.worker.clone())
            .collect();
        if workers.is_empty() {
            return Vec::new();
        }
        let indexer = &namespace.indexer;
        let registered = indexer.holders_of(&workers);
        let search = Search {
            workers: Some(&workers),
            ..Search::default()
        };
        let known = indexer.find_chain(chain, search);
        let has = |id: &HolderId| {
            let found = known.holders().find(|found| found.holder.id == *id);
            found.map_or(0, |found| found.matched_blocks)
        };
        let predicted = hinted.iter().filter_map(|(hint, blocks)| {
            let (id, blocks) = (&hint.holder, saturating_u32(*blocks));
            let is_registered = registered.iter().any(|holder| holder.id == *id);
            (is_registered && blocks > has(id)).then(|| PredictedHolder {
                worker: id.worker.clone(),
                rank: id.rank,
                blocks,
                address: profile_of(indexer, id).address,
            })
        });
        let mut predicted: Vec<PredictedHolder> = predicted.collect();
        predicted.sort_by(|one, other| one.order().cmp(&other.order()));
        predicted
    }
}

/// Whether the holder's engine looks ahead, that is, hashes each block with the token after it.
fn looks_ahead(indexer: &PositionalIndexer, id: &HolderId) -> bool {
    let ranks = indexer.holders_of(std::slice::from_ref(&id.worker));
    let holder = ranks.iter().find(|holder| holder.id == *id);
    let reasons = holder.map(|holder| holder.status.own_reasons());
    reasons.is_some_and(|reasons| reasons.contains(DegradedReason::LooksAhead))
}

/// Whether the holder of a hint has all blocks of the hint.
fn has_all(indexer: &PositionalIndexer, hint: &KeptHint) -> bool {
    let search = Search {
        workers: Some(std::slice::from_ref(&hint.holder.worker)),
        ..Search::default()
    };
    let found = indexer.find_matches(&hint.prompt, search);
    found.is_ok_and(|found| {
        let has =
            |found: Match<'_>| found.holder.id == hint.holder && found.matched_blocks as usize >= hint.len();
        found.holders().any(has)
    })
}
