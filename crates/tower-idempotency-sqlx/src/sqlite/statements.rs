//! What SQLite runs: each statement is a step of its own, prepared once for each connection.

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use crate::{completer::MOST_DOUBLINGS, table::Table};

pub(super) struct Statements {
    /// ?1 id, ?2 token.
    pub(super) look: SqlStr,
    /// ?1 id, ?2 token, ?3 fingerprint, ?4 lease, ?5 keep, ?6 takeover, ?7 owner, ?8 operation.
    pub(super) acquire: SqlStr,
    /// ?1 id, ?2 token, ?3 ttl.
    pub(super) renew: SqlStr,
    /// ?1 id, ?2 token, ?3 fingerprint, ?4 generation, ?5 retention, ?6 record.
    pub(super) complete: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) ended: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) free: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) orphan: SqlStr,
    /// ?1 batch.
    pub(super) purge: SqlStr,
    /// In a handler's transaction, as the next three. ?1 id, ?2 token.
    pub(super) standing: SqlStr,
    /// ?1 id, ?2 token, ?3 retention, ?4 record.
    pub(super) fence: SqlStr,
    /// ?1 id, ?2 token, ?3 name, ?4 data.
    pub(super) has_checkpoint: SqlStr,
    /// ?1 id, ?2 token, ?3 name, ?4 data.
    pub(super) write_checkpoint: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) checkpoint: SqlStr,
    /// ?1 id, ?2 token.
    pub(super) settled_checkpoint: SqlStr,
    /// ?1 older than, ?2 after this end of a lease, ?3 and this id, ?4 limit, ?5 before this end of a lease.
    pub(super) orphans: SqlStr,
    /// ?1 older than, ?2 id, ?3 generation.
    pub(super) is_due: SqlStr,
}

impl Statements {
    pub(super) fn new(table: &Table) -> Self {
        let table = table.quoted('"');
        // Nothing but the name of the table, which is an identifier, is put into them.
        let statement =
            |sql: String| AssertSqlSafe(std::sync::Arc::<str>::from(sql)).into_sql_str();
        // The first conditions are those of an index.
        let due = format!(
            "completed is null and lease_ends <= {NOW} - ?1
  and lease_ends + ?1 * (1 << min(generation - 1, {MOST_DOUBLINGS})) <= {NOW} and forgotten_at > {NOW}
  and operation <> 'run_once'"
        );
        let held = format!("id = ?1 and token = ?2 and completed is null and forgotten_at > {NOW}");
        Self {
            look: statement(format!(
                "select completed is not null, token is ?2, forgotten_at <= {NOW}, fingerprint, generation,
  lease_ends - {NOW}, record
from {table} where id = ?1"
            )),
            acquire: statement(format!(
                "insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, created, owner, operation)
select ?1, ?2, ?3, 1, now + ?4, ?5, now + ?4 + ?5, now, ?7, ?8 from (select {NOW} as now) where true
on conflict (id) do update set
  token = excluded.token,
  fingerprint = excluded.fingerprint,
  generation = case when e.forgotten_at <= excluded.created then 1
                    when e.token = excluded.token then e.generation
                    else e.generation + 1 end,
  lease_ends = excluded.lease_ends,
  keep = excluded.keep,
  forgotten_at = excluded.forgotten_at,
  created = case when e.forgotten_at <= excluded.created then excluded.created else e.created end,
  completed = null,
  record = null,
  owner = excluded.owner,
  operation = excluded.operation,
  checkpoint = case when e.forgotten_at > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.forgotten_at > excluded.created then e.checkpoint_data end
where e.forgotten_at <= excluded.created
  or e.completed is null and (e.token = excluded.token
    or ?6 and e.lease_ends <= excluded.created and e.fingerprint = excluded.fingerprint)
returning generation"
            )),
            renew: statement(format!(
                "update {table} set lease_ends = {NOW} + ?3, forgotten_at = {NOW} + ?3 + keep where {held} returning 1"
            )),
            complete: statement(format!(
                "insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, created, completed, record, owner, operation)
select ?1, ?2, ?3, ?4, now, 0, now + ?5, now, now, ?6, '', '' from (select {NOW} as now) where true
on conflict (id) do update set
  token = excluded.token,
  fingerprint = excluded.fingerprint,
  generation = case when e.token = excluded.token then e.generation else excluded.generation end,
  forgotten_at = excluded.forgotten_at,
  created = case when e.forgotten_at <= excluded.created then excluded.created else e.created end,
  completed = excluded.completed,
  record = excluded.record,
  owner = case when e.forgotten_at <= excluded.created then '' else e.owner end,
  operation = case when e.forgotten_at <= excluded.created then '' else e.operation end,
  checkpoint = null,
  checkpoint_data = null
where e.forgotten_at <= excluded.created
  or e.completed is null and (e.token = excluded.token or e.token is null)
returning 1"
            )),
            ended: statement(format!(
                "select completed is not null, token is ?2, forgotten_at <= {NOW}, token is null
from {table} where id = ?1"
            )),
            free: statement(format!(
                "delete from {table} where {held} and generation = 1 and checkpoint is null returning 1"
            )),
            orphan: statement(format!(
                "update {table} set token = null, lease_ends = {NOW}, forgotten_at = {NOW} + keep
where {held} and (generation > 1 or checkpoint is not null) returning 1"
            )),
            purge: statement(format!(
                "delete from {table} where id in (
  select id from {table} where forgotten_at <= {NOW} order by forgotten_at limit ?1
)"
            )),
            standing: statement(format!(
                "select coalesce(token = ?2 and completed is null and forgotten_at > {NOW}, false)
from {table} where id = ?1"
            )),
            fence: statement(format!(
                "update {table} set forgotten_at = {NOW} + ?3, completed = {NOW}, record = ?4, checkpoint = null,
  checkpoint_data = null
where {held} returning 1"
            )),
            has_checkpoint: statement(format!(
                "select checkpoint is ?3 and checkpoint_data is ?4 from {table} where {held}"
            )),
            write_checkpoint: statement(format!(
                "update {table} set checkpoint = ?3, checkpoint_data = ?4 where {held} returning 1"
            )),
            checkpoint: statement(format!(
                "select checkpoint, checkpoint_data from {table} where {held}"
            )),
            settled_checkpoint: statement(format!(
                "update {table} set keep = keep where {held} returning checkpoint, checkpoint_data"
            )),
            orphans: statement(format!(
                "select id, fingerprint, generation, lease_ends, operation, {NOW} from {table}
where {due} and lease_ends < ?5 and lease_ends >= ?2 and (lease_ends > ?2 or id > ?3)
order by lease_ends, id limit ?4"
            )),
            is_due: statement(format!(
                "select 1 from {table} where id = ?2 and generation = ?3 and {due}"
            )),
        }
    }
}

/// The same throughout a statement.
const NOW: &str = "cast(unixepoch('subsec') * 1000 as integer)";
