//! Shares of callers in the limits of a layer: one caller cannot use up a limit at the cost of the others.

use std::{num::NonZeroU32, time::Duration};

use axum::{Router, body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode};
use http_body_util::BodyExt;
use tests::{
    Effects, Scripted, Step, TestResponse, app,
    barrier::{Barrier, bounded},
    creating, noise, post, send,
};
use tokio::{task::JoinHandle, time::sleep};
use tower::ServiceExt;
use tower_idempotency::{
    ConcurrentRequests, IdempotencyLayer, MemoryStore, OrphanPolicy, Principal, StoreFailure,
    conformance::FaultInjector,
};

use crate::world::World;

/// Returns a POST with the credential of this caller.
fn by(caller: &str, key: &str, body: impl Into<Body>) -> Request<Body> {
    let mut req = post("/orders", key, body);
    let credential = HeaderValue::from_str(&format!("Bearer {caller}")).expect("a header");
    req.headers_mut().insert("authorization", credential);
    req
}

fn assert_caller_limit(response: &TestResponse) {
    assert_eq!(response.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.code(), "caller-limit");
    assert_eq!(response.header("retry-after"), Some("1"));
    assert!(response.is_retryable());
    assert!(!response.is_replay());
}

impl World {
    /// Sends a request in a task, and lets it run as far as it can.
    async fn start(&self, req: Request<Body>) -> JoinHandle<TestResponse> {
        let app = self.app.clone();
        let sent = tokio::spawn(async move { send(&app, req).await });
        sleep(Duration::from_millis(1)).await;
        sent
    }

    /// Starts this number of executions of one caller.
    async fn execute(&self, caller: &str, number: usize) -> Vec<JoinHandle<TestResponse>> {
        let mut running = Vec::new();
        for n in 0..number {
            let started = self.start(by(caller, &format!("{caller}-{n}"), "")).await;
            assert!(!started.is_finished(), "{caller} {n}");
            running.push(started);
        }
        running
    }

    async fn finish(&self, running: impl IntoIterator<Item = JoinHandle<TestResponse>>) {
        self.barrier.open_for_good();
        for running in running {
            let response = running.await.expect("no panic");
            assert_eq!(response.status, StatusCode::OK);
        }
        assert_eq!(self.layer.in_flight(), 0);
    }
}

// S-970
#[tokio::test(start_paused = true)]
async fn executions_of_one_caller_leave_permits_to_others() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_in_flight(16));
        let mut running = world.execute("alice", 12).await;
        for n in 12..20 {
            let refused = send(&world.app, by("alice", &format!("alice-{n}"), "")).await;
            assert_caller_limit(&refused);
        }
        running.extend(world.execute("bob", 2).await);
        assert_caller_limit(&send(&world.app, by("bob", "third", "")).await);
        running.extend(world.execute("carol", 2).await);
        let refused = send(&world.app, by("dave", "k", "")).await;
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.code(), "overloaded");
        // All callers use the limit up, and this one holds more than its share.
        assert_caller_limit(&send(&world.app, by("alice", "alice-20", "")).await);
        assert_eq!(world.effects.count(), 16);
        world.finish(running).await;
    })
    .await;
}

// S-971
#[tokio::test(start_paused = true)]
async fn requests_without_principal_count_as_one_caller() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_in_flight(16));
        let mut running = Vec::new();
        for n in 0..12 {
            running.push(world.start(post("/orders", &n.to_string(), "")).await);
        }
        assert_caller_limit(&send(&world.app, post("/orders", "12", "")).await);
        running.extend(world.execute("alice", 2).await);
        assert_eq!(world.effects.count(), 14);
        world.finish(running).await;
    })
    .await;
}

