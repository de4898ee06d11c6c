//! Tests that need a `nats-server`. Without one, a test fails, and its error says how to get one. If
//! `KVATLAS_TEST_OLD_NATS_SERVER` names an older server, the tests run against both.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;

use super::*;

fn binaries() -> Vec<PathBuf> {
    let current = find_nats_server(None).unwrap_or_else(|error| panic!("{error}"));
    let old = std::env::var_os("KVATLAS_TEST_OLD_NATS_SERVER").filter(|path| !path.is_empty());
    std::iter::once(current).chain(old.map(PathBuf::from)).collect()
}

/// Writes a program that runs and never listens. Returns its path.
fn silent_server(directory: &Path) -> PathBuf {
    let silent = directory.join("silent");
    std::fs::write(&silent, "#!/bin/sh\nexec sleep 600\n").unwrap();
    std::fs::set_permissions(&silent, std::fs::Permissions::from_mode(0o755)).unwrap();
    silent
}

fn port(broker: &EmbeddedBroker) -> u16 {
    let server: async_nats::ServerAddr = broker.url().parse().unwrap();
    assert_eq!(server.host(), "127.0.0.1");
    server.port()
}

#[tokio::test]
async fn a_broker_takes_clients_and_large_messages() {
    for binary in binaries() {
        let broker = EmbeddedBroker::start(&binary).await.unwrap();
        let client = async_nats::connect(broker.url()).await.unwrap();
        assert_eq!(client.server_info().max_payload, 8 << 20);
        client.flush().await.unwrap();
    }
}

/// Tests that a stream can be made whose maximum size exceeds the free disk space.
#[tokio::test]
async fn a_stream_may_be_larger_than_the_free_disk() {
    for binary in binaries() {
        let options = BrokerOptions {
            with_jetstream: true,
            ..BrokerOptions::default()
        };
        let broker = EmbeddedBroker::start_with(&binary, options).await.unwrap();
        let context = async_nats::jetstream::new(async_nats::connect(broker.url()).await.unwrap());
        let stream = async_nats::jetstream::stream::Config {
            name: "large".to_owned(),
            max_bytes: 900_000_000_000,
            ..Default::default()
        };
        context.create_stream(stream).await.unwrap();
    }
}

#[tokio::test]
async fn the_binary_may_have_any_name() {
    for binary in binaries() {
        let directory = tempfile::tempdir().unwrap();
        let renamed = directory.path().join("broker-2.x");
        std::os::unix::fs::symlink(&binary, &renamed).unwrap();
        EmbeddedBroker::start(&renamed).await.unwrap();
    }
}

#[tokio::test]
async fn two_brokers_run_side_by_side() {
    for binary in binaries() {
        let (one, other) = (
            EmbeddedBroker::start(&binary).await.unwrap(),
            EmbeddedBroker::start(&binary).await.unwrap(),
        );
        assert_ne!(one.url(), other.url());
        assert_ne!(one.pid(), other.pid());
    }
}

#[tokio::test]
async fn a_stopped_broker_can_be_started_again_on_its_port() {
    for binary in binaries() {
        let broker = EmbeddedBroker::start(&binary).await.unwrap();
        let (port, pid) = (port(&broker), broker.pid());
        broker.stop().await.unwrap();
        let options = BrokerOptions {
            port: Some(port),
            ..BrokerOptions::default()
        };
        let again = EmbeddedBroker::start_with(&binary, options).await.unwrap();
        assert_eq!(self::port(&again), port);
        assert_ne!(again.pid(), pid);
        async_nats::connect(again.url()).await.unwrap();
    }
}

#[tokio::test]
async fn a_killed_broker_can_be_started_again_with_its_streams() {
    for binary in binaries() {
        let options = BrokerOptions {
            with_jetstream: true,
            ..BrokerOptions::default()
        };
        let mut broker = EmbeddedBroker::start_with(&binary, options).await.unwrap();
        let (url, pid) = (broker.url().to_owned(), broker.pid());
        let context = async_nats::jetstream::new(async_nats::connect(&url).await.unwrap());
        let stream = async_nats::jetstream::stream::Config {
            name: "kept".to_owned(),
            ..Default::default()
        };
        context.create_stream(stream).await.unwrap();
        kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::KILL).unwrap();
        while !broker.has_ended().unwrap() {
            tokio::task::yield_now().await;
        }
        broker.start_again().await.unwrap();
        assert!(!broker.has_ended().unwrap());
        assert_eq!(broker.url(), url);
        assert_ne!(broker.pid(), pid);
        let context = async_nats::jetstream::new(async_nats::connect(&url).await.unwrap());
        context.get_stream("kept").await.unwrap();
    }
}

#[tokio::test]
async fn a_broker_that_does_not_listen_again_has_ended_and_can_be_started_again() {
    let directory = tempfile::tempdir().unwrap();
    let silent = silent_server(directory.path());
    for binary in binaries() {
        let mut broker = EmbeddedBroker::start(&binary).await.unwrap();
        let url = broker.url().to_owned();
        broker.binary = silent.clone();
        let error = loop {
            match broker
                .start_again_within(Duration::from_millis(10))
                .await
                .unwrap_err()
            {
                // A child that another test has just forked still has the file open for writing.
                BrokerError::Spawn { source, .. } if source.kind() == ErrorKind::ExecutableFileBusy => {}
                error => break error,
            }
        };
        assert!(matches!(error, BrokerError::NotListening { .. }), "{error}");
        assert!(broker.has_ended().unwrap());
        broker.binary = binary;
        broker.start_again().await.unwrap();
        assert_eq!(broker.url(), url);
        async_nats::connect(&url).await.unwrap();
    }
}

