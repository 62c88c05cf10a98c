//! Counts the round trips between a client and its server, independent of their protocol.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

/// Forwards connections to a server until the test process ends. Counts how often a client sends after it has received:
/// if each request has a reply, this is the number of round trips.
#[derive(Debug)]
pub struct RoundTrips {
    address: SocketAddr,
    count: Arc<AtomicU64>,
}

impl RoundTrips {
    /// Starts a forwarder in front of `server`.
    ///
    /// # Panics
    ///
    /// Panics if there is no free port.
    #[must_use]
    pub fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket");
        let count = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&count);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // If the server is down, the client's connection is closed.
                if let Ok(server) = TcpStream::connect(server) {
                    forward(&client, &server, &counted);
                }
            }
        });
        Self { address, count }
    }

    /// Returns the address of the forwarder.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of round trips since the last call.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.count.swap(0, SeqCst)
    }
}

fn forward(client: &TcpStream, server: &TcpStream, count: &Arc<AtomicU64>) {
    // The client has read the replies: its next bytes are a request.
    let reply_seen = Arc::new(AtomicBool::new(true));
    let [sends, receives] = [Arc::clone(&reply_seen), reply_seen];
    let count = Arc::clone(count);
    copy(client, server, move || {
        if sends.swap(false, SeqCst) {
            count.fetch_add(1, SeqCst);
        }
    });
    copy(server, client, move || receives.store(true, SeqCst));
}

/// Copies bytes, and calls `seen` before it forwards them.
fn copy(from: &TcpStream, to: &TcpStream, seen: impl Fn() + Send + 'static) {
    let mut from = from.try_clone().expect("a socket");
    let mut to = to.try_clone().expect("a socket");
    to.set_nodelay(true).expect("a socket");
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            seen();
            if to.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}
