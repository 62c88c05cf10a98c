//! A policy in use: its service, its text, and the headers for browsers.

use axum::{Router, body::Body, routing::post};
use http::{HeaderName, HeaderValue, Method, Request, header};
use serde_json::{Value, json};
use tests::{
    Effects, TestResponse, send,
    wire::{H1, Server},
};
use tower_http::cors::CorsLayer;
use tower_idempotency::{
    Enforcement, EnforcementSwitch, IdempotencyLayer, KeyScope, MemoryStore, MissingKey, Preset,
    Principal, Rollout,
};

const PATH: &str = "/.well-known/idempotency-policy";

fn layer() -> IdempotencyLayer {
    let layer = IdempotencyLayer::new(MemoryStore::new());
    layer.with_described_by(PATH).expect("a URL")
}

async fn get(app: &Router, method: Method) -> TestResponse {
    let req = Request::builder()
        .method(method)
        .uri(PATH)
        .body(Body::empty());
    send(app, req.expect("a valid request")).await
}

// S-957
#[tokio::test(start_paused = true)]
async fn service_publishes_policy() {
    let layer = layer().with_missing_key(MissingKey::Reject);
    let app: Router = Router::new()
        .route("/pay", post(async || "paid").route_layer(layer.clone()))
        .route_service(PATH, layer.policy().service());
    let response = get(&app, Method::GET).await;
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("application/json"));
    assert_eq!(response.header("cache-control"), Some("no-cache"));
    let published: Value = serde_json::from_slice(&response.body).expect("JSON");
    assert_eq!(
        published,
        serde_json::to_value(layer.policy()).expect("JSON")
    );
    let length = response.body.len().to_string();
    let head = get(&app, Method::HEAD).await;
    assert_eq!(
        (head.header("content-length"), head.body.len()),
        (Some(&*length), 0)
    );
    let delete = get(&app, Method::DELETE).await;
    assert_eq!(
        (delete.status.as_u16(), delete.header("allow")),
        (405, Some("GET, HEAD"))
    );
    // Errors lead to it.
    let pay = Request::post("/pay").body(Body::empty()).expect("valid");
    let link = send(&app, pay).await.header("link").map(str::to_owned);
    assert_eq!(link, Some(format!("<{PATH}>; rel=\"describedby\"")));
}

#[test]
fn policy_names_no_secrets() {
    let layer = layer()
        .with_namespace("secret-namespace")
        .with_secret("secret-secret-secret")
        .expect("long enough")
        .with_principal(
            Principal::header(HeaderName::from_static("x-secret-user"))
                .or(Principal::cookie("secret-cookie")),
        );
    let policy = layer.policy();
    let texts = [
        policy.to_string(),
        serde_json::to_string(&policy).expect("JSON"),
    ];
    for text in texts {
        assert!(!text.contains("secret"), "{text}");
    }
    assert_eq!(policy.scope.callers, ["header", "cookie"]);
}

#[test]
fn policy_as_text() {
    let text = IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Acp)
        .policy()
        .to_string();
    let expected = "\
key: header idempotency-key, reject if missing, syntax verbatim, 1 to 255 bytes
methods: POST
another key for: each caller (credentials), each endpoint
body of a retry: json, numbers by value
another request under the key: 422
duplicate during the execution: 409, Retry-After 1
execution without an outcome: take-over; failed execution: release
store down: refuse
";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.ends_with(" as application/json"), "{text}");
}

/// If the policy has a member that the schema lacks, or lacks a member that the schema requires, one of them is stale.
#[test]
fn schema_has_members_of_policy() {
    let schema: Value = serde_json::from_str(tower_idempotency::Policy::SCHEMA).expect("JSON");
    let policy = serde_json::to_value(layer().policy()).expect("JSON");
    assert_members(&schema, &policy, "");
    assert_members(
        &schema["properties"]["errors"]["items"],
        &policy["errors"][0],
        "/errors/0",
    );
}

#[track_caller]
fn assert_members(schema: &Value, value: &Value, at: &str) {
    let Some(members) = value.as_object() else {
        return;
    };
    let named: Vec<_> = members.keys().map(|name| json!(name)).collect();
    let mut required = schema["required"].as_array().cloned().unwrap_or_default();
    required.sort_by_key(Value::to_string);
    assert_eq!(named, required, "{at}");
    for (name, value) in members {
        let schema = &schema["properties"][name];
        assert!(schema.is_object(), "{at}/{name}");
        assert_members(schema, value, &format!("{at}/{name}"));
    }
}

