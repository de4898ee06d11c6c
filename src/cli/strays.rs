//! Strays. A stray is a namespace that does not exist, although publishers send events of it. A daemon's route `/index`
//! lists the strays.

use serde::{Deserialize, Serialize};

use super::refused::mend_of_drops;
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
        let Self {
            namespace,
            worker,
            reason,
            detail,
            ..
        } = self;
        let messages = counted(self.messages, "message", "messages");
        let since = since(Some(self.since_us), now_us);
        format!(
            "nothing of namespace {namespace} is taken: {messages}, the last of {worker} ({reason}){since}: {detail}"
        )
    }

    /// Returns the advice on what to do about the namespace.
    pub(super) fn mend(&self) -> String {
        mend_of_drops(&self.reason, &self.namespace, &self.worker)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_on_a_stray_names_no_holder() {
        let stray = |reason: &str| StrayNamespace {
            namespace: "new".to_owned(),
            worker: "gpu-9".to_owned(),
            reason: reason.to_owned(),
            detail: String::new(),
            messages: 1,
            since_us: 0,
        };
        let undecodable = stray("undecodable").mend();
        assert!(undecodable.starts_with("correct the publisher"), "{undecodable}");
        // A namespace that does not exist has no holder to resynchronise.
        assert!(!undecodable.contains("admin resync"), "{undecodable}");
        let stale = stray("stale_epoch").mend();
        assert!(stale.ends_with("kvatlas admin forget new gpu-9"), "{stale}");
    }
}
