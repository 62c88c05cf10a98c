//! Commands in a cluster: which node receives a command, and how redirections are followed.
//!
//! The client library knows the nodes and their slots, and could follow redirections too. But it sends `ASKING` on the
//! connection that all calls share, waits for the reply, and then sends the command. The node would apply `ASKING` to
//! whichever command arrives in between. If another node has the entry of that command, the request executes twice.
//! This module therefore follows redirections itself and sends `ASKING` together with its command: see
//! `docs/internals/decisions/0033`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, RedisResult,
    RetryMethod, ServerErrorKind, Value, aio::MultiplexedConnection,
    cluster_async::ClusterConnection,
};
use tokio::time::{Instant, sleep};

use super::{
    Delivery,
    command::{send, send_pair},
    reconnect::ReconnectingConnection,
};

/// A connection to all nodes, and connections to the nodes that redirections name.
pub(crate) struct Cluster {
    nodes: ReconnectingConnection<ClusterConnection>,
    /// Connections to the targets of redirections. `ASKING` and its command are sent together here, so no other command
    /// comes between them.
    redirect_connections:
        Mutex<HashMap<Address, Arc<ReconnectingConnection<MultiplexedConnection>>>>,
    /// Connection settings for every node: those of the first one, with another address.
    template: ConnectionInfo,
    /// The host of all configured nodes, if they have the same one. A node that reports no host of its own has this one.
    common_host: Option<String>,
    timeout: Duration,
}

/// A host and a port.
pub(super) type Address = (String, u16);

impl Cluster {
    /// Creates a cluster from a connection to its nodes, which must not follow redirections by itself. `first` and `others`
    /// are the configured nodes.
    pub(crate) fn new(
        nodes: ReconnectingConnection<ClusterConnection>,
        first: ConnectionInfo,
        others: &[ConnectionInfo],
        timeout: Duration,
    ) -> Self {
        let common_host = host(&first).filter(|_| others.iter().all(|it| host(it) == host(&first)));
        Self {
            nodes,
            redirect_connections: Mutex::default(),
            common_host: common_host.map(str::to_owned),
            template: first,
            timeout,
        }
    }

    /// Sends a command to the node that has its key.
    pub(crate) async fn send(
        &self,
        deadline: Instant,
        command: &Cmd,
        delivery: Delivery,
    ) -> RedisResult<Value> {
        let call = |nodes| self.send_and_follow(nodes, deadline, command, delivery);
        self.nodes.call(deadline, call).await
    }

    /// Returns the addresses of the masters that have slots.
    pub(crate) async fn masters(&self, deadline: Instant) -> RedisResult<Vec<Address>> {
        let mut command = redis::cmd("CLUSTER");
        command.arg("SLOTS");
        let reply = self.send(deadline, &command, Delivery::AtLeastOnce).await?;
        let mut masters = Vec::new();
        // Each range has its first and last slot, its master and its replicas. A node has its host, port, ID and more.
        for range in redis::from_redis_value::<Vec<Vec<Value>>>(reply)? {
            let master = range.into_iter().nth(2).unwrap_or(Value::Nil);
            let master: Vec<Value> = redis::from_redis_value(master)?;
            let mut parts = master.into_iter();
            let mut part = || parts.next().unwrap_or(Value::Nil);
            let host: Option<String> = redis::from_redis_value(part())?;
            let port: u16 = redis::from_redis_value(part())?;
            let address = parse_address(
                &format!("{}:{port}", host.unwrap_or_default()),
                self.common_host.as_deref(),
            );
            let unknown = (
                ErrorKind::Client,
                "a master of the cluster has no known address",
            );
            let address = address.ok_or(unknown)?;
            if !masters.contains(&address) {
                masters.push(address);
            }
        }
        Ok(masters)
    }

    /// Sends a command to this node.
    pub(crate) async fn send_to(
        &self,
        node: &Address,
        deadline: Instant,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let node = self.connection_to(node.clone());
        node.call(deadline, |it| send(it, command)).await
    }

