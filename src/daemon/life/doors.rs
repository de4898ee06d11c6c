//! Doors: the listeners for routers of other projects, and the sender of trace spans to a collector. Each door is a cargo
//! feature. A setting for a door that was left out of this build is refused.

use std::net::SocketAddr;

use crate::shared::{Shared, Stage};
use crate::start_error::StartError;
use kvatlas_config::Config;

/// Addresses of the listeners for routers of other projects. `None` stands for a listener that is not open.
#[derive(Default)]
pub(super) struct Doors {
    pub(super) redis: Option<SocketAddr>,
    pub(super) grpc: Option<SocketAddr>,
}

/// Refuses the settings of doors (listeners and senders) that were left out when this program was built. Each door is a
/// cargo feature.
pub(super) fn check_built(config: &Config) -> Result<(), StartError> {
    let left_out = |setting, feature| Err(StartError::LeftOut { setting, feature });
    if !cfg!(feature = "dynamo") && !config.dynamo.components.is_empty() {
        return left_out("dynamo.components", "dynamo");
    }
    if !cfg!(feature = "grpc") && config.grpc.listen.is_some() {
        return left_out("grpc.listen", "grpc");
    }
    if !cfg!(feature = "redis") && config.redis.listen.is_some() {
        return left_out("redis.listen", "redis");
    }
    if !cfg!(feature = "traces") && config.traces.endpoint.is_some() {
        return left_out("traces.endpoint", "traces");
    }
    Ok(())
}

/// Starts the configured listeners for routers of other projects, as tasks of `stage`.
#[allow(
    unused_variables,
    clippy::needless_update,
    reason = "for programs that are built without doors, and with all"
)]
pub(super) async fn open_doors(shared: &Shared, stage: &Stage) -> Result<Doors, StartError> {
    #[cfg(feature = "dynamo")]
    crate::dynamo::start_dynamo(shared, stage).await?;
    Ok(Doors {
        #[cfg(feature = "redis")]
        redis: crate::redis::start_redis(shared, stage).await?,
        #[cfg(feature = "grpc")]
        grpc: crate::grpc::start_grpc(shared, stage).await?,
        ..Doors::default()
    })
}

/// Starts to send trace spans to the collector, if one is configured. The sending task belongs to `upkeep`. When the
/// daemon stops, the tasks that open spans end before the tasks of `upkeep`.
#[cfg(feature = "traces")]
pub(super) fn spawn_traces(shared: &mut Shared, upkeep: &Stage) {
    let instance = kvatlas_process::instance_name(&shared.nats.connection_name);
    let started = crate::traces::start_traces(&shared.config.traces, instance, upkeep.stop.clone());
    if let Some((tracer, exporting)) = started {
        upkeep.spawn_to_end(exporting);
        shared.tracer = Some(tracer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_is_refused_where_it_is_left_out_and_only_there() {
        for (setting, value, is_built) in [
            ("dynamo.components", "dynamo.backend", cfg!(feature = "dynamo")),
            ("grpc.listen", "127.0.0.1:0", cfg!(feature = "grpc")),
            ("redis.listen", "127.0.0.1:0", cfg!(feature = "redis")),
            ("traces.endpoint", "http://127.0.0.1:1/", cfg!(feature = "traces")),
        ] {
            let flags = [(setting.to_owned(), value.to_owned())].into();
            let config = Config::load(flags, std::iter::empty(), None).unwrap();
            match check_built(&config) {
                Ok(()) => assert!(is_built, "{setting}"),
                Err(error) => {
                    assert!(!is_built, "{setting}");
                    assert!(
                        matches!(error, StartError::LeftOut { setting: name, .. } if name == setting),
                        "{error}"
                    );
                }
            }
        }
    }
}
