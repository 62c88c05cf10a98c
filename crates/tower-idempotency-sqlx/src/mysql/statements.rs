//! Statements for MySQL and MariaDB.
//!
//! Each call is one message with several statements. They are one transaction at READ COMMITTED, regardless of the
//! session's default. Calls read the row back to see their effect, because the count of changed rows depends on
//! connection settings.
//!
//! Values are part of the text, as digits and letters only; see `docs/internals/decisions/0018`. In a handler's transaction
//! they are bound instead, because sqlx logs the text on the handler's connection.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};
use tower_idempotency::store::{Claim, LeaseRef, OrphanPolicy, Token, Ttl};
use tower_idempotency_sql::MySqlFence;

use crate::{
    Table,
    backend::{OrphanQuery, OrphanRow},
    completer::{IS_OF_REQUEST, MAX_DOUBLINGS},
    hex,
};

pub(super) struct Statements {
    table: String,
    /// The published statements of a handler's transaction.
    fence: MySqlFence,
    /// Reads the status of the lease; see [`MySqlFence::lease_status_sql`].
    ///
    /// This statement and the next three run in a handler's transaction.
    pub(super) lease_status: SqlStr,
    /// Stores the record if the token holds the entry; see [`MySqlFence::write_record_sql`].
    ///
    /// The count of changed rows is reliable here: the entry was not completed before, so every setting counts its row.
    pub(super) write_record: SqlStr,
    /// Returns if the entry has this checkpoint, and locks the row. No row: the token does not hold the entry.
    /// Parameters: name, data, id, token.
    pub(super) has_checkpoint: SqlStr,
    /// Stores the checkpoint in the row that `has_checkpoint` locked. Parameters: name, data, id.
    pub(super) write_checkpoint: SqlStr,
}

impl Statements {
    pub(super) fn new(table: &Table) -> Self {
        let fence = MySqlFence::for_table(table);
        let table = table.quoted('`');
        // Safe: the only inserted text is the name of the table, which is an identifier.
        let statement = |sql: String| AssertSqlSafe(Arc::<str>::from(sql)).into_sql_str();
        let is_held = format!("id = ? and token = ? and completed is null and expires > {NOW}");
        Self {
            lease_status: statement(fence.lease_status_sql().to_owned()),
            write_record: statement(fence.write_record_sql().to_owned()),
            fence,
            has_checkpoint: statement(format!(
                "select coalesce(checkpoint = ? and checkpoint_data = ?, false) from {table} where {is_held} for update"
            )),
            write_checkpoint: statement(format!(
                "update {table} set checkpoint = ?, checkpoint_data = ? where id = ?"
            )),
            table,
        }
    }

    pub(super) fn fence(&self) -> &MySqlFence {
        &self.fence
    }

    /// Acquires the lease if possible, and reads the entry afterwards. An entry that has not expired keeps its fingerprint,
    /// and its operation if the claim has none.
    ///
    /// The first read locks no row, and decides if the other statements write. If the lease cannot be acquired, they
    /// wait for no transaction, not even for that of a handler that holds the row.
    ///
    /// `on duplicate key update` locks an existing row exclusively at once. `insert ignore` would take a shared lock
    /// first, and two transactions that both upgrade it are a deadlock.
    pub(super) fn acquire(&self, claim: &Claim) -> String {
        let table = &self.table;
        let id = bytes(claim.id.as_bytes());
        let token = bytes(claim.token.as_bytes());
        let fingerprint = bytes(claim.fingerprint.as_bytes());
        let [lease, orphan_retention] =
            [claim.lease.as_millis(), claim.orphan_retention.as_millis()];
        let [owner, operation] = [text(claim.owner), text(&claim.operation)];
        let stored_operation = if claim.operation.is_empty() {
            format!("if(expires <= {NOW}, '', operation)")
        } else {
            operation.clone()
        };
        let take_over = take_over_condition(claim.orphans);
        let can_acquire = format!(
            "(expires <= {NOW} or completed is null and (coalesce(token = {token}, false) \
             or {take_over} and lease_ends <= {NOW} and fingerprint = {fingerprint}))"
        );
        // MySQL assigns columns in the given order. Each column is assigned after all expressions that read its old
        // value.
        in_a_transaction(&format!(
            "
select coalesce(max({can_acquire}), true) into @free from {table} where id = {id};
insert into {table}
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select {id}, {token}, {fingerprint}, 1, now + {lease}, {orphan_retention}, now + {lease} + {orphan_retention}, now, {owner}, {operation}
from (select {NOW} as now) clock where @free
on duplicate key update orphan_retention = {table}.orphan_retention;
update {table} set
  generation = if(expires <= {NOW}, 1, if(coalesce(token = {token}, false), generation, generation + 1)),
  created = if(expires <= {NOW}, {NOW}, created),
  checkpoint = if(expires <= {NOW}, null, checkpoint),
  checkpoint_data = if(expires <= {NOW}, null, checkpoint_data),
  operation = {stored_operation},
  token = {token},
  fingerprint = if(expires <= {NOW}, {fingerprint}, fingerprint),
  orphan_retention = {orphan_retention},
  lease_ends = {NOW} + {lease},
  expires = {NOW} + {lease} + {orphan_retention},
  completed = null,
  record = null,
  owner = {owner}
where @free and id = {id} and {can_acquire};
select completed is not null, coalesce(token = {token}, false), expires <= {NOW}, fingerprint, generation,
  lease_ends - {NOW}, record, expires - {NOW}, token
from {table} where id = {id};"
        ))
    }

