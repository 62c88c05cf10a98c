//! The same service in each framework, behind the layer. Each module is what a user of its framework writes.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{Stream, stream};
use tests::{Effects, barrier::Barrier};
use tokio::sync::mpsc;
use tower_idempotency::{IdempotencyLayer, Lease, MemoryStore, NeedsAttention};

pub mod actix;
pub mod axum_07;
pub mod axum_08;
pub mod hyper_service;
pub mod poem_endpoint;
pub mod salvo_router;
pub mod warp_filter;

/// A framework: starts the service, and states how it differs from the others.
pub trait Framework {
    /// Drops the future of a handler when its client disconnects, if no layer prevents it.
    const DROPS_HANDLERS: bool;
    /// Sends the parts of a response as the handler produces them.
    const STREAMS: bool;

    /// Serves the shop on a free port of this machine.
    fn start(shop: Shop) -> impl Future<Output = SocketAddr> + Send;
}

/// The part of the service that is the same in each framework.
///
/// `POST /orders`, `/eu/orders` and `/us/orders` create an order, and `POST /events` streams two events.
#[derive(Clone, Debug)]
pub struct Shop {
    /// The layer that the framework puts around its routes.
    pub layer: IdempotencyLayer,
    /// The orders that a handler began.
    pub begun: Effects,
    /// The orders that a handler finished.
    pub finished: Effects,
    /// Holds orders whose body is `hold`, and the second event of a stream.
    pub barrier: Barrier,
    /// Is set if a handler was dropped before its end.
    pub dropped: Arc<AtomicBool>,
}

/// The response to an order.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// The header `location`.
    pub location: String,
    /// The body.
    pub body: String,
    /// The failure that an operator has to resolve, as an extension of the response.
    pub attention: Option<NeedsAttention>,
}

impl Shop {
    /// Creates a shop with the default layer and a shut barrier.
    #[must_use]
    pub fn open() -> Self {
        Self {
            layer: IdempotencyLayer::new(MemoryStore::new()),
            begun: Effects::default(),
            finished: Effects::default(),
            barrier: Barrier::closed(),
            dropped: Arc::default(),
        }
    }

    /// Creates an order. The body `hold` waits at the barrier, `fail` responds with 500 the first time, and `attention` responds
    /// with 500 and needs attention.
    pub async fn order(&self, lease: Option<Lease>, body: Bytes) -> Reply {
        let n = self.begun.happen();
        let mut guard = DropGuard(Some(Arc::clone(&self.dropped)));
        if body == "hold" {
            self.barrier.pass().await;
        }
        guard.0 = None;
        self.finished.happen();
        let generation = lease.map(|lease| lease.generation());
        let attention = (body == "attention").then(|| NeedsAttention::new("order-incomplete"));
        let is_failed = attention.is_some() || body == "fail" && n == 1;
        Reply {
            status: if is_failed { 500 } else { 201 },
            location: format!("/orders/{n}"),
            body: format!(
                "execution {n} of {} bytes, generation {generation:?}",
                body.len()
            ),
            attention,
        }
    }

    /// Streams two events. The second one waits at the barrier.
    pub fn events(&self) -> impl Stream<Item = io::Result<Bytes>> + Send + Sync + Unpin + 'static {
        let n = self.begun.happen();
        let (events, mut received) = mpsc::channel(1);
        let barrier = self.barrier.clone();
        tokio::spawn(async move {
            let _ = events
                .send(Ok(format!("data: first of {n}\n\n").into()))
                .await;
            barrier.pass().await;
            let _ = events
                .send(Ok(format!("data: last of {n}\n\n").into()))
                .await;
        });
        stream::poll_fn(move |cx| received.poll_recv(cx))
    }
}

/// Sets the flag if it is dropped with it.
struct DropGuard(Option<Arc<AtomicBool>>);

impl Drop for DropGuard {
    fn drop(&mut self) {
        if let Some(dropped) = &self.0 {
            dropped.store(true, Ordering::SeqCst);
        }
    }
}

/// Binds a free port of this machine.
async fn listener() -> (tokio::net::TcpListener, SocketAddr) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("a free port");
    let addr = listener.local_addr().expect("a bound socket");
    (listener, addr)
}
