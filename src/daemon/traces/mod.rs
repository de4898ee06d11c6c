//! Traces: spans of queries and of event batches, for operators who trace requests across services.
//!
//! A request or an event message gets one span if it has a `traceparent` header ([W3C Trace
//! Context](https://www.w3.org/TR/trace-context/)) whose sampled flag is set. Nothing else is traced. So the process
//! that begins a trace decides how much is traced. Spans go to a collector by OTLP over HTTP, as JSON.
//!
//! Spans are encoded here, because the crate opentelemetry-otlp would bring about a hundred other crates only to send a
//! list of spans in one request.
//!
//! | file | subject |
//! |---|---|
//! | `context.rs` | the header |
//! | `span.rs` | spans, open and finished |
//! | `exporter.rs` | sending spans, a bounded number at a time |
//! | `otlp.rs` | the format in which spans are sent |

mod context;
#[cfg(feature = "traces")]
mod exporter;
#[cfg(feature = "traces")]
mod otlp;
#[cfg_attr(
    not(feature = "traces"),
    allow(dead_code, reason = "no tracer is made, so no span is opened")
)]
mod span;

pub(crate) use context::TRACEPARENT;
#[cfg(feature = "traces")]
pub(crate) use exporter::start_traces;
pub(crate) use span::{OpenSpan, SpanKind, Tracer};
