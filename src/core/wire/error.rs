//! The errors of a payload, and the mapping from errors to error replies.

use crate::hash::{LineageError, Position, PositionError};
use crate::worded;

use super::profile::ProfileError;
use super::subject::NameError;
use super::subject::SubjectError;

/// Header that carries the text of an error reply (NATS micro convention).
pub const ERROR_HEADER: &str = "Nats-Service-Error";
/// Header that carries the number of an error reply (NATS micro convention).
pub const ERROR_CODE_HEADER: &str = "Nats-Service-Error-Code";

/// Why a payload could not be decoded. Offsets are bytes from the start of the payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The payload is longer than allowed. Nothing of it was read.
    #[error("the payload has {bytes} bytes; at most {max} are allowed, split it")]
    Oversized {
        /// Length of the payload.
        bytes: usize,
        /// The most bytes allowed.
        max: usize,
    },
    /// The payload ends inside a value.
    #[error("the payload ends inside a value at byte {offset}; send the whole MessagePack map")]
    Truncated {
        /// The offset from which bytes are missing: where reading needed more bytes than are left.
        offset: usize,
    },
    /// Bytes follow the map.
    #[error("bytes follow the MessagePack map at byte {offset}; send one map and nothing else")]
    TrailingBytes {
        /// The offset at which the surplus bytes begin.
        offset: usize,
    },
    /// The payload has a byte that MessagePack reserves.
    #[error("byte {offset} is not MessagePack")]
    Reserved {
        /// The offset of the byte.
        offset: usize,
    },
    /// A value has another type than its field.
    #[error("{field} is {found}; send {expected}")]
    WrongType {
        /// The field's key.
        field: &'static str,
        /// The type that the field takes.
        expected: &'static str,
        /// The type that was sent.
        found: &'static str,
    },
    /// A number is larger than its field allows.
    #[error("{field} is {value}; at most {max} is allowed")]
    OutOfRange {
        /// The field's key.
        field: &'static str,
        /// The number that was sent.
        value: u64,
        /// The largest value allowed.
        max: u64,
    },
    /// A list is longer than allowed.
    #[error("{field} has {count} elements; at most {max} are allowed")]
    TooLong {
        /// The field's key.
        field: &'static str,
        /// Number of elements that the payload announces.
        count: usize,
        /// The most elements allowed.
        max: usize,
    },
    /// A text is longer than allowed.
    #[error("{field} has {bytes} bytes; at most {max} are allowed")]
    TextTooLong {
        /// The field's key.
        field: &'static str,
        /// Length of the text.
        bytes: usize,
        /// The most bytes allowed.
        max: usize,
    },
    /// A blob's length is not a multiple of the length of an element.
    #[error("{field} has {bytes} bytes, which is not a multiple of {element}")]
    RaggedBlob {
        /// The field's key.
        field: &'static str,
        /// Length of the blob.
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
    /// Fields exclude or require each other. The text tells which.
    #[error("{0}")]
    Combination(&'static str),
    /// A list does not have the length that the number of blocks demands.
    #[error("{field} has {count} elements for {blocks} blocks")]
    LengthMismatch {
        /// The field's key.
        field: &'static str,
        /// Elements in the field.
        count: usize,
        /// Blocks of the event.
        blocks: usize,
    },
    /// The payload has another version of the contract.
    #[error("version {version} of the contract is not spoken here; send v = 1")]
    UnsupportedVersion {
        /// The version sent.
        version: u64,
    },
    /// A field has a word that is not one of the known words.
    #[error("{field} is not one of {expected}")]
    UnknownWord {
        /// The field's key.
        field: &'static str,
        /// The known words.
        expected: &'static str,
    },
    /// A name that cannot be a subject token.
    #[error("{field}: {source}")]
    Name {
        /// The field's key.
        field: &'static str,
        /// The error in the name.
        source: NameError,
    },
    /// A position that lineage hashes cannot carry.
    #[error(transparent)]
    Position(#[from] PositionError),
    /// A lineage hash that no block can have.
    #[error("{field}: {source}")]
    Lineage {
        /// The field's key.
        field: &'static str,
        /// The error in the hash.
        source: LineageError,
    },
    /// The lineage hashes of a query are not one chain that starts at position 0.
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
}

/// Why positions do not fit the hashes beside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PositionsError {
    /// The query is by tokens or block hashes, which need the whole prefix.
    #[error("positions belong to sequence_hashes or lineage_hashes; leave them out, or send one of these")]
    NeedChain,
    /// The list of positions is empty.
    #[error("positions is empty; name at least one, or leave it out to send the whole chain")]
    Empty,
    /// The number of positions is not the number of hashes.
    #[error("positions has {positions} elements for {hashes} hashes; send one a hash")]
    LengthMismatch {
        /// Positions sent.
        positions: usize,
        /// Hashes sent.
        hashes: usize,
    },
    /// A position does not come after the one before it.
    #[error("positions[{index}] is not above the one before it; send them in ascending order, each once")]
    NotAscending {
        /// Index of the first such position.
        index: usize,
    },
    /// A lineage hash has another position.
    #[error("lineage_hashes[{index}] is at position {found}, not at positions[{index}]; correct one of them")]
    OtherPosition {
        /// Index of the first hash that does not agree.
        index: usize,
        /// The position in the hash.
        found: Position,
    },
    /// Neighbours in the list are not parent and child.
    #[error("lineage_hashes[{index}] is not the child of the one before it; send blocks of one chain")]
    BrokenChain {
        /// Index of the first hash that does not continue the chain.
        index: usize,
    },
    /// A position beyond what lineage hashes can carry.
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
        /// No worker of this namespace has been heard of, and the configuration does not name it.
        UnknownNamespace = 404 => "unknown_namespace",
        /// The request, or the reply to it, exceeds a limit.
        TooLarge = 413 => "too_large",
        /// More large requests wait on the connection than are allowed. Ask again later, or for less at once.
        TooManyRequests = 429 => "too_many_requests",
        /// The daemon is starting or draining, or drops the namespace's events. Ask again or ask another replica.
        Unavailable = 503 => "unavailable",
        /// The request has another version of the contract.
        UnsupportedVersion = 505 => "unsupported_version",
    }
}

impl ErrorCode {
    /// The number on the wire.
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
    /// The text, which tells the client what to change.
    pub text: String,
}

impl WireError {
    /// An error with `code` and `text`.
    pub fn new(code: ErrorCode, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }
}

impl From<DecodeError> for WireError {
    fn from(error: DecodeError) -> Self {
        let code = match &error {
            DecodeError::Oversized { .. } | DecodeError::TooLong { .. } | DecodeError::TextTooLong { .. } => {
                ErrorCode::TooLarge
            }
            DecodeError::UnsupportedVersion { .. } => ErrorCode::UnsupportedVersion,
            _ => ErrorCode::BadRequest,
        };
        Self::new(code, error.to_string())
    }
}

impl From<SubjectError> for WireError {
    fn from(error: SubjectError) -> Self {
        Self::new(ErrorCode::BadRequest, error.to_string())
    }
}
