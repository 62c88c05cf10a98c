//! Keys of failed executions: a handler that panics, an inner service that fails, a response body that breaks off.

use std::{fmt, io, sync::Arc, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use tests::{Effects, Scripted, Step, TestResponse, post};
use tokio::{sync::Semaphore, time::advance};
use tower::{
    BoxError, Layer, ServiceBuilder, ServiceExt, limit::GlobalConcurrencyLimitLayer, service_fn,
};
use tower_idempotency::{
    ExecutionFailure, IdempotencyLayer, Lease, MemoryStore, OrphanPolicy,
    conformance::{Fault, FaultInjector, Operation},
    run_once::{Outcome, WorkError},
};

/// A failure of an execution, after its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Panic,
    Error,
    BrokenBody,
}

const FAILURES: [Failure; 3] = [Failure::Panic, Failure::Error, Failure::BrokenBody];

/// The client's view of a response.
#[derive(Debug)]
enum ClientView {
    Response(TestResponse),
    Failed(Failure),
}

impl ClientView {
    fn response(self) -> TestResponse {
        match self {
            Self::Response(response) => response,
            Self::Failed(failure) => panic!("expected a response, found {failure:?}"),
        }
    }

    fn assert_failed(&self, expected: Failure) {
        assert!(
            matches!(self, Self::Failed(failure) if *failure == expected),
            "{self:?}"
        );
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A service whose executions all fail after their effect. It counts effects and takeovers.
#[derive(Clone)]
struct Failing {
    layer: IdempotencyLayer,
    failure: Failure,
    effects: Effects,
    takeovers: Effects,
}

impl Failing {
    fn new(layer: IdempotencyLayer, failure: Failure) -> Self {
        Self {
            layer,
            failure,
            effects: Effects::default(),
            takeovers: Effects::default(),
        }
    }

    async fn order(&self) -> ClientView {
        let Self {
            layer,
            failure,
            effects,
            takeovers,
        } = self.clone();
        let service = service_fn(move |req: Request<tower_idempotency::Body<Body>>| {
            let (effects, takeovers) = (effects.clone(), takeovers.clone());
            async move {
                effects.happen();
                if req
                    .extensions()
                    .get::<Lease>()
                    .is_some_and(Lease::is_takeover)
                {
                    takeovers.happen();
                }
                match failure {
                    Failure::Panic => panic!("after the effect"),
                    Failure::Error => Err(BoxError::from("after the effect")),
                    Failure::BrokenBody => {
                        let broken = Scripted::new([Step::from("ha"), Step::Fail]);
                        Ok::<Response, _>(Body::new(broken).into_response())
                    }
                }
            }
        });
        let service = layer.layer(service);
        let request = tokio::spawn(service.oneshot(post("/orders", "k", "order")));
        let res = match request.await {
            Ok(Ok(res)) => res,
            Ok(Err(_)) => return ClientView::Failed(Failure::Error),
            Err(_) => return ClientView::Failed(Failure::Panic),
        };
        let (head, body) = res.into_parts();
        match body.collect().await {
            Ok(body) => ClientView::Response(TestResponse {
                status: head.status,
                headers: head.headers,
                body: body.to_bytes(),
            }),
            Err(_) => ClientView::Failed(Failure::BrokenBody),
        }
    }
}

fn layer(policy: OrphanPolicy) -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new()).with_orphan_policy(policy)
}

/// Longer than the remaining time of an abandoned lease, and far shorter than a lease.
const MOMENT: Duration = Duration::from_millis(10);

// S-935, F-923
#[tokio::test(start_paused = true)]
async fn failed_execution_under_refuse_leaves_orphan() {
    for failure in FAILURES {
        let service = Failing::new(layer(OrphanPolicy::Refuse), failure);
        service.order().await.assert_failed(failure);
        for _ in 0..2 {
            advance(MOMENT).await;
            let retry = service.order().await.response();
            assert_eq!(retry.status, StatusCode::CONFLICT, "{failure}");
            assert_eq!(retry.code(), "outcome-unknown", "{failure}");
        }
        assert_eq!(service.effects.count(), 1, "{failure}");
    }
}

// S-935, F-923
#[tokio::test(start_paused = true)]
async fn error_of_load_shedding_leaves_orphan() {
    for is_converted in [true, false] {
        let (effects, permits) = (Effects::default(), Arc::new(Semaphore::new(0)));
        let counted = effects.clone();
        let service = ServiceBuilder::new()
            .layer(layer(OrphanPolicy::Refuse))
            .map_result(
                move |result: Result<Response, BoxError>| -> Result<Response, BoxError> {
                    match result {
                        Err(_) if is_converted => {
                            Ok(StatusCode::SERVICE_UNAVAILABLE.into_response())
                        }
                        result => result,
                    }
                },
            )
            .load_shed()
            .layer(GlobalConcurrencyLimitLayer::with_semaphore(Arc::clone(
                &permits,
            )))
            .service(service_fn(
                move |_req: Request<tower_idempotency::Body<Body>>| {
                    counted.happen();
                    std::future::ready(Ok::<Response, BoxError>(
                        StatusCode::CREATED.into_response(),
                    ))
                },
            ));
        let order = || post("/orders", "k", "order");
        let shed = service.clone().oneshot(order()).await;
        assert_eq!(shed.is_ok(), is_converted);
        permits.add_permits(1);
        advance(MOMENT).await;
        let retry = service.oneshot(order()).await.expect("a response");
        let expected = if is_converted { 201 } else { 409 };
        assert_eq!(retry.status().as_u16(), expected);
        assert_eq!(effects.count(), u64::from(is_converted));
    }
}

