//! Receipts, which were staged with the rides they are for: delivered at least once, for a mail that was sent cannot be
//! rolled back.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{fs::OpenOptions, io::AsyncWriteExt, time::sleep};
use tower_idempotency_sqlx::sqlx::{self, PgPool};

use crate::Failure;

/// Where receipts go: a file with a line `RECEIPT RIDE RECIPIENT FARE` for each delivery.
#[derive(Clone, Debug)]
pub struct Mailbox(PathBuf);

impl Mailbox {
    /// The file at `path`, which is made with the first delivery.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    async fn put(&self, receipt: i64, ride: i64, recipient: &str, fare: i64) -> io::Result<()> {
        let line = format!("{receipt} {ride} {recipient} {fare}\n");
        let mut file = OpenOptions::new();
        let mut file = file.append(true).create(true).open(&self.0).await?;
        // In one write: the lines of several processes never mix.
        file.write_all(line.as_bytes()).await?;
        file.flush().await
    }
}

/// Delivers what there is to deliver and looks again after `every`, for ever. May run on every replica.
///
/// # Cancellation
///
/// Dropped, the receipt that is on its way is delivered again.
pub async fn deliver(pool: PgPool, mailbox: Mailbox, every: Duration) {
    loop {
        match deliver_one(&pool, &mailbox).await {
            Ok(true) => {}
            Ok(false) => sleep(every).await,
            Err(error) => {
                error.log("a receipt is delivered later");
                sleep(every).await;
            }
        }
    }
}

/// Delivers a receipt, or says that there is none that nobody else is at.
///
/// # Errors
///
/// When the database fails or the mailbox does: it is still to be delivered, and may have been.
///
/// # Cancellation
///
/// As with an error.
pub async fn deliver_one(pool: &PgPool, mailbox: &Mailbox) -> Result<bool, Failure> {
    let mut tx = pool.begin().await?;
    // Whoever has it, has it until the transaction ends, by commit or with the process: others pass it over.
    let receipt: Option<(i64, i64, String, i64)> = sqlx::query_as(
        "select id, ride, recipient, fare from receipts where delivered is null
         order by id limit 1 for update skip locked",
    )
    .fetch_optional(&mut *tx)
    .await?;
    let Some((receipt, ride, recipient, fare)) = receipt else {
        return Ok(false);
    };
    mailbox.put(receipt, ride, &recipient, fare).await?;
    // Killed here, it is delivered again.
    sqlx::query("update receipts set delivered = now() where id = $1")
        .bind(receipt)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(true)
}
