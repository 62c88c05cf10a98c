//! The table of an audit log.

use std::time::Duration;

use serde_json::Value;
use tokio::time::timeout;
use tower_idempotency::inspect::InspectError;
use tower_idempotency_any::AnyStore;

use crate::{audit_file::parse_line, error::with_causes};

/// The audit table of a SQL store.
#[derive(Clone, Debug)]
pub(crate) struct AuditTable {
    pub(crate) store: AnyStore,
    /// Longest time of one call.
    pub(crate) timeout: Duration,
}

impl AuditTable {
    /// Appends a line, and commits it. After an error, the table may have the line nevertheless.
    pub(crate) async fn append(&self, line: &str) -> Result<(), String> {
        self.call(self.store.append_audit_line(line)).await
    }

    /// Returns up to `limit` of the last lines, the last one first, and `true` if the whole table was read. Reads at most the
    /// last 400 lines, by the primary key.
    pub(crate) async fn tail(&self, limit: usize) -> Result<(Vec<Value>, bool), String> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX).min(TAIL);
        let lines = self.call(self.store.last_audit_lines(limit)).await?;
        let is_whole = u32::try_from(lines.len()).is_ok_and(|read| read < limit);
        let lines = lines.iter().filter_map(|line| parse_line(line.as_bytes()));
        Ok((lines.collect(), is_whole))
    }

    /// Makes a call, within the timeout. The error has all causes, and no password.
    async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, InspectError>>,
    ) -> Result<T, String> {
        match timeout(self.timeout, call).await {
            Ok(result) => result.map_err(|error| with_causes(&error)),
            Err(_) => {
                let timeout = humantime::format_duration(self.timeout);
                Err(format!("the store did not reply within {timeout}"))
            }
        }
    }
}

/// Number of lines at the end of the table that `tail` reads.
const TAIL: u32 = 400;
