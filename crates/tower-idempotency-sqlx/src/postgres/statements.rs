//! Statements for PostgreSQL.
//!
//! Each call is one message of the simple protocol with several statements. The server executes them in one
//! transaction. The first statement sets the isolation level of that transaction only, regardless of the connection's
//! default.
//!
//! Values are part of the text, as digits only; see `docs/internals/decisions/0018`. In a handler's transaction they are
//! bound instead, because sqlx logs the text on the handler's connection.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};
use tower_idempotency::store::{Claim, KeyId, LeaseRef, OrphanPolicy, Token, Ttl};
use tower_idempotency_sql::PostgresFence;

use crate::{
    Table,
    backend::{OrphanQuery, OrphanRow},
    completer::{IS_OF_REQUEST, MAX_DOUBLINGS},
    hex,
};

pub(super) struct Statements {
    table: String,
    channel: String,
    /// The published statements of a handler's transaction.
    fence: PostgresFence,
    /// Reads the status of the lease and marks the transaction; see [`PostgresFence::lease_status_sql`].
    ///
    /// This statement and the next two run in a handler's transaction.
    pub(super) lease_status: SqlStr,
    /// Stores the record if the token holds the entry; see [`PostgresFence::write_record_sql`].
    pub(super) write_record: SqlStr,
    /// Stores the checkpoint if the token holds the entry. $1 id, $2 token, $3 name, $4 data.
    ///
    /// Returns two flags: the transaction has the mark; the entry already had this checkpoint. The second is null if
    /// the checkpoint is not stored.
    pub(super) write_checkpoint: SqlStr,
}