// S-972
#[tokio::test(start_paused = true)]
async fn duplicates_need_no_execution_permit() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_in_flight(8));
        let recorded = |body: &'static str| {
            let mut req = by("alice", "recorded", body);
            *req.uri_mut() = "/fast".parse().expect("a path");
            req
        };
        assert_eq!(send(&world.app, recorded("a")).await.status, StatusCode::OK);
        let mut running = world.execute("alice", 6).await;
        running.extend(world.execute("bob", 1).await);
        running.extend(world.execute("carol", 1).await);
        assert_caller_limit(&send(&world.app, by("alice", "fresh", "")).await);

        assert!(send(&world.app, recorded("a")).await.is_replay());
        assert_eq!(send(&world.app, recorded("b")).await.code(), "key-reused");
        let duplicate = send(&world.app, by("alice", "alice-0", "")).await;
        assert_eq!(duplicate.code(), "in-progress");
        assert_eq!(world.effects.count(), 9);
        world.finish(running).await;
    })
    .await;
}

// S-973
#[tokio::test(start_paused = true)]
async fn refusal_for_share_executes_and_records_nothing() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_in_flight(16));
        let running = world.execute("alice", 12).await;
        let entries = world.store.inner().len();
        for _ in 0..3 {
            assert_caller_limit(&send(&world.app, by("alice", "later", "")).await);
        }
        assert_eq!(world.store.inner().len(), entries);
        assert_eq!(world.effects.count(), 12);
        world.finish(running).await;
        for replay in [false, true] {
            let response = send(&world.app, by("alice", "later", "")).await;
            assert_eq!(response.status, StatusCode::OK);
            assert_eq!(response.is_replay(), replay);
        }
        assert_eq!(world.effects.count(), 13);
    })
    .await;
}

// S-973
/// This store grants the lease at once. Another function then releases it.
#[tokio::test(start_paused = true)]
async fn refusal_leaves_no_lease_in_memory_store() {
    bounded(async {
        let (store, barrier) = (MemoryStore::new(), Barrier::closed());
        let layer = IdempotencyLayer::new(store.clone()).with_max_in_flight(1);
        let (app, effects) = app(layer, {
            let barrier = barrier.clone();
            move |_, _| {
                let barrier = barrier.clone();
                async move { barrier.pass().await }
            }
        });
        let running = tokio::spawn({
            let app = app.clone();
            async move { send(&app, by("alice", "first", "")).await }
        });
        barrier.arrival().await;
        let refused = send(&app, by("bob", "second", "")).await;
        assert_eq!(refused.code(), "overloaded");
        assert_eq!((store.len(), effects.count()), (1, 1));

        barrier.open_for_good();
        assert_eq!(running.await.expect("no panic").status, StatusCode::OK);
        assert!(!send(&app, by("bob", "second", "")).await.is_replay());
        assert_eq!((store.len(), effects.count()), (2, 2));
    })
    .await;
}

// S-974
/// Requests whose bodies never arrive take no permits of executions.
#[tokio::test(start_paused = true)]
async fn unread_bodies_have_limit_of_their_own() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_in_flight(16));
        let mut stalled = Vec::new();
        for n in 0..20 {
            let body = Body::new(Scripted::new([Step::Wait(Duration::from_secs(20))]));
            stalled.push(world.start(by("mallory", &n.to_string(), body)).await);
        }
        assert_eq!(world.layer.in_flight(), 12);
        let refused = stalled.iter().filter(|stalled| stalled.is_finished());
        assert_eq!(refused.count(), 8);
        let mut running = world.execute("alice", 12).await;
        running.extend(world.execute("bob", 2).await);
        assert_eq!(world.effects.count(), 14);
        for stalled in stalled {
            stalled.abort();
        }
        sleep(Duration::from_millis(1)).await;
        world.finish(running).await;
    })
    .await;
}

// S-975
#[tokio::test(start_paused = true)]
async fn waits_of_one_caller_leave_permits_to_others() {
    bounded(async {
        let wait = ConcurrentRequests::Wait(Duration::from_secs(20));
        let world = World::with_closed_barrier(|layer| {
            layer
                .with_concurrent_requests(wait)
                .with_max_waiters(100, 8)
        });
        let mut running = world.execute("alice", 1).await;
        let mut refused = 0;
        for _ in 0..8 {
            let duplicate = world.start(by("alice", "alice-0", "")).await;
            if duplicate.is_finished() {
                assert_eq!(duplicate.await.expect("no panic").code(), "in-progress");
                refused += 1;
            } else {
                running.push(duplicate);
            }
        }
        assert_eq!(refused, 2);
        running.extend(world.execute("bob", 1).await);
        let waiting = world.start(by("bob", "bob-0", "")).await;
        assert!(!waiting.is_finished());
        running.push(waiting);
        world.finish(running).await;
        assert_eq!(world.effects.count(), 2);
    })
    .await;
}

