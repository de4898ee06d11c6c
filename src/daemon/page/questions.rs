//! The parameters of the page's requests.

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::wire::NamespaceName;
use serde::Deserialize;

use super::atlas::Lens;

/// Parameters of a request for atlases.
#[derive(Debug, Deserialize)]
pub(super) struct AtlasQuestion {
    pub(super) namespace: NamespaceName,
    /// How an atlas weighs prefixes.
    pub(super) lens: Lens,
}

/// Parameters of a request to explain a node of an atlas.
#[derive(Debug, Deserialize)]
pub(super) struct NodeQuestion {
    pub(super) namespace: NamespaceName,
    pub(super) lens: Lens,
    /// The last block of the node.
    pub(super) block: PositionalLineageHash,
}

/// Parameters of a request from the page's query box.
#[derive(Debug, Deserialize)]
pub(super) struct BoxQuestion {
    pub(super) namespace: NamespaceName,
    /// The query, as JSON.
    pub(super) query: String,
}
