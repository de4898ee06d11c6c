//! The server's account of the events stream: its configuration, its state, and the server's time.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use async_nats::datetime::{DateTime, parse_rfc3339};
use async_nats::jetstream::Context;
use async_nats::jetstream::context::{GetStreamError, GetStreamErrorKind};
use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::Info;
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::lanes::{ServerClock, now_us};

/// Account of a stream with the server's time, which the client library leaves out.
#[derive(Deserialize)]
struct TimedInfo {
    /// Time of the server. Servers before 2.10 do not tell it.
    #[serde(default)]
    ts: Option<String>,
    #[serde(flatten)]
    info: Info,
}

/// Asks the server for its account of the stream called `name`. Notes the server's time in `clock`.
pub(super) async fn look_up(
    jetstream: &Context,
    name: &str,
    clock: &ServerClock,
) -> Result<Info, GetStreamError> {
    // The library checks the name.
    jetstream.get_stream_no_info(name).await?;
    let asked_us = now_us();
    let answer = jetstream.request(format!("STREAM.INFO.{name}"), &()).await;
    match answer.map_err(|error| GetStreamError::with_source(GetStreamErrorKind::Request, error))? {
        Response::Err { error } => Err(GetStreamErrorKind::JetStream(error).into()),
        Response::Ok(TimedInfo { ts, info }) => {
            if let Some(time) = ts.and_then(|time| parse_rfc3339(&time).ok()) {
                clock.note(unix_us(time), asked_us);
            }
            Ok(info)
        }
    }
}

/// Returns the subject on which the server is asked for its account of the stream called `name`.
pub(crate) fn info_subject(name: &str) -> String {
    format!("$JS.API.STREAM.INFO.{name}")
}

/// Returns a digest of the server that leads the stream and of the time since which it does; `None` if nobody leads the
/// stream, which takes no messages then. It is another one after an election, also of the same server. Without a cluster it
/// is always the same. In a cluster it is another one in each process if the servers do not tell the time: those before
/// 2.11.9, and all for a stream without replicas.
pub(super) fn leadership(info: &Info) -> Option<u64> {
    static OF_PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    let is_named = |name: &String| !name.is_empty();
    // A server without a cluster names itself as the leader.
    let Some(cluster) = info
        .cluster
        .as_ref()
        .filter(|cluster| cluster.name.as_ref().is_some_and(is_named))
    else {
        return Some(0);
    };
    let since = cluster.leader_since.map_or(*OF_PROCESS, unix_us);
    let leader = cluster.leader.as_ref().filter(|leader| is_named(leader))?;
    Some(xxh3_64_with_seed(leader.as_bytes(), since))
}

/// Returns a time of the server in microseconds since the Unix epoch.
pub(super) fn unix_us(time: DateTime) -> u64 {
    u64::try_from(time.unix_timestamp_nanos() / 1000).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the account of an empty stream, of a server without a cluster that does not tell its time.
    fn account_of_a_server() -> serde_json::Value {
        serde_json::json!({
            "config": {
                "name": "E", "subjects": ["e.>"], "retention": "limits", "max_consumers": -1, "max_msgs": -1,
                "max_bytes": -1, "discard": "old", "max_age": 0, "storage": "file", "num_replicas": 1
            },
            "created": "2026-01-01T00:00:00Z",
            "state": {
                "messages": 0, "bytes": 0, "consumer_count": 0, "first_seq": 1, "last_seq": 0,
                "first_ts": "0001-01-01T00:00:00Z", "last_ts": "0001-01-01T00:00:00Z"
            }
        })
    }

    #[test]
    fn servers_before_2_10_tell_no_time() {
        let account = |time: Option<&str>| {
            let mut account = account_of_a_server();
            if let Some(time) = time {
                account["ts"] = time.into();
            }
            serde_json::from_value::<TimedInfo>(account).unwrap()
        };
        let newer = account(Some("2026-01-01T00:00:05.25Z"));
        let time = newer.ts.and_then(|time| parse_rfc3339(&time).ok());
        assert_eq!(time.map(unix_us), Some(1_767_225_605_250_000));
        assert_eq!(newer.info.config.name, "E");
        assert_eq!(account(None).ts, None);
    }

    #[test]
    fn each_election_is_another_leadership() {
        let of = |cluster: serde_json::Value| {
            let mut account = account_of_a_server();
            if !cluster.is_null() {
                account["cluster"] = cluster;
            }
            leadership(&serde_json::from_value::<Info>(account).unwrap())
        };
        let led = |leader: &str, since: &str| {
            of(serde_json::json!({"name": "c", "leader": leader, "leader_since": since}))
        };
        let first = led("a", "2026-01-01T00:00:00Z");
        assert_eq!(first, led("a", "2026-01-01T00:00:00Z"));
        assert_ne!(first, led("b", "2026-01-01T00:00:00Z"));
        assert_ne!(first, led("a", "2026-01-01T00:00:01Z"));
        let untold = || of(serde_json::json!({"name": "c", "leader": "a"}));
        assert!(untold() != first && untold() == untold());
        let alone = of(serde_json::json!({"leader": "a"}));
        assert!(alone == of(serde_json::Value::Null) && alone != untold() && alone.is_some());
        for nobody in [
            serde_json::json!({"name": "c"}),
            serde_json::json!({"name": "c", "leader": ""}),
        ] {
            assert_eq!(of(nobody), None);
        }
    }
}
