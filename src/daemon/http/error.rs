//! Errors of requests, and their mapping to HTTP responses.

use axum::Json;
use axum::http::header::{ALLOW, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use kvatlas_core::wire::{DecodeError, ErrorBody, ErrorCode, NameError, PROTOCOL_VERSION, WireError};

use crate::queries::NoIndex;
use kvatlas_process::registry::RegisterRefusal;

/// Reason why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HttpRefusal {
    /// Request breaks the wire contract.
    #[error("{}", .0.text)]
    Contract(WireError),
    /// Body is not the JSON that the route takes, or its fields contradict each other.
    #[error("{0}")]
    BadRequest(String),
    /// Body is longer than allowed.
    #[error("the body has more than {bytes_max} bytes (http.max_body_bytes); ask for a shorter prefix")]
    BodyTooLarge { bytes_max: usize },
    /// Body did not arrive in time.
    #[error("the body did not come within {milliseconds} ms (http.request_timeout_ms)")]
    BodyTimedOut { milliseconds: u128 },
    /// Body did not fit into the memory that all bodies share.
    #[error("the bodies of requests take too much room (http.max_receiving_bytes); ask again later")]
    TooManyBodies,
    /// Answer did not fit into the memory that all answers share.
    #[error(
        "answers that clients have not read take too much room (http.max_receiving_bytes); read them, and ask again"
    )]
    TooManyAnswers,
    /// Token is missing or wrong.
    #[error("send the header Authorization: Bearer TOKEN with the token of http.token_file")]
    Unauthorized,
    /// Caller may not make this request.
    #[error("{0}")]
    Forbidden(String),
    /// Type of the body is not JSON. Bodies of other types are refused, because any web page may send them.
    #[error("send the header Content-Type: application/json")]
    MediaType,
    /// No route has this path.
    #[error("there is no such route; GET /openapi.json has them all")]
    NoRoute,
    /// Route takes another HTTP method. The value is the method that it takes.
    #[error("this route takes {allowed} only")]
    Method { allowed: &'static str },
    /// Thing that the request names does not exist.
    #[error("{0}")]
    NotFound(String),
    /// Thing that the request names exists already, with other properties.
    #[error("{0}")]
    Conflict(String),
    /// Request cannot be answered now, but may be answered later.
    #[error("{0}")]
    Unavailable(String),
}

impl HttpRefusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Contract(error) => match error.code {
                ErrorCode::UnknownNamespace => StatusCode::NOT_FOUND,
                ErrorCode::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
                ErrorCode::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
                ErrorCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
                // HTTP's status 505 does not fit: it is about the version of HTTP.
                ErrorCode::BadRequest | ErrorCode::UnsupportedVersion => StatusCode::BAD_REQUEST,
            },
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimedOut { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::NoRoute | Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Conflict(_) => StatusCode::CONFLICT,
            Self::Unavailable(_) | Self::TooManyBodies | Self::TooManyAnswers => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }

    /// Returns the error number for the body: the number of the contract if it has one for this error, else the number
    /// of the HTTP status.
    fn code(&self) -> u16 {
        match self {
            Self::Contract(error) => error.code.as_u16(),
            other => other.status().as_u16(),
        }
    }

    /// Returns the error as an HTTP response, in the format of the dialects if `is_dialect`, else in the format of the
    /// contract.
    pub(super) fn respond(&self, is_dialect: bool) -> Response {
        let text = self.to_string();
        let body = if is_dialect {
            json!({ "error": text })
        } else {
            let code = self.code();
            json!({ "v": PROTOCOL_VERSION, "error": ErrorBody { code, text } })
        };
        let mut response = (self.status(), Json(body)).into_response();
        let header = match self {
            Self::Unauthorized => Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            Self::Method { allowed } => Some((ALLOW, HeaderValue::from_static(allowed))),
            _ if self.status() == StatusCode::SERVICE_UNAVAILABLE => {
                Some((RETRY_AFTER, HeaderValue::from_static("1")))
            }
            _ => None,
        };
        if let Some((name, value)) = header {
            response.headers_mut().insert(name, value);
        }
        response
    }

    /// Returns the error for an invalid name in `field`.
    pub(super) fn name(field: &'static str, error: &NameError) -> Self {
        Self::BadRequest(format!("{field}: {error}"))
    }
}

impl From<WireError> for HttpRefusal {
    fn from(error: WireError) -> Self {
        Self::Contract(error)
    }
}

impl From<NoIndex> for HttpRefusal {
    fn from(error: NoIndex) -> Self {
        Self::NotFound(error.to_string())
    }
}

impl From<DecodeError> for HttpRefusal {
    fn from(error: DecodeError) -> Self {
        Self::Contract(error.into())
    }
}

impl From<RegisterRefusal> for HttpRefusal {
    fn from(refusal: RegisterRefusal) -> Self {
        match refusal {
            RegisterRefusal::Conflict { .. }
            | RegisterRefusal::Drained { .. }
            | RegisterRefusal::SameAddress { .. }
            | RegisterRefusal::OtherBlockSize { .. } => Self::Conflict(refusal.to_string()),
            RegisterRefusal::Host { .. } => Self::Forbidden(refusal.to_string()),
            RegisterRefusal::Invalid(_) => Self::BadRequest(refusal.to_string()),
            RegisterRefusal::TooMany { .. } | RegisterRefusal::Stopping => {
                Self::Unavailable(refusal.to_string())
            }
        }
    }
}

/// Puts the error into the response's extensions. [`HttpRefusal::respond`] makes the body later, in the format that the
/// request's path needs.
impl IntoResponse for HttpRefusal {
    fn into_response(self) -> Response {
        let mut response = Response::default();
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_every_error_is_pinned() {
        let contract = |code| HttpRefusal::from(WireError::new(code, "x"));
        for (error, status) in [
            (contract(ErrorCode::BadRequest), 400),
            (contract(ErrorCode::UnknownNamespace), 404),
            (contract(ErrorCode::TooLarge), 413),
            (contract(ErrorCode::TooManyRequests), 429),
            (contract(ErrorCode::Unavailable), 503),
            (contract(ErrorCode::UnsupportedVersion), 400),
            (HttpRefusal::BodyTooLarge { bytes_max: 1 }, 413),
            (HttpRefusal::BodyTimedOut { milliseconds: 1 }, 408),
            (HttpRefusal::TooManyBodies, 503),
            (HttpRefusal::Unauthorized, 401),
            (HttpRefusal::Forbidden(String::new()), 403),
            (HttpRefusal::MediaType, 415),
            (HttpRefusal::NoRoute, 404),
            (HttpRefusal::Method { allowed: "GET" }, 405),
            (HttpRefusal::Conflict(String::new()), 409),
        ] {
            assert_eq!(error.respond(false).status().as_u16(), status, "{error:?}");
        }
        let headers = contract(ErrorCode::Unavailable).respond(true).headers().clone();
        assert_eq!(headers[RETRY_AFTER], "1");
        assert_eq!(
            HttpRefusal::Unauthorized.respond(true).headers()[WWW_AUTHENTICATE],
            "Bearer"
        );
        assert_eq!(contract(ErrorCode::UnsupportedVersion).code(), 505);
    }
}
