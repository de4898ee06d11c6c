//! Handling of one request: checks its token, picks the method that answers it, and bounds its time and size.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body as AxumBody;
use axum::http::{HeaderMap, HeaderName, Request, Response};
use bytes::Bytes;
use http_body_util::Full;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::metadata::MetadataValue;
use tonic::server::{Grpc, UnaryService};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

use crate::http::{Bodies, HttpRefusal, TokenFile};
use kvatlas_config::GrpcConfig;
use kvatlas_telemetry::labels::{GrpcMethod, GrpcOutcome};

use super::connection::Activity;
use super::question::{AnswerWithCertainty, Questions};
use super::reports::{BlockReportError, BlockReports};

/// Full name of the gRPC service.
pub(super) const KV_INDEXER: &str = "kv_indexer.v1.KVIndexer";
/// Header that tells whether the state of all holders is certain.
const EXACT: &str = "x-kvatlas-exact";
/// Header with the time within which the client wants an answer.
static TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

type ResponseFuture = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;
/// A service that gRPC itself defines: health, or reflection (the server's description of its methods).
pub(super) type BuiltInService = Arc<dyn Fn(Request<Body>) -> ResponseFuture + Send + Sync>;

/// State that the requests of all connections share.
pub(super) struct Door {
    pub(super) questions: Questions,
    pub(super) bodies: Bodies,
    pub(super) token: Option<TokenFile>,
    /// Blocks that workers have reported over gRPC, and the token that reports need. `None` if reports are not taken.
    pub(super) writing: Option<Writing>,
    pub(super) config: GrpcConfig,
    pub(super) health: BuiltInService,
    /// Reflection: the server's description of its methods, in the protocol's versions `v1` and `v1alpha`.
    pub(super) reflection: [BuiltInService; 2],
}

/// Reported blocks of workers, and the token that reports need.
pub(super) struct Writing {
    pub(super) reports: Arc<BlockReports>,
    /// Token that reports need. `None` if reports need the same token as questions.
    pub(super) token: Option<TokenFile>,
}

/// Turns a service of any type into a [`BuiltInService`].
pub(super) fn other<S>(service: S) -> BuiltInService
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    Arc::new(move |request| {
        let answering = service.clone().call(request);
        Box::pin(async move { answering.await.unwrap_or_else(|never| match never {}) })
    })
}

/// Wrapper that makes an async function a method of tonic's server. It adds the header [`EXACT`] to answers that are
/// about holders.
struct Method<F>(F);

impl<F, Fut, Q, A> UnaryService<Q> for Method<F>
where
    F: FnMut(Q) -> Fut,
    Fut: Future<Output = Result<AnswerWithCertainty<A>, Status>> + Send + 'static,
    A: Send + 'static,
{
    type Response = A;
    type Future = Pin<Box<dyn Future<Output = Result<tonic::Response<A>, Status>> + Send>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let answering = (self.0)(request.into_inner());
        Box::pin(async move {
            let AnswerWithCertainty { answer, is_exact } = answering.await?;
            let mut response = tonic::Response::new(answer);
            if let Some(is_exact) = is_exact {
                let value = MetadataValue::from_static(if is_exact { "true" } else { "false" });
                response.metadata_mut().insert(EXACT, value);
            }
            Ok(response)
        })
    }
}

