//! The parameters of a request of the page.

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::wire::NamespaceName;

use kvatlas_process::admin::percent_decode;

use super::PageRefusal;
use super::atlas::Lens;

/// Parameters as `name=value` pairs. A name occurs once at most.
#[derive(Debug, Default)]
pub(super) struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Reads the part of a request's target after the question mark.
    pub(super) fn parse(query: &str) -> Result<Self, PageRefusal> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode(value)
                .ok_or_else(|| PageRefusal::Parameters("the query string is not well encoded".to_owned()))?;
            if pairs.iter().any(|(known, _)| known == name) {
                return Err(PageRefusal::Parameters("a parameter is given twice".to_owned()));
            }
            pairs.push((name.to_owned(), value));
        }
        Ok(Self(pairs))
    }

    /// Returns the value of a parameter, which must be present.
    pub(super) fn required(&self, name: &str) -> Result<&str, PageRefusal> {
        let found = self.0.iter().find(|(known, _)| known == name);
        found
            .map(|(_, value)| value.as_str())
            .ok_or_else(|| PageRefusal::Parameters(format!("the parameter {name} is missing")))
    }

    /// Returns the parameter `namespace`, the name of a namespace.
    pub(super) fn namespace(&self) -> Result<NamespaceName, PageRefusal> {
        let name = NamespaceName::new(self.required("namespace")?);
        name.map_err(|error| PageRefusal::Parameters(format!("namespace: {error}")))
    }

    /// Returns the parameter `lens`, which says how an atlas weighs prefixes.
    pub(super) fn lens(&self) -> Result<Lens, PageRefusal> {
        match self.required("lens")? {
            "asked" => Ok(Lens::Asked),
            "held" => Ok(Lens::Held),
            _ => Err(PageRefusal::Parameters("lens must be asked or held".to_owned())),
        }
    }

    /// Returns the parameter `block`, the last block of a node in an atlas.
    pub(super) fn block(&self) -> Result<PositionalLineageHash, PageRefusal> {
        let hash = self.required("block")?.parse();
        hash.map_err(|error| PageRefusal::Parameters(format!("block: {error}")))
    }
}
