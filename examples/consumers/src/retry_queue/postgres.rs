use std::{future::Future, time::Duration};

use tokio::time::timeout;
use tower_idempotency_sqlx::{
    SqlError,
    sqlx::{self, Connection as _, PgPool, postgres::PgPoolOptions},
};

use super::{Message, Move, RetryQueue, State, message::millis, queue::TIMEOUT};
use crate::Failure;

/// A retry queue in PostgreSQL: the table `messages`.
///
/// A call has a timeout of ten seconds. Errors of the database are [`SqlError`], which quotes no values of statements.
#[derive(Clone, Debug)]
pub struct PostgresQueue(PgPool);

impl PostgresQueue {
    /// Connects to the database at this URL, and creates the table if it is missing.
    ///
    /// # Errors
    ///
    /// Returns an error if the database cannot be reached, or refuses.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped, the table may be created.
    pub async fn connect(url: &str) -> Result<Self, Failure> {
        // With a lifetime or an idle timeout, sqlx 0.9.0 starts a task that may use a whole processor (sqlx issue 3645).
        let options = PgPoolOptions::new()
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(TIMEOUT)
            // The pool checks each returned connection without a timeout: connections that hang would use it up.
            .after_release(|connection, _| {
                Box::pin(async move {
                    let alive = timeout(TIMEOUT, connection.ping()).await;
                    alive.unwrap_or_else(|elapsed| Err(sqlx::Error::Io(elapsed.into())))?;
                    Ok(true)
                })
            });
        let pool = within(options.connect(url)).await?;
        within(sqlx::raw_sql(CREATE).execute(&pool)).await?;
        Ok(Self(pool))
    }
}

impl RetryQueue for PostgresQueue {
    async fn send(&self, id: &str, body: &str) -> Result<bool, Failure> {
        let sent = sqlx::query(SEND).bind(id).bind(body);
        let sent = within(sent.execute(&self.0)).await?;
        Ok(sent.rows_affected() == 1)
    }

    async fn receive(&self, visibility: Duration) -> Result<Option<Message>, Failure> {
        let received = sqlx::query_as(RECEIVE).bind(millis(visibility));
        let row: Option<Row> = within(received.fetch_optional(&self.0)).await?;
        row.map(message).transpose()
    }

    async fn apply(&self, next: &Move) -> Result<bool, Failure> {
        let moved = sqlx::query(MOVE)
            .bind(&next.id)
            .bind(next.delivery)
            .bind(next.from.name())
            .bind(next.to.name())
            .bind(i64::from(next.failures))
            .bind(next.round)
            .bind(&next.reason)
            .bind(millis(next.delay));
        let moved = within(moved.execute(&self.0)).await?;
        Ok(moved.rows_affected() == 1)
    }

    async fn list(&self, state: State, limit: u32) -> Result<Vec<Message>, Failure> {
        let listed = sqlx::query_as(LIST)
            .bind(state.name())
            .bind(i64::from(limit));
        let rows: Vec<Row> = within(listed.fetch_all(&self.0)).await?;
        rows.into_iter().map(message).collect()
    }

    async fn purge(&self) -> Result<u64, Failure> {
        let mut all = 0;
        loop {
            let purged = sqlx::query(PURGE).execute(&self.0);
            let purged = within(purged).await?.rows_affected();
            all += purged;
            if purged == 0 {
                return Ok(all);
            }
        }
    }
}

/// Returns the result of a call, or an error after [`TIMEOUT`]. The driver itself waits for its server indefinitely.
async fn within<T>(call: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, Failure> {
    let done = timeout(TIMEOUT, call).await;
    let done = done.map_err(|_| "the database did not respond within ten seconds")?;
    Ok(done.map_err(SqlError::from)?)
}

/// Id, body, state, delivery, failures, round, since, due, reason.
type Row = (String, String, String, i64, i64, i64, i64, i64, String);

fn message(row: Row) -> Result<Message, Failure> {
    let (id, body, state, delivery, failures, round, since, due, reason) = row;
    Ok(Message {
        id,
        body,
        state: State::from_name(&state)?,
        delivery,
        failures: failures.try_into()?,
        round,
        since,
        due,
        reason,
    })
}

/// The lock is for processes that start at the same time. `create .. if not exists` would fail for all but one of them, and
/// would wait for statements that are running.
const CREATE: &str = "
select pg_advisory_xact_lock(hashtext('create table messages'));
do $$ begin
    if to_regclass('messages') is null then
        create table messages (
            id text primary key,
            body text not null,
            state text not null default 'queued',
            delivery bigint not null default 0,
            failures bigint not null default 0,
            round bigint not null default 0,
            since bigint not null,
            due bigint not null,
            reason text not null default ''
        );
        create index messages_by_state on messages (state, due);
    end if;
end $$";

const SEND: &str = "
insert into messages (id, body, since, due)
select $1, $2, now, now from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock
on conflict (id) do nothing";

/// Consumers skip a message that another one is receiving. The time is a subquery: a join with the time would read all
/// messages that are not due.
const RECEIVE: &str = "
with next as (
    select id from messages
    where state = 'queued' and due <= (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
    order by due limit 1 for update skip locked
)
update messages m set delivery = m.delivery + 1,
    due = floor(extract(epoch from clock_timestamp()) * 1000)::bigint + $1
from next where m.id = next.id
returning m.id, m.body, m.state, m.delivery, m.failures, m.round, m.since, m.due, m.reason";

const MOVE: &str = "
update messages set state = $4, failures = $5, round = coalesce($6, round), reason = coalesce($7, reason),
    since = now, due = now + $8
from (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock
where id = $1 and delivery = $2 and state = $3";

const LIST: &str = "
select id, body, state, delivery, failures, round, since, due, reason
from messages where state = $1 order by due limit $2";

/// Deletes a limited number of messages, so that a call ends in time. A finished message does not change its state.
const PURGE: &str = "
delete from messages where id = any (array(
    select id from messages
    where state = 'done' and due <= (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint)
    order by due limit 1000
))";
