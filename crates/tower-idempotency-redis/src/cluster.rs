//! A cluster: which of its nodes is asked, and what is done when that one sends us to another.
//!
//! The client library knows the nodes and their slots, and would follow redirections too. But it says `ASKING` on the
//! connection that all calls share, waits for the answer, and sends the command after it; whatever comes between is what
//! the node takes for the command. If that has its entry with another node, it is executed twice. So redirections are
//! followed here, and `ASKING` is sent with its command: see `docs/decisions/0033`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, RedisResult, RetryMethod,
    Value, aio::MultiplexedConnection, cluster_async::ClusterConnection,
};
use tokio::time::{Instant, sleep};

use crate::{
    link::{send, send_both},
    redial::Redial,
};

pub(crate) struct Cluster {
    nodes: Redial<ClusterConnection>,
    /// To those that we were sent on to. `ASKING` goes out here with its command, both at once: nothing comes between.
    sent_to: Mutex<HashMap<Address, Arc<Redial<MultiplexedConnection>>>>,
    /// How to connect to any node: as to the first one.
    like: ConnectionInfo,
    /// Of all nodes that we were told of, if it is one: whichever is asked, it is asked there.
    host: Option<String>,
    timeout: Duration,
}

/// A host and a port.
type Address = (String, u16);

impl Cluster {
    /// `nodes` must not follow redirections by itself. It is `first` and `others` that lead to them.
    pub(crate) fn new(
        nodes: Redial<ClusterConnection>,
        first: ConnectionInfo,
        others: &[ConnectionInfo],
        timeout: Duration,
    ) -> Self {
        let host = host(&first).filter(|_| others.iter().all(|it| host(it) == host(&first)));
        Self {
            nodes,
            sent_to: Mutex::default(),
            host: host.map(str::to_owned),
            like: first,
            timeout,
        }
    }

    /// Sends a command to the node that has its key. What is sent here may arrive twice.
    pub(crate) async fn send(&self, deadline: Instant, command: &Cmd) -> RedisResult<Value> {
        let call = |nodes| self.follow(nodes, deadline, command);
        self.nodes.with(deadline, call).await
    }

    async fn follow(
        &self,
        nodes: ClusterConnection,
        deadline: Instant,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let mut answer = send(nodes.clone(), command).await;
        for attempt in 0..ATTEMPTS {
            let Err(error) = &answer else {
                break;
            };
            let method = error.retry_method();
            if error.is_timeout() || matches!(method, RetryMethod::NoRetry) {
                break;
            }
            let redirected = error
                .redirect_node()
                .and_then(|(node, _slot)| address(node, self.host.as_deref()));
            // Being sent elsewhere is no reason to wait, unless one is sent back and forth.
            if redirected.is_none() || attempt > 1 {
                sleep(PAUSE * (1 << attempt.min(4))).await;
            }
            answer = match (redirected, method) {
                (Some(node), RetryMethod::AskRedirect) => self.ask(node, deadline, command).await,
                // Not by the connections that all share: asked for a node that they do not lead to, as one that hangs, they
                // are all made anew, and serve nobody meanwhile.
                (Some(node), RetryMethod::MovedRedirect) => {
                    let node = self.sent_to(node);
                    node.with(deadline, |it| send(it, command)).await
                }
                _ => send(nodes.clone(), command).await,
            };
        }
        answer
    }

    /// Asks a node that is about to get the slot.
    async fn ask(&self, node: Address, deadline: Instant, command: &Cmd) -> RedisResult<Value> {
        let mut both = redis::pipe();
        both.cmd("ASKING").add_command(command.clone());
        let node = self.sent_to(node);
        let asked = node.with(deadline, |it| async move { send_both(it, &both).await });
        let (_asking, answer) = asked.await?;
        Ok(answer)
    }

