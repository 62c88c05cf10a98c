//! The behaviours that a client and a handler see, with their effects counted.

use std::{
    fs,
    net::SocketAddr,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use frameworks::{
    Framework, Shop, axum_07::Axum07InsideNest, axum_08::Axum08Builder,
    salvo_router::SalvoOuterHoop,
};
use http::{HeaderMap, StatusCode, header};
use metrics_util::debugging::DebuggingRecorder;
use tests::{
    TestResponse,
    barrier::eventually,
    observed::{read, total},
    wire::{Disconnect, H1, poll_briefly, post_bytes},
};
use tokio::sync::Mutex;

/// A service that runs, and a client of it.
struct Running {
    shop: Shop,
    addr: SocketAddr,
}

impl Running {
    async fn start<F: Framework>() -> Self {
        let shop = Shop::open();
        let addr = F::start(shop.clone()).await;
        Self { shop, addr }
    }

    /// Sends `bytes` on a connection of their own.
    async fn send(&self, bytes: impl AsRef<[u8]>) -> H1 {
        let mut client = H1::connect(self.addr).await;
        client.send(bytes).await;
        client
    }

    async fn response(&self, bytes: impl AsRef<[u8]>) -> TestResponse {
        let response = self.send(bytes).await.response().await;
        response.expect("a response")
    }

    async fn order(&self, key: &str, body: &str) -> TestResponse {
        self.response(post_bytes("/orders", key, body)).await
    }

    fn effects(&self) -> (u64, u64) {
        (self.shop.begun.count(), self.shop.finished.count())
    }

    /// Waits until no request is in the layer, so that its response is recorded.
    async fn wait_until_idle(&self) {
        let is_idle = || self.shop.layer.in_flight() == 0;
        eventually("nothing is in flight", is_idle).await;
    }

    /// Waits until the end of each connection has arrived at the server.
    async fn wait_until_disconnected(&self) {
        let is_disconnected = || !has_established_connection(self.addr);
        eventually("the server is disconnected", is_disconnected).await;
        // The framework has had its turn when it has responded to these requests, which have no effect.
        for _ in 0..20 {
            let rejected = self.order("\"", "tea").await;
            assert_eq!(rejected.status, StatusCode::BAD_REQUEST, "{rejected:?}");
        }
    }
}

/// Returns `true` if the system lists an established connection of this server.
fn has_established_connection(server: SocketAddr) -> bool {
    const ESTABLISHED: &str = "01";
    let connections = fs::read_to_string("/proc/net/tcp").expect("a system with procfs");
    let port = format!(":{:04X}", server.port());
    connections.lines().any(|line| {
        // Number, local address, remote address, state.
        let fields: Vec<_> = line.split_whitespace().take(4).collect();
        matches!(fields[..], [_, local, _, ESTABLISHED] if local.ends_with(&port))
    })
}

/// Returns the headers without those of the connection, of the framing and of the replay.
///
/// Poem and salvo send a first response in chunks, because their bodies state no length. Its replay states its length.
fn own_headers(response: &TestResponse) -> HeaderMap {
    let mut headers = response.headers.clone();
    for name in [
        "idempotent-replayed",
        "connection",
        "content-length",
        "transfer-encoding",
    ] {
        headers.remove(name);
    }
    headers
}

/// Returns a POST with more headers, in place of a key.
fn with_headers(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\nhost: test\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

pub(crate) async fn new_request_executes<F: Framework>() {
    let running = Running::start::<F>().await;
    let first = running.order("k", "tea").await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    // The handler received its lease and the whole body.
    assert_eq!(
        first.text(),
        "execution 1 of 3 bytes, generation Some(1)",
        "{first:?}"
    );
    assert!(!first.is_replay());
    assert_eq!(running.effects(), (1, 1));
}

pub(crate) async fn retry_is_replayed_byte_for_byte<F: Framework>() {
    let running = Running::start::<F>().await;
    let first = running.order("k", "tea").await;
    for _ in 0..2 {
        let retry = running.order("k", "tea").await;
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!((retry.status, &retry.body), (first.status, &first.body));
        assert_eq!(own_headers(&retry), own_headers(&first));
    }
    assert_eq!(first.header("location"), Some("/orders/1"));
    assert_eq!(running.effects(), (1, 1));
}

pub(crate) async fn other_request_gets_422<F: Framework>() {
    let running = Running::start::<F>().await;
    running.order("k", "tea").await;
    let other = running.order("k", "coffee").await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY, "{other:?}");
    assert_eq!(other.code(), "key-reused");
    assert_eq!(running.effects(), (1, 1));
}

pub(crate) async fn keyless_request_executes_each_time<F: Framework>() {
    let running = Running::start::<F>().await;
    for n in 1..=2 {
        let response = running.response(with_headers("/orders", "", "tea")).await;
        let body = format!("execution {n} of 3 bytes, generation None");
        assert_eq!(response.text(), body);
        assert_eq!(response.status, StatusCode::CREATED);
    }
    assert_eq!(running.effects(), (2, 2));
}

pub(crate) async fn concurrent_duplicate_gets_409<F: Framework>() {
    let running = Running::start::<F>().await;
    let request = post_bytes("/orders", "k", "hold");
    let mut first = running.send(&request).await;
    running.shop.barrier.arrival().await;
    let duplicate = running.response(&request).await;
    assert_eq!(duplicate.status, StatusCode::CONFLICT, "{duplicate:?}");
    assert!(duplicate.headers.contains_key(header::RETRY_AFTER));
    assert_eq!(running.effects(), (1, 0));
    running.shop.barrier.open_for_good();
    let first = first.response().await.expect("a response");
    let retry = running.response(&request).await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!(retry.body, first.body);
    assert_eq!(running.effects(), (1, 1));
}

pub(crate) async fn handler_error_frees_key<F: Framework>() {
    let running = Running::start::<F>().await;
    let first = running.order("k", "fail").await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR, "{first:?}");
    running.wait_until_idle().await;
    let second = running.order("k", "fail").await;
    assert_eq!(second.status, StatusCode::CREATED, "{second:?}");
    assert!(!second.is_replay());
    assert!(running.order("k", "fail").await.is_replay());
    assert_eq!(running.effects(), (2, 2));
}

