//! Plans of the queue in PostgreSQL, from the log of a server.

use consumers::retry_queue::{PostgresQueue, RetryQueue};
use tests::{database::pool_options, servers::postgres::PostgresServer};
use tower_idempotency_sqlx::sqlx;

use crate::harness::HOUR;

/// While the carrier is closed, nearly all messages are delayed, and each consumer polls 20 times in a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_reads_only_due_messages() {
    let server = PostgresServer::start(&[
        "session_preload_libraries=auto_explain",
        "auto_explain.log_min_duration=0",
        "auto_explain.log_analyze=on",
        "autovacuum=off",
    ]);
    let queue = PostgresQueue::connect(&server.url()).await.expect(WORKS);
    let url = server.url();
    let pool = pool_options::<sqlx::Postgres>().connect(&url).await;
    let pool = pool.expect(WORKS);
    let fill = "insert into messages (id, body, state, since, due)
select state || n, 'tea to Vienna', state, now, case when n > expired then now + 3600000 + n else now - n end
from generate_series(1, 20000) n, (values ('queued', 0), ('done', 1500)) states (state, expired),
    (select floor(extract(epoch from clock_timestamp()) * 1000)::bigint as now) clock";
    for statement in [fill, "analyze messages"] {
        sqlx::query(statement).execute(&pool).await.expect(WORKS);
    }

    let before = server.log().len();
    assert_eq!(queue.receive(HOUR).await.expect(WORKS), None);
    assert_eq!(queue.purge().await.expect(WORKS), 1_500);
    let log = server.log();
    let log = &log[before..];
    // One poll, and three calls of the purge.
    let scan = "using messages_by_state on messages";
    assert_eq!(log.matches(scan).count(), 4, "{log}");
    for wrong in ["Rows Removed by", "Seq Scan on messages"] {
        assert!(!log.contains(wrong), "{wrong}:\n{log}");
    }
}

const WORKS: &str = "the database works";
