//! Types of settings that are neither plain numbers nor plain texts.

use std::path::PathBuf;

use kvatlas_core::index::Hashing;
use kvatlas_core::worded;

use super::kind::Secret;
use super::rule::choices;
use kvatlas_telemetry::LogFormat;

/// The way in which a client authenticates to NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authentication {
    /// No authentication.
    Anonymous,
    /// Authentication with the JWT and the seed in a credentials file.
    CredentialsFile(PathBuf),
    /// Authentication with an NKey. The file has its seed.
    NkeySeedFile(PathBuf),
    /// Authentication with a token.
    Token(Secret),
    /// Authentication with a user's name and password.
    UserPassword {
        /// Name of the user.
        user: String,
        /// Password of the user.
        password: Secret,
    },
}

choices!(Transport, Depth, GrpcWriting, Hashing, LogFormat);

worded! {
    /// Transport by which events travel from publishers to daemons.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Transport {
        /// Messages of core NATS, which delivers each at most once.
        Core => "core",
        /// A stream of JetStream, which keeps the events.
        JetStream => "jetstream",
    }
}

impl Transport {
    /// Whether a stream keeps the events. If so, a starting daemon can read events that were published before its
    /// start.
    pub fn keeps_events(self) -> bool {
        match self {
            Self::Core => false,
            Self::JetStream => true,
        }
    }
}

worded! {
    /// Kind of depth that answers give for a holder if the client uses a protocol other than that of kvatlas. A depth
    /// is a number of leading blocks of the prompt.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum Depth {
        /// The leading blocks that a request can reuse.
        #[default]
        Usable => "usable",
        /// The leading blocks that the holder has for full attention.
        Matched => "matched",
    }
}

worded! {
    /// The clients that may report over gRPC which blocks workers have.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum GrpcWriting {
        /// No client may report.
        Off => "off",
        /// Clients that show the token of `grpc.writing_token_file`.
        Token => "token",
        /// All clients that may ask questions.
        Open => "open",
    }
}
