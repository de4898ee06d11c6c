//! Commands of operators, on subjects of their own so that permissions can keep them apart.
//!
//! `PREFIX.v1.admin.COMMAND`. Every daemon hears each command, and those that it concerns reply: an [`AdminReply`] from each. Bridges hear
//! [`AdminCommand::Reset`], and those reply that follow the engine.

use serde::Deserialize;

use super::entries::{Entries, Message, coded};
use super::subject::{NamespaceName, Rank, WorkerName};

/// A command that an operator can give a daemon or a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AdminCommand {
    /// Forget a holder, its epoch and numbers included. Its next batch begins anew.
    Forget,
    /// Doubt a holder: its publisher is asked for the full state.
    Resync,
    /// Write a snapshot now.
    Snapshot,
    /// Stop in good order.
    Drain,
    /// Have an engine drop its prefix cache. Bridges carry it out.
    Reset,
}

impl AdminCommand {
    /// All commands.
    pub const ALL: [Self; 5] = [
        Self::Forget,
        Self::Resync,
        Self::Snapshot,
        Self::Drain,
        Self::Reset,
    ];

    /// The last token of the subject.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forget => "forget",
            Self::Resync => "resync",
            Self::Snapshot => "snapshot",
            Self::Drain => "drain",
            Self::Reset => "reset",
        }
    }

    /// The command of a token.
    pub fn of_token(token: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|command| command.as_str() == token)
    }
}

/// The scope of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct AdminRequest {
    /// Only this daemon or bridge, by the name that it gives in its replies; all where it is absent.
    #[serde(default)]
    pub instance: Option<String>,
    /// The engine, by the name of its instance or its worker.
    #[serde(default)]
    pub engine: Option<String>,
    /// The holders of this worker.
    #[serde(default)]
    pub holder: Option<AdminHolder>,
}

/// The ranks of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AdminHolder {
    /// The namespace.
    pub namespace: NamespaceName,
    /// The worker.
    pub worker: WorkerName,
    /// One rank; all where it is absent.
    #[serde(default)]
    pub rank: Option<Rank>,
}

/// A daemon's reply to a command.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AdminReply {
    /// Version of the contract.
    pub v: u64,
    /// The daemon or bridge.
    pub instance: String,
    /// How many holders the command was carried out on.
    #[serde(default)]
    pub holders: u64,
    /// Why it was not carried out.
    #[serde(default)]
    pub error: Option<String>,
}

impl Message for AdminRequest {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        if let Some(instance) = &self.instance {
            entries.text("instance", instance)?;
        }
        if let Some(engine) = &self.engine {
            entries.text("engine", engine)?;
        }
        match &self.holder {
            Some(holder) => entries.map("holder", holder),
            None => Ok(()),
        }
    }
}

impl Message for AdminHolder {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.text("namespace", self.namespace.as_str())?;
        entries.text("worker", self.worker.as_str())?;
        entries.optional_number("rank", self.rank.map(u64::from))
    }
}

impl Message for AdminReply {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", self.v)?;
        entries.text("instance", &self.instance)?;
        entries.number("holders", self.holders)?;
        match &self.error {
            Some(error) => entries.text("error", error),
            None => Ok(()),
        }
    }
}

coded!(AdminRequest, AdminReply);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_read_as_it_was_written() {
        let holder = |rank| AdminHolder {
            namespace: NamespaceName::new("llama").unwrap(),
            worker: WorkerName::new("gpu-0").unwrap(),
            rank,
        };
        for request in [
            AdminRequest::default(),
            AdminRequest {
                instance: Some("kvatlas@host:7".to_owned()),
                holder: Some(holder(Some(3))),
                engine: None,
            },
            AdminRequest {
                holder: Some(holder(None)),
                ..AdminRequest::default()
            },
            AdminRequest {
                engine: Some("10.0.0.1:8000".to_owned()),
                ..AdminRequest::default()
            },
        ] {
            assert_eq!(AdminRequest::decode(&request.encode()).unwrap(), request);
        }
        for error in [None, Some("no".to_owned())] {
            let reply = AdminReply {
                v: 1,
                instance: "a".to_owned(),
                holders: 2,
                error,
            };
            assert_eq!(AdminReply::decode(&reply.encode()).unwrap(), reply);
        }
        assert!(AdminRequest::decode(b"garbage").is_err());
        for command in AdminCommand::ALL {
            assert_eq!(AdminCommand::of_token(command.as_str()), Some(command));
        }
        assert_eq!(AdminCommand::of_token("stop"), None);
    }
}
