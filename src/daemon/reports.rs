//! Reports of routers over NATS (hints and outcomes). A report gets a reply only if it names a subject for the reply, as the
//! reports of a gateway do.

use std::sync::Arc;

use async_nats::Message;
use bytes::Bytes;
use tokio::task::coop::has_budget_remaining;

use crate::responder::Responder;
use crate::shared::{Shared, Stage};
use kvatlas_core::wire::{PROTOCOL_VERSION, ReportReply, WireError};
use kvatlas_process::broker::{
    Buffer, ConnectError, ConnectionNotice, Intake, LastingSubscription, RefusedSubscriptions,
    connect_counted,
};
use kvatlas_telemetry::labels::{Connection, LabelValue};

/// Maximum number of reports that wait on the connection. Further reports are dropped, and counted as losses of a slow
/// consumer. Their bytes are bounded, too (`events.subscription_bytes`).
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
    let (buffer, intake) = Buffer::of_bytes(WAITING_MAX, shared.config.events.subscription_bytes);
    let refused = RefusedSubscriptions::default();
    let counted = refused.clone();
    let notice = move |notice: &ConnectionNotice| counted.note(notice);
    let client = connect_counted(&shared.nats, told.connection, name, buffer, notice).await?;
    stage.spawn(Arc::clone(&intake).watch(client.clone()));
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
            while let Some(message) = next_counted(&mut reports, &intake).await {
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

/// Waits for the next report. Tells `intake`, the count of waiting bytes, which messages were taken.
async fn next_counted(reports: &mut LastingSubscription, intake: &Intake) -> Option<Message> {
    loop {
        let (received, can_tell) = (intake.received(), has_budget_remaining());
        tokio::select! {
            biased;
            message = reports.next() => return message.inspect(|message| intake.took(message)),
            // No report waits.
            () = intake.asked() => {
                if can_tell {
                    intake.took_all(received);
                }
            }
        }
    }
}

fn reply(taken: usize) -> Bytes {
    let reply = ReportReply {
        v: PROTOCOL_VERSION,
        taken: taken as u64,
    };
    reply.encode().into()
}