// S-976
#[tokio::test(start_paused = true)]
async fn refused_bytes_do_not_count() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_buffered(100_000, 100_000));
        world.barrier.open_for_good();
        let stalled = |length: usize| {
            let data = Step::Data(vec![b'x'; length].into());
            Body::new(Scripted::new([data, Step::Wait(Duration::from_secs(20))]))
        };
        let small = world.start(by("alice", "small", stalled(10))).await;
        let large = world.start(by("alice", "large", stalled(70_000))).await;
        for n in 0..20 {
            let refused = send(&world.app, by("alice", &n.to_string(), vec![b'x'; 20_000])).await;
            assert_caller_limit(&refused);
        }
        large.abort();
        sleep(Duration::from_millis(1)).await;
        let of_bob = world.start(by("bob", "large", stalled(74_000))).await;
        // Alice holds little again, and can therefore use the last quarter.
        let response = send(&world.app, by("alice", "again", vec![b'x'; 12_000])).await;
        assert_eq!(response.status, StatusCode::OK);
        assert!(!small.is_finished() && !of_bob.is_finished());
    })
    .await;
}

// S-980
/// With this limit, 64 bytes do not count. Bodies that count are not uncounted when they are complete.
#[tokio::test(start_paused = true)]
async fn small_bodies_count_until_handlers_end() {
    bounded(async {
        let world = World::with_closed_barrier(|layer| layer.with_max_buffered(64 << 10, 64 << 10));
        let mut running = Vec::new();
        for n in 0..20 {
            let body = vec![b'x'; 4 << 10];
            running.push(world.start(by(&format!("caller {n}"), "k", body)).await);
        }
        assert_eq!(world.effects.count(), 16);
        running.retain(|sent| !sent.is_finished());
        assert_eq!(running.len(), 16);
        world.finish(running).await;
    })
    .await;
}

// ---- Replays ----

/// Length of a response that counts until its client has read it.
const LONG: usize = 20_000;

/// Returns a service whose responses have the length [`LONG`]. Each execution returns another one.
fn long_responses(layer: IdempotencyLayer) -> (Router, Effects) {
    app(layer, async |n, _| {
        let headers = [("x-idempo-persist-for-seconds", "10")];
        let mut body = noise(LONG);
        body[..8].copy_from_slice(&n.to_le_bytes());
        (headers, body)
    })
}

/// Sends a request, and does not read the body of its response.
async fn unread(app: &Router, req: Request<Body>) -> Response {
    app.clone().oneshot(req).await.expect("infallible")
}

// F-954, S-977
#[tokio::test(start_paused = true)]
async fn unread_replays_count_against_limit() {
    bounded(async {
        let layer = IdempotencyLayer::new(MemoryStore::new()).with_max_buffered(100_000, 100_000);
        let (app, effects) = long_responses(layer);
        for n in 0..5 {
            let response = send(&app, by("alice", &n.to_string(), "")).await;
            assert_eq!(response.body.len(), LONG);
        }
        assert_eq!(send(&app, by("bob", "k", "")).await.body.len(), LONG);
        let mut held = Vec::new();
        for n in 0..5 {
            let res = unread(&app, by("alice", &n.to_string(), "")).await;
            if n < 3 {
                assert_eq!(res.status(), StatusCode::OK, "{n}");
            } else {
                assert_eq!(res.status(), StatusCode::TOO_MANY_REQUESTS, "{n}");
            }
            held.push(res);
        }
        assert_caller_limit(&send(&app, by("alice", "4", "")).await);
        // The response of Bob is longer than an eighth of the limit.
        assert_caller_limit(&send(&app, by("bob", "k", "")).await);
        drop(held);
        for n in 0..5 {
            assert!(
                send(&app, by("alice", &n.to_string(), ""))
                    .await
                    .is_replay()
            );
        }
        assert!(send(&app, by("bob", "k", "")).await.is_replay());
        assert_eq!(effects.count(), 6);
    })
    .await;
}

