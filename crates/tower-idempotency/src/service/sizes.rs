//! Memory of the futures of a request. The goal is less than 1 KB for each.

use std::{
    convert::Infallible,
    future::{Future, ready},
    pin::Pin,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::service_fn;
use tower_layer::Layer;
use tower_service::Service;

use crate::{Body, IdempotencyLayer, MemoryStore};

/// Bytes of [`ResponseFuture`](crate::ResponseFuture) around a boxed future. The server, and each layer above, moves it and
/// stores it in its own future, for requests without a key too.
const RESPONSE_FUTURE: usize = 128;

/// Bytes that a keyed request allocates when it arrives, without a subscriber for `debug`. The future of its execution has the
/// size of the largest stage. Each request in flight holds them, also one that waits for another request.
const EXECUTION: i64 = 704;

type Call = Pin<Box<dyn Future<Output = Result<Response<Full<Bytes>>, Infallible>> + Send>>;

fn respond(_: Request<Body<Full<Bytes>>>) -> Call {
    Box::pin(ready(Ok(Response::new(Full::default()))))
}

#[test]
fn request_futures_stay_small() {
    let mut service = IdempotencyLayer::new(MemoryStore::new()).layer(service_fn(respond));
    // The first request of the caller allocates its counters, so the fewest bytes of several requests count.
    let allocated = (0..10).map(|key| {
        let req = Request::post("/orders")
            .header("authorization", "Bearer 1")
            .header("idempotency-key", format!("key-{key}"));
        let req = req.body(Full::<Bytes>::default()).expect("a request");
        let mut future = None;
        let counted = allocation_counter::measure(|| future = Some(service.call(req)));
        let future = future.expect("a future");
        assert_eq!(format!("{future:?}"), "ResponseFuture::Execution");
        let size = size_of_val(&future);
        assert!(size <= RESPONSE_FUTURE, "{size}");
        counted.bytes_current
    });
    let allocated = allocated.min().expect("ten requests");
    assert!(allocated > 0 && allocated <= EXECUTION, "{allocated}");
}
