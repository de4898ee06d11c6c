//! Errors in a payload, and the mapping from these errors to error replies.

use crate::hash::{LineageError, Position, PositionError};
use crate::worded;

use super::profile::ProfileError;
use super::subject::NameError;
use super::subject::SubjectError;

/// Header that carries the text of an error reply (NATS micro convention).
pub const ERROR_HEADER: &str = "Nats-Service-Error";
/// Header that carries the number of an error reply (NATS micro convention).
pub const ERROR_CODE_HEADER: &str = "Nats-Service-Error-Code";

/// Reason why a payload could not be decoded. Offsets are bytes from the start of the payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The payload is longer than allowed. No part of it was read.
    #[error("the payload has {bytes} bytes; at most {max} are allowed, split it")]
    Oversized {
        /// Length of the payload, in bytes.
        bytes: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
    /// The payload ends inside a value.
    #[error("the payload ends inside a value at byte {offset}; send the whole MessagePack map")]
    Truncated {
        /// Offset at which bytes are missing: reading needed more bytes there than are left.
        offset: usize,
    },
    /// More bytes follow after the map.
    #[error("bytes follow the MessagePack map at byte {offset}; send one map and nothing else")]
    TrailingBytes {
        /// Offset of the first surplus byte.
        offset: usize,
    },
    /// The payload has a byte that is reserved in MessagePack.
    #[error("byte {offset} is not MessagePack")]
    Reserved {
        /// Offset of the byte.
        offset: usize,
    },
    /// The type of a value is not the type of its field.
    #[error("{field} is {found}; send {expected}")]
    WrongType {
        /// Key of the field.
        field: &'static str,
        /// Type of the field.
        expected: &'static str,
        /// Type of the value in the payload.
        found: &'static str,
    },
    /// A number is larger than its field allows.
    #[error("{field} is {value}; at most {max} is allowed")]
    OutOfRange {
        /// Key of the field.
        field: &'static str,
        /// Number in the payload.
        value: u64,
        /// Maximum value of the field.
        max: u64,
    },
    /// A list is longer than allowed.
    #[error("{field} has {count} elements; at most {max} are allowed")]
    TooLong {
        /// Key of the field.
        field: &'static str,
        /// Number of elements that the payload gives for the list.
        count: usize,
        /// Maximum number of elements.
        max: usize,
    },
    /// A text is longer than allowed.
    #[error("{field} has {bytes} bytes; at most {max} are allowed")]
    TextTooLong {
        /// Key of the field.
        field: &'static str,
        /// Length of the text, in bytes.
        bytes: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
    /// A blob's length is not a multiple of the length of an element.
    #[error("{field} has {bytes} bytes, which is not a multiple of {element}")]
    RaggedBlob {
        /// Key of the field.
        field: &'static str,
        /// Length of the blob, in bytes.
        bytes: usize,
        /// Width of an element, in bytes.
        element: usize,
    },
    /// A text is not UTF-8.
    #[error("{field} is not UTF-8")]
    NotUtf8 {
        /// The field's key.
        field: &'static str,
    },
    /// A field that the payload must have is absent.
    #[error("{field} is missing")]
    Missing {
        /// The field's key.
        field: &'static str,
    },
    /// A field was sent twice.
    #[error("{field} was sent twice")]
    Repeated {
        /// The field's key.
        field: &'static str,
    },
    /// Two fields exclude or require each other. The text tells which fields.
    #[error("{0}")]
    Combination(&'static str),
    /// A list has more or fewer elements than the event has blocks.
    #[error("{field} has {count} elements for {blocks} blocks")]
    LengthMismatch {
        /// The field's key.
        field: &'static str,
        /// Number of elements in the field.
        count: usize,
        /// Number of blocks of the event.
        blocks: usize,
    },
    /// The payload has another version of the contract.
    #[error("version {version} of the contract is not spoken here; send v = 1")]
    UnsupportedVersion {
        /// Version of the payload.
        version: u64,
    },
    /// A field has a word that is not one of the known words.
    #[error("{field} is not one of {expected}")]
    UnknownWord {
        /// Key of the field.
        field: &'static str,
        /// Words that the field can have.
        expected: &'static str,
    },
    /// A name that cannot be a subject token.
    #[error("{field}: {source}")]
    Name {
        /// The field's key.
        field: &'static str,
        /// Reason why the name is not valid.
        source: NameError,
    },
    /// A position above the maximum of lineage hashes.
    #[error(transparent)]
    Position(#[from] PositionError),
    /// A number that cannot be the lineage hash of any block.
    #[error("{field}: {source}")]
    Lineage {
        /// The field's key.
        field: &'static str,
        /// Reason why the hash is not valid.
        source: LineageError,
    },
    /// The lineage hashes of a query do not form one chain that starts at position 0.
    #[error(
        "lineage_hashes[{index}] is not the child of the one before it; send one chain that starts at position 0"
    )]
    BrokenChain {
        /// Index of the first hash that does not continue the chain.
        index: usize,
    },
    /// The positions of a compressed chain do not fit its hashes.
    #[error(transparent)]
    Positions(#[from] PositionsError),
    /// An address or labels that cannot be used.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// One of several queries of a request cannot be decoded.
    #[error("queries[{index}]: {source}")]
    InQuery {
        /// Index of the query.
        index: usize,
        /// Error in the query.
        source: Box<DecodeError>,
    },
}

impl DecodeError {
    /// Returns a function that makes an error in the query `index` of a request from an error in a query.
    pub(super) fn in_query(index: usize) -> impl FnOnce(Self) -> Self {
        move |error| Self::InQuery {
            index,
            source: Box::new(error),
        }
    }

    /// Returns the number of the error reply.
    fn code(&self) -> ErrorCode {
        match self {
            Self::Oversized { .. } | Self::TooLong { .. } | Self::TextTooLong { .. } => ErrorCode::TooLarge,
            Self::UnsupportedVersion { .. } => ErrorCode::UnsupportedVersion,
            Self::InQuery { source, .. } => source.code(),
            _ => ErrorCode::BadRequest,
        }
    }
}

/// Reason why the positions of a compressed chain do not fit its hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PositionsError {
    /// The query has positions together with tokens or block hashes. Tokens and block hashes always start at position
    /// 0, so positions cannot be given with them.
    #[error("positions belong to sequence_hashes or lineage_hashes; leave them out, or send one of these")]
    NeedChain,
    /// The list of positions is empty.
    #[error("positions is empty; name at least one, or leave it out to send the whole chain")]
    Empty,
    /// The number of positions is not the number of hashes.
    #[error("positions has {positions} elements for {hashes} hashes; send one a hash")]
    LengthMismatch {
        /// Number of positions in the query.
        positions: usize,
        /// Number of hashes in the query.
        hashes: usize,
    },
    /// A position is not above the previous position.
    #[error("positions[{index}] is not above the one before it; send them in ascending order, each once")]
    NotAscending {
        /// Index of the first position that is not above the previous one.
        index: usize,
    },
    /// The position in a lineage hash differs from the position that the query gives for this hash.
    #[error("lineage_hashes[{index}] is at position {found}, not at positions[{index}]; correct one of them")]
    OtherPosition {
        /// Index of the first hash with the wrong position.
        index: usize,
        /// Position in the lineage hash.
        found: Position,
    },
    /// Two hashes at consecutive positions are not parent and child.
    #[error("lineage_hashes[{index}] is not the child of the one before it; send blocks of one chain")]
    BrokenChain {
        /// Index of the first hash that does not continue the chain.
        index: usize,
    },
    /// A position above the maximum of lineage hashes.
    #[error(transparent)]
    OutOfRange(#[from] PositionError),
}

worded! {
    /// The numbers of error replies, modelled on HTTP. They are part of the contract and never change meaning.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(u16)]
    pub enum ErrorCode {
        /// The request cannot be decoded or contradicts itself.
        BadRequest = 400 => "bad_request",
        /// No worker of this namespace has sent anything, and the configuration does not name the namespace.
        UnknownNamespace = 404 => "unknown_namespace",
        /// The request, or the reply to it, exceeds a limit.
        TooLarge = 413 => "too_large",
        /// More large requests wait on the connection than are allowed. The client should ask again later, or ask for
        /// less.
        TooManyRequests = 429 => "too_many_requests",
        /// The daemon is starting or draining, or drops the namespace's events. The client should ask again, or ask
        /// another replica.
        Unavailable = 503 => "unavailable",
        /// The request has another version of the contract.
        UnsupportedVersion = 505 => "unsupported_version",
    }
}

impl ErrorCode {
    /// Returns the number of the error on the wire.
    pub fn as_u16(self) -> u16 {
        self as u16
    }
}

/// An error as a client receives it: a number, and a text that tells the client what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} (error {})", code.as_u16())]
pub struct WireError {
    /// The number of the error reply.
    pub code: ErrorCode,
    /// Text that tells the client what to change.
    pub text: String,
}

impl WireError {
    /// Makes an error with `code` and `text`.
    pub fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }
}

impl From<DecodeError> for WireError {
    fn from(error: DecodeError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}

impl From<SubjectError> for WireError {
    fn from(error: SubjectError) -> Self {
        Self::new(ErrorCode::BadRequest, error.to_string())
    }
}
