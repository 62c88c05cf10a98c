//! Operators resolve blocked keys while the layer is in use.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{Request, StatusCode};
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, bounded},
    created, post, send,
    wire::{Server, post_h1},
};
use tokio::{task::JoinHandle, time::sleep};
use tower_idempotency::{
    IdempotencyLayer, Lease, MemoryStore, NeedsAttention, OrphanPolicy, Principal, Ttl,
    inspect::{Entry, IdPrefix, Inspect, Query, Resolution, State},
    run_once::Outcome,
    store::{Acquired, Claim, KeyId, Store},
};

/// A service whose handler waits at a barrier. It responds with 201 in a takeover and with 200 in a first execution.
struct Service {
    app: Router,
    effects: Effects,
    store: MemoryStore,
    barrier: Barrier,
    layer: IdempotencyLayer,
    panics: Arc<AtomicBool>,
}

impl Service {
    fn new(policy: OrphanPolicy) -> Self {
        Self::with_policy(policy, |layer| layer)
    }

    fn with_policy(policy: OrphanPolicy, set: fn(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let store = MemoryStore::new().with_details();
        let layer = set(IdempotencyLayer::new(store.clone()).with_orphan_policy(policy));
        let barrier = Barrier::closed();
        let held = barrier.clone();
        let panics = Arc::<AtomicBool>::default();
        let panicking = Arc::clone(&panics);
        let (app, effects) = app(layer.clone(), move |n, req| {
            let lease = req.extensions().get::<Lease>().cloned();
            let (held, panics) = (held.clone(), panicking.load(Ordering::SeqCst));
            async move {
                assert!(!panics, "this test's handler panics");
                held.pass().await;
                let mut res = created(n);
                if !lease.is_some_and(|lease| lease.is_takeover()) {
                    *res.status_mut() = StatusCode::OK;
                }
                res
            }
        });
        Self {
            app,
            effects,
            store,
            barrier,
            layer,
            panics,
        }
    }

    fn request() -> Request<Body> {
        post("/orders", "k", "tea")
    }

    /// Sends a request whose handler is stopped at the barrier.
    async fn stuck(&self) -> JoinHandle<TestResponse> {
        let app = self.app.clone();
        let stuck = tokio::spawn(async move { send(&app, Self::request()).await });
        bounded(self.barrier.arrival()).await;
        stuck
    }

    /// Leaves an orphan: the handler panics, and the layer refuses orphans.
    async fn orphan(&self) {
        self.panics.store(true, Ordering::SeqCst);
        let app = self.app.clone();
        let sent = tokio::spawn(async move { send(&app, Self::request()).await });
        sent.await.expect_err("the handler panics");
        self.panics.store(false, Ordering::SeqCst);
        sleep(Duration::from_secs(1)).await;
        self.only(State::Orphaned).await;
    }

    async fn only(&self, state: State) -> Entry {
        let page = self.store.list(&Query::new(state)).await.expect("memory");
        let [entry] = <[Entry; 1]>::try_from(page.entries).expect("one entry");
        entry
    }

    async fn resolve(&self, state: State, resolution: &Resolution) {
        let entry = self.only(state).await;
        let resolved = self.store.resolve(entry.seen(), resolution).await;
        assert!(resolved.expect("memory").is_applied());
    }

    async fn send_request(&self) -> TestResponse {
        send(&self.app, Self::request()).await
    }
}

// S-991
#[tokio::test(start_paused = true)]
async fn allowed_retry_executes_refused_orphan_once() {
    let service = Service::new(OrphanPolicy::Refuse);
    service.orphan().await;
    service.barrier.open_for_good();
    assert_eq!(service.send_request().await.code(), "outcome-unknown");
    let before = service.effects.count();
    service.resolve(State::Orphaned, &Resolution::Retry).await;
    let retry = service.send_request().await;
    assert_eq!(retry.status, StatusCode::CREATED, "a takeover");
    assert!(service.send_request().await.is_replay());
    assert_eq!(service.effects.count(), before + 1);
}

// S-991
/// A rejection by the limits would use up the permission.
#[tokio::test(start_paused = true)]
async fn allowed_retry_executes_beyond_limits() {
    let set = |layer: IdempotencyLayer| layer.with_max_in_flight(1);
    let service = Service::with_policy(OrphanPolicy::Refuse, set);
    service.orphan().await;
    let app = service.app.clone();
    let other = tokio::spawn(async move { send(&app, post("/orders", "other", "tea")).await });
    bounded(service.barrier.arrival()).await;
    let refused = send(&service.app, post("/orders", "third", "tea")).await;
    assert_eq!(refused.code(), "caller-limit");
    service.resolve(State::Orphaned, &Resolution::Retry).await;
    let retry = service.stuck().await;
    service.barrier.open_for_good();
    let retry = bounded(retry).await.expect("no panic");
    assert_eq!(retry.status, StatusCode::CREATED, "a takeover");
    let other = bounded(other).await.expect("no panic");
    assert_eq!(other.status, StatusCode::OK);
    assert_eq!(service.layer.in_flight(), 0);
}

// S-992
/// The handler never ends. The operator breaks its lease, and the retry of its client executes.
#[tokio::test(start_paused = true)]
async fn broken_lease_lets_retry_execute() {
    let service = Service::new(OrphanPolicy::TakeOver);
    let stuck = service.stuck().await;
    sleep(Duration::from_secs(3600)).await;
    let overdue = Query::overdue(Duration::from_secs(600));
    let page = service.store.list(&overdue).await.expect("memory");
    assert_eq!(page.entries[0].age, Duration::from_secs(3600));
    service
        .resolve(State::InProgress, &Resolution::BreakLease)
        .await;

    let retry = service.stuck().await;
    service.barrier.release(1);
    // The first handler ends while the retry runs. Its response is not recorded.
    let first = bounded(stuck).await.expect("no panic");
    assert_eq!(first.code(), "outcome-unknown", "{}", first.text());
    service.barrier.open_for_good();
    let retry = bounded(retry).await.expect("no panic");
    assert_eq!(retry.status, StatusCode::CREATED, "a takeover");
    let replay = service.send_request().await;
    assert!(replay.is_replay() && replay.body == retry.body);
    assert_eq!(service.effects.count(), 2);
}

// S-993
/// A handler whose lease was broken ends before the retry that an operator has allowed. It neither stores its response nor
/// uses up the retry.
#[tokio::test(start_paused = true)]
async fn broken_lease_leaves_allowed_retry() {
    for retried in [false, true] {
        let service = Service::new(OrphanPolicy::Refuse);
        let stuck = service.stuck().await;
        service
            .resolve(State::InProgress, &Resolution::BreakLease)
            .await;
        if retried {
            service.resolve(State::Orphaned, &Resolution::Retry).await;
        }
        service.barrier.open_for_good();
        let first = bounded(stuck).await.expect("no panic");
        assert_eq!(first.code(), "outcome-unknown", "{}", first.text());
        // All background tasks of the layer have ended.
        sleep(Duration::from_secs(60)).await;
        let entry = service.only(State::Orphaned).await;
        assert_eq!((entry.generation(), entry.retry_allowed), (1, retried));
        let retry = service.send_request().await;
        if retried {
            assert_eq!(retry.status, StatusCode::CREATED, "a takeover");
        } else {
            assert_eq!(retry.code(), "outcome-unknown");
        }
    }
}

// S-994
/// The eight digits in the body of a refusal lead to the entry.
#[tokio::test(start_paused = true)]
async fn report_of_client_finds_entry() {
    let service = Service::new(OrphanPolicy::Refuse);
    service.orphan().await;
    let refused = service.send_request().await;
    let body: serde_json::Value = serde_json::from_slice(&refused.body).expect("JSON");
    let digits: IdPrefix = body["entry"].as_str().expect("digits").parse().expect("8");
    let query = Query::new(State::Orphaned).with_id_prefix(digits);
    let page = service.store.list(&query).await.expect("memory");
    let (head, _) = Service::request().into_parts();
    let id = service.layer.key_id(&head, b"").expect("valid");
    assert_eq!(page.entries.len(), 1);
    assert_eq!(Some(*page.entries[0].id()), id);
    assert_eq!(&*page.entries[0].operation, "POST /orders");
    assert!(
        page.entries[0]
            .owner
            .contains(&std::process::id().to_string())
            || page.entries[0].owner.is_empty()
    );
}

// S-995
#[tokio::test(start_paused = true)]
async fn every_rejection_of_key_names_entry() {
    let service = Service::new(OrphanPolicy::Refuse);
    let entry_of = |response: &TestResponse| {
        let body: serde_json::Value = serde_json::from_slice(&response.body).expect("JSON");
        body["entry"].as_str().map(str::to_owned)
    };
    let (head, _) = Service::request().into_parts();
    let id = service
        .layer
        .key_id(&head, b"")
        .expect("valid")
        .expect("a key");
    let expected = Some(id.to_string());
    let stuck = service.stuck().await;
    let in_progress = service.send_request().await;
    assert_eq!(in_progress.code(), "in-progress");
    assert_eq!(entry_of(&in_progress), expected);
    let reused = send(&service.app, post("/orders", "k", "coffee")).await;
    assert_eq!(reused.code(), "key-reused");
    assert_eq!(entry_of(&reused), expected);
    service
        .resolve(State::InProgress, &Resolution::BreakLease)
        .await;
    let orphaned = service.send_request().await;
    assert_eq!(entry_of(&orphaned), expected);
    let examine = NeedsAttention::new("examine");
    service
        .resolve(State::Orphaned, &Resolution::NeedsAttention(examine))
        .await;
    let unresolved = service.send_request().await;
    assert!(unresolved.text().contains(r#""reason":"examine""#));
    assert_eq!(entry_of(&unresolved), expected);
    service.barrier.open_for_good();
    let first = bounded(stuck).await.expect("no panic");
    assert_eq!(entry_of(&first), expected);
    // No entry: the key is malformed.
    let malformed = send(&service.app, post("/orders", "\"", "tea")).await;
    assert_eq!(
        (malformed.code().as_str(), entry_of(&malformed)),
        ("malformed-key", None)
    );
}

// S-996
#[tokio::test(start_paused = true)]
async fn operator_record_is_replayed() {
    let service = Service::new(OrphanPolicy::Refuse);
    service.orphan().await;
    let executed = service.effects.count();
    let mut res = http::Response::new(Bytes::from_static(b"paid by hand"));
    *res.status_mut() = StatusCode::ACCEPTED;
    let id = *service.only(State::Orphaned).await.id();
    let record = service.layer.encode_response_record(&id, &res);
    let retention = Ttl::from_secs(60);
    let complete = Resolution::Complete { record, retention };
    service.resolve(State::Orphaned, &complete).await;
    let replay = service.send_request().await;
    assert_eq!(
        (replay.status, replay.text()),
        (StatusCode::ACCEPTED, "paid by hand")
    );
    assert!(replay.is_replay());
    assert_eq!(service.effects.count(), executed);
}

/// The service returns 503 for a record that it cannot read, until an operator deletes the record.
#[tokio::test(start_paused = true)]
async fn unreadable_record_is_deleted_by_operator() {
    let service = Service::new(OrphanPolicy::TakeOver);
    service.barrier.open_for_good();
    assert_eq!(service.send_request().await.status, StatusCode::OK);
    let stored = service.only(State::Completed).await;
    let details = service.store.get(stored.id()).await.expect("memory");
    let fingerprint = details.and_then(|it| it.fingerprint).expect("readable");
    service
        .resolve(State::Completed, &Resolution::DeleteRecord)
        .await;
    let claim = Claim::new(*stored.id(), fingerprint).expect("randomness");
    service.store.acquire(&claim).await.expect("memory");
    let later = Bytes::from_static(b"\x02 of a later version");
    let lease = claim.lease_ref(1);
    let completed = service.store.complete(&lease, later, Ttl::MAX).await;
    completed.expect("held");

    assert_eq!(service.send_request().await.code(), "store-unavailable");
    let page = service.store.list(&Query::new(State::Completed)).await;
    let page = page.expect("memory");
    assert_eq!((page.entries.len(), page.unreadable()), (1, 1));
    let resolved = service
        .store
        .resolve(page.entries[0].seen(), &Resolution::DeleteRecord);
    assert!(resolved.await.expect("memory").is_applied());
    assert_eq!(service.send_request().await.status, StatusCode::OK);
    assert_eq!(service.effects.count(), 2);
}

/// Executes a request and returns the ID of its entry.
async fn executed(layer: &IdempotencyLayer, store: &MemoryStore, req: Request<Body>) -> KeyId {
    let (app, _) = app(layer.clone(), async |n, _| created(n));
    send(&app, req).await;
    let page = store
        .list(&Query::new(State::Completed))
        .await
        .expect("memory");
    let [entry] = <[Entry; 1]>::try_from(page.entries).expect("one entry");
    let deleted = store.resolve(entry.seen(), &Resolution::DeleteRecord).await;
    assert!(deleted.expect("memory").is_applied());
    *entry.id()
}

// S-997
#[tokio::test(start_paused = true)]
async fn key_and_principal_lead_to_entry() {
    #[derive(Clone)]
    struct Account(Vec<u8>);
    let account = || Principal::extension(|account: &Account| account.0.clone());
    let tenant = || Principal::header(http::HeaderName::from_static("x-tenant"));
    let cases: [(Principal, &[&[u8]]); 8] = [
        (Principal::credentials(), &[b"Bearer of-alice"]),
        (Principal::authorization(), &[b"Bearer of-alice"]),
        (Principal::cookie("session"), &[b"s-1"]),
        (Principal::unscoped(), &[]),
        (account(), &[b"alice"]),
        (tenant().and(account()), &[b"acme", b"alice"]),
        (Principal::cookie("absent").or(tenant()), &[b"acme"]),
        (account().or(Principal::authorization()), &[b"alice"]),
    ];
    for (at, (principal, values)) in cases.into_iter().enumerate() {
        let store = MemoryStore::new();
        let layer = IdempotencyLayer::new(store.clone())
            .with_namespace("payments")
            .with_secret(b"a secret of at least 16 bytes")
            .expect("long enough")
            .with_principal(principal);
        let req = || {
            let mut req = post("/orders", "k", "tea");
            let headers = req.headers_mut();
            headers.insert("authorization", "Bearer of-alice".parse().expect("valid"));
            headers.insert("cookie", "session=s-1".parse().expect("valid"));
            headers.insert("x-tenant", "acme".parse().expect("valid"));
            req.extensions_mut().insert(Account(b"alice".to_vec()));
            req
        };
        let id = executed(&layer, &store, req()).await;
        let (head, _) = req().into_parts();
        assert_eq!(
            layer.key_id(&head, b"tea").expect("valid"),
            Some(id),
            "{at}"
        );
        let ids = layer.key_ids("k", values).expect("a valid key");
        assert!(ids.contains(&id), "{at}: {ids:?}");
        let strangers = layer.key_ids("k", &[b"mallory", b"bob"]).expect("valid");
        assert!(at == 3 || !strangers.contains(&id), "{at}");
        let other = layer.key_ids("other", values).expect("a valid key");
        assert!(!other.contains(&id), "{at}");
    }
}

// S-997
/// The header of the operator has passed another pod of a gateway than the request.
#[tokio::test(start_paused = true)]
async fn names_of_certificate_lead_to_entry() {
    let name = http::HeaderName::from_static("x-forwarded-client-cert");
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let layer = layer.with_principal(Principal::header(name.clone()));
    let mut req = post("/orders", "k", "tea");
    let headers = req.headers_mut();
    headers.insert(name, "By=a;Hash=1;URI=alice".parse().expect("valid"));
    let id = executed(&layer, &store, req).await;
    for (cert, is_found) in [
        ("By=b;Hash=2;URI=alice", true),
        ("By=a;Hash=1;URI=bob", false),
    ] {
        let ids = layer.key_ids("k", &[cert.as_bytes()]).expect("a valid key");
        assert_eq!(ids == [id], is_found, "{cert}");
    }
}

#[tokio::test(start_paused = true)]
async fn anonymous_and_run_once_keys_lead_to_entry() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let id = executed(&layer, &store, post("/orders", "k", "tea")).await;
    assert_eq!(layer.key_ids("k", &[]).expect("valid"), [id]);

    let ran = layer.run_once("message-1", "v1", async |_| {
        Ok::<_, tower_idempotency::run_once::WorkError<()>>(7)
    });
    assert_eq!(ran.await.expect("memory"), Outcome::Executed(7));
    let found = store.get(&layer.run_once_key_id("message-1")).await;
    assert_eq!(
        found.expect("memory").map(|it| it.entry.state()),
        Some(State::Completed)
    );
    assert!(layer.key_ids("\n", &[]).is_err());
}

/// A client chooses the method of its request, whose record is a response.
#[tokio::test(start_paused = true)]
async fn method_does_not_mark_item() {
    let store = MemoryStore::new().with_details();
    let (app, effects) = app(IdempotencyLayer::new(store.clone()), async |n, _| {
        created(n)
    });
    let mut req = post("/orders", "k", "tea");
    *req.method_mut() = "item".parse().expect("a token");
    send(&app, req).await;
    assert_eq!(effects.count(), 1);
    let page = store.list(&Query::new(State::Completed)).await;
    let page = page.expect("memory");
    assert_eq!(&*page.entries[0].operation, "item /orders");
    assert!(!page.entries[0].is_of_run_once());
}

/// The store has no operations. A response would block such an entry, so operators see that its record is a value.
#[tokio::test(start_paused = true)]
async fn run_once_is_known_without_details() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let (app, _) = app(layer.clone(), async |n, _| created(n));
    send(&app, post("/orders", "k", "tea")).await;
    let page = store.list(&Query::new(State::Completed)).await;
    let page = page.expect("memory");
    assert_eq!(page.entries.len(), 1);
    assert_eq!(&*page.entries[0].operation, "");
    assert!(!page.entries[0].is_of_run_once());

    let work = NeedsAttention::new("refund-failed");
    let ran = layer.run_once("message-1", "v1", async |_| {
        Err::<u8, _>(tower_idempotency::run_once::WorkError::NeedsAttention(
            work,
            (),
        ))
    });
    drop(ran.await);
    let id = layer.run_once_key_id("message-1");
    let entry = store.get(&id).await.expect("memory").expect("a record");
    assert_eq!(entry.entry.state(), State::NeedsAttention);
    assert!(entry.entry.is_of_run_once());
    // A broken lease keeps the kind of the entry.
    let retry = store.resolve(entry.entry.seen(), &Resolution::Retry).await;
    let retry = retry.expect("memory");
    assert!(retry.entry().is_some_and(|entry| entry.is_of_run_once()));
    // So does a takeover whose claim has no operation.
    let claim = Claim::new(id, entry.fingerprint.expect("a readable entry"));
    let taken = store.acquire(&claim.expect("randomness")).await;
    let taken = taken.expect("memory");
    assert!(matches!(taken, Acquired::Granted { takeover: true, .. }));
    let entry = store.get(&id).await.expect("memory").expect("a lease");
    assert!(entry.entry.is_of_run_once());
}

// S-805
/// A handler that stores the ID with its effect, or logs it, leads an operator to the effect.
#[tokio::test]
async fn handler_knows_entry_that_operators_see() {
    let store = MemoryStore::new().with_details();
    let layer = IdempotencyLayer::new(store.clone());
    let (app, effects) = app(layer, async |_, req: Request<Body>| {
        let lease = req.extensions().get::<Lease>().expect("a lease");
        let id = lease.key_id();
        format!("{id} {}", id.to_hex())
    });
    let server = Server::start(app).await;
    let response = bounded(post_h1(server.addr(), "/orders", "k", "tea")).await;
    let page = store.list(&Query::new(State::Completed)).await;
    let [entry] = <[Entry; 1]>::try_from(page.expect("memory").entries).expect("one entry");
    let digits = entry.id().to_hex();
    assert_eq!(response.text(), format!("{} {digits}", &digits[..8]));
    assert_eq!(effects.count(), 1);
}
