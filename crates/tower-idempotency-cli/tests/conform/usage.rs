//! Exit code 2: nothing can be judged.

use axum::{Router, http::StatusCode};
use tests::{servers::free_port, wire::Server};

use crate::run;

async fn fails(args: &[&str], expected: &str) {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    let ran = run(args).await;
    assert_eq!(ran.code, 2, "{}{}", ran.out, ran.err);
    assert!(ran.err.contains(expected), "{}", ran.err);
    assert!(ran.out.is_empty(), "{}", ran.out);
    assert!(!ran.err.contains("hush"), "{}", ran.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_arguments_exit_with_two() {
    let url = "http://127.0.0.1:1/";
    fails(&["ftp://127.0.0.1/"], "expected a URL of the form").await;
    fails(&["/orders"], "expected a URL of the form").await;
    for url in ["http://app:hush@127.0.0.1/", "http://app:1/hush@127.0.0.1/"] {
        fails(&[url], "contains credentials").await;
    }
    fails(&["http://app:hush@[::/"], "expected a URL of the form").await;
    fails(&[url, "--header=hush"], "expected NAME:VALUE").await;
    fails(
        &[url, "--header=idempotency-key: k"],
        "conform sets the key itself",
    )
    .await;
    fails(&[url, "--body-file=/no/such/file"], "cannot read").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_server_exits_with_two() {
    let url = format!("http://127.0.0.1:{}/", free_port());
    fails(&[&url], "no connection").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_fails_exits_with_two() {
    let app = Router::new().fallback(|| async { StatusCode::NOT_FOUND });
    let server = Server::start(app).await;
    let url = format!("http://{}/", server.addr());
    fails(&[&url], "a request with a new key got 404").await;
}