/// A record of less than 1/1024 of the limit counts with the size to which it inflates.
// S-984
#[tokio::test(start_paused = true)]
async fn small_compressed_replays_count_inflated() {
    const MAX: usize = 1 << 20;
    const BODY: usize = MAX / 13;
    bounded(async {
        let store = MemoryStore::new();
        let layer = IdempotencyLayer::new(store.clone()).with_max_buffered(MAX, MAX);
        let (app, _) = app(layer, async |_, _| vec![0_u8; BODY]);
        let key = |n: usize| by("alice", &n.to_string(), "");
        for n in 0..10 {
            assert_eq!(send(&app, key(n)).await.body.len(), BODY);
        }
        // Each entry counts 240 bytes more than its record.
        assert!(store.bytes() < 10 * (240 + MAX / 1024));
        let mut held = Vec::new();
        for n in 0..9 {
            let res = unread(&app, key(n)).await;
            assert_eq!(res.status(), StatusCode::OK, "{n}");
            held.push(res);
        }
        assert_caller_limit(&send(&app, key(9)).await);
        drop(held);
        assert!(send(&app, key(9)).await.is_replay());
    })
    .await;
}

// S-978
#[tokio::test(start_paused = true)]
async fn unread_replays_of_one_record_share_bytes() {
    for compress_above in [0, usize::MAX] {
        bounded(async {
            let layer = IdempotencyLayer::new(MemoryStore::new())
                .with_max_buffered(100_000, 100_000)
                .with_compression_above(compress_above);
            let (app, effects) = app(layer, async |_, _| "x".repeat(LONG));
            let first = send(&app, by("alice", "k", "")).await;
            let mut held = Vec::new();
            for _ in 0..100 {
                let res = unread(&app, by("alice", "k", "")).await;
                assert_eq!(res.status(), StatusCode::OK);
                held.push(res);
            }
            let mut addresses = Vec::new();
            for res in held {
                let body = res.into_body().collect().await.expect("a body").to_bytes();
                assert_eq!(body, first.body);
                addresses.push(body.as_ptr());
            }
            addresses.dedup();
            assert_eq!(addresses.len(), 1, "all bodies are the same bytes");
            assert_eq!(effects.count(), 1);
        })
        .await;
    }
}

// S-979
#[tokio::test(start_paused = true)]
async fn unread_replay_is_not_shared_with_next_record() {
    bounded(async {
        let (app, effects) = long_responses(IdempotencyLayer::new(MemoryStore::new()));
        let first = send(&app, by("alice", "k", "")).await;
        let held = unread(&app, by("alice", "k", "")).await;
        sleep(Duration::from_secs(11)).await;
        let second = send(&app, by("alice", "k", "")).await;
        assert_ne!(first.body, second.body);
        let replay = send(&app, by("alice", "k", "")).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, second.body);
        assert_eq!(tests::read(held).await.body, first.body);
        assert_eq!(effects.count(), 2);
    })
    .await;
}

/// A client that invents a credential gets a separate scope, but no additional share.
#[tokio::test(start_paused = true)]
async fn invented_credential_gets_no_other_share() {
    bounded(async {
        let path = || Principal::from_fn(|head| Ok(Some(head.uri.path().as_bytes().to_vec())));
        for principal in [
            Principal::credentials(),
            path().and(Principal::credentials()),
        ] {
            let world = World::with_closed_barrier(|layer| {
                layer
                    .with_max_in_flight(16)
                    .with_host_in_scope(true)
                    .with_principal(principal)
            });
            let invented = |n: usize| {
                let mut req = by("mallory", "k", "");
                req.headers_mut().insert("x-api-key", n.into());
                req.headers_mut().insert("host", n.into());
                req
            };
            let mut running = Vec::new();
            for n in 0..12 {
                running.push(world.start(invented(n)).await);
            }
            assert_eq!(
                world.effects.count(),
                12,
                "each credential has keys of its own"
            );
            assert_caller_limit(&send(&world.app, invented(12)).await);
            running.extend(world.execute("bob", 2).await);
            world.finish(running).await;
        }
    })
    .await;
}

