//! Namespaces that do not exist although events of them come, as a daemon's `/index` names them.

use std::fmt;

use kvatlas_daemon::runbook::mend_for;
use serde::{Deserialize, Serialize};

use super::text::{counted, since};

/// Such a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Stray {
    namespace: String,
    /// The publisher of the last message.
    worker: String,
    reason: String,
    detail: String,
    messages: u64,
    since_us: u64,
}

impl Stray {
    /// The whole sentence about it at a time.
    pub(super) fn describe(&self, now_us: u64) -> String {
        let since = since(Some(self.since_us), now_us);
        format!("{self}{since}: {}", self.detail)
    }

    /// Returns the advice on what its publisher is to be given.
    pub(super) fn mend(&self) -> String {
        let culprit = [self.namespace.as_str(), &self.worker, ""];
        mend_for([self.reason.as_str()].into_iter(), "what to do", culprit)
    }
}

impl fmt::Display for Stray {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let messages = counted(self.messages, "message", "messages");
        write!(
            formatter,
            "nothing of namespace {} is taken: {messages}, the last of {} ({})",
            self.namespace, self.worker, self.reason
        )
    }
}