impl Door {
    /// Answers a gRPC request, and counts it.
    pub(super) async fn serve(
        self: Arc<Self>,
        request: Request<AxumBody>,
        activity: Arc<Activity>,
    ) -> Response<Body> {
        let method = GrpcMethod::of_path(request.uri().path());
        let response = match self.check_token(method, request.headers()) {
            Ok(()) => self.answer(method, request, &activity).await,
            Err(refusal) => refusal.into_http(),
        };
        // A streamed answer tells its outcome only at its end, so it counts as a success here.
        let code = Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code());
        self.questions
            .metrics
            .answered(method, GrpcOutcome::of_code(code as i32));
        response
    }

    /// Checks that a request has the token that its method needs.
    fn check_token(&self, method: GrpcMethod, headers: &HeaderMap) -> Result<(), Status> {
        let of_writing = match method {
            GrpcMethod::Health => return Ok(()),
            GrpcMethod::Apply | GrpcMethod::Replace | GrpcMethod::Configure => {
                self.writing.as_ref().and_then(|writing| writing.token.as_ref())
            }
            _ => None,
        };
        let (token, setting) = match of_writing {
            Some(token) => (Some(token), "grpc.writing_token_file"),
            None => (self.token.as_ref(), "grpc.token_file"),
        };
        let refusal = || {
            Status::unauthenticated(format!(
                "send authorization: Bearer TOKEN with the token of {setting}"
            ))
        };
        let is_allowed = token.is_none_or(|token| token.allows(headers));
        is_allowed.then_some(()).ok_or_else(refusal)
    }

    async fn answer(
        self: &Arc<Self>,
        method: GrpcMethod,
        request: Request<AxumBody>,
        activity: &Arc<Activity>,
    ) -> Response<Body> {
        match method {
            GrpcMethod::Health => {
                let _begun = activity.begin();
                (self.health)(request.map(Body::new)).await
            }
            GrpcMethod::Reflection => {
                let [v1, v1alpha] = &self.reflection;
                let is_older = request.uri().path().contains(".v1alpha.");
                let service = if is_older { v1alpha } else { v1 };
                service(request.map(Body::new)).await
            }
            GrpcMethod::Apply | GrpcMethod::Replace | GrpcMethod::Configure if self.writing.is_none() => {
                unimplemented(
                    "reports are not taken (grpc.writing); kvatlas follows engines itself: kvatlas bridge",
                )
            }
            GrpcMethod::Other => unimplemented("there is no such method"),
            _ => {
                let asked = timeout_of(request.headers()).unwrap_or(Duration::MAX);
                let answering = self.answer_message(method, request, activity);
                let answered = tokio::time::timeout(asked.min(self.config.request_timeout), answering).await;
                answered
                    .unwrap_or_else(|_| Status::deadline_exceeded("the question's time is over").into_http())
            }
        }
    }

    /// Receives a question and answers it. Until the whole question has arrived, the connection counts as waiting for
    /// its client, and may have to give way to a new one.
    async fn answer_message(
        self: &Arc<Self>,
        method: GrpcMethod,
        request: Request<AxumBody>,
        activity: &Arc<Activity>,
    ) -> Response<Body> {
        let headers = request.headers().clone();
        let received = match self.bodies.receive(request).await {
            Ok(received) => received,
            Err(error) => return not_received(&error).into_http(),
        };
        let _begun = activity.begin();
        let mut request = Request::new(Full::new(received.bytes.clone()));
        *request.headers_mut() = headers;
        match method {
            GrpcMethod::MatchPrefix => {
                self.unary(request, |door: Arc<Self>, question| async move {
                    door.questions.prefix(question).await
                })
                .await
            }
            GrpcMethod::Apply => {
                self.unary(request, |door: Arc<Self>, report| async move {
                    done(door.reports()?.apply(report, Instant::now()))
                })
                .await
            }
            GrpcMethod::Replace => {
                self.unary(request, |door: Arc<Self>, report| async move {
                    done(door.reports()?.replace(report).await)
                })
                .await
            }
            GrpcMethod::Configure => {
                self.unary(request, |door: Arc<Self>, report| async move {
                    done(door.reports()?.configure(report, Instant::now()))
                })
                .await
            }
            _ => {
                self.unary(request, |door: Arc<Self>, question| async move {
                    door.questions.tiers(question).await
                })
                .await
            }
        }
    }

    /// Returns the blocks that workers have reported, or an error if reports are not taken.
    fn reports(&self) -> Result<&BlockReports, Status> {
        let writing = self.writing.as_ref();
        writing
            .map(|writing| &*writing.reports)
            .ok_or_else(|| Status::unimplemented("reports are not taken"))
    }

    /// Decodes a message, and answers it by the function `answer`.
    async fn unary<Q, A, F, Fut>(self: &Arc<Self>, request: Request<Full<Bytes>>, answer: F) -> Response<Body>
    where
        Q: prost::Message + Default + Send + 'static,
        A: prost::Message + Send + 'static,
        F: Fn(Arc<Self>, Q) -> Fut,
        Fut: Future<Output = Result<AnswerWithCertainty<A>, Status>> + Send + 'static,
    {
        let door = Arc::clone(self);
        self.grpc()
            .unary(Method(move |message| answer(Arc::clone(&door), message)), request)
            .await
    }

    fn grpc<Q, A>(&self) -> Grpc<ProstCodec<A, Q>>
    where
        Q: prost::Message + Default + Send + 'static,
        A: prost::Message + Send + 'static,
    {
        Grpc::new(ProstCodec::default()).max_decoding_message_size(self.config.max_message_bytes)
    }
}

/// Turns the result of a report into an answer without the header [`EXACT`], or into an error status of gRPC.
fn done<T>(result: Result<T, BlockReportError>) -> Result<AnswerWithCertainty<T>, Status> {
    let answer = result.map_err(Status::from)?;
    Ok(AnswerWithCertainty {
        answer,
        is_exact: None,
    })
}

fn unimplemented(text: &str) -> Response<Body> {
    Status::unimplemented(text).into_http()
}

/// Returns the status for a question that did not arrive in full. It has a code after which the router chooses a worker
/// by its load, and does not need an answer. The router may send the question again.
fn not_received(error: &HttpRefusal) -> Status {
    match error {
        HttpRefusal::BodyTooLarge { .. } => {
            Status::out_of_range("the question is too long (grpc.max_message_bytes)")
        }
        HttpRefusal::BodyTimedOut { .. } => {
            Status::deadline_exceeded("the question did not come in time (grpc.request_timeout_ms)")
        }
        HttpRefusal::TooManyBodies => Status::resource_exhausted(
            "questions take too much room (grpc.max_receiving_bytes); ask again later",
        ),
        _ => Status::unavailable("the question did not come whole"),
    }
}

/// Returns the time within which the client wants an answer. `None` if the header is absent or not in gRPC's format.
fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(&TIMEOUT)?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=8).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| is_number)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_grpc_writes_them() {
        let timeout = |text: &'static str| {
            let value = axum::http::HeaderValue::from_static(text);
            timeout_of(&HeaderMap::from_iter([(TIMEOUT.clone(), value)]))
        };
        assert_eq!(timeout("100m"), Some(Duration::from_millis(100)));
        assert_eq!(timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(timeout("7n"), Some(Duration::from_nanos(7)));
        for text in ["", "m", "100", "-1m", "+1m", "123456789m", "1 m", "1x"] {
            assert_eq!(timeout(text), None, "{text:?}");
        }
    }
}
