//! Labels of the listener for SGLang's routers.

use super::LabelValue;

label_values! {
    /// Methods of the listener for SGLang's routers.
    GrpcMethod: "method" {
        /// `MatchExternalKvPrefix`: the holders that have leading blocks of a prompt.
        MatchPrefix => "match_prefix",
        /// `MatchExternalKv`: the holders that have leading blocks of a prompt, by tier.
        Match => "match",
        /// `ApplyExternalKvBatch`: changes of a worker's blocks.
        Apply => "apply",
        /// `ReplaceExternalKvSnapshot`: all blocks of a worker.
        Replace => "replace",
        /// `ConfigureExpectedWorkers`: the list of workers that will report.
        Configure => "configure",
        /// Health check of gRPC: whether the daemon is ready.
        Health => "health",
        /// Server reflection of gRPC: the description of the server's methods and messages.
        Reflection => "reflection",
        /// Any path that is no method of the listener.
        Other => "other",
    }
}

impl GrpcMethod {
    /// Returns the method whose path in the HTTP request is `path`.
    pub fn of_path(path: &str) -> Self {
        match path.trim_start_matches('/').split_once('/') {
            Some(("kv_indexer.v1.KVIndexer", method)) => match method {
                "MatchExternalKvPrefix" => Self::MatchPrefix,
                "MatchExternalKv" => Self::Match,
                "ApplyExternalKvBatch" => Self::Apply,
                "ReplaceExternalKvSnapshot" => Self::Replace,
                "ConfigureExpectedWorkers" => Self::Configure,
                _ => Self::Other,
            },
            Some(("grpc.health.v1.Health", _)) => Self::Health,
            Some(("grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection", _)) => {
                Self::Reflection
            }
            _ => Self::Other,
        }
    }
}

label_values! {
    /// Outcome of a request over gRPC, by the status code of its answer.
    GrpcOutcome: "outcome" {
        /// The request was answered.
        Ok => "ok",
        /// The client gave up the request.
        Cancelled => "cancelled",
        /// Some argument of the request is not valid.
        InvalidArgument => "invalid_argument",
        /// Handling the request took too long, or its message did not arrive in time.
        DeadlineExceeded => "deadline_exceeded",
        /// Too many requests came at the same time, or there is no room for the request, for the blocks that it reports, or for
        /// its answer.
        ResourceExhausted => "resource_exhausted",
        /// A report of a worker's blocks does not continue the worker's earlier reports.
        FailedPrecondition => "failed_precondition",
        /// The request, or the prompt in it, is too long.
        OutOfRange => "out_of_range",
        /// The listener has no such method.
        Unimplemented => "unimplemented",
        /// The daemon cannot answer now.
        Unavailable => "unavailable",
        /// The request does not carry the token.
        Unauthenticated => "unauthenticated",
        /// Any gRPC status code that has no outcome of its own.
        Other => "other",
    }
}

impl GrpcOutcome {
    /// Returns the outcome for gRPC's status code `code`.
    pub fn of_code(code: i32) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::Cancelled,
            3 => Self::InvalidArgument,
            4 => Self::DeadlineExceeded,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            11 => Self::OutOfRange,
            12 => Self::Unimplemented,
            14 => Self::Unavailable,
            16 => Self::Unauthenticated,
            _ => Self::Other,
        }
    }
}

label_values! {
    /// Whether all blocks of a worker are known from the worker's reports over gRPC.
    ReportState: "state" {
        /// All blocks of the worker are known from its reports.
        Told => "told",
        /// The blocks of the worker are unknown until it sends a snapshot.
        Awaited => "awaited",
    }
}

label_values! {
    /// Reason why the reported blocks of a worker were forgotten. The worker then has to send a snapshot of its blocks.
    ReportLoss: "reason" {
        /// A batch of changes that the worker reported is missing.
        Gap => "gap",
        /// A batch of another epoch came: the run of the worker that its blocks are known of is over.
        Epoch => "epoch",
        /// There was no room for the blocks of the worker.
        Room => "room",
    }
}
