//! Documents with a policy, judged by a validator of another project, and each described response provoked on a real server.

use std::{
    collections::{BTreeSet, HashMap},
    net::SocketAddr,
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde_json::{Value, json};
use tests::{
    TestResponse,
    barrier::Barrier,
    scratch::Scratch,
    wire::{H1, Server},
};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, MissingKey, NeedsAttention, Policy, Preset,
    conformance::{Fault, FaultInjector},
};

use super::{program, python_interpreter};

const PRESETS: [Preset; 5] = [
    Preset::Recommended,
    Preset::Ietf,
    Preset::Stripe,
    Preset::Idempo,
    Preset::Acp,
];

/// A document whose operations have nothing, own responses, ranges, and references.
fn document(version: &str, policy: &Policy) -> Value {
    let own = json!({ "description": "Own", "content": { "application/problem+json": {
        "schema": { "type": "object", "required": ["type"] }
    }, "application/json": { "schema": { "type": "object" } } } });
    let created = json!({ "description": "Created", "content": { "text/plain": { "schema": { "type": "string" } } } });
    let mut paths = json!({
        "/plain": { "post": { "responses": { "200": created } } },
        "/merged": { "post": { "responses": {
            "200": { "$ref": "#/components/responses/Created" }, "409": own,
            "422": { "$ref": "#/components/responses/Own" }, "5XX": own, "default": own,
        } } },
        "/orders/{id}": {
            "parameters": [{ "name": "id", "in": "path", "required": true, "schema": { "type": "string" } }],
            "post": { "operationId": "change", "responses": { "2XX": created, "4XX": own } },
            "get": { "responses": { "200": created } },
        },
    });
    if version.starts_with("3.1") {
        paths["/referred"] = json!({ "$ref": "#/components/pathItems/Referred" });
    }
    let mut document = json!({
        "openapi": version,
        "info": { "title": "Orders", "version": "1" },
        "paths": paths,
        "components": { "responses": { "Own": own, "Created": created } },
    });
    if version.starts_with("3.1") {
        document["components"]["pathItems"]["Referred"] =
            json!({ "post": { "responses": { "200": created } } });
    }
    policy
        .describe(&mut document, |_, _| true)
        .expect("describable");
    let once = document.clone();
    policy
        .describe(&mut document, |_, _| true)
        .expect("describable");
    assert_eq!(document, once);
    document
}

async fn handle(barrier: Barrier, req: Request) -> Response {
    match req.headers().get("x-wish").map(|wish| wish.as_bytes()) {
        Some(b"wait") => {
            barrier.pass().await;
            "waited".into_response()
        }
        Some(b"large") => "x".repeat(2_000).into_response(),
        Some(b"attention") => {
            let mut res = StatusCode::BAD_GATEWAY.into_response();
            res.extensions_mut()
                .insert(NeedsAttention::new("provider-timeout"));
            res
        }
        _ => "done".into_response(),
    }
}

/// Sends bytes on a separate connection.
async fn exchange(address: SocketAddr, headers: &str, body: &str) -> TestResponse {
    start(address, headers, body)
        .await
        .response()
        .await
        .expect("a response")
}

async fn start(address: SocketAddr, headers: &str, body: &str) -> H1 {
    let mut connection = H1::connect(address).await;
    let length = if headers.contains("content-length") {
        String::new()
    } else {
        format!("content-length: {}\r\n", body.len())
    };
    let request = format!("POST /plain HTTP/1.1\r\nhost: a\r\n{length}{headers}\r\n{body}");
    connection.send(request).await;
    connection
}

