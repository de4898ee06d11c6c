//! Door: the two sockets of an engine that routers connect to. The memory and the time that each client can take are bounded.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use kvatlas_engines::EventList;

use kvatlas_telemetry::labels::RepublishCut;

use crate::lease::Turns;
use crate::zmtp::{MessageOrCommand, Mismatch, PeerConnection, ReadError, Role, push_message};

use super::addresses::SocketPair;
use super::stream::{Stream, StreamState};

/// Maximum number of connections to one socket.
const CLIENTS_MAX: usize = 256;
/// Maximum number of answers that are sent at the same time. Each answer may hold a state of its own in memory.
const ANSWERS_MAX: usize = 8;
/// Maximum time for a handshake, and for sending one piece.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum time for an answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(15);
/// Maximum time for which a connection for replays may be idle.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Pause before a port that is taken is tried again.
const BIND_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of bytes that are sent in one piece.
const PIECE_BYTES: usize = 64 << 10;
/// The number that ends a replay: −1.
const END: u64 = u64::MAX;

/// One of an engine's two sockets.
#[derive(Debug, Clone, Copy)]
enum SocketKind {
    Events,
    Replays,
}

/// Reason for which a connection ends.
#[derive(Debug, thiserror::Error)]
enum ConnectionEnd {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error(transparent)]
    Network(#[from] io::Error),
    /// The client took too long: for a handshake, for a piece, or for a whole answer.
    #[error("it is too slow")]
    Slow,
    /// No message came for too long.
    #[error("it is idle")]
    Idle,
}

impl ConnectionEnd {
    /// Returns the fault of the client, by which the ended connection is counted; `None` if the client is not at fault.
    fn cut(&self) -> Option<RepublishCut> {
        match self {
            Self::Read(ReadError::Mismatch(_)) => Some(RepublishCut::Protocol),
            Self::Read(ReadError::TooMuch(_)) => Some(RepublishCut::TooMuch),
            Self::Slow => Some(RepublishCut::Slow),
            Self::Read(ReadError::Network(_) | ReadError::Closed) | Self::Network(_) | Self::Idle => None,
        }
    }
}

/// Serves both sockets of an engine during each turn of the bridge, that is, while the bridge speaks for the engine.
/// Connections end with the turn, so that no router mistakes the numbers of one bridge for the numbers of another.
pub(super) async fn serve_in_turns(
    engine: &str,
    sockets: &SocketPair,
    stream: &Arc<Stream>,
    turns: &mut Turns,
) {
    let at = |port: u16| (sockets.host.clone(), port);
    loop {
        turns.begin().await;
        tracing::info!(engine, events = %sockets.events(), replay = %sockets.replay(), "republished");
        let events = serve(SocketKind::Events, at(sockets.events_port()), Arc::clone(stream));
        let replay = serve(SocketKind::Replays, at(sockets.replay_port()), Arc::clone(stream));
        tokio::select! {
            _ = async { tokio::join!(events, replay) } => {}
            () = turns.end() => tracing::info!(engine, "routers are left to the bridge that speaks for the engine"),
        }
    }
}

/// Serves one socket of an engine, for ever.
async fn serve(kind: SocketKind, (host, port): (String, u16), stream: Arc<Stream>) {
    let listener = bind(&host, port).await;
    let answers = Arc::new(Semaphore::new(ANSWERS_MAX));
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            Some(_) = clients.join_next() => {}
            accepted = listener.accept() => {
                // The client has gone already, or there are no descriptors. The next attempt may succeed.
                let Ok((client, _)) = accepted else {
                    tokio::time::sleep(BIND_PAUSE).await;
                    continue;
                };
                if clients.len() >= CLIENTS_MAX {
                    stream.metrics().republish_cut(RepublishCut::TooMany);
                    continue;
                }
                clients.spawn(follow(kind, client, Arc::clone(&stream), Arc::clone(&answers)));
            }
        }
    }
}

/// Binds the port, and tries again until that succeeds.
async fn bind(host: &str, port: u16) -> TcpListener {
    let mut is_said = false;
    loop {
        match TcpListener::bind((host, port)).await {
            Ok(listener) => return listener,
            Err(error) if is_said => {
                tracing::debug!(host, port, %error, "a socket for routers cannot listen")
            }
            Err(error) => {
                tracing::error!(host, port, %error, "a socket for routers cannot listen; it is tried again")
            }
        }
        is_said = true;
        tokio::time::sleep(BIND_PAUSE).await;
    }
}

/// Serves one client to its end.
async fn follow(kind: SocketKind, client: TcpStream, stream: Arc<Stream>, answers: Arc<Semaphore>) {
    let peer = client.peer_addr().ok();
    let ended = match kind {
        SocketKind::Events => publish(client, &stream).await,
        SocketKind::Replays => replay(client, &stream, &answers).await,
    };
    let Err(ended) = ended else {
        return;
    };
    if let Some(cut) = ended.cut() {
        stream.metrics().republish_cut(cut);
    }
    tracing::debug!(?peer, %ended, "a router's connection ended");
}

