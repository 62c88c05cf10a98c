//! Two providers: a retry goes to the one that had the first attempt.

use std::{
    collections::HashSet,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{BoxError, Layer, ServiceExt, service_fn, steer::Steer, util::BoxCloneService};
use tower_idempotency_client::{Operation, Outcome, ProviderChoice, RetryLayer};

use crate::harness::post;

type Provider = BoxCloneService<Request<Full<Bytes>>, Response<Full<Bytes>>, BoxError>;

/// Effects of one provider, which executes each key once.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<HashSet<String>>>);

impl Effects {
    /// Returns a provider. It breaks its first connections after their effect.
    fn provider(&self, mut failures: u32) -> Provider {
        let effects = self.0.clone();
        let service = service_fn(move |req: Request<Full<Bytes>>| {
            let key = req.headers()["idempotency-key"]
                .to_str()
                .unwrap()
                .to_owned();
            effects.lock().unwrap().insert(key);
            let result = if failures > 0 {
                failures -= 1;
                Err(BoxError::from(io::Error::from(
                    io::ErrorKind::ConnectionReset,
                )))
            } else {
                Ok(Response::new(Full::default()))
            };
            std::future::ready(result)
        });
        // One state for all clones.
        let service = Arc::new(Mutex::new(service));
        BoxCloneService::new(service_fn(move |req| {
            tower::Service::call(&mut *service.lock().unwrap(), req)
        }))
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// Sends one operation through a picker. Returns the effects of both providers.
async fn effects(
    operation: &Operation,
    pick: impl Fn(&Request<Full<Bytes>>) -> u64 + Clone + Send + 'static,
) -> (usize, usize) {
    let (one, other) = (Effects::default(), Effects::default());
    let providers = [one.provider(2), other.provider(0)];
    let picker = Steer::new(providers, move |req: &Request<_>, _: &[_]| {
        usize::try_from(pick(req)).unwrap()
    });
    let mut req = post("one espresso");
    req.extensions_mut().insert(operation.clone());
    let res = RetryLayer::new().layer(picker).oneshot(req).await.unwrap();
    assert_eq!(res.status(), 200);
    assert_eq!(operation.outcome(), Outcome::Definite);
    (one.count(), other.count())
}

#[tokio::test(start_paused = true)]
async fn second_provider_gets_no_request() {
    let next = Arc::new(AtomicU64::new(0));
    let pick = move || next.fetch_add(1, Ordering::Relaxed) % 2;
    let operation = Operation::new();
    let sticky = {
        let pick = pick.clone();
        move |req: &Request<_>| ProviderChoice::of(req).choose(&pick)
    };
    assert_eq!(effects(&operation, sticky).await, (1, 0));
    assert_eq!(operation.attempts(), 3);
    assert_eq!(operation.provider(), Some(0));
    // Without it, the effect happens at both providers.
    pick();
    assert_eq!(effects(&Operation::new(), move |_| pick()).await, (1, 1));
}

/// Operation that another process sent to the second provider before it ended.
#[tokio::test(start_paused = true)]
async fn restored_provider_gets_retry() {
    let operation = Operation::new().with_provider(1);
    let pick = |req: &Request<_>| ProviderChoice::of(req).choose(|| 0);
    assert_eq!(effects(&operation, pick).await, (0, 1));
}
