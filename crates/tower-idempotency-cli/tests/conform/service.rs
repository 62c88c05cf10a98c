//! A small server with `Idempotency-Key` that has one fault.

use std::{
    collections::HashMap,
    future::pending,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::Request,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures_util::stream::once;
use tests::{Effects, wire::Server};
use tokio::sync::{Barrier, Notify};

use crate::row;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    NoIdempotency,
    ReplaysForEveryKey,
    ChangesBodies,
    DropsHeaders,
    IgnoresBody,
    /// Each body has a key of its own.
    SeparatesBodies,
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
    /// No fault: duplicates that wait for an execution get its response without a marker.
    SharesWithoutMarker,
    ForgetsUnreadResponse,
    /// Duplicates wait without end for the request of the client that has disconnected.
    WaitsForLostLock,
    BreaksOffRetries,
}

/// The part of a response that differs from execution to execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Responses {
    /// The body and `Location`. A replay has a marker.
    DifferInBody,
    /// `Location` alone. A replay has no marker.
    DifferInLocation,
    /// No part. A replay has a marker.
    Equal,
}

/// The digest of a request in plain text, and the number of its execution.
#[derive(Clone)]
struct Entry {
    request: String,
    number: u64,
    is_running: bool,
}

pub(crate) struct Service {
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
    pub(crate) fn has_executed_abandoned(&self) -> bool {
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
        let body = std::str::from_utf8(&body).unwrap();
        let id = match self.fault {
            Fault::ReplaysForEveryKey => String::new(),
            Fault::SeparatesBodies => format!("{caller} {key} {body}"),
            _ => unless(Fault::IgnoresCaller, caller) + " " + &key,
        };
        let request = [
            unless(Fault::IgnoresMethod, head.method.as_str()),
            unless(Fault::IgnoresPath, head.uri.path()),
            unless(Fault::IgnoresBody, body),
        ]
        .join(" ");
        let is_shared = self.fault == Fault::SharesWithoutMarker;
        if (self.fault == Fault::ExecutesDuplicates || is_shared) && self.is_among_first(&row, &id)
        {
            self.barriers[row.as_str()].wait().await;
            let mut entries = self.entries.lock().unwrap();
            let shared = entries.get(&id).filter(|_| is_shared);
            let number = match shared.map(|entry| entry.number) {
                Some(number) => number,
                None => self.execute(&mut entries, &id, request, false),
            };
            return self.created(number, false);
        }
        if self.fault == Fault::ForgetsUnreadResponse
            && row == "disconnect"
            && self.is_among_first(&row, &id)
        {
            return self.created(self.effects.happen(), false);
        }
        let entry = match self.find_or_execute(&row, &id, &request) {
            Ok(number) => return self.first(&row, &id, number).await,
            Err(entry) => entry,
        };
        if self.fault == Fault::ReplaysForEveryKey {
            return self.created(entry.number, true);
        }
        if self.fault == Fault::BreaksOffRetries {
            let broken = once(async { Err::<Bytes, _>(io::Error::other("the handler failed")) });
            return (StatusCode::CREATED, Body::from_stream(broken)).into_response();
        }
        if entry.request != request {
            let status = match self.fault {
                Fault::ReportsConflict => StatusCode::CONFLICT,
                _ => StatusCode::UNPROCESSABLE_ENTITY,
            };
            return self.problem(status, "the key has another request");
        }
        if entry.is_running {
            if self.fault == Fault::WaitsForLostLock {
                pending::<()>().await;
            }
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
            Fault::KeepsLockAfterDisconnect
            | Fault::KeepsLockOfDroppedRequest
            | Fault::WaitsForLostLock => row == "disconnect",
            _ => false,
        };
        Ok(self.execute(&mut entries, id, request.to_owned(), is_running))
    }

    async fn first(&self, row: &str, id: &str, number: u64) -> Response {
        let never_responds = [Fault::KeepsLockOfDroppedRequest, Fault::WaitsForLostLock];
        // The first request of the row. Another key gets a response.
        if never_responds.contains(&self.fault)
            && row == "disconnect"
            && self.is_among_first(row, row)
        {
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
            "disconnect" => 1,
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
        let mut body = match self.responses {
            Responses::DifferInBody => format!("{{\"id\":{number}}}"),
            Responses::DifferInLocation | Responses::Equal => "{}".to_owned(),
        };
        if is_replay && self.fault == Fault::ChangesBodies {
            body.push(' ');
        }
        let mut response = (StatusCode::CREATED, body).into_response();
        let headers = response.headers_mut();
        headers.insert("content-type", "application/json".parse().unwrap());
        if !(is_replay && self.fault == Fault::DropsHeaders) {
            let location = match self.responses {
                Responses::Equal => "/orders".to_owned(),
                _ => format!("/orders/{number}"),
            };
            headers.insert("location", location.parse().unwrap());
        }
        if is_replay && self.responses != Responses::DifferInLocation {
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

pub(crate) async fn start(fault: Fault, responses: Responses) -> (Server, Arc<Service>) {
    let service = Arc::new(Service {
        fault,
        responses,
        effects: Effects::default(),
        entries: Mutex::default(),
        barriers: [("concurrent", 2), ("many", 8), ("disconnect", 1)]
            .map(|(row, count)| (row, Barrier::new(count)))
            .into(),
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
