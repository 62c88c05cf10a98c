//! Clients that exhaust limits, over real sockets, while an honest caller must be served as before.
//!
//! Each attack is bounded. A caller with a credential makes it once, and a caller without one makes it once. The tests
//! only print the times of the honest caller, because they depend on the machine.

use std::{
    future::pending,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::StatusCode,
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use bytes::Bytes;
use http_body_util::BodyExt;
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, eventually},
    wire::{H1, H2, Server, Stream},
};
use tokio::{
    io::AsyncWriteExt,
    net::TcpStream,
    sync::{Mutex, MutexGuard, watch},
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
    counters: Arc<Counters>,
    honest: Arc<HonestCaller>,
    barrier: Barrier,
    addr: SocketAddr,
    _server: Arc<Server>,
}

/// Counters outside the layer.
#[derive(Default)]
struct Counters {
    /// Bytes of request bodies that the layer has read.
    received: AtomicUsize,
    /// Responses that are errors.
    refused: AtomicU64,
}

/// The progress of the honest caller.
#[derive(Default)]
struct HonestCaller {
    /// Pairs of a fresh request and its retry.
    pairs: AtomicU64,
    /// Locked while a pair is sent.
    sending: Mutex<()>,
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
        let counters = Arc::<Counters>::default();
        let app = app.layer(from_fn_with_state(Arc::clone(&counters), count));
        let server = Server::start(app).await;
        Self {
            layer,
            slow,
            counters,
            honest: Arc::default(),
            barrier,
            addr: server.addr(),
            _server: Arc::new(server),
        }
    }

    /// Returns the number of responses that were errors.
    fn refused(&self) -> u64 {
        self.counters.refused.load(Ordering::SeqCst)
    }

    /// Runs `attack` while an honest caller sends fresh requests and retries, all of which must succeed.
    async fn attack<T>(&self, name: &str, attack: impl Future<Output = T>) -> T {
        let (stop, stopped) = watch::channel(false);
        let honest = Arc::clone(&self.honest);
        let honest = tokio::spawn(send_honest_pairs(self.addr, honest, stopped));
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

    /// Waits until the honest caller has sent 20 more pairs. An attack calls this while it uses all of its share.
    async fn wait_for_honest_pairs(&self) {
        let pairs = || self.honest.pairs.load(Ordering::SeqCst);
        let expected = pairs() + 20;
        eventually("the honest caller is served", || pairs() >= expected).await;
    }

    /// Pauses the honest caller between two pairs until the guard is dropped. The requests in flight are then those of the
    /// test.
    async fn pause_honest_caller(&self) -> MutexGuard<'_, ()> {
        self.honest.sending.lock().await
    }

    async fn finish(&self) {
        self.barrier.open_for_good();
        eventually("all executions end", || self.layer.in_flight() == 0).await;
    }
}

async fn count(State(counters): State<Arc<Counters>>, req: Request, next: Next) -> Response {
    let counted = Arc::clone(&counters);
    let req = req.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let bytes = frame.data_ref().map_or(0, Bytes::len);
            counted.received.fetch_add(bytes, Ordering::SeqCst);
            frame
        }))
    });
    let response = next.run(req).await;
    if !response.status().is_success() {
        counters.refused.fetch_add(1, Ordering::SeqCst);
    }
    response
}

/// Sends fresh requests and a retry of each until it is stopped. Returns the time of each request.
async fn send_honest_pairs(
    addr: SocketAddr,
    progress: Arc<HonestCaller>,
    stopped: watch::Receiver<bool>,
) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut n = 0;
    while !*stopped.borrow() {
        let sending = progress.sending.lock().await;
        for replay in [false, true] {
            let started = Instant::now();
            let response = post(addr, "/fast", &format!("honest-{n}"), Some("Bearer bob")).await;
            times.push(started.elapsed());
            assert_eq!(response.status, StatusCode::CREATED, "{}", response.text());
            assert_eq!(response.is_replay(), replay);
        }
        drop(sending);
        progress.pairs.fetch_add(1, Ordering::SeqCst);
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

/// Returns a layer whose timeouts do not end an attack.
fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new()).with_body_timeout(HANGS * 2)
}

/// Returns a layer for attacks that use up the permits. The shares are parts of the limit, so a tenth of the default is enough.
fn layer_with_few_permits() -> IdempotencyLayer {
    layer().with_max_in_flight(1_000)
}

// F-950
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_requests_leave_permits_to_other_callers() {
    for attacker in ATTACKERS {
        let server = AttackedServer::start(layer_with_few_permits()).await;
        let attack = async {
            let decided = || server.slow.count() + server.refused();
            for connection in 0..12 {
                let client = H2::connect(server.addr).await;
                let expected = decided() + 100;
                let mut streams = Vec::new();
                for n in 0..100 {
                    let key = format!("{connection}-{n}");
                    streams.push(client.post_by(attacker, "/slow", &key, "").await);
                }
                // A request that is reset earlier may not reach the layer.
                let all_decided = || decided() == expected;
                eventually("each request is executed or refused", all_decided).await;
                streams.into_iter().for_each(Stream::reset);
                client.lose().await;
            }
            server.wait_for_honest_pairs().await;
        };
        let attacked = server.attack("1,200 reset requests", attack);
        timeout(HANGS, attacked).await.expect("an end");
        // A caller whose disconnected clients use more than 500 permits gets no new ones.
        let (executed, refused) = (server.slow.count(), server.refused());
        assert_eq!(executed + refused, 1_200);
        assert!((501..=750).contains(&executed), "{executed} executions");
        server.finish().await;
    }
}

