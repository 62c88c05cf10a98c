//! What is sent to PostgreSQL.
//!
//! Each call is one message of the simple protocol with several statements in it, which the server runs in one
//! transaction of their own. The first of them states the isolation level: it then is that whatever the connection
//! defaults to, and no longer than that. Values are in the text, as digits only; see `docs/decisions/0018`. In a handler's
//! transaction they are bound: on its connection sqlx logs the text.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};
use tower_idempotency::store::{Claim, KeyId, LeaseRef, OrphanPolicy, Ttl};

use crate::{
    completer::{Found, MOST_DOUBLINGS, Page},
    hex,
    table::Table,
};

pub(super) struct Statements {
    table: String,
    channel: String,
    /// In a handler's transaction, as the next two: how the lease stands. Marks the transaction. $1 id, $2 token.
    pub(super) standing: SqlStr,
    /// Stores the record if the token holds the entry, and tells those who wait. Says whether it is that transaction, and
    /// whether the record is stored. $1 id, $2 token, $3 record, $4 retention.
    pub(super) fence: SqlStr,
    /// Stores the checkpoint if the token holds the entry. Says whether it is that transaction, and whether the checkpoint
    /// was there before; null if it is not stored. $1 id, $2 token, $3 name, $4 data.
    pub(super) write_checkpoint: SqlStr,
}

