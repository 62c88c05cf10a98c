//! Statements that PostgreSQL and SQLite share.

use bytes::Bytes;

use super::{
    OutboxError,
    entry::{DAMAGED, Entry, headers_from_json},
};
use crate::{telemetry::catch_report_panic, warning::WarningLimit};

/// Statements of one table. Both databases number their parameters with `$`.
pub(super) struct Statements {
    /// Name of the table.
    pub(super) table: String,
    pub(super) insert: String,
    pub(super) resume: String,
    pub(super) discard: String,
    pub(super) remove: String,
    pub(super) pending: String,
}

impl Statements {
    /// Creates the statements of a table.
    pub(super) fn of(table: &str) -> Result<Self, OutboxError> {
        let is_name = (1..=48).contains(&table.len())
            && !table.starts_with(|char: char| char.is_ascii_digit())
            && table
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
        if !is_name {
            return Err(OutboxError::with_message(
                "expected a table name of 1 to 48 of a-z, 0-9 and _ without a leading digit",
            ));
        }
        let columns = "key, method, url, headers, body, first_sent, provider";
        Ok(Self {
            table: table.to_owned(),
            insert: format!(
                "insert into {table} ({columns}) values ($1, $2, $3, $4, $5, $6, $7) \
                 on conflict (key) do nothing"
            ),
            resume: format!(
                "update {table} set resumed = true, first_sent = coalesce(first_sent, $2), \
                 provider = coalesce(provider, $3) where key = $1 returning {columns}"
            ),
            discard: format!(
                "delete from {table} where key = $1 and first_sent = $2 and not resumed"
            ),
            remove: format!("delete from {table} where key = $1"),
            pending: format!(
                "select {columns}, position from {table} where position > $1 \
                 order by position limit $2"
            ),
        })
    }
}

/// Row of the table.
pub(super) struct Row {
    pub(super) key: String,
    pub(super) method: String,
    pub(super) url: String,
    pub(super) headers: String,
    pub(super) body: Vec<u8>,
    pub(super) first_sent: Option<i64>,
    pub(super) provider: Option<i64>,
}

impl Row {
    pub(super) fn into_entry(self) -> Result<Entry, OutboxError> {
        self.parse()
            .ok_or_else(|| OutboxError::with_message(DAMAGED))
    }

    fn parse(self) -> Option<Entry> {
        let headers = serde_json::from_str(&self.headers).ok()?;
        let (headers, key_header) = headers_from_json(&headers)?;
        Some(Entry {
            method: self.method.parse().ok()?,
            uri: self.url.parse().ok()?,
            headers,
            key_header,
            key: self.key,
            body: Bytes::from(self.body),
            first_sent: self.first_sent.map(i64::cast_unsigned),
            provider: self.provider.map(i64::cast_unsigned),
        })
    }
}

/// Reports a row that cannot be read. Each recovery finds it again.
pub(super) fn warn_of_skipped_row(limit: &WarningLimit, position: i64, error: &OutboxError) {
    let count = limit.count();
    catch_report_panic(|| match count {
        Some(count) => tracing::warn!(position, %error, count, "row of the outbox skipped"),
        None => tracing::debug!(position, %error, "row of the outbox skipped"),
    });
}