// F-951
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_bodies_leave_permits_to_other_callers() {
    for attacker in ATTACKERS {
        let server = AttackedServer::start(layer_with_few_permits()).await;
        let attack = async {
            let mut held = Vec::new();
            for connection in 0..11 {
                let client = H2::connect(server.addr).await;
                for n in 0..100 {
                    let key = format!("{connection}-{n}");
                    let length = Some(10);
                    held.push(client.start_by(attacker, "/slow", &key, length).await);
                }
                held.push(client.start_by(attacker, "/slow", "last", Some(10)).await);
                server.assert_arriving();
            }
            eventually("the attacker uses its share", || {
                server.layer.in_flight() >= 700 && server.refused() > 0
            })
            .await;
            server.wait_for_honest_pairs().await;
            held
        };
        let attacked = server.attack("1,111 bodies that never arrive", attack);
        let held = timeout(HANGS, attacked).await.expect("an end");
        server.assert_arriving();
        assert!(server.layer.in_flight() >= 700, "the attack has ended");
        assert_eq!(server.slow.count(), 0);
        drop(held);
        server.finish().await;
    }
}

impl AttackedServer {
    fn assert_arriving(&self) {
        // The limit is three quarters of 1,000, plus the requests of the honest caller.
        assert!(self.layer.in_flight() <= 752);
    }
}

// F-952
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_uploads_leave_bytes_to_other_callers() {
    const LENGTH: usize = 512 * 1024;
    // A quarter of the default, because the shares are parts of the limit.
    const LIMIT: usize = 32 * 1024 * 1024;
    const UPLOADS: u64 = 140;
    // Three quarters of the limit.
    const HELD: u64 = 48;
    for attacker in ATTACKERS {
        let layer = layer().with_max_buffered(LIMIT, LIMIT);
        let server = AttackedServer::start(layer).await;
        let data = vec![b'x'; LENGTH - 1];
        let attack = async {
            let mut held = Vec::new();
            for n in 0..UPLOADS {
                let refused = server.refused();
                let received = &server.counters.received;
                received.store(0, Ordering::SeqCst);
                let mut stream = TcpStream::connect(server.addr).await.expect("a server");
                let head = head("/slow", &n.to_string(), attacker, LENGTH);
                stream.write_all(head.as_bytes()).await.expect("a server");
                let upload = async {
                    // The server may reject the request and close the connection before it has read the whole body.
                    let _ = stream.write_all(&data).await;
                    pending::<()>().await;
                };
                let decided = eventually("the upload is held or refused", || {
                    let received = received.load(Ordering::SeqCst);
                    received == LENGTH - 1 || server.refused() > refused
                });
                tokio::select! {
                    () = upload => {}
                    () = decided => {}
                }
                held.push(stream);
            }
            assert_eq!(server.refused(), UPLOADS - HELD);
            server.wait_for_honest_pairs().await;
            let paused = server.pause_honest_caller().await;
            eventually("only the uploads are in flight", || {
                server.layer.in_flight() as u64 == HELD
            })
            .await;
            drop(paused);
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
    const KEYS: u64 = 32;
    // Three quarters of 1,024.
    const WAITERS: u64 = 768;
    for attacker in ATTACKERS {
        let wait = ConcurrentRequests::Wait(HANGS * 2);
        let server = AttackedServer::start(layer().with_concurrent_requests(wait)).await;
        let attack = async {
            let mut held = Vec::new();
            for key in 0..KEYS {
                let client = H2::connect(server.addr).await;
                for _ in 0..=64 {
                    let key = key.to_string();
                    held.push(client.post_by(attacker, "/slow", &key, "").await);
                }
                eventually("it executes", || server.slow.count() == key + 1).await;
            }
            let refused = KEYS * 64 - WAITERS;
            eventually("the other duplicates wait", || server.refused() == refused).await;
            server.wait_for_honest_pairs().await;
            let paused = server.pause_honest_caller().await;
            let in_flight = || server.layer.in_flight() as u64;
            let send = || tokio::spawn(post(server.addr, "/slow", "honest", Some("Bearer bob")));
            let executed = send();
            eventually("it executes", || server.slow.count() == KEYS + 1).await;
            let executing = KEYS + WAITERS + 1;
            eventually("only these are in flight", || in_flight() == executing).await;
            let waiting = send();
            eventually("the duplicate waits", || in_flight() == executing + 1).await;
            server.barrier.open_for_good();
            assert!(!executed.await.expect("no panic").is_replay());
            assert!(waiting.await.expect("no panic").is_replay());
            drop((held, paused));
            refused
        };
        let attacked = server.attack("2,048 waiting requests", attack);
        let refused = timeout(HANGS, attacked).await.expect("an end");
        assert_eq!((server.slow.count(), server.refused()), (KEYS + 1, refused));
        server.finish().await;
    }
}
