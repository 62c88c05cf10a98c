//! Nested layers, and many commits at once.

use axum::Router;
use http::StatusCode;
use tests::{
    barrier::bounded,
    ledger::{Fate, Ledger},
    send,
};
use tower_idempotency::{IdempotencyLayer, Lease};

use super::{assert_charged_once, bank, charge, first_of, order};

// S-200
#[tokio::test(start_paused = true)]
async fn nested_layer_leaves_commit_to_outer() {
    let (ledger, inner) = (Ledger::default(), Ledger::default());
    let database = ledger.clone();
    let handler = async move |lease: Lease| charge(database, lease, 1).await;
    let app = Router::new()
        .route("/orders", axum::routing::post(handler))
        .layer(IdempotencyLayer::new(inner.clone()))
        .layer(IdempotencyLayer::new(ledger.clone()));
    first_of(&send(&app, order()).await);
    assert_charged_once(&ledger, &app).await;
    assert_eq!(inner.store.all_calls(), 0);
}

// S-176
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_commits_takes_effect() {
    bounded(async {
        for (round, fate) in [
            Fate::Committed,
            Fate::ReplyLost,
            Fate::CallLost,
            Fate::Committed,
        ]
        .into_iter()
        .cycle()
        .take(40)
        .enumerate()
        {
            let ledger = Ledger::default();
            ledger.next(fate.clone());
            let (app, _) = bank(&ledger, async |ledger, lease, _| {
                charge(ledger, lease, 1).await
            });
            let mut clients = tokio::task::JoinSet::new();
            for _ in 0..32 {
                let app = app.clone();
                clients.spawn(async move { send(&app, order()).await });
            }
            while let Some(response) = clients.join_next().await {
                let response = response.expect("no panic");
                match response.status {
                    StatusCode::CREATED => first_of(&response),
                    StatusCode::CONFLICT => assert_eq!(response.code(), "in-progress"),
                    other => assert_eq!(other, StatusCode::INTERNAL_SERVER_ERROR, "{round}"),
                }
            }
            send(&app, order()).await;
            assert_charged_once(&ledger, &app).await;
        }
    })
    .await;
}
