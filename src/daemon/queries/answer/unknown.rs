//! Namespaces that do not exist, and the reasons that clients are told.

use std::sync::Arc;

use kvatlas_client::unix_time_us;
use kvatlas_core::index::Namespace;
use kvatlas_core::wire::{ErrorCode, NamespaceName, WireError};

use super::Answerer;

impl Answerer {
    /// Returns the namespace `name`. If it is unknown, returns the error that says why.
    pub(crate) fn namespace(&self, name: &NamespaceName) -> Result<Arc<Namespace>, WireError> {
        if let Some(known) = self.namespaces.get(name) {
            return Ok(known);
        }
        // The reason is found before the last look. So "nobody publishes" is never said of a namespace that appeared
        // before everybody was known.
        let error = self.unknown(name);
        self.namespaces.get(name).ok_or(error)
    }

    /// Returns the error that says why a namespace is unknown.
    fn unknown(&self, name: &NamespaceName) -> WireError {
        let (is_listed, is_behind) = (self.trust.is_listed(), self.freshness.is_everybody_behind());
        // A worker may have blocks in this namespace, but its events were dropped.
        if let Some(reason) = self.dropped(name) {
            let text = format!("events of namespace {name:?} have come and were dropped: {reason}");
            return WireError::new(ErrorCode::Unavailable, text);
        }
        let why = if self.trust.has_unheard() {
            "the NATS server refuses events of engines that this process follows, as /readyz says"
        } else if !is_listed {
            "the events have been followed for less than the time that a publisher may be silent"
        } else if is_behind {
            "events may wait unread for longer than events.behind_after_ms"
        } else if self.strays.lacks_some(unix_time_us()) {
            "events of more namespaces that do not exist than are remembered have come and were dropped"
        } else {
            let text = format!(
                "no events have come for namespace {name:?} and no configuration names it; check the name, or ask again \
                 when a worker has published"
            );
            return WireError::new(ErrorCode::UnknownNamespace, text);
        };
        let text = format!(
            "whether somebody publishes for namespace {name:?} is not known: {why}; ask again in a second"
        );
        WireError::new(ErrorCode::Unavailable, text)
    }

    /// Whether a namespace does not exist, and as far as is known no message for it was dropped either.
    pub(crate) fn is_unheard(&self, name: &NamespaceName) -> bool {
        let is_dropped = self.dropped(name).is_some() || self.strays.lacks_some(unix_time_us());
        !is_dropped && self.namespaces.get(name).is_none()
    }

    /// Returns the reason why messages for a namespace that does not exist were dropped. `None` if none came.
    fn dropped(&self, name: &NamespaceName) -> Option<String> {
        let refusal = self.namespaces.refusal(name);
        let refusal = refusal.map(|refused| refused.to_string());
        refusal.or_else(|| self.strays.reason(name, unix_time_us()))
    }
}