/// Implements [`Outbox`](super::Outbox) and `Debug` for a type with the fields `pool`, `statements` and `skipped`.
macro_rules! impl_outbox {
    ($outbox:ident, $row:ty) => {
        impl $outbox {
            /// Returns the statement that stores an entry, with its values.
            fn insert<'q>(
                &'q self,
                entry: &'q Entry,
            ) -> sqlx::query::Query<
                'q,
                <$row as sqlx::Row>::Database,
                <<$row as sqlx::Row>::Database as sqlx::Database>::Arguments,
            > {
                sqlx::query(AssertSqlSafe(self.statements.insert.as_str()))
                    .bind(&entry.key)
                    .bind(entry.method.as_str())
                    .bind(entry.uri.to_string())
                    .bind(entry.headers_to_json().to_string())
                    .bind(&entry.body[..])
                    .bind(entry.first_sent.map(u64::cast_signed))
                    .bind(entry.provider.map(u64::cast_signed))
            }
        }

        impl std::fmt::Debug for $outbox {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($outbox))
                    .field("table", &self.statements.table)
                    .finish_non_exhaustive()
            }
        }

        impl Outbox for $outbox {
            async fn store(&self, entry: &Entry) -> Result<Option<Entry>, OutboxError> {
                entry.check()?;
                // An entry may be removed between the two statements.
                for _ in 0..MAX_ATTEMPTS {
                    let inserted = self.insert(entry).execute(&self.pool).await;
                    if inserted.map_err(OutboxError::new)?.rows_affected() == 1 {
                        return Ok(None);
                    }
                    let first_sent = entry.first_sent().unwrap_or_else(SystemTime::now);
                    let resumed = self.resume(&entry.key, first_sent, entry.provider);
                    if let Some(stored) = resumed.await? {
                        return Ok(Some(stored));
                    }
                }
                Err(OutboxError::with_message(
                    "other calls store and remove an entry under this key",
                ))
            }

            async fn resume(
                &self,
                key: &str,
                first_sent: SystemTime,
                provider: Option<u64>,
            ) -> Result<Option<Entry>, OutboxError> {
                // `fetch_optional` would return before the commit, and miss its error.
                let rows = sqlx::query(AssertSqlSafe(self.statements.resume.as_str()))
                    .bind(key)
                    .bind(millis(first_sent).cast_signed())
                    .bind(provider.map(u64::cast_signed))
                    .fetch_all(&self.pool)
                    .await
                    .map_err(OutboxError::new)?;
                rows.first().map(read_row).transpose()
            }

            async fn discard(
                &self,
                key: &str,
                first_sent: SystemTime,
            ) -> Result<bool, OutboxError> {
                let deleted = sqlx::query(AssertSqlSafe(self.statements.discard.as_str()))
                    .bind(key)
                    .bind(millis(first_sent).cast_signed())
                    .execute(&self.pool)
                    .await
                    .map_err(OutboxError::new)?;
                Ok(deleted.rows_affected() == 1)
            }

            async fn remove(&self, key: &str) -> Result<(), OutboxError> {
                let deleted = sqlx::query(AssertSqlSafe(self.statements.remove.as_str()))
                    .bind(key)
                    .execute(&self.pool);
                deleted.await.map(drop).map_err(OutboxError::new)
            }

            async fn pending(
                &self,
                after: u64,
                limit: u32,
            ) -> Result<Vec<(u64, Entry)>, OutboxError> {
                let mut after = i64::try_from(after).unwrap_or(i64::MAX);
                loop {
                    let rows = sqlx::query(AssertSqlSafe(self.statements.pending.as_str()))
                        .bind(after)
                        .bind(i64::from(limit))
                        .fetch_all(&self.pool)
                        .await
                        .map_err(OutboxError::new)?;
                    let mut entries = Vec::with_capacity(rows.len());
                    for row in &rows {
                        after = row.try_get(7).map_err(OutboxError::new)?;
                        match read_row(row) {
                            Ok(entry) => entries.push((after.cast_unsigned(), entry)),
                            Err(error) => warn_of_skipped_row(&self.skipped, after, &error),
                        }
                    }
                    // A page of damaged rows alone is not the last one.
                    if !entries.is_empty() || rows.is_empty() {
                        return Ok(entries);
                    }
                }
            }
        }

        fn read_row(row: &$row) -> Result<Entry, OutboxError> {
            let columns = || -> Result<_, sqlx::Error> {
                Ok(Row {
                    key: row.try_get(0)?,
                    method: row.try_get(1)?,
                    url: row.try_get(2)?,
                    headers: row.try_get(3)?,
                    body: row.try_get(4)?,
                    first_sent: row.try_get(5)?,
                    provider: row.try_get(6)?,
                })
            };
            columns().map_err(OutboxError::new)?.into_entry()
        }
    };
}

pub(super) use impl_outbox;

/// Maximum number of attempts to store or resume an entry that other calls store and remove meanwhile.
pub(super) const MAX_ATTEMPTS: usize = 5;

/// Name of the table by default.
pub(super) const TABLE: &str = "idempotency_outbox";

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::Duration,
    };

    use ::tests::observed::{observed, paused, with_panicking_reports};
    use tokio::time::advance;

    use super::*;

    #[test]
    fn skipped_rows_warn_once_per_second() {
        let limit = WarningLimit::default();
        let error = OutboxError::with_message(DAMAGED);
        let (_, text) = observed("debug", async {
            for position in 1..=4 {
                warn_of_skipped_row(&limit, position, &error);
            }
            advance(Duration::from_secs(1)).await;
            warn_of_skipped_row(&limit, 5, &error);
        });
        let event = "row of the outbox skipped position=";
        let lines = text.lines().filter_map(|line| {
            let level = line.split_whitespace().nth(1)?;
            Some(format!("{level} {}", line.split_once(event)?.1))
        });
        let expected = [
            "WARN 1 error=an entry of the outbox is damaged count=1",
            "DEBUG 2 error=an entry of the outbox is damaged",
            "DEBUG 3 error=an entry of the outbox is damaged",
            "DEBUG 4 error=an entry of the outbox is damaged",
            "WARN 5 error=an entry of the outbox is damaged count=4",
        ];
        assert_eq!(lines.collect::<Vec<_>>(), expected, "{text}");
    }

    // F-802
    #[test]
    fn panic_of_subscriber_hides_no_later_row() {
        let limit = WarningLimit::default();
        let error = OutboxError::with_message(DAMAGED);
        with_panicking_reports(paused(), async |panics: &AtomicU64| {
            for position in 1..=2 {
                warn_of_skipped_row(&limit, position, &error);
            }
            assert_eq!(panics.load(Ordering::SeqCst), 2);
        });
    }
}
