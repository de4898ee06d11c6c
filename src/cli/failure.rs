//! Failures of commands, and the exit status of each.

use std::fmt;
use std::process::ExitCode;

use kvatlas_client::ClientError;
use kvatlas_client::publish::PublisherError;
use kvatlas_config::ConfigErrors;
use kvatlas_core::wire::ErrorCode;
use kvatlas_daemon::StartError;
use kvatlas_process::broker::ConnectError;
use kvatlas_process::broker::embedded::BrokerError;

use super::text::printable;

/// Exit status of a command that failed. Scripts rely on the numbers; the last two are those of `sysexits.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ExitStatus {
    /// The command was understood but failed.
    Failed = 1,
    /// The command line, an input file's name or the configuration is wrong.
    Usage = 64,
    /// There is no broker or no daemon to talk to; the same command may succeed later.
    Unavailable = 69,
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> Self {
        Self::from(status as u8)
    }
}

/// Failure of a command: an exit status, and the reason in words for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The status that the process ends with.
    pub(crate) status: ExitStatus,
    text: String,
}

impl Failure {
    /// Makes the failure of a command that was understood but failed.
    pub(crate) fn failed(text: impl fmt::Display) -> Self {
        Self::new(ExitStatus::Failed, text)
    }

    /// Makes the failure for a wrong command line, input file name or configuration.
    pub(crate) fn usage(text: impl fmt::Display) -> Self {
        Self::new(ExitStatus::Usage, text)
    }

    /// Makes the failure of a command that found no broker or daemon to talk to.
    pub(crate) fn unavailable(text: impl fmt::Display) -> Self {
        Self::new(ExitStatus::Unavailable, text)
    }

    fn new(status: ExitStatus, text: impl fmt::Display) -> Self {
        Self {
            status,
            text: text.to_string(),
        }
    }
}

impl fmt::Display for Failure {
    /// Writes the text without control characters. An answer of a broker or daemon in the text could bring such
    /// characters to the terminal.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&printable(&self.text))
    }
}

impl From<ConfigErrors> for Failure {
    fn from(errors: ConfigErrors) -> Self {
        Self::usage(errors)
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Credentials { .. } => Self::usage(error),
            ConnectError::Connect { .. } => Self::unavailable(error),
        }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Connect(error) => error.into(),
            // A wrong path from the command line stays wrong, so the same command cannot succeed later.
            StartError::Broker(BrokerError::NotExecutable { .. }) => Self::usage(error),
            StartError::Broker(_) | StartError::BrokerAddress { .. } => Self::unavailable(error),
            StartError::Subjects(_) | StartError::Namespace(_) | StartError::LeftOut { .. } => {
                Self::usage(error)
            }
            _ => Self::failed(error),
        }
    }
}

impl From<PublisherError> for Failure {
    fn from(error: PublisherError) -> Self {
        match &error {
            PublisherError::Connection(_)
            | PublisherError::Stopped
            | PublisherError::Unanswered { .. }
            | PublisherError::QueueFull { .. } => Self::unavailable(error),
            PublisherError::SeqTooLarge { .. } => Self::usage(error),
            PublisherError::Refused { .. }
            | PublisherError::TooLarge { .. }
            | PublisherError::TooManyEvents { .. }
            | PublisherError::Table(_) => Self::failed(error),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match &error {
            ClientError::NoDaemon { .. } | ClientError::TimedOut { .. } | ClientError::Connection(_) => {
                Self::unavailable(error)
            }
            ClientError::Refused(refusal)
                if matches!(refusal.code, ErrorCode::Unavailable | ErrorCode::TooManyRequests) =>
            {
                Self::unavailable(error)
            }
            ClientError::Refused(_)
            | ClientError::RefusedOtherwise { .. }
            | ClientError::Undecodable(_)
            | ClientError::TooLarge { .. } => Self::failed(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::WireError;

    use super::*;

    #[test]
    fn who_is_not_there_may_be_there_later() {
        let status = |error: ClientError| Failure::from(error).status;
        let subject = "kvatlas.v1.query.a".to_owned();
        assert_eq!(status(ClientError::NoDaemon { subject }), ExitStatus::Unavailable);
        let refused = |code| ClientError::Refused(WireError::new(code, "no"));
        assert_eq!(status(refused(ErrorCode::Unavailable)), ExitStatus::Unavailable);
        assert_eq!(status(refused(ErrorCode::BadRequest)), ExitStatus::Failed);
    }

    #[test]
    fn a_message_that_is_too_large_stays_so() {
        let error = ClientError::TooLarge {
            subject: "kvatlas.v1.events.a.b".to_owned(),
            bytes: 4097,
            bytes_max: 4096,
        };
        let text = error.to_string();
        assert_eq!(Failure::from(error), Failure::failed(text));
    }

    #[test]
    fn a_wrong_server_binary_is_wrong_configuration() {
        let wrong = BrokerError::NotExecutable {
            origin: "nats.server_binary",
            path: "a".into(),
        };
        assert_eq!(Failure::from(StartError::Broker(wrong)).status, ExitStatus::Usage);
        let missing = StartError::Broker(BrokerError::NotFound);
        assert_eq!(Failure::from(missing).status, ExitStatus::Unavailable);
    }

    #[test]
    fn a_text_cannot_steer_the_terminal() {
        let failure = Failure::failed("a\u{1b}[2J\u{7}b\nc");
        assert_eq!(failure.to_string(), "a[2Jb\nc");
    }
}
