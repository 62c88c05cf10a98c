//! The tutorial of the documentation, built from an empty directory and run without changes.

use std::path::{Path, PathBuf};

use http::{Request, StatusCode};
use tests::{
    TestResponse, database::pool_options, playground::Playground, servers::postgres::PostgresServer,
};
use tower_idempotency_sqlx::sqlx;

use crate::project::{Blocks, cargo_command, create_project};

/// Creates the project of the tutorial in an empty directory.
fn tutorial() -> PathBuf {
    let blocks = Blocks::from_heading("# ", "guide/tutorial.md");
    create_project(
        "payments",
        &blocks.first("toml"),
        "main.rs",
        &blocks.first("rust"),
    )
}

fn start(directory: &Path, database: &PostgresServer) -> Playground {
    let mut command = cargo_command(directory, "run");
    command
        .arg("--quiet")
        .env("DATABASE_URL", database.url())
        .env("LISTEN", "127.0.0.1:0");
    Playground::started_by(&command)
}

async fn pay(service: &Playground, key: Option<&str>, cents: u32) -> TestResponse {
    let mut request =
        Request::post(service.url("/payments")).header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let body = format!(r#"{{"account":"alice","cents":{cents}}}"#);
    service.send(request, body.as_bytes()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tutorial_charges_once_across_restart() {
    let database = PostgresServer::start(&[]);
    let directory = tutorial();
    let service = start(&directory, &database);

    let first = pay(&service, Some("8e03978e-40d5"), 700).await;
    assert_eq!(first.status, StatusCode::CREATED, "{first:?}");
    assert_eq!(first.text(), r#"{"payment":1}"#);
    assert!(!first.is_replay());
    let retry = pay(&service, Some("8e03978e-40d5"), 700).await;
    assert!(retry.is_replay());
    assert_eq!((retry.status, &retry.body), (first.status, &first.body));
    let other = pay(&service, Some("8e03978e-40d5"), 800).await;
    assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
    let without = pay(&service, None, 700).await;
    assert_eq!(without.status, StatusCode::BAD_REQUEST);

    // Kills the service with SIGKILL.
    drop(service);
    let service = start(&directory, &database);
    let retry = pay(&service, Some("8e03978e-40d5"), 700).await;
    assert!(retry.is_replay());
    assert_eq!(retry.body, first.body);

    let pool = pool_options::<sqlx::Postgres>()
        .connect(&database.url())
        .await
        .expect("the database runs");
    let payments: i64 = sqlx::query_scalar("select count(*) from payments")
        .fetch_one(&pool)
        .await
        .expect("the table of the tutorial");
    assert_eq!(payments, 1);
}
