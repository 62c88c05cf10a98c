//! Sockets that are bound already, and their connections.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};

use crate::telemetry::{WarningLimit, catch_report_panic};

/// Time until the next attempt to accept a connection.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// Time without a byte after which the kernel sends probes to the peer.
const PROBE_DELAY: Duration = Duration::from_secs(60);
/// Time between two probes. Linux closes the connection after nine probes without a reply.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// Sockets that another process has bound, such as systemd. Each one replaces an address of the configuration.
#[derive(Debug, Default)]
#[must_use = "a proxy uses the sockets that `Proxy::bind_with` gets"]
pub struct Sockets {
    pub(crate) listen: Option<std::net::TcpListener>,
    pub(crate) admin: Option<std::net::TcpListener>,
}

impl Sockets {
    /// Creates a set without a socket.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the socket for clients. Default: the proxy binds `address` of `[listen]`.
    pub fn with_listen(mut self, socket: std::net::TcpListener) -> Self {
        self.listen = Some(socket);
        self
    }

    /// Sets the socket of the admin port. Default: the proxy binds `address` of `[admin]`.
    pub fn with_admin(mut self, socket: std::net::TcpListener) -> Self {
        self.admin = Some(socket);
        self
    }
}

/// Returns a listener on the socket, or on the address if there is no socket.
pub(crate) async fn bind(
    address: SocketAddr,
    socket: Option<std::net::TcpListener>,
) -> io::Result<TcpListener> {
    let listener = match socket {
        Some(socket) => {
            socket.set_nonblocking(true)?;
            TcpListener::from_std(socket)?
        }
        None => TcpListener::bind(address).await?,
    };
    // Each accepted connection inherits it.
    set_keepalive(&listener);
    Ok(listener)
}

/// Lets the kernel close a connection whose peer has vanished without a sign, such as a machine that lost its power.
pub(crate) fn set_keepalive<'s, S>(socket: &'s S)
where
    SockRef<'s>: From<&'s S>,
{
    let keepalive = TcpKeepalive::new()
        .with_time(PROBE_DELAY)
        .with_interval(PROBE_INTERVAL);
    // After a failure, such a connection stays open for longer.
    let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
}

/// Accepts a connection once there is a permit for it. After an error, such as too many open files, retries after 100 ms.
///
/// `warn` reports an error, at most once a second, with its number of occurrences.
pub(crate) async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
    limit: &WarningLimit,
    warn: impl Fn(&io::Error, u64),
) -> (OwnedSemaphorePermit, TcpStream, SocketAddr) {
    let permit = Arc::clone(permits).acquire_owned().await;
    let permit = permit.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => return (permit, stream, peer),
            Err(error) => {
                if let Some(count) = limit.count(&error.to_string()) {
                    catch_report_panic(|| warn(&error, count));
                }
                sleep(RETRY_DELAY).await;
            }
        }
    }
}
