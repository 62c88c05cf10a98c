//! The processes of a test: two services and a provider.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tests::database::pool_options;

use axum::http::{Request, StatusCode};
use rocket_rides::provider::{Charge, Mood};
use tests::{
    HANG_GUARD, TestResponse,
    scratch::Scratch,
    server_process::{ServerProcess, send_http},
};
use tokio::time::sleep;
use tower_idempotency_sqlx::sqlx::{self, PgPool};

/// Two services on one database, and a provider.
pub(crate) struct Processes {
    pub(crate) services: Vec<Arc<ServerProcess>>,
    pub(crate) provider: Arc<ServerProcess>,
    pub(crate) pool: PgPool,
    pub(crate) mailbox: PathBuf,
    _scratch: Scratch,
}

impl Processes {
    /// Starts the processes. `args` are for the services, among them [`BRISK`] or [`PATIENT`].
    pub(crate) async fn start(database: &str, args: &[&str]) -> Self {
        let scratch = Scratch::new();
        let mailbox = scratch.file("mailbox");
        let ledger = scratch.file("ledger").display().to_string();
        let provider = ServerProcess::start(
            env!("CARGO_BIN_EXE_rocket-rides-provider"),
            &["--ledger", &ledger, "--latency", "10ms"],
        );
        let url = provider.url("");
        let services = (0..2).map(|_| {
            let mailbox = mailbox.display().to_string();
            let common = ["--database", database, "--provider", &url];
            let more = ["--abandoned", "100ms", "--mailbox", &mailbox];
            let args = [&common[..], &more, args].concat();
            Arc::new(ServerProcess::start(
                env!("CARGO_BIN_EXE_rocket-rides"),
                &args,
            ))
        });
        Self {
            services: services.collect(),
            provider: Arc::new(provider),
            pool: pool_options::<sqlx::Postgres>()
                .connect(database)
                .await
                .expect("the server runs"),
            mailbox,
            _scratch: scratch,
        }
    }

    /// Makes the provider behave correctly from now on.
    pub(crate) async fn reset_mood(&self) {
        let deadline = Instant::now() + HANG_GUARD;
        while !set_mood(&self.provider, Mood::Well).await {
            assert!(Instant::now() < deadline, "the provider does not come back");
        }
    }

    /// Waits until the completer and the worker have finished all requests with a checkpoint, and all receipts.
    pub(crate) async fn wait_until_idle(&self) {
        let left = "select (select count(*) from tower_idempotency where completed is null and checkpoint is not null),
                    (select count(*) from receipts where delivered is null)";
        let deadline = Instant::now() + HANG_GUARD;
        loop {
            let left = sqlx::query_as(left).fetch_one(&self.pool).await;
            let (rides, receipts): (i64, i64) = left.expect("the server runs");
            if (rides, receipts) == (0, 0) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{rides} rides and {receipts} receipts are stuck\n{}",
                self.logs()
            );
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the count that a query selects.
    pub(crate) async fn count(&self, sql: &'static str) -> i64 {
        let count = sqlx::query_scalar(sql).fetch_one(&self.pool).await;
        count.expect("the server runs")
    }

    /// Returns the charges of the provider.
    pub(crate) async fn charges(&self) -> Vec<Charge> {
        let req = Request::get(self.provider.url("/charges"));
        let response = send_http(req, "").await.expect("the provider runs");
        serde_json::from_slice(&response.body).expect("charges")
    }

    /// Returns the logs of the services.
    pub(crate) fn logs(&self) -> String {
        let logs = self.services.iter().map(|service| service.log());
        logs.collect::<Vec<_>>().join("\n")
    }
}

/// Returns `true` if the provider has accepted the mood.
pub(crate) async fn set_mood(provider: &ServerProcess, mood: Mood) -> bool {
    let mood = serde_json::to_value(mood).expect("a name");
    let path = format!("/mood/{}", mood.as_str().expect("a name"));
    let response = send_http(Request::put(provider.url(&path)), "").await;
    response.is_some_and(|response| response.status == StatusCode::OK)
}

/// Requests a ride, and returns the response if there is one.
pub(crate) async fn book(
    service: &ServerProcess,
    key: &str,
    rider: &str,
    card: &str,
) -> Option<TestResponse> {
    let req = Request::post(service.url("/rides"))
        .header("idempotency-key", key)
        .header("content-type", "application/json");
    let body = format!(r#"{{"rider":"{rider}","destination":"Mars","card":"{card}"}}"#);
    send_http(req, body).await
}

/// Leases that expire during a strike, and a short timeout for the provider.
pub(crate) const BRISK: [&str; 4] = ["--lease", "1s", "--patience", "300ms"];
/// Leases that a process keeps when it stalls for seconds, and an equally long timeout for the provider.
pub(crate) const PATIENT: [&str; 4] = ["--lease", "5s", "--patience", "20s"];
