//! Reports of routers over NATS: what they tell, and nobody replies to.

use async_nats::Message;
use futures_util::StreamExt;

use crate::shared::{Shared, Stage};
use kvatlas_process::broker::{Buffer, ConnectError, connect_counted};
use kvatlas_telemetry::labels::{Connection, LabelValue};

/// Reports that may wait on the connection; what does not fit is dropped, and counted as of a slow consumer.
const WAITING_MAX: usize = 1024;

/// The subjects on which reports come.
pub(crate) struct Told {
    /// The connection, and the word for the reports in logs.
    pub(crate) connection: Connection,
    pub(crate) subjects: String,
    /// The queue group by which replicas share them; without one, each takes all.
    pub(crate) group: Option<String>,
}

/// Begins to take reports, as a task of `stage`.
///
/// # Errors
///
/// [`ConnectError`] where there is no connection to be had.
pub(crate) async fn start_reports(
    shared: &Shared,
    stage: &Stage,
    told: Told,
    mut take: impl FnMut(&Message) + Send + 'static,
) -> Result<(), ConnectError> {
    let name = told.connection.as_str();
    let buffer = Buffer::of_messages(WAITING_MAX);
    let client = connect_counted(&shared.nats, told.connection, name, buffer, |_| {}).await?;
    let stop = stage.stop.clone();
    stage.tasks.spawn(async move {
        let hear = async {
            let subscribed = match told.group {
                Some(group) => client.queue_subscribe(told.subjects, group).await,
                None => client.subscribe(told.subjects).await,
            };
            let mut reports = match subscribed {
                Ok(reports) => reports,
                Err(error) => return tracing::error!(%error, "{name} are not heard"),
            };
            while let Some(message) = reports.next().await {
                take(&message);
                // However many come, others have their turns.
                tokio::task::consume_budget().await;
            }
        };
        tokio::select! {
            () = hear => {}
            () = stop.cancelled() => {}
        }
    });
    Ok(())
}
