//! A small server with `Idempotency-Key` that has one fault, and the rows that do not hold because of it.

use std::{
    collections::HashMap,
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use tests::{Effects, HANG_GUARD, wire::Server};
use tokio::sync::{Barrier, Notify};

use crate::{CommandOutput, every_row, row, run, run_unread};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    NoIdempotency,
    ReplaysForEveryKey,
    ChangesBodies,
    DropsHeaders,
    IgnoresBody,
    IgnoresPath,
    IgnoresMethod,
    IgnoresCaller,
    IgnoresCase,
    ReportsConflict,
    AcceptsMissingKeys,
    AcceptsEmptyKeys,
    AcceptsLongKeys,
    AcceptsLists,
    ExecutesDuplicates,
    RefusesWith429,
    KeepsLockAfterDisconnect,
    KeepsLockOfDroppedRequest,
    RespondsWithText,
}

/// The part of a response that differs from execution to execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Responses {
    /// The body and `Location`. A replay has a marker.
    DifferInBody,
    /// `Location` alone. A replay has no marker.
    DifferInLocation,
}

/// The digest of a request in plain text, and the number of its execution.
#[derive(Clone)]
struct Entry {
    request: String,
    number: u64,
    is_running: bool,
}

struct Service {
    fault: Fault,
    responses: Responses,
    effects: Effects,
    entries: Mutex<HashMap<String, Entry>>,
    barriers: HashMap<&'static str, Barrier>,
    arrivals: Mutex<HashMap<String, usize>>,
    refused: Notify,
    /// The number of refused requests of the row `disconnect`.
    refusals: AtomicUsize,
}

impl Service {
    /// Returns `true` if the abandoned request reached its handler. Then each retry is refused, and the tool repeats it. If
    /// the first retry executes, at most two requests are refused: the second retry, and the abandoned request.
    fn has_executed_abandoned(&self) -> bool {
        self.refusals.load(Ordering::SeqCst) > 2
    }

    async fn respond(&self, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let body = to_bytes(Body::new(body), 1 << 20).await;
        let Ok(body) = body else {
            return StatusCode::BAD_REQUEST.into_response();
        };
        let row = row(&head.headers);
        let key = match self.key(&head.headers) {
            Ok(key) => key,
            Err(reason) => return self.problem(StatusCode::BAD_REQUEST, reason),
        };
        let Some(key) = key else {
            return self.created(self.effects.happen(), false);
        };
        if self.fault == Fault::NoIdempotency {
            return self.created(self.effects.happen(), false);
        }
        let unless = |fault, part: &str| {
            if self.fault == fault {
                String::new()
            } else {
                part.to_owned()
            }
        };
        let caller = head.headers["authorization"].to_str().unwrap();
        let id = match self.fault {
            Fault::ReplaysForEveryKey => String::new(),
            _ => unless(Fault::IgnoresCaller, caller) + " " + &key,
        };
        let request = [
            unless(Fault::IgnoresMethod, head.method.as_str()),
            unless(Fault::IgnoresPath, head.uri.path()),
            unless(Fault::IgnoresBody, std::str::from_utf8(&body).unwrap()),
        ]
        .join(" ");
        if self.fault == Fault::ExecutesDuplicates && self.is_among_first(&row, &id) {
            self.barriers[row.as_str()].wait().await;
            let number = self.execute(&mut self.entries.lock().unwrap(), &id, request, false);
            return self.created(number, false);
        }
        let entry = match self.find_or_execute(&row, &id, &request) {
            Ok(number) => return self.first(&row, &id, number).await,
            Err(entry) => entry,
        };
        if self.fault == Fault::ReplaysForEveryKey {
            return self.created(entry.number, true);
        }
        if entry.request != request {
            let status = match self.fault {
                Fault::ReportsConflict => StatusCode::CONFLICT,
                _ => StatusCode::UNPROCESSABLE_ENTITY,
            };
            return self.problem(status, "the key has another request");
        }
        if entry.is_running {
            self.refused.notify_one();
            if row == "disconnect" {
                self.refusals.fetch_add(1, Ordering::SeqCst);
            }
            let status = match self.fault {
                Fault::RefusesWith429 => StatusCode::TOO_MANY_REQUESTS,
                _ => StatusCode::CONFLICT,
            };
            return self.problem(status, "the first request runs");
        }
        self.created(entry.number, true)
    }

    /// Returns the entry of the request, or executes the request. Both happen under one lock, so only the fault executes
    /// twice.
    fn find_or_execute(&self, row: &str, id: &str, request: &str) -> Result<u64, Entry> {
        let mut entries = self.entries.lock().unwrap();
        if let Some(entry) = entries.get(id) {
            return Err(entry.clone());
        }
        let is_running = match self.fault {
            Fault::RefusesWith429 => row == "concurrent",
            Fault::KeepsLockAfterDisconnect | Fault::KeepsLockOfDroppedRequest => {
                row == "disconnect"
            }
            _ => false,
        };
        Ok(self.execute(&mut entries, id, request.to_owned(), is_running))
    }

