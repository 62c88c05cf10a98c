//! Servers of other projects: stand-ins that speak the dialects of Stripe's API and of the IETF draft, over sockets.
//!
//! They follow the published documents: "Idempotent requests", "Error codes" and "Error handling" of Stripe's API reference,
//! and sections 2.1 to 2.7 of draft-ietf-httpapi-idempotency-key-header-07.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use axum::{
    Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, header::CONTENT_TYPE};
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::sync::{Notify, Semaphore};
use tower::{Layer, ServiceExt};
use tower_idempotency_client::{IdempotencyKeyLayer, Operation, Outcome, Protocol, RetryLayer};

use crate::sockets::{CutPoint, relay, serve};

/// Server with the dialect of one protocol.
struct StandIn {
    protocol: Protocol,
    /// Requests by key: the body, and the saved response once the execution has ended.
    saved: Mutex<HashMap<String, (Bytes, Option<(StatusCode, String)>)>>,
    effects: AtomicU32,
    /// Executions that fail with 500.
    failures: AtomicU32,
    begun: Arc<Notify>,
    /// A permit lets an execution end. A 409 adds one.
    barrier: Semaphore,
    statuses: Mutex<Vec<u16>>,
}

impl StandIn {
    fn new(protocol: Protocol, permits: usize, failures: u32) -> Arc<Self> {
        Arc::new(Self {
            protocol,
            saved: Mutex::default(),
            effects: AtomicU32::new(0),
            failures: AtomicU32::new(failures),
            begun: Arc::default(),
            barrier: Semaphore::new(permits),
            statuses: Mutex::default(),
        })
    }

    async fn serve(self: &Arc<Self>) -> SocketAddr {
        let router = Router::new().route("/v1/charges", post(charge));
        serve(router.with_state(self.clone())).await
    }

    fn effects(&self) -> u32 {
        self.effects.load(Ordering::Relaxed)
    }

    fn statuses(&self) -> Vec<u16> {
        self.statuses.lock().unwrap().clone()
    }

    /// Returns the key of a request. The draft has an RFC 9651 String (section 2.1), Stripe any text of up to 255
    /// characters.
    fn key(&self, headers: &HeaderMap) -> Option<String> {
        let value = headers.get("idempotency-key")?.to_str().unwrap();
        let key = match self.protocol {
            Protocol::Ietf => value.strip_prefix('"')?.strip_suffix('"')?,
            _ => value,
        };
        assert!(!key.is_empty() && key.len() <= 255);
        Some(key.to_owned())
    }

