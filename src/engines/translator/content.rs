//! Sequence hashes of an event's blocks. They are computed from the blocks' content, or taken from the engine's names of the
//! blocks.

use kvatlas_core::hash::{
    BlockHash, BlockSize, HashSeed, SchemeChains, SchemeSteps, SequenceHash, block_hash, block_hash_with,
    next_sequence_hash,
};

use crate::batch::{BlockObject, Content, EngineBatch, EngineStored};
use crate::reason::Reason;

/// Computes and keeps the sequence hashes of one event at a time.
#[derive(Debug, Default)]
pub(super) struct Contents {
    chain: Vec<SequenceHash>,
}

impl Contents {
    /// The sequence hashes of the blocks of the event that was computed or taken last.
    pub(super) fn chain(&self) -> &[SequenceHash] {
        &self.chain
    }

    /// Computes the sequence hashes of the first `count` blocks from the event's content.
    pub(super) fn compute(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        parent: Option<SequenceHash>,
        seed: HashSeed,
        count: usize,
    ) -> Result<(), Reason> {
        self.chain.clear();
        self.chain.reserve(count);
        let mut before = parent;
        let mut blocks = BlockHashes::new(batch, stored, seed)?;
        for _ in 0..count {
            let hash = next_sequence_hash(before, blocks.next().ok_or(Reason::TokenCount)?);
            self.chain.push(hash);
            before = Some(hash);
        }
        Ok(())
    }

    /// Computes the sequence hashes of the first `count` blocks with the steps of a hash scheme. The chain of hashes
    /// continues from `before`. `salt` enters the first block's hash.
    pub(super) fn compute_in(
        &mut self,
        chains: SchemeSteps<'_>,
        batch: &EngineBatch,
        stored: &EngineStored,
        (before, salt): (SequenceHash, Option<&str>),
        count: usize,
    ) -> Result<(), Reason> {
        let (tokens, step) = match stored.content {
            Content::Tokens { tokens, step, .. } => (batch.tokens(tokens), step),
            Content::BlockHashes(_) | Content::Absent => return Err(Reason::NoContent),
            Content::Misfit => return Err(Reason::TokenCount),
        };
        self.chain.clear();
        self.chain.reserve(count);
        let objects = batch.objects(stored.objects).iter();
        let mut objects = objects.zip(batch.identifiers(stored.objects)).peekable();
        let (mut last, mut extras) = (before, Vec::new());
        for place in 0..count {
            let start = place.saturating_mul(step);
            let tokens = tokens.get(start..start.saturating_add(step));
            let is_own = |(object, _): &(&BlockObject, &str)| object.block as usize == place;
            while let Some((_, identifier)) = objects.next_if(is_own) {
                extras.push(identifier);
            }
            extras.extend(salt.filter(|salt| place == 0 && !salt.is_empty()));
            last = chains.next(last, tokens.ok_or(Reason::TokenCount)?, &extras);
            extras.clear();
            self.chain.push(last);
        }
        Ok(())
    }

    /// Takes the engine's names of the event's `count` blocks as their sequence hashes. The names must be hashes of
    /// the hash scheme `chains` (see [`SchemeChains`]).
    ///
    /// If `begins` tells that the blocks begin a sequence, also computes the hashes from the tokens and compares them
    /// with the names. Blocks with an adapter, an image or prompt embeddings are not compared.
    ///
    /// # Errors
    ///
    /// The reason why the caller has to leave the event out: [`Reason::ForeignChain`] if a name differs from the
    /// computed hash, and another reason if the tokens don't fit or the number of names is not `count`.
    pub(super) fn take_in(
        &mut self,
        chains: &SchemeChains,
        batch: &EngineBatch,
        stored: &EngineStored,
        begins: bool,
        count: usize,
    ) -> Result<(), Reason> {
        let names = batch.hashes(stored.names);
        if names.len() != count {
            // Each name stands for a chunk of several blocks.
            return Err(Reason::BlockSize);
        }
        self.take_names(names);
        let (tokens, step, window) = match stored.content {
            Content::Tokens { tokens, step, window } => (batch.tokens(tokens), step, window),
            Content::BlockHashes(_) | Content::Absent => return Err(Reason::NoContent),
            Content::Misfit => return Err(Reason::TokenCount),
        };
        // It is not documented how blocks with an adapter or an image are hashed.
        let is_adapters = stored.lora_name.is_some() || stored.lora_id.is_some_and(|number| number > 0);
        if !begins || is_adapters || !batch.objects(stored.objects).is_empty() {
            return Ok(());
        }
        let size = u32::try_from(step)
            .ok()
            .and_then(|step| BlockSize::new(step).ok());
        let size = size.ok_or(Reason::TokenCount)?;
        let salt = stored.cache_salt.map(|salt| batch.text(salt));
        let computed = match window > step {
            true => chains.hashes_ahead(tokens, size, salt).unwrap_or_default(),
            false => chains.sequence_hashes(tokens, size, None, salt),
        };
        match computed == self.chain {
            true => Ok(()),
            false => Err(Reason::ForeignChain),
        }
    }

