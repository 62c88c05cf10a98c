//! The contents of the file.

use std::{collections::BTreeMap, path::Path};

use embedded::Bank;
use tower_idempotency_sqlx::sqlx;

pub(crate) struct Totals {
    /// The number of deposits of each account.
    pub(crate) deposits: BTreeMap<String, i64>,
    /// The balance of each account, in cents.
    pub(crate) balances: BTreeMap<String, i64>,
    /// The sum of the deposits of each account, in cents.
    pub(crate) sums: BTreeMap<String, i64>,
}

impl Totals {
    pub(crate) async fn open(file: &Path) -> Self {
        let bank = Bank::open(file).await.expect("a file");
        let read = async |sql| -> BTreeMap<String, i64> {
            let rows: Vec<(String, i64)> = sqlx::query_as(sql)
                .fetch_all(&bank.pool)
                .await
                .expect("rows");
            rows.into_iter().collect()
        };
        Self {
            deposits: read("select account, count(*) from deposits group by account").await,
            balances: read("select name, cents from accounts").await,
            sums: read("select account, sum(cents) from deposits group by account").await,
        }
    }
}
