//! What is sent to MySQL and MariaDB.
//!
//! Each call is one message with several statements in it, which are one transaction at READ COMMITTED, whatever the
//! session defaults to. Values are in the text, as digits and letters only; see `docs/decisions/0018`. What was changed is
//! told by reading it back, for the count of changed rows depends on settings of the connection. In a handler's transaction
//! values are bound: on its connection sqlx logs the text.

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};
use tower_idempotency::store::{Claim, LeaseRef, OrphanPolicy, Ttl};

use crate::{
    completer::{Found, MOST_DOUBLINGS, Page},
    hex,
    table::Table,
};

pub(super) struct Statements {
    table: String,
    /// In a handler's transaction, as the next three: how the lease stands. id, token, id.
    pub(super) standing: SqlStr,
    /// Stores the record if the token holds the entry. One row is changed then, whatever a connection counts: it was not
    /// completed before. retention, record, id, token.
    pub(super) fence: SqlStr,
    /// Whether the checkpoint is there, if the token holds the entry, and keeps the row so. name, data, id, token.
    pub(super) has_checkpoint: SqlStr,
    /// After the last one. name, data, id.
    pub(super) write_checkpoint: SqlStr,
}

impl Statements {
    pub(super) fn new(table: &Table) -> Self {
        let table = table.quoted('`');
        // Nothing but the name of the table, which is an identifier, is put into them.
        let statement = |sql: String| AssertSqlSafe(Arc::<str>::from(sql)).into_sql_str();
        let held = format!("id = ? and token = ? and completed is null and forgotten_at > {NOW}");
        Self {
            standing: statement(format!(
                "select coalesce({held}, false) from {table} where id = ?"
            )),
            fence: statement(format!(
                "update {table} set
  checkpoint = null,
  checkpoint_data = null,
  forgotten_at = {NOW} + ?,
  record = ?,
  completed = {NOW}
where {held}"
            )),
            has_checkpoint: statement(format!(
                "select coalesce(checkpoint = ? and checkpoint_data = ?, false) from {table} where {held} for update"
            )),
            write_checkpoint: statement(format!(
                "update {table} set checkpoint = ?, checkpoint_data = ? where id = ?"
            )),
            table,
        }
    }

    /// Takes the lease if it can be taken, and reads what the entry is then.
    ///
    /// The first look takes no row's lock and decides whether anything is tried: who cannot have the lease waits for
    /// nobody's transaction, not for that of a handler that holds the row either.
    ///
    /// A row that is there already is locked at once by `on duplicate key update`. `insert ignore` would share its lock
    /// first, and two who then both want it for themselves are a deadlock.
    pub(super) fn acquire(&self, claim: &Claim) -> String {
        let table = &self.table;
        let id = bytes(claim.id.as_bytes());
        let token = bytes(claim.token.as_bytes());
        let fingerprint = bytes(claim.fingerprint.as_bytes());
        let [lease, keep] = [claim.lease.as_millis(), claim.orphan_retention.as_millis()];
        let [owner, operation] = [text(claim.owner), text(&claim.operation)];
        let take_over = claim.orphans == OrphanPolicy::TakeOver;
        let can_be_taken = format!(
            "(forgotten_at <= {NOW} or completed is null and (coalesce(token = {token}, false) \
             or {take_over} and lease_ends <= {NOW} and fingerprint = {fingerprint}))"
        );
        // In the order in which they are assigned: what a later one looks at has its old value still.
        in_a_transaction(&format!(
            "
select coalesce(max({can_be_taken}), true) into @free from {table} where id = {id};
insert into {table}
  (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, created, owner, operation)
select {id}, {token}, {fingerprint}, 1, now + {lease}, {keep}, now + {lease} + {keep}, now, {owner}, {operation}
from (select {NOW} as now) clock where @free
on duplicate key update keep = {table}.keep;
update {table} set
  generation = if(forgotten_at <= {NOW}, 1, if(coalesce(token = {token}, false), generation, generation + 1)),
  created = if(forgotten_at <= {NOW}, {NOW}, created),
  checkpoint = if(forgotten_at <= {NOW}, null, checkpoint),
  checkpoint_data = if(forgotten_at <= {NOW}, null, checkpoint_data),
  token = {token},
  fingerprint = {fingerprint},
  keep = {keep},
  lease_ends = {NOW} + {lease},
  forgotten_at = {NOW} + {lease} + {keep},
  completed = null,
  record = null,
  owner = {owner},
  operation = {operation}
where @free and id = {id} and {can_be_taken};
select completed is not null, coalesce(token = {token}, false), forgotten_at <= {NOW}, fingerprint, generation,
  lease_ends - {NOW}, record
from {table} where id = {id};"
        ))
    }

    /// Answers whether the token holds the entry.
    pub(super) fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> String {
        let (table, held, ttl) = (&self.table, held(lease), ttl.as_millis());
        in_a_transaction(&format!(
            "
update {table} set lease_ends = {NOW} + {ttl}, forgotten_at = {NOW} + {ttl} + keep where {held};
select true from {table} where {held};"
        ))
    }

