//! Operations for operators: [`Inspect`] for the stores of this crate.
//!
//! A listing reads an index in pages that continue after a key. A resolution reads the row, and writes it with one statement
//! under the condition that nothing has changed since.
//!
//! [`Inspect`]: tower_idempotency::inspect::Inspect

mod row;
mod statements;

use std::collections::HashSet;

use tower_idempotency::{
    inspect::{
        Abilities, Count, Entry, EntryDetails, InspectError, InspectErrorKind, Page, PageToken,
        Query, Resolution, ResolveOutcome, Seen, State, Summary,
    },
    store::{KeyId, Token},
};

pub(crate) use self::{
    row::EntryRow,
    statements::{Dialect, InspectStatements},
};
use self::{
    row::Position,
    statements::{Change, Order},
};
use crate::{SqlError, timeout::with_timeout};

/// A store whose entries an operator can list and resolve. Each method is one round trip.
pub(crate) trait InspectTable: Sync {
    fn statements(&self) -> &InspectStatements;

    /// Returns the size of the largest record in bytes.
    fn max_record_len(&self) -> impl Future<Output = Result<usize, SqlError>> + Send;

    /// Returns the rows of a statement that reads.
    fn read_rows(
        &self,
        sql: String,
    ) -> impl Future<Output = Result<Vec<EntryRow>, SqlError>> + Send;

    /// Returns the two numbers of a statement that counts.
    fn read_counts(&self, sql: String)
    -> impl Future<Output = Result<(i64, i64), SqlError>> + Send;

    /// Executes an update, and returns the row afterwards. Notifies waiters if the update applies.
    fn update(
        &self,
        id: &KeyId,
        update: String,
        record: Option<&[u8]>,
    ) -> impl Future<Output = Result<Option<EntryRow>, SqlError>> + Send;

    /// Executes a delete, and returns `true` if it applies. Notifies waiters then.
    fn delete(
        &self,
        id: &KeyId,
        delete: String,
    ) -> impl Future<Output = Result<bool, SqlError>> + Send;
}

/// Implements the trait for a store that implements [`InspectTable`].
macro_rules! implement_inspect {
    ($store:ty) => {
        /// Lists all states. Each listing reads an index, and a page examines at most 8,000 rows, or 16 times its limit if
        /// that is more.
        ///
        /// A resolution waits for a transaction that has written the entry. The wait is at most 1.5 seconds (PostgreSQL),
        /// one second (MySQL, MariaDB) or the busy timeout (SQLite).
        impl ::tower_idempotency::inspect::Inspect for $store {
            fn abilities(&self) -> ::tower_idempotency::inspect::Abilities {
                $crate::inspect::ABILITIES
            }

            async fn list(
                &self,
                query: &::tower_idempotency::inspect::Query,
            ) -> Result<
                ::tower_idempotency::inspect::Page,
                ::tower_idempotency::inspect::InspectError,
            > {
                $crate::inspect::list(&*self.inner, query).await
            }

            async fn get(
                &self,
                id: &::tower_idempotency::store::KeyId,
            ) -> Result<
                Option<::tower_idempotency::inspect::EntryDetails>,
                ::tower_idempotency::inspect::InspectError,
            > {
                $crate::inspect::get(&*self.inner, id).await
            }

            async fn summary(
                &self,
                limit: u32,
            ) -> Result<
                ::tower_idempotency::inspect::Summary,
                ::tower_idempotency::inspect::InspectError,
            > {
                $crate::inspect::summary(&*self.inner, limit).await
            }

            async fn resolve(
                &self,
                seen: &::tower_idempotency::inspect::Seen,
                resolution: &::tower_idempotency::inspect::Resolution,
            ) -> Result<
                ::tower_idempotency::inspect::ResolveOutcome,
                ::tower_idempotency::inspect::InspectError,
            > {
                $crate::inspect::resolve(&*self.inner, seen, resolution).await
            }

            async fn purge(
                &self,
                batch: u32,
            ) -> Result<u64, ::tower_idempotency::inspect::InspectError> {
                Ok(self.purge_expired(batch).await?)
            }
        }
    };
}

pub(crate) use implement_inspect;

pub(crate) const ABILITIES: Abilities = Abilities::all();

pub(crate) async fn list(table: &impl InspectTable, query: &Query) -> Result<Page, InspectError> {
    ABILITIES.check(query)?;
    let statements = table.statements();
    let origin = statements.origin();
    let mut after = match query.page() {
        None => None,
        Some(page) => Some(
            Position::parse(page.position(&origin, query)?)
                .ok_or_else(|| InspectError::new(InspectErrorKind::InvalidPage))?,
        ),
    };
    let order = match query.id_prefix() {
        Some(prefix) => Order::Id(*prefix),
        None => Order::of_state(query.state()),
    };
    let limit = usize::from(query.limit());
    let is_filtered =
        query.older_than().is_some() || query.operation().is_some() || query.owner().is_some();
    // An entry that changes between two calls may move to a later position.
    let mut listed = HashSet::new();
    let mut entries = Vec::new();
    for call in 0..MAX_CALLS {
        // One more row than fits in the page shows that there is a next page. Further calls mean that few rows match.
        let batch = if is_filtered {
            BATCH
        } else {
            BATCH.min((limit + 1) << call)
        };
        let batch = batch.max(limit + 1);
        let sql = statements.scan(order, after.as_ref(), batch);
        let rows = with_timeout(table.read_rows(sql)).await?;
        let is_last = rows.len() < batch;
        for row in rows {
            let entry = row.entry()?;
            let is_in_listing = row.is_in_listing(query.state());
            let is_new =
                |entry: &Entry| is_in_listing && query.matches(entry) && listed.insert(*entry.id());
            if let Some(entry) = entry.filter(is_new) {
                if entries.len() == limit {
                    let next = after.map(|after| token(&origin, query, &after));
                    return Ok(Page::new(entries, next));
                }
                entries.push(entry);
            }
            after = Some(Position::of(order.key_of(&row), &row)?);
        }
        if is_last {
            return Ok(Page::new(entries, None));
        }
    }
    let next = after.map(|after| token(&origin, query, &after));
    Ok(Page::new(entries, next))
}