    fn sent_to(&self, node: Address) -> Arc<Redial<MultiplexedConnection>> {
        let mut sent_to = self.sent_to.lock().unwrap_or_else(PoisonError::into_inner);
        // Nodes come and go, and of the latter nobody tells us. Who is in use is soon there again.
        if sent_to.len() >= SENT_TO && !sent_to.contains_key(&node) {
            sent_to.clear();
        }
        let (host, port) = node.clone();
        let connection = sent_to.entry(node);
        Arc::clone(connection.or_insert_with(|| Arc::new(self.connection_to(host, port))))
    }

    fn connection_to(&self, host: String, port: u16) -> Redial<MultiplexedConnection> {
        let address = match self.like.addr() {
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
        let (info, timeout) = (self.like.clone().set_addr(address), self.timeout);
        Redial::new(move || {
            let client = Client::open(info.clone());
            async move {
                // No timeout for answers here: the store's own covers the whole call.
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

/// Of `host:port`, where the host may be an IPv6 address. A node that does not know under which name it is reached leaves
/// that out, and means where it was `asked`; one that lacks the name that it should have says `?`.
fn address(node: &str, asked: Option<&str>) -> Option<Address> {
    let (host, port) = node.rsplit_once(':')?;
    let host = match host.trim_matches(['[', ']']) {
        "" => asked?,
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

/// How often a command is sent again: as long as it takes a cluster to agree on who has a slot, within the deadline.
const ATTEMPTS: u32 = 16;
const PAUSE: Duration = Duration::from_millis(10);
/// How many connections to nodes that we were sent on to are kept, for each purpose.
const SENT_TO: usize = 32;

#[cfg(test)]
mod tests {
    use std::future::pending;

    use redis::IntoConnectionInfo;

    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port_or_none() {
        for (node, expected) in [
            ("127.0.0.1:6379", Some(("127.0.0.1", 6379))),
            ("redis.example:1", Some(("redis.example", 1))),
            ("::1:6379", Some(("::1", 6379))),
            ("[::1]:6379", Some(("::1", 6379))),
            ("fe80::1%eth0:65535", Some(("fe80::1%eth0", 65535))),
            (":6379", Some(("asked", 6379))),
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
            assert_eq!(address(node, Some("asked")), expected, "{node:?}");
        }
        assert_eq!(address(":6379", None), None);
    }

    #[test]
    fn whatever_a_node_says_is_an_address_or_none() {
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
            if let Some((host, port)) = address(&node, Some("asked")) {
                addresses += 1;
                assert!(host == "asked" || node.contains(&host), "{node:?}");
                let said: u16 = node.rsplit(':').next().unwrap().parse().unwrap();
                assert_eq!(said, port, "{node:?}");
                assert!(!host.is_empty() && host != "?", "{node:?}");
            }
        }
        assert!(addresses > 1_000, "{addresses}");
    }

    #[test]
    fn what_was_asked_is_known_where_all_nodes_have_one_host() {
        for (urls, expected) in [
            (["redis://a:1", "redis://a:2"], Some("a")),
            (["rediss://a:1", "rediss://a:2"], Some("a")),
            (["redis://[::1]:1", "redis://[::1]:2"], Some("::1")),
            (["redis://a:1", "redis://b:1"], None),
        ] {
            assert_eq!(cluster(&urls).host.as_deref(), expected, "{urls:?}");
        }
    }

    #[test]
    fn connections_to_nodes_that_we_were_sent_on_to_are_bounded() {
        let cluster = cluster(&["redis://a:1"]);
        let first = cluster.sent_to(("b".to_owned(), 1));
        assert!(Arc::ptr_eq(&first, &cluster.sent_to(("b".to_owned(), 1))));
        for port in 0..1_000 {
            let node = cluster.sent_to(("c".to_owned(), port));
            assert!(cluster.sent_to.lock().unwrap().len() <= SENT_TO);
            assert!(Arc::ptr_eq(&node, &cluster.sent_to(("c".to_owned(), port))));
        }
    }

    fn cluster(urls: &[&str]) -> Cluster {
        let urls = urls.iter().map(|url| url.into_connection_info().unwrap());
        let urls: Vec<_> = urls.collect();
        let nodes = Redial::to_many(pending);
        Cluster::new(nodes, urls[0].clone(), &urls[1..], Duration::from_secs(1))
    }
}
