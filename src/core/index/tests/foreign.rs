//! Foreign hashes: hashes that are not the contract's chain. Namespaces keyed by the engine's hashes notice foreign
//! hashes. Namespaces that recompute hashes refuse events whose hashes they cannot recompute.

use crate::hash::{BlockHash, BlockSize, SequenceHash};
use crate::wire::{BlockContent, Event, HolderId, NamespaceName, QueryKey, StoredBlocks, Tier, WorkerName};

use super::api::{
    Applied, Capacity, Hashing, HolderWriter, IndexLimits, NamespaceSettings, Namespaces, PositionalIndexer,
    RejectReason, Search,
};
use super::world::{BLOCK_SIZE, block_hash_of, next_hash, tokens_of};

const SYMBOLS: [u32; 4] = [1, 2, 3, 4];

fn new_holder(hashing: Hashing) -> (PositionalIndexer, HolderWriter) {
    let settings = NamespaceSettings {
        block_size: BlockSize::new(BLOCK_SIZE).unwrap(),
        hashing,
        ..NamespaceSettings::default()
    };
    let index = PositionalIndexer::new(settings, IndexLimits::default());
    let worker = WorkerName::new("w").unwrap();
    let writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
    (index, writer)
}

fn block_hashes() -> Vec<BlockHash> {
    SYMBOLS.map(|symbol| BlockHash(block_hash_of(symbol))).to_vec()
}

fn tokens() -> BlockContent {
    BlockContent::Tokens {
        tokens: SYMBOLS.iter().flat_map(|symbol| tokens_of(*symbol)).collect(),
        lora_name: None,
        cache_salt: None,
    }
}

fn true_chain() -> Vec<u64> {
    let mut chain: Vec<u64> = Vec::new();
    for block in block_hashes() {
        chain.push(next_hash(chain.last().copied(), block.as_u64()));
    }
    chain
}

fn store(
    writer: &mut HolderWriter,
    parent: Option<u64>,
    chain: &[u64],
    content: Option<BlockContent>,
) -> Applied {
    let hashes = chain.iter().copied().map(SequenceHash).collect();
    let mut stored = StoredBlocks::by_sequence(parent.map(SequenceHash), None, hashes);
    stored.content = content;
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0)
}

fn matched(index: &PositionalIndexer, query: &QueryKey) -> u32 {
    let matches = index.find_matches(query, Search::default()).unwrap();
    matches.holders().map(|found| found.matched_blocks).sum()
}

#[test]
fn the_contracts_own_chain_is_not_foreign() {
    let chain = true_chain();
    for content in [tokens(), BlockContent::BlockHashes(block_hashes())] {
        let (index, mut writer) = new_holder(Hashing::Engine);
        let applied = store(&mut writer, None, &chain, Some(content));
        assert_eq!(applied.rejected(RejectReason::ForeignChain), 0);
        // The next block comes in an event of its own. Its parent is known from the first event.
        let next = next_hash(Some(chain[3]), 5);
        let content = BlockContent::BlockHashes(vec![BlockHash(5)]);
        let applied = store(&mut writer, Some(chain[3]), &[next], Some(content));
        assert_eq!(applied.rejected(RejectReason::ForeignChain), 0);
        assert_eq!(
            (index.foreign_holders(), writer.status().has_foreign_chain.load()),
            (0, false)
        );
    }
}

#[test]
fn a_foreign_chain_is_reported_until_the_holder_is_cleared() {
    let foreign = [11, 22, 33, 44];
    for content in [tokens(), BlockContent::BlockHashes(block_hashes())] {
        let (index, mut writer) = new_holder(Hashing::Engine);
        let applied = store(&mut writer, None, &foreign, Some(content));
        assert_eq!(
            (applied.stored, applied.rejected(RejectReason::ForeignChain)),
            (4, 4)
        );
        assert_eq!((index.foreign_holders(), index.sizes().foreign_holders), (1, 1));
        assert!(writer.status().has_foreign_chain.load());
        // The blocks are found by the engine's own hashes, but not by their content.
        let own = QueryKey::SequenceHashes(foreign.map(SequenceHash).to_vec());
        assert_eq!(matched(&index, &own), 4);
        assert_eq!(matched(&index, &QueryKey::BlockHashes(block_hashes())), 0);
        writer.apply(Event::Cleared, Tier::DEVICE, 0);
        assert_eq!(
            (index.foreign_holders(), writer.status().has_foreign_chain.load()),
            (0, false)
        );
    }
}

