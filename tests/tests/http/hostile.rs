//! Clients that exhaust limits, over real sockets, while an honest caller must be served as before.
//!
//! Each attack is bounded. A caller with a credential makes it once, and a caller without one makes it once. The tests
//! only print the times of the honest caller, because they depend on the machine.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, extract::Request, http::StatusCode};
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, eventually},
    wire::{H1, H2, Server, Stream},
};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    sync::watch,
    time::{Instant, timeout},
};
use tower_idempotency::{ConcurrentRequests, IdempotencyLayer, MemoryStore};

/// The time limit of a test.
const HANGS: Duration = Duration::from_secs(300);

const ATTACKERS: [Option<&str>; 2] = [Some("Bearer mallory"), None];

/// A server of the layer. Handlers of `/slow` wait at the barrier, the others respond at once.
struct AttackedServer {
    layer: IdempotencyLayer,
    slow: Effects,
    barrier: Barrier,
    addr: SocketAddr,
    _server: Arc<Server>,
}

impl AttackedServer {
    async fn start(layer: IdempotencyLayer) -> Self {
        let (barrier, slow) = (Barrier::closed(), Effects::default());
        let (passed, counted) = (barrier.clone(), slow.clone());
        let (app, _): (Router, _) = app(layer.clone(), move |_, req: Request| {
            let (barrier, slow) = (passed.clone(), counted.clone());
            async move {
                if req.uri().path() == "/slow" {
                    slow.happen();
                    barrier.pass().await;
                }
                StatusCode::CREATED
            }
        });
        let server = Server::start(app).await;
        Self {
            layer,
            slow,
            barrier,
            addr: server.addr(),
            _server: Arc::new(server),
        }
    }

    /// Runs `attack` while an honest caller sends fresh requests and retries, all of which must succeed.
    async fn attack<T>(&self, name: &str, attack: impl Future<Output = T>) -> T {
        let (stop, stopped) = watch::channel(false);
        let honest = tokio::spawn(honest_caller(self.addr, stopped));
        let result = attack.await;
        stop.send_replace(true);
        let mut times = honest.await.expect("no panic");
        times.sort();
        println!(
            "{name}: {} requests of the honest caller, median {:?}, slowest {:?}",
            times.len(),
            times[times.len() / 2],
            times[times.len() - 1],
        );
        result
    }

    async fn finish(&self) {
        self.barrier.open_for_good();
        eventually("all executions end", || self.layer.in_flight() == 0).await;
    }
}

/// Sends fresh requests and a retry of each until it is stopped, at least 20 pairs. Returns the time of each request.
async fn honest_caller(addr: SocketAddr, stopped: watch::Receiver<bool>) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut n = 0;
    while n < 20 || !*stopped.borrow() {
        for replay in [false, true] {
            let started = Instant::now();
            let response = post(addr, "/fast", &format!("honest-{n}"), Some("Bearer bob")).await;
            times.push(started.elapsed());
            assert_eq!(response.status, StatusCode::CREATED, "{}", response.text());
            assert_eq!(response.is_replay(), replay);
        }
        n += 1;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    times
}

fn head(path: &str, key: &str, caller: Option<&str>, length: usize) -> String {
    let caller = caller.map_or_else(String::new, |caller| format!("authorization: {caller}\r\n"));
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\n{caller}content-length: {length}\r\n\r\n"
    )
}

