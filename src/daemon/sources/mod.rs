//! Sources: where events come from. A core NATS subscription, or a JetStream stream.
//!
//! A source receives messages and hands each to [`LanePool`](crate::daemon::lanes::LanePool), with the generation of the stream in which
//! the message came.

pub(crate) mod core_nats;
pub(crate) mod jetstream;
mod pulse;
mod start;
mod stream;

pub(crate) use start::start_events;

use async_nats::Message;

use crate::daemon::traces::{OpenSpan, SpanKind, Tracer};

/// The span of an event message, where it is to be traced: until its batch has been applied.
fn span_of(tracer: Option<&Tracer>, message: &Message) -> Option<OpenSpan> {
    tracer?.open_message(message, "kvatlas batch", SpanKind::Consumer)
}
