//! `GET /dump`: all blocks of all holders, namespace by namespace, as a stream. The dump keeps at most one holder of each lane in
//! memory.

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use http_body_util::StreamBody;
use hyper::body::Frame;
use serde::Serialize;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::Namespace;
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{BlockNames, Event, NamespaceName, Rank, Tier, WorkerName, instance_among, is_pool};

use crate::lanes::{DumpPosition, HolderDump, LanePool, PoolError};
use crate::queries::IndexHere;
use kvatlas_telemetry::log_gated;

use super::answers::RATE_BYTES;
use super::dialect::labels_of;
use super::error::HttpRefusal;
use super::shared::HttpShared;

/// Maximum number of pieces of the answer that wait to be sent.
const PIECES_MAX: usize = 4;
/// Approximate length of a piece of the answer, in bytes.
const PIECE_BYTES: usize = 64 << 10;

/// Answers `GET /dump`. Refuses a second dump while one is under way.
pub(super) async fn dump(State(shared): State<Arc<HttpShared>>) -> Result<Response, HttpRefusal> {
    let index = shared.index()?;
    let IndexHere { answerer, pool, .. } = index.source.here()?;
    let Ok(permit) = Arc::clone(&index.dumps).try_acquire_owned() else {
        return Err(HttpRefusal::Unavailable(
            "another dump is under way; ask again".to_owned(),
        ));
    };
    let namespaces = answerer.namespaces().all();
    let names: Vec<&NamespaceName> = namespaces.iter().map(|namespace| &namespace.name).collect();
    let labels = labels_of(&names);
    let writer = DumpWriter {
        pool: Arc::clone(pool),
        generation: answerer.trust().generation(),
        patience: shared.parts.request_timeout,
        namespaces: namespaces.into_iter().zip(labels).collect(),
    };
    let (pieces, mut written) = mpsc::channel(PIECES_MAX);
    tokio::spawn(writer.write(pieces, permit));
    let mut has_ended = false;
    let stream = futures_util::stream::poll_fn(move |context| match has_ended {
        true => Poll::Ready(None),
        false => written.poll_recv(context).map(|piece| match piece {
            Some(Piece::Text(text)) => Some(Ok(Frame::data(text))),
            Some(Piece::End) => None,
            None => {
                has_ended = true;
                Some(Err(CutShort))
            }
        }),
    });
    let mut response = Response::new(Body::new(StreamBody::new(stream)));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    Ok(response)
}

/// One event of a dump: the contract's fields of an event, and the holder and tier of its blocks.
#[derive(Serialize)]
struct EventJson {
    instance_id: String,
    rank: Rank,
    tier: Tier,
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sequence_hashes: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lineage_hashes: Vec<String>,
}

/// Piece of the answer to `GET /dump`.
enum Piece {
    Text(Bytes),
    /// End of a complete answer. An answer without this piece was cut short.
    End,
}

/// Error that ends an answer that was cut short. It breaks the connection, so that the client notices that a part of
/// the answer is missing.
#[derive(Debug, thiserror::Error)]
#[error("the dump was cut short")]
struct CutShort;

/// Reason why a dump ends early, so that its answer is cut short.
enum DumpEnd {
    ClientLeft,
    /// Client read too little for too long. Only one dump runs at a time, so a slow client blocks all other dumps.
    ClientWaits,
    LanesStopped,
}

impl From<PoolError> for DumpEnd {
    fn from(_: PoolError) -> Self {
        Self::LanesStopped
    }
}

struct DumpWriter {
    pool: Arc<LanePool>,
    generation: StreamGeneration,
    /// Maximum time that a client may take for each [`RATE_BYTES`] of the answer.
    patience: Duration,
    /// The namespaces with their keys in the dump.
    namespaces: Vec<(Arc<Namespace>, String)>,
}

/// Position of the dump in one lane: the lane's next holder, and the position of that holder.
struct Cursor {
    lane: usize,
    next: Option<(DumpPosition, HolderDump)>,
}

impl DumpWriter {
    async fn write(self, pieces: mpsc::Sender<Piece>, permit: OwnedSemaphorePermit) {
        let mut output = Output {
            pieces,
            text: Vec::with_capacity(PIECE_BYTES * 2),
            patience: Patience::new(self.patience),
        };
        match self.write_all(&mut output).await {
            Err(DumpEnd::LanesStopped) => {
                log_gated!(warn "a dump was cut short: the lanes have stopped");
            }
            Err(DumpEnd::ClientWaits) => {
                let patience = self.patience;
                log_gated!(
                    warn "a dump was cut short: its client read less than 1 MiB in each {patience:?} (http.request_timeout_ms)"
                );
            }
            Ok(()) | Err(DumpEnd::ClientLeft) => {}
        }
        drop(permit);
    }

    /// Writes the whole dump. Each lane returns its holders in the order of namespaces, so one pass over all lanes is
    /// enough for all namespaces.
    async fn write_all(&self, output: &mut Output) -> Result<(), DumpEnd> {
        let mut cursors = Vec::new();
        for lane in 0..self.pool.lane_count() {
            let next = self.next_of(lane, None).await?;
            cursors.push(Cursor { lane, next });
        }
        output.push(b"{").await?;
        for (number, (namespace, label)) in self.namespaces.iter().enumerate() {
            let label = serde_json::to_string(label).unwrap_or_default();
            let block_size = namespace.indexer.settings().block_size.as_u32();
            let comma = if number > 0 { "," } else { "" };
            let head = format!("{comma}{label}:{{\"block_size\":{block_size},\"events\":[");
            output.push(head.as_bytes()).await?;
            let mut is_first = true;
            for cursor in &mut cursors {
                while let Some((position, dump)) = self.take(cursor, &namespace.name).await? {
                    write_holder(dump, namespace, &mut is_first, output).await?;
                    cursor.next = self.next_of(cursor.lane, Some(position)).await?;
                }
            }
            output.push(b"]}").await?;
        }
        output.push(b"}").await?;
        output.flush().await?;
        output.send(Piece::End).await
    }

