//! Statements for SQLite. Each is prepared once for each connection, and is a transaction by itself, except in a handler's
//! transaction.

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};
use tower_idempotency::store::Token;
use tower_idempotency_sql::SqliteFence;

use crate::{
    Table,
    completer::{IS_OF_REQUEST, MAX_DOUBLINGS},
    hex,
};

pub(super) struct Statements {
    /// ?1 id, ?2 token.
    pub(super) read_entry: SqlStr,
    /// Acquires the lease if possible. An entry that has not expired keeps its fingerprint, and its operation if the claim has
    /// none. ?1 id, ?2 token, ?3 fingerprint, ?4 lease, ?5 orphan_retention, ?6 takeover, ?7 owner. ?8 is the operation. ?9 is
    /// the beginning of tokens that allow a takeover, or null.
    pub(super) acquire: SqlStr,
    /// ?1 id, ?2 token, ?3 ttl.
    pub(super) renew: SqlStr,
    /// Stores the record unless another token holds or completed the entry. Deletes the checkpoint unless the record needs
    /// attention. ?1 id, ?2 token, ?3 fingerprint, ?4 generation, ?5 retention, ?6 record.
    pub(super) complete: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) read_completion: SqlStr,
    /// Deletes the entry at a release, unless it must become an orphan. ?1 id, ?2 token.
    pub(super) delete_released: SqlStr,
    /// Makes the entry an orphan at a release, after a takeover or a checkpoint. ?1 id, ?2 token.
    pub(super) release_as_orphan: SqlStr,
    /// Reads the oldest expired entries with their sizes. The length of a blob is read without its bytes. ?1 limit.
    pub(super) read_expired: SqlStr,
    /// Deletes the oldest expired entries. ?1 expiry and ?2 id of the last one, ?3 limit.
    pub(super) delete_expired: SqlStr,
    /// The published statements of a handler's transaction.
    fence: SqliteFence,
    /// Reads the status of the lease; see [`SqliteFence::lease_status_sql`].
    ///
    /// This statement and the next three run in a handler's transaction. They find the table only in the main file of the
    /// connection: in WAL mode, a commit is not atomic across attached files.
    pub(super) lease_status: SqlStr,
    /// Stores the record if the token holds the entry; see [`SqliteFence::write_record_sql`].
    pub(super) write_record: SqlStr,
    /// ?1 id, ?2 token, ?3 name, ?4 data.
    pub(super) has_checkpoint: SqlStr,
    /// ?1 id, ?2 token, ?3 name, ?4 data.
    pub(super) write_checkpoint: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) read_checkpoint: SqlStr,
    /// Reads the checkpoint after the end of a running write. ?1 id, ?2 token.
    pub(super) read_checkpoint_after_writers: SqlStr,
    /// ?1 minimum age, ?2 expiry and ?3 id of the last row of the previous page, ?4 limit, ?5 upper bound of the
    /// expiry.
    pub(super) orphans: SqlStr,
    /// ?1 minimum age, ?2 id, ?3 generation.
    pub(super) is_due: SqlStr,
}