#[tokio::test]
async fn a_dropped_broker_is_gone() {
    for binary in binaries() {
        let broker = EmbeddedBroker::start(&binary).await.unwrap();
        let directory = broker.directory.path().to_owned();
        let pid = Pid::from_raw(i32::try_from(broker.pid()).unwrap()).unwrap();
        rustix::process::test_kill_process(pid).unwrap();
        drop(broker);
        assert!(rustix::process::test_kill_process(pid).is_err());
        assert!(!directory.exists());
    }
}

#[tokio::test]
async fn a_broker_keeps_streams_when_asked() {
    for binary in binaries() {
        let streams = tempfile::tempdir().unwrap();
        let options = BrokerOptions {
            config_lines: vec!["server_name: \"atlas\"".into(), "max_connections: 7".into()],
            jetstream_directory: Some(streams.path().to_owned()),
            ..BrokerOptions::default()
        };
        let broker = EmbeddedBroker::start_with(&binary, options).await.unwrap();
        let client = async_nats::connect(broker.url()).await.unwrap();
        assert_eq!(client.server_info().server_name, "atlas");
        assert!(streams.path().join("jetstream").is_dir());
    }
}

#[tokio::test]
async fn a_server_that_ends_is_quoted() {
    for binary in binaries() {
        let options = BrokerOptions {
            config_lines: vec!["nonsense: 3".into()],
            ..BrokerOptions::default()
        };
        let error = EmbeddedBroker::start_with(&binary, options).await.unwrap_err();
        let BrokerError::Ended { path, status, log } = error else {
            panic!("{error}")
        };
        assert_eq!(path, binary);
        assert!(
            !status.success() && log.contains("unknown field \"nonsense\""),
            "{log}"
        );

        let first = EmbeddedBroker::start(&binary).await.unwrap();
        let options = BrokerOptions {
            port: Some(port(&first)),
            ..BrokerOptions::default()
        };
        let error = EmbeddedBroker::start_with(&binary, options).await.unwrap_err();
        assert!(
            matches!(&error, BrokerError::Ended { log, .. } if log.contains("address already in use")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_server_that_does_not_listen_in_time_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let silent = silent_server(directory.path());
    let options = BrokerOptions::default();
    let error = loop {
        let result = EmbeddedBroker::start_within(&silent, &options, Duration::from_millis(10)).await;
        match result.unwrap_err() {
            // A child that another test has just forked still has the file open for writing.
            BrokerError::Spawn { source, .. } if source.kind() == ErrorKind::ExecutableFileBusy => {}
            error => break error,
        }
    };
    assert!(matches!(error, BrokerError::NotListening { .. }), "{error}");
}

#[tokio::test]
async fn a_binary_that_is_none_is_refused() {
    let error = EmbeddedBroker::start(Path::new("/nonexistent/nats-server"))
        .await
        .unwrap_err();
    assert!(matches!(error, BrokerError::Spawn { .. }));
}

#[test]
fn the_watchdog_kills_the_child_of_a_dead_parent() {
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let directory = tempfile::tempdir().unwrap().keep();
    std::fs::write(directory.join("log"), "").unwrap();
    let mut watchdog = watch_over(child.id(), &directory).unwrap();
    assert!(child.try_wait().unwrap().is_none());
    // The system closes this pipe when the parent dies.
    drop(watchdog.stdin.take());
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    watchdog.wait().unwrap();
    assert!(!directory.exists());
}

/// Makes an empty file `name` below `root`, with the permissions `mode`. Makes the directories above it.
fn place(root: &Path, name: &str, mode: u32) -> PathBuf {
    let path = root.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[test]
fn the_binary_is_searched_for_in_order() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let configured = place(root, "configured", 0o755);
    let variable = place(root, "variable", 0o755);
    place(root, "first/nats-server", 0o644);
    let in_path = place(root, "second/nats-server", 0o755);
    let fetched = place(root, "checkout/.tools/nats-server", 0o755);
    let checkouts = || vec![root.join("nowhere"), root.join("checkout")];
    let path = || vec![PathBuf::new(), root.join("first"), root.join("second")];

    let all = ServerBinaryPaths {
        configured: Some(configured.clone()),
        variable: Some(variable.clone()),
        path: path(),
        checkouts: checkouts(),
    };
    assert_eq!(search(all).unwrap(), configured);
    let no_configured = ServerBinaryPaths {
        configured: None,
        variable: Some(variable.clone()),
        path: path(),
        checkouts: checkouts(),
    };
    assert_eq!(search(no_configured).unwrap(), variable);
    let unnamed = ServerBinaryPaths {
        path: path(),
        checkouts: checkouts(),
        ..ServerBinaryPaths::default()
    };
    assert_eq!(search(unnamed).unwrap(), in_path);
    let unpathed = ServerBinaryPaths {
        checkouts: checkouts(),
        ..ServerBinaryPaths::default()
    };
    assert_eq!(search(unpathed).unwrap(), fetched);
}

#[test]
fn a_named_binary_that_is_missing_is_not_passed_over() {
    let root = tempfile::tempdir().unwrap();
    let text = place(root.path(), "text", 0o644);
    let fetched = place(root.path(), ".tools/nats-server", 0o755);
    for (configured, variable) in [(Some(text.clone()), Some(fetched)), (None, Some(text.clone()))] {
        let places = ServerBinaryPaths {
            configured,
            variable,
            path: Vec::new(),
            checkouts: vec![root.path().to_owned()],
        };
        assert!(matches!(search(places), Err(BrokerError::NotExecutable { path, .. }) if path == text));
    }
}

#[test]
fn nothing_is_found_in_no_place() {
    let found = search(ServerBinaryPaths::default());
    assert!(matches!(found, Err(BrokerError::NotFound)), "{found:?}");
}
