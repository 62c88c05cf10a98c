//! Overhead of a call without a retry, in nanoseconds above the same call of the inner service.
//!
//! Each round times every variant once, in turn, so that other load on the machine affects all variants alike. The result is
//! the median over the rounds. A request is a POST with five headers and a JSON body of 1 KiB; its construction is not
//! timed.
//!
//! ```sh
//! cargo bench -p tower-idempotency-client --bench overhead
//! ```

use std::{
    convert::Infallible,
    future::{Future, Ready, ready},
    hint::black_box,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, Service};
use tower_idempotency_client::{IdempotencyKeyLayer, Operation, RetryLayer};

const ROUNDS: usize = 301;
/// Calls of one variant in one round.
const CALLS: usize = 1000;

/// Service that responds at once.
#[derive(Clone)]
struct Server;

impl Service<Request<Full<Bytes>>> for Server {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Full<Bytes>>) -> Self::Future {
        black_box(&req);
        ready(Ok(Response::new(Full::default())))
    }
}

fn request(operation: Option<Operation>) -> Request<Full<Bytes>> {
    let mut body = Vec::with_capacity(2048);
    body.extend_from_slice(&[b'x'; 1024]);
    let mut req = Request::post("https://api.example.com/orders?x=1")
        .header("content-type", "application/json")
        .header("accept", "application/json")
        .header("authorization", "Bearer 0123456789abcdef0123456789abcdef")
        .header("user-agent", "application/1.0")
        .header("x-tenant", "tenant-17")
        .body(Full::new(Bytes::from(body)))
        .expect("a valid request");
    if let Some(operation) = operation {
        req.extensions_mut().insert(operation);
    }
    req
}

/// Returns the nanoseconds of one call.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52 nanoseconds")]
fn time<S>(service: &mut S, has_operation: bool, calls: usize) -> f64
where
    S: Service<Request<Full<Bytes>>>,
{
    let mut cx = Context::from_waker(Waker::noop());
    let operation = || has_operation.then(Operation::new);
    let requests: Vec<_> = (0..calls).map(|_| request(operation())).collect();
    let mut responses = Vec::with_capacity(calls);
    let begin = Instant::now();
    for req in requests {
        assert!(service.poll_ready(&mut cx).is_ready());
        let mut call = pin!(service.call(req));
        match call.as_mut().poll(&mut cx) {
            Poll::Ready(result) => responses.push(result),
            Poll::Pending => unreachable!("the server responds at once"),
        }
    }
    let elapsed = begin.elapsed();
    black_box(&responses);
    elapsed.as_nanos() as f64 / calls as f64
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    // The test runner passes no `--bench`, and only tries the benchmark.
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let (rounds, calls) = if is_bench { (ROUNDS, CALLS) } else { (1, 1) };
    let mut bare = Server;
    let mut retry = RetryLayer::new().layer(Server);
    let mut keys = IdempotencyKeyLayer::new().layer(Server);
    let mut times: [Vec<f64>; 6] = Default::default();
    for _ in 0..rounds {
        times[0].push(time(&mut bare, true, calls));
        times[1].push(time(&mut bare, false, calls));
        times[2].push(time(&mut retry, true, calls));
        times[3].push(time(&mut retry, false, calls));
        times[4].push(time(&mut keys, true, calls));
        times[5].push(time(&mut keys, false, calls));
    }
    let [bare, bare_empty, retry, retry_new, keys, keys_new] = times.map(median);
    println!(
        "{:<58}{bare:>8.0} ns",
        "inner service, request with an operation"
    );
    println!(
        "{:<58}{bare_empty:>8.0} ns",
        "inner service, request without an operation"
    );
    for (name, nanos) in [
        ("RetryLayer, operation of the caller", retry - bare),
        ("RetryLayer, operation of the layer", retry_new - bare_empty),
        ("IdempotencyKeyLayer, operation of the caller", keys - bare),
        (
            "IdempotencyKeyLayer, operation of the layer",
            keys_new - bare_empty,
        ),
    ] {
        println!("{name:<58}{nanos:>+8.0} ns");
    }
}
