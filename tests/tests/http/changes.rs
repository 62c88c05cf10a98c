//! Settings that change while clients retry: the process that receives the retry has other settings than the first one.

use std::{sync::Arc, time::Duration};

use axum::{Extension, body::Body};
use http::{HeaderName, Method, Request, StatusCode};
use tests::{TestResponse, app, created, creating, post, send};
use tokio::time::sleep;
use tower_idempotency::{
    ConcurrentRequests, FingerprintBy, IdempotencyLayer, KeyReuse, KeyScope, KeySyntax,
    MemoryStore, MissingKey, NeedsAttention, OrphanPolicy, Preset, Principal, StoreFailure, Ttl,
    Unrecordable,
    conformance::{Fault, FaultInjector, Operation},
};

// S-065
#[tokio::test(start_paused = true)]
async fn changed_id_discards_records() {
    const CHANGES: [Change; 16] = [
        Change("namespace", order, plain, |it| {
            plain(it).with_namespace("o")
        }),
        Change("secret", order, plain, |it| {
            plain(it).with_secret([7; 16]).expect("long enough")
        }),
        Change("principal", order, plain, |it| {
            plain(it).with_principal(Principal::unscoped())
        }),
        Change("to separate requests", order, plain, separate),
        Change("from separate requests", order, separate, plain),
        Change("their fingerprint", order, separate, |it| {
            separate(it).with_fingerprint(FingerprintBy::head_only())
        }),
        Change("header", order, plain, |it| plain(it).with_header(OTHER)),
        Change(
            "no more alias",
            aliased,
            |it| plain(it).with_header_alias(OTHER),
            plain,
        ),
        Change("key", order, plain, |it| {
            plain(it).with_key_from(KeyScope::EachCaller, |head| {
                Some(head.uri.path().to_owned())
            })
        }),
        Change("key syntax", quoted, plain, |it| {
            plain(it).with_key_syntax(KeySyntax::Verbatim)
        }),
        Change("methods", order, plain, |it| {
            plain(it).with_methods([Method::PUT])
        }),
        Change("skip", order, plain, |it| plain(it).with_skip(|_| true)),
        Change("no more derived keys", unkeyed, derived, plain),
        Change("fingerprint of derived keys", unkeyed, derived, |it| {
            derived(it).with_fingerprint(FingerprintBy::head_only())
        }),
        Change("preset", order, plain, |it| {
            IdempotencyLayer::with_preset(it, Preset::Idempo)
        }),
        Change("preset with endpoints", order, plain, acp),
    ];
    for change in CHANGES {
        let (response, effects) = change.retry_after_record().await;
        assert!(response.status.is_success(), "{change:?}");
        assert_eq!(effects, 2, "{change:?}, recorded");
        assert_eq!(
            change.retry_during_first().await.1,
            2,
            "{change:?}, in progress"
        );
        let effects = change.retry_after_attention().await;
        assert_eq!(effects, 2, "{change:?}, needs attention");
    }
}

// S-065, S-066
#[tokio::test(start_paused = true)]
async fn moved_route_discards_records_of_endpoint() {
    for (layer, status, executions) in [
        (acp as Make, StatusCode::CREATED, 2),
        (plain, StatusCode::UNPROCESSABLE_ENTITY, 1),
    ] {
        let (app, effects) = creating(layer(shared_store()));
        send(&app, post("/v1/pay", "order-1", "{}")).await;
        let retry = send(&app, post("/v2/pay", "order-1", "{}")).await;
        assert_eq!((retry.status, effects.count()), (status, executions));
    }
}

// S-066
#[tokio::test(start_paused = true)]
async fn changed_fingerprint_refuses_retries() {
    fn canonical(store: SharedStore) -> IdempotencyLayer {
        plain(store).with_fingerprint(FingerprintBy::canonical_json())
    }
    fn head(store: SharedStore) -> IdempotencyLayer {
        plain(store).with_fingerprint(FingerprintBy::head_only())
    }
    fn custom(store: SharedStore) -> IdempotencyLayer {
        plain(store).with_fingerprint(FingerprintBy::custom(|_, body| body.to_vec()))
    }
    for change in [
        Change("canonical", order, plain, canonical),
        Change("raw", order, canonical, plain),
        Change("head", order, plain, head),
        Change("custom", order, plain, custom),
    ] {
        for (response, effects) in [
            change.retry_after_record().await,
            change.retry_during_first().await,
            change.retry_after_orphan().await,
        ] {
            assert_eq!(
                (&*response.code(), effects),
                ("key-reused", 1),
                "{change:?}"
            );
        }
    }
    // Only JSON has a canonical form.
    let text = Change("canonical", text, plain, canonical);
    assert!(text.retry_after_record().await.0.is_replay());
}

