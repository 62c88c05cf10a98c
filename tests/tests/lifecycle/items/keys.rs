//! Keys, duplicates and limits of items.

use std::{
    convert::Infallible,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use tests::{barrier::Barrier, creating, post, send};
use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::{
    ErrorKind, FingerprintBy, IdempotencyLayer, Lease, MemoryStore, Preset, Principal,
    conformance::FaultInjector,
    items::{Item, ItemOutcome, ItemResult},
    run_once::{Outcome, WorkError},
    testing::Effects,
};

use super::{head_of, is_replayed, items, layer, numbered, run, run_as, statuses};

// S-400, S-401
#[tokio::test(start_paused = true)]
async fn retry_runs_only_items_that_are_left() {
    let (layer, effects) = (layer(), Effects::new());
    let failing = async |key: String, effects: Effects| {
        if key == "b" && effects.count("b") == 0 {
            effects.add("b");
            return Err(WorkError::Release("no funds"));
        }
        effects.add(&key);
        Ok(key)
    };
    let attempt = async || {
        let items = layer.items(&head_of("alice")).expect("a principal");
        let effects = effects.clone();
        let work = async move |key, _lease| failing(key, effects).await;
        items.run(super::items(&["c", "a", "b"]), work).await
    };
    let first = attempt().await.expect("results");
    assert_eq!(statuses(&first), [200, 200, 500]);
    let values: Vec<_> = first.iter().map(ItemResult::value).collect();
    let (c, a) = ("c".to_owned(), "a".to_owned());
    assert_eq!(values, [Some(&c), Some(&a), None], "the order of the batch");
    assert!(first[0].is_final() && !first[2].is_final());
    let retry = attempt().await.expect("results");
    assert_eq!(statuses(&retry), [200, 200, 200]);
    let replayed: Vec<_> = retry.iter().map(is_replayed).collect();
    assert_eq!(replayed, [true, true, false]);
    let counts = ["a", "b", "c"].map(|key| effects.count(key));
    assert_eq!(counts, [1, 2, 1]);
}

// S-402
#[tokio::test(start_paused = true)]
async fn duplicates_in_batch_share_one_execution() {
    let (layer, effects) = (layer(), Effects::new());
    let results = run(&layer, &effects, items(&["a", "b", "a", "a"])).await;
    let results = results.expect("results");
    assert_eq!(statuses(&results), [200; 4]);
    let duplicates: Vec<_> = results.iter().map(ItemResult::is_duplicate).collect();
    assert_eq!(duplicates, [false, false, true, true]);
    assert_eq!(results[3].value(), Some(&"a".to_owned()));
    assert_eq!((effects.count("a"), effects.count("b")), (1, 1));
}

// S-403
#[tokio::test(start_paused = true)]
async fn key_with_other_content_is_mismatch() {
    let (layer, effects) = (layer(), Effects::new());
    let item = |content: &str| Item::new("k", content, content.to_owned());
    let batch = vec![item("7 EUR"), item("8 EUR"), item("7 EUR")];
    let results = run(&layer, &effects, batch).await.expect("results");
    assert_eq!(statuses(&results), [200, 422, 200]);
    let code = results[1].error().map(|error| error.kind().code());
    assert_eq!(code, Some("key-reused"));
    assert!(results[1].is_final() && results[2].is_duplicate());
    let later = run(&layer, &effects, vec![item("8 EUR")]).await;
    assert_eq!(statuses(&later.expect("results")), [422]);
    assert_eq!((effects.count("7 EUR"), effects.count("8 EUR")), (1, 0));
}

// S-404
/// Each batch holds the first key of the other one, and neither waits.
#[tokio::test(start_paused = true)]
async fn crossed_batches_do_not_wait() {
    let (layer, effects) = (layer(), Effects::new());
    let barriers = [Barrier::closed(), Barrier::closed()];
    let start = |keys: [&'static str; 2], barrier: &Barrier| {
        let (layer, effects, barrier) = (layer.clone(), effects.clone(), barrier.clone());
        tokio::spawn(async move {
            let items = layer.items(&head_of("alice")).expect("a principal");
            let work = async move |key: String, _lease: Lease| {
                effects.add(&key);
                barrier.pass().await;
                Ok::<_, WorkError<Infallible>>(key)
            };
            let batch = super::items(&keys);
            items.with_concurrency(1).run(batch, work).await
        })
    };
    let (one, other) = (
        start(["a", "b"], &barriers[0]),
        start(["b", "a"], &barriers[1]),
    );
    barriers[0].arrival().await;
    barriers[1].arrival().await;
    // The first batch is at its second item, which the second batch holds.
    barriers[0].open_for_good();
    let one = timeout(Duration::from_secs(30), one).await;
    let one = one.expect("no deadlock").expect("no panic");
    assert_eq!(statuses(&one.expect("results")), [200, 409]);
    barriers[1].open_for_good();
    let other = other.await.expect("no panic");
    assert_eq!(statuses(&other.expect("results")), [200, 200]);
    let again = run(&layer, &effects, items(&["a", "b"])).await;
    assert_eq!(statuses(&again.expect("results")), [200, 200]);
    assert_eq!((effects.count("a"), effects.count("b")), (1, 1));
}

// S-404
#[tokio::test(start_paused = true)]
async fn running_item_is_in_progress_elsewhere() {
    let (layer, effects, barrier) = (layer(), Effects::new(), Barrier::closed());
    let running = tokio::spawn({
        let (layer, effects, barrier) = (layer.clone(), effects.clone(), barrier.clone());
        async move {
            let items = layer.items(&head_of("alice")).expect("a principal");
            let work = async move |key: String, _lease: Lease| {
                effects.add(&key);
                barrier.pass().await;
                Ok::<_, WorkError<Infallible>>(key)
            };
            items.run(super::items(&["a"]), work).await
        }
    });
    barrier.arrival().await;
    let started = Instant::now();
    let results = run(&layer, &effects, items(&["a", "b"])).await;
    let results = results.expect("results");
    assert_eq!(started.elapsed(), Duration::ZERO, "no wait");
    assert_eq!(statuses(&results), [409, 200]);
    let first = results[0].outcome();
    let in_progress = matches!(first, ItemOutcome::Returned(Outcome::InProgress { .. }));
    assert!(in_progress && !results[0].is_final());
    assert_eq!(results[0].retry_after(), Some(Duration::from_secs(1)));
    barrier.open_for_good();
    let first = running.await.expect("no panic").expect("results");
    assert_eq!(statuses(&first), [200]);
    assert_eq!((effects.count("a"), effects.count("b")), (1, 1));
}

// S-405
#[tokio::test(start_paused = true)]
async fn items_belong_to_caller_and_namespace() {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(store.clone());
    let other = layer.clone().with_namespace("other");
    let effects = Effects::new();
    for (layer, caller) in [(&layer, "alice"), (&layer, "bob"), (&other, "alice")] {
        let results = run_as(layer, caller, &effects, items(&["a"])).await;
        assert!(!is_replayed(&results.expect("results")[0]), "{caller}");
    }
    assert_eq!(effects.count("a"), 3);
    // Requests and `run_once` have keys of their own.
    let (app, requests) = creating(layer.clone());
    let mut req = post("/payments/batch", "a", "pay a");
    let alice = "alice".parse().expect("a value");
    req.headers_mut().insert("authorization", alice);
    assert_eq!(send(&app, req).await.status, 201);
    let work = async |_lease| Ok::<_, WorkError<Infallible>>(1);
    let outcome = layer.run_once("a", "pay a", work).await;
    assert_eq!(outcome.expect("an outcome"), Outcome::Executed(1));
    assert_eq!((requests.count(), store.len()), (1, 5));
}

// S-405
#[tokio::test(start_paused = true)]
async fn missing_or_rejected_principal_is_error() {
    #[derive(Clone)]
    struct Account(u64);
    let by_account = Principal::extension(|account: &Account| account.0.to_be_bytes());
    let layer_by_account = layer().with_principal(by_account);
    let error = layer_by_account.items(&head_of("alice"));
    assert_eq!(
        error.expect_err("no account").kind(),
        ErrorKind::PrincipalMissing
    );
    let mut head = head_of("alice");
    head.extensions.insert(Account(7));
    let results = layer_by_account.items(&head).expect("an account");
    let work = async |key: String, _lease| Ok::<_, WorkError<Infallible>>(key);
    let results = results.run(items(&["a"]), work).await;
    assert_eq!(statuses(&results.expect("results")), [200]);

    let rejecting = Principal::from_fn(|_| {
        let mut res = Response::new(Bytes::new());
        *res.status_mut() = http::StatusCode::UNAUTHORIZED;
        Err(res.into())
    });
    let error = layer().with_principal(rejecting).items(&head_of("alice"));
    assert_eq!(error.expect_err("rejected").status(), 401);
}

// S-406
#[tokio::test(start_paused = true)]
async fn batch_over_limit_runs_nothing() {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::new(store.clone());
    let effects = Effects::new();
    let error = run(&layer, &effects, numbered(1001)).await;
    let error = error.expect_err("too many");
    assert_eq!(
        (error.status().as_u16(), error.is_retryable()),
        (413, false)
    );
    assert_eq!(store.all_calls(), 0);
    let results = run(&layer, &effects, numbered(1000)).await;
    assert_eq!(results.expect("results").len(), 1000);
    let items = layer.items(&head_of("alice")).expect("a principal");
    let work = async |key: String, _lease| Ok::<_, WorkError<Infallible>>(key);
    let error = items.with_max_items(2).run(numbered(3), work).await;
    assert_eq!(error.expect_err("too many").status(), 413);
}

// S-407
#[tokio::test(start_paused = true)]
async fn malformed_item_key_is_final_rejection() {
    let effects = Effects::new();
    let layer = layer().with_key_check(|key| key != "forbidden");
    let long = "x".repeat(256);
    let batch = items(&["a", "", long.as_str(), "line\nbreak", "forbidden", "b"]);
    let results = run(&layer, &effects, batch).await.expect("results");
    assert_eq!(statuses(&results), [200, 400, 400, 400, 400, 200]);
    assert!(results.iter().all(ItemResult::is_final));
    let code = results[2].error().map(|error| error.kind());
    assert_eq!(code, Some(ErrorKind::KeyTooLong));
    assert!(!format!("{results:?}").contains(&long), "no key in texts");
}

// S-413
#[tokio::test(start_paused = true)]
async fn running_items_are_bounded() {
    for (concurrency, expected) in [(0, 1), (1, 1), (3, 3), (16, 10)] {
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let peak = Arc::clone(&most);
        let work = async move |key: String, _lease| {
            let now = running.fetch_add(1, Ordering::SeqCst) + 1;
            peak.fetch_max(now, Ordering::SeqCst);
            sleep(Duration::from_secs(1)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, WorkError<Infallible>>(key)
        };
        let items = layer().items(&head_of("alice")).expect("a principal");
        let items = items.with_concurrency(concurrency);
        let results = items.run(numbered(10), work).await;
        assert_eq!(statuses(&results.expect("results")), [200; 10]);
        assert_eq!(most.load(Ordering::SeqCst), expected);
    }
}

// S-414
/// The caller of a large batch leaves a part of the limit to others. Its own items wait for each other's permits.
#[tokio::test(start_paused = true)]
async fn items_count_in_share_of_caller() {
    let layer = layer().with_max_in_flight(16);
    let (effects, barrier) = (Effects::new(), Barrier::closed());
    let running = tokio::spawn({
        let (layer, effects, barrier) = (layer.clone(), effects.clone(), barrier.clone());
        async move {
            let items = layer.items(&head_of("alice")).expect("a principal");
            let work = async move |key: String, _lease: Lease| {
                effects.add(&key);
                barrier.pass().await;
                Ok::<_, WorkError<Infallible>>(key)
            };
            items.run(numbered(20), work).await
        }
    });
    for _ in 0..12 {
        barrier.arrival().await;
    }
    sleep(Duration::from_secs(1)).await;
    assert_eq!((barrier.arrivals(), layer.in_flight()), (0, 12));
    let second = run(&layer, &effects, items(&["a"])).await;
    let second = second.expect("results");
    assert_eq!(
        (statuses(&second), second[0].is_final()),
        (vec![429], false)
    );
    let other = run_as(&layer, "bob", &effects, items(&["a", "b"])).await;
    assert_eq!(statuses(&other.expect("results")), [200, 200]);
    barrier.open_for_good();
    let results = running.await.expect("no panic").expect("results");
    assert_eq!(statuses(&results), [200; 20]);
    assert_eq!(effects.total(), 22);
}

// S-414
#[tokio::test(start_paused = true)]
async fn items_count_in_rate_of_fresh_keys() {
    let rate = |number| NonZeroU32::new(number).expect("above zero");
    let layer = layer().with_fresh_key_rate(rate(1), rate(3));
    let effects = Effects::new();
    let results = run(&layer, &effects, numbered(5)).await.expect("results");
    let rejected = results.iter().filter(|result| result.status() == 429);
    assert_eq!((effects.total(), rejected.count()), (3, 2));
    let again = run(&layer, &effects, numbered(3)).await;
    assert_eq!(
        statuses(&again.expect("results")),
        [200; 3],
        "replays are free"
    );
    assert_eq!(effects.total(), 3);
}

/// An item that ends makes room for the next one, although the others are still running.
#[tokio::test(start_paused = true)]
async fn item_waits_for_permit_of_its_batch() {
    let layer = layer().with_max_in_flight(16);
    let work = async |key: String, _lease: Lease| {
        let seconds = if key == "k0" { 1 } else { 10 };
        sleep(Duration::from_secs(seconds)).await;
        Ok::<_, WorkError<Infallible>>(key)
    };
    let batch = layer.items(&head_of("alice")).expect("a principal");
    let results = batch.run(numbered(20), work).await.expect("results");
    assert_eq!(statuses(&results), [200; 20]);
}

/// Runs one item, whose work counts an effect, and returns its status.
async fn status_of_item(
    layer: &IdempotencyLayer,
    head: &http::request::Parts,
    effects: &Effects,
) -> u16 {
    let effects = effects.clone();
    let work = async move |key: String, _lease: Lease| {
        effects.add(&key);
        Ok::<_, WorkError<Infallible>>(key)
    };
    let batch = layer.items(head).expect("a principal");
    let results = batch.run(items(&["p-1"]), work).await.expect("results");
    statuses(&results)[0]
}

/// Two endpoints have different effects for the same content.
#[tokio::test(start_paused = true)]
async fn item_of_other_endpoint_is_mismatch() {
    let (layer, effects) = (layer(), Effects::new());
    let mut statuses_of = Vec::new();
    for path in ["/payments/batch", "/refunds/batch", "/payments/batch?dry"] {
        let req = http::Request::post(path).header("authorization", "alice");
        let (head, ()) = req.body(()).expect("a valid request").into_parts();
        statuses_of.push(status_of_item(&layer, &head, &effects).await);
    }
    assert_eq!((statuses_of, effects.total()), (vec![200, 422, 422], 1));
}

/// The path is a part of the scope, and the query a part of the fingerprint.
#[tokio::test(start_paused = true)]
async fn endpoint_in_scope_separates_items() {
    let acp = IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Acp);
    for layer in [layer().with_endpoint_in_scope(true), acp] {
        let effects = Effects::new();
        let mut statuses_of = Vec::new();
        for path in ["/v1/batch", "/v2/batch", "/v2/batch", "/v1/batch?dry"] {
            let req = http::Request::post(path).header("authorization", "alice");
            let (head, ()) = req.body(()).expect("a valid request").into_parts();
            statuses_of.push(status_of_item(&layer, &head, &effects).await);
        }
        assert_eq!(
            (statuses_of, effects.total()),
            (vec![200, 200, 200, 422], 2)
        );
    }
}

/// A custom fingerprint may ignore a part of the query. Another endpoint is another item nevertheless.
#[tokio::test(start_paused = true)]
async fn custom_fingerprint_ignores_query_of_batch() {
    // The attempt does not count, and the account does.
    let custom = FingerprintBy::custom(|head, body| {
        let query = head.uri.query().unwrap_or_default();
        let counted = query.split('&').filter(|it| !it.starts_with("attempt="));
        [counted.collect::<String>().as_bytes(), body].concat()
    });
    let (layer, effects) = (layer().with_fingerprint(custom), Effects::new());
    let mut statuses_of = Vec::new();
    for path in [
        "/payments/batch?attempt=1",
        "/payments/batch?attempt=2",
        "/payments/batch?attempt=2&account=b",
        "/refunds/batch",
    ] {
        let req = http::Request::post(path).header("authorization", "alice");
        let (head, ()) = req.body(()).expect("a valid request").into_parts();
        statuses_of.push(status_of_item(&layer, &head, &effects).await);
    }
    assert_eq!(
        (statuses_of, effects.total()),
        (vec![200, 200, 422, 422], 1)
    );
}

// S-421
/// A platform acts for two accounts with one credential.
#[tokio::test(start_paused = true)]
async fn item_of_other_account_is_mismatch() {
    let layer = layer().with_fingerprint(
        FingerprintBy::raw_body().and_header(http::HeaderName::from_static("x-branch")),
    );
    let effects = Effects::new();
    let mut statuses_of = Vec::new();
    let accounts = [
        ("stripe-account", "a"),
        ("stripe-account", "a"),
        ("stripe-account", "b"),
        ("x-branch", "a"),
        ("accept", "a"),
    ];
    for (name, value) in accounts {
        let mut head = head_of("platform");
        head.headers.insert(name, value.parse().expect("a value"));
        statuses_of.push(status_of_item(&layer, &head, &effects).await);
    }
    assert_eq!(statuses_of, [200, 200, 422, 422, 422]);
    assert_eq!(effects.total(), 1);
}

// S-422
/// The other request fails and frees the key, so a retry of the mismatch can succeed.
#[tokio::test(start_paused = true)]
async fn mismatch_with_running_item_is_not_final() {
    let (layer, barrier) = (layer(), Barrier::closed());
    let first = {
        let (layer, barrier) = (layer.clone(), barrier.clone());
        tokio::spawn(async move {
            let work = async move |_: String, _lease: Lease| {
                barrier.pass().await;
                Err::<String, _>(WorkError::Release("declined"))
            };
            let batch = layer.items(&head_of("alice")).expect("a principal");
            batch
                .run(vec![Item::new("p-1", "7 EUR", String::new())], work)
                .await
        })
    };
    barrier.arrival().await;
    let effects = Effects::new();
    let other = || vec![Item::new("p-1", "8 EUR", "8 EUR".to_owned())];
    let results = run(&layer, &effects, other()).await.expect("results");
    assert_eq!((statuses(&results)[0], results[0].is_final()), (422, false));
    barrier.open_for_good();
    drop(first.await.expect("no panic"));
    let results = run(&layer, &effects, other()).await.expect("results");
    assert_eq!((statuses(&results)[0], results[0].is_final()), (200, true));
    assert_eq!(effects.count("8 EUR"), 1);
}
