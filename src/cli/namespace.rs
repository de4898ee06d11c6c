//! Arguments that name the namespace that a command is about.

use clap::{ArgGroup, Args};
use kvatlas_core::hash::Scheme;
use kvatlas_core::wire::{ModelKey, NamespaceName};

use super::failure::Failure;

/// A cache, named by its namespace or by its model.
#[derive(Debug, Args)]
#[group(skip)]
#[command(group = ArgGroup::new("cache").required(true))]
pub(super) struct CacheArguments {
    /// Name of the namespace.
    #[arg(long, group = "cache", value_name = "NAME")]
    namespace: Option<NamespaceName>,
    /// Model of the namespace, in place of the namespace's name.
    #[arg(long, group = "cache", value_name = "NAME")]
    model: Option<String>,
    /// Tenant or routing group of the model.
    #[arg(long, value_name = "NAME", requires = "model", conflicts_with = "namespace")]
    tenant: Option<String>,
    /// Scheme of the hashes in the namespace, such as llm-d-xxh64; by default, the scheme of the wire contract.
    #[arg(long, value_name = "SCHEME", requires = "model", conflicts_with = "namespace")]
    scheme: Option<Scheme>,
}

impl CacheArguments {
    /// Returns the namespace that the arguments name, directly or by model, tenant and scheme.
    pub(super) fn namespace(&self) -> Result<NamespaceName, Failure> {
        if let Some(namespace) = &self.namespace {
            return Ok(namespace.clone());
        }
        let model = self.model.as_deref().unwrap_or_default();
        let key = ModelKey::of_tenant(model, self.tenant.as_deref().unwrap_or_default());
        let key = key.speaking(self.scheme.clone());
        let named = key.namespace();
        named.map_err(|error| Failure::usage(format_args!("--model {model:?}: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Example {
        #[command(flatten)]
        cache: CacheArguments,
    }

    fn named(arguments: &[&str]) -> Option<String> {
        let arguments = ["example"].iter().chain(arguments);
        let parsed = Example::try_parse_from(arguments).ok()?;
        Some(parsed.cache.namespace().ok()?.to_string())
    }

    #[test]
    fn a_model_stands_for_its_namespace() {
        assert_eq!(named(&["--namespace", "llama"]).as_deref(), Some("llama"));
        let model = ["--model", "meta-llama/Llama-3.1-8B-Instruct"];
        assert_eq!(
            named(&model).as_deref(),
            Some("meta-llama__Llama-3_d1-8B-Instruct")
        );
        let tenant = ["--model", "m", "--tenant", "acme"];
        assert_eq!(named(&tenant).as_deref(), Some("m_tacme"));
        let scheme = ["--model", "m", "--scheme", "llm-d-xxh64:42"];
        assert_eq!(named(&scheme).as_deref(), Some("m_sllm-d-xxh64_c42"));
        for refused in [
            &[][..],
            &["--namespace", "a", "--model", "b"],
            &["--namespace", "a", "--tenant", "b"],
            &["--tenant", "b"],
            &["--model", ""],
            &["--model", "m", "--scheme", "md5"],
        ] {
            assert_eq!(named(refused), None, "{refused:?}");
        }
    }
}
