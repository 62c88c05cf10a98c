//! Every cell of the table of presets, and settings that change only one cell.

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode};
use serde_json::Value;
use tests::{Effects, Scripted, Step, TestResponse, app, created, send};
use tokio::{sync::Semaphore, time::advance};
use tower_idempotency::{
    ConcurrentRequests, IdempotencyKey, IdempotencyLayer, KeyReuse, KeySyntax, MemoryStore,
    MissingKey, Preset, Principal, Ttl, Unrecordable,
};

/// The observable behavior of a layer, as far as the table describes it.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    /// The names under which a key is found.
    headers: Vec<&'static str>,
    /// The key in each of [`SPELLINGS`], or `None` if the spelling is rejected.
    syntax: Vec<Option<&'static str>>,
    /// The longest key of those of [`LENGTHS`].
    longest: usize,
    several_lines: u16,
    methods: Vec<&'static str>,
    /// The status, and the number of executions of two such requests.
    missing_key: (u16, u64),
    /// `true` if another `Authorization` counts as another caller.
    by_authorization: bool,
    /// `true` if the same key at another host is another key.
    by_host: bool,
    /// 201 for a separate request.
    other_request: u16,
    /// Status and `Retry-After`.
    concurrent: (u16, Option<String>),
    /// The recorded statuses among [`STATUSES`].
    recorded: Vec<u16>,
    /// The status of a retry, and the number of handler executions.
    too_large: (u16, u64),
    streamed: (u16, u64),
    response_limit: usize,
    retention: u64,
    marker: Option<(String, String)>,
    error: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Problem,
    Stripe,
    Idempo,
    Acp,
    Custom,
}

const NAMES: [&str; 3] = ["idempotency-key", "x-idempotency-key", "x-other"];
const SPELLINGS: [&str; 9] = [
    "abc",
    "\"abc\"",
    "\"abc\";v=1",
    "a,c",
    "a\\c",
    "a c",
    "\"abc",
    "\"a\\\"c\"",
    "\"a c\"",
];
const LENGTHS: [usize; 6] = [10, 11, 255, 256, 1024, 1025];
const METHODS: [&str; 14] = [
    "GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "REPORT", "SEARCH", "CONNECT", "POST",
    "PUT", "PATCH", "DELETE", "PURGE",
];
const STATUSES: [u16; 47] = [
    200, 201, 202, 204, 206, 299, 300, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 404, 405,
    406, 407, 408, 409, 410, 411, 412, 413, 415, 416, 417, 419, 421, 422, 423, 424, 425, 426, 428,
    429, 431, 440, 451, 500, 501, 502, 503, 504,
];
/// Statuses that reject the form of a request. The client corrects them with headers outside the fingerprint, or by
/// another limit.
const FORM: [u16; 16] = [
    401, 406, 407, 411, 412, 413, 415, 416, 417, 419, 421, 423, 426, 428, 431, 440,
];
const MIB: usize = 1024 * 1024;

fn recorded_but(highest: u16, not: &[u16]) -> Vec<u16> {
    let mut recorded = STATUSES.to_vec();
    recorded.retain(|code| *code <= highest && ![307, 308].contains(code) && !not.contains(code));
    recorded
}

