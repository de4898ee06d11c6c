//! Types of settings that are neither numbers nor texts.

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use kvatlas_core::index::Hashing;

use super::kind::Secret;
use super::rule::words;
use kvatlas_telemetry::LogFormat;

/// How to authenticate to NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authentication {
    /// Not at all.
    Anonymous,
    /// With the JWT and the seed in a credentials file.
    CredentialsFile(PathBuf),
    /// With the NKey whose seed is in a file.
    NkeySeedFile(PathBuf),
    /// With a token.
    Token(Secret),
    /// With a user's name and password.
    UserPassword {
        /// The user.
        user: String,
        /// The user's password.
        password: Secret,
    },
}

/// How to authenticate, as it is at the moment. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedAuthentication(Arc<ArcSwap<Authentication>>);

impl SharedAuthentication {
    /// Begins with this.
    pub fn new(how: Authentication) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(how)))
    }

    /// As it is now.
    pub fn current(&self) -> Arc<Authentication> {
        self.0.load_full()
    }

    /// Takes over what another has at the moment.
    pub fn replace(&self, other: &Self) {
        self.0.store(other.current());
    }
}

impl PartialEq for SharedAuthentication {
    fn eq(&self, other: &Self) -> bool {
        self.current() == other.current()
    }
}

impl Eq for SharedAuthentication {}

/// How events travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// As messages of core NATS, at most once.
    Core,
    /// Through a stream of JetStream. The stream keeps them.
    JetStream,
}

impl Transport {
    /// Whether a stream keeps the events, so that a daemon that starts has some to read.
    pub fn keeps_events(self) -> bool {
        match self {
            Self::Core => false,
            Self::JetStream => true,
        }
    }
}

words!(Transport {
    "core" => Transport::Core,
    "jetstream" => Transport::JetStream,
});

/// How deep a holder is, for those who ask in other words than the contract's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Depth {
    /// The blocks that a request can reuse.
    #[default]
    Usable,
    /// The blocks that full attention has.
    Matched,
}

words!(Depth {
    "usable" => Depth::Usable,
    "matched" => Depth::Matched,
});

/// The clients that may report over gRPC which blocks workers have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrpcWriting {
    /// No client.
    Off,
    /// Clients with a token of their own.
    Token,
    /// All clients that may ask.
    Open,
}

words!(GrpcWriting {
    "off" => GrpcWriting::Off,
    "token" => GrpcWriting::Token,
    "open" => GrpcWriting::Open,
});

words!(Hashing {
    "engine" => Hashing::Engine,
    "recompute" => Hashing::Recompute,
});

words!(LogFormat {
    "text" => LogFormat::Text,
    "json" => LogFormat::Json,
});