    /// Returns a row if the token holds the entry.
    pub(super) fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> String {
        let (table, is_held, ttl) = (&self.table, lease_condition(lease), ttl.as_millis());
        in_a_transaction(&format!(
            "
update {table} set lease_ends = {NOW} + {ttl}, expires = {NOW} + {ttl} + orphan_retention where {is_held};
select true from {table} where {is_held};"
        ))
    }

    /// Stores the record unless another token holds or completed the entry, and reads the entry afterwards. Deletes the
    /// checkpoint unless the record needs attention.
    pub(super) fn complete(&self, lease: &LeaseRef, record: &[u8], retention: Ttl) -> String {
        let table = &self.table;
        let id = bytes(lease.id.as_bytes());
        let token = bytes(lease.token.as_bytes());
        let fingerprint = bytes(lease.fingerprint.as_bytes());
        let record = BASE64.encode(record);
        let (generation, retention) = (lease.generation.max(1), retention.as_millis());
        let is_expired = format!("expires <= {NOW}");
        // Like the column `attention`.
        let keeps_checkpoint = format!("expires > {NOW} and substring(@record, 2, 1) = 0x02");
        let body = in_a_transaction(&format!(
            "
update {table} set
  generation = if(coalesce(token = {token}, false), generation, {generation}),
  created = if({is_expired}, {NOW}, created),
  owner = if({is_expired}, '', owner),
  operation = if({is_expired}, '', operation),
  checkpoint = if({keeps_checkpoint}, checkpoint, null),
  checkpoint_data = if({keeps_checkpoint}, checkpoint_data, null),
  token = {token},
  fingerprint = {fingerprint},
  expires = {NOW} + {retention},
  completed = {NOW},
  record = @record
where id = {id} and ({is_expired} or completed is null and (token = {token} or token is null));
insert into {table}
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
select {id}, {token}, {fingerprint}, {generation}, now, 0, now + {retention}, now, now, @record, '', ''
from (select {NOW} as now) clock where not exists (select 1 from {table} where id = {id})
on duplicate key update orphan_retention = {table}.orphan_retention;
select completed is not null, coalesce(token = {token}, false), {is_expired}, token is null
from {table} where id = {id};"
        ));
        format!("set @record = from_base64('{record}');{body} set @record = null;")
    }

    /// Deletes the entry, or makes it an orphan after a takeover or a checkpoint.
    pub(super) fn release(&self, lease: &LeaseRef) -> String {
        let (table, is_held) = (&self.table, lease_condition(lease));
        in_a_transaction(&format!(
            "
delete from {table} where {is_held} and generation = 1 and checkpoint is null;
update {table} set token = null, expires = {NOW} + orphan_retention, lease_ends = {NOW}
where {is_held} and (generation > 1 or checkpoint is not null);"
        ))
    }

    pub(super) fn read_checkpoint(&self, lease: &LeaseRef, after_writers: bool) -> String {
        let (table, is_held) = (&self.table, lease_condition(lease));
        let wait = if after_writers { " for update" } else { "" };
        in_a_transaction(&format!(
            "
select checkpoint, checkpoint_data from {table} where {is_held}{wait};"
        ))
    }

