//! Commands of operators. They have subjects of their own, so that permissions can separate them from the rest.
//!
//! The subject is `PREFIX.v1.admin.COMMAND`. Every daemon receives each command, and each daemon that the command
//! concerns sends an [`AdminReply`]. Bridges receive [`AdminCommand::Reset`]; each bridge that follows the engine
//! replies.

use serde::Deserialize;

use super::entries::{Entries, Message, coded};
use super::subject::{NamespaceName, Rank, WorkerName};
use crate::worded;

worded! {
    /// A command that an operator can give a daemon or a bridge.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum AdminCommand {
        /// Forget a holder, including its epoch and batch numbers. Its next batch begins anew.
        Forget => "forget",
        /// Mark a holder as doubtful, and ask its publisher for the full state.
        Resync => "resync",
        /// Write a snapshot now.
        Snapshot => "snapshot",
        /// Stop in good order.
        Drain => "drain",
        /// Make an engine drop its prefix cache. Bridges carry the command out.
        Reset => "reset",
    }
}

/// The scope of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct AdminRequest {
    /// The daemon or bridge that is meant, by the name that it gives in its replies. If absent, all are meant.
    #[serde(default)]
    pub instance: Option<String>,
    /// The engine that is meant, by the name of its instance or its worker.
    #[serde(default)]
    pub engine: Option<String>,
    /// The holders that are meant: those of one worker.
    #[serde(default)]
    pub holder: Option<AdminHolder>,
}

/// A worker's holders: all of its ranks, or one.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AdminHolder {
    /// Name of the namespace.
    pub namespace: NamespaceName,
    /// Name of the worker.
    pub worker: WorkerName,
    /// The rank that is meant. If absent, all ranks.
    #[serde(default)]
    pub rank: Option<Rank>,
}

/// A daemon's or a bridge's reply to a command.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AdminReply {
    /// Version of the contract.
    pub v: u64,
    /// The name of the daemon or bridge.
    pub instance: String,
    /// Number of holders on which the command was carried out.
    #[serde(default)]
    pub holders: u64,
    /// The reason why the command was not carried out.
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
            assert_eq!(AdminCommand::of_word(command.as_str()), Some(command));
        }
        assert_eq!(AdminCommand::of_word("stop"), None);
    }
}