impl Statements {
    pub(super) fn new(table: &Table, record_limit: usize) -> Self {
        let fence = SqliteFence::for_table(table).with_record_limit(record_limit);
        let expires_index = format!("\"{}_expires\"", table.name());
        let table = table.quoted('"');
        // Names the index: SQLite would scan a table that grew after its last analysis.
        let by_expiry = format!("{table} indexed by {expires_index}");
        let main_table = format!("main.{table}");
        // Safe: the only inserted text is the name of the table, which is an identifier.
        let statement =
            |sql: String| AssertSqlSafe(std::sync::Arc::<str>::from(sql)).into_sql_str();
        // An orphan whose retry an operator allows waits for its client. The first conditions match an index. The delay is at
        // most half of the orphan retention, so that a sweep comes before the expiry. A retention of 0 is not set and limits no
        // delay.
        let retry_allowed = hex::encode(&Token::RETRY_ALLOWED);
        let delay = format!("?1 * (1 << min(generation - 1, {MAX_DOUBLINGS}))");
        let delay = format!(
            "case orphan_retention when 0 then {delay}
         else min({delay}, max(?1, orphan_retention / 2)) end"
        );
        let is_due = format!(
            "completed is null and lease_ends <= {NOW} - ?1
  and lease_ends + {delay} <= {NOW} and expires > {NOW}
  and {IS_OF_REQUEST} and substr(token, 1, 8) is not x'{retry_allowed}'"
        );
        let is_held = format!("id = ?1 and token = ?2 and completed is null and expires > {NOW}");
        let keeps_checkpoint = {
            let needs_attention = needs_attention("excluded.record");
            format!("e.expires > excluded.created and {needs_attention}")
        };
        Self {
            read_entry: statement(format!(
                "select completed is not null, token is ?2, expires <= {NOW}, fingerprint, generation,
  lease_ends - {NOW}, record, expires - {NOW}, token
from {table} where id = ?1"
            )),
            acquire: statement(format!(
                "insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select ?1, ?2, ?3, 1, now + ?4, ?5, now + ?4 + ?5, now, ?7, ?8 from (select {NOW} as now) where true
on conflict (id) do update set
  token = excluded.token,
  fingerprint = case when e.expires > excluded.created then e.fingerprint else excluded.fingerprint end,
  generation = case when e.expires <= excluded.created then 1
                    when e.token = excluded.token then e.generation
                    else e.generation + 1 end,
  lease_ends = excluded.lease_ends,
  orphan_retention = excluded.orphan_retention,
  expires = excluded.expires,
  created = case when e.expires <= excluded.created then excluded.created else e.created end,
  completed = null,
  record = null,
  owner = excluded.owner,
  operation = case when excluded.operation = '' and e.expires > excluded.created then e.operation else excluded.operation end,
  checkpoint = case when e.expires > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.expires > excluded.created then e.checkpoint_data end
where e.expires <= excluded.created
  or e.completed is null and (e.token = excluded.token
    or (?6 or substr(e.token, 1, length(?9)) = ?9)
      and e.lease_ends <= excluded.created and e.fingerprint = excluded.fingerprint)
returning generation"
            )),
            renew: statement(format!(
                "update {table} set lease_ends = {NOW} + ?3, expires = {NOW} + ?3 + orphan_retention where {is_held} returning 1"
            )),
            complete: statement(format!(
                "insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
select ?1, ?2, ?3, ?4, now, 0, now + ?5, now, now, ?6, '', '' from (select {NOW} as now) where true
on conflict (id) do update set
  token = excluded.token,
  fingerprint = excluded.fingerprint,
  generation = case when e.token = excluded.token then e.generation else excluded.generation end,
  expires = excluded.expires,
  created = case when e.expires <= excluded.created then excluded.created else e.created end,
  completed = excluded.completed,
  record = excluded.record,
  owner = case when e.expires <= excluded.created then '' else e.owner end,
  operation = case when e.expires <= excluded.created then '' else e.operation end,
  checkpoint = case when {keeps_checkpoint} then e.checkpoint end,
  checkpoint_data = case when {keeps_checkpoint} then e.checkpoint_data end
where e.expires <= excluded.created
  or e.completed is null and (e.token = excluded.token or e.token is null)
returning 1"
            )),
            read_completion: statement(format!(
                "select completed is not null, token is ?2, expires <= {NOW}, token is null
from {table} where id = ?1"
            )),
            delete_released: statement(format!(
                "delete from {table} where {is_held} and generation = 1 and checkpoint is null returning 1"
            )),
            release_as_orphan: statement(format!(
                "update {table} set token = null, lease_ends = {NOW}, expires = {NOW} + orphan_retention
where {is_held} and (generation > 1 or checkpoint is not null) returning 1"
            )),
            read_expired: statement(format!(
                "select expires, id, coalesce(length(record), 0) + coalesce(length(checkpoint_data), 0)
from {by_expiry} where expires <= {NOW} order by expires, id limit ?1"
            )),
            delete_expired: statement(format!(
                "delete from {by_expiry} where (expires, id) in (
  select expires, id from {by_expiry}
  where (expires, id) <= (?1, ?2) and expires <= {NOW} order by expires, id limit ?3
) returning 1"
            )),
            lease_status: statement(fence.lease_status_sql().to_owned()),
            write_record: statement(fence.write_record_sql().to_owned()),
            fence,
            has_checkpoint: statement(format!(
                "select checkpoint is ?3 and checkpoint_data is ?4 from {main_table} where {is_held}"
            )),
            write_checkpoint: statement(format!(
                "update {main_table} set checkpoint = ?3, checkpoint_data = ?4 where {is_held} returning 1"
            )),
            read_checkpoint: statement(format!(
                "select checkpoint, checkpoint_data from {table} where {is_held}"
            )),
            read_checkpoint_after_writers: statement(format!(
                "update {table} set orphan_retention = orphan_retention where {is_held} returning checkpoint, checkpoint_data"
            )),
            orphans: statement(format!(
                "select id, fingerprint, generation, lease_ends, operation, {NOW}, orphan_retention, created
from {table}
where {is_due} and lease_ends < ?5 and lease_ends >= ?2 and (lease_ends > ?2 or id > ?3)
order by lease_ends, id limit ?4"
            )),
            is_due: statement(format!(
                "select 1 from {table} where id = ?2 and generation = ?3 and {is_due}"
            )),
        }
    }

    pub(super) fn fence(&self) -> &SqliteFence {
        &self.fence
    }
}

/// Returns the condition that a record needs attention, as in the index of these records.
pub(super) fn needs_attention(record: &str) -> String {
    format!("substr({record}, 2, 1) = x'02'")
}

/// Current time, constant within a statement.
pub(super) const NOW: &str = "cast(unixepoch('subsec') * 1000 as integer)";
