//! Clients that follow redirects with the same key, over real sockets.

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http::{Request, StatusCode, header};
use tests::{Effects, created, wire::Server};
use tokio::process::Command;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Preset};

const PRESETS: [Preset; 4] = [
    Preset::Recommended,
    Preset::Ietf,
    Preset::Stripe,
    Preset::Idempo,
];

#[derive(Clone, Copy, Debug)]
enum Follower {
    Curl,
    Reqwest,
}

const FOLLOWERS: [Follower; 2] = [Follower::Curl, Follower::Reqwest];

impl Follower {
    /// Posts an order, follows the redirects, and returns the status of the last response.
    async fn order(self, url: &str) -> StatusCode {
        match self {
            Self::Curl => curl(url).await,
            Self::Reqwest => reqwest(url).await,
        }
    }
}

async fn curl(url: &str) -> StatusCode {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--noproxy", "*", "--location"]);
    curl.args(["--max-redirs", "10", "--max-time", "20"]);
    curl.args(["--header", "idempotency-key: \"k\"", "--data", "order"]);
    curl.args(["--output", "/dev/null", "--write-out", "%{http_code}", url]);
    let output = curl.output().await.expect("curl is installed");
    let status = String::from_utf8(output.stdout).expect("digits");
    status.parse().expect("a status")
}

async fn reqwest(url: &str) -> StatusCode {
    let client = reqwest::Client::builder().no_proxy().build();
    let order = client.expect("a client").post(url).body("order");
    let sent = order.header("idempotency-key", "\"k\"").send().await;
    sent.expect("a response").status()
}

fn layer(preset: Preset) -> IdempotencyLayer {
    IdempotencyLayer::with_preset(MemoryStore::new(), preset)
}

fn redirect(status: u16, location: String) -> Response {
    let status = StatusCode::from_u16(status).expect("a status");
    (status, [(header::LOCATION, location)]).into_response()
}

/// Serves `router` behind a layer, orders at `path` and then at `retry_path`, and checks that one order is executed and both
/// responses are 201.
async fn assert_ordered_once(router: impl Fn(Effects) -> Router, path: &str, retry_path: &str) {
    for preset in PRESETS {
        for follower in FOLLOWERS {
            let effects = Effects::default();
            let app = router(effects.clone()).route_layer(layer(preset));
            let server = Server::start(app).await;
            for path in [path, retry_path, retry_path] {
                let status = follower
                    .order(&format!("http://{}{path}", server.addr()))
                    .await;
                assert_eq!(
                    status,
                    StatusCode::CREATED,
                    "{preset:?} {follower:?} {path}"
                );
            }
            assert_eq!(effects.count(), 1, "{preset:?} {follower:?}");
        }
    }
}

/// Redirects `/old` to `/new`.
fn moved_path(status: u16, effects: Effects) -> Router {
    let moved = async move || redirect(status, "/new".to_owned());
    Router::new()
        .route("/old", post(moved))
        .route("/new", post(async move || created(effects.happen())))
}

// S-930, F-920
#[tokio::test]
async fn moved_path_is_executed_at_new_path() {
    for status in [307, 308] {
        assert_ordered_once(|effects| moved_path(status, effects), "/old", "/new").await;
    }
}

// S-933
#[tokio::test]
async fn retry_at_moved_path_executes_nothing() {
    for follower in FOLLOWERS {
        let effects = Effects::default();
        let app = moved_path(308, effects.clone()).route_layer(layer(Preset::Recommended));
        let server = Server::start(app).await;
        let url = format!("http://{}/old", server.addr());
        assert_eq!(follower.order(&url).await, StatusCode::CREATED);
        let retry = follower.order(&url).await;
        assert_eq!(retry, StatusCode::UNPROCESSABLE_ENTITY, "{follower:?}");
        assert_eq!(effects.count(), 1, "{follower:?}");
    }
}

// S-930, F-920
#[tokio::test]
async fn moved_host_is_executed_at_new_host() {
    let router = |effects: Effects| {
        let orders = async move |req: Request<Body>| {
            let host = req.headers()[header::HOST].to_str().expect("text");
            match host.strip_prefix("127.0.0.1:") {
                Some(port) => redirect(307, format!("http://localhost:{port}/orders")),
                None => created(effects.happen()),
            }
        };
        Router::new().route("/orders", post(orders))
    };
    assert_ordered_once(router, "/orders", "/orders").await;
}

// S-931
#[tokio::test]
async fn redirect_to_result_is_recorded() {
    for status in [301, 302, 303] {
        let router = |effects: Effects| {
            let orders = async move || {
                effects.happen();
                redirect(status, "/orders/1".to_owned())
            };
            Router::new()
                .route("/orders", post(orders))
                .route("/orders/1", get(async || StatusCode::CREATED))
        };
        assert_ordered_once(router, "/orders", "/orders").await;
    }
}
