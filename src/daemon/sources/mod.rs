//! Sources, from which events come: a core NATS subscription, or a JetStream stream.
//!
//! A source receives messages and hands each to [`LanePool`](crate::lanes::LanePool), with the generation of the stream
//! in which the message came.

mod attached;
mod consumer_check;
pub(crate) mod core_nats;
pub(crate) mod jetstream;
mod pulse;
mod roll_call;
mod start;
pub(crate) mod stream;
mod stream_end;
mod stream_info;
mod unread;

use async_nats::Message;
use tokio::sync::watch;

use crate::shared::{Shared, Stage};
use crate::traces::{OpenSpan, SpanKind, Tracer};
use kvatlas_config::Transport;
use kvatlas_process::broker::ConnectError;

/// Begins to follow the events. The returned receiver becomes true once queries can be answered. With core NATS, that
/// is when the server has the subscription; with JetStream, when the stream has been read up to its end.
pub(crate) async fn start_events(shared: &Shared) -> Result<(Stage, watch::Receiver<bool>), ConnectError> {
    match shared.config.events.transport {
        Transport::Core => start::start_core_nats(shared).await,
        Transport::JetStream => start::start_jetstream(shared).await,
    }
}

/// Opens the trace span of an event message, if the message is to be traced. The span lasts until the message's batch
/// has been applied.
fn span_of(tracer: Option<&Tracer>, message: &Message) -> Option<OpenSpan> {
    tracer?.open_message(message, "kvatlas batch", SpanKind::Consumer)
}
