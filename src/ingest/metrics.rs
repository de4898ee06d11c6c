//! The metrics of events, found by namespace.

use std::sync::Arc;

use dashmap::DashMap;

use crate::telemetry::EventMetrics;
use crate::wire::NamespaceName;

/// The metrics of each namespace, made when it first has an event. Bounded by the limit on namespaces.
#[derive(Default)]
pub(crate) struct MetricsByNamespace(DashMap<NamespaceName, Arc<EventMetrics>>);

impl MetricsByNamespace {
    pub(crate) fn of(&self, namespace: &NamespaceName) -> Arc<EventMetrics> {
        if let Some(found) = self.0.get(namespace) {
            return Arc::clone(&found);
        }
        let metrics = self
            .0
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(EventMetrics::for_namespace(namespace.as_str())));
        Arc::clone(&metrics)
    }
}
