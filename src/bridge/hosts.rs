//! Hosts that a bridge may connect to for engines that are registered over HTTP.
//!
//! Without this bound, a client that may register engines could make the bridge connect to any internal host, or send requests
//! there.

use std::net::IpAddr;
use std::str::FromStr;

use super::zmtp::split_endpoint;

/// Hosts of engines that may be registered over HTTP. This machine is always allowed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllowedHosts {
    is_any: bool,
    /// Allowed names, in lower case. A name that begins with a dot allows every host whose name ends with it.
    names: Vec<String>,
    /// Allowed networks, each given by an address in canonical form and its number of leading bits that count.
    networks: Vec<(IpAddr, u8)>,
}

/// Error for a text that is no list of hosts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no host: write NAME, *.SUFFIX, ADDRESS, ADDRESS/BITS or any, joined by commas")]
pub struct HostsError(String);

impl FromStr for AllowedHosts {
    type Err = HostsError;

    fn from_str(text: &str) -> Result<Self, HostsError> {
        let mut allowed = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            allowed.add(part).ok_or_else(|| HostsError(part.to_owned()))?;
        }
        Ok(allowed)
    }
}

impl AllowedHosts {
    fn add(&mut self, part: &str) -> Option<()> {
        if part == "any" {
            self.is_any = true;
            return Some(());
        }
        let (address, bits) = match part.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().ok()?)),
            None => (part, None),
        };
        if let Ok(address) = address.parse::<IpAddr>() {
            self.networks.push(canonical_network(address, bits)?);
            return Some(());
        }
        let name = part.strip_prefix('*').unwrap_or(part).to_ascii_lowercase();
        let is_suffix = part.starts_with('*');
        let is_name = |text: &str| {
            let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            !text.is_empty() && text.bytes().all(is_letter)
        };
        let is_sound = bits.is_none() && is_name(&name) && is_suffix == name.starts_with('.');
        self.names.push(name);
        is_sound.then_some(())
    }

    /// Whether the bridge may connect to `host`, which is a name or an address.
    pub fn allows(&self, host: &str) -> bool {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if self.is_any || is_here(host) {
            return true;
        }
        if let Ok(address) = host.parse::<IpAddr>() {
            let address = address.to_canonical();
            return self.networks.iter().any(|network| is_in(address, *network));
        }
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        self.names.iter().any(|name| match name.starts_with('.') {
            true => host.ends_with(name),
            false => host == *name,
        })
    }
}

/// Whether `host` means this machine: `localhost`, or a loopback address.
pub(super) fn is_here(host: &str) -> bool {
    let is_loopback = |address: IpAddr| address.to_canonical().is_loopback();
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(is_loopback)
}

/// Returns a network with its address in canonical form: an IPv4-mapped address becomes an IPv4 address, with 96 bits
/// fewer. Without `bits`, the network is one address. `None` if the address has fewer bits, or if the network is larger
/// than all IPv4-mapped addresses together.
fn canonical_network(address: IpAddr, bits: Option<u8>) -> Option<(IpAddr, u8)> {
    let length = |address: IpAddr| if address.is_ipv4() { 32 } else { 128 };
    let canonical = address.to_canonical();
    let bits = bits.unwrap_or(length(address));
    let bits = bits.checked_sub(length(address) - length(canonical))?;
    (bits <= length(canonical)).then_some((canonical, bits))
}

/// Whether `address` is in a network. Both addresses are in canonical form.
fn is_in(address: IpAddr, (network, bits): (IpAddr, u8)) -> bool {
    let shared =
        |differing: u128, length: u32| differing.checked_shr(length - u32::from(bits)).unwrap_or(0) == 0;
    match (address, network) {
        (IpAddr::V4(one), IpAddr::V4(other)) => shared(u128::from(one.to_bits() ^ other.to_bits()), 32),
        (IpAddr::V6(one), IpAddr::V6(other)) => shared(one.to_bits() ^ other.to_bits(), 128),
        _ => false,
    }
}

/// Returns the host of an endpoint, without brackets; `None` if the endpoint has none. A socket's host is the one to which
/// the bridge connects, because both are parsed in one place.
pub(super) fn host_of(endpoint: &str) -> Option<String> {
    let (scheme, rest) = endpoint.split_once("://")?;
    if scheme == "tcp" {
        return split_endpoint(endpoint).map(|(host, _)| host.to_owned());
    }
    let authority = rest.split(['/', '?', '#']).next()?;
    let authority: hyper::http::uri::Authority = authority.parse().ok()?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| host.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(text: &str) -> AllowedHosts {
        text.parse().unwrap()
    }

    #[test]
    fn by_default_only_this_machine_is_allowed() {
        for list in [AllowedHosts::default(), allowed("")] {
            for here in [
                "127.0.0.1",
                "127.9.9.9",
                "::1",
                "[::1]",
                "::ffff:127.0.0.1",
                "LOCALHOST",
            ] {
                assert!(list.allows(here), "{here}");
            }
            for other in [
                "10.0.0.1",
                "169.254.169.254",
                "0.0.0.0",
                "localhost.evil.example",
                "2130706433",
                "gpu-0",
            ] {
                assert!(!list.allows(other), "{other}");
            }
        }
    }

    #[test]
    fn hosts_are_names_suffixes_addresses_and_networks() {
        let list = allowed("gpu-0, *.llm.svc,10.1.0.0/16,192.0.2.7,fd00::/8");
        for host in [
            "gpu-0",
            "GPU-0.",
            "vllm-0.llm.svc",
            "10.1.255.1",
            "::ffff:10.1.0.1",
            "192.0.2.7",
            "fd12::1",
        ] {
            assert!(list.allows(host), "{host}");
        }
        for host in [
            "gpu-00",
            "a.gpu-0",
            "llm.svc",
            "evil-llm.svc",
            "10.2.0.1",
            "192.0.2.8",
            "fe80::1",
        ] {
            assert!(!list.allows(host), "{host}");
        }
        assert!(allowed("any").allows("169.254.169.254"));
        assert!(allowed("0.0.0.0/0").allows("8.8.8.8") && !allowed("0.0.0.0/0").allows("fd00::1"));
        let mapped = allowed("::ffff:10.1.2.3,::ffff:192.0.2.0/120");
        for host in ["10.1.2.3", "::ffff:10.1.2.3", "192.0.2.255"] {
            assert!(mapped.allows(host), "{host}");
        }
        for host in ["10.1.2.4", "169.254.169.254", "192.0.3.0", "::10.1.2.3"] {
            assert!(!mapped.allows(host), "{host}");
        }
        for wrong in [
            "*",
            "*x",
            "a b",
            "10.0.0.0/33",
            "::ffff:10.1.2.3/95",
            "::ffff:10.1.2.3/129",
            "fd00::/129",
            "10.0.0.0/x",
            "gpu-0/8",
            ".x",
            "tcp://a",
        ] {
            assert!(wrong.parse::<AllowedHosts>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_endpoint_has_a_host() {
        for (endpoint, host) in [
            ("tcp://gpu-0:5557", Some("gpu-0")),
            ("tcp://[::1]:5557", Some("::1")),
            ("http://10.0.0.1/v2/events", Some("10.0.0.1")),
            ("grpcs://h:1", Some("h")),
            ("tcp://::ffff:192.0.2.2:5557", None),
            ("tcp://::1:5557", None),
            ("tcp://a@b:5557", None),
            ("gpu-0:5557", None),
            ("tcp://", None),
        ] {
            assert_eq!(host_of(endpoint).as_deref(), host, "{endpoint}");
        }
    }
}
