//! A connection to a peer, whose heartbeats are answered.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::decoder::MessageOrCommand;
use super::reader::{ReadError, ZmtpReader};
use super::{Role, greeting, pong, ready};

/// Maximum size of the answers to heartbeats that wait to be sent, in bytes. Answers beyond that are dropped, because a
/// peer that does not read them does not need them.
const UNSENT_BYTES_MAX: usize = 4096;

/// Silence after which the system asks whether the peer's machine is still there, and the pause between such questions.
/// A connection outlives a shorter break of the network, after which TCP brings what was sent meanwhile.
const PROBE_AFTER: Duration = Duration::from_secs(3);
/// Number of unanswered questions after which the connection breaks.
const PROBES_MAX: u32 = 3;
/// Time after which a connection breaks while the peer's machine does not confirm what was sent to it. The system asks no
/// questions meanwhile. A publisher's connection has no such limit.
#[cfg(target_os = "linux")]
const UNCONFIRMED_MAX: Duration = Duration::from_secs(12);

/// A connection, until it breaks. It also breaks some seconds after the peer's machine has vanished. A publisher's
/// connection with unconfirmed messages stays until TCP gives up.
#[derive(Debug)]
pub(in super::super) struct PeerConnection {
    reader: ZmtpReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    /// Answers to the peer's heartbeats that have not been sent yet.
    unsent: BytesMut,
}

impl PeerConnection {
    /// Shakes hands with the peer of a new stream, whether this side or the peer has made the connection.
    pub(in super::super) async fn open(stream: TcpStream, role: Role) -> Result<Self, ReadError> {
        stream.set_nodelay(true)?;
        keep_alive(&stream, role)?;
        let (source, mut writer) = stream.into_split();
        let mut reader = ZmtpReader::new(source, role.limits());
        writer.write_all(&greeting()).await?;
        reader.greeting().await?;
        // `READY` is sent only after the peer's greeting has come. A peer of another kind shows what it is only to a
        // side that waits for its greeting.
        writer.write_all(&ready(role)).await?;
        reader.ready(role).await?;
        Ok(Self {
            reader,
            writer,
            unsent: BytesMut::new(),
        })
    }

    /// Sends one or several whole messages, or the next piece of a long message. If the future is dropped, the
    /// connection cannot be used any more.
    pub(in super::super) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A part of an answer may have been sent already.
        self.writer.write_all_buf(&mut self.unsent).await?;
        self.writer.write_all(bytes).await
    }

    /// Waits for the next message or command. Heartbeats are answered in the meantime. Messages that arrived before the
    /// connection broke come first. Nothing is lost if the future is dropped.
    pub(in super::super) async fn next(&mut self) -> Result<MessageOrCommand, ReadError> {
        loop {
            let received = tokio::select! {
                biased;
                received = self.reader.next() => received?,
                sent = self.writer.write_buf(&mut self.unsent), if !self.unsent.is_empty() => {
                    sent?;
                    continue;
                }
            };
            let pong = match &received {
                MessageOrCommand::Command(body) => pong(body),
                MessageOrCommand::Message(_) => None,
            };
            match pong {
                Some(pong) if self.unsent.len() < UNSENT_BYTES_MAX => self.unsent.extend_from_slice(&pong),
                Some(_) => {}
                None => return Ok(received),
            }
        }
    }
}

/// Has the system ask at short intervals whether the peer's machine is still there. A subscriber sends hardly anything,
/// so it would never notice that its peer's machine has vanished.
fn keep_alive(stream: &TcpStream, role: Role) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(PROBE_AFTER)
        .with_interval(PROBE_AFTER)
        .with_retries(PROBES_MAX);
    let socket = SockRef::from(stream);
    // A publisher's peer may read late, and then confirms nothing for a while.
    #[cfg(target_os = "linux")]
    if role != Role::Publisher {
        socket.set_tcp_user_timeout(Some(UNCONFIRMED_MAX))?;
    }
    socket.set_tcp_keepalive(&keepalive)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_machine_that_vanishes_is_noticed_on_both_sides() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let publisher = async {
            let (stream, _) = listener.accept().await.unwrap();
            PeerConnection::open(stream, Role::Publisher).await.unwrap()
        };
        let subscriber = async {
            let stream = TcpStream::connect(address).await.unwrap();
            PeerConnection::open(stream, Role::Subscriber).await.unwrap()
        };
        let (publisher, subscriber) = tokio::join!(publisher, subscriber);
        #[cfg(target_os = "linux")]
        let timeouts = [&publisher, &subscriber].map(|connection| {
            let socket = SockRef::from(connection.writer.as_ref());
            socket.tcp_user_timeout().unwrap()
        });
        for connection in [publisher, subscriber] {
            let socket = SockRef::from(connection.writer.as_ref());
            assert!(socket.keepalive().unwrap());
            assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_AFTER);
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), PROBE_AFTER);
            assert_eq!(socket.tcp_keepalive_retries().unwrap(), PROBES_MAX);
        }
        #[cfg(target_os = "linux")]
        assert_eq!(timeouts, [None, Some(UNCONFIRMED_MAX)]);
    }
}
