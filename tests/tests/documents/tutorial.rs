//! The tutorial of the documentation, built from an empty folder and run without changes.

use std::{
    fs,
    path::{Path, PathBuf},
};
use tests::database::pool_options;

use http::{Request, StatusCode};
use tests::{
    TestResponse,
    playground::{Playground, cargo},
    servers::postgres::PostgresServer,
};
use tower_idempotency_sqlx::sqlx::{self};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Returns the first code block of this language in the tutorial.
fn block(language: &str) -> String {
    let tutorial = fs::read_to_string(format!("{REPOSITORY}/docs/guide/tutorial.md"));
    let tutorial = tutorial.expect("a tutorial");
    let (_, rest) = tutorial
        .split_once(&format!("```{language}\n"))
        .expect("a block");
    let (block, _) = rest.split_once("```").expect("an end of the block");
    block.to_owned()
}

/// Creates the project of the tutorial in an empty folder.
fn project() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("payments");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("src")).expect("a folder");
    let dependencies = block("toml").replace("../tower-idempotency/", &format!("{REPOSITORY}/"));
    let manifest = format!(
        "[package]\nname = \"payments\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n{dependencies}\n[workspace]\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest).expect("a manifest");
    fs::write(folder.join("src/main.rs"), block("rust")).expect("a source file");
    // Uses the versions of the workspace, so that dependencies are not built again.
    let lock = format!("{REPOSITORY}/Cargo.lock");
    fs::copy(lock, folder.join("Cargo.lock")).expect("a lock file");
    folder
}

fn start(folder: &Path, database: &PostgresServer) -> Playground {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut command = cargo();
    command
        .args(["run", "--quiet"])
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", target.join("tutorial"))
        .env(
            "CARGO_BUILD_BUILD_DIR",
            target.parent().expect("a target directory"),
        )
        .env("DATABASE_URL", database.url())
        .env("LISTEN", "127.0.0.1:0");
    Playground::started_by(&mut command)
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
    let folder = project();
    let service = start(&folder, &database);

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
    let service = start(&folder, &database);
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
