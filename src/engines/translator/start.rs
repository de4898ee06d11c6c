//! The start of a stored event: the place in a sequence at which the event's first block stands.

use kvatlas_core::hash::{HashSeed, SequenceHash};
use kvatlas_core::wire::Tier;

use crate::batch::{EngineBatch, EngineStored};
use crate::reason::Reason;

use super::Translator;
use super::block::Block;
use super::groups::GroupLaneId;
use super::settings::HashMode;

/// The place in a sequence at which a stored event's first block stands.
pub(super) struct StoredStart {
    pub(super) parent: Option<SequenceHash>,
    pub(super) position: u32,
    pub(super) seed: HashSeed,
    pub(super) adapter: HashSeed,
}

impl StoredStart {
    /// The place after `block`, where the next block of its sequence goes.
    pub(super) fn behind(block: &Block) -> Self {
        Self {
            parent: Some(block.sequence),
            position: block.position + 1,
            seed: block.seed,
            adapter: block.adapter,
        }
    }

    /// The blocks of a chain of sequence hashes that begins here.
    pub(super) fn blocks<'a>(&self, chain: &'a [SequenceHash]) -> impl Iterator<Item = Block> + use<'a> {
        let Self {
            parent,
            position,
            seed,
            adapter,
        } = *self;
        let mut before = parent;
        (position..).zip(chain).map(move |(position, sequence)| Block {
            sequence: *sequence,
            parent: before.replace(*sequence),
            position,
            seed,
            adapter,
        })
    }
}

impl Translator {
    /// The place of the event's first block.
    pub(super) fn start_of(
        &self,
        batch: &EngineBatch,
        stored: &EngineStored,
        lane: GroupLaneId,
    ) -> Result<StoredStart, Reason> {
        let lora_name = self.lora_name(batch, stored)?;
        let salt = stored.cache_salt.map(|salt| batch.text(salt));
        let own_seed = HashSeed::for_cache(lora_name, salt);
        let adapter = HashSeed::for_cache(lora_name, None);
        let Some(parent) = stored.parent else {
            return match stored.position {
                None | Some(0) => Ok(StoredStart {
                    parent: None,
                    position: 0,
                    seed: own_seed,
                    adapter,
                }),
                Some(_) => Err(Reason::UnknownParent),
            };
        };
        let names = batch.hashes(stored.names);
        if names.contains(&parent) {
            return Err(Reason::SelfParent);
        }
        let known = match stored.tier {
            Tier::DEVICE => self.known_now(lane, parent),
            _ => self.known(lane, parent),
        };
        let start = match (known, self.settings.mode, stored.position) {
            (Some(block), _, _) => StoredStart::behind(&block),
            // The name is the contract's hash of the parent. It stands for the whole prefix, even if the holder lacks
            // the parent.
            (None, HashMode::Trust { .. }, Some(position @ 1..)) => StoredStart {
                parent: Some(SequenceHash::from(parent)),
                position: u32::try_from(position).map_err(|_| Reason::OutOfRange)?,
                seed: own_seed,
                adapter,
            },
            (None, _, _) => return Err(Reason::UnknownParent),
        };
        if start.adapter != adapter {
            return Err(Reason::AdapterConflict);
        }
        if salt.is_some() && start.seed != own_seed {
            return Err(Reason::SaltConflict);
        }
        if stored
            .position
            .is_some_and(|position| position != u64::from(start.position))
        {
            return Err(Reason::Malformed);
        }
        Ok(start)
    }
}
