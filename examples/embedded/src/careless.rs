//! A careless variant; do not copy it: the deposit is in one transaction, and its record in another one. The test shows
//! the result of a crash between the two.

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::json;
use tower_idempotency::IdempotencyLayer;
use tower_idempotency_sqlx::sqlx;

use crate::{Bank, Failure, StopPoint, bank::Deposit};

/// Returns the service without the lease: it has only the layer.
pub fn careless(bank: Bank, layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/deposits", post(deposit))
        .route_layer(layer)
        .with_state(bank)
}

async fn deposit(
    State(bank): State<Bank>,
    Json(deposit): Json<Deposit>,
) -> Result<Response, Failure> {
    let mut tx = bank.pool.begin_with("begin immediate").await?;
    let id: i64 =
        sqlx::query_scalar("insert into deposits (account, cents) values (?, ?) returning id")
            .bind(&deposit.account)
            .bind(i64::from(deposit.cents.get()))
            .fetch_one(&mut *tx)
            .await?;
    let balance: i64 = sqlx::query_scalar(
        "insert into accounts (name, cents) values (?, ?)
         on conflict (name) do update set cents = cents + excluded.cents returning cents",
    )
    .bind(&deposit.account)
    .bind(i64::from(deposit.cents.get()))
    .fetch_one(&mut *tx)
    .await?;
    StopPoint::BeforeCommit.reach(bank.stop_at).await;
    tx.commit().await?;
    StopPoint::AfterCommit.reach(bank.stop_at).await;
    // If the process is killed here, before the layer has the response, the retry makes the deposit again.
    let body = Json(json!({ "deposit": id, "balance": balance }));
    Ok((StatusCode::CREATED, body).into_response())
}
