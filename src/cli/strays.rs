//! Strays. A stray is a namespace that does not exist, although publishers send events of it. A daemon's route `/index` lists
//! the strays.

use std::fmt;

use kvatlas_daemon::runbook::mend_for;
use serde::{Deserialize, Serialize};

use super::text::{counted, since};

/// Namespace that does not exist, and whose events are dropped.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct StrayNamespace {
    namespace: String,
    /// Worker whose publisher sent the last message of the namespace.
    worker: String,
    reason: String,
    detail: String,
    messages: u64,
    since_us: u64,
}

impl StrayNamespace {
    /// Returns a sentence about the namespace. `now_us` is the present time.
    pub(super) fn describe(&self, now_us: u64) -> String {
        let since = since(Some(self.since_us), now_us);
        format!("{self}{since}: {}", self.detail)
    }

    /// Returns the advice on what to do about the namespace.
    pub(super) fn mend(&self) -> String {
        let culprit = [self.namespace.as_str(), &self.worker, ""];
        mend_for([self.reason.as_str()].into_iter(), "what to do", culprit)
    }
}

impl fmt::Display for StrayNamespace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let messages = counted(self.messages, "message", "messages");
        write!(
            formatter,
            "nothing of namespace {} is taken: {messages}, the last of {} ({})",
            self.namespace, self.worker, self.reason
        )
    }
}
