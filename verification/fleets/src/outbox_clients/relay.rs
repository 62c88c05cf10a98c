//! A relay that breaks most connections, each after a random number of bytes in one direction.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tests::random::Random;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp},
    task::JoinHandle,
};

/// A running relay. It ends when it is dropped.
pub(super) struct Relay {
    address: SocketAddr,
    counts: Arc<[AtomicU64; 2]>,
    task: JoinHandle<()>,
}

/// Direction in which a connection breaks, and the bytes that pass before.
#[derive(Clone, Copy)]
enum Break {
    Never,
    Up(usize),
    Down(usize),
}

impl Relay {
    pub(super) async fn start(server: SocketAddr, seed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let counts = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let shared = counts.clone();
        let mut random = Random(seed);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                shared[0].fetch_add(1, Ordering::Relaxed);
                let bytes = random.below(MAX_BYTES);
                let at = match random.below(8) {
                    0 => Break::Never,
                    1..4 => Break::Up(bytes),
                    _ => Break::Down(bytes),
                };
                let resets = random.below(2) == 0;
                let shared = shared.clone();
                tokio::spawn(async move {
                    if let Ok(true) = relay(client, server, at, resets).await {
                        shared[1].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        Self {
            address,
            counts,
            task,
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of connections, and of those that were broken.
    pub(super) fn counts(&self) -> (u64, u64) {
        let [connections, broken] = &*self.counts;
        (
            connections.load(Ordering::Relaxed),
            broken.load(Ordering::Relaxed),
        )
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Relays until one side closes the connection, or until it breaks. Returns `true` if it broke.
async fn relay(client: TcpStream, server: SocketAddr, at: Break, resets: bool) -> io::Result<bool> {
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    if resets {
        client.set_zero_linger()?;
        server.set_zero_linger()?;
    }
    let (up, down) = match at {
        Break::Never => (usize::MAX, usize::MAX),
        Break::Up(bytes) => (bytes, usize::MAX),
        Break::Down(bytes) => (usize::MAX, bytes),
    };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::select! {
        broken = forward(&mut from_client, &mut to_server, up) => broken,
        broken = forward(&mut from_server, &mut to_client, down) => broken,
    }
}

/// Forwards at most so many bytes. Returns `true` if there were more.
async fn forward(
    from: &mut tcp::OwnedReadHalf,
    to: &mut tcp::OwnedWriteHalf,
    mut left: usize,
) -> io::Result<bool> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(false);
        }
        to.write_all(&buffer[..read.min(left)]).await?;
        if read > left {
            return Ok(true);
        }
        left -= read;
    }
}

/// A connection that breaks forwards fewer bytes. A request has about 200, and a response between 250 and 650.
const MAX_BYTES: usize = 1200;