    pub(super) fn orphans(&self, query: &OrphanQuery) -> String {
        let (table, is_due, limit) = (&self.table, due_condition(query), query.limit);
        let ended_before = query
            .ended_before
            .map_or_else(String::new, |bound| format!(" and lease_ends < {bound}"));
        let after = query.after.map_or_else(String::new, |(ends, id)| {
            let id = bytes(id.as_bytes());
            format!(" and lease_ends >= {ends} and (lease_ends > {ends} or id > {id})")
        });
        in_a_transaction(&format!(
            "
select id, fingerprint, generation, lease_ends, operation, {NOW}, orphan_retention, created
from {table} where {is_due}{ended_before}{after}
order by lease_ends, id limit {limit};"
        ))
    }

    pub(super) fn is_due(&self, orphan: &OrphanRow, query: &OrphanQuery) -> String {
        let (table, is_due) = (&self.table, due_condition(query));
        let (id, generation) = (bytes(orphan.id.as_bytes()), orphan.generation);
        in_a_transaction(&format!(
            "
select true from {table} where id = {id} and generation = {generation} and {is_due};"
        ))
    }

    pub(super) fn purge(&self, batch: u32) -> String {
        let table = &self.table;
        in_a_transaction(&format!(
            "
delete from {table} where expires <= {NOW} order by expires limit {batch};
select row_count();"
        ))
    }
}

/// Wraps the statements in a transaction.
///
/// The isolation level applies to this transaction only. The commit overrides `completion_type`, which could begin
/// another transaction.
pub(super) fn in_a_transaction(statements: &str) -> String {
    format!(
        "set transaction isolation level read committed; start transaction;{statements} commit and no chain no release;"
    )
}

/// Returns the condition that an entry is an orphan and due. An orphan whose retry an operator allows waits for its client.
///
/// The first conditions match an index. The delay is at most half of the orphan retention, so that a sweep comes before the
/// expiry. A retention of 0 is not set and limits no delay.
fn due_condition(query: &OrphanQuery) -> String {
    let min_age = query.min_age.as_millis();
    let delay = format!("{min_age} * (1 << least(generation - 1, {MAX_DOUBLINGS}))");
    let delay = format!(
        "case orphan_retention when 0 then {delay} \
         else least({delay}, greatest({min_age}, orphan_retention div 2)) end"
    );
    let allows_retry = take_over_condition(OrphanPolicy::Refuse);
    format!(
        "completed is null and lease_ends <= {NOW} - {min_age} and lease_ends + {delay} <= {NOW} \
         and expires > {NOW} and {IS_OF_REQUEST} and not {allows_retry}"
    )
}

/// Returns the condition under which the policy lets the same request take over an orphan.
fn take_over_condition(policy: OrphanPolicy) -> String {
    match policy {
        OrphanPolicy::TakeOver => "true".to_owned(),
        OrphanPolicy::Refuse => {
            let allowed = bytes(&Token::RETRY_ALLOWED);
            format!("coalesce(left(token, 8) = {allowed}, false)")
        }
        OrphanPolicy::Never => "false".to_owned(),
    }
}

/// Returns the condition that the token holds the entry, even with an expired lease.
fn lease_condition(lease: &LeaseRef) -> String {
    let id = bytes(lease.id.as_bytes());
    let token = bytes(lease.token.as_bytes());
    format!("id = {id} and token = {token} and completed is null and expires > {NOW}")
}

pub(super) fn bytes(bytes: &[u8]) -> String {
    format!("x'{}'", hex::encode(bytes))
}

/// Returns an expression for the text, cut to the length of its column.
fn text(text: &str) -> String {
    let end = text.char_indices().nth(MAX_TEXT_CHARS);
    let text = end.map_or(text, |(end, _)| &text[..end]);
    format!("convert({} using utf8mb4)", bytes(text.as_bytes()))
}

/// Maximum length of a statement with a record, without the record's base64 text.
pub(super) const OVERHEAD: usize = 8 << 10;
const MAX_TEXT_CHARS: usize = 255;
/// Time at which the statement began, constant within it. Uses UTC: local time repeats an hour in autumn.
pub(super) const NOW: &str =
    "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)";