fn table(preset: Preset) -> Row {
    let recommended = Row {
        headers: vec!["idempotency-key"],
        syntax: vec![
            Some("abc"),
            Some("abc"),
            Some("abc"),
            None,
            None,
            None,
            None,
            Some("a\"c"),
            Some("a c"),
        ],
        longest: 255,
        several_lines: 400,
        methods: vec!["POST", "PUT", "PATCH", "DELETE", "PURGE"],
        missing_key: (201, 2),
        by_authorization: true,
        by_host: false,
        other_request: 422,
        concurrent: (409, Some("1".to_owned())),
        recorded: recorded_but(499, &[&FORM[..], &[403, 408, 424, 425, 429]].concat()),
        too_large: (409, 1),
        streamed: (409, 1),
        response_limit: 4 * MIB,
        retention: 24 * 60 * 60,
        marker: Some(("idempotent-replayed".to_owned(), "true".to_owned())),
        error: Shape::Problem,
    };
    match preset {
        Preset::Recommended => recommended,
        Preset::Ietf => Row {
            syntax: vec![
                None,
                Some("abc"),
                Some("abc"),
                None,
                None,
                None,
                None,
                Some("a\"c"),
                Some("a c"),
            ],
            longest: 1024,
            methods: vec!["POST", "PATCH"],
            recorded: recorded_but(599, &[&FORM[..], &[408, 425, 429, 503]].concat()),
            marker: None,
            ..recommended
        },
        Preset::Stripe => Row {
            syntax: vec![
                Some("abc"),
                Some("\"abc\""),
                Some("\"abc\";v=1"),
                Some("a,c"),
                Some("a\\c"),
                None,
                Some("\"abc"),
                Some("\"a\\\"c\""),
                None,
            ],
            methods: vec!["POST"],
            other_request: 400,
            recorded: recorded_but(599, &[&FORM[..], &[403, 425, 429]].concat()),
            error: Shape::Stripe,
            ..recommended
        },
        Preset::Idempo => Row {
            headers: vec!["idempotency-key", "x-idempotency-key"],
            syntax: vec![
                Some("abc"),
                Some("abc"),
                Some("\"abc\";v=1"),
                Some("a,c"),
                Some("a\\c"),
                Some("a c"),
                Some("\"abc"),
                Some("a\\\"c"),
                Some("a c"),
            ],
            longest: 1025,
            methods: vec![
                "TRACE", "QUERY", "PROPFIND", "REPORT", "SEARCH", "POST", "PUT", "PATCH", "DELETE",
                "PURGE",
            ],
            by_host: true,
            other_request: 201,
            concurrent: (429, Some("2".to_owned())),
            recorded: recorded_but(499, &[425, 429]),
            too_large: (200, 2),
            streamed: (200, 2),
            retention: 30,
            marker: None,
            error: Shape::Idempo,
            ..recommended
        },
        Preset::Acp => Row {
            syntax: table(Preset::Stripe).syntax,
            methods: vec!["POST"],
            missing_key: (400, 0),
            error: Shape::Acp,
            ..recommended
        },
        other => panic!("a preset without a row: {other:?}"),
    }
}

const PRESETS: [Preset; 5] = [
    Preset::Recommended,
    Preset::Ietf,
    Preset::Stripe,
    Preset::Idempo,
    Preset::Acp,
];

// ---- Observation of a layer ----

type Change = fn(IdempotencyLayer) -> IdempotencyLayer;

impl Row {
    /// Adds CONNECT if the preset covers all methods except some. The layer passes CONNECT through unless it requires
    /// or creates the key.
    fn cover_connect(&mut self) {
        if let Some(post) = self.methods.iter().position(|method| *method == "POST")
            && self.methods.contains(&"PUT")
        {
            self.methods.insert(post, "CONNECT");
        }
    }
}

/// A preset with a change. Each use has a new store.
#[derive(Clone, Copy)]
struct Layers {
    preset: Preset,
    change: Change,
}

impl Layers {
    fn layer(self) -> IdempotencyLayer {
        (self.change)(IdempotencyLayer::with_preset(
            MemoryStore::new(),
            self.preset,
        ))
    }

    fn creating(self) -> (Router, Effects) {
        app(self.layer(), async |n, _| created(n))
    }