    async fn first(&self, row: &str, id: &str, number: u64) -> Response {
        if self.fault == Fault::KeepsLockOfDroppedRequest && row == "disconnect" {
            // The connection ends first.
            pending::<()>().await;
        }
        // The first of two duplicates runs until the other one is refused.
        if self.fault == Fault::RefusesWith429 && row == "concurrent" {
            self.refused.notified().await;
            let mut entries = self.entries.lock().unwrap();
            entries.get_mut(id).unwrap().is_running = false;
        }
        self.created(number, false)
    }

    fn execute(
        &self,
        entries: &mut HashMap<String, Entry>,
        id: &str,
        request: String,
        is_running: bool,
    ) -> u64 {
        let number = self.effects.happen();
        let entry = Entry {
            request,
            number,
            is_running,
        };
        entries.insert(id.to_owned(), entry);
        number
    }

    /// Returns `true` for as many requests of a key as the row sends at once.
    fn is_among_first(&self, row: &str, id: &str) -> bool {
        let count = match row {
            "concurrent" => 2,
            "many" => 8,
            _ => return false,
        };
        let mut arrivals = self.arrivals.lock().unwrap();
        let arrived = arrivals.entry(id.to_owned()).or_default();
        *arrived += 1;
        *arrived <= count
    }

    fn key(&self, headers: &HeaderMap) -> Result<Option<String>, &'static str> {
        if self.fault == Fault::NoIdempotency {
            return Ok(None);
        }
        let Some(key) = headers.get("idempotency-key") else {
            return match self.fault {
                Fault::AcceptsMissingKeys => Ok(None),
                _ => Err("the key is missing"),
            };
        };
        let key = key.to_str().map_err(|_| "the key is no text")?;
        if key.is_empty() && self.fault != Fault::AcceptsEmptyKeys {
            return Err("the key is empty");
        }
        if key.contains(',') && self.fault != Fault::AcceptsLists {
            return Err("several keys");
        }
        if key.len() > 257 && self.fault != Fault::AcceptsLongKeys {
            return Err("the key is too long");
        }
        let key = key.trim_matches('"');
        Ok(Some(match self.fault {
            Fault::IgnoresCase => key.to_ascii_lowercase(),
            _ => key.to_owned(),
        }))
    }

    fn created(&self, number: u64, is_replay: bool) -> Response {
        let is_constant = self.responses == Responses::DifferInLocation;
        let mut body = if is_constant {
            "{}".to_owned()
        } else {
            format!("{{\"id\":{number}}}")
        };
        if is_replay && self.fault == Fault::ChangesBodies {
            body.push(' ');
        }
        let mut response = (StatusCode::CREATED, body).into_response();
        let headers = response.headers_mut();
        headers.insert("content-type", "application/json".parse().unwrap());
        if !(is_replay && self.fault == Fault::DropsHeaders) {
            let location = format!("/orders/{number}");
            headers.insert("location", location.parse().unwrap());
        }
        if is_replay && !is_constant {
            headers.insert("idempotent-replayed", "true".parse().unwrap());
        }
        response
    }

    fn problem(&self, status: StatusCode, title: &str) -> Response {
        let body = format!("{{\"title\":\"{title}\"}}");
        let media_type = match self.fault {
            Fault::RespondsWithText => "text/plain",
            _ => "application/problem+json",
        };
        (status, [("content-type", media_type)], body).into_response()
    }
}

async fn start(fault: Fault, responses: Responses) -> (Server, Arc<Service>) {
    let service = Arc::new(Service {
        fault,
        responses,
        effects: Effects::default(),
        entries: Mutex::default(),
        barriers: [("concurrent", Barrier::new(2)), ("many", Barrier::new(8))].into(),
        arrivals: Mutex::default(),
        refused: Notify::new(),
        refusals: AtomicUsize::new(0),
    });
    let served = service.clone();
    let app = Router::new().fallback(move |request: Request| {
        let service = served.clone();
        async move { service.respond(request).await }
    });
    (Server::start(app).await, service)
}

/// Judges a server with the fault.
async fn judge(fault: Fault, responses: Responses) -> CommandOutput {
    judge_service(fault, responses).await.0
}

/// Judges a server with the fault. Returns the service too.
async fn judge_service(fault: Fault, responses: Responses) -> (CommandOutput, Arc<Service>) {
    let (server, service) = start(fault, responses).await;
    let mut args = every_row(server.addr());
    args.push("--json".to_owned());
    if matches!(
        fault,
        Fault::KeepsLockAfterDisconnect | Fault::KeepsLockOfDroppedRequest
    ) {
        args.retain(|arg| !arg.starts_with("--timeout"));
        args.push("--timeout=10s".to_owned());
    }
    let ran = run(args).await;
    assert_eq!(ran.out.lines().count(), 21, "{}{}", ran.out, ran.err);
    (ran, service)
}

/// Asserts that exactly these rows do not hold, and that the exit code is 1 if one of them is mandatory.
async fn assert_fails(fault: Fault, rows: &[&str], code: i32) {
    let ran = judge(fault, Responses::DifferInBody).await;
    assert_rows(&ran, fault, rows, code);
}