    /// Sends a command, follows redirections, and sends it again after errors that may be temporary.
    async fn send_and_follow(
        &self,
        nodes: ClusterConnection,
        deadline: Instant,
        command: &Cmd,
        delivery: Delivery,
    ) -> RedisResult<Value> {
        let mut reply = send(nodes.clone(), command).await;
        for attempt in 0..MAX_RETRIES {
            let Err(error) = &reply else {
                break;
            };
            let method = error.retry_method();
            // The keys of a script are on two nodes: the store then runs it on the key of the entry alone.
            let is_slot_moving = error.kind() == ErrorKind::Server(ServerErrorKind::TryAgain);
            // Without a valid reply, the node may have executed the command. A refused connection has sent nothing.
            let has_no_reply = matches!(error.kind(), ErrorKind::Io | ErrorKind::Parse)
                && !error.is_connection_refusal();
            let is_unknown = delivery == Delivery::AtMostOnce && has_no_reply;
            if error.is_timeout()
                || is_slot_moving
                || is_unknown
                || matches!(method, RetryMethod::NoRetry)
            {
                break;
            }
            let target = error
                .redirect_node()
                .and_then(|(node, _slot)| parse_address(node, self.common_host.as_deref()));
            // The first redirections need no delay. Later ones may be nodes that redirect to each other.
            if target.is_none() || attempt > 1 {
                sleep(MIN_BACKOFF * (1 << attempt.min(4))).await;
            }
            reply = match (target, method) {
                (Some(node), RetryMethod::AskRedirect) => {
                    self.send_asking(node, deadline, command).await
                }
                // Not sent on the shared connection. That may have no connection to the target, for example because the
                // node hangs. It would then reconnect to all nodes and serve no call meanwhile.
                (Some(node), RetryMethod::MovedRedirect) => {
                    let node = self.connection_to(node);
                    node.call(deadline, |it| send(it, command)).await
                }
                _ => send(nodes.clone(), command).await,
            };
        }
        reply
    }

    /// Sends `ASKING` and a command to a node that is importing the slot. Returns the reply to the command.
    async fn send_asking(
        &self,
        node: Address,
        deadline: Instant,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let mut pair = redis::pipe();
        pair.cmd("ASKING").add_command(command.clone());
        let node = self.connection_to(node);
        let replies = node.call(deadline, |it| send_pair(it, pair));
        let (_asking, reply) = replies.await?;
        Ok(reply)
    }

    /// Returns the connection to the target of a redirection, and creates it if necessary.
    fn connection_to(&self, node: Address) -> Arc<ReconnectingConnection<MultiplexedConnection>> {
        let connections = self.redirect_connections.lock();
        let mut connections = connections.unwrap_or_else(PoisonError::into_inner);
        // The cluster does not report nodes that have left. Nodes in use return to the map with the next redirection.
        if connections.len() >= MAX_REDIRECT_CONNECTIONS && !connections.contains_key(&node) {
            connections.clear();
        }
        let (host, port) = node.clone();
        let connection = connections.entry(node);
        Arc::clone(connection.or_insert_with(|| Arc::new(self.new_connection(host, port))))
    }

    fn new_connection(
        &self,
        host: String,
        port: u16,
    ) -> ReconnectingConnection<MultiplexedConnection> {
        let address = match self.template.addr() {
            ConnectionAddr::TcpTls {
                insecure,
                tls_params,
                ..
            } => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: *insecure,
                tls_params: tls_params.clone(),
            },
            _ => ConnectionAddr::Tcp(host, port),
        };
        let (info, timeout) = (self.template.clone().set_addr(address), self.timeout);
        ReconnectingConnection::new(move || {
            let client = Client::open(info.clone());
            async move {
                // No reply timeout here: the store's own timeout covers the whole call.
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(timeout))
                    .set_response_timeout(None);
                client?
                    .get_multiplexed_async_connection_with_config(&config)
                    .await
            }
        })
    }
}

/// Parses `host:port`. The host may be an IPv6 address.
///
/// A node that does not know its own host name leaves the host out. The target then has the host of the node that replied,
/// `default_host`. A node sends `?` if it should have a host name and has none.
fn parse_address(node: &str, default_host: Option<&str>) -> Option<Address> {
    let (host, port) = node.rsplit_once(':')?;
    let host = match host.trim_matches(['[', ']']) {
        "" => default_host?,
        "?" => return None,
        host => host,
    };
    Some((host.to_owned(), port.parse().ok()?))
}

