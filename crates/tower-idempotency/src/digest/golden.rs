//! Tests with the IDs, fingerprints and derived keys of earlier builds, which must never change.
//!
//! `WRITE_GOLDEN=1 cargo test -p tower-idempotency golden` adds missing lines and never changes one. A line that differs
//! shows a change that discards entries: each retry of an earlier request would execute again.

use std::{
    collections::BTreeMap, convert::Infallible, fmt::Write, fs, path::PathBuf, time::Duration,
};

use axum::extract::OriginalUri;
use bytes::Bytes;
use http::{HeaderName, Method, Request, Response, Uri, header, request::Builder};
use http_body_util::{BodyExt, Full};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tower::{ServiceExt, service_fn};
use tower_layer::Layer;

use super::hex;
use crate::{
    Body, Enforcement, FingerprintBy, IDEMPOTENCY_KEY, IdempotencyLayer, JsonFingerprint, KeyReuse,
    KeyScope, Lease, MissingKey, Preset, Principal,
    items::Item,
    run_once::{Outcome, WorkError},
    store::{Acquired, Claim, KeyId, LeaseRef, Store, StoreError, Ttl},
};

/// A store that grants each lease and reports its claim.
struct ClaimStore(UnboundedSender<Claim>);

impl Store for ClaimStore {
    async fn acquire(&self, claim: &Claim) -> Result<Acquired, StoreError> {
        self.0.send(claim.clone()).expect("the test receives it");
        Ok(Acquired::Granted {
            generation: 1,
            takeover: false,
        })
    }

    async fn renew(&self, _: &LeaseRef, _: Ttl) -> Result<(), StoreError> {
        Ok(())
    }

    async fn complete(&self, _: &LeaseRef, _: Bytes, _: Ttl) -> Result<(), StoreError> {
        Ok(())
    }

    async fn release(&self, _: &LeaseRef) -> Result<(), StoreError> {
        Ok(())
    }

    async fn wait_for_change(&self, _: &KeyId, _: Duration) {}
}

/// A request to a layer with some settings.
struct Case {
    name: String,
    layer: Box<dyn FnOnce(IdempotencyLayer) -> IdempotencyLayer>,
    preset: Preset,
    req: Request<Full<Bytes>>,
}

impl Case {
    fn new(
        name: impl Into<String>,
        req: Builder,
        layer: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            layer: Box::new(layer),
            preset: Preset::Recommended,
            req: req.body(Full::from(BODY)).expect("a request"),
        }
    }

    fn with_preset(self, preset: Preset) -> Self {
        Self { preset, ..self }
    }

    fn with_body(mut self, body: &'static str) -> Self {
        *self.req.body_mut() = Full::from(body);
        self
    }

    /// Sends the request, and returns its claim.
    async fn claim(self) -> Claim {
        let (sender, mut claims) = unbounded_channel();
        let layer = IdempotencyLayer::with_preset(ClaimStore(sender), self.preset);
        let service = (self.layer)(layer).layer(service_fn(read_body));
        let Ok(response) = service.oneshot(self.req).await;
        assert!(
            response.status().is_success(),
            "{}: {}",
            self.name,
            response.status()
        );
        claims.recv().await.expect("a claim")
    }
}

/// Reads the request body. An observed request is judged when its body is complete.
async fn read_body(req: Request<Body<Full<Bytes>>>) -> Result<Response<Full<Bytes>>, Infallible> {
    req.into_body().collect().await.map(drop)?;
    Ok(Response::new(Full::default()))
}

const BODY: &str = r#"{ "order": "7", "trace": 1, "amount": 12.50 }"#;
const ALICE: &str = "Bearer of-alice";

#[derive(Clone)]
struct Account(u64);

/// Returns a request without a key and without a principal.
fn unkeyed() -> Builder {
    Request::post("/pay?currency=EUR").header(header::CONTENT_TYPE, "application/json")
}

fn keyed() -> Builder {
    unkeyed().header(IDEMPOTENCY_KEY, "order-7")
}

fn authorized() -> Builder {
    keyed().header(header::AUTHORIZATION, ALICE)
}

fn unchanged(layer: IdempotencyLayer) -> IdempotencyLayer {
    layer
}

