//! A TCP proxy between a store and its server that injects faults.
//!
//! It behaves like TCP: if one direction of a connection has lost bytes, no later bytes get through.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tokio::{
    net::TcpListener,
    runtime,
    sync::{oneshot, watch},
    task::{LocalSet, spawn_local},
    time::sleep,
};

pub use self::fault::Fault;
use crate::HANG_GUARD;

mod connection;
mod fault;

/// The mode of the proxy for all connections, existing and new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forwards all bytes.
    Pass,
    /// Resets all connections, and new ones as soon as it has accepted them. Bytes that were already forwarded still
    /// reach the server.
    Cut,
    /// Accepts connections and forwards nothing. Buffers the bytes, and forwards them when this mode ends.
    Hold,
    /// Forwards requests and discards the server's replies.
    LoseReplies(ConnectionEnd),
    /// Forwards all bytes with this delay, including those of a client that has disconnected meanwhile.
    Delay {
        /// The delay of bytes from clients.
        up: Duration,
        /// The delay of bytes from the server.
        down: Duration,
    },
}

/// The end of a connection that has lost bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The connection is reset. If a reply is lost, the reset follows the server's reply, so the server has executed the
    /// request.
    Cut,
    /// The connection stays open without any bytes until the client closes it.
    Hang,
}

/// A running proxy, on a free port of this machine. Its connections are closed when it is dropped.
///
/// It runs on a separate thread in real time, independent of the test's runtime.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Counters of the forwarded bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Connections that were accepted, even if they were cut at once.
    pub connections: u64,
    /// Bytes from clients to the server.
    pub up: u64,
    /// Bytes from the server to clients.
    pub down: u64,
}

#[derive(Debug)]
struct State {
    upstream: Mutex<SocketAddr>,
    mode: watch::Sender<Mode>,
    fault: Mutex<Option<(Fault, ConnectionEnd)>>,
    connections: AtomicU64,
    received: AtomicU64,
    up: AtomicU64,
    down: AtomicU64,
    injected_faults: AtomicU64,
    lost: AtomicU64,
    resets: AtomicU64,
}

impl Proxy {
    /// Forwards to `upstream`, which may start later: connections are cut while no server listens there.
    ///
    /// # Panics
    ///
    /// Panics if there is no free port.
    #[must_use]
    pub fn start(upstream: SocketAddr) -> Self {
        let state = Arc::new(State {
            upstream: Mutex::new(upstream),
            mode: watch::Sender::new(Mode::Pass),
            fault: Mutex::new(None),
            connections: AtomicU64::new(0),
            received: AtomicU64::new(0),
            up: AtomicU64::new(0),
            down: AtomicU64::new(0),
            injected_faults: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            resets: AtomicU64::new(0),
        });
        let (stop, stopped) = oneshot::channel();
        let (bound, address) = mpsc::channel();
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.expect("a runtime");
            LocalSet::new().block_on(&runtime, async move {
                let listener = TcpListener::bind("127.0.0.1:0").await;
                let listener = listener.expect("a free port");
                let address = listener.local_addr().expect("a bound socket");
                bound.send(address).expect("the proxy is being started");
                tokio::select! {
                    _ = stopped => {}
                    () = accept(listener, shared) => {}
                }
            });
        });
        Self {
            address: address.recv().expect("the proxy starts"),
            state,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Returns the address of the proxy.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the mode from now on.
    pub fn set(&self, mode: Mode) {
        self.state.mode.send_replace(mode);
    }

    /// Injects this fault once, in the connection that reaches its point first. Other connections are not affected. The
    /// fault replaces an earlier one that has not happened yet.
    ///
    /// # Panics
    ///
    /// Panics if the fault has no point: an empty pattern or the number 0.
    pub fn once(&self, fault: Fault, end: ConnectionEnd) {
        assert!(fault.is_possible(), "{fault:?} has no point");
        *self.state.fault() = Some((fault, end));
    }

    /// Returns how often a fault of [`once`](Self::once) was injected.
    #[must_use]
    pub fn injected_faults(&self) -> u64 {
        self.state.injected_faults.load(Ordering::SeqCst)
    }

    /// Returns how many pieces of replies [`Mode::LoseReplies`] has lost.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.state.lost.load(Ordering::SeqCst)
    }

    /// Returns how many connections the proxy has reset.
    #[must_use]
    pub fn resets(&self) -> u64 {
        self.state.resets.load(Ordering::SeqCst)
    }

    /// Returns the number of bytes that clients have sent, including those that were not forwarded.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.state.received.load(Ordering::SeqCst)
    }

    /// Cuts all connections each time that `progress` has increased by 4, and every third time loses a reply instead. So the
    /// clients make progress between two cuts, also on a slow machine. Each cut lasts until it has reset a connection. Never
    /// returns: the caller drops the future when the clients are done.
    ///
    /// # Panics
    ///
    /// Panics if there is nothing to cut within [`HANG_GUARD`].
    pub async fn cut_at_progress(&self, progress: impl Fn() -> u64) -> Infallible {
        let mut cuts = 0_u64;
        loop {
            let next = progress() + 4;
            while progress() < next {
                sleep(Duration::from_millis(1)).await;
            }
            if cuts.is_multiple_of(3) {
                let lost = self.lost();
                self.set(Mode::LoseReplies(ConnectionEnd::Cut));
                until(|| self.lost() > lost).await;
            } else {
                let resets = self.resets();
                self.set(Mode::Cut);
                until(|| self.resets() > resets).await;
            }
            self.set(Mode::Pass);
            cuts += 1;
        }
    }

    /// Forwards new connections to another server from now on. Open connections are not affected.
    pub fn set_upstream(&self, upstream: SocketAddr) {
        *self.state.upstream() = upstream;
    }

    /// Returns the counters of the bytes forwarded so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            connections: self.state.connections.load(Ordering::SeqCst),
            up: self.state.up.load(Ordering::SeqCst),
            down: self.state.down.load(Ordering::SeqCst),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.take();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl State {
    fn upstream(&self) -> std::sync::MutexGuard<'_, SocketAddr> {
        self.upstream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fault(&self) -> std::sync::MutexGuard<'_, Option<(Fault, ConnectionEnd)>> {
        self.fault.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until the condition holds.
async fn until(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < HANG_GUARD, "no traffic to cut");
        sleep(Duration::from_millis(1)).await;
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    loop {
        let (client, _) = listener.accept().await.expect("a connection");
        state.connections.fetch_add(1, Ordering::SeqCst);
        spawn_local(connection::forward(client, Arc::clone(&state)));
    }
}
