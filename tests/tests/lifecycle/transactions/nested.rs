//! Nested layers, and many commits at once.

use std::time::Duration;

use axum::{Extension, Router, response::IntoResponse};
use http::StatusCode;
use tests::{
    barrier::bounded,
    ledger::{CommitFault, Ledger},
    send,
};
use tokio::time::sleep;
use tower_idempotency::{IdempotencyLayer, KeyScope, Lease, MemoryStore, NeedsAttention};

use super::{assert_charged_once, bank, charge, commit, first_of, order};

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

// S-921
/// Each layer protects its own key. A commit under the inner lease does not hide the instructions from the outer layer.
#[tokio::test(start_paused = true)]
async fn commit_leaves_instructions_to_outer_layer() {
    for (instruction, code) in [("attention", "outcome-unknown"), ("short", "")] {
        let ledger = Ledger::default();
        let database = ledger.clone();
        let handler = async move |lease: Lease| {
            let res = StatusCode::CREATED.into_response();
            let res = match instruction {
                "attention" => (Extension(NeedsAttention::new("stuck")), res).into_response(),
                _ => ([("x-idempo-persist-for-seconds", "60")], res).into_response(),
            };
            commit(&database, &lease, 1, res).await
        };
        let inner = IdempotencyLayer::new(ledger.clone())
            .with_key_from(KeyScope::AllCallers, |_| Some("refund-7".to_owned()));
        let app = Router::new()
            .route("/orders", axum::routing::post(handler))
            .layer(inner)
            .layer(IdempotencyLayer::new(MemoryStore::new()));
        let first = send(&app, order()).await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert_eq!(first.header("x-idempo-persist-for-seconds"), None);
        if code.is_empty() {
            assert!(send(&app, order()).await.is_replay());
            sleep(Duration::from_secs(61)).await;
            // Both records have expired.
            assert!(!send(&app, order()).await.is_replay());
            assert_eq!(ledger.rows().await, ["charge 1", "charge 1"]);
        } else {
            assert_eq!(send(&app, order()).await.code(), code);
            assert_eq!(ledger.rows().await, ["charge 1"]);
        }
    }
}

// S-176
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_commits_takes_effect() {
    bounded(async {
        for (round, fault) in [
            CommitFault::Committed,
            CommitFault::ReplyLost,
            CommitFault::CallLost,
            CommitFault::Committed,
        ]
        .into_iter()
        .cycle()
        .take(40)
        .enumerate()
        {
            let ledger = Ledger::default();
            ledger.next(fault.clone());
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