impl Statements {
    pub(super) fn new(table: &Table) -> Self {
        let (channel, table) = (table.name().to_owned(), table.quoted('"'));
        // Nothing but the name of the table, which is an identifier, is put into them.
        let statement = |sql: String| AssertSqlSafe(Arc::<str>::from(sql)).into_sql_str();
        // It is the transaction that was marked: the setting ends with it, however it ends.
        let marked = format!("coalesce(current_setting('{MARK}', true) = 'fenced', false)");
        Self {
            standing: statement(format!(
                "select coalesce({HELD}, false), set_config('{MARK}', 'fenced', true)
from {table} e, (select {NOW} as now) clock where e.id = $1"
            )),
            fence: statement(format!(
                "with ended as (
  update {table} e set
    forgotten_at = now + $4,
    completed = now,
    record = $3,
    checkpoint = null,
    checkpoint_data = null
  from (select {NOW} as now) clock where {HELD} and {marked} returning e.id, e.awaited
)
select {marked}, ended.awaited is not null,
  case when ended.awaited then pg_notify('{channel}', encode(ended.id, 'hex'))::text end
from (select 1) one left join ended on true"
            )),
            write_checkpoint: statement(format!(
                "with before as materialized (
  select e.id, coalesce(e.checkpoint = $3 and e.checkpoint_data = $4, false) as same
  from {table} e, (select {NOW} as now) clock where {HELD} and {marked} for update of e
), written as (
  update {table} e set checkpoint = $3, checkpoint_data = $4
  from before where e.id = before.id returning before.same
)
select {marked}, written.same from (select 1) one left join written on true"
            )),
            table,
            channel,
        }
    }

    /// The channel on which waiters are told.
    pub(super) fn channel(&self) -> &str {
        &self.channel
    }

    /// Takes the lease if it can be taken, and reads what the entry is then.
    ///
    /// Whoever cannot have it only reads, and so neither writes nor waits for a row: not for one that a handler's own
    /// transaction holds either.
    pub(super) fn acquire(&self, claim: &Claim) -> String {
        let table = &self.table;
        let id = bytes(claim.id.as_bytes());
        let token = bytes(claim.token.as_bytes());
        let fingerprint = bytes(claim.fingerprint.as_bytes());
        let [lease, keep] = [claim.lease.as_millis(), claim.orphan_retention.as_millis()];
        let [owner, operation] = [text(claim.owner), text(&claim.operation)];
        let take_over = claim.orphans == OrphanPolicy::TakeOver;
        let can_be_taken = |by: &str| {
            format!(
                "e.forgotten_at <= {by}.created or e.completed is null and (e.token = {by}.token \
                 or {take_over} and e.lease_ends <= {by}.created and e.fingerprint = {by}.fingerprint)"
            )
        };
        let [seen, found] = [can_be_taken("asked"), can_be_taken("excluded")];
        format!(
            "{PREFACE}
with asked as materialized (
  select {id} as id, {token} as token, {fingerprint} as fingerprint, {NOW} as created
)
insert into {table} as e
  (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, created, owner, operation)
select id, token, fingerprint, 1, created + {lease}, {keep}, created + {lease} + {keep}, created, {owner}, {operation}
from asked
where not exists (select from {table} e where e.id = asked.id and ({seen}) is not true)
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
  awaited = coalesce(e.awaited and e.token = excluded.token, false),
  checkpoint = case when e.forgotten_at > excluded.created then e.checkpoint end,
  checkpoint_data = case when e.forgotten_at > excluded.created then e.checkpoint_data end
where {found};
select e.completed is not null, coalesce(e.token = {token}, false), e.forgotten_at <= now,
  encode(e.fingerprint, 'hex'), e.generation, e.lease_ends - now, encode(e.record, 'hex')
from {table} e, (select {NOW} as now) clock where e.id = {id};"
        )
    }

    pub(super) fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> String {
        let (table, held, ttl) = (&self.table, held(lease), ttl.as_millis());
        format!(
            "{PREFACE}
update {table} e set lease_ends = now + {ttl}, forgotten_at = now + {ttl} + keep
from (select {NOW} as now) clock where {held} returning true;"
        )
    }

    /// Stores the record unless another token holds or completed the entry, tells those who wait, and reads what the
    /// entry is then.
    pub(super) fn complete(&self, lease: &LeaseRef, record: &[u8], retention: Ttl) -> String {
        let Self { table, channel, .. } = self;
        let id = bytes(lease.id.as_bytes());
        let hex = hex::encode(lease.id.as_bytes());
        let token = bytes(lease.token.as_bytes());
        let fingerprint = bytes(lease.fingerprint.as_bytes());
        let record = bytes(record);
        let (generation, retention) = (lease.generation.max(1), retention.as_millis());
        format!(
            "{PREFACE}
with ended as (
  insert into {table} as e
    (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, created, completed, record, owner, operation)
  select {id}, {token}, {fingerprint}, {generation}, now, 0, now + {retention}, now, now, {record}, '', ''
  from (select {NOW} as now) clock
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
  returning e.awaited
)
select pg_notify('{channel}', '{hex}') from ended where awaited;
select e.completed is not null, coalesce(e.token = {token}, false), e.forgotten_at <= now, e.token is null
from {table} e, (select {NOW} as now) clock where e.id = {id};"
        )
    }

    /// Two statements, for the first may wait for a transaction that leaves a checkpoint: the second one sees it.
    pub(super) fn release(&self, lease: &LeaseRef) -> String {
        let (table, channel, held) = (&self.table, &self.channel, held(lease));
        let hex = hex::encode(lease.id.as_bytes());
        format!(
            "{PREFACE}
with freed as (
  delete from {table} e using (select {NOW} as now) clock
  where {held} and e.generation = 1 and e.checkpoint is null returning e.awaited
)
select pg_notify('{channel}', '{hex}') from freed where awaited;
with orphaned as (
  update {table} e set token = null, lease_ends = now, forgotten_at = now + keep
  from (select {NOW} as now) clock where {held} and (e.generation > 1 or e.checkpoint is not null) returning e.awaited
)
select pg_notify('{channel}', '{hex}') from orphaned where awaited;"
        )
    }

    /// Has the next change told on the channel, and reads whether there is one to come.
    pub(super) fn watch(&self, id: &KeyId) -> String {
        let (table, id) = (&self.table, bytes(id.as_bytes()));
        format!(
            "{PREFACE}
update {table} e set awaited = true from (select {NOW} as now) clock
where e.id = {id} and e.completed is null and e.lease_ends > now and not e.awaited;
select e.completed is null and e.lease_ends > now
from {table} e, (select {NOW} as now) clock where e.id = {id};"
        )
    }

    pub(super) fn read_checkpoint(&self, lease: &LeaseRef, settled: bool) -> String {
        let (table, held) = (&self.table, held(lease));
        let wait = if settled { " for update of e" } else { "" };
        format!(
            "{PREFACE}
select e.checkpoint, encode(e.checkpoint_data, 'hex')
from {table} e, (select {NOW} as now) clock where {held}{wait};"
        )
    }

    pub(super) fn orphans(&self, page: &Page) -> String {
        let (table, due, limit) = (&self.table, due(page), page.limit);
        let until = page
            .until
            .map_or_else(String::new, |until| format!(" and e.lease_ends < {until}"));
        let after = page.after.map_or_else(String::new, |(ends, id)| {
            let id = bytes(id.as_bytes());
            format!(" and e.lease_ends >= {ends} and (e.lease_ends > {ends} or e.id > {id})")
        });
        format!(
            "{PREFACE}
select encode(e.id, 'hex'), encode(e.fingerprint, 'hex'), e.generation, e.lease_ends, e.operation, (select {NOW})
from {table} e where {due}{until}{after}
order by e.lease_ends, e.id limit {limit};"
        )
    }

    pub(super) fn is_due(&self, orphan: &Found, page: &Page) -> String {
        let (table, due) = (&self.table, due(page));
        let (id, generation) = (bytes(orphan.id.as_bytes()), orphan.generation);
        format!(
            "{PREFACE}
select true from {table} e where e.id = {id} and e.generation = {generation} and {due};"
        )
    }

    pub(super) fn purge(&self, batch: u32) -> String {
        let table = &self.table;
        format!(
            "{PREFACE}
with clock as materialized (select {NOW} as now),
over as materialized (
  select e.id from {table} e, clock where e.forgotten_at <= now
  order by e.forgotten_at limit {batch} for update of e skip locked
),
purged as (
  delete from {table} e using over, clock where e.id = over.id and e.forgotten_at <= now returning 1
)
select count(*) from purged;"
        )
    }
}

