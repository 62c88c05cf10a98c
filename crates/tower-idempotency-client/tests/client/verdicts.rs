//! The table of verdicts in `docs/guide/retries.md`, row by row, for the dialects of four servers.

use std::time::Duration;

use tower_idempotency_client::{Budget, IdempotencyKeyLayer, Outcome, Protocol, RetryLayer};

use crate::{
    harness::{Reply, Server, field, record_events, reply, send, status, take_events},
    recorded::outcome_of_rejection,
};

/// Verdict on a first attempt, as its caller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// The request is sent again, for this cause. If it was the last attempt, the outcome is this.
    Retry(&'static str, Outcome),
    /// The request is not sent again.
    Stop(Outcome),
}

use Outcome::{Definite, NotExecuted, Unknown};
use Seen::{Retry, Stop};

fn layer(protocol: Protocol) -> RetryLayer {
    RetryLayer::new().with_keys(IdempotencyKeyLayer::new().with_protocol(protocol))
}

async fn seen(layer: &RetryLayer, first: &Reply) -> Seen {
    record_events();
    let server = Server::new([first.clone(), status(201)]);
    let call = send(layer, &server).await;
    let attempts = server.take_log();
    let causes = field(&take_events(), "cause");
    // Attempts in progress do not count, and their delay is longer than the deadline.
    let alone = Server::new([first.clone()]);
    let limited = layer.clone().with_max_attempts(1);
    let last = send(&limited.with_deadline(Duration::from_millis(1)), &alone).await;
    assert_eq!(alone.take_log().len(), 1, "{first:?}");
    match attempts.len() {
        1 => {
            assert_eq!(call.outcome(), last.outcome(), "{first:?}");
            Stop(call.outcome())
        }
        2 => {
            assert_eq!(attempts[0].key(), attempts[1].key());
            assert_eq!(attempts[0].headers, attempts[1].headers);
            assert_eq!(attempts[0].body, attempts[1].body);
            assert_eq!(attempts[0].uri, attempts[1].uri);
            assert_eq!((call.status(), call.outcome()), (Some(201), Definite));
            Retry(causes[0].clone().leak(), last.outcome())
        }
        more => panic!("{more} attempts after {first:?}"),
    }
}

async fn check(protocol: Protocol, rows: Vec<(Reply, Seen)>) {
    for (first, expected) in rows {
        let layer = layer(protocol);
        let text = format!("{protocol:?}: {first:?}");
        assert_eq!(seen(&layer, &first).await, expected, "{text}");
        // A function of the caller that does not decide changes nothing.
        let layer = layer.with_verdict(|_| None);
        assert_eq!(seen(&layer, &first).await, expected, "{text}");
    }
}

/// Returns a refusal of `tower-idempotency`.
fn problem(status: u16, code: &str, is_retryable: bool) -> Reply {
    let after: &[_] = if is_retryable {
        &[("retry-after", "1")]
    } else {
        &[]
    };
    let headers = [&[("content-type", "application/problem+json")], after].concat();
    let body = format!(
        r#"{{"type":"urn:tower-idempotency:problem:{code}","code":"{code}","retryable":{is_retryable}}}"#
    );
    reply(status, &headers, &body)
}

