//! Discovery: finds engines by DNS, in files that are watched, as pods of Kubernetes, and in the records of Dynamo.
//!
//! A source reports the whole set of engines that it knows, once at first and then after each change. One function,
//! [`Bridge::replace`], compares the set with the source's last one:
//!
//! - A new engine is followed.
//! - An engine whose settings or identity have changed is followed anew, from the beginning.
//! - An engine that is gone is forgotten immediately.
//!
//! A source that cannot look just now reports nothing, and the engines that it has known stay.
//!
//! | source | known engines | how the source is read |
//! |---|---|---|
//! | `dns:NAME[:PORT]` | addresses and ports | every few seconds |
//! | `file:PATH` | what the file says | every second whether it has changed |
//! | `kubernetes:SELECTOR` | pods: names, addresses, UIDs, labels | by a watch |
//! | `inferencepool:NAME` | the pods of a pool | by two watches |
//! | `dynamo:PLACE` | publishers of Dynamo's event planes | every second |
//! | `endpointslices:SERVICE` | the endpoints of a Service: names, addresses, UIDs | by a watch |
//!
//! Each source has a file of its own. All sources report through `reports.rs`, and use `found.rs` to make engines of addresses.

mod dns;
mod dynamo;
mod file;
mod found;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod labels;
mod reports;
mod spec;

use std::time::Duration;

use kvatlas_telemetry::log_gated;

use super::engines::Bridge;
use super::spec::EngineDefaults;

pub use labels::{PodLabels, PodLabelsError};
use reports::KnownEngines;
pub(super) use reports::{LookError, Reports};
use spec::DiscoveryPlace;
pub use spec::{Discover, DiscoverError};

/// Pause before the bridge tries refused engines again: the reason of the refusal may be gone by then.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Intervals at which the bridge reads the sources that do not report changes by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscoverOptions {
    /// Pause between two questions to DNS.
    pub dns_interval: Duration,
    /// Pause between two checks whether files, or records of Dynamo, have changed.
    pub file_interval: Duration,
}

impl Default for DiscoverOptions {
    fn default() -> Self {
        Self {
            dns_interval: Duration::from_secs(5),
            file_interval: Duration::from_secs(1),
        }
    }
}

impl Bridge {
    /// Begins to follow the engines that a source finds, until the bridge stops. Settings that nothing else tells come from
    /// `defaults`.
    pub fn discover(&self, what: &Discover, defaults: &EngineDefaults, options: DiscoverOptions) {
        let (reports, known) = Reports::new(what.as_str(), what.kind(), self.metrics());
        self.spawn_source(apply(self.clone(), reports.clone(), known));
        self.add_source(reports.clone());
        let defaults = defaults.clone();
        match what.place.clone() {
            DiscoveryPlace::Dns(place) => {
                self.spawn_source(async move {
                    dns::run(&place, &defaults, options.dns_interval, &reports).await
                });
            }
            DiscoveryPlace::File(path) => {
                self.spawn_source(async move {
                    file::run(&path, &defaults, options.file_interval, &reports).await
                });
            }
            DiscoveryPlace::Dynamo(place) => {
                self.spawn_source(async move {
                    dynamo::run(&place, &defaults, options.file_interval, &reports).await
                });
            }
            #[cfg(feature = "kubernetes")]
            DiscoveryPlace::Kubernetes(place) => {
                self.spawn_source(async move { kubernetes::run(&place, &defaults, &reports).await });
            }
        }
    }
}

/// Keeps the bridge following exactly the engines that a source knows, for ever.
async fn apply(bridge: Bridge, reports: Reports, mut known: KnownEngines) {
    let mut is_refused = false;
    loop {
        let changed = known.changed();
        let changed = match is_refused {
            true => tokio::time::timeout(RETRY_INTERVAL, changed)
                .await
                .unwrap_or(Ok(())),
            false => changed.await,
        };
        if changed.is_err() {
            return;
        }
        let engines = known.borrow_and_update().clone().unwrap_or_default();
        let source = reports.source();
        let refused = bridge.replace(source, &engines).err().unwrap_or_default();
        is_refused = !refused.is_empty();
        reports.note_refused(engines.len(), &refused);
        let (found, left_out) = bridge.found_by(|other| other.kind == reports.kind);
        reports.metrics.discovered.get(reports.kind).set(found as f64);
        reports.metrics.refused.get(reports.kind).set(left_out as f64);
        for refusal in refused {
            log_gated!(warn "an engine that was found is not followed" up to 16; source, %refusal);
        }
    }
}

#[cfg(test)]
mod tests {

    use kvatlas_core::wire::Subjects;
    use kvatlas_process::registry::{Discovered, EngineRegistry, GivenEngine, MeantEngines};
    use kvatlas_telemetry::labels::EngineSource;

    use super::super::BridgeOptions;
    use super::found::{ServerPort, server_at};
    use super::*;

    #[tokio::test]
    async fn a_report_before_the_bridge_looks_is_not_missed() {
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let (reports, known) = Reports::new("dns:vllm", EngineSource::Dns, bridge.metrics());
        let port = ServerPort {
            number: 8000,
            is_grpc: false,
        };
        let defaults = EngineDefaults::default();
        let server = server_at(
            "a".to_owned(),
            "127.0.0.1",
            port,
            Discovered::default(),
            &defaults,
        );
        reports.know(vec![GivenEngine::Server(server)]);
        // The source makes no second report. So if the bridge missed this one, it would never follow the engine.
        let applying = apply(bridge.clone(), reports, known);
        assert!(futures_util::poll!(std::pin::pin!(applying)).is_pending());
        assert_eq!(bridge.servers().len(), 1);
    }