impl Statements {
    pub(super) fn new(table: &Table, record_limit: usize) -> Self {
        let fence = PostgresFence::for_table(table).with_record_limit(record_limit);
        let (channel, table) = (table.name().to_owned(), table.quoted('"'));
        // Safe: the only inserted text is the name of the table, which is an identifier.
        let statement = |sql: String| AssertSqlSafe(Arc::<str>::from(sql)).into_sql_str();
        let is_marked = PostgresFence::is_marked_sql();
        Self {
            lease_status: statement(fence.lease_status_sql().to_owned()),
            write_record: statement(fence.write_record_sql().to_owned()),
            fence,
            write_checkpoint: statement(format!(
                "with before as materialized (
  select e.id, coalesce(e.checkpoint = $3 and e.checkpoint_data = $4, false) as same
  from {table} e, (select {NOW} as now) clock where {IS_HELD} and {is_marked} for update of e
), written as (
  update {table} e set checkpoint = $3, checkpoint_data = $4
  from before where e.id = before.id returning before.same
)
select {is_marked}, written.same from (select 1) one left join written on true"
            )),
            table,
            channel,
        }
    }

    pub(super) fn fence(&self) -> &PostgresFence {
        &self.fence
    }

    /// Returns the notification channel.
    pub(super) fn channel(&self) -> &str {
        &self.channel
    }

    /// Acquires the lease if possible, and reads the entry afterwards. An entry that has not expired keeps its fingerprint,
    /// and its operation if the claim has none.
    ///
    /// If the lease cannot be acquired, the statements only read. They then wait for no row lock, not even for one that
    /// a handler's transaction holds.
    pub(super) fn acquire(&self, claim: &Claim) -> String {
        let table = &self.table;
        let id = bytes(claim.id.as_bytes());
        let token = bytes(claim.token.as_bytes());
        let fingerprint = bytes(claim.fingerprint.as_bytes());
        let [lease, orphan_retention] =
            [claim.lease.as_millis(), claim.orphan_retention.as_millis()];
        let [owner, operation] = [text(claim.owner), text(&claim.operation)];
        let stored_operation = if claim.operation.is_empty() {
            "case when e.expires > excluded.created then e.operation else '' end"
        } else {
            "excluded.operation"
        };
        let take_over = take_over_condition(claim.orphans);
        let can_acquire = |claim: &str| {
            format!(
                "e.expires <= {claim}.created or e.completed is null and (e.token = {claim}.token \
                 or {take_over} and e.lease_ends <= {claim}.created and e.fingerprint = {claim}.fingerprint)"
            )
        };
        let [can_acquire_read, can_acquire_locked] =
            [can_acquire("asked"), can_acquire("excluded")];
        format!(
            "{PREFACE}
with asked as materialized (
  select {id} as id, {token} as token, {fingerprint} as fingerprint, {NOW} as created
)
insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, owner, operation)
select id, token, fingerprint, 1, created + {lease}, {orphan_retention}, created + {lease} + {orphan_retention}, created, {owner}, {operation}
from asked
where not exists (select from {table} e where e.id = asked.id and ({can_acquire_read}) is not true)
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
  operation = {stored_operation},
  awaited = coalesce(e.awaited and e.token = excluded.token, false),
  checkpoint = case when e.expires > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.expires > excluded.created then e.checkpoint_data end
where {can_acquire_locked};
select e.completed is not null, coalesce(e.token = {token}, false), e.expires <= now,
  encode(e.fingerprint, 'hex'), e.generation, e.lease_ends - now, encode(e.record, 'hex'), e.expires - now,
  encode(e.token, 'hex')
from {table} e, (select {NOW} as now) clock where e.id = {id};"
        )
    }

    /// Returns a row if the token holds the entry.
    pub(super) fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> String {
        let (table, is_held, ttl) = (&self.table, lease_condition(lease), ttl.as_millis());
        format!(
            "{PREFACE}
update {table} e set lease_ends = now + {ttl}, expires = now + {ttl} + orphan_retention
from (select {NOW} as now) clock where {is_held} returning true;"
        )
    }

    /// Stores the record unless another token holds or completed the entry, notifies waiters, and reads the entry
    /// afterwards. Deletes the checkpoint unless the record needs attention.
    pub(super) fn complete(&self, lease: &LeaseRef, record: &[u8], retention: Ttl) -> String {
        let Self { table, channel, .. } = self;
        let id = bytes(lease.id.as_bytes());
        let hex = hex::encode(lease.id.as_bytes());
        let token = bytes(lease.token.as_bytes());
        let fingerprint = bytes(lease.fingerprint.as_bytes());
        let record = bytes(record);
        let (generation, retention) = (lease.generation.max(1), retention.as_millis());
        let needs_attention = needs_attention("excluded.record");
        let keeps_checkpoint = format!("e.expires > excluded.created and {needs_attention}");
        format!(
            "{PREFACE}
with ended as (
  insert into {table} as e
    (id, token, fingerprint, generation, lease_ends, orphan_retention, expires, created, completed, record, owner, operation)
  select {id}, {token}, {fingerprint}, {generation}, now, 0, now + {retention}, now, now, {record}, '', ''
  from (select {NOW} as now) clock
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
  returning e.awaited
)
select pg_notify('{channel}', '{hex}') from ended where awaited;
select e.completed is not null, coalesce(e.token = {token}, false), e.expires <= now, e.token is null
from {table} e, (select {NOW} as now) clock where e.id = {id};"
        )
    }

    /// Deletes the entry, or makes it an orphan after a takeover or a checkpoint.
    ///
    /// Uses two statements: the first may wait for a transaction that writes a checkpoint, and only the second sees it.
    pub(super) fn release(&self, lease: &LeaseRef) -> String {
        let (table, channel, is_held) = (&self.table, &self.channel, lease_condition(lease));
        let hex = hex::encode(lease.id.as_bytes());
        format!(
            "{PREFACE}
with freed as (
  delete from {table} e using (select {NOW} as now) clock
  where {is_held} and e.generation = 1 and e.checkpoint is null returning e.awaited
)
select pg_notify('{channel}', '{hex}') from freed where awaited;
with orphaned as (
  update {table} e set token = null, lease_ends = now, expires = now + orphan_retention
  from (select {NOW} as now) clock where {is_held} and (e.generation > 1 or e.checkpoint is not null) returning e.awaited
)
select pg_notify('{channel}', '{hex}') from orphaned where awaited;"
        )
    }

    /// Requests a notification of the next change, and reads if the lease is still active. See [`lease_condition`] for
    /// the test of `record`.
    pub(super) fn watch(&self, id: &KeyId) -> String {
        let (table, id) = (&self.table, bytes(id.as_bytes()));
        format!(
            "{PREFACE}
update {table} e set awaited = true from (select {NOW} as now) clock
where e.id = {id} and e.record is null and e.lease_ends > now and not e.awaited;
select e.completed is null and e.lease_ends > now
from {table} e, (select {NOW} as now) clock where e.id = {id};"
        )
    }

    pub(super) fn read_checkpoint(&self, lease: &LeaseRef, after_writers: bool) -> String {
        let (table, is_held) = (&self.table, lease_condition(lease));
        let wait = if after_writers {
            " for update of e"
        } else {
            ""
        };
        format!(
            "{PREFACE}
select e.checkpoint, encode(e.checkpoint_data, 'hex')
from {table} e, (select {NOW} as now) clock where {is_held}{wait};"
        )
    }

    pub(super) fn orphans(&self, query: &OrphanQuery) -> String {
        let (table, is_due, limit) = (&self.table, due_condition(query), query.limit);
        let ended_before = query
            .ended_before
            .map_or_else(String::new, |bound| format!(" and e.lease_ends < {bound}"));
        let after = query.after.map_or_else(String::new, |(ends, id)| {
            let id = bytes(id.as_bytes());
            format!(" and e.lease_ends >= {ends} and (e.lease_ends > {ends} or e.id > {id})")
        });
        format!(
            "{PREFACE}
select encode(e.id, 'hex'), encode(e.fingerprint, 'hex'), e.generation, e.lease_ends, e.operation, (select {NOW}),
  e.orphan_retention, e.created
from {table} e where {is_due}{ended_before}{after}
order by e.lease_ends, e.id limit {limit};"
        )
    }

    pub(super) fn is_due(&self, orphan: &OrphanRow, query: &OrphanQuery) -> String {
        let (table, is_due) = (&self.table, due_condition(query));
        let (id, generation) = (bytes(orphan.id.as_bytes()), orphan.generation);
        format!(
            "{PREFACE}
select true from {table} e where e.id = {id} and e.generation = {generation} and {is_due};"
        )
    }

    /// Deletes expired rows, and returns their number.
    ///
    /// `over` checks and locks the rows, so no other transaction renews them before they are deleted. The time is a subquery:
    /// a join with the time would read the whole index. The array makes the delete read rows by the primary key: a join may
    /// read all expired rows for each batch.
    pub(super) fn purge(&self, batch: u32) -> String {
        let table = &self.table;
        format!(
            "{PREFACE}{BY_INDEX}
with over as materialized (
  select e.id from {table} e where e.expires <= (select {NOW})
  order by e.expires limit {batch} for update of e skip locked
),
purged as (
  delete from {table} e where e.id = any (array(select over.id from over)) returning 1
)
select count(*) from purged;"
        )
    }
}