/// A service that accepts these spellings of one token verifies the same caller.
#[tokio::test(start_paused = true)]
async fn spelling_of_credential_gets_no_other_share() {
    bounded(async {
        let path = || Principal::from_fn(|head| Ok(Some(head.uri.path().as_bytes().to_vec())));
        for principal in [
            Principal::credentials(),
            Principal::authorization(),
            path().and(Principal::authorization()),
        ] {
            let world = World::with_closed_barrier(|layer| {
                layer.with_max_in_flight(16).with_principal(principal)
            });
            let spelled = |credential: &'static str, key: &str| {
                let mut req = by("mallory", key, "");
                let credential = HeaderValue::from_static(credential);
                req.headers_mut().insert("authorization", credential);
                req
            };
            let spellings = ["Bearer mallory", "bearer mallory", "BEARER  mallory"];
            let mut running = Vec::new();
            for key in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"] {
                running.push(world.start(spelled(spellings[0], key)).await);
            }
            // Another caller could hold two executions beyond the share of this one.
            for credential in &spellings[1..] {
                running.push(world.start(spelled(credential, "a")).await);
            }
            assert_eq!(
                world.effects.count(),
                12,
                "each spelling has keys of its own"
            );
            for credential in spellings {
                assert_caller_limit(&send(&world.app, spelled(credential, "k")).await);
            }
            // The case of a token counts.
            running.push(world.start(spelled("Bearer MALLORY", "k")).await);
            assert_eq!(world.effects.count(), 13);
            world.finish(running).await;
        }
    })
    .await;
}

// F-945, S-980
/// A caller with large unread responses uses up its bytes. Its small requests are still executed and recorded.
#[tokio::test(start_paused = true)]
async fn small_bodies_pass_while_bytes_are_used_up() {
    const MAX: usize = 1 << 20;
    bounded(async {
        let layer = IdempotencyLayer::new(MemoryStore::new())
            .with_max_buffered(MAX, MAX)
            .with_compression_above(usize::MAX);
        let (app, effects) = app(layer, async |_, req: Request<Body>| {
            let body = req.into_body().collect().await.expect("a body");
            (StatusCode::CREATED, body.to_bytes().to_vec())
        });
        let large = |n: usize| by("alice", &n.to_string(), vec![b'x'; MAX / 8]);
        let mut unread = Vec::new();
        for n in 0..6 {
            let Ok(res) = app.clone().oneshot(large(n)).await;
            assert_eq!(res.status(), StatusCode::CREATED);
            unread.push(res);
        }
        let too_much = send(&app, large(6)).await;
        assert_eq!(too_much.status, StatusCode::CREATED);
        assert_eq!(send(&app, large(6)).await.code(), "response-not-retained");
        let small = || by("alice", "small", vec![b'y'; 1000]);
        for is_replay in [false, true, true] {
            let response = send(&app, small()).await;
            assert_eq!(
                (response.body.len(), response.is_replay()),
                (1000, is_replay)
            );
        }
        assert_eq!(effects.count(), 8);
    })
    .await;
}

// S-981
#[tokio::test(start_paused = true)]
async fn fresh_keys_of_each_caller_have_rate() {
    bounded(async {
        let (per_second, burst) = (NonZeroU32::new(1), NonZeroU32::new(2));
        let (app, effects) = creating(
            IdempotencyLayer::new(MemoryStore::new())
                .with_fresh_key_rate(per_second.expect("not 0"), burst.expect("not 0")),
        );
        for key in ["1", "2"] {
            assert_eq!(
                send(&app, by("alice", key, "")).await.status,
                StatusCode::CREATED
            );
        }
        assert_caller_limit(&send(&app, by("alice", "3", "")).await);
        assert!(send(&app, by("alice", "1", "")).await.is_replay());
        assert_eq!(
            send(&app, by("bob", "3", "")).await.status,
            StatusCode::CREATED
        );
        assert_eq!(effects.count(), 3);
        sleep(Duration::from_secs(1)).await;
        for replay in [false, true] {
            let response = send(&app, by("alice", "3", "")).await;
            assert_eq!(
                (response.status, response.is_replay()),
                (StatusCode::CREATED, replay)
            );
        }
        assert_eq!(effects.count(), 4);
    })
    .await;
}