    /// Returns a header name in which this layer finds a key.
    async fn name(self) -> &'static str {
        *self.headers().await.first().expect("some name")
    }

    /// Returns a request under a key that every syntax accepts.
    async fn keyed(self, body: &'static str) -> Request<Body> {
        keyed("POST", self.name().await, "\"key\"", body)
    }

    async fn headers(self) -> Vec<&'static str> {
        let mut found = Vec::new();
        for name in NAMES {
            let (app, effects) = app(self.layer(), async |_, req: Request<Body>| {
                let key = req.extensions().get::<IdempotencyKey>();
                key.map_or_else(String::new, |key| key.as_str().to_owned())
            });
            let response = send(&app, keyed("POST", name, "\"key\"", "x")).await;
            if response.status == StatusCode::OK && !response.body.is_empty() {
                assert_eq!(effects.count(), 1);
                found.push(name);
            }
        }
        found
    }

    async fn syntax(self) -> Vec<Option<&'static str>> {
        let name = self.name().await;
        let mut found = Vec::new();
        for spelling in SPELLINGS {
            let seen = std::sync::Arc::new(std::sync::Mutex::new(None));
            let keep = std::sync::Arc::clone(&seen);
            let (app, effects) = app(self.layer(), move |n, req: Request<Body>| {
                let key = req.extensions().get::<IdempotencyKey>();
                let key = key.expect("a key").as_str().to_owned();
                *keep.lock().expect("no panic") = Some(key);
                std::future::ready(created(n))
            });
            let response = send(&app, keyed("POST", name, spelling, "x")).await;
            let seen = seen.lock().expect("no panic").take();
            assert_eq!(
                seen.is_none(),
                response.status == 400,
                "{spelling} {response:?}"
            );
            assert_eq!(effects.count(), u64::from(seen.is_some()));
            found.push(seen.map(|key| &*key.leak()));
        }
        found
    }

    async fn longest(self) -> usize {
        let name = self.name().await;
        let mut longest = 0;
        for length in LENGTHS {
            let (app, effects) = self.creating();
            let key = format!("\"{}\"", "k".repeat(length));
            // If quotes belong to the key, they count in its length.
            let verbatim = self.syntax().await[1] == Some("\"abc\"");
            let key = if verbatim {
                key.trim_matches('"')
            } else {
                &key
            };
            let response = send(&app, keyed("POST", name, key, "x")).await;
            if response.status == 201 {
                assert_eq!(effects.count(), 1);
                longest = length;
            } else {
                assert_eq!((response.status.as_u16(), effects.count()), (400, 0));
            }
        }
        longest
    }

    async fn several_lines(self) -> u16 {
        let (app, effects) = self.creating();
        let mut req = self.keyed("x").await;
        let name = HeaderName::from_static(self.name().await);
        req.headers_mut()
            .append(name, HeaderValue::from_static("\"key\""));
        let response = send(&app, req).await;
        assert_eq!(effects.count(), 0);
        response.status.as_u16()
    }

    async fn methods(self) -> Vec<&'static str> {
        let name = self.name().await;
        let mut protected = Vec::new();
        for method in METHODS {
            let (app, effects) = self.creating();
            for _ in 0..2 {
                send(&app, keyed(method, name, "\"key\"", "x")).await;
            }
            if effects.count() == 1 {
                protected.push(method);
            } else {
                assert_eq!(effects.count(), 2);
            }
        }
        protected
    }

    async fn missing_key(self) -> (u16, u64) {
        let (app, effects) = self.creating();
        let keyless = || Request::post("/orders").body(Body::empty());
        send(&app, keyless().expect("a request")).await;
        let response = send(&app, keyless().expect("a request")).await;
        (response.status.as_u16(), effects.count())
    }

    async fn by_authorization(self) -> bool {
        let (app, effects) = self.creating();
        for token in ["a", "b"] {
            let mut req = self.keyed("x").await;
            req.headers_mut()
                .insert("authorization", HeaderValue::from_static(token));
            assert_eq!(send(&app, req).await.status, StatusCode::CREATED);
        }
        effects.count() == 2
    }

    async fn by_host(self) -> bool {
        let (app, effects) = self.creating();
        for host in ["a.example", "b.example"] {
            let mut req = self.keyed("x").await;
            req.headers_mut()
                .insert("host", HeaderValue::from_static(host));
            assert_eq!(send(&app, req).await.status, StatusCode::CREATED);
        }
        effects.count() == 2
    }

    async fn other_request(self) -> u16 {
        let (app, effects) = self.creating();
        send(&app, self.keyed("x").await).await;
        let other = send(&app, self.keyed("y").await).await;
        let ran = u64::from(other.status == StatusCode::CREATED);
        assert_eq!(effects.count(), 1 + ran);
        other.status.as_u16()
    }

    async fn concurrent(self) -> (u16, Option<String>) {
        let barrier = std::sync::Arc::new(Semaphore::new(0));
        let held = std::sync::Arc::clone(&barrier);
        let (app, effects) = app(self.layer(), move |n, _req| {
            let held = std::sync::Arc::clone(&held);
            async move {
                held.acquire().await.expect("never closed").forget();
                created(n)
            }
        });
        let first = {
            let (app, req) = (app.clone(), self.keyed("x").await);
            tokio::spawn(async move { send(&app, req).await })
        };
        while effects.count() == 0 {
            tokio::task::yield_now().await;
        }
        let duplicate = send(&app, self.keyed("x").await).await;
        barrier.add_permits(1);
        first.await.expect("no panic");
        assert_eq!(effects.count(), 1);
        let after = duplicate.header("retry-after").map(ToOwned::to_owned);
        (duplicate.status.as_u16(), after)
    }

    /// Sends the same request twice to a handler with this response. Returns the second response and the number of
    /// effects.
    async fn twice<R: IntoResponse + 'static>(
        self,
        response: impl Fn() -> R + Clone + Send + Sync + 'static,
    ) -> (TestResponse, u64) {
        let (app, effects) = app(self.layer(), move |_, _| {
            std::future::ready(response().into_response())
        });
        send(&app, self.keyed("x").await).await;
        let retry = send(&app, self.keyed("x").await).await;
        (retry, effects.count())
    }

    async fn recorded(self, statuses: &[u16]) -> Vec<u16> {
        let mut recorded = Vec::new();
        for &code in statuses {
            let status = StatusCode::from_u16(code).expect("a status");
            let (retry, effects) = self.twice(move || status).await;
            assert_eq!(retry.status, status);
            if effects == 1 {
                recorded.push(code);
            }
        }
        recorded
    }

    async fn response_limit(self) -> usize {
        let mut limit = 0;
        for bytes in [1000, 4 * MIB] {
            let (retry, effects) = self.twice(move || vec![7; bytes]).await;
            if (retry.body.len(), effects) == (bytes, 1) {
                limit = bytes;
            }
        }
        limit
    }

    async fn too_large(self) -> (u16, u64) {
        let (retry, effects) = self.twice(|| vec![7; 4 * MIB + 1]).await;
        (retry.status.as_u16(), effects)
    }

    async fn streamed(self) -> (u16, u64) {
        let (retry, effects) = self
            .twice(|| {
                let steps = [Step::from("x"), Step::Wait(Duration::from_secs(11))];
                Response::new(Body::new(Scripted::new(steps)))
            })
            .await;
        (retry.status.as_u16(), effects)
    }

    async fn retention(self) -> u64 {
        let (app, effects) = self.creating();
        let lengths = [10, 30, 24 * 60 * 60];
        let mut passed = 0;
        send(&app, self.keyed("x").await).await;
        for length in lengths {
            let just_before = Duration::from_secs(length - passed) - Duration::from_millis(1);
            advance(just_before).await;
            send(&app, self.keyed("x").await).await;
            assert_eq!(effects.count(), 1, "expired before {length} s");
            advance(Duration::from_millis(1)).await;
            send(&app, self.keyed("x").await).await;
            if effects.count() == 2 {
                return length;
            }
            passed = length;
        }
        u64::MAX
    }

    async fn marker(self) -> Option<(String, String)> {
        let (replay, effects) = self.twice(|| "x").await;
        assert_eq!(effects, 1);
        let name = replay
            .headers
            .keys()
            .find(|name| name.as_str().contains("replayed"))?;
        let value = replay.header(name.as_str()).expect("it is there");
        Some((name.to_string(), value.to_owned()))
    }

    async fn error(self) -> Shape {
        let (app, effects) = self.creating();
        let name = self.name().await;
        let response = send(&app, keyed("POST", name, "", "x")).await;
        assert_eq!(effects.count(), 0);
        let body: Value = serde_json::from_slice(&response.body).unwrap_or_default();
        let problem = "application/problem+json";
        match response.header("content-type") {
            Some(media_type) if media_type == problem => {
                let link = response.header("link").expect("a link");
                assert!(link.ends_with("rel=\"describedby\""), "{link}");
                assert_eq!(body["code"], "malformed-key");
                Shape::Problem
            }
            Some("application/json") if body["ok"] == false => {
                assert!(body["error"]["message"].is_string());
                Shape::Idempo
            }
            Some("application/json") if body["type"] == "invalid_request" => {
                assert_eq!(body["code"], "malformed_key");
                Shape::Acp
            }
            Some("application/json") => {
                assert_eq!(body["error"]["type"], "idempotency_error");
                Shape::Stripe
            }
            _ => Shape::Custom,
        }
    }

    async fn observe(self) -> Row {
        Row {
            headers: self.headers().await,
            syntax: self.syntax().await,
            longest: self.longest().await,
            several_lines: self.several_lines().await,
            methods: self.methods().await,
            missing_key: self.missing_key().await,
            by_authorization: self.by_authorization().await,
            by_host: self.by_host().await,
            other_request: self.other_request().await,
            concurrent: self.concurrent().await,
            recorded: self.recorded(&STATUSES).await,
            too_large: self.too_large().await,
            streamed: self.streamed().await,
            response_limit: self.response_limit().await,
            retention: self.retention().await,
            marker: self.marker().await,
            error: self.error().await,
        }
    }
}

