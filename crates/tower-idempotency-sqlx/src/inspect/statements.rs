//! Statements for operators, in the dialect of each database.
//!
//! Values are part of the text, as digits only; see `docs/internals/decisions/0018`. SQLite binds a record, which may be too
//! long for a statement there.

use tower_idempotency::{
    inspect::{DEFAULT_ORPHAN_RETENTION, IdPrefix, State},
    store::{KeyId, Token, Ttl},
};

use super::{EntryRow, Position};
use crate::Table;

/// The SQL of a database, where it differs.
pub(crate) struct Dialect {
    /// Name of the store, for page tokens.
    pub(crate) name: &'static str,
    /// Quotation mark of names.
    pub(crate) quote: char,
    /// Returns the literal of bytes.
    pub(crate) bytes: fn(&[u8]) -> String,
    /// Returns the expression of a record that a statement stores: its literal, or a parameter.
    pub(crate) record: fn(&[u8]) -> String,
    /// Returns the expression that selects a column of bytes.
    pub(crate) select_bytes: fn(&str) -> String,
    /// The first [`State::RECORD_PREFIX`] bytes of a record.
    pub(crate) record_prefix: String,
    /// The number of bytes of a record.
    pub(crate) record_length: &'static str,
    /// The condition of a record that needs attention, as in its index.
    pub(crate) needs_attention: String,
    /// The column with the time of such a record, as in its index.
    pub(crate) attention_key: &'static str,
    /// The column with the expiry of a completed entry, as in its index.
    pub(crate) completed_key: &'static str,
    /// Current time, which a statement that reads computes once.
    pub(crate) now: String,
    /// Current time in a statement that writes.
    pub(crate) now_of_write: &'static str,
    /// Returns the index hint that follows the table in a listing.
    pub(crate) index_hint: fn(&str) -> String,
    /// The tables between `update .. set ..` and `where`, and between `delete from` and `where`.
    pub(crate) from: [String; 2],
}

/// The order of a listing. Each has an index.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// Entries in progress, by the expiry of their leases.
    InProgress,
    /// Orphans, by the expiry of their leases.
    Orphaned,
    /// Records that need attention, oldest first.
    NeedsAttention,
    /// Completed entries, by their expiry.
    Completed,
    /// All rows whose ID begins with these digits.
    Id(IdPrefix),
}

/// Change of an entry by an operator.
pub(super) enum Change<'a> {
    Orphan {
        token: &'a Token,
    },
    Complete {
        token: &'a Token,
        record: &'a [u8],
        retention: Ttl,
        deletes_checkpoint: bool,
    },
}

/// The statements of one table.
pub(crate) struct InspectStatements {
    dialect: Dialect,
    table: String,
}

impl InspectStatements {
    pub(crate) fn new(dialect: Dialect, table: &Table) -> Self {
        Self {
            table: table.quoted(dialect.quote),
            dialect,
        }
    }

    /// Returns the name of the store and its table, for page tokens.
    pub(super) fn origin(&self) -> String {
        format!("{} {}", self.dialect.name, self.table)
    }

    /// Reads the row with its whole record.
    pub(crate) fn read(&self, id: &KeyId) -> String {
        let columns = self.columns("record");
        let (table, id) = (&self.table, (self.dialect.bytes)(id.as_bytes()));
        format!("select {columns} from {table} where id = {id}")
    }

    /// Reads rows in this order, after the position, with the first bytes of their records.
    pub(super) fn scan(&self, order: Order, after: Option<&Position>, limit: usize) -> String {
        let columns = self.entry_columns();
        let condition = self.condition(order);
        let after = after.map_or_else(String::new, |after| {
            let (at, id) = (after.key, (self.dialect.bytes)(&after.id));
            match self.key(order) {
                "id" => format!(" and id > {id}"),
                key => format!(" and {key} >= {at} and ({key} > {at} or id > {id})"),
            }
        });
        let index = order.index();
        let order = match self.key(order) {
            "id" => "id".to_owned(),
            key => format!("{key}, id"),
        };
        let (table, hint) = (&self.table, (self.dialect.index_hint)(index));
        format!(
            "select {columns} from {table}{hint} where {condition}{after} order by {order} limit {limit}"
        )
    }

    /// Counts the entries of a state among the last `examined` rows of its order. Returns this count and the number of rows.
    ///
    /// Expired orphans, which are not purged yet, are the first rows of their order.
    pub(super) fn count(&self, state: State, examined: u64) -> String {
        let now = &self.dialect.now;
        let order = Order::of_state(state);
        let (key, condition) = (self.key(order), self.condition(order));
        let matches = match order {
            Order::Completed => format!("not coalesce({}, false)", self.dialect.needs_attention),
            _ => format!("expires > {now}"),
        };
        let (table, hint) = (&self.table, (self.dialect.index_hint)(order.index()));
        format!(
            "select count(case when is_counted then 1 end), count(*)
from (select {matches} as is_counted from {table}{hint} where {condition} order by {key} desc limit {examined}) examined"
        )
    }

