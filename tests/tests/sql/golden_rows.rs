//! Rows of earlier versions: this version reads and takes over these rows.

use tests::database::pool_options;
use tests::{
    scratch::Scratch,
    servers::{mariadb::MariaDbServer, postgres::PostgresServer},
};
use tower_idempotency::store::{Acquired, Claim, Fingerprint, KeyId, Store, Token, Ttl};
use tower_idempotency_sqlx::{
    MySqlStore, PostgresStore, SqliteStore,
    sqlx::{self},
};

fn claim(id: u8) -> Claim {
    Claim::new(
        KeyId::from_bytes([id; 32]),
        Fingerprint::from_bytes([0xf0; 32]),
    )
    .expect("the database works")
}

async fn reads_rows(store: &impl Store) {
    let completed = store.acquire(&claim(1)).await.expect("the database works");
    let Acquired::Completed {
        fingerprint,
        record,
        token,
        ..
    } = completed
    else {
        panic!("expected a record, found {completed:?}");
    };
    assert_eq!(fingerprint, Fingerprint::from_bytes([0xf0; 32]));
    assert_eq!(
        (&record[..], token),
        (
            &b"here is a record"[..],
            Some(Token::from_bytes([0xaa; 16]))
        )
    );

    let in_progress = store.acquire(&claim(2)).await.expect("the database works");
    assert!(
        matches!(in_progress, Acquired::InProgress { .. }),
        "{in_progress:?}"
    );
    // The process of the earlier version still holds its lease.
    let mut held = claim(2);
    held.token = Token::from_bytes([0xbb; 16]);
    store
        .renew(&held.lease_ref(1), Ttl::from_secs(60))
        .await
        .expect("the database works");
    store
        .complete(&held.lease_ref(1), "late".into(), Ttl::from_secs(60))
        .await
        .expect("the database works");

    for (id, generation) in [(3, 4), (4, 3)] {
        let taken_over = store.acquire(&claim(id)).await.expect("the database works");
        assert_eq!(
            taken_over,
            Acquired::Granted {
                generation,
                takeover: true
            },
            "{id}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_reads_rows_of_version_1() {
    let server = PostgresServer::start(&[]);
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    let pool = pool_options::<sqlx::Postgres>()
        .connect(&server.url())
        .await
        .unwrap();
    let rows = include_str!("../../golden/sql-v1/postgres.sql");
    sqlx::raw_sql(rows).execute(&pool).await.unwrap();
    reads_rows(&store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_reads_rows_of_version_1() {
    let server = MariaDbServer::start(&[]);
    let store = MySqlStore::connect(&server.url()).await.unwrap();
    let pool = pool_options::<sqlx::MySql>()
        .connect(&server.url())
        .await
        .unwrap();
    let rows = include_str!("../../golden/sql-v1/mysql.sql");
    sqlx::raw_sql(rows).execute(&pool).await.unwrap();
    reads_rows(&store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_reads_rows_of_version_1() {
    let scratch = Scratch::new();
    let url = format!("sqlite:{}", scratch.file("golden.db").display());
    let store = SqliteStore::connect(&url).await.unwrap();
    let pool = pool_options::<sqlx::Sqlite>().connect(&url).await.unwrap();
    let rows = include_str!("../../golden/sql-v1/sqlite.sql");
    sqlx::raw_sql(rows).execute(&pool).await.unwrap();
    reads_rows(&store).await;
}
