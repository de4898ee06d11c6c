//! Transports by which commands publish batches.

use clap::ValueEnum;
use kvatlas_client::publish::Transport;

/// Name of a transport for batches on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum TransportName {
    /// As messages of core NATS.
    #[default]
    Core,
    /// Through a JetStream stream; a batch waits until the stream has the batch before it.
    Jetstream,
}

impl From<TransportName> for Transport {
    fn from(name: TransportName) -> Self {
        match name {
            TransportName::Core => Self::Core,
            TransportName::Jetstream => Self::ACKNOWLEDGED,
        }
    }
}
