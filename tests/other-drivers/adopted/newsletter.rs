// Subscriptions to a newsletter: sqlx 0.8, a state with the pool, one transaction over two functions, and an error type.

use std::error::Error;

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::post,
};
use serde::{Deserialize, Serialize};
use sqlx::{PgPool, Postgres, Transaction, postgres::PgPoolOptions};
use tokio::net::TcpListener;

#[derive(Clone)]
struct AppState {
    pool: PgPool,
}

/// Serves the application.
pub async fn run(listener: TcpListener, database_url: &str) -> Result<(), Box<dyn Error>> {
    let pool = PgPoolOptions::new().connect(database_url).await?;
    let app = Router::new()
        .route("/subscriptions", post(subscribe))
        .with_state(AppState { pool });
    Ok(axum::serve(listener, app).await?)
}

#[derive(Deserialize)]
struct Subscriber {
    name: String,
}

#[derive(Serialize)]
struct Subscription {
    id: i32,
    token: String,
}

async fn subscribe(
    State(state): State<AppState>,
    Json(subscriber): Json<Subscriber>,
) -> Result<Response, SubscribeError> {
    if subscriber.name.is_empty() {
        return Err(SubscribeError::Invalid("a name is needed"));
    }
    let mut tx = state.pool.begin().await?;
    let id = insert_subscriber(&mut tx, &subscriber).await?;
    let token = insert_token(&mut tx, id).await?;
    tx.commit().await?;
    Ok((StatusCode::CREATED, Json(Subscription { id, token })).into_response())
}

async fn insert_subscriber(
    tx: &mut Transaction<'_, Postgres>,
    subscriber: &Subscriber,
) -> sqlx::Result<i32> {
    sqlx::query_scalar("insert into subscribers (name) values ($1) returning id")
        .bind(&subscriber.name)
        .fetch_one(&mut **tx)
        .await
}

async fn insert_token(tx: &mut Transaction<'_, Postgres>, id: i32) -> sqlx::Result<String> {
    let statement = "insert into tokens (subscriber) values ($1) returning token::text";
    sqlx::query_scalar(statement)
        .bind(id)
        .fetch_one(&mut **tx)
        .await
}

enum SubscribeError {
    Invalid(&'static str),
    Unexpected,
}

impl<E: Error> From<E> for SubscribeError {
    fn from(error: E) -> Self {
        tracing::error!(%error, "a subscription failed");
        Self::Unexpected
    }
}

impl IntoResponse for SubscribeError {
    fn into_response(self) -> Response {
        match self {
            Self::Invalid(reason) => (StatusCode::BAD_REQUEST, reason).into_response(),
            Self::Unexpected => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}
