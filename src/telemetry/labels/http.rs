//! Labels of the query listener.

use super::LabelValue;

label_values! {
    /// A route of the query listener.
    HttpRoute: "route" {
        /// The route `/v1/query`.
        V1Query => "contract_query",
        /// The route `/v1/status`.
        V1Status => "contract_status",
        /// The route `/v1/models`.
        V1Models => "contract_models",
        /// The route `/v1/outcomes`.
        V1Outcomes => "contract_outcomes",
        /// The route `/v1/hints`.
        V1Hints => "contract_hints",
        /// The route `/query`.
        Query => "query",
        /// The route `/query_by_hash`.
        QueryByHash => "query_by_hash",
        /// The route `/lookup`.
        Lookup => "lookup",
        /// The route `/register`.
        Register => "register",
        /// The route `/unregister`.
        Unregister => "unregister",
        /// The route `/workers`.
        Workers => "workers",
        /// The route `/dump`.
        Dump => "dump",
        /// The route `/health`.
        Health => "health",
        /// The route `/metrics`.
        Metrics => "metrics",
        /// The route `/openapi.json`.
        OpenApi => "openapi",
        /// There is no such route.
        Other => "other",
    }
}

impl HttpRoute {
    /// Returns the route of a request's path.
    pub fn of_path(path: &str) -> Self {
        match path {
            "/v1/query" => Self::V1Query,
            "/v1/status" => Self::V1Status,
            "/v1/models" => Self::V1Models,
            "/v1/outcomes" => Self::V1Outcomes,
            "/v1/hints" => Self::V1Hints,
            "/query" => Self::Query,
            "/query_by_hash" => Self::QueryByHash,
            "/lookup" => Self::Lookup,
            "/register" => Self::Register,
            "/unregister" => Self::Unregister,
            "/workers" => Self::Workers,
            "/dump" => Self::Dump,
            "/health" => Self::Health,
            "/metrics" => Self::Metrics,
            "/openapi.json" => Self::OpenApi,
            _ => Self::Other,
        }
    }
}

label_values! {
    /// Outcome of a request to the query listener, by the status of its answer.
    HttpOutcome: "outcome" {
        /// Status 2xx.
        Ok => "ok",
        /// Status 400 or 405, and any status without an outcome of its own.
        Refused => "refused",
        /// Status 401.
        Unauthorized => "unauthorized",
        /// Status 404.
        NotFound => "not_found",
        /// Status 408.
        TimedOut => "timed_out",
        /// Status 409.
        Conflict => "conflict",
        /// Status 413.
        TooLarge => "too_large",
        /// Status 5xx.
        Unavailable => "unavailable",
    }
}

impl HttpOutcome {
    /// Returns the outcome that an HTTP status stands for.
    pub fn of_status(status: u16) -> Self {
        match status {
            200..=299 => Self::Ok,
            401 => Self::Unauthorized,
            404 => Self::NotFound,
            408 => Self::TimedOut,
            409 => Self::Conflict,
            413 => Self::TooLarge,
            500.. => Self::Unavailable,
            _ => Self::Refused,
        }
    }
}
