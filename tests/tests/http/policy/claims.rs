//! The claims of a policy, each compared with the layer.

use std::time::Duration;

use axum::{Router, body::Body, response::IntoResponse};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode};
use tests::{
    Effects, TestResponse, app,
    barrier::{Barrier, within},
    created, noise, send,
};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Policy, conformance::FaultInjector};

use super::{Account, Configuration};

const KEY: &str = "key-0123456789";
pub(super) const JSON: &str = r#"{"id":1,"a":2,"items":[{"id":3}]}"#;

/// The statuses at the ends of the ranges of all configurations.
pub(super) const STATUSES: [u16; 35] = [
    200, 204, 299, 300, 304, 306, 307, 308, 309, 399, 400, 401, 402, 403, 404, 405, 406, 407, 408,
    409, 413, 418, 419, 420, 422, 425, 429, 431, 440, 441, 451, 499, 500, 503, 599,
];

/// A configuration, its policy, and the claims in it.
pub(super) struct Claims<'a> {
    configuration: &'a Configuration,
    pub(super) policy: Policy,
}

/// A new store, and a service behind the layer.
pub(super) struct Bench {
    pub(super) app: Router,
    pub(super) effects: Effects,
    pub(super) store: FaultInjector<MemoryStore>,
    pub(super) barrier: Barrier,
}

impl Bench {
    fn new(layer: impl FnOnce(FaultInjector<MemoryStore>) -> IdempotencyLayer) -> Self {
        let store = FaultInjector::new(MemoryStore::new());
        let barrier = Barrier::closed();
        let held = barrier.clone();
        let (app, effects) = app(layer(store.clone()), move |n, req: Request<Body>| {
            let wish = req.headers().get("x-wish").cloned();
            let held = held.clone();
            async move { respond(n, wish.as_ref(), &held).await }
        });
        Self {
            app,
            effects,
            store,
            barrier,
        }
    }

    /// Returns the response, and `true` if the handler was executed for it.
    pub(super) async fn send(&self, req: Request<Body>) -> (TestResponse, bool) {
        let before = self.effects.count();
        let response = send(&self.app, req).await;
        (response, self.effects.count() > before)
    }
}

async fn respond(
    n: u64,
    wish: Option<&HeaderValue>,
    barrier: &Barrier,
) -> axum::response::Response {
    let wish = wish.map_or("", |wish| wish.to_str().expect("text"));
    match wish.split_once(' ').unwrap_or((wish, "")) {
        ("status", status) => StatusCode::from_bytes(status.as_bytes())
            .expect("a status")
            .into_response(),
        ("bytes", bytes) => noise(bytes.parse().expect("a number")).into_response(),
        ("for", seconds) => [("x-idempo-persist-for-seconds", seconds.to_owned())].into_response(),
        ("wait", _) => {
            barrier.pass().await;
            created(n)
        }
        ("panic", _) => panic!("the intended panic"),
        _ => created(n),
    }
}

