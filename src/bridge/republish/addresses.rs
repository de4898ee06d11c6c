//! Addresses at which each engine's events are republished to routers.

use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

use kvatlas_core::wire::Rank;

use super::places::PLACES_MAX;

/// Maximum number of engines that get addresses by their order in flags and file.
const ASSIGNED_MAX: usize = 4096;

/// Error for a text that is no address for republishing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RepublishAddressError {
    /// The text does not have the form of an address.
    #[error(
        "write tcp://HOST:PORT, tcp://HOST:PORT-PORT for engines that are found, or NAME=tcp://HOST:PORT for one engine"
    )]
    Form,
    /// The range has too few ports, or too many.
    #[error("a range has 2 to 2048 ports, two for each engine")]
    Width,
}

/// Error for two addresses for the same engines.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--republish gives two addresses to {}", instance.as_deref().unwrap_or("all other engines"))]
pub struct TwoAddresses {
    /// Engine with two addresses; `None` for all engines without an address of their own.
    instance: Option<String>,
}

/// An address for republishing, as people write it: for one engine, or for all other engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepublishAddress {
    /// Engine of the address; `None` for all engines without an address of their own.
    instance: Option<String>,
    first: SocketPair,
    /// Number of port pairs of a range; `None` for an address that is no range.
    pairs: Option<usize>,
}

impl RepublishAddress {
    /// Returns whether the address is a range. The bridge gives each engine two ports of the range when it begins to
    /// follow the engine.
    pub fn is_range(&self) -> bool {
        self.pairs.is_some()
    }
}

/// A range of ports for all engines without an address of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortRange {
    first: SocketPair,
    /// Number of port pairs in the range.
    pub(super) pairs: usize,
}

impl PortRange {
    /// Returns the sockets of the port pair `number`, counted from 0; `None` beyond the range.
    pub(super) fn pair(&self, number: usize) -> Option<SocketPair> {
        (number < self.pairs).then(|| self.first.behind(number))?
    }
}

/// Two sockets of an engine on neighbouring ports: events on one, replays on the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPair {
    /// Host to listen at, in the form that sockets take.
    pub(super) host: String,
    /// Port of the events.
    pub(super) port: u16,
}

impl SocketPair {
    /// Returns the endpoint of the events.
    pub fn events(&self) -> String {
        format!("tcp://{}:{}", self.host_of_url(), self.port)
    }

    /// Returns the endpoint of replays.
    pub fn replay(&self) -> String {
        format!("tcp://{}:{}", self.host_of_url(), self.replay_port())
    }

    /// Returns the port of the events.
    pub(super) fn events_port(&self) -> u16 {
        self.port
    }

    /// Returns the port of replays.
    pub(super) fn replay_port(&self) -> u16 {
        self.port.saturating_add(1)
    }

    fn host_of_url(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]", self.host),
            false => self.host.clone(),
        }
    }

    /// Returns the pair of ports that comes `pairs` pairs after this pair; `None` if there are no such ports.
    fn behind(&self, pairs: usize) -> Option<Self> {
        let port = usize::from(self.port).checked_add(pairs.checked_mul(2)?)?;
        let port = u16::try_from(port).ok().filter(|port| *port < u16::MAX)?;
        Some(Self {
            host: self.host.clone(),
            port,
        })
    }
}

impl FromStr for RepublishAddress {
    type Err = RepublishAddressError;

    fn from_str(text: &str) -> Result<Self, RepublishAddressError> {
        use RepublishAddressError::Form;

        let (instance, endpoint) = match text.split_once("=tcp://") {
            Some((instance, endpoint)) if !instance.is_empty() => (Some(instance.to_owned()), endpoint),
            _ => (None, text.strip_prefix("tcp://").ok_or(Form)?),
        };
        let (host, port) = endpoint.rsplit_once(':').ok_or(Form)?;
        let host = match host {
            "*" => "0.0.0.0",
            host => host.trim_start_matches('[').trim_end_matches(']'),
        };
        let (port, last) = match port.split_once('-') {
            Some((first, last)) if instance.is_none() => (first, Some(last)),
            _ => (port, None),
        };
        let port: u16 = port.parse().map_err(|_| Form)?;
        if host.is_empty() || port == 0 || port == u16::MAX {
            return Err(Form);
        }
        let host = host.to_owned();
        Ok(Self {
            instance,
            first: SocketPair { host, port },
            pairs: last.map(|last| pairs_of(port, last)).transpose()?,
        })
    }
}

/// Returns the number of pairs from the port `first` to the port `last`.
fn pairs_of(first: u16, last: &str) -> Result<usize, RepublishAddressError> {
    let last: u16 = last.parse().map_err(|_| RepublishAddressError::Form)?;
    let ports = usize::from(last).saturating_sub(usize::from(first)) + 1;
    match ports / 2 {
        1..=PLACES_MAX => Ok(ports / 2),
        _ => Err(RepublishAddressError::Width),
    }
}

/// Refuses two addresses for the same engines.
pub(super) fn check(addresses: &[RepublishAddress]) -> Result<(), TwoAddresses> {
    for (place, address) in addresses.iter().enumerate() {
        let mut before = addresses.iter().take(place);
        if before.any(|other| other.instance == address.instance) {
            return Err(TwoAddresses {
                instance: address.instance.clone(),
            });
        }
    }
    Ok(())
}

/// Addresses of engines. Some addresses name their engine; the others are assigned by the order of the engines. The
/// ranks of a named engine have consecutive pairs of ports.
#[derive(Debug)]
pub(super) struct Addresses {
    named: BTreeMap<String, SocketPair>,
    base: Option<SocketPair>,
    range: Option<PortRange>,
    assigned: HashMap<(String, Rank), usize>,
}