async fn post(addr: SocketAddr, path: &str, key: &str, caller: Option<&str>) -> TestResponse {
    let mut client = H1::connect(addr).await;
    client.send(head(path, key, caller, 0)).await;
    client.response().await.expect("a response")
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

// F-950
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_requests_leave_permits_to_other_callers() {
    for attacker in ATTACKERS {
        let server = AttackedServer::start(layer()).await;
        let attack = async {
            for connection in 0..120 {
                let client = H2::connect(server.addr).await;
                let before = server.slow.count();
                let mut streams = Vec::new();
                for n in 0..100 {
                    let key = format!("{connection}-{n}");
                    streams.push(client.post_by(attacker, "/slow", &key, "").await);
                }
                // The server receives the requests before it sees their reset, unless it rejects them.
                let seen = async {
                    while server.slow.count() < before + 100 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                let _ = timeout(Duration::from_millis(50), seen).await;
                streams.into_iter().for_each(Stream::reset);
                client.lose().await;
            }
        };
        let attacked = server.attack("12,000 reset requests", attack);
        timeout(HANGS, attacked).await.expect("an end");
        let executed = server.slow.count();
        assert!(executed > 0 && executed <= 7_500, "{executed} executions");
        server.finish().await;
    }
}

// F-951
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_bodies_leave_permits_to_other_callers() {
    for attacker in ATTACKERS {
        let server = AttackedServer::start(layer()).await;
        let attack = async {
            let mut held = Vec::new();
            for connection in 0..102 {
                let client = H2::connect(server.addr).await;
                for n in 0..100 {
                    let key = format!("{connection}-{n}");
                    let length = Some(10);
                    held.push(client.start_by(attacker, "/slow", &key, length).await);
                }
                held.push(client.start_by(attacker, "/slow", "last", Some(10)).await);
                server.assert_arriving();
            }
            // The honest caller sends some requests while the attacker uses all of its permits.
            tokio::time::sleep(Duration::from_millis(200)).await;
            held
        };
        let attacked = server.attack("10,200 bodies that never arrive", attack);
        let held = timeout(HANGS, attacked).await.expect("an end");
        assert!(server.layer.in_flight() >= 7_000, "the attack is in place");
        assert_eq!(server.slow.count(), 0);
        drop(held);
        server.finish().await;
    }
}

impl AttackedServer {
    fn assert_arriving(&self) {
        // The limit is three quarters of 10,000, plus the requests of the honest caller.
        assert!(self.layer.in_flight() <= 7_502);
    }
}

// F-952
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_uploads_leave_bytes_to_other_callers() {
    const LENGTH: usize = 2 * 1024 * 1024;
    for attacker in ATTACKERS {
        let server = AttackedServer::start(layer()).await;
        let data = vec![b'x'; LENGTH - 1];
        let attack = async {
            let mut held = Vec::new();
            for n in 0..140 {
                let mut stream = TcpStream::connect(server.addr).await.expect("a server");
                let head = head("/slow", &n.to_string(), attacker, LENGTH);
                stream.write_all(head.as_bytes()).await.expect("a server");
                // The server may reject the request and close the connection before it has read the whole body.
                let _ = timeout(Duration::from_secs(5), stream.write_all(&data)).await;
                held.push(stream);
            }
            let upload = head("/fast", "upload", Some("Bearer bob"), LENGTH);
            let mut client = H1::connect(server.addr).await;
            client.send(upload).await;
            client.send(&data).await;
            client.send("x").await;
            let response = client.response().await.expect("a response");
            assert_eq!(response.status, StatusCode::CREATED, "{}", response.text());
            held
        };
        let attacked = server.attack("140 uploads without their last byte", attack);
        let held = timeout(HANGS, attacked).await.expect("an end");
        assert_eq!(server.slow.count(), 0);
        drop(held);
        server.finish().await;
    }
}

// F-953
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_leave_permits_to_other_callers() {
    for attacker in ATTACKERS {
        let wait = ConcurrentRequests::Wait(Duration::from_secs(120));
        let server = AttackedServer::start(layer().with_concurrent_requests(wait)).await;
        let attack = async {
            let mut held = Vec::new();
            for key in 0..32 {
                let client = H2::connect(server.addr).await;
                for _ in 0..=64 {
                    let key = key.to_string();
                    held.push(client.post_by(attacker, "/slow", &key, "").await);
                }
                eventually("it executes", || server.slow.count() == key + 1).await;
            }
            let addr = server.addr;
            let first = || post(addr, "/slow", "honest", Some("Bearer bob"));
            let executed = tokio::spawn(first());
            eventually("it executes", || server.slow.count() == 33).await;
            let waiting = tokio::spawn(first());
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert!(!waiting.is_finished(), "the duplicate waits");
            server.barrier.open_for_good();
            assert!(!executed.await.expect("no panic").is_replay());
            assert!(waiting.await.expect("no panic").is_replay());
            drop(held);
        };
        let attacked = server.attack("2,048 waiting requests", attack);
        timeout(HANGS, attacked).await.expect("an end");
        assert_eq!(server.slow.count(), 33);
        server.finish().await;
    }
}