// S-983, F-947
/// A client that can make the handler panic leaves an orphan with each request.
#[tokio::test(start_paused = true)]
async fn orphans_of_one_caller_leave_leases_to_others() {
    bounded(async {
        let store = MemoryStore::new().with_max_entries(40);
        let (app, effects) = app(
            IdempotencyLayer::new(store)
                .with_orphan_policy(OrphanPolicy::Refuse)
                .with_store_failure(StoreFailure::DangerouslyExecuteUnprotected),
            |_, req: Request<Body>| async move {
                assert!(req.uri().path() != "/panics", "after the effect");
                StatusCode::CREATED
            },
        );
        let panics = |key: usize| {
            let mut req = by("alice", &format!("panics-{key}"), "");
            *req.uri_mut() = "/panics".parse().expect("a path");
            let app = app.clone();
            tokio::spawn(async move { send(&app, req).await })
        };
        for key in 0..30 {
            assert!(panics(key).await.is_err(), "the handler panicked");
        }
        for key in 30..100 {
            assert_caller_limit(&panics(key).await.expect("no handler ran"));
        }
        assert_eq!(effects.count(), 30);
        for key in 0..1000 {
            let response = send(&app, by("bob", &key.to_string(), "")).await;
            assert_eq!(response.status, StatusCode::CREATED, "{key}");
        }
        assert!(send(&app, by("bob", "999", "")).await.is_replay());
        assert_eq!(effects.count(), 1030);
    })
    .await;
}

/// Damages the end of a record.
fn damage(record: Bytes) -> Bytes {
    let mut bytes = Vec::from(record);
    *bytes.last_mut().expect("a record") ^= 1;
    bytes.into()
}

// S-984
/// The damage would be detected if the record were inflated before the limit is checked.
#[tokio::test(start_paused = true)]
async fn replay_over_limit_is_not_inflated() {
    bounded(async {
        let store = MemoryStore::new();
        let body = vec![0; 1 << 20];
        let (app_of_store, _) = app(IdempotencyLayer::new(store.clone()), {
            move |_, _: Request<Body>| {
                let body = body.clone();
                async move { body }
            }
        });
        let first = send(&app_of_store, by("alice", "large", "")).await;
        assert_eq!(first.body.len(), 1 << 20);
        assert!(store.bytes() < 100_000, "the record is compressed");
        for (limit, detail) in [
            (2 << 20, "its record cannot be read"),
            (1 << 20, "its response exceeds a limit"),
        ] {
            let damaged = FaultInjector::new(store.clone());
            damaged.rewrite_records(damage);
            let layer = IdempotencyLayer::new(damaged).with_max_buffered(1 << 20, limit);
            let (app, effects) = creating(layer);
            let response = send(&app, by("alice", "large", "")).await;
            assert_eq!(response.code(), "store-unavailable");
            assert!(response.text().contains(detail), "{}", response.text());
            assert_eq!(effects.count(), 0);
        }
    })
    .await;
}

// S-984
/// A process with a higher limit has recorded the response. Nothing else is in memory.
#[tokio::test(start_paused = true)]
async fn replay_above_limit_is_not_retryable() {
    const BODY: usize = 100 << 10;
    const LOWERED: usize = 128 << 10;
    bounded(async {
        for compress_above in [0, usize::MAX] {
            let layer =
                IdempotencyLayer::new(MemoryStore::new()).with_compression_above(compress_above);
            let lowered = layer.clone().with_max_buffered(LOWERED, LOWERED);
            let (first, _) = app(layer, async |_, _| "x".repeat(BODY));
            let (second, effects) = creating(lowered);
            let recorded = send(&first, by("alice", "k", "")).await;
            assert_eq!(recorded.body.len(), BODY);
            for _ in 0..2 {
                let response = send(&second, by("alice", "k", "")).await;
                assert_eq!(response.code(), "store-unavailable");
                assert_eq!(response.header("retry-after"), None);
                assert!(!response.is_retryable());
            }
            assert_eq!(effects.count(), 0);
            assert!(send(&first, by("alice", "k", "")).await.is_replay());
        }
    })
    .await;
}
