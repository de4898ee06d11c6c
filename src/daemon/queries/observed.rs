//! Observers of requests: counts for the NATS service statistics, and trace spans.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, Message};

use crate::traces::{OpenSpan, SpanKind, TRACEPARENT, Tracer};
use kvatlas_core::wire::WireError;

use super::requests::Asked;
use kvatlas_process::presence::ServiceCounts;

/// Observers that see every request over NATS. Clones share the same counts.
#[derive(Debug, Clone)]
pub(super) struct Observers {
    counts: Arc<ServiceCounts>,
    /// Tracer that opens spans. `None` if no collector is configured.
    tracer: Option<Tracer>,
}

impl Observers {
    pub(super) fn new(tracer: Option<Tracer>) -> Self {
        Self {
            counts: Arc::new(ServiceCounts::default()),
            tracer,
        }
    }

    /// Returns the counts of requests. Later requests still change the returned counts.
    pub(super) fn counts(&self) -> Arc<ServiceCounts> {
        Arc::clone(&self.counts)
    }

    /// Notes that a request begins. Returns its span if the request is to be traced.
    pub(super) fn begin(&self, asked: Asked, request: &Message) -> Option<OpenSpan> {
        let name = match asked {
            Asked::Query => "kvatlas query",
            Asked::Status => "kvatlas status",
        };
        let tracer = self.tracer.as_ref()?;
        let mut span = tracer.open_message(request, name, SpanKind::Server)?;
        span.note("rpc.system", "nats");
        Some(span)
    }

    /// Makes the headers of the requests that are sent to shards on behalf of this request. They put the shards' spans
    /// into the same trace.
    pub(super) fn passed_on(&self, span: Option<&OpenSpan>, request: &Message) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let received = || Some(request.headers.as_ref()?.get(TRACEPARENT)?.as_str().to_owned());
        // A gateway without a span of its own passes on the sender's.
        if let Some(traceparent) = span.and_then(OpenSpan::traceparent).or_else(received) {
            headers.insert(TRACEPARENT, traceparent.as_str());
        }
        headers
    }

    /// Notes that a request ended after `elapsed`. `error` is the error that was sent instead of an answer, if any.
    pub(super) fn end(
        &self,
        asked: Asked,
        span: Option<OpenSpan>,
        elapsed: Duration,
        error: Option<&WireError>,
    ) {
        self.counts.count(asked, elapsed, error);
        if let (Some(mut span), Some(error)) = (span, error) {
            span.fail(error);
        }
    }
}
