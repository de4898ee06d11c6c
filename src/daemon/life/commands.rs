//! Commands of operators. They come on NATS subjects of their own, and every daemon receives them.

use std::sync::Arc;

use async_nats::{Client, Message};
use tokio_util::sync::CancellationToken;

use crate::lanes::{HolderCommand, LanePool};
use crate::shared::{Shared, Stage};
use crate::snapshots::SnapshotKeeper;
use kvatlas_core::wire::{AdminCommand, AdminReply, AdminRequest, PROTOCOL_VERSION, Subjects};
use kvatlas_process::broker::{
    Buffer, ConnectError, ConnectionNotice, LastingSubscription, RefusedSubscriptions, connect_counted,
};
use kvatlas_process::instance_name;
use kvatlas_telemetry::labels::Connection;
use kvatlas_telemetry::log_gated;

/// Maximum number of commands that wait. Commands are carried out one after the other.
const CAPACITY: usize = 64;
/// Maximum size of a command, in bytes.
const COMMAND_BYTES_MAX: usize = 4096;

/// Task that carries out the commands of operators.
struct OperatorCommands {
    client: Client,
    subjects: Subjects,
    instance: String,
    /// Whether the daemon is a gateway. It keeps no index, so it only carries out `Drain`.
    is_gateway: bool,
    pool: Arc<LanePool>,
    snapshots: Option<Arc<SnapshotKeeper>>,
    drain: CancellationToken,
}

/// Starts to listen to operators' commands, as a task of `upkeep`, unless `admin.commands` is off. A command to drain
/// cancels the token `drain`.
pub(super) async fn start_commands(
    shared: &Shared,
    snapshots: Option<Arc<SnapshotKeeper>>,
    drain: &CancellationToken,
    upkeep: &Stage,
) -> Result<(), ConnectError> {
    if !shared.config.admin.commands {
        return Ok(());
    }
    let refused = RefusedSubscriptions::default();
    let counted = refused.clone();
    let notice = move |notice: &ConnectionNotice| counted.note(notice);
    let buffer = Buffer::of_messages(CAPACITY);
    let client = connect_counted(&shared.nats, Connection::Admin, "admin", buffer, notice).await?;
    let messages =
        match LastingSubscription::new(client.clone(), shared.subjects.all_admin(), None, &refused).await {
            Ok(messages) => messages,
            Err(error) => {
                tracing::error!(%error, "commands of operators are not heard");
                return Ok(());
            }
        };
    let commands = OperatorCommands {
        client,
        subjects: shared.subjects.clone(),
        instance: instance_name(&shared.nats.connection_name),
        is_gateway: shared.config.gateway.enabled,
        pool: Arc::clone(&shared.pool),
        snapshots,
        drain: drain.clone(),
    };
    upkeep.spawn_to_end(commands.run(messages, upkeep.stop.clone()));
    Ok(())
}

impl OperatorCommands {
    async fn run(self, mut messages: LastingSubscription, stop: CancellationToken) {
        loop {
            let message = tokio::select! {
                () = stop.cancelled() => return,
                message = messages.next() => message,
            };
            let Some(message) = message else { return };
            self.take(message).await;
        }
    }

    async fn take(&self, message: Message) {
        let command = self.subjects.parse_admin(&message.subject);
        let is_for_us = |command: &AdminCommand| match command {
            AdminCommand::Drain => true,
            AdminCommand::Forget | AdminCommand::Resync | AdminCommand::Snapshot => !self.is_gateway,
            // This command is for bridges.
            AdminCommand::Reset => false,
        };
        let Some(command) = command.filter(is_for_us) else {
            return;
        };
        let request = match AdminRequest::decode(&message.payload) {
            Ok(request) if message.payload.len() <= COMMAND_BYTES_MAX => request,
            _ => {
                log_gated!(warn "a command cannot be read"; command = command.as_str());
                return;
            }
        };
        let is_meant = |instance: &String| *instance == self.instance;
        if !request.instance.as_ref().is_none_or(is_meant) {
            return;
        }
        let outcome = self.carry_out(command, &request).await;
        let (holders, error) = match outcome {
            Ok(holders) => (holders, None),
            Err(error) => (0, Some(error)),
        };
        log_gated!(
            info "a command of an operator" up to 16;
            command = command.as_str(), ?request, holders, error
        );
        let reply = AdminReply {
            v: PROTOCOL_VERSION,
            instance: self.instance.clone(),
            holders,
            error,
        };
        // The reply is sent with the daemon's rights, so the operator must not choose a subject of the contract for it.
        if let Some(subject) = message
            .reply
            .filter(|subject| self.subjects.may_reply_to(subject))
        {
            let sent = self.client.publish(subject, reply.encode().into()).await;
            let is_lost = sent.is_err() || self.client.flush().await.is_err();
            if is_lost {
                log_gated!(warn "the reply to a command could not be sent");
            }
        }
        if command == AdminCommand::Drain && reply.error.is_none() {
            self.drain.cancel();
        }
    }

    /// Carries out a command. Returns the number of holders that the command affected, or the reason why it failed.
    async fn carry_out(&self, command: AdminCommand, request: &AdminRequest) -> Result<u64, String> {
        let holder = match command {
            AdminCommand::Forget => HolderCommand::Forget,
            AdminCommand::Resync => HolderCommand::Doubt,
            AdminCommand::Snapshot => {
                let keeper = self.snapshots.as_ref();
                let keeper = keeper.ok_or("no snapshot directory is configured (snapshots.directory)")?;
                return keeper.save().await.map(|()| 0);
            }
            // The caller carries out `Drain` after it has sent the reply. `Reset` does not come here.
            AdminCommand::Drain | AdminCommand::Reset => return Ok(0),
        };
        let of = request.holder.as_ref().ok_or("the command names no worker")?;
        let done = self.pool.command(of, holder).await;
        done.map_err(|error| error.to_string())
    }
}
