//! The query box of the page.

use kvatlas_core::wire::SingleQuery;

use super::questions::BoxQuestion;
use super::{Page, PageRefusal};

/// Maximum number of holders that are listed. The answer also has the total number of holders.
const HOLDERS_MAX: u32 = 200;

impl Page {
    /// Answers a query of the wire contract, written as JSON. The answer tells the first block that each holder lacks.
    pub(super) fn ask(&self, question: &BoxQuestion) -> Result<String, PageRefusal> {
        let mut query: SingleQuery =
            serde_json::from_str(&question.query).map_err(|error| PageRefusal::Query(error.to_string()))?;
        query
            .check()
            .map_err(|error| PageRefusal::Query(error.to_string()))?;
        query.options.explain = query.positions.is_none();
        query.options.limit = Some(query.options.limit.unwrap_or(HOLDERS_MAX).min(HOLDERS_MAX));
        let reply = self.answerer.answer_one(&question.namespace, &query)?;
        serde_json::to_string(&reply).map_err(|_| PageRefusal::Failed)
    }
}