/// The extension reaches the layer through the framework's response, and is then stored.
pub(crate) async fn response_extension_blocks_retry<F: Framework>() {
    let running = Running::start::<F>().await;
    let first = running.order("k", "attention").await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR, "{first:?}");
    running.wait_until_idle().await;
    let retry = running.order("k", "attention").await;
    assert_eq!(retry.status, StatusCode::CONFLICT, "{retry:?}");
    assert_eq!(retry.code(), "outcome-unknown");
    assert_eq!(running.effects(), (1, 1));
}

/// Counts clients that left while their request continued. One test at a time disconnects, so that a count is of its
/// clients.
static DETACHED: LazyLock<(DebuggingRecorder, AtomicU64)> = LazyLock::new(Default::default);
static DISCONNECTS: Mutex<()> = Mutex::const_new(());

fn install_recorder() {
    // Another test may have installed it.
    let _ = metrics::set_global_recorder(&DETACHED.0);
}

fn detached() -> u64 {
    let count = total(&read(&DETACHED.0), "idempotency_detached_total");
    DETACHED.1.fetch_add(count as u64, Ordering::SeqCst) + count as u64
}

pub(crate) async fn execution_continues_after_disconnect<F: Framework>() {
    install_recorder();
    for how in [Disconnect::Close, Disconnect::Reset] {
        let _alone = DISCONNECTS.lock().await;
        let running = Running::start::<F>().await;
        let before = detached();
        let client = running.send(post_bytes("/orders", "k", "hold")).await;
        running.shop.barrier.arrival().await;
        client.disconnect(how);
        match F::DROPS_HANDLERS {
            true => eventually("the server noticed", || detached() > before).await,
            false => running.wait_until_disconnected().await,
        }
        assert_eq!(running.effects(), (1, 0));
        running.shop.barrier.open_for_good();
        running.wait_until_idle().await;
        assert_eq!(running.effects(), (1, 1), "before any retry");
        let retry = running.order("k", "hold").await;
        assert!(retry.is_replay(), "{retry:?}");
        assert_eq!(
            retry.text(),
            "execution 1 of 4 bytes, generation Some(1)",
            "{how:?}"
        );
        assert_eq!(running.effects(), (1, 1));
    }
}

/// Shows a difference of the frameworks: without a key, most of them drop the handler of a client that left.
pub(crate) async fn keyless_handler_after_disconnect<F: Framework>() {
    let _alone = DISCONNECTS.lock().await;
    let running = Running::start::<F>().await;
    let client = running.send(with_headers("/orders", "", "hold")).await;
    running.shop.barrier.arrival().await;
    client.disconnect(Disconnect::Close);
    let is_dropped = || running.shop.dropped.load(Ordering::SeqCst);
    if F::DROPS_HANDLERS {
        eventually("the handler is dropped", is_dropped).await;
        running.shop.barrier.open_for_good();
        assert_eq!(running.effects(), (1, 0));
    } else {
        running.wait_until_disconnected().await;
        running.shop.barrier.open_for_good();
        eventually("the handler ends", || running.effects() == (1, 1)).await;
        assert!(!is_dropped());
    }
}

pub(crate) async fn incomplete_request_executes_nothing<F: Framework>() {
    let _alone = DISCONNECTS.lock().await;
    let running = Running::start::<F>().await;
    for how in [Disconnect::Close, Disconnect::Reset] {
        let mut request = post_bytes("/orders", "k", "tea");
        request.truncate(request.len() - 1);
        let client = running.send(request).await;
        client.disconnect(how);
    }
    // The key is free, whether or not the server has noticed that the clients left.
    let first = running.order("other", "tea").await;
    assert_eq!(first.status, StatusCode::CREATED);
    running.wait_until_idle().await;
    assert_eq!(running.effects(), (1, 1), "the complete request alone");
    let complete = running.order("k", "tea").await;
    assert_eq!(complete.status, StatusCode::CREATED, "{complete:?}");
    assert!(!complete.is_replay());
    assert_eq!(running.effects(), (2, 2));
}