// S-936
#[tokio::test(start_paused = true)]
async fn failed_execution_under_takeover_releases_key() {
    for failure in FAILURES {
        let service = Failing::new(layer(OrphanPolicy::TakeOver), failure);
        for _ in 0..3 {
            service.order().await.assert_failed(failure);
        }
        assert_eq!(service.effects.count(), 3, "{failure}");
        assert_eq!(service.takeovers.count(), 0, "{failure}");
    }
}

// S-937
#[tokio::test(start_paused = true)]
async fn explicit_failure_setting_overrides_orphan_policy() {
    for failure in FAILURES {
        let refusing = layer(OrphanPolicy::Refuse);
        let released = [
            refusing.clone().with_failure(ExecutionFailure::Release),
            // The order of the setters does not matter.
            IdempotencyLayer::new(MemoryStore::new())
                .with_failure(ExecutionFailure::Release)
                .with_orphan_policy(OrphanPolicy::Refuse),
        ];
        for layer in released {
            let service = Failing::new(layer, failure);
            for _ in 0..3 {
                service.order().await.assert_failed(failure);
            }
            assert_eq!(service.effects.count(), 3, "{failure}");
        }
        let taken_over = layer(OrphanPolicy::TakeOver).with_failure(ExecutionFailure::Orphan);
        let service = Failing::new(taken_over, failure);
        for _ in 0..3 {
            service.order().await.assert_failed(failure);
            advance(MOMENT).await;
        }
        assert_eq!(service.effects.count(), 3, "{failure}");
        assert_eq!(service.takeovers.count(), 2, "{failure}");
    }
}

// S-938
#[tokio::test(start_paused = true)]
async fn failed_execution_can_need_attention() {
    for policy in [OrphanPolicy::TakeOver, OrphanPolicy::Refuse] {
        for (failure, code) in [
            (Failure::Panic, "handler-panicked"),
            (Failure::Error, "handler-failed"),
            (Failure::BrokenBody, "body-failed"),
        ] {
            let layer = layer(policy).with_failure(ExecutionFailure::NeedsAttention);
            let service = Failing::new(layer, failure);
            service.order().await.assert_failed(failure);
            advance(Duration::from_secs(60)).await;
            let retry = service.order().await.response();
            assert_eq!(retry.status, StatusCode::CONFLICT, "{failure}");
            assert_eq!(retry.code(), "outcome-unknown", "{failure}");
            assert!(retry.text().contains(code), "{failure}: {}", retry.text());
            assert_eq!(service.effects.count(), 1, "{failure}");
        }
    }
}

// S-939
#[tokio::test(start_paused = true)]
async fn orphan_is_left_although_store_fails() {
    for failure in FAILURES {
        let store = FaultInjector::new(MemoryStore::new());
        store.set_fault(Operation::Renew, Fault::CallLost);
        let layer = IdempotencyLayer::new(store.clone()).with_orphan_policy(OrphanPolicy::Refuse);
        let service = Failing::new(layer, failure);
        service.order().await.assert_failed(failure);
        let codes = [(Duration::ZERO, "in-progress"), (LEASE, "outcome-unknown")];
        for (delay, code) in codes {
            advance(delay).await;
            assert_eq!(service.order().await.response().code(), code, "{failure}");
        }
        assert_eq!(service.effects.count(), 1, "{failure}");
        assert_eq!(store.calls(Operation::Release), 0, "{failure}");
    }
}

const LEASE: Duration = Duration::from_secs(15);

// S-935, F-923
#[tokio::test(start_paused = true)]
async fn panicking_work_under_refuse_leaves_orphan() {
    let once = layer(OrphanPolicy::Refuse);
    let effects = Effects::default();
    for n in 0..3 {
        let (once, effects) = (once.clone(), effects.clone());
        let run = tokio::spawn(async move {
            let work = async move |_lease| -> Result<(), WorkError<io::Error>> {
                effects.happen();
                panic!("after the effect")
            };
            once.run_once("k", "order", work).await
        });
        match run.await {
            Err(error) => assert!(n == 0 && error.is_panic()),
            Ok(outcome) => {
                let outcome = outcome.expect("a store that works");
                assert!(
                    n > 0 && matches!(outcome, Outcome::Orphaned { .. }),
                    "{outcome:?}"
                );
            }
        }
        advance(MOMENT).await;
    }
    assert_eq!(effects.count(), 1);
}
