//! Reloads of a running daemon: what they take over, and what leaves everything as it is.

use kvatlas_daemon::ReloadError;

use crate::support::http::HttpClient;
use crate::support::{broker, config, daemon};

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_token_counts_from_the_reload_on() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "first\n").unwrap();
    let settings = [
        ("http.listen", "127.0.0.1:0"),
        ("http.token_file", path.to_str().unwrap()),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let status = async |token: &str| {
        let client = HttpClient::connect(daemon.http_address().unwrap()).await;
        client.with_token(token).get("/v1/models").await.status
    };
    assert_eq!([status("first").await, status("second").await], [200, 401]);

    let config = config(broker.url(), &settings);
    std::fs::write(&path, "no token").unwrap();
    let refused = daemon.reload(&config).unwrap_err();
    assert!(matches!(refused, ReloadError::Token(_)), "{refused}");
    assert_eq!(status("first").await, 200);

    std::fs::write(&path, "second\n").unwrap();
    assert_eq!(daemon.reload(&config).unwrap().applied, ["http.token_file"]);
    assert_eq!([status("first").await, status("second").await], [401, 200]);
    assert!(daemon.reload(&config).unwrap().applied.is_empty());
    daemon.stop().await;
}

/// A reload takes over nothing of a configuration with which the daemon would not start.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_takes_nothing_that_a_start_would_refuse() {
    let broker = broker().await;
    let bounds = [
        ("events.max_message_bytes", "1 MiB"),
        ("events.lane_queue_bytes", "2 MiB"),
    ];
    let daemon = daemon(broker.url(), &bounds).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("daemon.creds");
    std::fs::write(&path, "garbage").unwrap();

    let credentials = ("nats.credentials_file", path.to_str().unwrap());
    let with_credentials = [&bounds[..], &[credentials]].concat();
    let refused = daemon
        .reload(&config(broker.url(), &with_credentials))
        .unwrap_err();
    assert!(matches!(refused, ReloadError::Credentials(_)), "{refused}");

    // The queue keeps its size until a restart.
    let larger = [
        ("events.max_message_bytes", "8 MiB"),
        ("events.lane_queue_bytes", "16 MiB"),
    ];
    let refused = daemon.reload(&config(broker.url(), &larger)).unwrap_err();
    assert!(matches!(refused, ReloadError::NoRoom { .. }), "{refused}");

    let unchanged = daemon.reload(&config(broker.url(), &bounds)).unwrap();
    assert_eq!(unchanged, kvatlas_daemon::ReloadReport::default());
    daemon.stop().await;
}
