//! Start of the listener for SGLang's routers.

use std::net::SocketAddr;
use std::sync::Arc;

use tonic_health::pb::health_server::HealthServer;
use tonic_reflection::server::{Builder, Error as ReflectionError};

use kvatlas_core::wire::NamespaceName;

use crate::http::{Bodies, BodyLimits, TokenError, TokenFiles};
use crate::queries::{Misses, Source};
use crate::shared::{Shared, Stage};
use crate::start_error::{StartError, bind};
use kvatlas_config::{GrpcConfig, GrpcWriting};
use kvatlas_process::listener::{Acceptor, ConnectionLimits};
use kvatlas_telemetry::{GrpcConnectionMetrics, GrpcMetrics, QueryErrorMetrics, QueryMetricsByNamespace};

use super::connection::{DRAIN_TIMEOUT, serve};
use super::describe::descriptors;
use super::health::ReadinessHealth;
use super::question::Questions;
use super::reports::{BlockReports, ReportLimits};
use super::service::{BuiltInService, Door, Writing, other};

/// Maximum size of a question to a service that gRPC itself defines (health, reflection), in bytes.
const OTHER_BYTES_MAX: usize = 4 << 10;
/// Number of bytes before each message. They tell whether the message is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Serves SGLang's routers as tasks of `stage`. Returns the address to which the listener is bound, or `None` if no
/// listener is configured.
pub(crate) async fn start_grpc(shared: &Shared, stage: &Stage) -> Result<Option<SocketAddr>, StartError> {
    let config = &shared.config.grpc;
    let Some(address) = config.listen else {
        return Ok(None);
    };
    let door = Arc::new(door(shared.source().await?, shared, stage)?);
    let (listener, local_addr) = bind(address, "(grpc.listen)").await?;
    let acceptor = Acceptor {
        name: "grpc",
        limits: ConnectionLimits {
            connections_max: config.max_connections,
            per_source_max: config.max_connections_per_source,
            head_timeout: config.idle_timeout,
            age_max: None,
            drain_timeout: DRAIN_TIMEOUT,
            head_bytes_max: config.max_message_bytes,
            unread_timeout: config.request_timeout,
        },
        stopping: stage.stop.clone(),
        counts: Arc::new(GrpcConnectionMetrics::new()),
    };
    let stopping = stage.stop.clone();
    let accepting = acceptor.accept(listener, move |stream, peer, place| {
        serve(Arc::clone(&door), stream, peer, place, stopping.clone())
    });
    stage.spawn_to_end(accepting);
    tracing::info!(%local_addr, "listener for SGLang's routers started");
    Ok(Some(local_addr))
}

/// Builds the state that the requests of all connections share.
fn door(source: Arc<Source>, shared: &Shared, stage: &Stage) -> Result<Door, StartError> {
    let config = &shared.config.grpc;
    let token = shared
        .tokens
        .read("grpc.token_file", config.token_file.as_deref())?;
    let writing = writing(config, &shared.tokens)?;
    let namespace = config.namespace.as_deref().map(NamespaceName::new).transpose();
    let namespace = namespace.map_err(|error| StartError::Grpc(format!("grpc.namespace: {error}")))?;
    let reflection = reflection(writing.is_some());
    let undescribed =
        |error: ReflectionError| StartError::Grpc(format!("the description of gRPC's methods: {error}"));
    let health = HealthServer::new(ReadinessHealth {
        readiness: Arc::clone(&shared.readiness),
        stopping: stage.stop.clone(),
    });
    let health = health.max_decoding_message_size(OTHER_BYTES_MAX);
    Ok(Door {
        questions: Questions {
            source,
            namespace,
            reports: writing.as_ref().map(|writing| Arc::clone(&writing.reports)),
            depth: shared.config.queries.dialect_depth,
            readiness: Arc::clone(&shared.readiness),
            heavy_turns: Arc::clone(&shared.heavy_turns),
            metrics: GrpcMetrics::new(),
            errors: QueryErrorMetrics::new(),
            namespaces: QueryMetricsByNamespace::default(),
            misses: Misses::new("SGLang's routers", "the page size with the engines'"),
        },
        bodies: Bodies::new(BodyLimits {
            all_bytes_max: config.max_receiving_bytes,
            body_bytes_max: config.max_message_bytes.saturating_add(PREFIX_BYTES),
            timeout: config.request_timeout,
            setting: "grpc.max_receiving_bytes",
        }),
        token,
        reflection: reflection.map_err(undescribed)?,
        writing,
        config: config.clone(),
        health: other(health),
    })
}

/// Builds the handling of reports about workers' blocks. `None` if the settings turn reports off.
fn writing(config: &GrpcConfig, tokens: &TokenFiles) -> Result<Option<Writing>, TokenError> {
    let path = config.writing_token_file.as_deref();
    let path = path.filter(|_| config.writing == GrpcWriting::Token);
    let token = tokens.read("grpc.writing_token_file", path)?;
    let limits = ReportLimits {
        bytes_max: config.max_reported_bytes,
        silence_max: config.report_silence,
    };
    let is_on = config.writing != GrpcWriting::Off;
    Ok(is_on.then(|| Writing {
        reports: Arc::new(BlockReports::new(limits)),
        token,
    }))
}

/// Builds the reflection services, which describe the server's methods, in the protocol's versions `v1` and `v1alpha`.
fn reflection(takes_reports: bool) -> Result<[BuiltInService; 2], ReflectionError> {
    let described = || {
        Builder::configure()
            .register_file_descriptor_set(descriptors(takes_reports))
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = described().build_v1()?;
    let v1alpha = described().build_v1alpha()?;
    Ok([
        other(v1.max_decoding_message_size(OTHER_BYTES_MAX)),
        other(v1alpha.max_decoding_message_size(OTHER_BYTES_MAX)),
    ])
}
