//! A request in three phases. Each ends in a transaction under the lease, which leaves a checkpoint or the answer:
//!
//! ```text
//! create     the ride                                    -> checkpoint "created"
//! charge     the card, at the provider                   -> checkpoint "charged"
//! book       the ride is booked, the receipt is to send  -> the answer
//! ```
//!
//! Killed anywhere, a request goes on after the last of them: when its client retries, or when the completer finds it.

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
    Checkpoint, Completer, FencedTransaction, Orphan, PostgresStore,
    sqlx::{self, PgPool},
};

use crate::{Failure, Payments, Verdict, database::within};

/// What the handlers need. The store's table is in the database of the pool.
#[derive(Clone, Debug)]
pub struct Rides {
    /// Leases, checkpoints and records.
    pub store: PostgresStore,
    /// Rides and receipts.
    pub pool: PgPool,
    /// Who charges cards.
    pub payments: Payments,
    /// How long a request may take, whatever hangs.
    pub limit: Duration,
}

/// The service. `layer` is one on the store, and refuses requests without a key.
pub fn app(rides: Rides, layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/rides", post(ride))
        .route_layer(layer)
        .route("/rides/{id}", get(look))
        .with_state(rides)
}

/// Finishes what was abandoned by its client and by the process that was at it.
pub fn completer(rides: &Rides, layer: &IdempotencyLayer) -> Completer<PostgresStore> {
    let at = rides.clone();
    Completer::new(&rides.store, layer, move |orphan: Orphan| {
        let rides = at.clone();
        async move {
            match rides.finish_orphan(&orphan).await {
                // As an orphan it would be tried again.
                Err(failure) if failure.is_not_fenced() => Ok(failure.into_response()),
                finished => finished,
            }
        }
    })
}

/// Makes the tables unless they are there.
///
/// # Errors
///
/// When the database cannot be reached or refuses.
///
/// # Cancellation
///
/// Dropped, it has happened whole or not at all.
pub async fn migrate(pool: &PgPool) -> Result<(), Failure> {
    let migration = include_str!("../migrations/0001_rides.sql");
    sqlx::raw_sql(migration).execute(pool).await?;
    Ok(())
}

/// What a client asks for.
#[derive(Debug, Deserialize)]
struct Wanted {
    rider: String,
    destination: String,
    card: String,
}

/// How far a request has come.
enum Reached {
    Created { ride: i64 },
    Charged { ride: i64 },
}

async fn ride(
    State(rides): State<Rides>,
    lease: Lease,
    Json(wanted): Json<Wanted>,
) -> Result<Response, Failure> {
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
            Some(checkpoint) if orphan.operation() == "POST /rides" => {
                let reached = Reached::read(checkpoint)?;
                within(self.limit, self.finish(orphan.lease(), reached)).await
            }
            // Nothing was committed, and what was wanted only the client knows. It stays an orphan, for the client to
            // come back to: this is not recorded, though some presets record a 503.
            _ => Ok((
                StatusCode::SERVICE_UNAVAILABLE,
                Extension(Retention::NoStore),
            )
                .into_response()),
        }
    }

    async fn finish(&self, lease: &Lease, reached: Reached) -> Result<Response, Failure> {
        match reached {
            Reached::Charged { ride } => self.book(lease, ride).await,
            Reached::Created { ride } => match self.charge(lease, ride).await? {
                None => Ok(too_late()),
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

    /// No connection is held while the provider takes its time, and no execution of this request charges under another
    /// key than the first one did: what the provider has done already, it does not do again. `None` when it may have
    /// forgotten the key, under which somebody may have charged: an orphan is remembered anew with each execution.
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

    /// Without this phase a takeover would ask the provider again, which is right for as long as the provider remembers
    /// the key.
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
        commit(tx, (StatusCode::CREATED, location, body)).await
    }

    /// An outcome as good as another: recorded, so that no retry charges the card after all.
    async fn decline(&self, lease: &Lease, ride: i64) -> Result<Response, Failure> {
        let mut tx = self.store.begin(lease, &self.pool).await?;
        sqlx::query("update rides set state = 'declined' where id = $1")
            .bind(ride)
            .execute(&mut *tx)
            .await?;
        let body = Json(json!({ "ride": ride, "error": "the card was declined" }));
        commit(tx, (StatusCode::PAYMENT_REQUIRED, body)).await
    }
}

/// What was written and the answer, together or not at all.
async fn commit(
    tx: FencedTransaction<PostgresStore>,
    answer: impl IntoResponse,
) -> Result<Response, Failure> {
    match tx.commit(answer.into_response()).await {
        Ok(res) => Ok(res.into_response()),
        Err(error) => match error.into_answer() {
            Ok(_rolled_back) => Err("expected an answer that is recorded".into()),
            Err(error) => Err(error.into()),
        },
    }
}

/// Recorded, so that nobody charges the card after all before somebody has looked.
fn too_late() -> Response {
    let body = Json(json!({ "error": "somebody has to look at it" }));
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
            // Of a release that knows more of them.
            _ => Err("expected a checkpoint of this release, found another".into()),
        }
    }
}

async fn look(State(rides): State<Rides>, Path(id): Path<i64>) -> Result<Response, Failure> {
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
/// An hour less than the provider remembers a key, which it hears of after the ride was created.
const REMEMBERED: Duration = Duration::from_secs(23 * 60 * 60);
const CHARGE_UNKNOWN: NeedsAttention = NeedsAttention::new("charge-unknown");
/// In cents, wherever you go.
const FARE: i64 = 20_00;