/// Provokes each error of the layer. Returns the responses by code.
async fn provoke(
    preset: Preset,
) -> (
    Policy,
    HashMap<&'static str, TestResponse>,
    Vec<TestResponse>,
) {
    let store = FaultInjector::new(MemoryStore::new());
    let layer = IdempotencyLayer::with_preset(store.clone(), preset)
        .with_missing_key(MissingKey::Reject)
        .with_key_length(1..=100)
        .with_request_limit(1_000)
        .with_response_limit(1_000)
        .with_body_timeout(Duration::from_millis(300))
        .with_store_timeout(Duration::from_millis(100))
        .with_unrecordable(tower_idempotency::Unrecordable::Tombstone)
        .with_max_in_flight(4);
    let policy = layer.policy();
    let barrier = Barrier::closed();
    let held = barrier.clone();
    let handler = move |req: Request| handle(held.clone(), req);
    let app = Router::new().fallback(handler).layer(layer.clone());
    let server = Server::start(app).await;
    let address = server.addr();
    let key = |key: &str| format!("idempotency-key: \"{key}\"\r\nauthorization: Bearer one\r\n");
    let wish = |name: &str, wish: &str| format!("{}x-wish: {wish}\r\n", key(name));

    let mut found = HashMap::new();
    let first = exchange(address, &key("done"), "").await;
    let replay = exchange(address, &key("done"), "").await;
    found.insert("missing-key", exchange(address, "", "").await);
    found.insert(
        "malformed-key",
        exchange(address, "idempotency-key: \r\n", "").await,
    );
    found.insert(
        "key-too-long",
        exchange(address, &key(&"k".repeat(101)), "").await,
    );
    let two = format!("{}authorization: Bearer two\r\n", key("two"));
    found.insert("principal-ambiguous", exchange(address, &two, "").await);
    let large = format!("{}content-length: 1001\r\n", key("large"));
    found.insert("body-too-large", exchange(address, &large, "").await);
    let short = format!("{}content-length: 9\r\n", key("short"));
    found.insert("body-timeout", exchange(address, &short, "1").await);
    // A chunk that is none.
    let broken = "transfer-encoding: chunked\r\n";
    let mut connection = H1::connect(address).await;
    let head = format!(
        "POST /plain HTTP/1.1\r\nhost: a\r\n{}{broken}\r\n",
        key("broken")
    );
    connection.send(format!("{head}zz\r\n")).await;
    if let Some(response) = connection.response().await {
        found.insert("body-unreadable", response);
    }
    exchange(address, &key("reused"), "1").await;
    found.insert("key-reused", exchange(address, &key("reused"), "2").await);
    exchange(address, &wish("attention", "attention"), "").await;
    found.insert(
        "outcome-unknown",
        exchange(address, &key("attention"), "").await,
    );
    exchange(address, &wish("too-large", "large"), "").await;
    found.insert(
        "response-not-retained",
        exchange(address, &key("too-large"), "").await,
    );

    let mut waiting = Vec::new();
    for name in ["w1", "w2", "w3"] {
        waiting.push(start(address, &wish(name, "wait"), "").await);
        barrier.arrival().await;
    }
    found.insert(
        "in-progress",
        exchange(address, &wish("w1", "wait"), "").await,
    );
    found.insert("caller-limit", exchange(address, &key("w4"), "").await);
    let other = wish("w5", "wait").replace("Bearer one", "Bearer two");
    waiting.push(start(address, &other, "").await);
    barrier.arrival().await;
    let third = key("w6").replace("Bearer one", "Bearer three");
    found.insert("overloaded", exchange(address, &third, "").await);
    barrier.open_for_good();
    for mut connection in waiting {
        assert_eq!(
            connection.response().await.expect("a response").text(),
            "waited"
        );
    }
    store.set_fault_for_all(&Fault::CallLost);
    found.insert(
        "store-unavailable",
        exchange(address, &key("outage"), "").await,
    );
    store.clear_faults();
    layer.drain(Duration::from_secs(60)).await;
    found.insert("draining", exchange(address, &key("draining"), "").await);
    (policy, found, vec![first, replay])
}

fn response(document: usize, path: &str, response: &TestResponse) -> Value {
    let names: Vec<_> = response.headers.keys().map(|name| name.as_str()).collect();
    json!({
        "document": document,
        "path": path,
        "status": response.status.as_str(),
        "media_type": response.header("content-type"),
        "body": response.text(),
        "headers": names,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn described_documents_and_responses_are_valid() {
    let (mut documents, mut policies, mut responses) = (Vec::new(), Vec::new(), Vec::new());
    for preset in PRESETS {
        let (policy, mut provoked, successes) = provoke(preset).await;
        let codes: BTreeSet<_> = policy.errors.iter().map(|error| error.code).collect();
        provoked.retain(|code, _| codes.contains(code));
        assert_eq!(
            provoked.keys().copied().collect::<BTreeSet<_>>(),
            codes,
            "{preset:?}"
        );
        for error in &policy.errors {
            let response = &provoked[error.code];
            assert_eq!(
                response.status, error.status,
                "{preset:?} {} {response:?}",
                error.code
            );
        }
        for version in ["3.0.3", "3.1.0"] {
            let document = document(version, &policy);
            let paths = document["paths"].as_object().expect("an object");
            for path in paths.keys() {
                let all = provoked.values().chain(&successes);
                responses.extend(all.map(|received| response(documents.len(), path, received)));
            }
            documents.push(document);
        }
        policies.push(json!(policy));
    }
    let schema: Value = serde_json::from_str(Policy::SCHEMA).expect("JSON");
    let count = responses.len();
    assert!(count > 500, "{count}");
    let cases = json!({ "documents": documents, "policies": policies, "schema": schema, "responses": responses });
    let scratch = Scratch::new();
    let file = scratch.file("cases.json");
    std::fs::write(&file, cases.to_string()).expect("a file");
    let output = program(python_interpreter(), "openapi_check.py")
        .arg(&file)
        .output();
    let output = output.expect("python is started");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{stdout}{stderr}");
    assert_eq!(
        stdout.trim(),
        format!("10 documents, 5 policies, {count} responses")
    );
}
