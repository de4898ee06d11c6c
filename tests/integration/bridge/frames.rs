//! An engine that announces frames of any length, and a well-behaved engine at the same bridge.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{Site, stored};
use crate::support::PATIENCE;
use crate::support::metrics::{counter, total};
use crate::support::process::{Process, memory_peak};

/// Returns the greeting of ZMTP 3.0 without authentication.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";

/// Accepts connections until the bridge subscribes on one of them, and returns this connection. On a busy machine, the
/// bridge may close a connection before it subscribes.
pub(super) async fn subscriber(listener: &TcpListener) -> TcpStream {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        if let Ok(stream) = subscribed(stream).await {
            return stream;
        }
    }
}

async fn subscribed(mut stream: TcpStream) -> std::io::Result<TcpStream> {
    stream.write_all(&greeting()).await?;
    stream.write_all(READY).await?;
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await?;
    loop {
        let [flags, length] = [stream.read_u8().await?, stream.read_u8().await?];
        let mut body = vec![0; usize::from(length)];
        stream.read_exact(&mut body).await?;
        // Frames of commands have flag 4. The first frame without that flag is the subscription.
        if flags & 4 == 0 {
            assert_eq!(body, [1]);
            return Ok(stream);
        }
    }
}

/// Waits until the bridge has closed the connection.
async fn closed(stream: &mut TcpStream) {
    while stream.read(&mut [0; 64]).await.is_ok_and(|read| read > 0) {}
}

/// Publishes the batches 0 to `last`, of one block each. Sends all of them again to each new subscriber.
async fn publish(listener: TcpListener, mut last: watch::Receiver<u32>) {
    loop {
        let mut stream = subscriber(&listener).await;
        let mut next = 0;
        loop {
            let due = *last.borrow_and_update();
            let batches: Vec<u8> = (next..=due)
                .flat_map(|place| batch(place.into(), &stored(1, place, 1)))
                .collect();
            next = due + 1;
            if stream.write_all(&batches).await.is_err() {
                break;
            }
            tokio::select! {
                changed = last.changed() => if changed.is_err() { return },
                () = closed(&mut stream) => break,
            }
        }
    }
}

/// Returns the three frames of a batch.
pub(super) fn batch(number: u64, event: &Value) -> Vec<u8> {
    let payload = rmp_serde::to_vec(&json!([1.5, [event], 0])).unwrap();
    let mut bytes = vec![1, 0, 1, 8];
    bytes.extend(number.to_be_bytes());
    bytes.extend(announced(payload.len() as u64));
    bytes.extend(payload);
    bytes
}

/// Returns the header of a long frame.
fn announced(length: u64) -> Vec<u8> {
    [&[2], &length.to_be_bytes()[..]].concat()
}

/// Sends zeros until the connection ends or 256 MiB are sent. Returns the number of bytes that were sent.
async fn sends_on(stream: &mut TcpStream) -> usize {
    const ENOUGH: usize = 256 << 20;
    let zeros = vec![0; 1 << 20];
    let mut sent = 0;
    while sent < ENOUGH && stream.write_all(&zeros).await.is_ok() {
        sent += zeros.len();
    }
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_without_bounds_ends_its_connection_and_nothing_else() {
    // Silence alone makes no holder stale here.
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let bad = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let flag = |name: &str, listener: &TcpListener| {
        format!("--engine={name}=tcp://{}", listener.local_addr().unwrap())
    };
    let flags = [flag("bad", &bad), flag("good", &good)];
    let more = ["--model", "m", "--block-size", "4", &flags[0], &flags[1]];
    let mut bridge = Process::bridge(site.broker.url(), &more);
    let (last, batches) = watch::channel(0);
    let _publishing = AbortOnDropHandle::new(tokio::spawn(publish(good, batches)));
    site.settles("good", 1, &[]).await;

    // The engine is exact until it announces too long a frame.
    let mut stream = loop {
        let mut stream = subscriber(&bad).await;
        // If the write fails, the connection has ended.
        let _ = stream.write_all(&batch(0, &stored(2, 0, 1))).await;
        tokio::select! {
            () = site.settles("bad", 1, &[]) => break stream,
            () = closed(&mut stream) => {}
        }
    };
    let cut = "kvatlas_bridge_connections_cut_total";
    let too_long = format!("{cut}{{reason=\"frame_too_long\"}}");
    let attack = async {
        for length in [1 << 62, 1 << 30, u64::MAX].into_iter().cycle() {
            // If the write fails, the connection ended before, and a further connection is counted instead.
            let _ = stream.write_all(&announced(length)).await;
            let taken = sends_on(&mut stream).await;
            assert!(taken < 128 << 20, "{taken} bytes were taken of {length}");
            if counter(&bridge, &too_long) >= 3 {
                break;
            }
            stream = subscriber(&bad).await;
        }
    };
    tokio::time::timeout(PATIENCE, attack).await.unwrap();
    drop(bad);

    site.settles("bad", 1, &["unverified", "upstream_lost"]).await;
    assert_eq!(total(&bridge, cut, "reason"), 3.0);
    last.send(2).unwrap();
    site.settles("good", 3, &[]).await;
    assert!(bridge.runs());
    let bytes = memory_peak(bridge.pid()).unwrap();
    assert!(bytes < 128 << 20, "{bytes} bytes of memory at most");
}
