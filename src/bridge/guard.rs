//! A guard between an engine and the ZeroMQ library. The library reserves as much memory as a frame announces, so that the guard checks the
//! announcements first.
//!
//! ```text
//! engine ──TCP──▶ guard: Walker ──Unix socket──▶ the library's socket
//!        ◀────────────────────────────────────
//! ```
//!
//! The guard makes the connection to the engine. The library connects to a private socket of the guard, which accepts a single connection,
//! and only from this process. Either connection ends with the other. A frame that breaks a bound never reaches the library.

use std::io;
use std::sync::{Arc, OnceLock};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_util::task::AbortOnDropHandle;
use zeromq::Endpoint;

use kvatlas_telemetry::BridgeMetrics;
use kvatlas_telemetry::labels::FrameFault;

use super::walker::{Broken, WalkLimits, Walker};

/// Most bytes of an engine that are in the guard at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// A guarded connection to an engine. The connection ends when the guard is dropped.
pub(super) struct Guard {
    local: String,
    fault: Arc<OnceLock<FrameFault>>,
    _task: AbortOnDropHandle<()>,
}

impl Guard {
    /// Connects to `tcp://HOST:PORT`. The library then connects to [`Self::local`].
    ///
    /// # Errors
    ///
    /// Any error that keeps the connection from being made.
    pub(super) async fn connect(endpoint: &str, metrics: Arc<BridgeMetrics>) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidInput, "not tcp://HOST:PORT");
        let (host, port) = match endpoint.parse() {
            Ok(Endpoint::Tcp(host, port)) => (host.to_string(), port),
            _ => return Err(invalid()),
        };
        let remote = TcpStream::connect((host.as_str(), port)).await?;
        remote.set_nodelay(true)?;
        // The name is abstract, without a file: it needs no writable directory, and leaves nothing behind.
        let name = format!("\0kvatlas-bridge-{:032x}", fastrand::u128(..));
        let listener = UnixListener::bind(&name)?;
        let fault = Arc::new(OnceLock::new());
        let task = pass(remote, listener, Arc::clone(&fault), endpoint.to_owned(), metrics);
        Ok(Self {
            local: format!("ipc://{name}"),
            fault,
            _task: AbortOnDropHandle::new(tokio::spawn(task)),
        })
    }

    /// Returns the address that the library connects to.
    pub(super) fn local(&self) -> &str {
        &self.local
    }

    /// Returns the bound that the engine has broken; `None` if that did not end the connection. The bound is known before the library sees
    /// the end.
    pub(super) fn fault(&self) -> Option<FrameFault> {
        self.fault.get().copied()
    }
}

/// Passes bytes in both directions, until one of the connections ends or a bound is broken.
async fn pass(
    mut remote: TcpStream,
    listener: UnixListener,
    fault: Arc<OnceLock<FrameFault>>,
    endpoint: String,
    metrics: Arc<BridgeMetrics>,
) {
    let Ok(mut local) = accept_own(&listener).await else {
        return;
    };
    drop(listener);
    let (inbound, mut outbound) = remote.split();
    let (mut from_library, to_library) = local.split();
    let ended = tokio::select! {
        biased;
        ended = pass_inbound(inbound, to_library) => ended,
        ended = tokio::io::copy(&mut from_library, &mut outbound) => ended.map(|_| None),
    };
    // Both connections stand until the end of this function: the library sees their end with the fault known.
    if let Ok(Some(found)) = ended {
        // No other code sets the fault.
        let _ = fault.set(found);
        metrics.connection_cut(found, &endpoint);
    }
}

/// Accepts the first connection from this process. Connections from other processes are closed.
async fn accept_own(listener: &UnixListener) -> io::Result<UnixStream> {
    let own = i32::try_from(std::process::id()).ok();
    loop {
        let (stream, _) = listener.accept().await?;
        if stream.peer_cred()?.pid() == own {
            return Ok(stream);
        }
    }
}

/// Passes an engine's bytes to the library. Returns the bound that the engine breaks; `None` if its connection ends and no bound was broken.
async fn pass_inbound(
    mut inbound: impl AsyncRead + Unpin,
    mut to_library: impl AsyncWrite + Unpin,
) -> io::Result<Option<FrameFault>> {
    let mut walker = Walker::new(WalkLimits::ENGINE);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let read = inbound.read(&mut chunk).await?;
        if read == 0 {
            return Ok(None);
        }
        let bytes = &chunk[..read];
        if let Err(Broken { passed, fault }) = walker.walk(bytes) {
            // The bytes before the broken bound are valid, and are passed on.
            to_library.write_all(&bytes[..passed]).await?;
            return Ok(Some(fault));
        }
        to_library.write_all(bytes).await?;
    }
}