#[test]
fn a_foreign_holder_that_leaves_is_not_counted_any_more() {
    let (index, mut writer) = new_holder(Hashing::Engine);
    store(&mut writer, None, &[11, 22, 33, 44], Some(tokens()));
    assert_eq!(index.foreign_holders(), 1);
    writer.retire();
    assert_eq!(index.foreign_holders(), 0);
}

#[test]
fn a_schemes_hashes_are_not_compared_with_the_contracts_chain() {
    let (settings, limits) = (NamespaceSettings::default(), IndexLimits::default());
    let namespaces = Namespaces::new(Capacity::UNBOUNDED, settings, [], limits, 4);
    let name = NamespaceName::new("m_sllm-d-xxh64").unwrap();
    let namespace = namespaces
        .get_or_create(&name, BlockSize::new(BLOCK_SIZE).ok())
        .unwrap();
    let worker = WorkerName::new("w").unwrap();
    let mut writer = namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap();
    let applied = store(&mut writer, None, &[11, 22, 33, 44], Some(tokens()));
    assert_eq!(
        (applied.stored, applied.rejected(RejectReason::ForeignChain)),
        (4, 0)
    );
    assert_eq!(namespace.indexer.foreign_holders(), 0);
}

#[test]
fn opaque_names_are_recomputed() {
    let (index, mut writer) = new_holder(Hashing::Recompute);
    let applied = store(&mut writer, None, &[11, 22, 33, 44], Some(tokens()));
    assert_eq!(applied.stored, 4);
    assert_eq!(index.foreign_holders(), 0);
    let query = QueryKey::SequenceHashes(true_chain().into_iter().map(SequenceHash).collect());
    assert_eq!(matched(&index, &query), 4);
    assert_eq!(matched(&index, &QueryKey::BlockHashes(block_hashes())), 4);
    let names = QueryKey::SequenceHashes([11, 22, 33, 44].map(SequenceHash).to_vec());
    assert_eq!(matched(&index, &names), 0);
}

#[test]
fn what_cannot_be_recomputed_is_refused() {
    let (_index, mut writer) = new_holder(Hashing::Recompute);
    let applied = store(&mut writer, None, &[11, 22], None);
    assert_eq!(
        (applied.stored, applied.rejected(RejectReason::MissingContent)),
        (0, 2)
    );
    // The content is for another number of blocks than the event has.
    for content in [tokens(), BlockContent::BlockHashes(block_hashes())] {
        let applied = store(&mut writer, None, &[11, 22], Some(content));
        assert_eq!(
            (applied.stored, applied.rejected(RejectReason::ContentMismatch)),
            (0, 2)
        );
    }
}

#[test]
fn adapters_and_salts_keep_caches_apart() {
    let (index, mut writer) = new_holder(Hashing::Recompute);
    let content = |lora_name: Option<&str>, cache_salt: Option<&str>| BlockContent::Tokens {
        tokens: tokens_of(1),
        lora_name: lora_name.map(str::to_owned),
        cache_salt: cache_salt.map(str::to_owned),
    };
    let variants = [
        (None, None),
        (Some("a"), None),
        (None, Some("a")),
        (Some("a"), Some("a")),
    ];
    for (name, (lora_name, cache_salt)) in (1..).zip(variants) {
        store(&mut writer, None, &[name], Some(content(lora_name, cache_salt)));
        assert_eq!(index.sizes().distinct_blocks, name);
        let query = QueryKey::Tokens {
            tokens: tokens_of(1),
            lora_name: lora_name.map(str::to_owned),
            cache_salt: cache_salt.map(str::to_owned),
        };
        assert_eq!(matched(&index, &query), 1);
    }
}