impl Addresses {
    pub(super) fn new(addresses: &[RepublishAddress]) -> Self {
        let named = addresses
            .iter()
            .filter_map(|address| Some((address.instance.clone()?, address.first.clone())));
        let for_all = addresses.iter().find(|address| address.instance.is_none());
        let first = for_all.map(|address| address.first.clone());
        let pairs = for_all.and_then(|address| address.pairs);
        Self {
            named: named.collect(),
            range: first
                .clone()
                .zip(pairs)
                .map(|(first, pairs)| PortRange { first, pairs }),
            base: first.filter(|_| pairs.is_none()),
            assigned: HashMap::new(),
        }
    }

    /// Returns whether engines without an address of their own get one by their order in flags and file.
    pub(super) fn is_by_order(&self) -> bool {
        self.base.is_some()
    }

    /// Returns the range from which engines without an address of their own get ports; `None` if there is none.
    pub(super) fn range(&self) -> Option<&PortRange> {
        self.range.as_ref()
    }

    /// Assigns the next pair of ports to an engine, unless it has one.
    pub(super) fn assign(&mut self, instance: &str, rank: Rank) {
        let key = (instance.to_owned(), rank);
        let place = self.assigned.len();
        if !self.named.contains_key(instance) && !self.assigned.contains_key(&key) && place < ASSIGNED_MAX {
            self.assigned.insert(key, place);
        }
    }

    /// Returns the sockets that the engine's name, or its order among the engines, gives it; `None` if it has none.
    pub(super) fn of(&self, instance: &str, rank: Rank) -> Option<SocketPair> {
        if let Some(first) = self.named.get(instance) {
            return first.behind(usize::try_from(rank).ok()?);
        }
        let place = self.assigned.get(&(instance.to_owned(), rank))?;
        self.base.as_ref()?.behind(*place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_have_the_ports_of_their_name_or_their_turn() {
        let addresses = ["tcp://*:5600", "vllm-7=tcp://[::1]:6000"].map(|text| text.parse().unwrap());
        let mut addresses = Addresses::new(&addresses);
        for (instance, rank) in [("b", 0), ("vllm-7", 0), ("b", 0), ("a", 0), ("a", 1)] {
            addresses.assign(instance, rank);
        }
        let of = |instance, rank| {
            addresses
                .of(instance, rank)
                .map(|pair| (pair.events(), pair.replay()))
        };
        let pair = |events: &str, replay: &str| Some((events.to_owned(), replay.to_owned()));
        assert_eq!(of("b", 0), pair("tcp://0.0.0.0:5600", "tcp://0.0.0.0:5601"));
        assert_eq!(of("a", 1), pair("tcp://0.0.0.0:5604", "tcp://0.0.0.0:5605"));
        assert_eq!(of("vllm-7", 2), pair("tcp://[::1]:6004", "tcp://[::1]:6005"));
        assert_eq!(of("b", 1), None, "nobody has given it");
        assert_eq!(of("vllm-7", 40_000), None, "there are no such ports");
    }

    #[test]
    fn a_range_has_a_pair_for_each_two_ports() {
        let range = |text: &str| {
            let addresses = Addresses::new(&[text.parse().unwrap()]);
            assert_eq!(addresses.of("a", 0), None, "it is given when the engine comes");
            let range = addresses.range().unwrap();
            let pair = |number| range.pair(number).map(|pair| (pair.port, pair.replay()));
            (range.pairs, pair(range.pairs - 1), pair(range.pairs))
        };
        let pair = |port, replay: &str| Some((port, replay.to_owned()));
        assert_eq!(
            range("tcp://*:5600-5699"),
            (50, pair(5698, "tcp://0.0.0.0:5699"), None)
        );
        assert_eq!(
            range("tcp://[::1]:5600-5602"),
            (1, pair(5600, "tcp://[::1]:5601"), None)
        );
        assert_eq!(range("tcp://h:1-2048"), (1024, pair(2047, "tcp://h:2048"), None));
        for text in ["tcp://h:5600-5600", "tcp://h:5600-5599", "tcp://h:1-2050"] {
            let refused = text.parse::<RepublishAddress>();
            assert_eq!(refused, Err(RepublishAddressError::Width), "{text}");
        }
        for text in [
            "a=tcp://h:1-9",
            "tcp://h:1-",
            "tcp://h:-9",
            "tcp://h:1-70000",
            "tcp://h:1-2-3",
        ] {
            let refused = text.parse::<RepublishAddress>();
            assert_eq!(refused, Err(RepublishAddressError::Form), "{text}");
        }
    }

    #[test]
    fn no_engine_has_two_addresses() {
        let check = |texts: &[&str]| {
            let addresses: Vec<_> = texts.iter().map(|text| text.parse().unwrap()).collect();
            check(&addresses)
        };
        assert_eq!(check(&["tcp://h:1", "a=tcp://h:3", "b=tcp://h:3"]), Ok(()));
        let twice = |instance: Option<&str>| {
            Err(TwoAddresses {
                instance: instance.map(str::to_owned),
            })
        };
        assert_eq!(check(&["tcp://h:1", "tcp://h:3"]), twice(None));
        assert_eq!(check(&["tcp://h:1", "tcp://h:3-9"]), twice(None));
        assert_eq!(check(&["a=tcp://h:1", "a=tcp://h:3"]), twice(Some("a")));
    }

    #[test]
    fn other_forms_are_refused() {
        for text in [
            "5600",
            "tcp://host",
            "tcp://host:0",
            "tcp://host:65535",
            "tcp://:1",
            "a=5600",
            "ipc://x:1",
        ] {
            let refused = text.parse::<RepublishAddress>();
            assert_eq!(refused, Err(RepublishAddressError::Form), "{text}");
        }
    }
}
