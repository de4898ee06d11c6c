//! The observers of requests from outside: counts for who asks after services, and spans for who traces.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, Message};

use crate::traces::{OpenSpan, SpanKind, TRACEPARENT, Tracer};
use kvatlas_core::wire::WireError;

use super::requests::Asked;
use kvatlas_process::presence::ServiceCounts;

/// The observers of requests. Clones are the same.
#[derive(Debug, Clone)]
pub(super) struct Observers {
    counts: Arc<ServiceCounts>,
    /// The tracer; none where there is no collector.
    tracer: Option<Tracer>,
}

impl Observers {
    pub(super) fn new(tracer: Option<Tracer>) -> Self {
        Self {
            counts: Arc::new(ServiceCounts::default()),
            tracer,
        }
    }

    /// The counts so far.
    pub(super) fn counts(&self) -> Arc<ServiceCounts> {
        Arc::clone(&self.counts)
    }

    /// A request begins; its span, where it is to be traced.
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

    /// The headers of what is asked of others for this request: theirs are spans of the same trace.
    pub(super) fn passed_on(&self, span: Option<&OpenSpan>, request: &Message) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let received = || Some(request.headers.as_ref()?.get(TRACEPARENT)?.as_str().to_owned());
        // Who has no span of its own lets others have the sender's.
        if let Some(traceparent) = span.and_then(OpenSpan::traceparent).or_else(received) {
            headers.insert(TRACEPARENT, traceparent.as_str());
        }
        headers
    }

    /// The request has taken so long; `error` is why it is not answered as asked.
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
