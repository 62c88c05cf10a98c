//! A careless variant; do not copy it: the same request without protection against crashes. The simulator shows the
//! result.

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde_json::{Value, json};
use tower_idempotency::{IdempotencyLayer, store::Token};
use tower_idempotency_sqlx::sqlx;

use crate::{Failure, Rides, Verdict};

/// Returns the service without lease, checkpoints or derived keys: it has only the layer.
pub fn careless(rides: Rides, layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/rides", post(ride))
        .route_layer(layer)
        .with_state(rides)
}

async fn ride(State(rides): State<Rides>, Json(wanted): Json<Value>) -> Result<Response, Failure> {
    let text = |name: &str| wanted[name].as_str().unwrap_or_default().to_owned();
    let ride: i64 = sqlx::query_scalar(
        "insert into rides (rider, destination, fare, card) values ($1, $2, 2000, $3) returning id",
    )
    .bind(text("rider"))
    .bind(text("destination"))
    .bind(text("card"))
    .fetch_one(&rides.pool)
    .await?;
    // If a later step fails, this write stays, and the retry cannot detect it.
    sqlx::query("insert into receipts (ride, recipient, fare) values ($1, $2, 2000)")
        .bind(ride)
        .bind(text("rider"))
        .execute(&rides.pool)
        .await?;
    // Another key each time: the provider cannot recognise a retry.
    let key = Token::random()?;
    let key = format!("{:032x}", u128::from_be_bytes(*key.as_bytes()));
    match rides.payments.charge(&key, &text("card"), 2000).await? {
        Verdict::Declined => {
            set_state(&rides, ride, "declined").await?;
            let body = Json(json!({ "ride": ride, "error": "the card was declined" }));
            Ok((StatusCode::PAYMENT_REQUIRED, body).into_response())
        }
        Verdict::Charged { charge } => {
            set_state(&rides, ride, "booked").await?;
            // If the process is killed here, before the layer has the response, the retry repeats all of this.
            let body = Json(json!({ "ride": ride, "fare": 2000, "charge": charge }));
            Ok((StatusCode::CREATED, body).into_response())
        }
        Verdict::FailureReplayed => Err("expected a verdict, found a replayed failure".into()),
    }
}

async fn set_state(rides: &Rides, ride: i64, state: &str) -> Result<(), Failure> {
    sqlx::query("update rides set state = $2 where id = $1")
        .bind(ride)
        .bind(state)
        .execute(&rides.pool)
        .await?;
    Ok(())
}
