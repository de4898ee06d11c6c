//! An engine that announces frames beyond all bounds, and one beside it.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{Site, stored};
use crate::support::PATIENCE;
use crate::support::metrics::{counter, total};
use crate::support::process::{Process, memory_peak};

/// The greeting of ZMTP 3.0, without authentication.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";

/// The next bridge that subscribes.
async fn subscriber(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(&greeting()).await.unwrap();
    stream.write_all(READY).await.unwrap();
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await.unwrap();
    loop {
        let [flags, length] = [stream.read_u8().await.unwrap(), stream.read_u8().await.unwrap()];
        let mut body = vec![0; usize::from(length)];
        stream.read_exact(&mut body).await.unwrap();
        // Commands have the flag 4; the subscription is the first message.
        if flags & 4 == 0 {
            assert_eq!(body, [1]);
            return stream;
        }
    }
}

/// The three frames of a batch.
fn batch(number: u64, event: &Value) -> Vec<u8> {
    let payload = rmp_serde::to_vec(&json!([1.5, [event], 0])).unwrap();
    let mut bytes = vec![1, 0, 1, 8];
    bytes.extend(number.to_be_bytes());
    bytes.extend(announced(payload.len() as u64));
    bytes.extend(payload);
    bytes
}

/// The head of a long frame.
fn announced(length: u64) -> Vec<u8> {
    [&[2], &length.to_be_bytes()[..]].concat()
}

/// Sends zeros until nobody takes them any more; says how many bytes were taken at most.
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
    let site = Site::new(&[]).await;
    let bad = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let good = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let flag = |name: &str, listener: &TcpListener| {
        format!("--engine={name}=tcp://{}", listener.local_addr().unwrap())
    };
    let flags = [flag("bad", &bad), flag("good", &good)];
    let more = ["--model", "m", "--block-size", "4", &flags[0], &flags[1]];
    let mut bridge = Process::bridge(site.broker.url(), &more);
    let mut followed = subscriber(&good).await;
    followed.write_all(&batch(0, &stored(1, 0, 1))).await.unwrap();
    site.settles("good", 1, &[]).await;

    let attack = async {
        for (place, length) in [1 << 62, 1 << 30, u64::MAX].into_iter().enumerate() {
            let mut stream = subscriber(&bad).await;
            if place == 0 {
                // Known, until it does that.
                stream.write_all(&batch(0, &stored(2, 0, 1))).await.unwrap();
                site.settles("bad", 1, &[]).await;
            }
            stream.write_all(&announced(length)).await.unwrap();
            let taken = sends_on(&mut stream).await;
            assert!(taken < 128 << 20, "{taken} bytes were taken of {length}");
        }
        drop(bad);
    };
    tokio::time::timeout(PATIENCE, attack).await.unwrap();

    site.settles("bad", 1, &["unverified", "upstream_lost"]).await;
    let cut = "kvatlas_bridge_connections_cut_total";
    assert_eq!(
        counter(&bridge, &format!("{cut}{{reason=\"frame_too_long\"}}")),
        3
    );
    assert!(total(&bridge, cut, "reason") <= 3.0);
    followed.write_all(&batch(1, &stored(1, 1, 2))).await.unwrap();
    site.settles("good", 3, &[]).await;
    assert!(bridge.runs());
    let bytes = memory_peak(bridge.pid()).unwrap();
    assert!(bytes < 128 << 20, "{bytes} bytes of memory at most");
}
