//! PostgreSQL passes the suite with each default isolation level of its connections, and behind PgBouncer.

use std::sync::OnceLock;

use tests::{
    conformance::run_all_cases,
    conformance_modes,
    servers::{pgbouncer::PgBouncer, postgres},
};
use tokio::sync::OnceCell;
use tower_idempotency::conformance::{Processes, Subject};
use tower_idempotency_sqlx::{PostgresStore, sqlx::postgres::PgConnectOptions};

fn with_level(level: &str) -> PostgresStore {
    let options: PgConnectOptions = postgres::shared().url().parse().expect("an URL");
    PostgresStore::new(options.options([("default_transaction_isolation", level)]))
}

/// PgBouncer has fewer connections to the server than the cases have. The cases share them, statement by statement.
fn behind_pgbouncer() -> PostgresStore {
    static POOLER: OnceLock<PgBouncer> = OnceLock::new();
    let server = postgres::shared();
    let pooler = POOLER.get_or_init(|| PgBouncer::start(server, 8));
    let store = PostgresStore::from_url(&pooler.url()).expect("an URL");
    store.with_listener(server.url().parse().expect("an URL"))
}

macro_rules! suite {
    ($name:ident, $store:expr $(, faults = $faults:ident)?) => {
        conformance_modes! { mod $name, subject = async || {
            static MIGRATED: OnceCell<()> = OnceCell::const_new();
            let store = $store;
            let migrate = async || store.migrate().await.expect("the test server runs");
            MIGRATED.get_or_init(migrate).await;
            Subject::new(store)
        } $(, faults = $faults)? }
    };
}

// The server treats this level as read committed. F-142
suite! { read_uncommitted, with_level("read uncommitted"), faults = replies }
suite! { read_committed, with_level("read committed") }
suite! { repeatable_read, with_level("repeatable read"), faults = replies }
// F-142
suite! { serializable, with_level("serializable"), faults = replies }
// F-140
suite! { pgbouncer_by_transaction, behind_pgbouncer(), faults = replies }

/// Returns a subject with two stores, each with a listener and few connections of its own.
async fn in_two_processes() -> Subject<Processes<PostgresStore>> {
    static MIGRATED: OnceCell<()> = OnceCell::const_new();
    let [first, second] = [(); 2].map(|()| with_level("read committed").with_connections(4));
    let migrate = async || first.migrate().await.expect("the test server runs");
    MIGRATED.get_or_init(migrate).await;
    Subject::new(Processes::new([first, second]))
}

// F-051
#[test]
fn two_processes() {
    run_all_cases(in_two_processes, |_| None);
}
