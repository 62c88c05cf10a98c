//! The default principal: the callers that share a key, and those that do not.

use axum::body::Body;
use http::{HeaderName, HeaderValue, Request, StatusCode};
use tests::{
    creating,
    observed::{counted, observed, total},
    post, send,
};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Preset, Principal};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new())
}

/// Returns a request with these headers. A name may occur several times.
fn with(headers: &[(&'static str, &'static str)]) -> Request<Body> {
    let mut req = post("/orders", "k", "order");
    for (name, value) in headers {
        let value = HeaderValue::from_static(value);
        req.headers_mut()
            .append(HeaderName::from_static(name), value);
    }
    req
}

type Headers = [(&'static str, &'static str)];

const FORWARDED_CERT: &str = "x-forwarded-client-cert";

/// Returns the number of executions of two requests that differ only in these headers.
async fn executions(layer: IdempotencyLayer, one: &Headers, two: &Headers) -> u64 {
    let (app, effects) = creating(layer);
    assert_eq!(send(&app, with(one)).await.status, StatusCode::CREATED);
    assert_eq!(send(&app, with(two)).await.status, StatusCode::CREATED);
    effects.count()
}

// F-901, S-900
#[tokio::test(start_paused = true)]
async fn other_credentials_are_other_callers() {
    const PAIRS: [(&Headers, &Headers); 27] = [
        (&[("authorization", "a")], &[("authorization", "b")]),
        (&[("x-arr-clientcert", "a")], &[("x-arr-clientcert", "b")]),
        (
            &[("x-amzn-mtls-clientcert", "a")],
            &[("x-amzn-mtls-clientcert", "b")],
        ),
        (
            &[("x-amzn-mtls-clientcert-leaf", "a")],
            &[("x-amzn-mtls-clientcert-leaf", "b")],
        ),
        (
            &[(FORWARDED_CERT, "Hash=1;URI=a")],
            &[(FORWARDED_CERT, "Hash=1;URI=b")],
        ),
        // Certificates without a name, and one in another form.
        (
            &[(FORWARDED_CERT, "Hash=1;Subject=\"\"")],
            &[(FORWARDED_CERT, "Hash=2;Subject=\"\"")],
        ),
        (
            &[(FORWARDED_CERT, "MIIC/a==")],
            &[(FORWARDED_CERT, "MIIC/b==")],
        ),
        // The certificate is that of a gateway.
        (
            &[(FORWARDED_CERT, "Hash=1;URI=gw"), ("cookie", "sid=a")],
            &[(FORWARDED_CERT, "Hash=1;URI=gw"), ("cookie", "sid=b")],
        ),
        // A header without a value does not hide the cookie.
        (
            &[("authorization", ""), ("cookie", "sid=a")],
            &[("authorization", ""), ("cookie", "sid=b")],
        ),
        (&[("authorization", "a")], &[]),
        (&[("x-api-key", "a")], &[("x-api-key", "b")]),
        (&[("x-api-key", "a")], &[("api-key", "a")]),
        (&[("apikey", "a")], &[("apikey", "b")]),
        (&[("api_key", "a")], &[("api_key", "b")]),
        (&[("access_token", "a")], &[("access_token", "b")]),
        (&[("x_client_secret", "a")], &[("x_client_secret", "b")]),
        (&[("x-auth-token", "a")], &[("x-auth-token", "b")]),
        (&[("x-access-token", "a")], &[("x-access-token", "b")]),
        (&[("private-token", "a")], &[("private-token", "b")]),
        (
            &[("ocp-apim-subscription-key", "a")],
            &[("ocp-apim-subscription-key", "b")],
        ),
        (&[("x-acme-api-key", "a")], &[("x-acme-api-key", "b")]),
        // All callers share the gateway's credential, and each has its own key.
        (
            &[("authorization", "gateway"), ("x-api-key", "a")],
            &[("authorization", "gateway"), ("x-api-key", "b")],
        ),
        (&[("cookie", "sid=a")], &[("cookie", "sid=b")]),
        (&[("cookie", "sid=a")], &[("cookie", "id=a")]),
        (
            &[("cookie", "theme=dark; sid=a")],
            &[("cookie", "theme=dark; sid=b")],
        ),
        // A second cookie has the same name, and only the server decides which one counts.
        (&[("cookie", "sid=a")], &[("cookie", "sid=a; sid=b")]),
        (&[("cookie", "sid=a")], &[("x-api-key", "a")]),
    ];
    for (one, two) in PAIRS {
        assert_eq!(executions(layer(), one, two).await, 2, "{one:?} {two:?}");
        assert_eq!(executions(layer(), one, one).await, 1, "{one:?}");
        assert_eq!(executions(layer(), two, two).await, 1, "{two:?}");
    }
}