    /// Returns the lane's next holder if it belongs to `namespace`, the namespace that is being written. Skips holders
    /// of namespaces that come earlier in the order, because they were added too late for this dump.
    async fn take(
        &self,
        cursor: &mut Cursor,
        namespace: &NamespaceName,
    ) -> Result<Option<(DumpPosition, HolderDump)>, DumpEnd> {
        while let Some((position, dump)) = cursor.next.take() {
            match dump.frame.namespace.cmp(namespace) {
                std::cmp::Ordering::Equal => return Ok(Some((position, dump))),
                std::cmp::Ordering::Less => cursor.next = self.next_of(cursor.lane, Some(position)).await?,
                std::cmp::Ordering::Greater => {
                    cursor.next = Some((position, dump));
                    break;
                }
            }
        }
        Ok(None)
    }

    async fn next_of(
        &self,
        lane: usize,
        after: Option<DumpPosition>,
    ) -> Result<Option<(DumpPosition, HolderDump)>, PoolError> {
        self.pool.dump_next(lane, after, true, self.generation).await
    }
}

async fn write_holder(
    dump: HolderDump,
    namespace: &Namespace,
    is_first: &mut bool,
    output: &mut Output,
) -> Result<(), DumpEnd> {
    // The blocks of a pool are left out, because a gateway would think that a worker has them.
    if is_pool(&dump.frame.worker) {
        return Ok(());
    }
    let is_known = |worker: &WorkerName| namespace.indexer.has_worker(worker);
    let (instance_id, rank) = (instance_among(&dump.frame.worker, &is_known), dump.frame.rank);
    for (tier, event) in dump.into_events() {
        let Event::Stored(stored) = event else {
            continue;
        };
        let mut json = EventJson {
            instance_id: instance_id.clone(),
            rank,
            tier,
            r#type: "stored",
            parent: None,
            position: None,
            sequence_hashes: Vec::new(),
            lineage_hashes: Vec::new(),
        };
        match stored.names {
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                json.parent = parent.as_ref().map(SequenceHash::to_string);
                json.position = position.map(|position| position.as_u32());
                json.sequence_hashes = hashes.iter().map(SequenceHash::to_string).collect();
            }
            BlockNames::Lineage(hashes) => {
                let text = |hash: &kvatlas_core::hash::PositionalLineageHash| {
                    format!("{:032x}", u128::from_be_bytes(hash.to_be_bytes()))
                };
                json.lineage_hashes = hashes.iter().map(text).collect();
            }
        }
        if !std::mem::take(is_first) {
            output.push(b",").await?;
        }
        let text = serde_json::to_vec(&json).unwrap_or_default();
        output.push(&text).await?;
    }
    Ok(())
}

struct Output {
    pieces: mpsc::Sender<Piece>,
    text: Vec<u8>,
    patience: Patience,
}

impl Output {
    async fn push(&mut self, text: &[u8]) -> Result<(), DumpEnd> {
        self.text.extend_from_slice(text);
        if self.text.len() >= PIECE_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), DumpEnd> {
        let text = std::mem::take(&mut self.text);
        let (bytes, begun) = (text.len(), Instant::now());
        self.send(Piece::Text(text.into())).await?;
        self.patience.note(begun.elapsed(), bytes);
        Ok(())
    }

    async fn send(&self, piece: Piece) -> Result<(), DumpEnd> {
        let sent = self.pieces.send_timeout(piece, self.patience.left).await;
        sent.map_err(|error| match error {
            SendTimeoutError::Timeout(_) => DumpEnd::ClientWaits,
            SendTimeoutError::Closed(_) => DumpEnd::ClientLeft,
        })
    }
}

/// Time for which the dump goes on waiting for its client. Waiting uses it up, and sent bytes give it back.
struct Patience {
    max: Duration,
    left: Duration,
}

impl Patience {
    fn new(max: Duration) -> Self {
        Self { max, left: max }
    }

    /// Notes that the client took `bytes` bytes after a wait. Each [`RATE_BYTES`] give all of the time back.
    fn note(&mut self, waited: Duration, bytes: usize) {
        let gained = self.max.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX)) / RATE_BYTES;
        self.left = (self.left.saturating_sub(waited) + gained).min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_reads_too_slowly_uses_up_the_patience() {
        let after = |pieces: u32, milliseconds: u64| {
            let mut patience = Patience::new(Duration::from_secs(10));
            for _ in 0..pieces {
                patience.note(Duration::from_millis(milliseconds), PIECE_BYTES);
            }
            patience.left
        };
        assert_eq!(after(1000, 600), Duration::from_secs(10));
        assert_eq!(after(1, 1000), Duration::from_millis(9625));
        // No time is left to wait for another piece.
        assert!(after(26, 1000) < Duration::from_secs(1));
        assert!(after(2, 9000) < Duration::from_secs(2));
    }
}
