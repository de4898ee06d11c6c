//! Types of the settings about Dynamo.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A component of Dynamo: the workers that serve one model. It is written `NAMESPACE.COMPONENT`, or `NAMESPACE.COMPONENT=TENANT`
/// if the model's blocks there belong to a tenant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DynamoComponent {
    /// Dynamo's own namespace of the component, which is no namespace of kvatlas.
    pub namespace: String,
    /// Name of the component.
    pub name: String,
    /// Tenant of the component's workers, in kvatlas; empty if they have none.
    pub tenant: String,
}

impl FromStr for DynamoComponent {
    type Err = NoComponent;

    fn from_str(text: &str) -> Result<Self, NoComponent> {
        let is_token = |token: &str| {
            let mut bytes = token.bytes();
            !token.is_empty() && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
        };
        let (component, tenant) = match text.split_once('=') {
            Some((_, "")) => return Err(NoComponent),
            Some(split) => split,
            None => (text, ""),
        };
        let (namespace, name) = component.split_once('.').ok_or(NoComponent)?;
        if !is_token(namespace) || !is_token(name) {
            return Err(NoComponent);
        }
        Ok(Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            tenant: tenant.to_owned(),
        })
    }
}

/// Error: the text is not `NAMESPACE.COMPONENT` or `NAMESPACE.COMPONENT=TENANT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not NAMESPACE.COMPONENT, of letters, digits, _ and -, with =TENANT behind it or not")]
pub struct NoComponent;

impl fmt::Display for DynamoComponent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.namespace, self.name)?;
        match self.tenant.as_str() {
            "" => Ok(()),
            tenant => write!(formatter, "={tenant}"),
        }
    }
}

/// The place where Dynamo's processes find each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discovery {
    /// The HTTP gateway of etcd, at `HOST:PORT`.
    Etcd(String),
    /// A folder of files, which Dynamo's variable `DYN_FILE_KV` names.
    Files(PathBuf),
}

/// Error: the text names no place of discovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not etcd:http://HOST:PORT, nor file:DIRECTORY")]
pub struct NoDiscovery;

impl FromStr for Discovery {
    type Err = NoDiscovery;

    fn from_str(text: &str) -> Result<Self, NoDiscovery> {
        if let Some(folder) = text.strip_prefix("file:").filter(|folder| !folder.is_empty()) {
            return Ok(Self::Files(PathBuf::from(folder)));
        }
        let authority = text.strip_prefix("etcd:http://").ok_or(NoDiscovery)?;
        let authority = authority.trim_end_matches('/');
        let (host, port) = authority.rsplit_once(':').ok_or(NoDiscovery)?;
        let is_address = !host.is_empty() && !authority.contains(['/', '@']) && port.parse::<u16>().is_ok();
        is_address
            .then(|| Self::Etcd(authority.to_owned()))
            .ok_or(NoDiscovery)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_have_a_namespace_and_a_name() {
        let component: DynamoComponent = "dynamo.backend".parse().unwrap();
        assert_eq!(component.to_string(), "dynamo.backend");
        let component: DynamoComponent = "dynamo.prefill=team a".parse().unwrap();
        assert_eq!(
            (component.name.as_str(), component.tenant.as_str()),
            ("prefill", "team a")
        );
        assert_eq!(component.to_string(), "dynamo.prefill=team a");
        for text in ["dynamo", "dynamo.", ".x", "a.b.c", "a b.c", "a.b=", "a=b"] {
            assert_eq!(text.parse::<DynamoComponent>(), Err(NoComponent), "{text}");
        }
    }

    #[test]
    fn places_of_discovery_are_read() {
        assert_eq!(
            "etcd:http://e:2379/".parse(),
            Ok(Discovery::Etcd("e:2379".to_owned()))
        );
        assert_eq!("file:/dyn".parse(), Ok(Discovery::Files(PathBuf::from("/dyn"))));
        for text in [
            "",
            "file:",
            "etcd:e:2379",
            "etcd:https://e:1",
            "etcd:http://e",
            "http://e:1",
            "etcd:http://a@e:1",
        ] {
            assert_eq!(text.parse::<Discovery>(), Err(NoDiscovery), "{text}");
        }
    }
}