    #[tokio::test]
    async fn an_engine_of_two_sources_stays_until_both_have_dropped_it() {
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let parse = |text: &str| crate::parse_engine(text, &EngineDefaults::default()).unwrap();
        let followed = || (bridge.servers().len(), bridge.engines().len());
        let server = parse("a=http://127.0.0.1:1,model=m,block_size=16");
        let sockets = parse("e=tcp://127.0.0.1:1,block_size=16,model=m");
        let engines = [server, sockets].concat();
        for source in ["kubernetes:app=vllm", "kubernetes:role=decode"] {
            bridge.replace(source, &engines).unwrap();
        }
        bridge.replace("kubernetes:role=decode", &[]).unwrap();
        assert_eq!(followed(), (1, 1));
        bridge.replace("kubernetes:app=vllm", &[]).unwrap();
        assert_eq!(followed(), (0, 0));
        // An engine that was registered stays until it is unregistered.
        for engine in &engines {
            match engine.clone() {
                GivenEngine::Publisher(engine) => bridge.register(engine).unwrap(),
                GivenEngine::Server(server) => bridge.register_server(server).unwrap(),
            }
        }
        bridge.replace("kubernetes:app=vllm", &engines).unwrap();
        bridge.replace("kubernetes:app=vllm", &[]).unwrap();
        assert_eq!(followed(), (1, 1));
        for instance in ["a", "e"] {
            let meant = MeantEngines::Named {
                instance: instance.to_owned(),
                model: "m".to_owned(),
                tenant: None,
                rank: None,
            };
            assert_eq!(bridge.unregister(&meant).len(), 1);
        }
        assert_eq!(followed(), (0, 0));
    }

    #[tokio::test]
    async fn a_source_changes_an_engine_that_was_registered_as_the_source_gave_it() {
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let parse = |text: &str| crate::parse_engine(text, &EngineDefaults::default()).unwrap();
        let [first, second, third] = [1, 2, 3].map(|port| {
            let sockets = format!("e=tcp://127.0.0.1:{port},block_size=16,model=m");
            let server = format!("a=http://127.0.0.1:{port},model=m,block_size=16");
            [parse(&sockets), parse(&server)].concat()
        });
        let endpoints = || {
            let engines = bridge.engines().into_iter().map(|state| state.engine.endpoint);
            let servers = bridge.servers().into_iter().map(|state| state.server.url);
            engines.chain(servers).collect::<Vec<_>>()
        };
        let at = |port| ["tcp", "http"].map(|scheme| format!("{scheme}://127.0.0.1:{port}"));
        for engine in &first {
            match engine.clone() {
                GivenEngine::Publisher(engine) => bridge.register(engine).unwrap(),
                GivenEngine::Server(server) => bridge.register_server(server).unwrap(),
            }
        }
        // A source that has never given the engine like this does not change it.
        assert_eq!(bridge.replace("file:/a", &third).unwrap_err().len(), 2);
        assert_eq!(bridge.replace("file:/a", &second).unwrap_err().len(), 2);
        assert_eq!(endpoints(), at(1));
        bridge.replace("file:/a", &first).unwrap();
        bridge.replace("file:/a", &second).unwrap();
        assert_eq!(endpoints(), at(2));
        bridge.replace("file:/a", &[]).unwrap();
        assert_eq!(endpoints(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn an_engine_that_a_source_drops_is_followed_as_another_source_gives_it() {
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let parse = |text: &str| crate::parse_engine(text, &EngineDefaults::default()).unwrap();
        let [first, second] =
            [1, 2].map(|port| parse(&format!("e=tcp://127.0.0.1:{port},block_size=16,model=m")));
        bridge.replace("file:/first", &first).unwrap();
        bridge.replace("file:/second", &second).unwrap_err();
        bridge.replace("file:/first", &[]).unwrap();
        assert_eq!(bridge.engines()[0].engine.endpoint, "tcp://127.0.0.1:2");
    }

    #[tokio::test]
    async fn a_source_says_which_of_its_engines_are_not_followed() {
        let bridge = Bridge::new(Subjects::new("kv").unwrap(), BridgeOptions::default());
        let parse = |text: &str| crate::parse_engine(text, &EngineDefaults::default()).unwrap();
        bridge
            .replace("file:/a", &parse("e=tcp://127.0.0.1:1,block_size=16,model=m"))
            .unwrap();
        let (reports, known) = Reports::new("file:/b", EngineSource::File, bridge.metrics());
        reports.know(parse("e=tcp://127.0.0.1:2,block_size=16,model=m"));
        let mut applying = std::pin::pin!(apply(bridge.clone(), reports.clone(), known));
        assert!(futures_util::poll!(applying.as_mut()).is_pending());
        let error = reports.state().last_error.unwrap();
        assert!(
            error.contains("1 engines are found, 1 are not followed: "),
            "{error}"
        );
        // The engine is followed once the other source no longer gives it.
        bridge.replace("file:/a", &[]).unwrap();
        reports.know(parse("e=tcp://127.0.0.1:3,block_size=16,model=m"));
        assert!(futures_util::poll!(applying).is_pending());
        assert_eq!(reports.state().last_error, None);
    }
}