// F-908, S-901
#[tokio::test(start_paused = true)]
async fn retry_keeps_principal_if_other_cookies_change() {
    const PAIRS: [(&Headers, &Headers); 10] = [
        (
            &[("cookie", "sid=a; _ga_X1=GS1.1.1")],
            &[("cookie", "_ga_X1=GS1.1.2; sid=a")],
        ),
        (
            &[("cookie", "sid=a; AWSALB=1; AWSALBCORS=1")],
            &[("cookie", "AWSALB=2; sid=a")],
        ),
        (
            &[("cookie", "sid=a; XSRF-TOKEN=1")],
            &[("cookie", "sid=a; XSRF-TOKEN=2")],
        ),
        (
            &[("cookie", "sid=a; OptanonConsent=1")],
            &[("cookie", "sid=a")],
        ),
        (
            &[("cookie", "sid=a; lang=en")],
            &[("cookie", "lang=en"), ("cookie", "sid=a")],
        ),
        (&[("cookie", "_ga=1")], &[]),
        (
            &[("authorization", "a"), ("cookie", "sid=1")],
            &[("authorization", "a"), ("cookie", "sid=2")],
        ),
        (&[("x-csrf-token", "a")], &[("x-csrf-token", "b")]),
        // The requests pass two pods of a gateway.
        (
            &[
                ("authorization", "a"),
                (FORWARDED_CERT, "By=svc;Hash=1;Subject=\"\";URI=gw"),
            ],
            &[
                ("authorization", "a"),
                (FORWARDED_CERT, "By=svc;Hash=2;Subject=\"\";URI=gw"),
            ],
        ),
        (
            &[(FORWARDED_CERT, "Hash=1;URI=gw"), ("cookie", "sid=a")],
            &[("cookie", "sid=a"), (FORWARDED_CERT, "Hash=2;URI=gw")],
        ),
    ];
    for (one, two) in PAIRS {
        assert_eq!(executions(layer(), one, two).await, 1, "{one:?} {two:?}");
    }
}

// F-908, S-901
#[tokio::test(start_paused = true)]
async fn certificate_of_named_header_counts_by_names() {
    let name = HeaderName::from_static(FORWARDED_CERT);
    for (one, two, expected) in [
        ("By=a;Hash=1;URI=gw", "By=b;Hash=2;URI=gw", 1),
        ("Hash=1;URI=a", "Hash=1;URI=b", 2),
        ("Hash=1;Subject=\"\"", "Hash=2;Subject=\"\"", 2),
    ] {
        let layer = layer().with_principal(Principal::header(name.clone()));
        let (one, two) = ([(FORWARDED_CERT, one)], [(FORWARDED_CERT, two)]);
        let count = executions(layer, &one, &two).await;
        assert_eq!(count, expected, "{one:?} {two:?}");
    }
}

// S-902
#[tokio::test(start_paused = true)]
async fn idempo_preset_reads_only_authorization() {
    let idempo = || IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Idempo);
    let (app, effects) = creating(idempo());
    for cookie in ["sid=a", "sid=b"] {
        send(&app, with(&[("cookie", cookie)])).await;
    }
    assert_eq!(effects.count(), 1);
    for token in ["a", "b"] {
        send(&app, with(&[("authorization", token)])).await;
    }
    assert_eq!(effects.count(), 3);
}

// F-902, S-903
#[tokio::test(start_paused = true)]
async fn repeated_cookie_is_no_principal() {
    let (app, effects) = creating(layer().with_principal(Principal::cookie("sid")));
    for cookies in [
        &[("cookie", "sid=a; sid=b")][..],
        &[("cookie", "sid=a"), ("cookie", "sid=b")],
        &[("cookie", "sid=a; sid=a")],
        &[("cookie", "sid=a; sid =b")],
    ] {
        let refused = send(&app, with(cookies)).await;
        assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{cookies:?}");
        assert_eq!(refused.code(), "principal-ambiguous");
        assert!(!refused.is_retryable());
    }
    assert_eq!(effects.count(), 0);
    let other = send(&app, with(&[("cookie", "sid=a; sid2=b")])).await;
    assert_eq!(other.status, StatusCode::CREATED);
}

// F-944, S-982
/// The service might read the other line. A client could then become another caller with each invented line.
#[tokio::test(start_paused = true)]
async fn repeated_credential_is_no_principal() {
    let by_header = layer().with_principal(Principal::header(HeaderName::from_static("x-api-key")));
    let idempo = IdempotencyLayer::with_preset(MemoryStore::new(), Preset::Idempo);
    for (layer, header) in [
        (layer(), "authorization"),
        (layer(), "x-api-key"),
        (by_header, "x-api-key"),
        (idempo, "authorization"),
    ] {
        let (app, effects) = creating(layer);
        for lines in [
            &[(header, "a"), (header, "b")][..],
            &[(header, "a"), (header, "a")],
            &[("x-auth-token", "c"), (header, "a"), (header, "b")],
        ] {
            let refused = send(&app, with(lines)).await;
            assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{lines:?}");
        }
        assert_eq!(effects.count(), 0);
        let one = send(&app, with(&[(header, "a")])).await;
        assert_eq!(one.status, StatusCode::CREATED);
    }
}

