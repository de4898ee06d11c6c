//! Commands of operators. They have their own subjects, so that permissions can be given for them separately.
//!
//! The subject is `PREFIX.v1.admin.COMMAND`. Every daemon receives each command, and each daemon that the command
//! concerns sends an [`AdminReply`]. Bridges receive [`AdminCommand::Reset`], and each bridge replies. A bridge that does
//! not relay the events of the named engine has 0 holders in its reply.

use serde::{Deserialize, Serialize};

use super::entries::coded;
use super::subject::{NamespaceName, Rank, WorkerName};
use crate::worded;

worded! {
    /// A command that an operator can give a daemon or a bridge.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum AdminCommand {
        /// Forget a holder, including its epoch and batch numbers. The daemon then treats the holder's next batch as
        /// the first batch of a new holder.
        Forget => "forget",
        /// Mark a holder as doubtful, and ask its publisher for the full state.
        Resync => "resync",
        /// Write a snapshot now.
        Snapshot => "snapshot",
        /// Shut down in an orderly way.
        Drain => "drain",
        /// Make an engine drop its prefix cache. Bridges carry out this command.
        Reset => "reset",
    }
}

/// Scope of a command: the daemons, bridges, engines and holders that it concerns.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AdminRequest {
    /// Daemon or bridge that the command is for, by the name that it gives in its replies. If absent, the command is
    /// for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// Engine that the command is for, by the name of its instance or its worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Holders that the command is for, all of one worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<AdminHolder>,
}

/// Holders of one worker: all its ranks, or one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminHolder {
    /// Name of the namespace.
    pub namespace: NamespaceName,
    /// Name of the worker.
    pub worker: WorkerName,
    /// Rank of the holder. If absent, all ranks of the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<Rank>,
}

/// Reply of a daemon or a bridge to a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminReply {
    /// Version of the contract.
    pub v: u64,
    /// Name of the daemon or bridge.
    pub instance: String,
    /// Number of holders on which the command was carried out.
    #[serde(default)]
    pub holders: u64,
    /// Reason why the command was not carried out. Absent if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
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