impl Claims<'_> {
    /// Compares each field of the policy with the layer.
    pub(super) async fn assert_all(configuration: &Configuration) {
        let layer = configuration.layer(FaultInjector::new(MemoryStore::new()));
        let policy = layer.policy();
        let claims = Claims {
            configuration,
            policy,
        };
        // The clock passes several retentions of a year.
        within(Duration::from_secs(1 << 32), async {
            claims.methods_and_exceptions().await;
            claims.key().await;
            claims.lengths_and_check().await;
            claims.scope().await;
            claims.fingerprint().await;
            claims.key_reuse().await;
            claims.concurrent_requests().await;
            claims.orphans().await;
            claims.failure().await;
            claims.store_failure().await;
            claims.recorded_statuses().await;
            claims.unrecordable().await;
            claims.retention().await;
            claims.limits().await;
        })
        .await;
    }

    pub(super) fn bench(&self) -> Bench {
        Bench::new(|store| self.configuration.layer(store))
    }

    pub(super) fn name(&self) -> String {
        self.configuration.name()
    }

    /// Returns a request with every kind of credential, and without a key.
    fn keyless(&self, method: &str, target: &str, body: impl Into<Body>) -> Request<Body> {
        let mut req = Request::builder()
            .method(method)
            .uri(target)
            .header("host", "one.example")
            .header("authorization", "Bearer one")
            .header("cookie", "session=one")
            .header("x-user", "one")
            .header("content-type", "application/json")
            .body(body.into())
            .expect("a valid request");
        req.extensions_mut().insert(Account);
        req
    }

    fn with_key(&self, mut req: Request<Body>, key: &str) -> Request<Body> {
        let key = match self.policy.key.syntax {
            Some("strict") => format!("\"{key}\""),
            _ => key.to_owned(),
        };
        let name = self.policy.key.header.as_deref().unwrap_or("x-entity");
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
        req.headers_mut()
            .insert(name, HeaderValue::try_from(key).expect("a value"));
        req
    }

    pub(super) fn post(&self, body: impl Into<Body>) -> Request<Body> {
        self.with_key(self.keyless("POST", "/orders", body), KEY)
    }

    pub(super) fn wish(&self, wish: &str) -> Request<Body> {
        let mut req = self.post(JSON);
        let wish = HeaderValue::from_str(wish).expect("a value");
        req.headers_mut().insert("x-wish", wish);
        req
    }

    fn with_header(&self, name: &'static str, value: &'static str) -> Request<Body> {
        let mut req = self.post(JSON);
        req.headers_mut()
            .insert(name, HeaderValue::from_static(value));
        req
    }

    /// Asserts that the layer refused the request as the policy states for this error.
    #[track_caller]
    pub(super) fn assert_refused(
        &self,
        (response, is_executed): &(TestResponse, bool),
        code: &str,
    ) {
        let error = self.policy.errors.iter().find(|error| error.code == code);
        let error = error.unwrap_or_else(|| panic!("{}: no {code} in the policy", self.name()));
        assert!(!is_executed, "{} {code}", self.name());
        assert_eq!(
            response.status,
            error.status,
            "{} {code} {response:?}",
            self.name()
        );
        let media_type = response.header("content-type").unwrap_or_default();
        assert_eq!(media_type, error.media_type, "{} {code}", self.name());
    }

    /// Asserts that a second request is a replay, or else what other requests under the key get.
    #[track_caller]
    fn assert_same(&self, second: &(TestResponse, bool), is_same: bool, what: &str) {
        let name = self.name();
        let (response, is_executed) = second;
        match (&self.policy.replay_marker, is_same) {
            (Some(marker), true) => {
                assert_eq!(
                    response.header(&marker.name),
                    Some(&*marker.value),
                    "{name} {what} {response:?}"
                );
            }
            (Some(marker), false) => {
                assert_eq!(response.header(&marker.name), None, "{name} {what}");
            }
            (None, true) => assert_eq!(response.status, 201, "{name} {what}"),
            (None, false) => {}
        }
        match self.policy.key_reuse {
            _ if is_same => assert!(!is_executed, "{name} {what}"),
            Some(status) => {
                assert_eq!(response.status, status, "{name} {what}");
                self.assert_refused(second, "key-reused");
            }
            None => assert!(is_executed, "{name} {what}"),
        }
    }

    async fn methods_and_exceptions(&self) {
        let all = [
            "CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE",
        ];
        for method in all {
            let bench = self.bench();
            for _ in 0..2 {
                bench
                    .send(self.with_key(self.keyless(method, "/orders", JSON), KEY))
                    .await;
            }
            let covered = self
                .policy
                .covers(&Method::from_bytes(method.as_bytes()).expect("a method"));
            assert_eq!(
                bench.effects.count() == 1,
                covered,
                "{} {method}",
                self.name()
            );
        }
        let bench = self.bench();
        bench.send(self.post(JSON)).await;
        let (_, is_executed) = bench.send(self.with_header("x-skip", "1")).await;
        assert_eq!(is_executed, self.policy.has_exceptions, "{}", self.name());
    }

    async fn key(&self) {
        let key = &self.policy.key;
        let bench = self.bench();
        let first = bench.send(self.keyless("POST", "/orders", JSON)).await;
        match key.missing {
            "reject" => self.assert_refused(&first, "missing-key"),
            missing => {
                assert!(first.1, "{}", self.name());
                let (_, is_executed) = bench.send(self.keyless("POST", "/orders", JSON)).await;
                assert_eq!(is_executed, missing == "pass-through", "{}", self.name());
            }
        }
        assert_eq!(key.is_required, key.missing == "reject");
        let Some(header) = &key.header else {
            return;
        };
        let name = HeaderName::from_bytes(header.as_bytes()).expect("a name");
        let spelled = |spelling: &str| {
            let mut req = self.keyless("POST", "/orders", JSON);
            let spelling = HeaderValue::from_str(spelling).expect("a value");
            req.headers_mut().insert(&name, spelling);
            req
        };
        let (bare, quoted) = (KEY.to_owned(), format!("\"{KEY}\""));
        let bench = self.bench();
        let first = bench.send(spelled(&quoted)).await;
        assert!(first.1, "{}", self.name());
        let echoed = first.0.header(header);
        assert_eq!(
            echoed,
            key.is_repeated.then_some(&*quoted),
            "{}",
            self.name()
        );
        let second = bench.send(spelled(&bare)).await;
        match key.syntax {
            Some("strict") => self.assert_refused(&second, "malformed-key"),
            // Quotes are part of the key.
            Some("verbatim") => assert!(second.1, "{}", self.name()),
            _ => assert!(!second.1, "{}", self.name()),
        }
        let spaced = bench.send(spelled("key with spaces")).await;
        match key.syntax {
            Some("unquoted") => assert!(spaced.1, "{}", self.name()),
            _ => self.assert_refused(&spaced, "malformed-key"),
        }
        let mut req = self.keyless("POST", "/orders", JSON);
        let alias = key.alias.as_deref().unwrap_or("x-alias");
        let alias = HeaderName::from_bytes(alias.as_bytes()).expect("a name");
        req.headers_mut()
            .insert(alias, HeaderValue::try_from(quoted).expect("a value"));
        let (response, is_executed) = bench.send(req).await;
        if key.alias.is_some() {
            assert!(
                !is_executed && response.status == 201,
                "{} {response:?}",
                self.name()
            );
        } else {
            assert!(
                is_executed || key.missing != "pass-through",
                "{}",
                self.name()
            );
        }
    }

    async fn lengths_and_check(&self) {
        let key = &self.policy.key;
        let accepts = async |length: usize| {
            let text = "k".repeat(length);
            self.bench()
                .send(self.with_key(self.keyless("POST", "/orders", JSON), &text))
                .await
        };
        assert!(accepts(key.min_bytes).await.1, "{}", self.name());
        if key.min_bytes > 1 {
            self.assert_refused(&accepts(key.min_bytes - 1).await, "malformed-key");
        }
        if let Some(max) = key.max_bytes {
            assert!(accepts(max).await.1, "{}", self.name());
            self.assert_refused(&accepts(max + 1).await, "key-too-long");
        } else {
            assert!(accepts(5_000).await.1, "{}", self.name());
        }
        let refused = self.with_key(self.keyless("POST", "/orders", JSON), "no-0123456789");
        let response = self.bench().send(refused).await;
        if key.has_check {
            self.assert_refused(&response, "malformed-key");
        } else {
            assert!(response.1, "{}", self.name());
        }
    }

    async fn scope(&self) {
        let scope = &self.policy.scope;
        let bench = self.bench();
        bench.send(self.post(JSON)).await;
        let (_, is_executed) = bench.send(self.with_header("host", "two.example")).await;
        assert_eq!(is_executed, scope.host, "{} host", self.name());
        let other_path = self.with_key(self.keyless("POST", "/refunds", JSON), KEY);
        let other_path = bench.send(other_path).await;
        if scope.endpoint {
            assert!(other_path.1, "{} endpoint", self.name());
        } else {
            let is_same = self.policy.fingerprint.body == "service";
            self.assert_same(&other_path, is_same, "endpoint");
        }
        let mut others = self.post(JSON);
        for (name, value) in [
            ("authorization", "Bearer two"),
            ("cookie", "session=two"),
            ("x-user", "two"),
        ] {
            others
                .headers_mut()
                .insert(name, HeaderValue::from_static(value));
        }
        let (_, is_executed) = bench.send(others).await;
        let is_other = match scope.callers[..] {
            _ if scope.is_shared => false,
            // The account of both requests is the same one.
            ["all" | "service"] => false,
            ["credentials" | "cookie" | "header" | "both"] => true,
            _ => panic!("{}: {:?}", self.name(), scope.callers),
        };
        assert_eq!(is_executed, is_other, "{} callers", self.name());
        if scope.callers == ["cookie"] && !scope.is_shared {
            let (_, is_executed) = bench
                .send(self.with_header("authorization", "Bearer two"))
                .await;
            assert!(!is_executed, "{}", self.name());
        }
    }

    async fn fingerprint(&self) {
        let fingerprint = &self.policy.fingerprint;
        let (is_json, body) = (fingerprint.body == "json", fingerprint.body);
        let bodies = [
            (r#"{"a":2,"id":1,"items":[{"id":3}]}"#, is_json),
            (
                r#"{"id":1,"a":2.0,"items":[{"id":3}]}"#,
                is_json && fingerprint.numbers_by_value,
            ),
            (
                r#"{"id":9,"a":2,"items":[{"id":3}]}"#,
                fingerprint.without.iter().any(|at| at == "/id"),
            ),
            (
                r#"{"id":1,"a":2,"items":[{"id":9}]}"#,
                fingerprint.without.iter().any(|at| at == "/items/*/id"),
            ),
            (r#"{"id":1,"a":3,"items":[{"id":3}]}"#, false),
        ];
        for (other, is_same) in bodies {
            let bench = self.bench();
            bench.send(self.post(JSON)).await;
            let second = bench.send(self.post(other)).await;
            self.assert_same(&second, is_same || body == "none", other);
        }
        let form = |boundary: &str| {
            let part = "content-disposition: form-data; name=\"a\"\r\n\r\n1";
            let mut req = self.post(format!("--{boundary}\r\n{part}\r\n--{boundary}--\r\n"));
            let media_type = format!("multipart/form-data; boundary={boundary}");
            let media_type = HeaderValue::try_from(media_type).expect("a value");
            req.headers_mut().insert("content-type", media_type);
            req
        };
        let bench = self.bench();
        bench.send(form("one")).await;
        let second = bench.send(form("two")).await;
        self.assert_same(
            &second,
            body == "form" || body == "none",
            "another boundary",
        );
        for name in ["x-tenant-id", "x-branch", "x-trace"] {
            let bench = self.bench();
            bench.send(self.post(JSON)).await;
            let second = bench.send(self.with_header(name, "1")).await;
            let is_same = !fingerprint.headers.iter().any(|listed| listed == name);
            self.assert_same(&second, is_same, name);
        }
    }

    async fn key_reuse(&self) {
        let bench = self.bench();
        bench.send(self.post(JSON)).await;
        let other = self.keyless("POST", "/orders?other", "{}");
        let second = bench.send(self.with_key(other, KEY)).await;
        self.assert_same(&second, false, "another request");
    }
}