/// Shakes hands with a client.
async fn shake(client: TcpStream, role: Role) -> Result<PeerConnection, ConnectionEnd> {
    let opened = timeout(PATIENCE, PeerConnection::open(client, role)).await;
    Ok(opened.map_err(|_| ConnectionEnd::Slow)??)
}

/// Sends `bytes` in pieces, each within [`PATIENCE`].
async fn send(client: &mut PeerConnection, bytes: &[u8]) -> Result<(), ConnectionEnd> {
    for piece in bytes.chunks(PIECE_BYTES) {
        let sent = timeout(PATIENCE, client.send(piece)).await;
        sent.map_err(|_| ConnectionEnd::Slow)??;
    }
    Ok(())
}

/// Publishes to one subscriber.
async fn publish(client: TcpStream, stream: &Stream) -> Result<(), ConnectionEnd> {
    let mut client = shake(client, Role::Publisher).await?;
    // All messages have the empty topic: only a client that subscribes to everything hears them.
    let subscribing = async {
        while !is_subscription(&client.next().await?) {}
        Ok::<_, ConnectionEnd>(())
    };
    timeout(PATIENCE, subscribing)
        .await
        .map_err(|_| ConnectionEnd::Idle)??;
    let mut waiting = stream.subscribe();
    loop {
        tokio::select! {
            message = waiting.next() => match message {
                Some(message) => send(&mut client, &message).await?,
                // The stream has dropped this subscriber, because it was too slow, and has counted that.
                None => return Ok(()),
            },
            received = client.next() => {
                received?;
            }
        }
    }
}

/// Returns whether a peer subscribes to all topics, either by a message, or by the command of ZMTP 3.1.
fn is_subscription(received: &MessageOrCommand) -> bool {
    match received {
        MessageOrCommand::Message(frames) => frames.as_slice() == [&[1][..]],
        MessageOrCommand::Command(body) => body.as_ref() == b"\x09SUBSCRIBE",
    }
}

/// Answers one client's questions.
async fn replay(client: TcpStream, stream: &Stream, answers: &Semaphore) -> Result<(), ConnectionEnd> {
    let mut client = shake(client, Role::Replay).await?;
    loop {
        let received = timeout(IDLE_MAX, client.next())
            .await
            .map_err(|_| ConnectionEnd::Idle)??;
        let MessageOrCommand::Message(frames) = received else {
            continue;
        };
        let start = frames.last().and_then(|frame| frame.as_ref().try_into().ok());
        let Some(start) = start.map(u64::from_be_bytes) else {
            return Err(ReadError::from(Mismatch::Protocol).into());
        };
        // The semaphore is never closed.
        let _permit = answers.acquire().await;
        let answering = timeout(ANSWER_PATIENCE, answer(start, &mut client, stream));
        answering.await.map_err(|_| ConnectionEnd::Slow)??;
        stream.answered();
    }
}

/// Answers a question for the batches from number `start` on. Sends the engine's whole state under the numbers from `start` on,
/// and then an empty batch for each later number.
async fn answer(start: u64, client: &mut PeerConnection, stream: &Stream) -> Result<(), ConnectionEnd> {
    let state = state_for(start, stream).await;
    let mut bytes = Vec::new();
    let mut number = start;
    // The client may have asked for a number above the last one. Or the numbers from `start` on are fewer than the
    // lists of the state. In both cases the client gets no batch, and asks again after the next batch.
    if last_number(start, &state) <= state.number {
        for list in &state.lists {
            push_replayed(&mut bytes, number, &stream.payload(list));
            send(client, &bytes).await?;
            bytes.clear();
            number += 1;
        }
        let nothing = stream.payload(&EventList::default());
        for number in number..=state.number {
            push_replayed(&mut bytes, number, &nothing);
            if bytes.len() >= PIECE_BYTES {
                send(client, &bytes).await?;
                bytes.clear();
            }
        }
    }
    push_replayed(&mut bytes, END, b"");
    send(client, &bytes).await
}

/// Returns the state that answers a question for the batches from number `start` on. In the answer, the state's event
/// lists take the numbers from `start` on, one number for each list. If the stream's last number is too low for all
/// lists, it is raised first. It is not raised if `start` is above it.
async fn state_for(start: u64, stream: &Stream) -> Arc<StreamState> {
    let state = stream.state().await;
    let last = last_number(start, &state);
    if start > state.number || last <= state.number {
        return state;
    }
    // One number more than the lists need: events may come before the state is written again, and seldom add more than
    // one list.
    stream.reach(last.saturating_add(1));
    stream.state().await
}

/// Returns the number that the last event list of a state gets in an answer, if the first list gets the number `start`.
/// Every state has at least one list, which clears.
fn last_number(start: u64, state: &StreamState) -> u64 {
    let lists = state.lists.len().max(1) as u64;
    start.saturating_add(lists - 1)
}

/// Appends a batch in the form of vLLM's replays since version 0.26.
fn push_replayed(out: &mut Vec<u8>, number: u64, payload: &[u8]) {
    push_message(out, &[b"", b"", &number.to_be_bytes(), payload]);
}
