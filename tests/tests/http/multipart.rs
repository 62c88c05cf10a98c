//! Forms whose boundary differs from attempt to attempt.

use axum::{Router, body::Body, routing::post};
use http::{HeaderValue, Request, StatusCode, header};
use tests::{Effects, created, creating, send, wire::Server};
use tokio::process::Command;
use tower_idempotency::{FingerprintBy, IdempotencyLayer, MemoryStore};

fn layer(by: FingerprintBy) -> IdempotencyLayer {
    IdempotencyLayer::new(MemoryStore::new()).with_fingerprint(by)
}

/// Returns a request with this media type, and with this body if `BOUNDARY` is replaced by the boundary.
fn form(media_type: &str, boundary: &str, body: &str) -> Request<Body> {
    let body = body.replace("BOUNDARY", boundary);
    let mut req = tests::post("/uploads", "k", body);
    let media_type = format!("{media_type}; boundary={boundary}");
    let media_type = HeaderValue::try_from(media_type).expect("a media type");
    req.headers_mut().insert(header::CONTENT_TYPE, media_type);
    req
}

const FORM: &str = "multipart/form-data";
const BODY: &str = "--BOUNDARY\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n1\r\n\
                    --BOUNDARY\r\ncontent-disposition: form-data; name=\"b\"\r\n\r\n2\r\n--BOUNDARY--\r\n";

/// Returns the status of a second request, which must not execute.
async fn second(by: FingerprintBy, one: Request<Body>, two: Request<Body>) -> StatusCode {
    let (app, effects) = creating(layer(by));
    assert_eq!(send(&app, one).await.status, StatusCode::CREATED);
    let second = send(&app, two).await;
    assert_eq!(effects.count(), 1);
    assert_eq!(second.is_replay(), second.status == StatusCode::CREATED);
    second.status
}

// F-067, S-922
#[tokio::test(start_paused = true)]
async fn other_boundary_is_same_request() {
    let requests = || [form(FORM, "one", BODY), form(FORM, "two", BODY)];
    let [one, two] = requests();
    let found = second(FingerprintBy::multipart(), one, two).await;
    assert_eq!(found, StatusCode::CREATED);
    let [one, two] = requests();
    let found = second(FingerprintBy::raw_body(), one, two).await;
    assert_eq!(found, StatusCode::UNPROCESSABLE_ENTITY);
}

// S-923
#[tokio::test(start_paused = true)]
async fn other_parts_are_key_reuse() {
    let swapped = BODY.replace("\"a\"", "\"c\"").replace("\"b\"", "\"a\"");
    for body in [
        BODY.replace("1\r\n", "2\r\n"),
        BODY.replace("\"a\"", "\"a\"; filename=\"a\""),
        swapped,
        // One part instead of two.
        BODY.replacen("\r\n--BOUNDARY\r\n", "\r\n--BOUNDAR\r\n", 1),
        // Not the plain form: compared byte by byte.
        format!("before\r\n{BODY}"),
        format!("{BODY}after"),
    ] {
        let requests = [form(FORM, "one", BODY), form(FORM, "two", &body)];
        let [one, two] = requests;
        let found = second(FingerprintBy::multipart(), one, two).await;
        assert_eq!(found, StatusCode::UNPROCESSABLE_ENTITY, "{body}");
    }
    let requests = ["one", "two"].map(|boundary| form("multipart/mixed", boundary, BODY));
    let [one, two] = requests;
    let found = second(FingerprintBy::multipart(), one, two).await;
    assert_eq!(
        found,
        StatusCode::UNPROCESSABLE_ENTITY,
        "another media type"
    );
}

/// A part that contains the boundary of the retry is not split there.
#[tokio::test(start_paused = true)]
async fn boundary_inside_part_is_key_reuse() {
    let one = form(FORM, "one", &BODY.replace("1\r\n", "--two\r\n"));
    let two = form(FORM, "two", &BODY.replace("1\r\n", "--two\r\n"));
    let found = second(FingerprintBy::multipart(), one, two).await;
    assert_eq!(found, StatusCode::UNPROCESSABLE_ENTITY);
}

// F-067
#[tokio::test]
async fn form_of_curl_is_replayed_on_retry() {
    for (by, expected) in [
        (FingerprintBy::multipart(), "201"),
        (FingerprintBy::raw_body(), "422"),
    ] {
        let effects = Effects::default();
        let handler = effects.clone();
        let app = Router::new()
            .route("/uploads", post(async move || created(handler.happen())))
            .route_layer(layer(by));
        let server = Server::start(app).await;
        let url = format!("http://{}/uploads", server.addr());
        assert_eq!(upload(&url).await, "201");
        assert_eq!(upload(&url).await, expected);
        assert_eq!(effects.count(), 1);
    }
}

/// Uploads a form with a file, and returns the status.
async fn upload(url: &str) -> String {
    let mut curl = Command::new("curl");
    curl.args([
        "--silent",
        "--show-error",
        "--noproxy",
        "*",
        "--max-time",
        "20",
    ]);
    curl.args(["--header", "idempotency-key: k", "--form", "size=7"]);
    curl.args(["--form", "photo=@Cargo.toml;type=image/png"]);
    curl.args(["--output", "/dev/null", "--write-out", "%{http_code}", url]);
    let output = curl.output().await.expect("curl is installed");
    String::from_utf8(output.stdout).expect("digits")
}
