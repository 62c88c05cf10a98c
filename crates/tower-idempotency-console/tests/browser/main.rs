//! The console in headless Chromium, driven by `scenarios.mjs`.
//!
//! The scripts judge what a person sees; the tests judge the store and the audit log afterwards.

#[path = "../console/harness.rs"]
mod harness;

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::OnceLock,
};

use axum::{Router, response::Html, routing};
use bytes::Bytes;
use http::{HeaderValue, Method, Response, header};
use tests::{
    Effects,
    playground::{Playground, run},
    servers::redis::RedisServer,
};
use tower_http::cors::CorsLayer;
use tower_idempotency::{
    IdempotencyLayer, MemoryStore,
    inspect::{Inspect as _, Inspector, State},
};
use tower_idempotency_console::{Console, audit::AuditLog};

use self::harness::{Keys, Server, access, acquire, attention, claim, complete, listen, orphan};

/// Returns the directory of the library that drives the browser.
fn tools() -> &'static str {
    static TOOLS: OnceLock<String> = OnceLock::new();
    TOOLS.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/browser-tools");
        let home = run(&script.display().to_string(), [""; 0]).expect("chromium, node and npm");
        String::from_utf8(home).expect("a path").trim().to_owned()
    })
}

/// Runs a scenario, which fails if the browser reports an error.
async fn play(scenario: &'static str, urls: &[String]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser/scenarios.mjs");
    let urls = urls.to_vec();
    let played = tokio::task::spawn_blocking(move || {
        Command::new("node")
            .arg(script)
            .arg(scenario)
            .args(&urls)
            .env("BROWSER_TOOLS", tools())
            .stdin(Stdio::null())
            .output()
            .expect("node")
    });
    let played = played.await.expect("no panic");
    let errors = String::from_utf8_lossy(&played.stderr).into_owned();
    assert!(played.status.success(), "{scenario}: {errors}");
}

