//! Namespaces that are searched for a question that names none.

use kvatlas_core::wire::NamespaceName;
use kvatlas_telemetry::QueryErrorMetrics;

use super::Source;

/// Maximum number of namespaces that are searched for one question.
const SEARCHED_MAX: usize = 64;

/// Returns those of `names` that are searched for a question, at most [`SEARCHED_MAX`]. If there are more names, leaves
/// out the namespaces that no worker uses; those of a gateway are all used. Then cuts the end off. Also returns whether
/// nothing was cut off. If something was, that is counted and logged.
pub(crate) fn searched(
    source: &Source,
    mut names: Vec<NamespaceName>,
    metrics: &QueryErrorMetrics,
) -> (Vec<NamespaceName>, bool) {
    if names.len() > SEARCHED_MAX
        && let Source::Here(index) = source
    {
        names.retain(|name| index.is_used(name));
    }
    let is_whole = names.len() <= SEARCHED_MAX;
    if !is_whole {
        metrics.unsearched(names.len() - SEARCHED_MAX);
        names.truncate(SEARCHED_MAX);
    }
    (names, is_whole)
}