pub(crate) async fn chunked_request_executes_once<F: Framework>() {
    let running = Running::start::<F>().await;
    let head = "POST /orders HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut client = running.send(head).await;
    client.send("2\r\nte\r\n").await;
    assert!(poll_briefly(client.response()).await.is_none());
    assert_eq!(running.effects(), (0, 0), "the request is incomplete");
    client.send("1\r\na\r\n0\r\n\r\n").await;
    let first = client.response().await.expect("a response");
    assert_eq!(first.text(), "execution 1 of 3 bytes, generation Some(1)");
    // The same bytes in one piece are the same request.
    let retry = running.order("k", "tea").await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!(retry.body, first.body);
    assert_eq!(running.effects(), (1, 1));
}

pub(crate) async fn event_stream_is_not_recorded<F: Framework>() {
    let running = Running::start::<F>().await;
    let request = post_bytes("/events", "k", "");
    let mut client = running.send(&request).await;
    running.shop.barrier.arrival().await;
    let first = client.has_received("data: first of 1");
    match F::STREAMS {
        true => assert!(first.await, "the response broke off"),
        false => assert!(poll_briefly(first).await.is_none(), "the response is live"),
    }
    running.shop.barrier.open_for_good();
    let whole = client.response().await.expect("a response");
    assert_eq!(whole.text(), "data: first of 1\n\ndata: last of 1\n\n");
    running.wait_until_idle().await;
    let retry = running.response(&request).await;
    assert_eq!(retry.status, StatusCode::CONFLICT, "{retry:?}");
    assert_eq!(retry.code(), "response-not-retained");
    assert_eq!(running.effects(), (1, 0));
}

pub(crate) async fn callers_have_keys_of_their_own<F: Framework>() {
    let running = Running::start::<F>().await;
    let by = |caller: &str| {
        let headers = format!("idempotency-key: k\r\nauthorization: Bearer {caller}\r\n");
        with_headers("/orders", &headers, "tea")
    };
    let one = running.response(by("one")).await;
    let other = running.response(by("other")).await;
    assert_ne!(one.body, other.body);
    assert!(!other.is_replay());
    for (caller, first) in [("one", one), ("other", other)] {
        let retry = running.response(by(caller)).await;
        assert!(retry.is_replay());
        assert_eq!(retry.body, first.body);
    }
    assert_eq!(running.effects(), (2, 2));
}

pub(crate) async fn nested_route_is_another_request<F: Framework>() {
    let running = Running::start::<F>().await;
    let first = running.response(post_bytes("/eu/orders", "k", "tea")).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    for path in ["/us/orders", "/orders"] {
        let other = running.response(post_bytes(path, "k", "tea")).await;
        assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY, "{other:?}");
    }
    let retry = running.response(post_bytes("/eu/orders", "k", "tea")).await;
    assert!(retry.is_replay() && retry.body == first.body, "{retry:?}");
    assert_eq!(running.effects(), (1, 1));
}

pub(crate) async fn connection_serves_several_requests<F: Framework>() {
    let running = Running::start::<F>().await;
    let mut client = H1::connect(running.addr).await;
    for replay in [false, true, true] {
        client.send(post_bytes("/orders", "k", "tea")).await;
        let response = client.response().await.expect("a response");
        assert_eq!(response.is_replay(), replay, "{response:?}");
        assert_eq!(
            response.text(),
            "execution 1 of 3 bytes, generation Some(1)"
        );
    }
    assert_eq!(running.effects(), (1, 1));
}

/// A middleware of axum inside the layer is part of what is recorded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn middleware_inside_is_recorded() {
    let running = Running::start::<Axum08Builder>().await;
    for replay in [false, true] {
        let response = running.order("k", "tea").await;
        assert_eq!(response.is_replay(), replay);
        assert_eq!(response.header("x-stamp"), Some("inside"));
    }
    assert_eq!(running.effects(), (1, 1));
}

/// Salvo's adapter takes request and `Depot` away, and returns them only if the handler was called.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salvo_replay_loses_depot_of_outer_hoop() {
    let running = Running::start::<SalvoOuterHoop>().await;
    for (replay, depot) in [(false, "kept"), (true, "lost")] {
        let response = running.order("k", "tea").await;
        assert_eq!(response.is_replay(), replay);
        assert_eq!(response.header("x-depot"), Some(depot), "{response:?}");
    }
    assert_eq!(running.effects(), (1, 1));
}

/// Shows why the layer is outside of `nest` with axum 0.7: inside, both routes have the path `/orders`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn axum_07_layer_inside_nest_confuses_routes() {
    let running = Running::start::<Axum07InsideNest>().await;
    let first = running.response(post_bytes("/eu/orders", "k", "tea")).await;
    let other = running.response(post_bytes("/us/orders", "k", "tea")).await;
    assert!(other.is_replay() && other.body == first.body, "{other:?}");
    assert_eq!(running.effects(), (1, 1));
}
