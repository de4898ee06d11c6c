//! Reports of routers over NATS (hints and outcomes). A report gets a reply only if it names a subject for the reply, as the
//! reports of a gateway do.

use async_nats::Message;
use bytes::Bytes;

use crate::responder::Responder;
use crate::shared::{Shared, Stage};
use kvatlas_core::wire::{PROTOCOL_VERSION, ReportReply, WireError};
use kvatlas_process::broker::{
    Buffer, ConnectError, ConnectionNotice, LastingSubscription, RefusedSubscriptions, connect_counted,
};
use kvatlas_telemetry::labels::{Connection, LabelValue};

/// Maximum number of reports that wait on the connection. Further reports are dropped, and counted as losses of a slow
/// consumer.
const WAITING_MAX: usize = 1024;

/// Source of one kind of reports, hints or outcomes: the subjects to which routers send them, and the connection that
/// receives them.
pub(crate) struct Told {
    /// Label of the connection. Logs call the reports by the same name.
    pub(crate) connection: Connection,
    pub(crate) subjects: String,
    /// Queue group by which replicas share the reports, so that each report reaches one replica. `None` if every
    /// replica takes all reports.
    pub(crate) group: Option<String>,
}

/// Starts a task of `stage` that subscribes to reports of one kind, and calls `take` for each report. `take` returns
/// the number of hints or outcomes that it accepts from the report.
///
/// # Errors
///
/// [`ConnectError`] if connecting to NATS fails.
pub(crate) async fn start_reports(
    shared: &Shared,
    stage: &Stage,
    told: Told,
    mut take: impl FnMut(&Message) -> Result<usize, WireError> + Send + 'static,
) -> Result<(), ConnectError> {
    let name = told.connection.as_str();
    let buffer = Buffer::of_messages(WAITING_MAX);
    let refused = RefusedSubscriptions::default();
    let counted = refused.clone();
    let notice = move |notice: &ConnectionNotice| counted.note(notice);
    let client = connect_counted(&shared.nats, told.connection, name, buffer, notice).await?;
    let (subjects, shard) = (shared.subjects.clone(), shared.config.sharding.shard);
    let responder = Responder::new(client.clone(), subjects, shard);
    let stop = stage.stop.clone();
    stage.spawn_to_end(async move {
        let hear = async {
            let subscribed = LastingSubscription::new(client, told.subjects, told.group, &refused);
            let mut reports = match subscribed.await {
                Ok(reports) => reports,
                Err(error) => return tracing::error!(%error, "{name} are not heard"),
            };
            while let Some(message) = reports.next().await {
                let taken = take(&message);
                if let Some(reply_to) = message.reply {
                    responder.send(reply_to, taken.map(reply)).await;
                }
                // Other tasks get their turns, however many reports come.
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

fn reply(taken: usize) -> Bytes {
    let reply = ReportReply {
        v: PROTOCOL_VERSION,
        taken: taken as u64,
    };
    reply.encode().into()
}
