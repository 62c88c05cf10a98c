//! The layer in an axum server, and the proxy in front of a service that knows nothing of keys.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::Instant,
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::StatusCode,
    middleware::{self, Next},
    response::Response,
};
use tests::{Effects, HANG_GUARD, created, wire::Server};
use tokio::sync::Semaphore;
use tower_idempotency::{IdempotencyLayer, MemoryStore, MissingKey};
use tower_idempotency_proxy::{Config, Proxy};

use crate::{CommandOutput, every_row, row, run};

/// Counts refused duplicates, for which the first request of a row waits. So the table is the same in each run.
#[derive(Clone)]
struct Refusals(Arc<HashMap<&'static str, (Semaphore, u32)>>);

impl Refusals {
    fn new() -> Self {
        let rows = [("concurrent", 1), ("many", 7)];
        let rows = rows.map(|(row, count)| (row, (Semaphore::new(0), count)));
        Self(Arc::new(rows.into()))
    }

    async fn wait(&self, row: &str) {
        if let Some((refusals, count)) = self.0.get(row) {
            let permits = refusals.acquire_many(*count).await;
            permits.expect("it stays open").forget();
        }
    }

    fn count(&self, row: &str) {
        if let Some((refusals, _)) = self.0.get(row) {
            refusals.add_permits(1);
        }
    }
}

/// The effects of each row.
type Counts = Arc<Mutex<BTreeMap<String, u64>>>;

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new()).with_missing_key(MissingKey::Reject)
}

fn layered(layer: IdempotencyLayer) -> (Router, Counts) {
    let counts = Counts::default();
    let (counted, effects) = (counts.clone(), Effects::default());
    let refusals = Refusals::new();
    let waiting = refusals.clone();
    let handler = move |req: Request| {
        let row = row(req.headers());
        *counted.lock().unwrap().entry(row.clone()).or_default() += 1;
        let (number, waiting) = (effects.happen(), waiting.clone());
        async move {
            waiting.wait(&row).await;
            created(number)
        }
    };
    let count = move |req: Request, next: Next| {
        let (row, refusals) = (row(req.headers()), refusals.clone());
        async move {
            let response: Response<Body> = next.run(req).await;
            if response.status() == StatusCode::CONFLICT {
                refusals.count(&row);
            }
            response
        }
    };
    let app = Router::new()
        .fallback(handler)
        .layer(layer)
        .layer(middleware::from_fn(count));
    (app, counts)
}

/// Returns the effects that the rows have on a server that conforms: one for each key of each caller.
fn one_for_each_key() -> BTreeMap<String, u64> {
    let rows = [
        ("fresh", 2),
        ("other-body", 1),
        ("other-path", 1),
        ("other-method", 1),
        ("other-caller", 2),
        ("case", 1),
        ("concurrent", 1),
        ("many", 1),
        ("disconnect", 1),
    ];
    rows.map(|(row, count)| (row.to_owned(), count)).into()
}

/// Judges each row of a layer. Returns the output and the effects of each row.
async fn judge(layer: fn() -> IdempotencyLayer, options: &[&str]) -> (CommandOutput, Counts) {
    let began = Instant::now();
    loop {
        let (app, counts) = layered(layer());
        let server = Server::start(app).await;
        let mut args = every_row(server.addr());
        args.extend(options.iter().map(|it| (*it).to_owned()));
        let ran = run(args).await;
        // If this process stalls, it can read the retry before the request of the client that has disconnected.
        let is_unjudged = |line: &str| line.contains("disconnect") && line.contains("not judged");
        if !ran.out.lines().any(is_unjudged) {
            return (ran, counts);
        }
        assert!(began.elapsed() < HANG_GUARD, "{}", ran.out);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layer_conforms() {
    let (ran, counts) = judge(layer, &[]).await;
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    insta::assert_snapshot!(format!("{}\n{}", ran.err, ran.out));
    assert!(ran.out.lines().all(|line| line.chars().count() <= 80));
    assert_eq!(*counts.lock().unwrap(), one_for_each_key());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_row_has_line_of_json() {
    let (ran, counts) = judge(layer, &["--json", "--strict-keys"]).await;
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert_eq!(ran.rows("holds").len(), 21, "{}", ran.out);
    assert_eq!(ran.out.lines().count(), 21, "{}", ran.out);
    assert_eq!(*counts.lock().unwrap(), one_for_each_key());
}

/// Another path or method under a used key executes, and a retry of it is a replay.
#[tokio::test(flavor = "multi_thread")]
async fn endpoint_in_scope_conforms() {
    let scoped = || layer().with_endpoint_in_scope(true);
    let (ran, counts) = judge(scoped, &["--json"]).await;
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert_eq!(ran.rows("holds").len(), 21, "{}", ran.out);
    let mut expected = one_for_each_key();
    for row in ["other-path", "other-method"] {
        expected.insert(row.to_owned(), 2);
    }
    assert_eq!(*counts.lock().unwrap(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn proxy_conforms() {
    let effects = Effects::default();
    let counted = effects.clone();
    let upstream = Router::new().fallback(move || {
        let number = counted.happen();
        async move { created(number) }
    });
    let upstream = Server::start(upstream).await;
    let config = format!(
        "[listen]\naddress = \"127.0.0.1:0\"\n[store]\nurl = \"memory\"\n[upstream.app]\nurl = \"http://{}\"\n[[route]]\npath = \"/**\"\nupstream = \"app\"\nmissing_key = \"reject\"\n",
        upstream.addr()
    );
    let config = Config::from_toml(&config).expect("a valid configuration");
    let proxy = Proxy::bind(config).await.expect("a free port");
    let address = proxy.address();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(proxy.serve(async move {
        let _ = stopped.await;
    }));
    let mut args = every_row(address);
    args.extend(["--json".to_owned(), "--strict-keys".to_owned()]);
    let ran = run(args).await;
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.rows("does not hold").is_empty(), "{}", ran.out);
    // Duplicates may all be replays. For `disconnect`, see `judge`.
    let unjudged = ran.rows("not judged");
    assert!(
        unjudged
            .iter()
            .all(|row| ["concurrent-409", "disconnect"].contains(&&**row)),
        "{}",
        ran.out
    );
    let expected: u64 = one_for_each_key().values().sum();
    assert_eq!(effects.count(), expected);
    drop(stop);
    assert!(serving.await.expect("the proxy does not panic"));
}