fn principals() -> Vec<Case> {
    let principal_case = |name: &str, principal: Principal| {
        let req = authorized()
            .header("x-tenant", "acme")
            .header(header::COOKIE, "session=s1")
            .extension(Account(5));
        Case::new(name, req, |it| it.with_principal(principal))
    };
    let account = || Principal::extension(|account: &Account| account.0.to_be_bytes());
    let tenant = || Principal::header(HeaderName::from_static("x-tenant"));
    let absent = || Principal::header(HeaderName::from_static("x-absent"));
    vec![
        Case::new("anonymous", keyed(), unchanged),
        Case::new("authorization", authorized(), unchanged),
        Case::new("api-key", keyed().header("x-api-key", "k-1"), unchanged),
        Case::new(
            "forwarded-cert",
            keyed().header(
                "x-forwarded-client-cert",
                r#"By=a;Hash=1;Subject="CN=b";URI=c,Hash=2"#,
            ),
            unchanged,
        ),
        Case::new(
            "two-credentials",
            authorized().header("x-api-key", "k-1"),
            unchanged,
        ),
        Case::new(
            "cookies",
            keyed().header(header::COOKIE, "session=s1; user=7"),
            unchanged,
        ),
        principal_case("principal-header", tenant()),
        principal_case("principal-cookie", Principal::cookie("session")),
        principal_case("principal-extension", account()),
        principal_case(
            "principal-function",
            Principal::from_fn(|head| Ok(Some(head.uri.path().as_bytes().to_vec()))),
        ),
        principal_case("principal-all", Principal::unscoped()),
        principal_case("principal-second-source", absent().or(account())),
        principal_case("principal-of-two", tenant().and(account())),
    ]
}

fn scopes() -> Vec<Case> {
    const SECRET: [u8; 16] = [7; 16];
    let to_host = |uri: &str| {
        let req = Request::post(uri).header(header::HOST, "API.example.com.:443");
        req.header(IDEMPOTENCY_KEY, "order-7")
    };
    vec![
        Case::new("namespace", authorized(), |it| {
            it.with_namespace("payments")
        }),
        Case::new("secret", authorized(), |it| {
            it.with_secret(SECRET).expect("a secret")
        }),
        Case::new("host", to_host("/pay"), |it| it.with_host_in_scope(true)),
        Case::new("other-host", to_host("https://example.org/pay"), |it| {
            it.with_host_in_scope(true)
        }),
        Case::new("endpoint", authorized(), |it| {
            it.with_endpoint_in_scope(true)
        }),
        Case::new("preset-ietf", keyed_in_quotes(), unchanged).with_preset(Preset::Ietf),
        Case::new("preset-stripe", authorized(), unchanged).with_preset(Preset::Stripe),
        Case::new("preset-idempo", authorized(), unchanged).with_preset(Preset::Idempo),
        Case::new("preset-acp", authorized(), unchanged).with_preset(Preset::Acp),
    ]
}

fn keyed_in_quotes() -> Builder {
    unkeyed().header(IDEMPOTENCY_KEY, "\"order-7\"")
}

fn keys() -> Vec<Case> {
    let named = |name: &str, scope| {
        Case::new(name, authorized(), move |it| {
            it.with_key_from(scope, |_| Some("payment-7".to_owned()))
        })
    };
    vec![
        named("key-of-service-for-each-caller", KeyScope::EachCaller),
        named("key-of-service-for-all-callers", KeyScope::AllCallers),
        Case::new("separate", authorized(), |it| {
            it.with_key_reuse(KeyReuse::Separate).expect("no status")
        }),
    ]
}

fn fingerprints() -> Vec<Case> {
    const JSON: &str = "application/json; charset=utf-8";
    const FORM: &str = "multipart/form-data; boundary=7f3a";
    const PARTS: &str =
        "--7f3a\r\nContent-Disposition: form-data; name=\"order\"\r\n\r\n7\r\n--7f3a--\r\n";
    let by_value = JsonFingerprint::new().numbers_by_value();
    let by_value = by_value.without(["/trace"]).expect("a pointer");
    let custom =
        FingerprintBy::custom(|head, body| [head.method.as_str().as_bytes(), body].concat());
    [
        ("raw-body", FingerprintBy::raw_body(), JSON, BODY),
        ("head-only", FingerprintBy::head_only(), JSON, BODY),
        (
            "canonical-json",
            FingerprintBy::canonical_json(),
            JSON,
            BODY,
        ),
        (
            "canonical-json-of-text",
            FingerprintBy::canonical_json(),
            "text/plain",
            BODY,
        ),
        ("json-by-value", FingerprintBy::json(by_value), JSON, BODY),
        ("multipart", FingerprintBy::multipart(), FORM, PARTS),
        (
            "multipart-of-text",
            FingerprintBy::multipart(),
            "text/plain",
            BODY,
        ),
        ("custom", custom, JSON, BODY),
        (
            "added-header",
            FingerprintBy::raw_body().and_header(header::ACCEPT_LANGUAGE),
            JSON,
            BODY,
        ),
        (
            "without-headers",
            FingerprintBy::raw_body().with_headers([]),
            JSON,
            BODY,
        ),
    ]
    .into_iter()
    .flat_map(|(name, by, content_type, body)| {
        [
            ("", Enforcement::Enforce),
            ("observed-", Enforcement::Observe),
        ]
        .map(|(prefix, enforcement)| {
            let req = Request::builder()
                .method(Method::PUT)
                .uri("/orders/7?currency=EUR")
                .extension(OriginalUri(Uri::from_static("/v1/orders/7?currency=EUR")))
                .header(IDEMPOTENCY_KEY, "order-7")
                .header(header::CONTENT_TYPE, content_type)
                .header(header::ACCEPT_LANGUAGE, "de")
                .header("stripe-account", "acct_1")
                .header("content-range", "bytes 0-9/20");
            let by = by.clone();
            let layer =
                move |it: IdempotencyLayer| it.with_fingerprint(by).with_enforcement(enforcement);
            Case::new(format!("{prefix}{name}"), req, layer).with_body(body)
        })
    })
    .collect()
}

