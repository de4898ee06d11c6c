//! Dynamo's request plane: the endpoint `kv_indexer_query`, which Dynamo's router asks with `--use-remote-indexer`.
//!
//! ```text
//!             discovery (etcd, or files)
//!               ▲ record           │
//! kvatlas ──────┘                  ▼
//!    ▲ ◀───── request, over NATS or TCP ────── router
//!    └─────── answer, over a connection to the address in the request ──▶
//! ```
//!
//! The router has no fallback: without an answer its requests fail. So every request gets an answer. A worker whose
//! state is in doubt is left out, and an unknown model has no workers. A daemon that is not ready answers with no
//! workers at all. A starting replica makes neither a record nor a subscription until it knows as much as the other
//! replicas. So routers do not ask it earlier.
//!
//! | file | what |
//! |---|---|
//! | `messages` | the two-part messages, and the discovery record |
//! | `answer` | from a question to its answer |
//! | `discovery` | keeping the record where routers look for it |
//! | `serve` | taking requests, and giving answers back |
//!
//! The bridge asks workers over the same plane, with the same messages.

mod answer;
mod destinations;
mod discovery;
mod messages;
mod serve;

pub use serve::dynamo_subjects;
pub(crate) use serve::start_dynamo;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kvatlas_config::Config;

    use super::*;

    #[test]
    fn the_subjects_are_those_to_which_deploy_nats_gives_rights() {
        let asked = |settings: &[(&str, &str)]| {
            let flags = settings
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let flags: BTreeMap<String, String> = flags.collect();
            dynamo_subjects(&Config::load(flags, std::iter::empty(), None).unwrap())
        };
        let served = ("dynamo.components", "dynamo.backend");
        assert!(asked(&[]).is_empty());
        assert!(asked(&[served, ("dynamo.listen", "127.0.0.1:0")]).is_empty());
        assert_eq!(
            asked(&[served]),
            ["dynamo_backend.kv_indexer_query-719a0554d096ab3c"]
        );
    }
}