fn assert_rows(ran: &CommandOutput, fault: Fault, rows: &[&str], code: i32) {
    assert_eq!(
        (ran.rows("does not hold"), ran.code),
        (rows.iter().map(|row| (*row).to_owned()).collect(), code),
        "{fault:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn server_without_fault_conforms() {
    assert_fails(Fault::None, &[], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_idempotency() {
    let rows = [
        "retry",
        "retry-headers",
        "marked",
        "other-body",
        "other-path",
        "other-method",
        "missing-key",
        "key-empty",
        "key-long",
        "key-list",
        "concurrent",
        "many",
        "disconnect",
    ];
    assert_fails(Fault::NoIdempotency, &rows, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_replays() {
    assert_fails(
        Fault::ReplaysForEveryKey,
        &[
            "fresh",
            "other-body",
            "other-path",
            "other-method",
            "other-caller",
            "case",
        ],
        1,
    )
    .await;
    // Whether `disconnect` compares the execution with a replay depends on the request that was abandoned.
    let rows = ["retry", "concurrent", "many", "disconnect"];
    let ran = judge(Fault::ChangesBodies, Responses::DifferInBody).await;
    assert_eq!(ran.code, 1);
    let failed = ran.rows("does not hold");
    assert!(
        failed.iter().all(|row| rows.contains(&row.as_str())),
        "{failed:?}"
    );
    assert!(
        ["retry", "concurrent", "many"]
            .iter()
            .all(|row| failed.iter().any(|it| it == row)),
        "{failed:?}"
    );
    assert_fails(Fault::DropsHeaders, &["retry-headers"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ignored_parts_of_requests() {
    assert_fails(Fault::IgnoresBody, &["other-body"], 1).await;
    assert_fails(Fault::IgnoresPath, &["other-path"], 1).await;
    assert_fails(Fault::IgnoresMethod, &["other-method"], 1).await;
    assert_fails(Fault::IgnoresCaller, &["other-caller"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_refusals() {
    assert_fails(Fault::ReportsConflict, &["other-body-422"], 0).await;
    assert_fails(Fault::RespondsWithText, &["problem"], 0).await;
    assert_fails(Fault::RefusesWith429, &["concurrent-409"], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accepted_malformed_keys() {
    assert_fails(Fault::AcceptsMissingKeys, &["missing-key"], 1).await;
    assert_fails(Fault::AcceptsEmptyKeys, &["key-empty"], 0).await;
    assert_fails(Fault::AcceptsLongKeys, &["key-long"], 0).await;
    assert_fails(Fault::AcceptsLists, &["key-list"], 0).await;
    assert_fails(Fault::IgnoresCase, &["case"], 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_that_execute() {
    assert_fails(Fault::ExecutesDuplicates, &["concurrent", "many"], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lock_that_outlives_its_client() {
    for fault in [
        Fault::KeepsLockAfterDisconnect,
        Fault::KeepsLockOfDroppedRequest,
    ] {
        let began = Instant::now();
        // If this process stalls, the tool disconnects before the handler runs. Then there is no lock to keep.
        loop {
            let (ran, service) = judge_service(fault, Responses::DifferInBody).await;
            if service.has_executed_abandoned() {
                assert_rows(&ran, fault, &["disconnect"], 1);
                break;
            }
            assert!(began.elapsed() < HANG_GUARD, "{fault:?}: {}", ran.out);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_bodies_are_judged_by_location() {
    for (fault, failed, unjudged) in [
        (Fault::None, &["marked"][..], &["concurrent-409"][..]),
        (
            Fault::ExecutesDuplicates,
            &["marked", "concurrent", "many"],
            &["concurrent-409"],
        ),
        (
            Fault::IgnoresBody,
            &["marked", "other-body"],
            &["other-body-422", "quoting", "concurrent-409"],
        ),
        (
            Fault::IgnoresCaller,
            &["marked", "other-caller"],
            &["concurrent-409"],
        ),
    ] {
        let ran = judge(fault, Responses::DifferInLocation).await;
        assert_eq!(ran.rows("does not hold"), failed, "{fault:?} {}", ran.out);
        assert_eq!(ran.rows("not judged"), unjudged, "{fault:?} {}", ran.out);
    }
}

/// No row claims that a replay was seen.
#[tokio::test(flavor = "multi_thread")]
async fn executions_with_equal_bodies_do_not_hold() {
    let ran = judge(Fault::NoIdempotency, Responses::DifferInLocation).await;
    assert_eq!(ran.code, 1);
    let held = ran.rows("holds");
    for row in ["retry", "retry-headers", "concurrent", "many", "disconnect"] {
        assert!(!held.iter().any(|it| it == row), "{row}: {}", ran.out);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_output_keeps_verdict() {
    for (fault, code) in [(Fault::None, 0), (Fault::IgnoresBody, 1)] {
        for form in [None, Some("--json".to_owned())] {
            let (server, _) = start(fault, Responses::DifferInBody).await;
            let mut args = every_row(server.addr());
            args.extend(form);
            assert_eq!(run_unread(args).await, code, "{fault:?}");
        }
    }
}
