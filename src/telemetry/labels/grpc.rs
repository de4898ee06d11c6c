//! Labels of the listener for SGLang's routers.

use super::LabelValue;

label_values! {
    /// Methods of the listener for SGLang's routers.
    GrpcMethod: "method" {
        /// The holders that have leading blocks of a prompt.
        MatchPrefix => "match_prefix",
        /// The same, by tier.
        Match => "match",
        /// How often blocks were looked up.
        HitCounts => "hit_counts",
        /// Changes of a worker's blocks.
        Apply => "apply",
        /// All blocks of a worker.
        Replace => "replace",
        /// The workers that will be reported.
        Configure => "configure",
        /// Whether the daemon is ready.
        Health => "health",
        /// The description of what the server takes.
        Reflection => "reflection",
        /// There is no such method.
        Other => "other",
    }
}

impl GrpcMethod {
    /// The method at `path`.
    pub fn of_path(path: &str) -> Self {
        match path.trim_start_matches('/').split_once('/') {
            Some(("kv_indexer.v1.KVIndexer", method)) => match method {
                "MatchExternalKvPrefix" => Self::MatchPrefix,
                "MatchExternalKv" => Self::Match,
                "GetExternalKvHitCounts" => Self::HitCounts,
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
    /// How a request over gRPC ended, by its code.
    GrpcOutcome: "outcome" {
        /// Answered.
        Ok => "ok",
        /// Given up by the client.
        Cancelled => "cancelled",
        /// Something was asked that is none.
        InvalidArgument => "invalid_argument",
        /// The call took too long.
        DeadlineExceeded => "deadline_exceeded",
        /// Too much at once.
        ResourceExhausted => "resource_exhausted",
        /// A report that does not continue what is known.
        FailedPrecondition => "failed_precondition",
        /// Too long.
        OutOfRange => "out_of_range",
        /// Not served here.
        Unimplemented => "unimplemented",
        /// Not now.
        Unavailable => "unavailable",
        /// Without the token.
        Unauthenticated => "unauthenticated",
        /// Any other code.
        Other => "other",
    }
}

impl GrpcOutcome {
    /// The outcome with the code of this number.
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
    /// States of workers that are reported.
    ReportState: "state" {
        /// All that it has was reported.
        Told => "told",
        /// A snapshot of it has to come.
        Awaited => "awaited",
    }
}

label_values! {
    /// Why a worker that was reported has to be reported whole again.
    ReportLoss: "reason" {
        /// A batch of it is missing.
        Gap => "gap",
        /// There was no room for its blocks.
        Room => "room",
    }
}
