//! Events of engines about their caches, in the contract's words: no I/O, no async, no clock.
//!
//! - [`Decoder`] reads the payloads of vLLM, SGLang, TensorRT-LLM, Dynamo and Mooncake Store into an [`EngineBatch`].
//! - [`Translator`] turns it into events of the contract, for one holder. It computes the contract's hashes, knows what the
//!   engine calls each block, counts copies, and gives the full state for a resync.
//! - [`Mirror`] keeps what is on the device with its tokens, and gives it as events of vLLM, for routers with an index of their own.
//!
//! What of a batch doesn't become an event is counted with a [`Reason`]. Some reasons leave the holder's state in doubt
//! ([`Reason::degrades`]); with the others the index knows less than the engine has, by design. It never knows more.
//!
//! `deploy/engines.md` lists formats, versions and what enters a block hash.

mod batch;
mod decoder;
pub mod described;
mod limits;
mod mirror;
mod reason;
pub mod subscribe;
mod translator;

pub use batch::{
    BlockObject, Component, Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored,
    Envelope, EventNumber, Group, GroupKind, PlacedDoubt, Span, Untold,
};
pub use decoder::{BatchError, Decoder, Format};
pub use limits::DecodeLimits;
pub use mirror::{EventList, Mirror, MirrorOmissions, MirrorSettings};
pub use reason::{Reason, ReasonCounts};
pub use translator::{
    GroupFacts, HashMode, SavedError, SavedTranslator, Translation, TranslationPart, Translator,
    TranslatorSettings, content_hashes,
};