    fn error(&self, status: u16, code: &str, text: &str) -> Response {
        let (media_type, body) = match self.protocol {
            Protocol::Ietf => {
                let kind = "https://developer.example.com/idempotency";
                let body = format!(r#"{{"type":"{kind}","title":"{text}","detail":"{text}"}}"#);
                ("application/problem+json", body)
            }
            _ => {
                let kind = match code {
                    "" => "idempotency_error",
                    _ => "invalid_request_error",
                };
                let code = match code {
                    "" => String::new(),
                    code => format!(r#","code":"{code}""#),
                };
                let body = format!(r#"{{"error":{{"type":"{kind}"{code},"message":"{text}"}}}}"#);
                ("application/json", body)
            }
        };
        let status = StatusCode::from_u16(status).unwrap();
        (status, [(CONTENT_TYPE, media_type)], body).into_response()
    }

    async fn respond(&self, headers: &HeaderMap, body: Bytes) -> Response {
        let is_stripe = self.protocol == Protocol::Stripe;
        let Some(key) = self.key(headers) else {
            return self.error(400, "parameter_missing", "Idempotency-Key is missing");
        };
        // The guard ends before the execution.
        {
            let mut saved = self.saved.lock().unwrap();
            match saved.get(&key) {
                Some((first, _)) if *first != body => {
                    let status = if is_stripe { 400 } else { 422 };
                    return self.error(status, "", "Idempotency-Key is already used");
                }
                Some((_, Some((status, body)))) => {
                    let mut res = (*status, body.clone()).into_response();
                    if is_stripe {
                        let replayed = "true".parse().unwrap();
                        res.headers_mut().insert("idempotent-replayed", replayed);
                    }
                    return res;
                }
                Some((_, None)) => {
                    self.barrier.add_permits(1);
                    let text = "A request is outstanding for this Idempotency-Key";
                    return self.error(409, "idempotency_key_in_use", text);
                }
                None => drop(saved.insert(key.clone(), (body, None))),
            }
        }
        let fails = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_ok();
        if fails && !is_stripe {
            // Section 2.6 leaves it to the server. This one executes again.
            self.saved.lock().unwrap().remove(&key);
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
        let effect = self.effects.fetch_add(1, Ordering::Relaxed) + 1;
        self.begun.notify_one();
        self.barrier.acquire().await.unwrap().forget();
        // Stripe saves the first status and body, "regardless of whether it succeeds or fails", 500 included.
        let response = match fails {
            true => (StatusCode::INTERNAL_SERVER_ERROR, "failed".to_owned()),
            false => (StatusCode::OK, format!("charge {effect}")),
        };
        self.saved.lock().unwrap().get_mut(&key).unwrap().1 = Some(response.clone());
        response.into_response()
    }
}

async fn charge(State(server): State<Arc<StandIn>>, headers: HeaderMap, body: Bytes) -> Response {
    // The execution goes on when its client leaves.
    let task = tokio::spawn(async move {
        let res = server.respond(&headers, body).await;
        server.statuses.lock().unwrap().push(res.status().as_u16());
        res
    });
    task.await.unwrap()
}

/// Sends a charge by the client of this crate. Returns the status and the body.
async fn send(
    to: SocketAddr,
    protocol: Protocol,
    operation: &Operation,
    body: &str,
) -> (u16, String) {
    let keys = IdempotencyKeyLayer::new().with_protocol(protocol);
    let layer = RetryLayer::new().with_keys(keys);
    let client = layer.layer(Client::builder(TokioExecutor::new()).build_http());
    let req = Request::post(format!("http://{to}/v1/charges"))
        .extension(operation.clone())
        .body(Full::new(Bytes::copy_from_slice(body.as_bytes())))
        .unwrap();
    let res = client.oneshot(req).await.unwrap();
    let status = res.status().as_u16();
    let body = res.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

const DIALECTS: [Protocol; 2] = [Protocol::Stripe, Protocol::Ietf];

#[tokio::test]
async fn lost_response_is_replayed_by_each_dialect() {
    for protocol in DIALECTS {
        let server = StandIn::new(protocol, 10, 0);
        let cut = relay(server.serve().await, CutPoint::Response(0)).await;
        let operation = Operation::new();
        let res = send(cut, protocol, &operation, "amount=7").await;
        assert_eq!(res, (200, "charge 1".to_owned()), "{protocol:?}");
        assert_eq!(operation.outcome(), Outcome::Definite);
        assert_eq!((server.effects(), server.statuses()), (1, vec![200, 200]));
    }
}

#[tokio::test]
async fn outstanding_request_is_awaited_in_each_dialect() {
    for protocol in DIALECTS {
        let server = StandIn::new(protocol, 0, 0);
        let cut = CutPoint::Executing(server.begun.clone());
        let cut = relay(server.serve().await, cut).await;
        let operation = Operation::new();
        let res = send(cut, protocol, &operation, "amount=7").await;
        assert_eq!(res, (200, "charge 1".to_owned()), "{protocol:?}");
        assert_eq!(operation.outcome(), Outcome::Definite);
        assert_eq!(server.effects(), 1);
        assert!(server.statuses().contains(&409), "{:?}", server.statuses());
    }
}

#[tokio::test]
async fn reused_key_is_rejected_in_each_dialect() {
    for (protocol, status) in [(Protocol::Stripe, 400), (Protocol::Ietf, 422)] {
        let server = StandIn::new(protocol, 10, 0);
        let addr = server.serve().await;
        let key = Operation::with_key("order 7").unwrap();
        assert_eq!(send(addr, protocol, &key, "amount=7").await.0, 200);
        let again = Operation::with_key("order 7").unwrap();
        assert_eq!(send(addr, protocol, &again, "amount=8").await.0, status);
        assert_eq!(
            (again.attempts(), again.outcome()),
            (1, Outcome::NotExecuted)
        );
        // A process that restarted has another body. The server has executed the first one.
        let restored = Operation::with_key("order 7").unwrap();
        let restored = restored.with_first_sent(std::time::SystemTime::now());
        assert_eq!(send(addr, protocol, &restored, "amount=8").await.0, status);
        assert_eq!(restored.outcome(), Outcome::Unknown);
        assert_eq!(server.effects(), 1);
    }
}

/// Stripe replays its 500, so that a retry changes nothing. A server of the draft may execute again after a failure.
#[tokio::test]
async fn failure_is_retried_under_same_key_in_each_dialect() {
    for (protocol, res, outcome) in [
        (Protocol::Stripe, (500, "failed"), Outcome::Unknown),
        (Protocol::Ietf, (200, "charge 1"), Outcome::Definite),
    ] {
        let server = StandIn::new(protocol, 10, 1);
        let operation = Operation::new();
        let addr = server.serve().await;
        let (status, body) = send(addr, protocol, &operation, "amount=7").await;
        assert_eq!((status, body.as_str()), res, "{protocol:?}");
        assert_eq!((operation.attempts(), operation.outcome()), (2, outcome));
        assert_eq!(server.effects(), 1);
    }
}

/// The wrong protocol is noticed: the draft's server finds no String.
#[tokio::test]
async fn key_of_other_dialect_is_rejected() {
    let server = StandIn::new(Protocol::Ietf, 10, 0);
    let addr = server.serve().await;
    let operation = Operation::new();
    assert_eq!(
        send(addr, Protocol::Stripe, &operation, "amount=7").await.0,
        400
    );
    assert_eq!(server.effects(), 0);
}
