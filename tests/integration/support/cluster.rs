//! Three NATS servers in a cluster with JetStream. Tests can cut the connections between them (routes).

use std::path::{Path, PathBuf};

use async_nats::jetstream::context::GetStreamErrorKind;
use async_nats::jetstream::{self, ErrorCode, stream};
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use rustix::process::{Pid, Signal, kill_process};

use super::jetstream::STREAM;
use super::proxy::{Network, Proxy};
use super::{eventually, lasting_port};

/// Number of servers in a cluster.
pub const SERVERS: usize = 3;

/// Cluster whose servers are numbered from 0, and keep their ports and their stores.
pub struct Cluster {
    servers: Vec<Server>,
    /// Proxy on the route from each server to each other server; `None` from a server to itself.
    routes: Vec<Vec<Option<Proxy>>>,
}

struct Server {
    binary: PathBuf,
    store: tempfile::TempDir,
    options: BrokerOptions,
    broker: Option<EmbeddedBroker>,
    url: String,
}

impl Cluster {
    /// Starts three servers of this binary, and waits until they have elected a leader of the stores.
    pub async fn start(binary: &Path) -> Self {
        let ports: Vec<u16> = (0..SERVERS).map(|_| lasting_port()).collect();
        let mut cluster = Self {
            servers: Vec::new(),
            routes: Vec::new(),
        };
        for number in 0..SERVERS {
            let mut routes = Vec::new();
            for (other, port) in ports.iter().enumerate() {
                routes.push(match other == number {
                    true => None,
                    false => Some(Proxy::to(*port).await),
                });
            }
            let server = Server::start(binary, number, ports[number], &routes).await;
            cluster.routes.push(routes);
            cluster.servers.push(server);
        }
        let nats = async_nats::connect(cluster.url(0)).await.unwrap();
        let stores = jetstream::new(nats);
        eventually("the servers have elected a leader", async || {
            // Only the leader can tell that the stream does not exist.
            match stores.get_stream("NONE").await.err()?.kind() {
                GetStreamErrorKind::JetStream(error) => {
                    (error.error_code() == ErrorCode::STREAM_NOT_FOUND).then_some(())
                }
                _ => None,
            }
        })
        .await;
        cluster
    }

    /// Returns the address of a server.
    pub fn url(&self, number: usize) -> &str {
        &self.servers[number].url
    }

    /// Kills a server with SIGKILL.
    pub fn kill(&mut self, number: usize) {
        self.servers[number].broker.take();
    }

    /// Starts a server that has ended.
    pub async fn restart(&mut self, number: usize) {
        self.servers[number].begin().await;
    }

    /// Sets the binary of a server from its next start on.
    pub fn replace_binary(&mut self, number: usize, binary: &Path) {
        binary.clone_into(&mut self.servers[number].binary);
    }

    /// Tells a server to shut down in good order, and waits for its end. The server hands its stores over, and ends its
    /// connections one after the other.
    pub async fn retire(&mut self, number: usize) {
        let broker = self.servers[number].broker.as_ref().unwrap();
        let pid = Pid::from_raw(i32::try_from(broker.pid()).unwrap()).unwrap();
        kill_process(pid, Signal::USR2).unwrap();
        eventually("the server has shut down", async || {
            let broker = self.servers[number].broker.as_mut().unwrap();
            broker.has_ended().unwrap().then_some(())
        })
        .await;
        self.kill(number);
    }

    /// Cuts a server off from the other servers. Its clients stay connected.
    pub fn cut_off(&self, number: usize) {
        self.set_routes_of(
            number,
            Network {
                is_cut: true,
                ..Network::default()
            },
        );
    }

    /// Reconnects a server with the other servers.
    pub fn heal(&self, number: usize) {
        self.set_routes_of(number, Network::default());
    }

    fn set_routes_of(&self, number: usize, network: Network) {
        let from = self.routes[number].iter();
        let to = self.routes.iter().map(|routes| &routes[number]);
        from.chain(to).flatten().for_each(|proxy| proxy.set(network));
    }

    /// Returns the number of the server that leads the events stream.
    pub async fn leader(&self, nats: &async_nats::Client) -> usize {
        let stores = jetstream::new(nats.clone());
        eventually("the stream has a leader", async || {
            let stream = stores.get_stream(STREAM).await.ok()?;
            let leader = stream.cached_info().cluster.as_ref()?.leader.as_ref()?;
            leader.strip_prefix("server-")?.parse().ok()
        })
        .await
    }

    /// Returns the number of a server that does not have the events stream.
    pub async fn without_stream(&self, nats: &async_nats::Client) -> usize {
        let stores = jetstream::new(nats.clone());
        let stream = stores.get_stream(STREAM).await.unwrap();
        let cluster = stream.cached_info().cluster.clone().unwrap();
        let replicas = cluster.replicas.iter().map(|replica| replica.name.clone());
        let having: Vec<String> = replicas.chain(cluster.leader).collect();
        let mut others = (0..SERVERS).filter(|number| !having.contains(&name_of(*number)));
        others.next().expect("there are fewer copies than servers")
    }

    /// Moves the events stream, of which the cluster has a single copy, to a server. Waits until only this server has
    /// the stream.
    pub async fn move_stream(&self, nats: &async_nats::Client, number: usize) {
        let stores = jetstream::new(nats.clone());
        let stream = stores.get_stream(STREAM).await.unwrap();
        let config = stream::Config {
            placement: Some(stream::Placement {
                tags: vec![name_of(number)],
                ..stream::Placement::default()
            }),
            ..stream.cached_info().config.clone()
        };
        stores.update_stream(config).await.unwrap();
        eventually("the stream has moved", async || {
            let stream = stores.get_stream(STREAM).await.ok()?;
            let cluster = stream.cached_info().cluster.as_ref()?;
            let is_there = cluster.leader.as_deref() == Some(&name_of(number)) && cluster.replicas.is_empty();
            is_there.then_some(())
        })
        .await;
    }
}

impl Server {
    async fn start(binary: &Path, number: usize, port: u16, routes: &[Option<Proxy>]) -> Self {
        let routes: Vec<String> = routes
            .iter()
            .flatten()
            .map(|proxy| format!("{:?}", proxy.url()))
            .collect();
        let name = name_of(number);
        let store = tempfile::tempdir().unwrap();
        let config_lines = vec![
            format!("server_name: {name}\nserver_tags: [{name}]"),
            // The servers must not learn addresses that bypass the proxies.
            format!(
                "cluster {{ name: kvatlas, listen: \"127.0.0.1:{port}\", advertise: \"127.0.0.1:1\", routes: [{}] }}",
                routes.join(", ")
            ),
            // This is the shortest duration that the server accepts.
            "lame_duck_grace_period: \"1s\"\nlame_duck_duration: \"30s\"".to_owned(),
        ];
        let options = BrokerOptions {
            port: Some(lasting_port()),
            config_lines,
            jetstream_directory: Some(store.path().to_owned()),
            ..BrokerOptions::default()
        };
        let mut server = Self {
            binary: binary.to_owned(),
            store,
            options,
            broker: None,
            url: String::new(),
        };
        server.begin().await;
        server
    }

    async fn begin(&mut self) {
        assert!(self.broker.is_none() && self.store.path().exists());
        let broker = EmbeddedBroker::start_with(&self.binary, self.options.clone())
            .await
            .unwrap();
        broker.url().clone_into(&mut self.url);
        self.broker = Some(broker);
    }
}

fn name_of(number: usize) -> String {
    format!("server-{number}")
}
