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
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, RedisResult,
    RetryMethod, Value,
    aio::MultiplexedConnection,
    cluster_async::ClusterConnection,
    cluster_routing::{RoutingInfo, SingleNodeRoutingInfo},
};
use tokio::time::{Instant, sleep};

use crate::{
    link::{send, send_both},
    redial::Redial,
};

pub(crate) struct Cluster {
    nodes: Redial<ClusterConnection>,
    /// By address. Nothing is sent on these but `ASKING` and a command, both at once.
    importing: Mutex<HashMap<String, Arc<Redial<MultiplexedConnection>>>>,
    /// How to connect to any node: as to the first one.
    like: ConnectionInfo,
    timeout: Duration,
}

impl Cluster {
    /// `nodes` must not follow redirections by itself.
    pub(crate) fn new(
        nodes: Redial<ClusterConnection>,
        like: ConnectionInfo,
        timeout: Duration,
    ) -> Self {
        Self {
            nodes,
            importing: Mutex::default(),
            like,
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
                .and_then(|(node, _slot)| address(node));
            // Being sent elsewhere is no reason to wait, unless one is sent back and forth.
            if redirected.is_none() || attempt > 1 {
                sleep(PAUSE * (1 << attempt.min(4))).await;
            }
            answer = match (redirected, method) {
                (Some(node), RetryMethod::AskRedirect) => self.ask(node, deadline, command).await,
                (Some((host, port)), RetryMethod::MovedRedirect) => {
                    let node = SingleNodeRoutingInfo::ByAddress { host, port };
                    let mut nodes = nodes.clone();
                    let sent = nodes.route_command(command.clone(), RoutingInfo::SingleNode(node));
                    match sent.await.and_then(Value::extract_error) {
                        // It is new, and found with the slots, which are being looked up since we were sent away.
                        Err(error) if error.kind() == ErrorKind::ClusterConnectionNotFound => {
                            sleep(PAUSE).await;
                            send(nodes.clone(), command).await
                        }
                        sent => sent,
                    }
                }
                _ => send(nodes.clone(), command).await,
            };
        }
        answer
    }

    /// Asks a node that is about to get the slot.
    async fn ask(
        &self,
        (host, port): (String, u16),
        deadline: Instant,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let node = {
            let mut importing = self
                .importing
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let node = importing.entry(format!("{host}:{port}"));
            Arc::clone(node.or_insert_with(|| Arc::new(self.connection_to(host, port))))
        };
        let mut both = redis::pipe();
        both.cmd("ASKING").add_command(command.clone());
        let asked = node.with(deadline, |it| async move { send_both(it, &both).await });
        let (_asking, answer) = asked.await?;
        Ok(answer)
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

/// Of `host:port`, where the host may be an IPv6 address.
fn address(node: &str) -> Option<(String, u16)> {
    let (host, port) = node.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

/// How often a command is sent again: as long as it takes a cluster to agree on who has a slot, within the deadline.
const ATTEMPTS: u32 = 16;
const PAUSE: Duration = Duration::from_millis(10);