fn keyed(method: &str, name: &str, key: &str, body: &'static str) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri("/orders")
        .header(name, key)
        .body(Body::from(body))
        .expect("a valid request")
}

/// Describes the cells that differ.
fn differences(expected: &Row, found: &Row) -> String {
    let lines = |row: &Row| {
        format!("{row:#?}")
            .split("\n    ")
            .filter(|line| !line.starts_with(' ') || line.trim().len() > 1)
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let (expected, found) = (lines(expected), lines(found));
    let only = |these: &[String], those: &[String], mark: &str| {
        these
            .iter()
            .filter(|line| !those.contains(line))
            .map(|line| format!("\n{mark} {line}"))
            .collect::<String>()
    };
    only(&expected, &found, "expected") + &only(&found, &expected, "found   ")
}

// ---- The table ----

// S-330
#[tokio::test(start_paused = true)]
async fn every_preset_matches_its_column() {
    for preset in PRESETS {
        let layers = Layers {
            preset,
            change: |layer| layer,
        };
        let (expected, found) = (table(preset), layers.observe().await);
        assert!(
            found == expected,
            "{preset:?}{}",
            differences(&expected, &found)
        );
    }
}

// F-082, S-331
#[tokio::test(start_paused = true)]
async fn recorded_statuses_match_column() {
    let all: Vec<u16> = (200..600).collect();
    for preset in PRESETS {
        let (highest, not): (u16, &[u16]) = match preset {
            Preset::Recommended | Preset::Acp => (499, &[403, 408, 424, 425, 429]),
            Preset::Ietf => (599, &[408, 425, 429, 503]),
            Preset::Stripe => (599, &[403, 425, 429]),
            _ => (499, &[425, 429]),
        };
        let form = match preset {
            Preset::Idempo => &[][..],
            _ => &FORM[..],
        };
        let not = [&[307, 308], form, not].concat();
        let layers = Layers {
            preset,
            change: |layer| layer,
        };
        let expected: Vec<u16> = (200..=highest).filter(|code| !not.contains(code)).collect();
        assert_eq!(layers.recorded(&all).await, expected, "{preset:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_preset_limits_responses_to_4_mib() {
    for preset in PRESETS {
        let layers = Layers {
            preset,
            change: |layer| layer,
        };
        let (retry, effects) = layers.twice(|| vec![7; 4 * MIB]).await;
        assert_eq!((retry.body.len(), effects), (4 * MIB, 1), "{preset:?}");
        assert_eq!(
            layers.too_large().await,
            table(preset).too_large,
            "{preset:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn default_layer_is_recommended_preset() {
    let layers = Layers {
        preset: Preset::Idempo,
        change: |_| IdempotencyLayer::new(MemoryStore::new()),
    };
    let (expected, found) = (table(Preset::Recommended), layers.observe().await);
    assert!(found == expected, "{}", differences(&expected, &found));
    assert_eq!(Preset::default(), Preset::Recommended);
}

/// A setter, and its effect on a row of the table.
type Setting = (&'static str, Change, fn(&mut Row));

const SETTINGS: [Setting; 19] = [
    (
        "header",
        |layer| layer.with_header(HeaderName::from_static("x-other")),
        |row| {
            row.headers.retain(|name| *name != "idempotency-key");
            row.headers.push("x-other");
        },
    ),
    (
        "alias",
        |layer| layer.with_header_alias(HeaderName::from_static("x-other")),
        |row| row.headers = vec!["idempotency-key", "x-other"],
    ),
    (
        "syntax",
        |layer| layer.with_key_syntax(KeySyntax::Strict),
        |row| row.syntax = table(Preset::Ietf).syntax,
    ),
    (
        "length",
        |layer| layer.with_key_length(1..=10),
        |row| row.longest = 10,
    ),
    (
        "methods",
        |layer| layer.with_methods([Method::POST, Method::GET]),
        |row| row.methods = vec!["GET", "POST"],
    ),
    (
        "missing key: reject",
        |layer| layer.with_missing_key(MissingKey::Reject),
        |row| {
            row.missing_key = (400, 0);
            row.cover_connect();
        },
    ),
    (
        "missing key: derive",
        |layer| layer.with_missing_key(MissingKey::Derive),
        |row| {
            row.missing_key = (201, 1);
            row.cover_connect();
        },
    ),
    (
        "principal",
        |layer| layer.with_principal(Principal::unscoped()),
        |row| row.by_authorization = false,
    ),
    (
        "host",
        |layer| layer.with_host_in_scope(true),
        |row| row.by_host = true,
    ),
    (
        "no host",
        |layer| layer.with_host_in_scope(false),
        |row| row.by_host = false,
    ),
    (
        "other request: 409",
        |layer| {
            layer
                .with_key_reuse(KeyReuse::Refuse(StatusCode::CONFLICT))
                .expect("a 4xx")
        },
        |row| row.other_request = 409,
    ),
    (
        "other request: separate",
        |layer| layer.with_key_reuse(KeyReuse::Separate).expect("no status"),
        |row| row.other_request = 201,
    ),
    (
        "concurrent: 429",
        |layer| layer.with_concurrent_requests(ConcurrentRequests::TooManyRequests),
        |row| row.concurrent.0 = 429,
    ),
    (
        "concurrent: 409",
        |layer| layer.with_concurrent_requests(ConcurrentRequests::Conflict),
        |row| row.concurrent.0 = 409,
    ),
    (
        "retry after",
        |layer| layer.with_retry_after(Duration::from_secs(7)),
        |row| row.concurrent.1 = Some("7".to_owned()),
    ),
    (
        "recorded",
        |layer| layer.with_recorded_statuses(|status| status.is_success() || status == 503),
        |row| row.recorded = vec![200, 201, 202, 204, 206, 299, 503],
    ),
    (
        "retention",
        |layer| layer.with_retention(Ttl::from_secs(10)),
        |row| row.retention = 10,
    ),
    (
        "marker",
        |layer| {
            let name = HeaderName::from_static("x-replayed");
            layer.with_replay_marker(Some((name, HeaderValue::from_static("1"))))
        },
        |row| row.marker = Some(("x-replayed".to_owned(), "1".to_owned())),
    ),
    (
        "error",
        |layer| {
            layer.with_error_response(|error| {
                let mut res = http::Response::new("no".into());
                *res.status_mut() = error.status();
                let after = error.retry_after().map(|after| after.as_secs().into());
                if let Some(after) = after {
                    res.headers_mut().insert("retry-after", after);
                }
                res
            })
        },
        |row| row.error = Shape::Custom,
    ),
];

async fn each_setting_changes_its_cell_alone(preset: Preset) {
    for (setting, change, changed) in SETTINGS {
        let mut expected = table(preset);
        changed(&mut expected);
        let found = Layers { preset, change }.observe().await;
        let differences = differences(&expected, &found);
        assert!(found == expected, "{preset:?} with {setting}{differences}");
    }
}

// S-332
#[tokio::test(start_paused = true)]
async fn recommended_setting_changes_only_its_cell() {
    each_setting_changes_its_cell_alone(Preset::Recommended).await;
}

// S-333
#[tokio::test(start_paused = true)]
async fn ietf_setting_changes_only_its_cell() {
    each_setting_changes_its_cell_alone(Preset::Ietf).await;
}

// S-334
#[tokio::test(start_paused = true)]
async fn stripe_setting_changes_only_its_cell() {
    each_setting_changes_its_cell_alone(Preset::Stripe).await;
}

// S-335
#[tokio::test(start_paused = true)]
async fn idempo_setting_changes_only_its_cell() {
    each_setting_changes_its_cell_alone(Preset::Idempo).await;
}

// S-373
#[tokio::test(start_paused = true)]
async fn acp_setting_changes_only_its_cell() {
    each_setting_changes_its_cell_alone(Preset::Acp).await;
}

#[tokio::test(start_paused = true)]
async fn unrecordable_setting_changes_only_its_cells() {
    for preset in PRESETS {
        for (unrecordable, expected) in [
            (Unrecordable::Tombstone, (409, 1)),
            (Unrecordable::Release, (200, 2)),
        ] {
            let change: Change = match unrecordable {
                Unrecordable::Tombstone => |layer| layer.with_unrecordable(Unrecordable::Tombstone),
                _ => |layer| layer.with_unrecordable(Unrecordable::Release),
            };
            let layers = Layers { preset, change };
            let mut row = table(preset);
            (row.too_large, row.streamed) = (expected, expected);
            let found = layers.observe().await;
            let differences = differences(&row, &found);
            assert!(
                found == row,
                "{preset:?} with {unrecordable:?}{differences}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn response_limit_changes_only_its_cells() {
    for preset in PRESETS {
        let limited: Change = |layer| layer.with_response_limit(1000);
        let layers = Layers {
            preset,
            change: limited,
        };
        assert_eq!(layers.twice(|| vec![7; 1000]).await.1, 1, "{preset:?}");
        let (retry, effects) = layers.twice(|| vec![7; 1001]).await;
        let found = (retry.status.as_u16(), effects);
        assert_eq!(found, table(preset).too_large, "{preset:?}");
        assert_eq!(
            layers.retention().await,
            table(preset).retention,
            "{preset:?}"
        );
    }
}