impl Server {
    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

async fn filled() -> (Server, Keys) {
    let server =
        Server::start_with(|console| console.with_layer(IdempotencyLayer::new(MemoryStore::new())))
            .await;
    let keys = Keys::create(&server.store.store).await;
    for n in 0..3 {
        orphan(&server.store.store, &format!("POST /orders/{n}")).await;
    }
    (server, keys)
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_work_in_each_mode() {
    let (server, keys) = filled().await;
    let entry = format!("{}/entries/{}", server.url(), keys.completed.id.to_hex());
    play("pages", &[server.url(), entry]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keyboard_is_enough_to_resolve() {
    let (server, keys) = filled().await;
    play("keyboard", &[server.url()]).await;
    assert_eq!(server.state(&keys.attention.id).await, None);
    let audit = server.audit();
    assert!(audit[0].contains("\"why\":\"by keyboard\""), "{audit:?}");
    assert_eq!(audit.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn resolving_needs_no_scripts() {
    let (server, keys) = filled().await;
    play("no-scripts", &[server.url()]).await;
    assert_eq!(server.state(&keys.attention.id).await, None);
    assert_eq!(server.audit().len(), 8, "one entry, and three ticked ones");
}

#[tokio::test(flavor = "multi_thread")]
async fn second_operator_sees_conflict() {
    let (server, keys) = filled().await;
    let path = format!("{}/entries/{}", server.url(), keys.orphaned.id.to_hex());
    play("two-operators", &[path]).await;
    let outcomes = server.audit();
    let applied = outcomes
        .iter()
        .filter(|it| it.contains("\"outcome\":\"applied\""));
    assert_eq!(applied.count(), 1, "{outcomes:?}");
    assert!(outcomes[0].contains("\"actor\":\"first\""), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefixes_do_not_matter() {
    let (server, _) = filled().await;
    let console = |server: &Server| {
        Console::new(Inspector::new(server.store.clone()), access)
            .with_audit_log(AuditLog::new(server.log()))
            .into_router()
    };
    let app = Router::new()
        .nest_service("/console", console(&server))
        .nest_service("/ops/team/idempotency", console(&server));
    let address = listen(app).await;
    let urls = [
        "/console",
        "/console/",
        "/ops/team/idempotency",
        "/ops/team/idempotency/",
    ];
    let urls = urls.map(|path| format!("http://{address}{path}"));
    play("prefixes", &urls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_of_clients_do_not_run() {
    const SCRIPT: &str = "<script>window.ran=1</script>\"'><img src=x onerror=\"window.ran=2\">";
    let server = Server::start().await;
    let store = &server.store.store;
    let mut urls = vec![server.url()];
    for path in [
        "/audit",
        "/entries?state=orphaned",
        "/entries?state=in-progress",
    ] {
        urls.push(format!("{}{path}", server.url()));
    }
    let orphaned = orphan(store, &format!("POST /{SCRIPT}")).await;
    let (mut owned, noted, recorded) = (claim("POST /x"), claim("POST /y"), claim("POST /z"));
    owned.owner = SCRIPT;
    for claim in [&owned, &noted, &recorded] {
        acquire(store, claim).await;
    }
    attention(store, &noted, SCRIPT).await;
    let response = Response::builder()
        .header("x-note", SCRIPT)
        .header("content-type", "text/html");
    let response = response.body(Bytes::from(SCRIPT)).expect("a response");
    complete(store, &recorded, response).await;
    let seen = server.seen(&orphaned.id).await;
    let fields = [("seen", &*seen), ("how", "retry"), ("reason", SCRIPT)];
    let path = format!("/entries/{}/resolve", orphaned.id.to_hex());
    assert_eq!(server.post(&path, &fields).await.status, 200);
    for claim in [&orphaned, &owned, &noted, &recorded] {
        urls.push(format!("{}/entries/{}", server.url(), claim.id.to_hex()));
    }
    urls.push(format!(
        "{}/entries/{}/body",
        server.url(),
        recorded.id.to_hex()
    ));
    play("client-scripts", &urls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_are_live_until_paused() {
    let (server, keys) = filled().await;
    let id = keys.attention.id.to_hex();
    play("live", &[server.url(), id]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_stream_is_opened_again() {
    let (server, _) = filled().await;
    play("rejected-stream", &[server.url()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_origin_cannot_resolve() {
    let (server, keys) = filled().await;
    let (id, seen) = (
        keys.orphaned.id.to_hex(),
        server.seen(&keys.orphaned.id).await,
    );
    let url = format!("{}/entries/{id}/resolve", server.url());
    play("other-origin", &[url, seen]).await;
    assert_eq!(server.state(&keys.orphaned.id).await, Some(State::Orphaned));
    assert!(server.audit().is_empty());
    let details = server.store.get(&keys.orphaned.id).await.expect("memory");
    assert!(!details.expect("an entry").entry.retry_allowed);
}

// S-958
/// The page of another origin sends a key and reads the marker of the replay. Without the lists of the layer it cannot.
#[tokio::test(flavor = "multi_thread")]
async fn preflight_permits_key_of_other_origin() {
    const PAGE: &str = "<title>Shop</title><link rel=\"icon\" href=\"data:,\">";
    let shop = listen(Router::new().route("/", routing::get(async || Html(PAGE)))).await;
    let shop = format!("http://{shop}");
    let effects = Effects::default();
    let layer = IdempotencyLayer::new(MemoryStore::new());
    let lists = layer.cors();
    let allow = lists.allow.into_iter().chain([header::CONTENT_TYPE]);
    let origin = CorsLayer::new()
        .allow_origin(HeaderValue::from_str(&shop).expect("an origin"))
        .allow_methods([Method::POST]);
    let allowed = origin.clone().allow_headers(allow.collect::<Vec<_>>());
    let described = allowed.clone().expose_headers(lists.expose);
    let without_lists = origin.allow_headers([header::CONTENT_TYPE]);
    let pay = |cors: CorsLayer| {
        let effects = effects.clone();
        let handler = async move || effects.happen().to_string();
        let payments = routing::post(handler).route_layer(layer.clone());
        Router::new().route("/payments", payments).layer(cors)
    };
    let mut urls = vec![shop];
    for cors in [described, allowed, without_lists] {
        urls.push(format!("http://{}/payments", listen(pay(cors)).await));
    }
    play("key-of-other-origin", &urls).await;
    assert_eq!(effects.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn playground_leads_to_replay() {
    let playground = tokio::task::spawn_blocking(|| Playground::start(&[]));
    let playground = playground.await.expect("it starts");
    play("playground", &[playground.url("/")]).await;
    // One order, ten at once, and one whose client hung up.
    assert_eq!(playground.executions().await, 3);
}

/// Redis has no list of completed entries. The page does not query them, and shows that.
#[tokio::test(flavor = "multi_thread")]
async fn playground_queries_listed_states_only() {
    let redis = RedisServer::start(&[]);
    let url = redis.url();
    let playground = tokio::task::spawn_blocking(move || Playground::start(&["--store", &url]));
    let playground = playground.await.expect("it starts");
    play("playground-without-completed", &[playground.url("/")]).await;
    // One order, and one that is in progress.
    assert_eq!(playground.executions().await, 2);
}
