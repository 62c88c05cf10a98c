//! Receipts, which are stored in the transaction of their ride. They are delivered at least once, because a mail cannot be
//! rolled back.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{fs::OpenOptions, io::AsyncWriteExt, time::sleep};
use tower_idempotency_sqlx::sqlx::{self, PgPool};

use crate::{Failure, database::within};

/// The destination of receipts: a file with a line `RECEIPT RIDE RECIPIENT FARE` for each delivery.
#[derive(Clone, Debug)]
pub struct Mailbox(PathBuf);

impl Mailbox {
    /// Returns the mailbox at `path`, which is created with the first delivery.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    async fn put(&self, receipt: i64, ride: i64, recipient: &str, fare: i64) -> io::Result<()> {
        let line = format!("{receipt} {ride} {recipient} {fare}\n");
        let mut file = OpenOptions::new();
        let mut file = file.append(true).create(true).open(&self.0).await?;
        // A single write: lines of several processes never mix.
        file.write_all(line.as_bytes()).await?;
        file.flush().await
    }
}

/// Delivers all receipts that are due, and repeats this after `every`. Never returns, and may run on every replica.
///
/// A delivery that takes longer than `limit` is repeated. Without this, the worker would stop at a connection that hangs, and
/// the workers of other replicas would skip its receipt. If the limit is too short, receipts are delivered several times.
///
/// # Cancellation
///
/// If the future is dropped, a receipt that is being delivered will be delivered again.
pub async fn deliver(pool: PgPool, mailbox: Mailbox, every: Duration, limit: Duration) {
    loop {
        match within(limit, deliver_one(&pool, &mailbox)).await {
            Ok(true) => {}
            Ok(false) => sleep(every).await,
            Err(error) => {
                error.log("a receipt is delivered later");
                sleep(every).await;
            }
        }
    }
}

/// Attempts to deliver a receipt. Returns `false` if there is none that no other worker is delivering.
///
/// Receipts with fewer attempts come first, so one that always fails does not stop the others.
///
/// # Errors
///
/// Returns an error if the database or the mailbox fails: the receipt stays due, and may have been delivered.
///
/// # Cancellation
///
/// If the future is dropped, the receipt stays due, and may have been delivered.
pub async fn deliver_one(pool: &PgPool, mailbox: &Mailbox) -> Result<bool, Failure> {
    // The attempt is counted before it is made, because it may hang or end the process.
    let receipt: Option<i64> = sqlx::query_scalar(
        "update receipts set attempts = attempts + 1 where id =
             (select id from receipts where delivered is null order by attempts, id limit 1 for update skip locked)
         returning id",
    )
    .fetch_optional(pool)
    .await?;
    let Some(receipt) = receipt else {
        return Ok(false);
    };
    let mut tx = pool.begin().await?;
    // The worker holds the row until its transaction or its process ends, and other workers skip it.
    let due: Option<(i64, String, i64)> = sqlx::query_as(
        "select ride, recipient, fare from receipts where id = $1 and delivered is null for update skip locked",
    )
    .bind(receipt)
    .fetch_optional(&mut *tx)
    .await?;
    let Some((ride, recipient, fare)) = due else {
        // Another worker has chosen this receipt too, and has locked or delivered it.
        return Ok(true);
    };
    mailbox.put(receipt, ride, &recipient, fare).await?;
    // If the process is killed here, the receipt is delivered again.
    sqlx::query("update receipts set delivered = now() where id = $1")
        .bind(receipt)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(true)
}