fn ids_of(claim: &Claim) -> String {
    format!(
        "{} {}",
        claim.id.to_hex(),
        hex(claim.fingerprint.as_bytes())
    )
}

/// Returns the claim and a derived key of work without a request.
async fn run_once(namespace: &'static str) -> (Claim, String) {
    let (sender, mut claims) = unbounded_channel();
    let layer = IdempotencyLayer::new(ClaimStore(sender)).with_namespace(namespace);
    let work = async |lease: Lease| Ok::<_, WorkError<Infallible>>(lease.derive("x"));
    let outcome = layer.run_once("order-7", "pay 12.50", work).await;
    let Ok(Outcome::Executed(derived)) = outcome else {
        panic!("{outcome:?}");
    };
    (claims.recv().await.expect("a claim"), derived)
}

/// Returns the claim of an item of a batch request.
async fn item(by: FingerprintBy) -> Claim {
    let (sender, mut claims) = unbounded_channel();
    let layer = IdempotencyLayer::new(ClaimStore(sender)).with_fingerprint(by);
    let req = Request::post("/payments/batch?currency=EUR").header(header::AUTHORIZATION, ALICE);
    let (head, ()) = req.body(()).expect("a request").into_parts();
    let items = layer.items(&head).expect("a principal");
    let work = async |(), _lease| Ok::<_, WorkError<Infallible>>(());
    let results = items
        .run(vec![Item::new("item-1", "pay 12.50", ())], work)
        .await;
    assert_eq!(results.expect("a batch").len(), 1);
    claims.recv().await.expect("a claim")
}

/// Returns the name of each case, and its line.
async fn lines() -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let cases = [principals(), scopes(), keys(), fingerprints()];
    for case in cases.into_iter().flatten() {
        let name = case.name.clone();
        lines.push((name, ids_of(&case.claim().await)));
    }
    // The fingerprint of such an entry is random.
    let derived = Case::new("", unkeyed(), |it| it.with_missing_key(MissingKey::Derive));
    lines.push(("derived".to_owned(), derived.claim().await.id.to_hex()));
    let by_method = FingerprintBy::custom(|head, _| head.method.as_str().into());
    for (name, by) in [
        ("item", FingerprintBy::raw_body()),
        ("item-with-custom", by_method),
    ] {
        lines.push((name.to_owned(), ids_of(&item(by).await)));
    }
    for (name, namespace) in [("run-once", ""), ("run-once-in-namespace", "payments")] {
        let (claim, derived) = run_once(namespace).await;
        lines.push((name.to_owned(), ids_of(&claim)));
        lines.push((format!("{name}-derived-key"), derived));
    }
    lines
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/ids-v1.txt")
}

fn parse(text: &str) -> BTreeMap<&str, &str> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .collect()
}

/// Adds the lines of new cases to the file.
fn add_missing(current: &[(String, String)]) {
    let mut text = fs::read_to_string(path()).unwrap_or_default();
    let golden: Vec<String> = parse(&text).into_keys().map(str::to_owned).collect();
    for (name, line) in current.iter().filter(|(name, _)| !golden.contains(name)) {
        writeln!(text, "{name} {line}").expect("memory");
    }
    fs::write(path(), text).expect("the golden file");
}

/// With `WRITE_GOLDEN`, lines that are missing are written first.
#[tokio::test]
async fn golden_ids_and_fingerprints_are_unchanged() {
    let current = lines().await;
    if std::env::var_os("WRITE_GOLDEN").is_some() {
        add_missing(&current);
    }
    let text = fs::read_to_string(path());
    let text = text.unwrap_or_else(|error| panic!("{}: {error}", path().display()));
    let golden = parse(&text);
    for (name, line) in &current {
        assert_eq!(golden.get(&**name), Some(&&**line), "{name}");
    }
    assert_eq!(
        golden.len(),
        current.len(),
        "the file has one line for each case"
    );
}
