//! Traces: spans of queries and of event batches, for those who trace their requests.
//!
//! A request, or an event message, that carries a `traceparent` header ([W3C Trace Context](https://www.w3.org/TR/trace-context/)) whose
//! sampled flag is set gets one span; nothing else is traced, so that whoever begins a trace decides what it costs. Spans go to a collector
//! by OTLP over HTTP, as JSON.
//!
//! The crate opentelemetry-otlp brings about a hundred others for what is a list of spans in one request. So the form is written here.
//!
//! | file | subject |
//! |---|---|
//! | `context.rs` | the header |
//! | `span.rs` | spans, open and finished |
//! | `exporter.rs` | sending them, a bounded number at a time |
//! | `otlp.rs` | their form |

mod context;
mod exporter;
mod otlp;
mod span;

pub(crate) use context::TRACEPARENT;
pub(crate) use exporter::start_traces;
pub(crate) use span::{OpenSpan, SpanKind, Tracer};
