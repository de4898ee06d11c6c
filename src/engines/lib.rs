//! Translates inference engines' events about their caches into events of kvatlas's wire contract. No I/O, no async, no clock.
//!
//! - [`Decoder`] reads the payloads of vLLM, SGLang, TensorRT-LLM, Dynamo and Mooncake Store into an [`EngineBatch`].
//! - [`Translator`] turns a batch into events of the contract, for one holder. It computes the contract's hashes, remembers
//!   the engine's name for each block, counts copies, and gives the full state for a resync.
//! - [`Mirror`] keeps the blocks on the device, with their tokens, and gives them as events of vLLM, for routers with an
//!   index of their own.
//!
//! A part of a batch that doesn't become an event is counted with a [`Reason`]. Some reasons leave the holder's state in
//! doubt ([`Reason::degrades`]). With the other reasons the index lists fewer blocks than the engine has, by design. The
//! index never lists a block that the engine doesn't have.
//!
//! `deploy/engines.md` lists formats, versions, and the inputs of a block hash.

#[cfg(feature = "translate")]
mod batch;
#[cfg(feature = "translate")]
mod decoder;
#[cfg(feature = "translate")]
pub mod described;
mod facts;
mod format;
#[cfg(feature = "translate")]
mod limits;
#[cfg(feature = "translate")]
mod mirror;
mod reason;
#[cfg(feature = "translate")]
pub mod subscribe;
#[cfg(feature = "translate")]
mod translator;

#[cfg(feature = "translate")]
pub use batch::{
    BlockObject, Component, Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored,
    Envelope, EventNumber, Group, PlacedDoubt, Span, Untold,
};
#[cfg(feature = "translate")]
pub use decoder::{BatchError, Decoder};
pub use facts::{GroupFacts, GroupKind};
pub use format::Format;
#[cfg(feature = "translate")]
pub use limits::DecodeLimits;
#[cfg(feature = "translate")]
pub use mirror::{EventList, Mirror, MirrorOmissions, MirrorSettings, SavedMirror};
pub use reason::{Reason, ReasonCounts};
#[cfg(feature = "translate")]
pub use translator::{
    HashMode, NamedBlocks, SavedError, SavedTranslator, Translation, TranslationPart, Translator,
    TranslatorSettings, content_hashes,
};