// ---- The view of operators ----

// S-904
#[test]
fn anonymous_callers_are_counted_and_warned_once() {
    let (counters, log) = observed("info", async {
        let layer = layer();
        let (app, _) = creating(layer.clone());
        let (clone, _) = creating(layer.with_principal(Principal::authorization()));
        for app in [&app, &app, &clone] {
            send(app, with(&[])).await;
        }
        send(&app, with(&[("x-api-key", "a")])).await;
        send(
            &creating(
                IdempotencyLayer::new(MemoryStore::new()).with_principal(Principal::unscoped()),
            )
            .0,
            with(&[]),
        )
        .await;
    });
    assert_eq!(total(&counters, "idempotency_anonymous_total"), 3.0);
    assert_eq!(
        log.matches("request without credentials").count(),
        1,
        "{log}"
    );
}

// S-904
/// A proxy sets a header without a value for callers that it has not authenticated.
#[test]
fn empty_value_identifies_no_caller() {
    let header = |name| Principal::header(HeaderName::from_static(name));
    let cases: [(Principal, &Headers); 4] = [
        (Principal::credentials(), &[("authorization", " ")]),
        (Principal::credentials(), &[("x-api-key", "")]),
        (header("x-user"), &[("x-user", "")]),
        (Principal::cookie("sid"), &[("cookie", "sid=; theme=dark")]),
    ];
    for (principal, headers) in cases {
        let (counters, _) = observed("info", async {
            let (app, _) = creating(layer().with_principal(principal));
            send(&app, with(headers)).await;
        });
        let anonymous = total(&counters, "idempotency_anonymous_total");
        assert_eq!(anonymous, 1.0, "{headers:?}");
    }
    drop(observed("info", async {
        let both = header("x-user").or(header("x-service"));
        let (app, effects) = creating(layer().with_principal(both));
        for service in ["a", "b"] {
            send(&app, with(&[("x-user", ""), ("x-service", service)])).await;
        }
        assert_eq!(effects.count(), 2);
        let (app, _) = creating(layer().with_principal(header("x-user").and(header("x-service"))));
        let missing = send(&app, with(&[("x-user", ""), ("x-service", "a")])).await;
        assert_eq!(missing.code(), "principal-missing");
    }));
}

// S-905
#[test]
fn refreshed_token_is_counted_and_warned_about() {
    let (counters, log) = observed("info", async {
        let (app, effects) = creating(layer());
        for token in ["old-secret", "new-secret"] {
            send(&app, with(&[("authorization", token)])).await;
        }
        assert_eq!(effects.count(), 2);
        // A retry under the same token, with another key or another body, is not a change of principal.
        send(&app, with(&[("authorization", "new-secret")])).await;
        let mut other = post("/orders", "k", "other order");
        other
            .headers_mut()
            .insert("authorization", HeaderValue::from_static("third-secret"));
        send(&app, other).await;
        // Within a minute, a further change is only counted.
        send(&app, with(&[("authorization", "fourth-secret")])).await;
        tokio::time::advance(std::time::Duration::from_secs(61)).await;
        send(&app, with(&[("authorization", "old-secret")])).await;
    });
    assert_eq!(total(&counters, "idempotency_principal_changed_total"), 3.0);
    assert_eq!(log.matches("under another principal").count(), 2, "{log}");
    assert!(!log.contains("secret"), "{log}");
}

// S-905
#[test]
fn other_host_is_no_changed_principal() {
    let counters = counted(async {
        let (app, effects) = creating(layer().with_host_in_scope(true));
        for host in ["one.example", "two.example"] {
            send(&app, with(&[("host", host), ("authorization", "token")])).await;
        }
        assert_eq!(effects.count(), 2);
    });
    assert_eq!(total(&counters, "idempotency_principal_changed_total"), 0.0);
}

// S-906
#[test]
fn key_of_service_is_no_changed_principal() {
    let counters = counted(async {
        let layer = layer().with_missing_key(tower_idempotency::MissingKey::Derive);
        let (app, effects) = creating(layer);
        for token in ["a", "b"] {
            let mut req = with(&[("authorization", token)]);
            req.headers_mut().remove("idempotency-key");
            send(&app, req).await;
        }
        assert_eq!(effects.count(), 2);
    });
    assert_eq!(total(&counters, "idempotency_principal_changed_total"), 0.0);
}

// S-907
#[test]
fn missing_extension_logs_error() {
    let (counters, log) = observed("info", async {
        let principal = Principal::extension(|account: &u64| account.to_be_bytes());
        let (app, effects) = creating(layer().with_principal(principal));
        for _ in 0..2 {
            let refused = send(&app, with(&[])).await;
            assert_eq!(refused.status, StatusCode::INTERNAL_SERVER_ERROR);
        }
        assert_eq!(effects.count(), 0);
    });
    assert_eq!(total(&counters, "idempotency_refused_total"), 2.0);
    assert_eq!(log.matches("ERROR").count(), 1, "once a minute: {log}");
}
