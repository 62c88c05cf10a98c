use std::{num::NonZeroU32, path::Path};

use axum::{
    Json, Router,
    extract::{self, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tower_idempotency::{IdempotencyLayer, Lease};
use tower_idempotency_sqlx::{
    CommitError, SqliteStore,
    sqlx::{
        self, SqliteConnection, SqlitePool,
        sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
    },
};

use crate::{Failure, StopPoint, batch};

/// The state of the handlers: accounts, deposits, leases and records, all in one file.
#[derive(Clone, Debug)]
pub struct Bank {
    /// Leases and records.
    pub store: SqliteStore,
    /// Accounts and deposits.
    pub pool: SqlitePool,
    /// The point at which handlers stop, for tests that kill the process there. Default: none.
    pub stop_at: Option<StopPoint>,
}

/// Returns the service. `layer` uses the bank's store, and refuses requests without a key.
pub fn app(bank: Bank, layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/deposits", post(deposit))
        .route(
            "/deposits/batch",
            post({
                let layer = layer.clone();
                async move |State(bank), head, Json(batch)| {
                    batch::deposit_all(&layer, bank, head, batch).await
                }
            }),
        )
        .route_layer(layer)
        .route("/accounts/{name}", get(balance))
        .with_state(bank)
}

impl Bank {
    /// Opens the bank in this file, which is created if it is missing.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be opened or written.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, any number of the tables may have been created.
    pub async fn open(path: &Path) -> Result<Self, Failure> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            // A deposit survives a power failure once its response was sent.
            .synchronous(SqliteSynchronous::Full);
        // SQLite has one writer at a time. Writers queue in this pool; in SQLite they would poll for the lock.
        // With a lifetime or an idle timeout, sqlx 0.9.0 starts a task that may use a whole processor (sqlx issue 3645).
        let pool = SqlitePoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None);
        let pool = pool.connect_with(options).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        let store = SqliteStore::in_file(path);
        store.migrate().await?;
        let stop_at = None;
        Ok(Self {
            store,
            pool,
            stop_at,
        })
    }
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Deposit {
    pub(crate) account: String,
    /// `Json` rejects other amounts with 422, which is recorded. An error of SQLite would make the client retry without end.
    pub(crate) cents: NonZeroU32,
}

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Receipt {
    pub(crate) balance: i64,
    pub(crate) deposit: i64,
}

async fn deposit(
    State(bank): State<Bank>,
    lease: Lease,
    Json(deposit): Json<Deposit>,
) -> Result<Response, Failure> {
    // From here to the commit no other connection can write: do not wait for anything in between.
    let mut tx = bank.store.begin(&lease, &bank.pool).await?;
    let receipt = write(&mut tx, &deposit).await?;
    let res = (StatusCode::CREATED, Json(receipt)).into_response();
    StopPoint::BeforeCommit.reach(bank.stop_at).await;
    // The deposit, the new balance and this response are committed together or not at all.
    let committed = tx.commit(res).await;
    let res = committed.unwrap_or_else(CommitError::into_response);
    StopPoint::AfterCommit.reach(bank.stop_at).await;
    Ok(res.into_response())
}

/// Writes a deposit and the new balance.
pub(crate) async fn write(
    connection: &mut SqliteConnection,
    deposit: &Deposit,
) -> Result<Receipt, sqlx::Error> {
    let id = sqlx::query_scalar("insert into deposits (account, cents) values (?, ?) returning id")
        .bind(&deposit.account)
        .bind(i64::from(deposit.cents.get()))
        .fetch_one(&mut *connection)
        .await?;
    let balance = sqlx::query_scalar(
        "insert into accounts (name, cents) values (?, ?)
         on conflict (name) do update set cents = cents + excluded.cents returning cents",
    )
    .bind(&deposit.account)
    .bind(i64::from(deposit.cents.get()))
    .fetch_one(&mut *connection)
    .await?;
    Ok(Receipt {
        balance,
        deposit: id,
    })
}

async fn balance(
    State(bank): State<Bank>,
    extract::Path(name): extract::Path<String>,
) -> Result<Response, Failure> {
    let cents: Option<i64> = sqlx::query_scalar("select cents from accounts where name = ?")
        .bind(name)
        .fetch_optional(&bank.pool)
        .await?;
    let balance = Json(json!({ "balance": cents.unwrap_or(0) }));
    Ok(balance.into_response())
}

const TABLES: &str = "
create table if not exists accounts (
    name  text primary key,
    cents integer not null
) strict;
create table if not exists deposits (
    id      integer primary key,
    account text not null,
    cents   integer not null
) strict;
";
