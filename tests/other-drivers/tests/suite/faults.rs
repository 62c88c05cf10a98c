//! The tests of every driver whose connection is cut.

use std::{sync::Arc, time::Duration};

use axum::response::IntoResponse;
use http::StatusCode;
use other_drivers::Handlers;
use tests::{
    barrier::{eventually, within},
    created, few_or, post,
    proxy::{ConnectionEnd, Fault, Proxy},
    send,
    servers::postgres,
};

use crate::suite::{Bank, assert_charged_once, charge, committed, order};

/// Opens a bank whose handlers use a pool behind a proxy. The store connects directly.
async fn behind_proxy<D: Handlers>(test: &str) -> (Bank<D>, Arc<Proxy>) {
    let proxy = Proxy::start(postgres::shared().address());
    let url = format!("postgres://app@{}/postgres", proxy.address());
    let bank = Bank::with_pool(test, D::pool(&url, 4)).await;
    (bank, Arc::new(proxy))
}

/// The reply is lost, and the layer queries the store: the client receives the committed response.
pub(crate) async fn lost_commit_reply_is_looked_up<D: Handlers>() {
    let (bank, proxy) = behind_proxy::<D>("lost_reply").await;
    let (app, executions) = bank.serve(charge);
    proxy.once(Fault::reply_to(D::COMMIT), ConnectionEnd::Cut);
    let first = send(&app, order()).await;
    assert_eq!(proxy.injected_faults(), 1);
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 1);
}

/// The commit never arrives: nothing is committed, and the retry executes.
pub(crate) async fn lost_commit_commits_nothing<D: Handlers>() {
    // The other statement writes the record.
    for (needle, kind) in [(D::COMMIT, "Unknown"), ("{\"execution\":", "Database")] {
        let test = format!("lost_{}", kind.to_lowercase());
        let (bank, proxy) = behind_proxy::<D>(&test).await;
        let (app, executions) = bank.serve(charge);
        proxy.once(Fault::request(needle), ConnectionEnd::Cut);
        let first = send(&app, order()).await;
        assert_eq!(
            (first.text(), proxy.injected_faults()),
            (kind, 1),
            "{first:?}"
        );
        assert_eq!(bank.count().await, 0, "{kind}");
        let retry = send(&app, order()).await;
        assert_charged_once(&bank, &app, &retry).await;
        assert_eq!(executions.count(), 2);
    }
}

/// The connection is cut in the begin. The failure is temporary, and the handler reports it as a 409.
pub(crate) async fn client_error_after_failed_begin_is_not_recorded<D: Handlers>() {
    let (bank, proxy) = behind_proxy::<D>("lost_begin").await;
    let (app, executions) = bank.serve(move |bank: Bank<D>, lease, n| async move {
        match bank.charged(&lease, n).await {
            Ok(tx) => committed(tx, created(n)).await,
            Err(error) => (StatusCode::CONFLICT, format!("{:?}", error.kind())).into_response(),
        }
    });
    proxy.once(Fault::request(D::BEGIN), ConnectionEnd::Cut);
    let refused = send(&app, order()).await;
    assert_eq!(
        (refused.text(), proxy.injected_faults()),
        ("Database", 1),
        "{refused:?}"
    );
    let first = send(&app, order()).await;
    assert_charged_once(&bank, &app, &first).await;
    assert_eq!(executions.count(), 2);
}

/// The connection is cut after each number of bytes, from its start to the commit: one effect and one response for each key.
pub(crate) async fn cut_at_any_byte_has_one_effect<D: Handlers>() {
    let (bank, proxy) = behind_proxy::<D>("any_byte").await;
    let (app, _) = bank.serve(charge);
    let before = proxy.counts().up;
    assert_eq!(send(&app, order()).await.status, StatusCode::CREATED);
    let bytes = usize::try_from(proxy.counts().up - before).expect("few");
    let (mut keys, mut refused) = (1, 0);
    for cut in (1..=bytes).step_by(few_or(97, 1)) {
        // Each trial has a proxy of its own, whose count includes no bytes of earlier trials.
        let proxy = Proxy::start(postgres::shared().address());
        let url = format!("postgres://app@{}/postgres", proxy.address());
        let bank = Bank {
            database: bank.database.clone(),
            pool: D::pool(&url, 1),
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
        // The last bytes may be those of a check by the pool, after the response.
        eventually("the connection is cut", || proxy.injected_faults() == 1).await;
        let retry = send(&app, request()).await;
        assert!(retry.is_replay() && retry.body == first.body, "{retry:?}");
        keys += 1;
        assert_eq!(bank.count().await, keys, "cut at {cut} of {bytes}");
    }
    assert!(refused > 0, "cuts are visible");
}