    /// Stores the record unless another token holds or completed the entry, and reads what the entry is then.
    pub(super) fn complete(&self, lease: &LeaseRef, record: &[u8], retention: Ttl) -> String {
        let table = &self.table;
        let id = bytes(lease.id.as_bytes());
        let token = bytes(lease.token.as_bytes());
        let fingerprint = bytes(lease.fingerprint.as_bytes());
        let record = BASE64.encode(record);
        let (generation, retention) = (lease.generation.max(1), retention.as_millis());
        let over = format!("forgotten_at <= {NOW}");
        let body = in_a_transaction(&format!(
            "
update {table} set
  generation = if(coalesce(token = {token}, false), generation, {generation}),
  created = if({over}, {NOW}, created),
  owner = if({over}, '', owner),
  operation = if({over}, '', operation),
  checkpoint = null,
  checkpoint_data = null,
  token = {token},
  fingerprint = {fingerprint},
  forgotten_at = {NOW} + {retention},
  completed = {NOW},
  record = @record
where id = {id} and ({over} or completed is null and (token = {token} or token is null));
insert into {table}
  (id, token, fingerprint, generation, lease_ends, keep, forgotten_at, created, completed, record, owner, operation)
select {id}, {token}, {fingerprint}, {generation}, now, 0, now + {retention}, now, now, @record, '', ''
from (select {NOW} as now) clock where not exists (select 1 from {table} where id = {id})
on duplicate key update keep = {table}.keep;
select completed is not null, coalesce(token = {token}, false), {over}, token is null
from {table} where id = {id};"
        ));
        format!("set @record = from_base64('{record}');{body} set @record = null;")
    }

    pub(super) fn release(&self, lease: &LeaseRef) -> String {
        let (table, held) = (&self.table, held(lease));
        in_a_transaction(&format!(
            "
delete from {table} where {held} and generation = 1 and checkpoint is null;
update {table} set token = null, forgotten_at = {NOW} + keep, lease_ends = {NOW}
where {held} and (generation > 1 or checkpoint is not null);"
        ))
    }

    pub(super) fn read_checkpoint(&self, lease: &LeaseRef, settled: bool) -> String {
        let (table, held) = (&self.table, held(lease));
        let wait = if settled { " for update" } else { "" };
        in_a_transaction(&format!(
            "
select checkpoint, checkpoint_data from {table} where {held}{wait};"
        ))
    }

    pub(super) fn orphans(&self, page: &Page) -> String {
        let (table, due, limit) = (&self.table, due(page), page.limit);
        let until = page
            .until
            .map_or_else(String::new, |until| format!(" and lease_ends < {until}"));
        let after = page.after.map_or_else(String::new, |(ends, id)| {
            let id = bytes(id.as_bytes());
            format!(" and lease_ends >= {ends} and (lease_ends > {ends} or id > {id})")
        });
        in_a_transaction(&format!(
            "
select id, fingerprint, generation, lease_ends, operation, {NOW} from {table} where {due}{until}{after}
order by lease_ends, id limit {limit};"
        ))
    }

    pub(super) fn is_due(&self, orphan: &Found, page: &Page) -> String {
        let (table, due) = (&self.table, due(page));
        let (id, generation) = (bytes(orphan.id.as_bytes()), orphan.generation);
        in_a_transaction(&format!(
            "
select true from {table} where id = {id} and generation = {generation} and {due};"
        ))
    }

    pub(super) fn purge(&self, batch: u32) -> String {
        let table = &self.table;
        in_a_transaction(&format!(
            "
delete from {table} where forgotten_at <= {NOW} order by forgotten_at limit {batch};
select row_count();"
        ))
    }
}

/// The isolation level is that of the next transaction only; what comes after it is not left to `completion_type`.
fn in_a_transaction(statements: &str) -> String {
    format!(
        "set transaction isolation level read committed; start transaction;{statements} commit and no chain no release;"
    )
}

/// Its lease has been over for long enough, and nobody has the outcome. The first conditions are those of an index.
fn due(page: &Page) -> String {
    let older = page.older_than.as_millis();
    let pause = format!("{older} * (1 << least(generation - 1, {MOST_DOUBLINGS}))");
    format!(
        "completed is null and lease_ends <= {NOW} - {older} and lease_ends + {pause} <= {NOW} \
         and forgotten_at > {NOW} and operation <> 'run_once'"
    )
}

/// The token holds the entry, its lease over or not.
fn held(lease: &LeaseRef) -> String {
    let id = bytes(lease.id.as_bytes());
    let token = bytes(lease.token.as_bytes());
    format!("id = {id} and token = {token} and completed is null and forgotten_at > {NOW}")
}

fn bytes(bytes: &[u8]) -> String {
    format!("x'{}'", hex::encode(bytes))
}

/// At most as long as its column.
fn text(text: &str) -> String {
    let end = text.char_indices().nth(LONGEST_TEXT);
    let text = end.map_or(text, |(end, _)| &text[..end]);
    format!("convert({} using utf8mb4)", bytes(text.as_bytes()))
}

/// How much longer than three quarters of it a statement with a record is, at most.
pub(super) const OVERHEAD: usize = 8 << 10;
const LONGEST_TEXT: usize = 255;
/// Of the statement's begin, and the same throughout. Not by the session's time zone, whose hours come twice in autumn.
const NOW: &str = "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(3)) div 1000)";