fn host(node: &ConnectionInfo) -> Option<&str> {
    match node.addr() {
        ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => Some(host),
        _ => None,
    }
}

/// Maximum number of retries of a command: enough for a cluster to agree on the owner of a slot, if the deadline allows.
const MAX_RETRIES: u32 = 16;
/// First delay between retries. It doubles with each retry up to 160 ms (16 x this).
const MIN_BACKOFF: Duration = Duration::from_millis(10);
/// Maximum number of connections to targets of redirections, for each `Cluster`.
const MAX_REDIRECT_CONNECTIONS: usize = 32;

#[cfg(test)]
mod tests {
    use std::future::pending;

    use redis::IntoConnectionInfo;

    use super::*;

    #[test]
    fn address_requires_host_and_valid_port() {
        for (node, expected) in [
            ("127.0.0.1:6379", Some(("127.0.0.1", 6379))),
            ("redis.example:1", Some(("redis.example", 1))),
            ("::1:6379", Some(("::1", 6379))),
            ("[::1]:6379", Some(("::1", 6379))),
            ("fe80::1%eth0:65535", Some(("fe80::1%eth0", 65535))),
            (":6379", Some(("default", 6379))),
            ("?:6379", None),
            ("", None),
            (":", None),
            ("host", None),
            ("host:", None),
            ("host:65536", None),
            ("host:-1", None),
            ("host: 1", None),
        ] {
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(parse_address(node, Some("default")), expected, "{node:?}");
        }
        assert_eq!(parse_address(":6379", None), None);
    }

    #[test]
    fn address_parser_accepts_arbitrary_text() {
        let letters: Vec<_> = "0169:::[]?.-%a \u{0}\u{fe0f}é😀".chars().collect();
        let (mut random, mut addresses) = (88_172_645_463_325_252_u64, 0);
        for _ in 0..200_000 {
            let mut next = |below: usize| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                usize::try_from(random >> 33).unwrap() % below
            };
            let length = next(12);
            let node: String = (0..length).map(|_| letters[next(letters.len())]).collect();
            if let Some((host, port)) = parse_address(&node, Some("default")) {
                addresses += 1;
                assert!(host == "default" || node.contains(&host), "{node:?}");
                let expected: u16 = node.rsplit(':').next().unwrap().parse().unwrap();
                assert_eq!(expected, port, "{node:?}");
                assert!(!host.is_empty() && host != "?", "{node:?}");
            }
        }
        assert!(addresses > 1_000, "{addresses}");
    }

    #[test]
    fn common_host_requires_same_host_of_all_nodes() {
        for (urls, expected) in [
            (["redis://a:1", "redis://a:2"], Some("a")),
            (["rediss://a:1", "rediss://a:2"], Some("a")),
            (["redis://[::1]:1", "redis://[::1]:2"], Some("::1")),
            (["redis://a:1", "redis://b:1"], None),
        ] {
            assert_eq!(cluster(&urls).common_host.as_deref(), expected, "{urls:?}");
        }
    }

    #[test]
    fn redirect_connections_are_bounded() {
        let cluster = cluster(&["redis://a:1"]);
        let connection_to = |host: &str, port| cluster.connection_to((host.to_owned(), port));
        let first = connection_to("b", 1);
        assert!(Arc::ptr_eq(&first, &connection_to("b", 1)));
        for port in 0..1_000 {
            let node = connection_to("c", port);
            let count = cluster.redirect_connections.lock().unwrap().len();
            assert!(count <= MAX_REDIRECT_CONNECTIONS);
            assert!(Arc::ptr_eq(&node, &connection_to("c", port)));
        }
    }

    fn cluster(urls: &[&str]) -> Cluster {
        let urls = urls.iter().map(|url| url.into_connection_info().unwrap());
        let urls: Vec<_> = urls.collect();
        let nodes = ReconnectingConnection::new_cluster(pending);
        Cluster::new(nodes, urls[0].clone(), &urls[1..], Duration::from_secs(1))
    }
}
