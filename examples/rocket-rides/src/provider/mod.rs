//! A payment provider for tests: it charges once for each idempotency key, and can be set to misbehave.

use std::{
    collections::HashSet,
    future::pending,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{delete, get, post, put},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::sleep;

pub use self::ledger::{Charge, Ledger};

mod ledger;

/// The behaviour of the provider towards its clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(clippy::exhaustive_enums, reason = "of an example")]
pub enum Mood {
    /// Correct behaviour.
    #[default]
    Well,
    /// Responds with 500, and does not charge.
    Failing,
    /// Never responds, and does not charge.
    Hanging,
    /// Charges, and responds with 500.
    ChargingThenFailing,
    /// Charges, and never responds.
    ChargingThenHanging,
    /// Charges, responds with 500, and replays this response under the key.
    RecordingFailures,
}

#[derive(Clone, Debug)]
struct Provider {
    ledger: Arc<Ledger>,
    mood: Arc<Mutex<Mood>>,
    /// The keys whose recorded response is a failure.
    failures: Arc<Mutex<HashSet<String>>>,
    latency: Duration,
}

/// Returns the provider. It waits for `latency` before it charges, and as long again before it responds.
///
/// `POST /charges` of `{"card":..,"amount":..}` under an `Idempotency-Key` returns 201 or 402. `GET /charges` lists all
/// charges, `PUT /mood/{mood}` sets its behaviour, and `DELETE /keys` deletes its stored keys, as real providers do after a
/// while.
pub fn app(ledger: Ledger, latency: Duration) -> Router {
    Router::new()
        .route("/charges", post(charge))
        .route("/charges", get(charges))
        .route("/mood/{mood}", put(set_mood))
        .route("/keys", delete(forget))
        .with_state(Provider {
            ledger: Arc::new(ledger),
            mood: Arc::default(),
            failures: Arc::default(),
            latency,
        })
}

#[derive(Debug, Deserialize)]
struct Order {
    card: String,
    amount: i64,
}

async fn charge(
    State(provider): State<Provider>,
    headers: HeaderMap,
    Json(order): Json<Order>,
) -> Response {
    let key = headers.get("idempotency-key");
    let Some(key) = key.and_then(|key| key.to_str().ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    if provider.failures().contains(key) {
        let marker = [("idempotent-replayed", "true")];
        return (StatusCode::INTERNAL_SERVER_ERROR, marker).into_response();
    }
    let mood = provider.mood();
    sleep(provider.latency).await;
    match mood {
        Mood::Failing => return StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Mood::Hanging => pending().await,
        Mood::Well
        | Mood::ChargingThenFailing
        | Mood::ChargingThenHanging
        | Mood::RecordingFailures => {}
    }
    let charged = provider.ledger.charge(key, &order.card, order.amount);
    sleep(provider.latency).await;
    match mood {
        Mood::ChargingThenFailing => return StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Mood::ChargingThenHanging => pending().await,
        Mood::RecordingFailures => {
            provider.failures().insert(key.to_owned());
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
        Mood::Well | Mood::Failing | Mood::Hanging => {}
    }
    match charged {
        Ok(Some(charge)) if charge.declined => {
            let body = Json(json!({ "error": "declined" }));
            (StatusCode::PAYMENT_REQUIRED, body).into_response()
        }
        Ok(Some(charge)) => {
            (StatusCode::CREATED, Json(json!({ "charge": charge.name }))).into_response()
        }
        Ok(None) => StatusCode::UNPROCESSABLE_ENTITY.into_response(),
        Err(error) => internal(&error),
    }
}

async fn charges(State(provider): State<Provider>) -> Json<Vec<Charge>> {
    Json(provider.ledger.charges())
}

async fn set_mood(State(provider): State<Provider>, Path(mood): Path<Mood>) {
    *provider.mood.lock().unwrap_or_else(PoisonError::into_inner) = mood;
}

async fn forget(State(provider): State<Provider>) {
    provider.ledger.forget();
    provider.failures().clear();
}

impl Provider {
    fn mood(&self) -> Mood {
        *self.mood.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failures(&self) -> MutexGuard<'_, HashSet<String>> {
        let failures = self.failures.lock();
        failures.unwrap_or_else(PoisonError::into_inner)
    }
}

fn internal(error: &io::Error) -> Response {
    tracing::error!(%error, "the ledger cannot be written");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}
