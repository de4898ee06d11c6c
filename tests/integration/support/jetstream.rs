//! Broker with JetStream whose store outlives it, and questions about the events stream.

use std::path::{Path, PathBuf};

use async_nats::jetstream;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};

use super::{eventually, lasting_port, old_server, server};

/// Name of the stream in all tests, which is the default.
pub const STREAM: &str = "KVATLAS_EVENTS";

/// Settings for a daemon that follows the stream.
pub const JETSTREAM: (&str, &str) = ("events.transport", "jetstream");

/// Returns the servers to test with: the current one, and Debian's if the environment names it.
pub fn servers() -> Vec<PathBuf> {
    std::iter::once(server()).chain(old_server()).collect()
}

/// Broker that can be killed and started again on its port, with its store or with an empty one.
pub struct Restartable {
    binary: PathBuf,
    store: tempfile::TempDir,
    broker: Option<EmbeddedBroker>,
    port: u16,
}

impl Restartable {
    pub async fn start(binary: &Path) -> Self {
        let store = tempfile::tempdir().unwrap();
        let port = lasting_port();
        let broker = start(binary, store.path(), port).await;
        Self {
            binary: binary.to_owned(),
            port,
            store,
            broker: Some(broker),
        }
    }

    pub fn url(&self) -> &str {
        self.broker.as_ref().unwrap().url()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Kills the broker with SIGKILL.
    pub fn kill(&mut self) {
        self.broker.take();
    }

    pub async fn restart(&mut self) {
        self.broker = Some(start(&self.binary, self.store.path(), self.port).await);
    }

    /// Returns a copy of the store, as in a backup. The broker must have been killed.
    pub fn copy_of_store(&self) -> tempfile::TempDir {
        assert!(self.broker.is_none(), "its store is in use");
        let copy = tempfile::tempdir().unwrap();
        copy_folder(self.store.path(), copy.path());
        copy
    }

    /// Replaces the store. The broker must have been killed.
    pub fn replace_store(&mut self, store: tempfile::TempDir) {
        assert!(self.broker.is_none(), "its store is in use");
        self.store = store;
    }

    pub fn forget_store(&mut self) {
        assert!(self.broker.is_none(), "its store is in use");
        self.store = tempfile::tempdir().unwrap();
    }
}

fn copy_folder(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Starts a broker on a free port. Its store stays when the broker is dropped.
pub async fn broker_on_store(binary: &Path, store: &Path) -> EmbeddedBroker {
    start(binary, store, lasting_port()).await
}

/// Starts a broker on `port`, for example where another broker was. Its store stays when the broker is dropped.
pub async fn broker_on_port(binary: &Path, store: &Path, port: u16) -> EmbeddedBroker {
    start(binary, store, port).await
}

async fn start(binary: &Path, store: &Path, port: u16) -> EmbeddedBroker {
    let options = BrokerOptions {
        port: Some(port),
        jetstream_directory: Some(store.to_owned()),
        ..BrokerOptions::default()
    };
    EmbeddedBroker::start_with(binary, options).await.unwrap()
}

/// Returns the sequence number of the last message in the stream; `None` if there is no stream.
pub async fn last_message(nats: &async_nats::Client) -> Option<u64> {
    let stream = jetstream::new(nats.clone()).get_stream(STREAM).await.ok()?;
    Some(stream.cached_info().state.last_sequence)
}

/// Waits until a daemon follows the stream. A new stream is visible before it accepts messages.
pub async fn followed(nats: &async_nats::Client) {
    eventually("a daemon follows the stream", async || {
        let stream = jetstream::new(nats.clone()).get_stream(STREAM).await.ok()?;
        (stream.cached_info().state.consumer_count > 0).then_some(())
    })
    .await;
}

/// Waits until the stream has kept `messages` messages after number `before`.
pub async fn kept(nats: &async_nats::Client, before: u64, messages: u64) {
    eventually("the stream keeps what was published", async || {
        (last_message(nats).await? >= before + messages).then_some(())
    })
    .await;
}
