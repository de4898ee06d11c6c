//! The layers of kvatlas that know no tokio, from the sources of the product: see the manifest for why.

#[path = "../../../../src/hash/mod.rs"]
pub mod hash;
#[path = "../../../../src/index/mod.rs"]
pub mod index;
#[path = "../../../../src/tracking/mod.rs"]
pub mod tracking;
#[path = "../../../../src/trie/mod.rs"]
pub mod trie;
#[path = "../../../../src/vocabulary/mod.rs"]
pub mod vocabulary;
#[path = "../../../../src/wire/mod.rs"]
pub mod wire;
