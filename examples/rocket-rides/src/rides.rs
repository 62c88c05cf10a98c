//! A request in three phases. Each phase ends in a transaction under the lease, which stores a checkpoint or the response:
//!
//! ```text
//! create     the ride                                    -> checkpoint "created"
//! charge     the card, at the provider                   -> checkpoint "charged"
//! book       the ride is booked, the receipt is to send  -> the answer
//! ```
//!
//! If it is killed at any point, a request continues after the last checkpoint: on its client's retry, or by the completer.

use std::time::Duration;

use axum::{
    Extension, Json, Router,
    extract::{Path, State},
    http::{StatusCode, header::LOCATION},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::json;
use tower_idempotency::{IdempotencyLayer, Lease, NeedsAttention, Retention};
use tower_idempotency_sqlx::{
    Checkpoint, CommitError, Completer, FencedTransaction, Orphan, PostgresStore,
    sqlx::{self, PgPool},
};

use crate::{Failure, Payments, Verdict, database::within};

/// The state of the handlers. The store's table is in the database of the pool.
#[derive(Clone, Debug)]
pub struct Rides {
    /// Leases, checkpoints and records.
    pub store: PostgresStore,
    /// Rides and receipts.
    pub pool: PgPool,
    /// The client of the payment provider.
    pub payments: Payments,
    /// The timeout of a request, including all its calls.
    pub limit: Duration,
}

/// Returns the service. `layer` uses the store, and refuses requests without a key.
pub fn app(rides: Rides, layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/rides", post(ride))
        .route_layer(layer)
        .route("/rides/{id}", get(get_ride))
        .with_state(rides)
}

/// Returns a completer, which finishes a request if its client and its process have abandoned it.
pub fn completer(rides: &Rides, layer: &IdempotencyLayer) -> Completer<PostgresStore> {
    let at = rides.clone();
    Completer::new(&rides.store, layer, move |orphan: Orphan| {
        let rides = at.clone();
        async move {
            if orphan.operation() != "POST /rides" {
                return Err("expected an operation of this service, found another");
            }
            // A failure leaves an orphan for the next sweep, unless its response needs attention.
            Ok(rides.finish_orphan(&orphan).await.into_response())
        }
    })
}

/// Creates the tables if they are missing.
///
/// # Errors
///
/// Returns an error if the database cannot be reached or refuses.
///
/// # Cancellation
///
/// If the future is dropped, either all of the tables are created or none.
pub async fn migrate(pool: &PgPool) -> Result<(), Failure> {
    let migration = include_str!("../migrations/0001_rides.sql");
    sqlx::raw_sql(migration).execute(pool).await?;
    Ok(())
}

/// A client's request.
#[derive(Debug, Deserialize)]
struct Wanted {
    rider: String,
    destination: String,
    card: String,
}

impl Wanted {
    /// Returns `false` for text that PostgreSQL refuses, or that would break the line of a receipt.
    fn is_valid(&self) -> bool {
        let mut texts = [&self.rider, &self.destination, &self.card].into_iter();
        texts.all(|text| !text.contains(char::is_control))
    }
}

/// The progress of a request.
enum Reached {
    Created { ride: i64 },
    Charged { ride: i64 },
}

async fn ride(
    State(rides): State<Rides>,
    lease: Lease,
    Json(wanted): Json<Wanted>,
) -> Result<Response, Failure> {
    if !wanted.is_valid() {
        // An outcome: a 503 would make the client retry a request that cannot succeed.
        let body = Json(json!({ "error": "expected text without control characters" }));
        return Ok((StatusCode::UNPROCESSABLE_ENTITY, body).into_response());
    }
    let limit = rides.limit;
    within(limit, async {
        // A first execution has no predecessor that could have left a checkpoint.
        let checkpoint = match lease.is_takeover() {
            true => rides.store.checkpoint(&lease).await?,
            false => None,
        };
        let reached = match checkpoint {
            Some(checkpoint) => Reached::read(&checkpoint)?,
            None => rides.create(&lease, &wanted).await?,
        };
        rides.finish(&lease, reached).await
    })
    .await
}

impl Rides {
    async fn finish_orphan(&self, orphan: &Orphan) -> Result<Response, Failure> {
        match orphan.checkpoint() {
            Some(checkpoint) => {
                let reached = Reached::read(checkpoint)?;
                within(self.limit, self.finish(orphan.lease(), reached)).await
            }
            // Nothing was committed, and only the client knows its request. The key stays an orphan until the client
            // retries: this response is not recorded, though some presets record a 503.
            None if orphan.age() < ABANDONED => Ok((
                StatusCode::SERVICE_UNAVAILABLE,
                Extension(Retention::NoStore),
            )
                .into_response()),
            // The client has left. Without a record the orphan would never expire, because each attempt restarts its retention.
            None => {
                let body = Json(json!({ "error": "abandoned: nothing was booked" }));
                Ok((StatusCode::GONE, body).into_response())
            }
        }
    }

    async fn finish(&self, lease: &Lease, reached: Reached) -> Result<Response, Failure> {
        match reached {
            Reached::Charged { ride } => self.book(lease, ride).await,
            Reached::Created { ride } => match self.charge(lease, ride).await? {
                None | Some(Verdict::FailureReplayed) => Ok(charge_unknown()),
                Some(Verdict::Declined) => self.decline(lease, ride).await,
                Some(Verdict::Charged { charge }) => {
                    self.charged(lease, ride, &charge).await?;
                    self.book(lease, ride).await
                }
            },
        }
    }

    async fn create(&self, lease: &Lease, wanted: &Wanted) -> Result<Reached, Failure> {
        let mut tx = self.store.begin(lease, &self.pool).await?;
        let ride: i64 = sqlx::query_scalar(
            "insert into rides (rider, destination, fare, card) values ($1, $2, $3, $4) returning id",
        )
        .bind(&wanted.rider)
        .bind(&wanted.destination)
        .bind(FARE)
        .bind(&wanted.card)
        .fetch_one(&mut *tx)
        .await?;
        tx.checkpoint(CREATED, &ride).await?;
        Ok(Reached::Created { ride })
    }

    /// Holds no connection during the call to the provider. Every execution of this request charges under the same key, so
    /// the provider charges once. Returns `None` if the provider may no longer store the key, since an earlier execution may
    /// have charged under it. The orphan itself does not expire, because each execution extends its retention.
    async fn charge(&self, lease: &Lease, ride: i64) -> Result<Option<Verdict>, Failure> {
        let (card, fare, is_recent): (String, i64, bool) = sqlx::query_as(
            "select card, fare, created > now() - make_interval(secs => $2) from rides where id = $1",
        )
        .bind(ride)
        .bind(REMEMBERED.as_secs_f64())
        .fetch_one(&self.pool)
        .await?;
        if !is_recent {
            return Ok(None);
        }
        let key = lease.derive("charge");
        Ok(Some(self.payments.charge(&key, &card, fare).await?))
    }

    /// Stores the charge. Without this phase a takeover would call the provider again, which is safe only while the provider
    /// stores the key.
    async fn charged(&self, lease: &Lease, ride: i64, charge: &str) -> Result<(), Failure> {
        let mut tx = self.store.begin(lease, &self.pool).await?;
        sqlx::query("update rides set state = 'charged', charge = $2 where id = $1")
            .bind(ride)
            .bind(charge)
            .execute(&mut *tx)
            .await?;
        tx.checkpoint(CHARGED, &ride).await?;
        Ok(())
    }

    async fn book(&self, lease: &Lease, ride: i64) -> Result<Response, Failure> {
        let mut tx = self.store.begin(lease, &self.pool).await?;
        let (rider, fare, charge): (String, i64, String) = sqlx::query_as(
            "update rides set state = 'booked' where id = $1 returning rider, fare, charge",
        )
        .bind(ride)
        .fetch_one(&mut *tx)
        .await?;
        sqlx::query("insert into receipts (ride, recipient, fare) values ($1, $2, $3)")
            .bind(ride)
            .bind(rider)
            .bind(fare)
            .execute(&mut *tx)
            .await?;
        let body = Json(json!({ "ride": ride, "fare": fare, "charge": charge }));
        let location = [(LOCATION, format!("/rides/{ride}"))];
        Ok(commit(tx, (StatusCode::CREATED, location, body)).await)
    }

    /// Commits the refusal, which is an outcome too: the record prevents that a retry charges the card.
    async fn decline(&self, lease: &Lease, ride: i64) -> Result<Response, Failure> {
        let mut tx = self.store.begin(lease, &self.pool).await?;
        sqlx::query("update rides set state = 'declined' where id = $1")
            .bind(ride)
            .execute(&mut *tx)
            .await?;
        let body = Json(json!({ "ride": ride, "error": "the card was declined" }));
        Ok(commit(tx, (StatusCode::PAYMENT_REQUIRED, body)).await)
    }
}

/// Commits the writes and the response together or not at all.
async fn commit(tx: FencedTransaction<PostgresStore>, answer: impl IntoResponse) -> Response {
    let committed = tx.commit(answer.into_response()).await;
    let res = committed.unwrap_or_else(CommitError::into_response);
    res.into_response()
}

/// Returns a response that is recorded, so that no execution charges the card before an operator has inspected it.
fn charge_unknown() -> Response {
    let body = Json(json!({ "error": "an operator has to inspect it" }));
    (
        StatusCode::INTERNAL_SERVER_ERROR,
        Extension(CHARGE_UNKNOWN),
        body,
    )
        .into_response()
}

impl Reached {
    fn read(checkpoint: &Checkpoint) -> Result<Self, Failure> {
        let ride = checkpoint.data()?;
        match checkpoint.name() {
            CREATED => Ok(Self::Created { ride }),
            CHARGED => Ok(Self::Charged { ride }),
            // A checkpoint of a release that has more of them.
            _ => Err("expected a checkpoint of this release, found another".into()),
        }
    }
}

async fn get_ride(State(rides): State<Rides>, Path(id): Path<i64>) -> Result<Response, Failure> {
    let asking = sqlx::query_as("select destination, state from rides where id = $1")
        .bind(id)
        .fetch_optional(&rides.pool);
    let ride: Option<(String, String)> = within(rides.limit, async { Ok(asking.await?) }).await?;
    Ok(match ride {
        Some((destination, state)) => {
            Json(json!({ "ride": id, "destination": destination, "state": state })).into_response()
        }
        None => StatusCode::NOT_FOUND.into_response(),
    })
}

const CREATED: &str = "created";
const CHARGED: &str = "charged";
/// The provider stores a key for one hour longer, because it receives the key after the ride was created.
const REMEMBERED: Duration = Duration::from_secs(23 * 60 * 60);
/// Age of a request without a checkpoint that no client retries any more.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);
const CHARGE_UNKNOWN: NeedsAttention = NeedsAttention::new("charge-unknown");
/// The fare in cents, for every destination.
const FARE: i64 = 20_00;