/// Its lease has been over for long enough, and nobody has the outcome. The first condition is one of an index; its bound
/// is computed once.
fn due(page: &Page) -> String {
    let older = page.older_than.as_millis();
    let pause =
        format!("{older}::bigint * (1 << least(e.generation - 1, {MOST_DOUBLINGS})::integer)");
    format!(
        "e.completed is null and e.lease_ends <= (select {NOW}) - {older} \
         and e.lease_ends + {pause} <= (select {NOW}) and e.forgotten_at > (select {NOW}) \
         and e.operation <> 'run_once'"
    )
}

/// The token holds the entry, its lease over or not.
fn held(lease: &LeaseRef) -> String {
    let id = bytes(lease.id.as_bytes());
    let token = bytes(lease.token.as_bytes());
    format!("e.id = {id} and e.token = {token} and e.completed is null and e.forgotten_at > now")
}

fn bytes(bytes: &[u8]) -> String {
    format!("decode('{}', 'hex')", hex::encode(bytes))
}

/// A client chooses the path: whatever the encoding of the database, this can be stored in it.
fn text(text: &str) -> String {
    format!("encode({}, 'escape')", bytes(text.as_bytes()))
}

/// A row that somebody else's transaction holds is waited for no longer than half a second, three times: together that is
/// shorter than the layer waits for a call, so that it hears the reason and the connection remains.
const PREFACE: &str =
    "set transaction isolation level read committed; set local lock_timeout = 500;";
/// A setting, not a savepoint: all that a handler writes behind one would be written by a subtransaction, at twice the
/// transaction numbers.
const MARK: &str = "tower_idempotency.transaction";
/// As [`held`], with bound values.
const HELD: &str = "e.id = $1 and e.token = $2 and e.completed is null and e.forgotten_at > now";
const NOW: &str = "floor(extract(epoch from clock_timestamp()) * 1000)::bigint";