// S-067
#[tokio::test(start_paused = true)]
async fn orphan_executes_if_any_process_takes_over() {
    fn refusing(store: SharedStore) -> IdempotencyLayer {
        plain(store).with_orphan_policy(OrphanPolicy::Refuse)
    }
    let (response, effects) = Change("to Refuse", order, plain, refusing)
        .retry_after_orphan()
        .await;
    assert_eq!((&*response.code(), effects), ("outcome-unknown", 1));
    let (_, effects) = Change("the old one", order, refusing, plain)
        .retry_after_orphan()
        .await;
    assert_eq!(effects, 2);
}

// S-068
#[tokio::test(start_paused = true)]
async fn other_settings_may_change_between_retries() {
    const CHANGES: [Change; 27] = [
        Change("alias", order, plain, |it| {
            plain(it).with_header_alias(OTHER)
        }),
        Change("key length", order, plain, |it| {
            plain(it).with_key_length(3..=16)
        }),
        Change("key check", order, plain, |it| {
            plain(it).with_key_check(|key| key == "order-1")
        }),
        Change("missing key", order, plain, |it| {
            plain(it).with_missing_key(MissingKey::Reject)
        }),
        Change("status of a mismatch", order, plain, |it| {
            let conflict = KeyReuse::Refuse(StatusCode::CONFLICT);
            plain(it).with_key_reuse(conflict).expect("one of 4xx")
        }),
        Change("in flight", order, plain, |it| {
            plain(it).with_concurrent_requests(ConcurrentRequests::TooManyRequests)
        }),
        Change("retry after", order, plain, |it| {
            plain(it).with_retry_after(SECOND)
        }),
        Change("waiters", order, plain, |it| {
            plain(it).with_max_waiters(1, 1)
        }),
        Change("lease", order, plain, |it| {
            plain(it).with_lease_ttl(Ttl::from_secs(1))
        }),
        Change("orphans", order, plain, |it| {
            plain(it).with_orphan_policy(OrphanPolicy::Refuse)
        }),
        Change("orphans kept", order, plain, |it| {
            plain(it).with_orphan_retention(Ttl::from_secs(1))
        }),
        Change("store timeout", order, plain, |it| {
            plain(it).with_store_timeout(SECOND)
        }),
        Change("store failure", order, plain, |it| {
            plain(it).with_store_failure(StoreFailure::DangerouslyExecuteUnprotected)
        }),
        Change("request limit", order, plain, |it| {
            plain(it).with_request_limit(100)
        }),
        Change("body timeout", order, plain, |it| {
            plain(it).with_body_timeout(SECOND)
        }),
        Change("response limit", order, plain, |it| {
            plain(it).with_response_limit(0)
        }),
        Change("collect timeout", order, plain, |it| {
            plain(it).with_collect_timeout(SECOND)
        }),
        // The record is small. A lower limit prevents replays of large ones: S-984.
        Change("bounds", order, plain, |it| {
            plain(it)
                .with_max_in_flight(9)
                .with_max_buffered(9000, 9000)
        }),
        Change("recorded", order, plain, |it| {
            plain(it).with_recorded_statuses(|_| false)
        }),
        Change("unrecordable", order, plain, |it| {
            plain(it).with_unrecordable(Unrecordable::Release)
        }),
        Change("retention", order, plain, |it| {
            plain(it).with_retention(Ttl::from_secs(1))
        }),
        Change("max retention", order, plain, |it| {
            plain(it).with_max_retention(Ttl::from_secs(1))
        }),
        Change("replayed headers", order, plain, |it| {
            plain(it).with_replayed_headers(|_| false)
        }),
        Change("compression", order, plain, |it| {
            plain(it).with_compression_above(0)
        }),
        Change("refusals", order, plain, |it| {
            plain(it)
                .with_described_by("https://example.com")
                .expect("a URL")
        }),
        Change(
            "preset ietf",
            quoted,
            |it| IdempotencyLayer::with_preset(it, Preset::Ietf),
            plain,
        ),
        Change(
            "preset stripe",
            order,
            |it| IdempotencyLayer::with_preset(it, Preset::Stripe),
            plain,
        ),
    ];
    for change in CHANGES {
        let (response, effects) = change.retry_after_record().await;
        assert!(response.is_replay(), "{change:?}: {response:?}");
        assert_eq!(response.header("location"), Some("/orders/1"), "{change:?}");
        assert_eq!(effects, 1, "{change:?}");
        let (response, effects) = change.retry_during_first().await;
        assert_eq!(
            (&*response.code(), effects),
            ("in-progress", 1),
            "{change:?}"
        );
        assert_eq!(change.retry_after_attention().await, 1, "{change:?}");
    }
}

