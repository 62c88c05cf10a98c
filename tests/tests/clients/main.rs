//! Clients of other projects against the layer: the SDK of Stripe, and plain clients in three languages.
//!
//! Each client sends three orders. The connection of the first one breaks while the handler runs, and the response of the
//! second one is lost. The third one has a key of the caller, which the client uses again. Effects are counted at the
//! handler.

mod grpc;
mod grpc_calls;
mod openapi;

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use http::StatusCode;
use tests::{
    playground::run,
    proxy::{ConnectionEnd, Fault, Mode, Proxy},
};
use tokio::{
    net::TcpListener,
    sync::{Notify, Semaphore},
    time::{sleep, timeout},
};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Preset};

/// The handler, and the requests that the server received.
struct Server {
    effects: AtomicU64,
    /// Notified when the first order has its effect.
    begun: Notify,
    /// The first order ends when another request for it got 409.
    conflict: Semaphore,
    /// Status of each response, and `true` for a replay.
    responses: Mutex<Vec<(u16, bool)>>,
}

impl Server {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            effects: AtomicU64::new(0),
            begun: Notify::new(),
            conflict: Semaphore::new(0),
            responses: Mutex::default(),
        })
    }
}

async fn pay(State(server): State<Arc<Server>>, body: String) -> Response {
    let effect = server.effects.fetch_add(1, Ordering::Relaxed) + 1;
    if body.contains("amount=7") {
        server.begun.notify_one();
        server.conflict.acquire().await.expect("open").forget();
    }
    let intent = format!(r#"{{"id":"pi_{effect}","object":"payment_intent"}}"#);
    ([("content-type", "application/json")], intent).into_response()
}

async fn observe(State(server): State<Arc<Server>>, req: Request, next: Next) -> Response {
    let res = next.run(req).await;
    let is_replay = res.headers().contains_key("idempotent-replayed");
    let response = (res.status().as_u16(), is_replay);
    server.responses.lock().expect("no panic").push(response);
    if res.status() == StatusCode::CONFLICT {
        server.conflict.add_permits(1);
    }
    res
}

/// Runs a client against a server with this preset. Returns the server and the lines that the client printed.
async fn run_client(preset: Preset, command: Command) -> (Arc<Server>, Vec<(u64, String)>) {
    let server = Server::new();
    let app = Router::new()
        .route("/v1/payment_intents", post(pay))
        .layer(IdempotencyLayer::with_preset(MemoryStore::new(), preset))
        .layer(middleware::from_fn_with_state(server.clone(), observe))
        .with_state(server.clone());
    let lines = run_with(&server, app, command).await;
    (server, lines)
}

/// Runs a client against the routes of a server. Returns the lines that the client printed.
async fn run_with(server: &Server, app: Router, mut command: Command) -> Vec<(u64, String)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("a bound socket");
    tokio::spawn(async move { axum::serve(listener, app).await });
    let proxy = Proxy::start(address);
    // The response to the second order. With HTTP/2 an earlier reply does not show that the order was executed.
    proxy.once(Fault::reply("pi_2"), ConnectionEnd::Cut);
    command
        .arg(format!("http://{}", proxy.address()))
        .env("no_proxy", "*")
        .stdin(Stdio::null());
    let name = command.get_program().to_string_lossy().into_owned();
    let mut command = tokio::process::Command::from(command);
    let client = timeout(
        Duration::from_secs(180),
        command.kill_on_drop(true).output(),
    );
    let breaks = async {
        server.begun.notified().await;
        let connections = proxy.counts().connections;
        proxy.set(Mode::Cut);
        // A client that connects again has noticed. A retry then finds the first execution in progress.
        while proxy.counts().connections == connections {
            sleep(Duration::from_millis(1)).await;
        }
        proxy.set(Mode::Pass);
        std::future::pending::<()>().await;
    };
    let output = tokio::select! {
        output = client => output.expect("the client ends"),
        () = breaks => unreachable!("it is pending"),
    };
    let output =
        output.unwrap_or_else(|error| panic!("{name} is needed and cannot be started: {error}"));
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert!(output.status.success(), "{stdout}{stderr}");
    assert_eq!(
        proxy.injected_faults(),
        1,
        "the response was lost\n{stdout}{stderr}"
    );
    let lines = stdout.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        let text = |name: &str| line[name].as_str().map(str::to_owned);
        let status = line["status"].as_u64().expect("a status");
        (status, text("body").expect("a body"))
    });
    lines.collect()
}

/// Asserts one effect for each order, and that the client saw a conflict and two replays.
fn assert_once(server: &Server, lines: &[(u64, String)], rejection: (u64, &str), orders: u64) {
    let mut expected: Vec<_> = (1..=orders).map(|n| (200, format!("pi_{n}"))).collect();
    // The SDK of Stripe prints nothing for its third order.
    let printed = lines.len() - 1;
    expected.truncate(printed);
    expected.push((rejection.0, rejection.1.to_owned()));
    assert_eq!(lines, expected);
    assert_eq!(server.effects.load(Ordering::Relaxed), orders);
    let responses = server.responses.lock().expect("no panic");
    let replays = responses.iter().filter(|(_, is_replay)| *is_replay).count();
    assert!(replays >= 2, "{responses:?}");
    assert!(responses.contains(&(409, false)), "{responses:?}");
}

fn program(interpreter: impl AsRef<std::ffi::OsStr>, name: &str) -> Command {
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/programs");
    let mut command = Command::new(interpreter);
    command.arg(programs.join(name));
    command
}

/// Returns an interpreter of Python with the packages of the tests.
fn python_interpreter() -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/python-clients");
    let script = script.to_str().expect("a path in UTF-8");
    let interpreter = run(script, [""; 0]);
    let interpreter = interpreter.unwrap_or_else(|error| panic!("stripe is needed: {error}"));
    let interpreter = String::from_utf8(interpreter).expect("a path");
    interpreter.trim().to_owned()
}

/// Returns a program for Python with the SDK of Stripe and requests.
fn python(name: &str) -> Command {
    program(python_interpreter(), name)
}

#[tokio::test(flavor = "multi_thread")]
async fn stripe_sdk_pays_once_with_stripe_preset() {
    let (server, lines) = run_client(Preset::Stripe, python("stripe_sdk.py")).await;
    assert_once(&server, &lines, (400, "IdempotencyError"), 3);
}

/// 422 is no status of Stripe, so the SDK has no name for it.
#[tokio::test(flavor = "multi_thread")]
async fn stripe_sdk_pays_once_with_recommended_preset() {
    let (server, lines) = run_client(Preset::Recommended, python("stripe_sdk.py")).await;
    assert_once(&server, &lines, (422, "APIError"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn python_requests_pays_once() {
    let (server, lines) = run_client(Preset::Recommended, python("requests_client.py")).await;
    assert_once(&server, &lines, (422, ""), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn python_urllib_pays_once() {
    let command = program("python3", "urllib_client.py");
    let (server, lines) = run_client(Preset::Recommended, command).await;
    assert_once(&server, &lines, (422, ""), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn node_fetch_pays_once() {
    let command = program("node", "fetch.mjs");
    let (server, lines) = run_client(Preset::Recommended, command).await;
    assert_once(&server, &lines, (422, ""), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_pays_once() {
    let command = program("sh", "curl.sh");
    let (server, lines) = run_client(Preset::Recommended, command).await;
    assert_once(&server, &lines, (422, ""), 3);
}
