//! Many clients and a server that is down for a minute.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::{task::JoinSet, time::Instant};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency_client::{Budget, RetryLayer};

use crate::harness::post;

const MINUTE: Duration = Duration::from_secs(60);

/// Server that is down for the first minute, and counts the attempts of each second.
#[derive(Clone)]
struct Outage {
    begin: Instant,
    attempts: Arc<Vec<AtomicU32>>,
}

impl Service<Request<Full<Bytes>>> for Outage {
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        let second = usize::try_from(self.begin.elapsed().as_secs()).unwrap();
        self.attempts[second].fetch_add(1, Ordering::Relaxed);
        std::future::ready(if self.begin.elapsed() < MINUTE {
            Err(io::ErrorKind::ConnectionReset.into())
        } else {
            Ok(Response::new(Full::default()))
        })
    }
}

/// Lets 1,000 clients send a request every two seconds, for this number of seconds. Returns requests and attempts of each
/// second.
async fn storm(layer: &RetryLayer, seconds: u64) -> Vec<(u32, u32)> {
    let begin = Instant::now();
    let counters = || {
        Arc::new(
            (0..seconds + 90)
                .map(|_| AtomicU32::new(0))
                .collect::<Vec<_>>(),
        )
    };
    let (requests, attempts) = (counters(), counters());
    let server = Outage {
        begin,
        attempts: attempts.clone(),
    };
    let mut clients = JoinSet::new();
    for client in 0..1000 {
        let service = layer.layer(server.clone());
        let requests = requests.clone();
        clients.spawn(async move {
            let mut next = begin + Duration::from_millis(2 * client);
            while next < begin + Duration::from_secs(seconds) {
                tokio::time::sleep_until(next).await;
                let second = usize::try_from(begin.elapsed().as_secs()).unwrap();
                requests[second].fetch_add(1, Ordering::Relaxed);
                let _ = service.clone().oneshot(post("one espresso")).await;
                next += Duration::from_secs(2);
            }
        });
    }
    clients.join_all().await;
    let counts = |counters: &[AtomicU32]| -> Vec<u32> {
        counters
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    };
    counts(&requests)
        .into_iter()
        .zip(counts(&attempts))
        .collect()
}

fn ratio(seconds: &[(u32, u32)]) -> f64 {
    let requests: u32 = seconds.iter().map(|(requests, _)| requests).sum();
    let attempts: u32 = seconds.iter().map(|(_, attempts)| attempts).sum();
    f64::from(attempts) / f64::from(requests)
}

#[tokio::test(start_paused = true)]
async fn budget_bounds_attempts_while_server_is_down() {
    let layer = RetryLayer::new().with_jitter_seed(7);
    let seconds = storm(&layer, 90).await;
    // 500 tokens are 35 retries of the 500 requests of the first second.
    let first = ratio(&seconds[..1]);
    assert!(first > 1.0 && first < 1.1, "{first}");
    let outage = ratio(&seconds[2..60]);
    assert!(outage <= 1.1, "{outage} attempts per request");
    let after = ratio(&seconds[62..88]);
    assert!((0.99..1.01).contains(&after), "{after}");
    // The responses have filled the budget again.
    let seconds = storm(&layer, 1).await;
    let again: u32 = seconds.iter().map(|(_, attempts)| attempts).sum();
    assert_eq!(again, 500 + 35);
}

/// The same storm without a budget, which shows what the budget prevents.
#[tokio::test(start_paused = true)]
async fn storm_without_budget_triples_load() {
    let layer = RetryLayer::new()
        .with_budget(Budget::new(u32::MAX))
        .with_jitter_seed(7);
    let outage = ratio(&storm(&layer, 60).await[2..50]);
    assert!(
        (2.9..3.1).contains(&outage),
        "{outage} attempts per request"
    );
}