    /// Changes the row unless it has changed since it was read.
    pub(super) fn update(&self, row: &EntryRow, state: State, change: &Change<'_>) -> String {
        let (table, now) = (&self.table, self.dialect.now_of_write);
        let condition = self.is_unchanged(row, state);
        let set = match change {
            Change::Orphan { token } => {
                let token = (self.dialect.bytes)(token.as_bytes());
                let default = DEFAULT_ORPHAN_RETENTION.as_millis();
                format!(
                    "token = {token}, lease_ends = {now},
  expires = {now} + case orphan_retention when 0 then {default} else orphan_retention end, completed = null, record = null"
                )
            }
            Change::Complete {
                token,
                record,
                retention,
                deletes_checkpoint,
            } => {
                let token = (self.dialect.bytes)(token.as_bytes());
                let (record, retention) = ((self.dialect.record)(record), retention.as_millis());
                let checkpoint = if *deletes_checkpoint {
                    ", checkpoint = null, checkpoint_data = null"
                } else {
                    ""
                };
                format!(
                    "token = {token}, completed = {now}, expires = {now} + {retention}, record = {record}{checkpoint}"
                )
            }
        };
        let [from, _] = &self.dialect.from;
        format!("update {table} set {set}{from} where {condition}")
    }

    /// Deletes the row unless it has changed since it was read.
    pub(super) fn delete(&self, row: &EntryRow, state: State) -> String {
        let (table, condition) = (&self.table, self.is_unchanged(row, state));
        let [_, from] = &self.dialect.from;
        format!("delete from {table}{from} where {condition}")
    }

    /// Returns the columns of an [`EntryRow`] with the beginning of its record.
    pub(crate) fn entry_columns(&self) -> String {
        self.columns(&self.dialect.record_prefix)
    }

    /// Returns the columns of an [`EntryRow`], with this expression for the record.
    fn columns(&self, record: &str) -> String {
        let bytes = self.dialect.select_bytes;
        let [id, token, fingerprint, record] = ["id", "token", "fingerprint", record].map(bytes);
        let (length, now) = (self.dialect.record_length, &self.dialect.now);
        format!(
            "{id}, {token}, {fingerprint}, generation, lease_ends, expires, created, completed, owner, operation,
  checkpoint is not null, {record}, {length}, {now}"
        )
    }

    /// Returns the condition that the row has not changed since it was read. A renewal of a lease does not count as a
    /// change.
    fn is_unchanged(&self, row: &EntryRow, state: State) -> String {
        let now = self.dialect.now_of_write;
        let (id, generation) = ((self.dialect.bytes)(&row.id), row.generation);
        let token = match &row.token {
            Some(token) => format!("token = {}", (self.dialect.bytes)(token)),
            None => "token is null".to_owned(),
        };
        let state = match (row.completed, state) {
            (Some(completed), _) => format!("completed = {completed}"),
            (None, State::InProgress) => format!("completed is null and lease_ends > {now}"),
            (None, _) => {
                let lease_ends = row.lease_ends;
                format!("completed is null and lease_ends = {lease_ends} and lease_ends <= {now}")
            }
        };
        format!(
            "id = {id} and generation = {generation} and {token} and {state} and expires > {now}"
        )
    }

    /// Returns the condition of the rows in an order. The index of the order serves it.
    fn condition(&self, order: Order) -> String {
        let now = &self.dialect.now;
        match order {
            Order::InProgress => format!("completed is null and lease_ends > {now}"),
            Order::Orphaned => format!("completed is null and lease_ends <= {now}"),
            Order::NeedsAttention => self.dialect.needs_attention.clone(),
            // The first condition tells the planner that the index omits no row of the listing.
            Order::Completed => format!(
                "completed is not null and {} > {now}",
                self.dialect.completed_key
            ),
            Order::Id(prefix) => {
                let (first, last) = prefix.range();
                let [first, last] = [first, last].map(|id| (self.dialect.bytes)(id.as_bytes()));
                format!("id >= {first} and id <= {last}")
            }
        }
    }

    /// Returns the column of an order, before the ID.
    fn key(&self, order: Order) -> &'static str {
        match order {
            Order::InProgress | Order::Orphaned => "lease_ends",
            Order::NeedsAttention => self.dialect.attention_key,
            Order::Completed => self.dialect.completed_key,
            Order::Id(_) => "id",
        }
    }
}

impl Order {
    pub(super) fn of_state(state: State) -> Self {
        match state {
            State::InProgress => Self::InProgress,
            State::Orphaned => Self::Orphaned,
            State::NeedsAttention => Self::NeedsAttention,
            _ => Self::Completed,
        }
    }

    /// Returns the name of the index, without the name of the table.
    fn index(self) -> &'static str {
        match self {
            Self::InProgress | Self::Orphaned => "orphans",
            Self::NeedsAttention => "attention",
            Self::Completed => "completed",
            Self::Id(_) => "primary",
        }
    }

    /// Returns the value of the column of this order.
    pub(super) fn key_of(self, row: &EntryRow) -> i64 {
        match self {
            Self::InProgress | Self::Orphaned => row.lease_ends,
            Self::NeedsAttention => row.completed.unwrap_or_default(),
            Self::Completed => row.expires,
            Self::Id(_) => 0,
        }
    }
}
