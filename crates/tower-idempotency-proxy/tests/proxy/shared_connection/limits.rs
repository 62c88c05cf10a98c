//! The settings and the limits of connections with HTTP/2.

use std::sync::atomic::Ordering;

use tests::barrier::{Barrier, bounded, eventually};

use super::Payments;
use crate::harness::{ConnectionEnd, Script, Served, Upstream, config, exchange, post};

/// Number of requests after which the proxy opens another connection.
const MAX_REQUESTS: usize = 500;

/// The upstream refuses the streams above its limit, and their outcome would be unknown.
#[tokio::test]
async fn first_requests_respect_stream_limit() {
    const PAYMENTS: usize = 8;
    for (max_streams, connections) in [(1, 8), (3, 3), (100, 1)] {
        let upstream = Payments::new(Barrier::closed());
        let address = upstream.start_with(max_streams).await;
        let lines = "http2 = true\nconnect_timeout = \"60s\"";
        let proxy = Served::start(&config(address, lines, "")).await;
        let payments: Vec<_> = (0..PAYMENTS)
            .map(|number| {
                let payment = post("/pay", &format!("k{number}"), "1");
                tokio::spawn(exchange(proxy.address, payment))
            })
            .collect();
        eventually("all payments are sent", || {
            upstream.barrier.arrivals() == PAYMENTS
        })
        .await;
        assert_eq!(
            upstream.connections.load(Ordering::SeqCst),
            connections,
            "{max_streams}"
        );
        upstream.barrier.release(PAYMENTS);
        for payment in payments {
            let reply = bounded(payment).await.unwrap();
            assert_eq!(reply.status(), 201, "{max_streams}: {reply:?}");
        }
        assert_eq!(upstream.executed.load(Ordering::SeqCst), PAYMENTS);
    }
}

/// Before the settings of the upstream arrive, the proxy sends no byte of a request.
#[tokio::test]
async fn connection_without_settings_leaves_key_free() {
    for reply in ["", "HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let script = move |_| Script::reply(reply).then(ConnectionEnd::Close);
        let upstream = Upstream::start(script).await;
        let proxy = Served::start(&config(upstream.address, "http2 = true", "")).await;
        for _ in 0..2 {
            let reply = exchange(proxy.address, post("/pay", "k", "1")).await;
            assert!(reply.is_problem("upstream-unreachable"), "{reply:?}");
        }
    }
}

/// nginx ends a connection at its 1,000th request, and ignores the requests that are on the way.
#[tokio::test]
async fn connection_serves_limited_requests() {
    for path in ["/pay", "/open/pay"] {
        let upstream = Payments::new(Barrier::open());
        let proxy = Served::start(&config(upstream.start().await, "http2 = true", "")).await;
        for number in 0..=MAX_REQUESTS {
            let reply = exchange(proxy.address, post(path, &format!("k{number}"), "")).await;
            assert_eq!(reply.status(), 201, "{number}: {reply:?}");
            assert_eq!(
                upstream.connections.load(Ordering::SeqCst),
                1 + number / MAX_REQUESTS,
                "{path} {number}"
            );
        }
        assert_eq!(upstream.executed.load(Ordering::SeqCst), MAX_REQUESTS + 1);
    }
}