#[test]
fn cors_headers_follow_settings() {
    let names = |names: &[HeaderName]| {
        names
            .iter()
            .map(|name| name.as_str().to_owned())
            .collect::<Vec<_>>()
    };
    let cors = layer().cors();
    assert_eq!(names(&cors.allow), ["idempotency-key"]);
    assert_eq!(
        names(&cors.expose),
        ["idempotent-replayed", "retry-after", "link"]
    );
    let marker = (
        HeaderName::from_static("x-cached"),
        HeaderValue::from_static("1"),
    );
    let cors = IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Idempo)
        .with_replay_marker(Some(marker))
        .with_key_echo(true)
        .cors();
    assert_eq!(names(&cors.allow), ["idempotency-key", "x-idempotency-key"]);
    assert_eq!(
        names(&cors.expose),
        [
            "x-cached",
            "retry-after",
            "idempotency-key",
            "x-idempotency-key"
        ]
    );
    let of_service = layer()
        .with_replay_marker(None)
        .with_key_from(KeyScope::EachCaller, |_| None);
    assert_eq!(names(&of_service.cors().allow), [""; 0]);
    assert_eq!(names(&of_service.cors().expose), ["retry-after", "link"]);
}

#[tokio::test]
async fn policy_reports_share_that_is_enforced() {
    let switch = EnforcementSwitch::default();
    let layer = layer().with_enforcement(&switch);
    assert_eq!(layer.policy().enforced_percent, 100);
    switch.set(Enforcement::Observe);
    assert_eq!(layer.policy().enforced_percent, 0);
    let text = layer.policy().to_string();
    assert!(text.contains("in force: for 0 % of the callers"), "{text}");
    switch.set(Rollout::new(5, Enforcement::Enforce, Enforcement::Off).expect("a share"));
    assert_eq!(layer.policy().enforced_percent, 5);
}

// S-957
#[tokio::test]
async fn service_publishes_share_after_switch() {
    let switch = EnforcementSwitch::default();
    let layer = layer().with_enforcement(&switch);
    let app: Router = Router::new().route_service(PATH, layer.policy().service());
    let share = Rollout::new(5, Enforcement::Enforce, Enforcement::Off).expect("a share");
    for (rollout, percent) in [
        (switch.get(), 100),
        (Enforcement::Observe.into(), 0),
        (share, 5),
        (Enforcement::Enforce.into(), 100),
    ] {
        switch.set(rollout);
        let response = get(&app, Method::GET).await;
        let published: Value = serde_json::from_slice(&response.body).expect("JSON");
        assert_eq!(published["enforced_percent"], percent);
        let current = serde_json::to_value(layer.policy()).expect("JSON");
        assert_eq!(published, current);
        let length = response.body.len().to_string();
        assert_eq!(response.header("content-length"), Some(&*length));
    }
}

// S-958
/// The part of a preflight that needs no browser. If a page of another origin sends the key with `fetch`, the browser sends
/// the same preflight. The page can read the marker from the response only if it is exposed.
#[tokio::test]
async fn preflight_permits_key_and_marker_is_exposed() {
    let marker = (
        HeaderName::from_static("x-cached"),
        HeaderValue::from_static("1"),
    );
    let layer = layer()
        .with_header(HeaderName::from_static("x-key"))
        .with_replay_marker(Some(marker));
    let headers = layer.cors();
    let allow = headers.allow.into_iter().chain([header::CONTENT_TYPE]);
    let expose = headers.expose.into_iter().chain([header::LOCATION]);
    let cors = CorsLayer::new()
        .allow_origin(HeaderValue::from_static("https://shop.example"))
        .allow_methods([Method::POST])
        .allow_headers(allow.collect::<Vec<_>>())
        .expose_headers(expose.collect::<Vec<_>>());
    let effects = Effects::default();
    let counted = effects.clone();
    let pay = post(async move || counted.happen().to_string()).route_layer(layer);
    let server = Server::start(Router::new().route("/pay", pay).layer(cors)).await;

    let mut connection = H1::connect(server.addr()).await;
    connection
        .send(
            "OPTIONS /pay HTTP/1.1\r\nhost: a\r\norigin: https://shop.example\r\n\
             access-control-request-method: POST\r\naccess-control-request-headers: content-type,x-key\r\n\r\n",
        )
        .await;
    let response = connection.response().await.expect("a response");
    assert_eq!(response.status, 200, "{response:?}");
    let lists = |response: &TestResponse, header: &str, name: &str| {
        let list = response.header(header).expect("a list");
        assert!(
            list.split(',').any(|listed| listed.trim() == name),
            "{list}"
        );
    };
    for name in ["x-key", "content-type"] {
        lists(&response, "access-control-allow-headers", name);
    }
    assert_eq!(effects.count(), 0);
    for marker in [None, Some("1")] {
        connection
            .send("POST /pay HTTP/1.1\r\nhost: a\r\norigin: https://shop.example\r\nx-key: 7\r\ncontent-length: 0\r\n\r\n")
            .await;
        let response = connection.response().await.expect("a response");
        assert_eq!(
            (response.text(), response.header("x-cached")),
            ("1", marker)
        );
        lists(&response, "access-control-expose-headers", "x-cached");
    }
}