/// Returns the condition that an entry is an orphan and due. An orphan whose retry an operator allows waits for its client.
///
/// The first conditions match an index. Their bound is computed once. The delay is at most half of the orphan retention, so
/// that a sweep comes before the expiry. A retention of 0 is not set and limits no delay.
fn due_condition(query: &OrphanQuery) -> String {
    let min_age = query.min_age.as_millis();
    let delay =
        format!("{min_age}::bigint * (1 << least(e.generation - 1, {MAX_DOUBLINGS})::integer)");
    let delay = format!(
        "case e.orphan_retention when 0 then {delay} \
         else least({delay}, greatest({min_age}, e.orphan_retention / 2)) end"
    );
    let allows_retry = take_over_condition(OrphanPolicy::Refuse);
    format!(
        "e.completed is null and e.lease_ends <= (select {NOW}) - {min_age} \
         and e.lease_ends + {delay} <= (select {NOW}) and e.expires > (select {NOW}) \
         and {IS_OF_REQUEST} and not {allows_retry}"
    )
}

/// Returns the condition under which the policy lets the same request take over an orphan.
fn take_over_condition(policy: OrphanPolicy) -> String {
    match policy {
        OrphanPolicy::TakeOver => "true".to_owned(),
        OrphanPolicy::Refuse => {
            let allowed = bytes(&Token::RETRY_ALLOWED);
            format!("coalesce(substring(e.token from 1 for 8) = {allowed}, false)")
        }
        OrphanPolicy::Never => "false".to_owned(),
    }
}

/// Returns the condition that the token holds the entry, even with an expired lease.
///
/// A check of the table makes `record is null` the same as `completed is null`, the predicate of the index of orphans. If the
/// last analysis found no such row, the planner takes that index for empty, and reads all of it for each ID.
fn lease_condition(lease: &LeaseRef) -> String {
    let id = bytes(lease.id.as_bytes());
    let token = bytes(lease.token.as_bytes());
    format!("e.id = {id} and e.token = {token} and e.record is null and e.expires > now")
}

/// Returns the condition that a record needs attention, as in the index of these records.
pub(super) fn needs_attention(record: &str) -> String {
    format!(r"substring({record} from 2 for 1) = '\x02'::bytea")
}

pub(super) fn bytes(bytes: &[u8]) -> String {
    format!("decode('{}', 'hex')", hex::encode(bytes))
}

/// Returns an expression for the text, escaped so that every database encoding can store it. Clients choose the path.
fn text(text: &str) -> String {
    format!("encode({}, 'escape')", bytes(text.as_bytes()))
}

/// The lock timeout is half a second. Three attempts take less than the layer's timeout for a call. So the layer gets
/// the reason, and the connection stays open.
pub(super) const PREFACE: &str =
    "set transaction isolation level read committed; set local lock_timeout = 500;";
/// Prevents the planner from reading the whole table, even with missing statistics. The settings end with the transaction.
pub(super) const BY_INDEX: &str = " set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_sort = off;";
/// The [`lease_condition`] with bound values.
const IS_HELD: &str = "e.id = $1 and e.token = $2 and e.record is null and e.expires > now";
pub(super) const NOW: &str = "floor(extract(epoch from clock_timestamp()) * 1000)::bigint";
