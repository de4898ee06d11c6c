//! Replies of either kind: to a single query, or to a batch of queries.

use std::time::Duration;

use kvatlas_core::wire::{BatchReply, NamespaceName, QueryReply, QueryRequest};

use kvatlas_telemetry::labels::QueryKind;
use kvatlas_telemetry::{AnsweredPrompt, QueryMetricsByNamespace};

use super::super::prompts::{prompt_of, prompts_of};
use super::described;

/// Encoded reply, with the facts by which it is counted.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Payload of the reply.
    pub(in super::super) payload: Vec<u8>,
    /// Kind of the query, or of the first query of a batch.
    pub(in super::super) kind: QueryKind,
    /// Namespace that the request was about.
    pub(in super::super) namespace: NamespaceName,
    /// Reply before encoding. `None` if the request was not about a prompt.
    pub(in super::super) reply: Option<AnyReply>,
}

/// Reply to a request: one answer to a single query, or one answer to each query of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AnyReply {
    /// Reply to a single query.
    Single(QueryReply),
    /// Reply to a batch of queries.
    Batch(BatchReply),
}

impl Answer {
    /// Encodes the answer to a request. If the answer would be longer than `bytes_max`, addresses and labels are left
    /// out.
    pub(in super::super) fn to_query(
        namespace: NamespaceName,
        request: &QueryRequest,
        mut reply: AnyReply,
        bytes_max: usize,
    ) -> Self {
        let (kind, _) = described(request);
        Self {
            payload: reply.encode_within(bytes_max),
            kind,
            namespace,
            reply: Some(reply),
        }
    }

    /// Counts the answer in the metrics. Making the answer took `elapsed`.
    pub(in super::super) fn count(&self, metrics: &QueryMetricsByNamespace, elapsed: Duration) {
        let prompts = self.reply.iter().flat_map(AnyReply::prompts);
        metrics.count(&self.namespace, self.kind, 1, elapsed, prompts);
    }
}

impl AnyReply {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Single(reply) => reply.encode(),
            Self::Batch(reply) => reply.encode(),
        }
    }

    /// Encodes the reply. If it would be longer than `bytes_max`, addresses and labels are left out. Even then it can
    /// be longer.
    pub(in super::super) fn encode_within(&mut self, bytes_max: usize) -> Vec<u8> {
        let payload = self.encode();
        if payload.len() <= bytes_max {
            return payload;
        }
        match self {
            Self::Single(reply) => reply.drop_profiles(),
            Self::Batch(reply) => reply.drop_profiles(),
        }
        self.encode()
    }

    /// Returns, for each answered prompt, the numbers of blocks asked for and found.
    pub(crate) fn prompts(&self) -> impl Iterator<Item = AnsweredPrompt> {
        let (single, batch) = match self {
            Self::Single(reply) => (Some(reply), None),
            Self::Batch(reply) => (None, Some(prompts_of(reply))),
        };
        single
            .map(prompt_of)
            .into_iter()
            .chain(batch.into_iter().flatten())
    }
}