/// A change: its name, a request, and the layers of two processes. The first one receives the request, the second one
/// its retry.
struct Change(&'static str, fn() -> Request<Body>, Make, Make);

type Make = fn(SharedStore) -> IdempotencyLayer;
type SharedStore = Arc<FaultInjector<MemoryStore>>;

impl Change {
    /// Returns the response to a retry after the first response was recorded, and the number of executions.
    async fn retry_after_record(&self) -> (TestResponse, u64) {
        self.retry(shared_store(), TAKES * 2).await
    }

    /// Returns the same for a retry while the first request is in progress.
    async fn retry_during_first(&self) -> (TestResponse, u64) {
        self.retry(shared_store(), TAKES / 2).await
    }

    /// Returns the same for a retry after the lease of the first request expired without an outcome.
    async fn retry_after_orphan(&self) -> (TestResponse, u64) {
        let store = shared_store();
        store.set_fault(Operation::Complete, Fault::CallLost);
        self.retry(store, Duration::from_secs(60)).await
    }

    /// Returns the number of executions if the first one needs attention before the retry.
    async fn retry_after_attention(&self) -> u64 {
        let Self(_, req, old, new) = self;
        let store = shared_store();
        let (old, first) = app(old(Arc::clone(&store)), async |n, _req| {
            (Extension(NeedsAttention::new("charged")), created(n))
        });
        let (new, second) = creating(new(store));
        send(&old, req()).await;
        send(&new, req()).await;
        first.count() + second.count()
    }

    async fn retry(&self, store: SharedStore, later: Duration) -> (TestResponse, u64) {
        let Self(_, req, old, new) = self;
        let work = async |n, _req| {
            sleep(TAKES).await;
            created(n)
        };
        let (old, first) = app(old(Arc::clone(&store)), work);
        let (new, second) = app(new(Arc::clone(&store)), work);
        let req = *req;
        let ended = tokio::spawn(async move { send(&old, req()).await });
        sleep(later).await;
        store.clear_faults();
        let response = send(&new, req()).await;
        ended.await.expect("an answer");
        (response, first.count() + second.count())
    }
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

fn shared_store() -> SharedStore {
    Arc::new(FaultInjector::new(MemoryStore::new()))
}

fn plain(store: SharedStore) -> IdempotencyLayer {
    IdempotencyLayer::new(store)
}

fn separate(store: SharedStore) -> IdempotencyLayer {
    let separate = plain(store).with_key_reuse(KeyReuse::Separate);
    separate.expect("no status")
}

fn acp(store: SharedStore) -> IdempotencyLayer {
    IdempotencyLayer::with_preset(store, Preset::Acp)
}

fn derived(store: SharedStore) -> IdempotencyLayer {
    plain(store).with_missing_key(MissingKey::Derive)
}

fn order() -> Request<Body> {
    let mut req = post("/orders", "order-1", r#"{"tea": 1}"#);
    let json = "application/json".parse().expect("a value");
    req.headers_mut().insert("content-type", json);
    req.headers_mut()
        .insert("authorization", "a".parse().expect("a value"));
    req
}

fn quoted() -> Request<Body> {
    post("/orders", "\"order-1\"", "tea")
}

fn text() -> Request<Body> {
    post("/orders", "order-1", "tea")
}

fn unkeyed() -> Request<Body> {
    let mut req = order();
    req.headers_mut().remove("idempotency-key");
    req
}

fn aliased() -> Request<Body> {
    let mut req = unkeyed();
    req.headers_mut()
        .insert(OTHER, "order-1".parse().expect("a value"));
    req
}

const OTHER: HeaderName = HeaderName::from_static("x-other");
const TAKES: Duration = Duration::from_secs(4);
const SECOND: Duration = Duration::from_secs(1);
