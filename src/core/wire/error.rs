//! The errors of a payload, and the one place that maps errors to the wire.

use crate::hash::{LineageError, Position, PositionError};

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
    /// The payload is longer than allowed; nothing of it was read.
    #[error("the payload has {bytes} bytes; at most {max} are allowed, split it")]
    Oversized {
        /// Length of the payload.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The payload ends inside a value.
    #[error("the payload ends inside a value at byte {offset}; send the whole MessagePack map")]
    Truncated {
        /// The offset at which the value began.
        offset: usize,
    },
    /// Bytes follow the map.
    #[error("bytes follow the MessagePack map at byte {offset}; send one map and nothing else")]
    TrailingBytes {
        /// The offset at which they begin.
        offset: usize,
    },
    /// A byte that MessagePack reserves.
    #[error("byte {offset} is not MessagePack")]
    Reserved {
        /// The offset of the byte.
        offset: usize,
    },
    /// A value has another type than its field.
    #[error("{field} is {found}; send {expected}")]
    WrongType {
        /// The field.
        field: &'static str,
        /// The type that the field takes.
        expected: &'static str,
        /// The type that was sent.
        found: &'static str,
    },
    /// A number is larger than its field allows.
    #[error("{field} is {value}; at most {max} is allowed")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// The number that was sent.
        value: u64,
        /// The largest value allowed.
        max: u64,
    },
    /// A list is longer than allowed.
    #[error("{field} has {count} elements; at most {max} are allowed")]
    TooLong {
        /// The field.
        field: &'static str,
        /// Elements announced.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// A text is longer than allowed.
    #[error("{field} has {bytes} bytes; at most {max} are allowed")]
    TextTooLong {
        /// The field.
        field: &'static str,
        /// Length of the text.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// A blob's length is not a multiple of its element.
    #[error("{field} has {bytes} bytes, which is not a multiple of {element}")]
    RaggedBlob {
        /// The field.
        field: &'static str,
        /// Length of the blob.
        bytes: usize,
        /// Width of an element, in bytes.
        element: usize,
    },
    /// A text is not UTF-8.
    #[error("{field} is not UTF-8")]
    NotUtf8 {
        /// The field.
        field: &'static str,
    },
    /// A field that the payload must have is absent.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field was sent twice.
    #[error("{field} was sent twice")]
    Repeated {
        /// The field.
        field: &'static str,
    },
    /// Fields that exclude or require each other.
    #[error("{0}")]
    Combination(&'static str),
    /// Two lists that must be of one length are not.
    #[error("{field} has {count} elements for {blocks} blocks")]
    LengthMismatch {
        /// The field.
        field: &'static str,
        /// Elements in it.
        count: usize,
        /// Blocks of the event.
        blocks: usize,
    },
    /// The payload speaks another version of the contract.
    #[error("version {version} of the contract is not spoken here; send v = 1")]
    UnsupportedVersion {
        /// The version sent.
        version: u64,
    },
    /// An unknown word where one of a few is expected.
    #[error("{field} is not one of {expected}")]
    UnknownWord {
        /// The field.
        field: &'static str,
        /// The words that are known.
        expected: &'static str,
    },
    /// A name that cannot be a subject token.
    #[error("{field}: {source}")]
    Name {
        /// The field.
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
        /// The field.
        field: &'static str,
        /// The error in the hash.
        source: LineageError,
    },
    /// The lineage hashes of a query are not one chain from position 0.
    #[error(
        "lineage_hashes[{index}] is not the child of the one before it; send one chain that starts at position 0"
    )]
    BrokenChain {
        /// The first that does not continue the chain.
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
    /// Tokens and block hashes need the whole prefix.
    #[error("positions belong to sequence_hashes or lineage_hashes; leave them out, or send one of these")]
    NeedChain,
    /// No position.
    #[error("positions is empty; name at least one, or leave it out to send the whole chain")]
    Empty,
    /// Not one position a hash.
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
        /// The first that is not.
        index: usize,
    },
    /// A lineage hash of another position.
    #[error("lineage_hashes[{index}] is at position {found}, not at positions[{index}]; correct one of them")]
    OtherPosition {
        /// The first that does not agree.
        index: usize,
        /// The position in the hash.
        found: Position,
    },
    /// Neighbours that are not parent and child.
    #[error("lineage_hashes[{index}] is not the child of the one before it; send blocks of one chain")]
    BrokenChain {
        /// The first that does not continue the chain.
        index: usize,
    },
    /// A position beyond what lineage hashes can carry.
    #[error(transparent)]
    OutOfRange(#[from] PositionError),
}

/// The numbers of error replies, in the manner of HTTP. They are part of the contract and never change meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorCode {
    /// The request cannot be decoded or contradicts itself.
    BadRequest = 400,
    /// No worker of this namespace has been heard of, and no configuration names it.
    UnknownNamespace = 404,
    /// The request, or the reply it would have, exceeds a limit.
    TooLarge = 413,
    /// More large requests wait on the connection than may; ask again later, or for less at once.
    TooManyRequests = 429,
    /// The daemon is starting or draining, or drops the namespace's events; ask again or ask another replica.
    Unavailable = 503,
    /// The request speaks another version of the contract.
    UnsupportedVersion = 505,
}

impl ErrorCode {
    /// All codes.
    pub const ALL: [Self; 6] = [
        Self::BadRequest,
        Self::UnknownNamespace,
        Self::TooLarge,
        Self::TooManyRequests,
        Self::Unavailable,
        Self::UnsupportedVersion,
    ];

    /// The number as it travels.
    pub fn as_u16(self) -> u16 {
        self as u16
    }

    /// A stable word for metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::UnknownNamespace => "unknown_namespace",
            Self::TooLarge => "too_large",
            Self::TooManyRequests => "too_many_requests",
            Self::Unavailable => "unavailable",
            Self::UnsupportedVersion => "unsupported_version",
        }
    }
}

/// An error as a client receives it: a number and a text that says what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} (error {})", code.as_u16())]
pub struct WireError {
    /// The number.
    pub code: ErrorCode,
    /// The text, which says what to change.
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
