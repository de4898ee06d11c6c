//! Export of spans to a collector. A bounded number of spans waits; spans that cannot be sent are counted and dropped.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Uri};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use kvatlas_config::TracesConfig;
use kvatlas_process::http::{HttpConnection, HttpError};
use kvatlas_telemetry::TraceMetrics;

use super::otlp;
use super::span::{FinishedSpan, Tracer};

/// Maximum number of spans in one request.
const SPANS_AT_ONCE: usize = 512;
/// Maximum time that a span waits for further spans to be sent with it, and that a stop waits for the collector.
const PATIENCE: Duration = Duration::from_secs(1);
/// Maximum time that a collector may take for one request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of the part of the collector's answer that is read, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Reason why the collector did not take spans.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{0}")]
    Http(#[from] HttpError),
    #[error("the collector answers {0}")]
    Status(u16),
    #[error("the collector did not answer within {0:?}")]
    TimedOut(Duration),
    #[error("the daemon stopped before the collector took them")]
    Stopped,
}

/// Returns a tracer, which opens spans, and the task that sends them. `None` if no collector is configured. The task
/// ends when `stop` is cancelled and all spans have been sent, or [`PATIENCE`] after the stop.
pub(crate) fn start_traces(
    config: &TracesConfig,
    instance: String,
    stop: CancellationToken,
) -> Option<(Tracer, impl Future<Output = ()> + Send + use<>)> {
    let endpoint: Uri = config.endpoint.as_ref()?.parse().ok()?;
    let (spans, finished) = channel(config.spans_max);
    let metrics = Arc::new(TraceMetrics::new());
    let tracer = Tracer {
        spans,
        metrics: Arc::clone(&metrics),
    };
    let exporter = Exporter {
        endpoint,
        instance,
        metrics,
    };
    Some((tracer, exporter.run(finished, stop)))
}

struct Exporter {
    endpoint: Uri,
    instance: String,
    metrics: Arc<TraceMetrics>,
}

impl Exporter {
    async fn run(self, mut finished: Receiver<FinishedSpan>, stop: CancellationToken) {
        let mut spans = Vec::with_capacity(SPANS_AT_ONCE);
        let late = async {
            stop.cancelled().await;
            sleep(PATIENCE).await;
        };
        tokio::select! {
            () = self.export(&mut finished, &mut spans, &stop) => return,
            () = late => {}
        }
        finished.close();
        while let Ok(span) = finished.try_recv() {
            spans.push(span);
        }
        if !spans.is_empty() {
            self.metrics
                .export_failed(spans.len() as u64, &ExportError::Stopped);
        }
    }

    /// Sends finished spans until `stop`, and those that wait then. The spans in `spans` are not sent yet.
    async fn export(
        &self,
        finished: &mut Receiver<FinishedSpan>,
        spans: &mut Vec<FinishedSpan>,
        stop: &CancellationToken,
    ) {
        while !stop.is_cancelled() {
            let received = stop
                .run_until_cancelled(finished.recv_many(spans, SPANS_AT_ONCE))
                .await;
            if received == Some(0) {
                break;
            }
            let filling = async {
                while spans.len() < SPANS_AT_ONCE {
                    let room = SPANS_AT_ONCE - spans.len();
                    if finished.recv_many(spans, room).await == 0 {
                        break;
                    }
                }
            };
            let _ = stop.run_until_cancelled(timeout(PATIENCE, filling)).await;
            self.send(spans).await;
        }
        // After the stop, the spans that wait are sent, and no further ones are taken.
        finished.close();
        while finished.recv_many(spans, SPANS_AT_ONCE).await > 0 {
            self.send(spans).await;
        }
    }

    async fn send(&self, spans: &mut Vec<FinishedSpan>) {
        if spans.is_empty() {
            return;
        }
        let body = otlp::request(&self.instance, spans).to_string();
        let sent = timeout(TIMEOUT, self.post(body.into())).await;
        match sent.unwrap_or(Err(ExportError::TimedOut(TIMEOUT))) {
            Ok(()) => self.metrics.exported.increment(spans.len() as u64),
            Err(error) => self.metrics.export_failed(spans.len() as u64, &error),
        }
        spans.clear();
    }

    async fn post(&self, body: Bytes) -> Result<(), ExportError> {
        let host = self.endpoint.host().unwrap_or_default();
        let port = self.endpoint.port_u16().unwrap_or(80);
        let mut connection = HttpConnection::open(&format!("{host}:{port}")).await?;
        let path = self.endpoint.path_and_query().map_or("/", |path| path.as_str());
        let request = connection.request(Method::POST, path);
        let request = request.header(CONTENT_TYPE, "application/json");
        let answer = connection.send(request, body).await?;
        let status = answer.status();
        // The answer may name spans that the collector refused. That is for the collector's own log.
        let _ = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        match status.is_success() {
            true => Ok(()),
            false => Err(ExportError::Status(status.as_u16())),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::super::span::SpanKind;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_does_not_answer_holds_up_no_stop() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}/v1/traces", silent.local_addr().unwrap());
        let config = TracesConfig {
            endpoint: Some(endpoint),
            spans_max: 4096,
        };
        let stop = CancellationToken::new();
        let (tracer, exporting) = start_traces(&config, "d".to_owned(), stop.clone()).unwrap();
        let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        for _ in 0..2000 {
            drop(tracer.open(traceparent, "span", SpanKind::Server));
        }
        stop.cancel();
        let begun = tokio::time::Instant::now();
        exporting.await;
        assert_eq!(
            begun.elapsed(),
            PATIENCE,
            "not {TIMEOUT:?} for each {SPANS_AT_ONCE} spans"
        );
    }
}
