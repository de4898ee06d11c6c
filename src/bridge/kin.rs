//! Kin: engines of one bridge that give equal blocks equal names. They tell each other the meaning of names that they
//! have lost.
//!
//! vLLM and SGLang name a block by a hash of its whole prefix: its tokens, and everything else that distinguishes it
//! from other blocks. Engines with another hash seed use other names, so they cannot help each other. From another
//! engine, the bridge learns only what a name means. It never learns from one engine which blocks another engine holds.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::NamespaceName;
use kvatlas_engines::NamedBlocks;

use super::relay::SharedBlocks;

/// Key of a clan: a namespace and a block size. The engines of one clan have the same contract hashes for the same
/// blocks.
pub(super) type Clan = (NamespaceName, BlockSize);

/// All engines of a bridge, grouped by [`Clan`]. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Kin {
    members: Arc<Mutex<HashMap<Clan, Vec<Weak<SharedBlocks>>>>>,
}

impl Kin {
    /// Adds an engine to its clan, the engines with the same namespace and block size. The engine is removed once nothing else
    /// refers to `blocks`.
    pub(super) fn join(&self, clan: Clan, blocks: &Arc<SharedBlocks>) -> Member {
        let mut members = self.members.lock();
        members.retain(|_, clan| {
            clan.retain(|member| member.strong_count() > 0);
            !clan.is_empty()
        });
        members
            .entry(clan.clone())
            .or_default()
            .push(Arc::downgrade(blocks));
        drop(members);
        Member {
            kin: self.clone(),
            clan,
        }
    }
}

/// Membership of one engine in its [`Clan`], through which it asks the other members what block names mean.
pub(super) struct Member {
    kin: Kin,
    clan: Clan,
}

impl Member {
    /// Asks the other engines which blocks `names` stand for. The caller must not hold a lock on the engine's own blocks,
    /// because two engines may ask each other at the same time.
    pub(super) async fn ask(&self, own: &Arc<SharedBlocks>, mut names: Vec<u64>) -> Vec<NamedBlocks> {
        let others: Vec<_> = {
            let members = self.kin.members.lock();
            let others = members.get(&self.clan).into_iter().flatten();
            others.filter_map(Weak::upgrade).collect()
        };
        let mut known = Vec::new();
        for other in others.iter().filter(|other| !Arc::ptr_eq(other, own)) {
            if names.is_empty() {
                break;
            }
            let blocks = other.lock().await;
            names.retain(|name| match blocks.translator().named_prefix(*name) {
                Some(prefix) => {
                    known.push(prefix);
                    false
                }
                None => true,
            });
        }
        known
    }
}