    /// Takes the engine's names of the blocks as their sequence hashes.
    pub(super) fn take_names(&mut self, names: &[u64]) {
        self.chain.clear();
        self.chain.extend(names.iter().copied().map(SequenceHash::from));
    }

    /// Checks a sample of the blocks, whose names should be hashes of their content: computes the hash of one block
    /// in every `sample`, and compares it with the name. `unchecked` counts the blocks since the last checked one. If
    /// `sample` is 0 or the event has no content, checks no block.
    pub(super) fn check(
        &self,
        batch: &EngineBatch,
        stored: &EngineStored,
        parent: Option<SequenceHash>,
        seed: HashSeed,
        sample: u32,
        unchecked: &mut u32,
    ) -> Result<(), Reason> {
        if stored.content == Content::Misfit {
            return Err(Reason::TokenCount);
        }
        if sample == 0 || stored.content == Content::Absent {
            return Ok(());
        }
        let mut before = parent;
        let mut blocks = BlockHashes::new(batch, stored, seed)?;
        for claimed in &self.chain {
            *unchecked += 1;
            if *unchecked >= sample {
                *unchecked = 0;
                let content = blocks.next().ok_or(Reason::TokenCount)?;
                if next_sequence_hash(before, content) != *claimed {
                    return Err(Reason::ForeignChain);
                }
            } else {
                blocks.pass();
            }
            before = Some(*claimed);
        }
        Ok(())
    }
}

/// Returns the block hash of each block of a stored event, computed with `seed`. The seed stands for the adapter and the
/// salt.
///
/// # Errors
///
/// The [`Reason`] why the event's content gives no block hashes.
pub fn content_hashes(
    batch: &EngineBatch,
    stored: &EngineStored,
    seed: HashSeed,
) -> Result<Vec<BlockHash>, Reason> {
    let mut blocks = BlockHashes::new(batch, stored, seed)?;
    let next = |_| blocks.next().ok_or(Reason::TokenCount);
    (0..stored.names.len()).map(next).collect()
}

/// Computes the block hashes of one event, block by block.
struct BlockHashes<'a> {
    source: BlockHashSource<'a>,
    objects: &'a [BlockObject],
    block: u32,
    seed: HashSeed,
}

enum BlockHashSource<'a> {
    Tokens {
        tokens: &'a [u32],
        step: usize,
        window: usize,
    },
    Hashes(&'a [u64]),
}

impl<'a> BlockHashes<'a> {
    fn new(batch: &'a EngineBatch, stored: &EngineStored, seed: HashSeed) -> Result<Self, Reason> {
        let source = match stored.content {
            Content::Tokens { tokens, step, window } => BlockHashSource::Tokens {
                tokens: batch.tokens(tokens),
                step,
                window,
            },
            Content::BlockHashes(hashes) => BlockHashSource::Hashes(batch.hashes(hashes)),
            Content::Absent => return Err(Reason::NoContent),
            Content::Misfit => return Err(Reason::TokenCount),
        };
        Ok(Self {
            source,
            objects: batch.objects(stored.objects),
            block: 0,
            seed,
        })
    }

    /// Returns the multimodal objects of the current block, and goes on to the next block.
    fn take_objects(&mut self) -> &'a [BlockObject] {
        let count = self
            .objects
            .iter()
            .take_while(|object| object.block == self.block)
            .count();
        let (own, rest) = self.objects.split_at(count);
        self.objects = rest;
        self.block += 1;
        own
    }

    /// Skips the current block without computing its hash.
    fn pass(&mut self) {
        self.take_objects();
    }

    fn next(&mut self) -> Option<BlockHash> {
        let place = self.block as usize;
        let own = self.take_objects();
        match &self.source {
            BlockHashSource::Hashes(hashes) => hashes.get(place).copied().map(BlockHash::from),
            BlockHashSource::Tokens { tokens, step, window } => {
                let start = place * step;
                let tokens = tokens.get(start..start + window)?;
                if own.is_empty() {
                    return Some(block_hash(tokens, self.seed));
                }
                let objects = own.iter().map(|object| object.hash);
                Some(block_hash_with(tokens, objects, self.seed))
            }
        }
    }
}
