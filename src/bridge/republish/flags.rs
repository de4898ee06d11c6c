//! Flags of vLLM's router for the engines that are republished, so that nobody has to write them by hand.

use std::collections::BTreeMap;

use kvatlas_core::wire::{Address, Rank};
use kvatlas_process::admin::parameters;
use serde::Deserialize;

use super::addresses::SocketPair;

/// Hint in error texts that shows the parameters.
const FORM: &str =
    "write ?host=NAME, the name by which routers reach this bridge, and &model=NAME for engines of one model";

/// Request for the flags of vLLM's router, read from the query string of an HTTP request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterQuestion {
    /// Host by which the router reaches the bridge.
    pub(in super::super) host: String,
    /// Model whose engines are asked for; `None` for all engines.
    pub(in super::super) model: Option<String>,
}

impl RouterQuestion {
    /// Reads the request from a query string.
    ///
    /// # Errors
    ///
    /// A text for the client if the query string has no valid host, or has another parameter than `host` and `model`.
    pub fn parse(query: Option<&str>) -> Result<Self, &'static str> {
        let question: Self = parameters(query).map_err(|_| FORM)?;
        is_host(&question.host).then_some(question).ok_or(FORM)
    }
}

/// Returns whether the text is a host as it stands in an endpoint: a name, an address, or an address of IPv6 in brackets.
fn is_host(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:[]".contains(&byte);
    !text.is_empty() && text.bytes().all(is_plain)
}

/// Returns the flags, on one line: the workers' URLs, and the sockets of each worker in the order of its ranks. A
/// worker is left out while one of its ranks is missing, because the router knows the rank of a socket only by the
/// order.
pub(in super::super) fn router_flags(
    host: &str,
    engines: impl IntoIterator<Item = (Address, Rank, SocketPair)>,
) -> String {
    let mut workers: BTreeMap<String, BTreeMap<Rank, SocketPair>> = BTreeMap::new();
    for (address, rank, sockets) in engines {
        let ranks = workers.entry(url_of(&address)).or_default();
        ranks.insert(rank, sockets);
    }
    workers.retain(|url, ranks| is_word(url) && (0..).zip(ranks.keys()).all(|(place, rank)| place == *rank));
    let mut flags = Vec::new();
    if !workers.is_empty() {
        flags.push("--worker-urls".to_owned());
        flags.extend(workers.keys().cloned());
    }
    for (url, ranks) in &workers {
        let endpoints = |port: fn(&SocketPair) -> u16| {
            let endpoints = ranks
                .values()
                .map(|sockets| format!("tcp://{host}:{}", port(sockets)));
            endpoints.collect::<Vec<_>>().join(",")
        };
        flags.push(format!(
            "--kv-event-source {url}={}",
            endpoints(SocketPair::events_port)
        ));
        flags.push(format!(
            "--kv-event-replay-source {url}={}",
            endpoints(SocketPair::replay_port)
        ));
    }
    flags.join(" ") + "\n"
}

/// Returns the URL of a worker. An address without a scheme becomes an HTTP URL.
fn url_of(address: &Address) -> String {
    let address = address.as_str();
    match address.contains("://") {
        true => address.to_owned(),
        false => format!("http://{address}"),
    }
}

/// Returns whether a shell takes the URL for one plain word even without quotes.
fn is_word(url: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:/[]%~@".contains(&byte);
    url.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(port: u16) -> SocketPair {
        let host = "0.0.0.0".to_owned();
        SocketPair { host, port }
    }

    #[test]
    fn each_worker_has_the_sockets_of_its_ranks_in_their_order() {
        let engine = |address: &str, rank, port| (Address::new(address).unwrap(), rank, pair(port));
        let engines = [
            engine("10.0.0.2:8000", 1, 5604),
            engine("10.0.0.2:8000", 0, 5600),
            engine("https://gpu-1/", 0, 5602),
            // Rank 0 is missing.
            engine("10.0.0.3:8000", 1, 5606),
        ];
        assert_eq!(
            router_flags("kvatlas", engines),
            "--worker-urls http://10.0.0.2:8000 https://gpu-1/ \
             --kv-event-source http://10.0.0.2:8000=tcp://kvatlas:5600,tcp://kvatlas:5604 \
             --kv-event-replay-source http://10.0.0.2:8000=tcp://kvatlas:5601,tcp://kvatlas:5605 \
             --kv-event-source https://gpu-1/=tcp://kvatlas:5602 --kv-event-replay-source https://gpu-1/=tcp://kvatlas:5603\n"
        );
        assert_eq!(router_flags("kvatlas", []), "\n");
    }

    #[test]
    fn a_question_has_to_name_the_host() {
        let question = |query| RouterQuestion::parse(query).map(|question| (question.host, question.model));
        let asked = |host: &str, model: Option<&str>| Ok((host.to_owned(), model.map(str::to_owned)));
        assert_eq!(question(Some("host=kvatlas.llm")), asked("kvatlas.llm", None));
        let both = question(Some("model=meta-llama/L%203&host=[::1]"));
        assert_eq!(both, asked("[::1]", Some("meta-llama/L 3")));
        for query in [
            "",
            "host=",
            "model=m",
            "host=a&host=b",
            "host=a%20b",
            "host=a&x=y",
            "host=$(id)",
        ] {
            assert_eq!(question(Some(query)), Err(FORM), "{query}");
        }
        assert_eq!(question(None), Err(FORM));
    }
}
