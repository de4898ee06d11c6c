//! The reading end of a connection.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

use kvatlas_telemetry::labels::FrameFault;

use super::decoder::{ZmtpDecoder, check_ready};
use super::{MessageLimits, MessageOrCommand, Mismatch, Role};

/// Error after which nothing more can be read from a peer.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum ReadError {
    /// The connection failed.
    #[error("{0}")]
    Network(#[from] io::Error),
    /// The peer ended the connection.
    #[error("the connection has ended")]
    Closed,
    /// No messages can be exchanged with the peer, for example because it speaks another protocol.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The peer has sent a frame, a message or a command that exceeds a bound of this connection.
    #[error("it sends too much: {0}")]
    TooMuch(FrameFault),
}

/// The reading end of a connection, with the peer's bytes that were not returned yet.
#[derive(Debug)]
pub(super) struct ZmtpReader<R> {
    source: R,
    decoder: ZmtpDecoder,
}

impl<R: AsyncRead + Unpin> ZmtpReader<R> {
    /// Makes the reader of a connection that begins.
    pub(super) fn new(source: R, limits: MessageLimits) -> Self {
        Self {
            source,
            decoder: ZmtpDecoder::new(limits),
        }
    }

    /// Reads a peer's greeting.
    pub(super) async fn greeting(&mut self) -> Result<(), ReadError> {
        while !self.decoder.greeting()? {
            let begun = self.decoder.has_begun();
            match self.fill().await {
                Err(ReadError::Closed | ReadError::Network(_)) if begun => {
                    return Err(Mismatch::Greeting.into());
                }
                filled => filled?,
            }
        }
        Ok(())
    }

    /// Reads a peer's command `READY`, which follows its greeting. `role` is the kind of this side's socket.
    pub(super) async fn ready(&mut self, role: Role) -> Result<(), ReadError> {
        match self.next().await {
            Ok(MessageOrCommand::Command(body)) => Ok(check_ready(&body, role)?),
            Ok(MessageOrCommand::Message(_)) => Err(Mismatch::Protocol.into()),
            Err(ReadError::Closed) => Err(Mismatch::Ended.into()),
            Err(error) => Err(error),
        }
    }

    /// Reads the next message or command. Messages that arrived whole are returned before the error that ends the connection.
    /// Nothing is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Result<MessageOrCommand, ReadError> {
        loop {
            // A peer's bytes may be many short commands: other tasks have their turn between them.
            tokio::task::coop::consume_budget().await;
            if let Some(received) = self.decoder.next().map_err(ReadError::TooMuch)? {
                return Ok(received);
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), ReadError> {
        match self.source.read_buf(self.decoder.make_room()).await? {
            0 => Err(ReadError::Closed),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{greeting, push_message, ready};
    use super::*;

    #[tokio::test]
    async fn what_is_written_is_read_to_the_end() {
        let frames = [&b""[..], &[7; 300]];
        let mut bytes = [&greeting()[..], &ready(Role::Publisher)].concat();
        push_message(&mut bytes, &frames);
        // Half a frame at the end.
        bytes.extend_from_slice(&[0, 9, 1]);
        let mut reader = ZmtpReader::new(bytes.as_slice(), MessageLimits::ROUTER);
        reader.greeting().await.unwrap();
        reader.ready(Role::Subscriber).await.unwrap();
        let MessageOrCommand::Message(read) = reader.next().await.unwrap() else {
            panic!("a command");
        };
        assert_eq!(read, frames);
        assert!(matches!(reader.next().await, Err(ReadError::Closed)));
    }

    #[tokio::test]
    async fn a_peer_that_ends_the_handshake_is_another_socket() {
        let greeting = greeting();
        let mut reader = ZmtpReader::new(&greeting[..], MessageLimits::ENGINE);
        reader.greeting().await.unwrap();
        let ended = reader.ready(Role::Subscriber).await;
        assert!(matches!(ended, Err(ReadError::Mismatch(Mismatch::Ended))));
        let ended = ZmtpReader::new(&greeting[..10], MessageLimits::ENGINE)
            .greeting()
            .await;
        assert!(matches!(ended, Err(ReadError::Mismatch(Mismatch::Greeting))));
        let ended = ZmtpReader::new(&b""[..], MessageLimits::ENGINE).greeting().await;
        assert!(matches!(ended, Err(ReadError::Closed)));
    }
}