pub(crate) fn json(status: u16, headers: &[(&'static str, &str)], body: &str) -> Reply {
    let headers = [&[("content-type", "application/json")], headers].concat();
    reply(status, &headers, body)
}

/// Rows that are the same for every server, except for 422 in the draft and 429 of idempo.
fn by_status(protocol: Protocol) -> Vec<(Reply, Seen)> {
    let limited = match protocol {
        Protocol::Idempo => Unknown,
        _ => NotExecuted,
    };
    let mut rows = vec![
        (Reply::Refused, Retry("not_sent", NotExecuted)),
        (Reply::Broken, Retry("transient", Unknown)),
        (status(408), Retry("transient", Unknown)),
        (status(425), Retry("transient", NotExecuted)),
        (status(429), Retry("throttled", limited)),
        (
            reply(500, &[("idempotent-replayed", "true")], ""),
            Stop(Unknown),
        ),
        (
            reply(409, &[("idempotent-replayed", "true")], ""),
            Stop(Definite),
        ),
        (
            reply(500, &[("stripe-should-retry", "false")], ""),
            Stop(Unknown),
        ),
        (
            reply(429, &[("x-should-retry", "false")], ""),
            Stop(limited),
        ),
        (
            reply(402, &[("x-should-retry", "true")], ""),
            Retry("transient", Unknown),
        ),
        (
            reply(404, &[("should-retry", "perhaps")], ""),
            Stop(Definite),
        ),
        (
            reply(200, &[("x-should-retry", "true")], ""),
            Stop(Definite),
        ),
    ];
    let unprocessable = match protocol {
        Protocol::Ietf => Stop(NotExecuted),
        _ => Stop(Definite),
    };
    rows.push((status(422), unprocessable));
    let definite = [200, 201, 204, 301, 302, 303, 304, 400, 402, 404, 405, 410];
    let rejected = [
        307, 308, 401, 403, 406, 407, 411, 412, 413, 415, 416, 417, 419, 421, 423, 424, 426, 428,
        431, 440,
    ];
    let failed = [500, 501, 502, 503, 504, 507, 520];
    rows.extend(definite.map(|code| (status(code), Stop(Definite))));
    rows.extend(rejected.map(|code| (status(code), Stop(outcome_of_rejection(protocol, code)))));
    rows.extend(failed.map(|code| (status(code), Retry("transient", Unknown))));
    rows
}

#[tokio::test(start_paused = true)]
async fn responses_of_tower_idempotency() {
    let mut rows = by_status(Protocol::TowerIdempotency);
    rows.extend([
        (
            problem(409, "in-progress", true),
            Retry("in_progress", Unknown),
        ),
        (
            problem(429, "in-progress", true),
            Retry("in_progress", Unknown),
        ),
        (
            problem(409, "outcome-unknown", true),
            Retry("transient", Unknown),
        ),
        (problem(409, "outcome-unknown", false), Stop(Unknown)),
        (problem(409, "response-not-retained", false), Stop(Definite)),
        (problem(422, "key-reused", false), Stop(NotExecuted)),
        (
            problem(429, "caller-limit", true),
            Retry("throttled", NotExecuted),
        ),
        (
            problem(503, "store-unavailable", true),
            Retry("throttled", NotExecuted),
        ),
        (problem(503, "store-unavailable", false), Stop(Unknown)),
        (
            problem(503, "overloaded", true),
            Retry("throttled", NotExecuted),
        ),
        (
            problem(503, "draining", true),
            Retry("throttled", NotExecuted),
        ),
        (
            problem(408, "body-timeout", true),
            Retry("transient", NotExecuted),
        ),
        (
            problem(400, "body-unreadable", true),
            Retry("transient", NotExecuted),
        ),
        (
            problem(502, "upstream-unreachable", true),
            Retry("transient", NotExecuted),
        ),
        (problem(404, "no-route", false), Stop(NotExecuted)),
        (
            problem(405, "connect-not-supported", false),
            Stop(NotExecuted),
        ),
        // The status decides, and the body is not read.
        (problem(403, "later", false), Stop(NotExecuted)),
        // Responses of the application.
        (json(404, &[], r#"{"code":"no-route"}"#), Stop(Definite)),
        (
            reply(404, &[("content-type", "application/problem+json")], "{}"),
            Stop(Definite),
        ),
        (problem(400, "bad-path", false), Stop(NotExecuted)),
        (problem(400, "bad-length", false), Stop(NotExecuted)),
        (problem(431, "too-many-headers", false), Stop(NotExecuted)),
        (problem(400, "not-unary", false), Stop(NotExecuted)),
        (problem(413, "body-too-large", false), Stop(NotExecuted)),
        (problem(400, "missing-key", false), Stop(NotExecuted)),
        (problem(400, "malformed-key", false), Stop(NotExecuted)),
        (problem(400, "key-too-long", false), Stop(NotExecuted)),
        (
            problem(400, "principal-ambiguous", false),
            Stop(NotExecuted),
        ),
        (problem(500, "principal-missing", false), Stop(NotExecuted)),
        (problem(500, "unfinished-transaction", false), Stop(Unknown)),
        // Codes of a later version.
        (problem(409, "later", true), Retry("transient", Unknown)),
        (problem(503, "later", false), Stop(Unknown)),
        // The server has recorded the response of another one.
        (
            replayed(problem(409, "outcome-unknown", false)),
            Stop(Unknown),
        ),
        (
            replayed(problem(409, "outcome-unknown", true)),
            Stop(Unknown),
        ),
        (replayed(problem(409, "in-progress", true)), Stop(Definite)),
        (replayed(problem(422, "key-reused", false)), Stop(Definite)),
        // Conflicts of the application.
        (status(409), Stop(Definite)),
        (json(409, &[], r#"{"code":"in-progress"}"#), Stop(Definite)),
        (json(409, &[], "no JSON"), Stop(Definite)),
    ]);
    // A marker with another value marks no replay.
    let unmarked: Vec<_> = rows
        .iter()
        .filter_map(|(reply, seen)| {
            let Reply::Response(status, headers, body) = reply else {
                return None;
            };
            let mut headers = headers.clone();
            if headers.iter().any(|(name, _)| *name == MARKER) {
                return None;
            }
            headers.push((MARKER, "false".to_owned()));
            Some((Reply::Response(*status, headers, body.clone()), *seen))
        })
        .collect();
    rows.extend(unmarked);
    check(Protocol::TowerIdempotency, rows).await;
}

const MARKER: &str = "idempotent-replayed";

/// Marks a reply as a replay.
fn replayed(reply: Reply) -> Reply {
    let Reply::Response(status, mut headers, body) = reply else {
        panic!("only a response is replayed");
    };
    headers.push((MARKER, "true".to_owned()));
    Reply::Response(status, headers, body)
}

/// Draft draft-ietf-httpapi-idempotency-key-header-07, section 2.7.
#[tokio::test(start_paused = true)]
async fn responses_of_ietf_draft() {
    let mut rows = by_status(Protocol::Ietf);
    rows.extend([
        (status(409), Retry("in_progress", Unknown)),
        (
            reply(409, &[("retry-after", "2")], ""),
            Retry("in_progress", Unknown),
        ),
        (status(400), Stop(Definite)),
        (
            reply(422, &[("content-type", "application/problem+json")], "{}"),
            Stop(NotExecuted),
        ),
        (problem(409, "response-not-retained", false), Stop(Definite)),
    ]);
    check(Protocol::Ietf, rows).await;
}

#[tokio::test(start_paused = true)]
async fn responses_of_stripe() {
    let error = |status, error_type: &str, code: &str, headers: &[(&'static str, &str)]| {
        let body =
            format!(r#"{{"error":{{"type":"{error_type}","code":"{code}","message":"m"}}}}"#);
        json(status, headers, &body)
    };
    let should = [("stripe-should-retry", "true")];
    let mut rows = by_status(Protocol::Stripe);
    rows.extend([
        (
            error(409, "idempotency_error", "idempotency_key_in_use", &[]),
            Retry("in_progress", Unknown),
        ),
        (status(409), Retry("in_progress", Unknown)),
        (error(400, "idempotency_error", "", &[]), Stop(NotExecuted)),
        (
            error(429, "invalid_request_error", "lock_timeout", &[]),
            Retry("throttled", NotExecuted),
        ),
        (
            error(429, "rate_limit_error", "rate_limit", &[]),
            Retry("throttled", NotExecuted),
        ),
        (
            error(402, "card_error", "card_declined", &[]),
            Stop(Definite),
        ),
        (
            error(500, "api_error", "", &[]),
            Retry("transient", Unknown),
        ),
        (
            error(500, "api_error", "", &[("stripe-should-retry", "false")]),
            Stop(Unknown),
        ),
        (
            error(400, "api_error", "", &should),
            Retry("transient", Unknown),
        ),
        // The preset `Stripe` of tower-idempotency.
        (
            error(
                409,
                "idempotency_error",
                "in-progress",
                &[("retry-after", "1")],
            ),
            Retry("in_progress", Unknown),
        ),
        (
            error(409, "idempotency_error", "outcome-unknown", &[]),
            Stop(Unknown),
        ),
        (
            replayed(error(409, "idempotency_error", "outcome-unknown", &[])),
            Stop(Unknown),
        ),
        (
            error(400, "idempotency_error", "key-reused", &[]),
            Stop(NotExecuted),
        ),
    ]);
    check(Protocol::Stripe, rows).await;
}

/// Agentic Commerce Protocol, section 6 of its RFC on the agentic checkout.
#[tokio::test(start_paused = true)]
async fn responses_of_acp() {
    let error = |status, code: &str, headers: &[(&'static str, &str)]| {
        let body = format!(r#"{{"type":"invalid_request","code":"{code}","message":"m"}}"#);
        json(status, headers, &body)
    };
    let mut rows = by_status(Protocol::Acp);
    rows.extend([
        (
            error(409, "idempotency_in_flight", &[("retry-after", "1")]),
            Retry("in_progress", Unknown),
        ),
        (error(422, "idempotency_conflict", &[]), Stop(NotExecuted)),
        (
            error(400, "idempotency_key_required", &[]),
            Stop(NotExecuted),
        ),
        (error(409, "out_of_stock", &[]), Stop(Definite)),
        (error(409, "outcome_unknown", &[]), Stop(Unknown)),
        (
            error(409, "outcome_unknown", &[("retry-after", "1")]),
            Retry("transient", Unknown),
        ),
        (error(400, "malformed_key", &[]), Stop(NotExecuted)),
        (
            error(503, "store_unavailable", &[("retry-after", "1")]),
            Retry("throttled", NotExecuted),
        ),
        (status(409), Stop(Definite)),
        (
            json(503, &[], r#"{"type":"service_unavailable","code":"x"}"#),
            Retry("transient", Unknown),
        ),
    ]);
    check(Protocol::Acp, rows).await;
}

/// The Ruby gem idempo, and the preset `Idempo` of tower-idempotency. The errors have no code.
#[tokio::test(start_paused = true)]
async fn responses_of_idempo() {
    let error = |status, headers: &[(&'static str, &str)]| {
        let body = r#"{"ok":false,"error":{"message":"m"}}"#;
        json(status, headers, body)
    };
    let mut rows = by_status(Protocol::Idempo);
    rows.extend([
        (problem(431, "too-many-headers", false), Stop(NotExecuted)),
        // An execution without an outcome, which may be that of an earlier attempt.
        (error(409, &[]), Stop(Unknown)),
        (
            error(409, &[("retry-after", "1")]),
            Retry("transient", Unknown),
        ),
        (status(409), Stop(Unknown)),
        // A duplicate during the execution.
        (
            error(429, &[("retry-after", "2")]),
            Retry("throttled", Unknown),
        ),
        (error(400, &[]), Stop(Definite)),
        (error(413, &[]), Stop(Unknown)),
        (error(503, &[]), Retry("transient", Unknown)),
        // The layer knows the codes of other presets.
        (problem(409, "response-not-retained", false), Stop(Definite)),
    ]);
    check(Protocol::Idempo, rows).await;
}

/// A 401 does not show the outcome of the first attempt, which may have been executed under the old token.
#[tokio::test(start_paused = true)]
async fn rejection_after_open_attempt_is_unknown() {
    for rejection in [
        status(401),
        status(403),
        status(307),
        problem(400, "missing-key", false),
        // The request that has used the key may be the first attempt.
        problem(422, "key-reused", false),
        json(400, &[], r#"{"error":{"type":"idempotency_error"}}"#),
        json(422, &[], r#"{"code":"idempotency_conflict"}"#),
        problem(404, "no-route", false),
        problem(405, "connect-not-supported", false),
    ] {
        let server = Server::new([Reply::Broken, rejection.clone()]);
        let call = send(&RetryLayer::new(), &server).await;
        assert_eq!(server.take_log().len(), 2, "{rejection:?}");
        assert_eq!(call.outcome(), Unknown, "{rejection:?}");
        let res = call.result.unwrap();
        assert!(
            res.extensions()
                .get::<tower_idempotency_client::Operation>()
                .is_some()
        );
    }
    let server = Server::new([Reply::Broken, status(404)]);
    assert_eq!(send(&RetryLayer::new(), &server).await.outcome(), Definite);
}

#[tokio::test(start_paused = true)]
async fn attempts_in_progress_do_not_count() {
    let in_progress = problem(409, "in-progress", true);
    let mut script = vec![status(500)];
    script.extend(vec![in_progress.clone(); 10]);
    script.extend([status(500), status(200)]);
    let server = Server::new(script);
    let layer = RetryLayer::new()
        .with_budget(Budget::new(28))
        .with_backoff(Duration::ZERO, Duration::ZERO);
    assert_eq!(send(&layer, &server).await.status(), Some(200));
    assert_eq!(server.take_log().len(), 13);
    // They end with the deadline of 30 s, after a delay of a second each.
    let server = Server::new([in_progress]);
    let call = send(&layer, &server).await;
    assert_eq!((call.status(), call.outcome()), (Some(409), Unknown));
    assert_eq!(server.take_log().len(), 30);
}

/// Neither their number nor the budget limits these attempts.
#[tokio::test(start_paused = true)]
async fn attempts_in_progress_have_shortest_delay() {
    let mut script = vec![status(409); 1000];
    script.push(status(201));
    let server = Server::new(script);
    let layer = layer(Protocol::Ietf)
        .with_backoff(Duration::ZERO, Duration::ZERO)
        .with_deadline(Duration::from_secs(1));
    let call = send(&layer, &server).await;
    assert_eq!((call.status(), call.outcome()), (Some(409), Unknown));
    assert_eq!(server.take_log().len(), 100);
}

/// A retry while the first request is executed takes no tokens, and leaves those of the failure to be returned.
#[tokio::test(start_paused = true)]
async fn retry_in_progress_keeps_refund() {
    let layer = RetryLayer::new();
    for _ in 0..100 {
        let server = Server::new([
            Reply::Broken,
            problem(409, "in-progress", true),
            reply(201, &[(MARKER, "true")], ""),
        ]);
        assert_eq!(send(&layer, &server).await.status(), Some(201));
        assert_eq!(server.take_log().len(), 3);
    }
}
