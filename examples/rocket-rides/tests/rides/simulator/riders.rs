//! The clients.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use tests::{HANG_GUARD, TestResponse, random::Random, server_process::ServerProcess};
use tokio::{task::JoinSet, time::sleep};

use super::strikes::Striking;
use crate::processes::{Processes, book};

/// A client that wants one ride.
pub(super) struct Rider {
    pub(super) n: usize,
    /// The responses that were outcomes.
    pub(super) responses: Vec<TestResponse>,
    /// The number of requests.
    pub(super) requests: usize,
    /// `true` if the rider stopped before it had an outcome.
    pub(super) gave_up: bool,
    random: Random,
}

/// Runs riders, a few at a time, until each has an outcome or gave up. There are `rides` of them. More riders run until
/// the strikes [had both kinds](Striking::has_both_kinds), for ten minutes at most.
pub(super) async fn ride(
    processes: &Processes,
    rides: usize,
    seed: u64,
    striking: &Arc<Striking>,
) -> Vec<Rider> {
    let deadline = Instant::now() + HANG_GUARD;
    let next = Arc::new(AtomicUsize::new(0));
    let mut at_once = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (next, services) = (Arc::clone(&next), processes.services.clone());
        let striking = Arc::clone(striking);
        let goes_on = move |n| n < rides || !striking.has_both_kinds() && Instant::now() < deadline;
        at_once.spawn(async move {
            let mut riders = Vec::new();
            while let Some(n) = Some(next.fetch_add(1, SeqCst)).filter(|n| goes_on(*n)) {
                let mut rider = Rider::new(n, seed);
                // A quarter of the riders sends one request only.
                let patience = match rider.random.below(4) {
                    0 => Duration::ZERO,
                    _ => Duration::from_secs(300),
                };
                rider.ride(&services, patience).await;
                riders.push(rider);
            }
            riders
        });
    }
    let mut riders: Vec<_> = at_once.join_all().await.into_iter().flatten().collect();
    riders.sort_by_key(|rider| rider.n);
    riders
}

/// Retries once for every rider, until the rider gets a response.
pub(super) async fn retry_unfinished(processes: &Processes, riders: &mut [Rider]) {
    for rider in riders {
        rider.ride(&processes.services, HANG_GUARD).await;
    }
}

impl Rider {
    fn new(n: usize, seed: u64) -> Self {
        Self {
            n,
            responses: Vec::new(),
            requests: 0,
            gave_up: false,
            random: Random(seed ^ (n as u64) << 32),
        }
    }

    pub(super) fn name(&self) -> String {
        format!("rider-{}", self.n)
    }

    /// Returns the rider's card. One card in eight is declined.
    pub(super) fn card(&self) -> String {
        match self.n % 8 {
            7 => format!("declined-{}", self.n),
            _ => format!("card-{}", self.n),
        }
    }

    pub(super) fn is_declined(&self) -> bool {
        self.card().starts_with("declined")
    }

    async fn ride(&mut self, services: &[Arc<ServerProcess>], patience: Duration) {
        let deadline = Instant::now() + patience;
        loop {
            self.requests += 1;
            let service = &services[self.random.below(services.len())];
            match self.request_ride(service).await {
                Some(response) if is_outcome(&response) => {
                    self.responses.push(response);
                    return;
                }
                Some(response) if !is_retryable(&response) => {
                    panic!("{} received {response:?}", self.name())
                }
                // The service does not run, has not responded, or has requested a retry.
                Some(_) | None => {}
            }
            if Instant::now() >= deadline {
                assert!(patience.is_zero(), "{} has no response", self.name());
                self.gave_up = true;
                return;
            }
            sleep(self.random.around(Duration::from_millis(150))).await;
        }
    }

    async fn request_ride(&self, service: &ServerProcess) -> Option<TestResponse> {
        book(
            service,
            &format!("ride-{}", self.n),
            &self.name(),
            &self.card(),
        )
        .await
    }
}

fn is_outcome(response: &TestResponse) -> bool {
    [StatusCode::CREATED, StatusCode::PAYMENT_REQUIRED].contains(&response.status)
}

fn is_retryable(response: &TestResponse) -> bool {
    [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE].contains(&response.status)
}

const AT_ONCE: usize = 8;
