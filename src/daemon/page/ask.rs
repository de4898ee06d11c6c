//! The query box of the page.

use kvatlas_core::wire::SingleQuery;

use super::parameters::Parameters;
use super::{Page, PageRefusal};

/// Maximum number of holders that are listed. The answer also has the total number of holders.
const HOLDERS_MAX: u32 = 200;

impl Page {
    /// Answers a query of the wire contract, written as JSON. The answer tells the first block that each holder lacks.
    pub(super) fn ask(&self, parameters: &Parameters) -> Result<String, PageRefusal> {
        let name = parameters.namespace()?;
        let bad_query =
            |error: &dyn std::fmt::Display| PageRefusal::Parameters(format!("the query: {error}"));
        let mut query: SingleQuery =
            serde_json::from_str(parameters.required("query")?).map_err(|error| bad_query(&error))?;
        query.check().map_err(|error| bad_query(&error))?;
        query.options.explain = query.positions.is_none();
        query.options.limit = Some(query.options.limit.unwrap_or(HOLDERS_MAX).min(HOLDERS_MAX));
        let reply = self.answerer.answer_one(&name, &query)?;
        serde_json::to_string(&reply).map_err(|_| PageRefusal::Failed)
    }
}