fn token(origin: &str, query: &Query, after: &Position) -> PageToken {
    PageToken::new(origin, query, &after.to_bytes())
}

pub(crate) async fn get(
    table: &impl InspectTable,
    id: &KeyId,
) -> Result<Option<EntryDetails>, InspectError> {
    let row = read(table, id).await?;
    Ok(row.map(EntryRow::into_details).transpose()?.flatten())
}

async fn read(table: &impl InspectTable, id: &KeyId) -> Result<Option<EntryRow>, SqlError> {
    let sql = table.statements().read(id);
    Ok(with_timeout(table.read_rows(sql)).await?.pop())
}

pub(crate) async fn summary(
    table: &impl InspectTable,
    limit: u32,
) -> Result<Summary, InspectError> {
    let mut summary = Summary::default();
    let limit = u64::from(limit);
    // The index of a state also contains expired rows and rows of other states.
    let examined = limit * 4 + 1024;
    for &state in State::ALL {
        if !ABILITIES.can_list(state) {
            continue;
        }
        let sql = table.statements().count(state, examined);
        let (matching, rows) = with_timeout(table.read_counts(sql)).await?;
        let [matching, rows] = [matching, rows].map(i64::unsigned_abs);
        let is_exact = matching <= limit && rows < examined;
        summary.set(state, Count::new(matching.min(limit), is_exact));
    }
    Ok(summary)
}

pub(crate) async fn resolve(
    table: &impl InspectTable,
    seen: &Seen,
    resolution: &Resolution,
) -> Result<ResolveOutcome, InspectError> {
    resolution.check(seen)?;
    let id = seen.id();
    let record = resolution.record(id);
    if let Some((record, _)) = &record {
        let limit = with_timeout(table.max_record_len()).await?;
        if record.len() > limit {
            return Err(InspectError::new(InspectErrorKind::RecordTooLarge {
                limit,
            }));
        }
    }
    let present = read(table, id).await?;
    let entry = present.as_ref().map(EntryRow::entry).transpose()?.flatten();
    let (Some(row), Some(true)) = (&present, entry.as_ref().map(|it| it.seen() == seen)) else {
        return Ok(ResolveOutcome::Changed(entry.map(Box::new)));
    };
    let statements = table.statements();
    let token = match resolution {
        Resolution::Retry => Token::retry_allowed()?,
        _ => Token::random()?,
    };
    let change = match (&record, resolution) {
        (Some((record, retention)), _) => Change::Complete {
            token: &token,
            record,
            retention: *retention,
            deletes_checkpoint: matches!(resolution, Resolution::Complete { .. }),
        },
        (None, Resolution::Free | Resolution::DeleteRecord) => {
            let delete = statements.delete(row, seen.state());
            if with_timeout(table.delete(id, delete)).await? {
                return Ok(ResolveOutcome::Applied(None));
            }
            return changed(table, id).await;
        }
        (None, _) => Change::Orphan { token: &token },
    };
    let update = statements.update(row, seen.state(), &change);
    let record = record.as_ref().map(|(record, _)| &**record);
    match with_timeout(table.update(id, update, record)).await? {
        Some(row) if row.has_token(&token) => {
            Ok(ResolveOutcome::Applied(row.entry()?.map(Box::new)))
        }
        _ => changed(table, id).await,
    }
}

async fn changed(table: &impl InspectTable, id: &KeyId) -> Result<ResolveOutcome, InspectError> {
    let row = read(table, id).await?;
    let entry = row.as_ref().map(EntryRow::entry).transpose()?.flatten();
    Ok(ResolveOutcome::Changed(entry.map(Box::new)))
}

/// Maximum number of calls for a page.
const MAX_CALLS: usize = 16;
/// Number of rows that a call examines if a filter applies.
const BATCH: usize = 500;

/// Returns the statements of a listing: its first page, the page after `last`, a page of an ID prefix, and the count.
#[cfg(all(test, feature = "sqlite"))]
pub(crate) fn listing_statements(
    table: &impl InspectTable,
    state: State,
    last: &tower_idempotency::inspect::Entry,
) -> [String; 4] {
    let (statements, order) = (table.statements(), Order::of_state(state));
    let after = Position {
        key: 1,
        id: *last.id().as_bytes(),
    };
    [
        statements.scan(order, None, BATCH),
        statements.scan(order, Some(&after), BATCH),
        statements.scan(Order::Id((*last.id()).into()), Some(&after), BATCH),
        statements.count(state, 1_000),
    ]
}
