//! Spans. A span is opened when a request or a message comes in, and is finished when it is dropped.

use std::sync::Arc;
use std::time::Instant;

use async_nats::Message;
use tokio::sync::mpsc::Sender;

use kvatlas_client::unix_time_us;
use kvatlas_telemetry::TraceMetrics;
use kvatlas_telemetry::labels::SpanDropReason;

use super::context::{TRACEPARENT, TraceContext};

/// Maximum length of the text of an attribute or of an error, in characters.
const TEXT_CHARACTERS_MAX: usize = 256;

/// Role of the process in the exchange that a span describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpanKind {
    /// Span describes the answering of a request.
    Server,
    /// Span describes the receiving of a message.
    Consumer,
}

/// Value of a span's attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Attribute {
    Text(String),
    Number(u64),
}

/// Finished span, ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FinishedSpan {
    pub(super) context: TraceContext,
    pub(super) span_id: u64,
    pub(super) name: &'static str,
    pub(super) kind: SpanKind,
    /// Start of the span, in microseconds since the Unix epoch. `end_us` is the end of the span in the same unit.
    pub(super) start_us: u64,
    pub(super) end_us: u64,
    pub(super) attributes: Vec<(&'static str, Attribute)>,
    pub(super) error: Option<String>,
}

/// Tracer that opens spans. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Tracer {
    pub(super) spans: Sender<FinishedSpan>,
    pub(super) metrics: Arc<TraceMetrics>,
}

impl std::fmt::Debug for Tracer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Tracer").finish_non_exhaustive()
    }
}

impl Tracer {
    /// Opens a span as [`Self::open`] does, in the trace that a message's header names. The span has the message's
    /// subject and length as attributes.
    pub(crate) fn open_message(
        &self,
        message: &Message,
        name: &'static str,
        kind: SpanKind,
    ) -> Option<OpenSpan> {
        let traceparent = message.headers.as_ref()?.get(TRACEPARENT)?;
        let mut span = self.open(traceparent.as_str(), name, kind)?;
        span.note("messaging.destination.name", &message.subject);
        span.count("messaging.message.body.size", message.payload.len() as u64);
        Some(span)
    }

    /// Opens a span of the trace that the header `traceparent` names. `None` if that trace is not sampled.
    pub(crate) fn open(&self, traceparent: &str, name: &'static str, kind: SpanKind) -> Option<OpenSpan> {
        let context = TraceContext::sampled(traceparent)?;
        let start_us = unix_time_us();
        Some(OpenSpan(Box::new(Opened {
            tracer: self.clone(),
            begun: Instant::now(),
            span: Some(FinishedSpan {
                context,
                // 0 is not a valid span id.
                span_id: fastrand::u64(1..),
                name,
                kind,
                start_us,
                end_us: start_us,
                attributes: Vec::new(),
                error: None,
            }),
        })))
    }
}

/// Span that is not finished. Dropping this value finishes the span.
pub(crate) struct OpenSpan(Box<Opened>);

struct Opened {
    tracer: Tracer,
    begun: Instant,
    span: Option<FinishedSpan>,
}

impl OpenSpan {
    /// Adds an attribute whose value is a text, cut to 256 characters.
    pub(crate) fn note(&mut self, key: &'static str, text: &str) {
        self.set(key, Attribute::Text(cut(text)));
    }

    /// Adds an attribute whose value is a number.
    pub(crate) fn count(&mut self, key: &'static str, number: u64) {
        self.set(key, Attribute::Number(number));
    }

    /// Returns the header by which a further request joins the trace as a child of this span.
    pub(crate) fn traceparent(&self) -> Option<String> {
        let span = self.0.span.as_ref()?;
        Some(span.context.below(span.span_id))
    }

    /// Notes that the work of the span has failed.
    pub(crate) fn fail(&mut self, error: &dyn std::fmt::Display) {
        if let Some(span) = &mut self.0.span {
            span.error = Some(cut(&error.to_string()));
        }
    }

    fn set(&mut self, key: &'static str, value: Attribute) {
        if let Some(span) = &mut self.0.span {
            span.attributes.push((key, value));
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let Some(mut span) = self.span.take() else { return };
        let elapsed_us = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        span.end_us = span.start_us.saturating_add(elapsed_us);
        // A full queue drops the span: no request waits for the collector.
        if self.tracer.spans.try_send(span).is_err() {
            let dropped = &self.tracer.metrics.dropped;
            dropped.get(SpanDropReason::QueueFull).increment(1);
        }
    }
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT_CHARACTERS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_span_is_sent_when_it_is_dropped_and_never_waits() {
        let (spans, mut finished) = tokio::sync::mpsc::channel(1);
        let tracer = Tracer {
            spans,
            metrics: Arc::new(TraceMetrics::new()),
        };
        let mut open = tracer.open(SAMPLED, "query", SpanKind::Server).unwrap();
        let below = TraceContext::sampled(&open.traceparent().unwrap()).unwrap();
        open.note("namespace", &"é".repeat(1000));
        open.count("blocks", 7);
        open.fail(&"too deep");
        assert!(finished.try_recv().is_err());
        drop(open);
        // There is no room for this one.
        drop(tracer.open(SAMPLED, "query", SpanKind::Server));
        let span = finished.try_recv().unwrap();
        assert!(finished.try_recv().is_err());
        assert_ne!(span.span_id, 0);
        assert_eq!(
            (below.trace_id, below.parent_id),
            (span.context.trace_id, span.span_id)
        );
        assert_eq!(span.error.as_deref(), Some("too deep"));
        let text = Attribute::Text("é".repeat(TEXT_CHARACTERS_MAX));
        assert_eq!(
            span.attributes,
            [("namespace", text), ("blocks", Attribute::Number(7))]
        );
        assert!(tracer.open("00-0-0-00", "query", SpanKind::Server).is_none());
    }
}
