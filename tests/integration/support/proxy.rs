//! TCP proxy between a daemon and its broker, with the faults of a network: cut, delayed, or silent in one direction.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Maximum number of pieces that are under way in one direction of a connection. At this number the sender has to wait,
/// as on a real line.
const PIECES_MAX: usize = 1024;

/// Faults of the bytes in one direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Direction {
    /// Delay of every byte.
    pub delay: Duration,
    /// Whether bytes are held back. They arrive when this is `false` again.
    pub is_silent: bool,
}

/// State of the network at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Network {
    /// Whether the network is cut: connections break, and the proxy makes no new ones.
    pub is_cut: bool,
    /// Faults on the way from the daemon to the broker.
    pub to_broker: Direction,
    /// Faults on the way from the broker to the daemon.
    pub to_daemon: Direction,
    /// Whether the faults concern only the connection on which the daemon receives events.
    pub is_for_events: bool,
}

/// Running proxy. When the value is dropped, it ends with its last connection.
pub struct Proxy {
    address: SocketAddr,
    network: watch::Sender<Network>,
}

impl Proxy {
    /// Starts a proxy on a free port, for the broker at `port` of this machine.
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (network, state) = watch::channel(Network::default());
        tokio::spawn(accept(listener, port, state));
        Self { address, network }
    }

    /// Returns the URL at which the daemon reaches its broker through the proxy.
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Sets the state of the network from now on.
    pub fn set(&self, network: Network) {
        self.network.send_replace(network);
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.set(Network::default());
    }
}

async fn accept(listener: TcpListener, port: u16, state: watch::Receiver<Network>) {
    while let Ok((daemon, _)) = listener.accept().await {
        if state.has_changed().is_err() {
            return;
        }
        // If the broker is gone, too, the daemon's connection ends at once.
        if state.borrow().is_cut && !state.borrow().is_for_events {
            continue;
        }
        let Ok(broker) = TcpStream::connect(("127.0.0.1", port)).await else {
            continue;
        };
        // The proxy must not be slower than the configured delay.
        daemon.set_nodelay(true).unwrap();
        broker.set_nodelay(true).unwrap();
        let (from_daemon, to_daemon) = daemon.into_split();
        let (from_broker, to_broker) = broker.into_split();
        let is_for_events = Arc::default();
        let line = |direction| Line {
            is_for_events: Arc::clone(&is_for_events),
            direction,
        };
        let (there, back) = (
            line(|network| network.to_broker),
            line(|network| network.to_daemon),
        );
        tokio::spawn(carry(from_daemon, to_broker, state.clone(), there));
        tokio::spawn(carry(from_broker, to_daemon, state.clone(), back));
    }
}

/// One direction of a proxied connection.
#[derive(Clone)]
struct Line {
    /// Whether this connection is the one on which the daemon receives events. The proxy learns it from the client name
    /// in the daemon's first message.
    is_for_events: Arc<AtomicBool>,
    direction: fn(&Network) -> Direction,
}

impl Line {
    fn hear(&self, piece: &[u8]) {
        if piece.starts_with(b"CONNECT ") && String::from_utf8_lossy(piece).contains("-events@") {
            self.is_for_events.store(true, Ordering::Release);
        }
    }

    fn is_meant(&self, network: &Network) -> bool {
        !network.is_for_events || self.is_for_events.load(Ordering::Acquire)
    }

    fn direction(&self, network: &Network) -> Direction {
        if self.is_meant(network) {
            (self.direction)(network)
        } else {
            Direction::default()
        }
    }
}

/// Carries one direction of a connection until one end closes it or the network is cut.
async fn carry(mut from: OwnedReadHalf, to: OwnedWriteHalf, state: watch::Receiver<Network>, line: Line) {
    let mut cut = state.clone();
    let (pieces, arriving) = mpsc::channel(PIECES_MAX);
    let delivery = tokio::spawn(deliver(arriving, to, state.clone(), line.clone()));
    let mut buffer = vec![0_u8; 16 * 1024];
    loop {
        tokio::select! {
            read = from.read(&mut buffer) => match read {
                Ok(bytes) if bytes > 0 => {
                    line.hear(&buffer[..bytes]);
                    let due = Instant::now() + line.direction(&state.borrow()).delay;
                    if pieces.send((due, buffer[..bytes].to_vec())).await.is_err() {
                        break;
                    }
                }
                _ => break,
            },
            () = until_cut(&mut cut, &line) => {
                // Bytes that are under way are lost.
                delivery.abort();
                break;
            }
        }
    }
}

/// Waits until the network is cut, or the proxy is gone.
async fn until_cut(state: &mut watch::Receiver<Network>, line: &Line) {
    let _ = state
        .wait_for(|network| network.is_cut && line.is_meant(network))
        .await;
}

async fn deliver(
    mut arriving: mpsc::Receiver<(Instant, Vec<u8>)>,
    mut to: OwnedWriteHalf,
    mut state: watch::Receiver<Network>,
    line: Line,
) {
    while let Some((due, piece)) = arriving.recv().await {
        tokio::time::sleep_until(due).await;
        let is_open = state
            .wait_for(|network| !line.direction(network).is_silent)
            .await
            .is_ok();
        if !is_open || to.write_all(&piece).await.is_err() {
            return;
        }
    }
}
