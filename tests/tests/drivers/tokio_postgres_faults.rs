//! Transactions of tokio-postgres whose connection is cut.

use std::{sync::Arc, time::Duration};

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use tests::{
    barrier::within,
    few_or, post,
    proxy::{ConnectionEnd, Fault, Proxy},
    send,
    servers::postgres,
};
use tokio::time::sleep;
use tower_idempotency::Lease;

use super::tokio_postgres::{Bank, assert_charged_once, charge, order, pool};

/// Opens a bank whose handlers use a pool behind a proxy. The store connects directly.
async fn behind_proxy(table: &str) -> (Bank, Arc<Proxy>) {
    let proxy = Proxy::start(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", proxy.address());
    (Bank::with_pool(table, pool(&url, 4)).await, Arc::new(proxy))
}

/// The end of the message with the commit. Without the zero byte it would match the isolation level.
const COMMIT: &str = "COMMIT\0";

/// The reply is lost, and the layer queries the store: the client receives the committed response.
#[tokio::test(flavor = "multi_thread")]
async fn lost_commit_reply_is_looked_up() {
    let (bank, proxy) = behind_proxy("pg_lost_reply").await;
    let (app, executions) = bank.serve(charge);
    proxy.once(Fault::reply_to(COMMIT), ConnectionEnd::Cut);
    let first = send(&app, order()).await;
    assert_eq!(proxy.injected_faults(), 1);
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

/// The handler stops waiting for a commit that gets no reply: the layer returns the committed response.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_commit_is_looked_up() {
    let (bank, proxy) = behind_proxy("pg_dropped_commit").await;
    let lost = Arc::clone(&proxy);
    let (app, executions) = bank.serve(move |bank: Bank, lease: Lease, n| {
        let proxy = Arc::clone(&lost);
        async move {
            let hit = async {
                while proxy.injected_faults() == 0 {
                    sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::select! {
                res = charge(bank, lease, n) => res,
                () = hit => (StatusCode::SERVICE_UNAVAILABLE, "hung").into_response(),
            }
        }
    });
    proxy.once(Fault::reply_to(COMMIT), ConnectionEnd::Hang);
    let first = within(Duration::from_secs(120), send(&app, order())).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

/// The commit never arrives: nothing is committed, and the retry executes.
#[tokio::test(flavor = "multi_thread")]
async fn lost_commit_commits_nothing() {
    // The other statement writes the record.
    for (needle, kind) in [(COMMIT, "Unknown"), ("{\"execution\":", "Database")] {
        let table = format!("pg_lost_commit_{}", kind.to_lowercase());
        let (bank, proxy) = behind_proxy(&table).await;
        let (app, executions) = bank.serve(charge);
        proxy.once(Fault::request(needle), ConnectionEnd::Cut);
        let first = send(&app, order()).await;
        assert_eq!(
            (first.text(), proxy.injected_faults()),
            (kind, 1),
            "{first:?}"
        );
        assert_eq!(bank.count().await, 0, "{needle}");
        let retry = send(&app, order()).await;
        assert_charged_once(&bank, &app, &retry).await;
        assert_eq!(executions.count(), 2);
    }
}

/// The connection is cut after each number of bytes, from its start to the commit: one effect and one response for each key.
#[tokio::test(flavor = "multi_thread")]
async fn cut_at_any_byte_has_one_effect() {
    let (bank, proxy) = behind_proxy("pg_any_byte").await;
    let (app, _) =
        bank.serve(async |bank: Bank, lease, n| -> Response { charge(bank, lease, n).await });
    let before = proxy.counts().up;
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    let bytes = usize::try_from(proxy.counts().up - before).expect("few");
    let (mut keys, mut refused) = (1, 0);
    for cut in (1..=bytes).step_by(few_or(31, 1)) {
        // Each trial has a proxy of its own, whose count includes no bytes of earlier trials.
        let proxy = Proxy::start(postgres::shared().address());
        let url = format!("postgres://app@{}/postgres", proxy.address());
        let bank = Bank {
            database: bank.database.clone(),
            pool: pool(&url, 1),
        };
        let (app, _) = bank.serve(charge);
        proxy.once(Fault::AfterBytes(cut as u64), ConnectionEnd::Cut);
        let request = || post("/orders", &format!("cut-{cut}"), "tea");
        let first = within(Duration::from_secs(60), async {
            loop {
                let response = send(&app, request()).await;
                if response.status == StatusCode::CREATED {
                    break response;
                }
                refused += 1;
            }
        })
        .await;
        assert_eq!(proxy.injected_faults(), 1, "cut at {cut}");
        let retry = send(&app, request()).await;
        assert!(retry.is_replay() && retry.body == first.body, "{retry:?}");
        keys += 1;
        assert_eq!(bank.count().await, keys, "cut at {cut} of {bytes}");
    }
    assert!(refused > 0, "cuts are visible");
}
