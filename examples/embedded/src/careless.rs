//! What not to copy: a deposit in a transaction of its own, and its record in another one. The test finds what comes of a
//! crash between the two.

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

/// The service without the lease: only behind the layer.
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
            .bind(deposit.cents)
            .fetch_one(&mut *tx)
            .await?;
    let balance: i64 = sqlx::query_scalar(
        "insert into accounts (name, cents) values (?, ?)
         on conflict (name) do update set cents = cents + excluded.cents returning cents",
    )
    .bind(&deposit.account)
    .bind(deposit.cents)
    .fetch_one(&mut *tx)
    .await?;
    StopPoint::BeforeCommit.reach(bank.stop_at).await;
    tx.commit().await?;
    StopPoint::AfterCommit.reach(bank.stop_at).await;
    // Killed here, before the layer has the answer, the deposit is made again.
    let body = Json(json!({ "deposit": id, "balance": balance }));
    Ok((StatusCode::CREATED, body).into_response())
}
