//! Decisions: conditional, audited, once.

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    middleware::{self, Next},
};
use http::{Method, Request};
use tests::{
    HANG_GUARD,
    barrier::{Barrier, bounded, eventually},
    observed::{observed, paused, with_panicking_reports},
    scratch::Scratch,
};
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, JoinSet},
    time::Instant,
};
use tower::ServiceExt as _;
use tower_idempotency::{
    NeedsAttention,
    inspect::{Inspect as _, InspectErrorKind, Inspector, State},
    store::{Acquired, Claim, KeyId, Store as _, Ttl},
};
use tower_idempotency_console::{Console, audit::AuditLog};

use crate::harness::{Counted, Fault, Keys, Server, access, form, orphan, send};

fn fields<'a>(seen: &'a str, how: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("seen", seen),
        ("how", how),
        ("reason", "ticket 17"),
        ("confirm", "yes"),
    ]
}

/// Returns a request with a form, for a console without a socket.
fn post_form(path: &str, fields: &[(&str, &str)]) -> Request<Body> {
    let req = Request::post(path)
        .header("content-type", "application/x-www-form-urlencoded")
        .header("host", "console.test")
        .header("sec-fetch-site", "same-origin")
        .body(Body::from(form(fields)));
    req.expect("a request")
}

/// Resolves an entry on a console without a socket. Returns the status of the response.
async fn resolve(app: &Router, store: &Counted, id: &KeyId, how: &str) -> u16 {
    let details = store.get(id).await.expect("memory").expect("an entry");
    let seen = details.entry.seen().to_string();
    let path = format!("/entries/{}/resolve", id.to_hex());
    let req = post_form(&path, &fields(&seen, how));
    let Ok(res) = app.clone().oneshot(req).await;
    res.status().as_u16()
}

/// A console whose store holds each resolution, until the test opens the barrier.
struct HeldConsole {
    server: Server,
    resolutions: Barrier,
    /// A permit for each request that the console has dropped, with or without a response.
    dropped_requests: Arc<Semaphore>,
}

impl HeldConsole {
    async fn start() -> Self {
        let (resolutions, dropped_requests) = (Barrier::closed(), Arc::new(Semaphore::new(0)));
        let store = Counted::held_at(resolutions.clone());
        let dropped = Arc::clone(&dropped_requests);
        let count = move |req: Request<Body>, next: Next| {
            let notice = DropNotice(Arc::clone(&dropped));
            async move {
                let response = next.run(req).await;
                drop(notice);
                response
            }
        };
        let server = Server::start_on(store, |console| {
            let app = console.with_store_timeout(HANG_GUARD).into_router();
            app.layer(middleware::from_fn(count))
        })
        .await;
        Self {
            server,
            resolutions,
            dropped_requests,
        }
    }

    /// Disconnects the client of the only request, and waits until the console has dropped the request.
    async fn disconnect<T>(&self, client: &JoinHandle<T>) {
        client.abort();
        let dropped = bounded(self.dropped_requests.acquire()).await;
        dropped.expect("it stays open").forget();
    }
}

/// Adds a permit when it is dropped.
struct DropNotice(Arc<Semaphore>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

/// Returns a claim of the same request, which takes an orphan over.
fn retry(claim: &Claim) -> Claim {
    let mut retry = tests::sql::duplicate(claim);
    retry.lease = Ttl::from_secs(600);
    retry
}

/// A response would block the key: the next run could not read it as a value.
#[tokio::test]
async fn entry_with_value_gets_no_response() {
    let server = Server::start().await;
    for operation in ["run_once", "item: POST /deposits"] {
        let id = orphan(&server.store.store, operation).await.id;
        let entry = format!("/entries/{}", id.to_hex());
        let page = server.get(&entry).await.text;
        assert!(page.contains("Allow one retry"), "{page}");
        assert!(!page.contains("Record a response"), "{page}");
        let form = server.get(&format!("{entry}/resolve?how=complete")).await;
        assert_eq!(form.status, 400, "{}", form.text);
        let seen = server.seen(&id).await;
        let mut form = fields(&seen, "complete");
        form.push(("status", "201"));
        let done = server.post(&format!("{entry}/resolve"), &form).await;
        assert_eq!(done.status, 400, "{}", done.text);
        assert!(done.text.contains("is a value"), "{}", done.text);
        assert_eq!(server.state(&id).await, Some(State::Orphaned));
    }
    assert!(server.audit().is_empty());
}

#[tokio::test]
async fn each_decision_has_its_effect() {
    for (how, state, expected) in [
        ("retry", State::Orphaned, Some(State::Orphaned)),
        ("free", State::Orphaned, None),
        (
            "needs-attention",
            State::Orphaned,
            Some(State::NeedsAttention),
        ),
        ("complete", State::NeedsAttention, Some(State::Completed)),
        ("free", State::NeedsAttention, None),
        ("break-lease", State::InProgress, Some(State::Orphaned)),
        ("delete-record", State::Completed, None),
    ] {
        let server = Server::start().await;
        let keys = Keys::create(&server.store.store).await;
        let claim = match state {
            State::Orphaned => &keys.orphaned,
            State::NeedsAttention => &keys.attention,
            State::InProgress => &keys.in_progress,
            _ => &keys.completed,
        };
        let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
        let confirm = server
            .get(&format!("/entries/{id}/resolve?how={how}"))
            .await;
        assert!(confirm.text.contains(&seen), "{how}: {}", confirm.text);
        assert!(confirm.text.contains("Afterwards:"), "{how}");
        let mut form = fields(&seen, how);
        form.extend([
            ("status", "201"),
            ("headers", "location: /o/1"),
            ("body", "settled"),
        ]);
        form.push(("back", "state=orphaned&owner=h"));
        let done = server.post(&format!("/entries/{id}/resolve"), &form).await;
        assert_eq!(done.status, 200, "{how}: {}", done.text);
        assert!(
            done.text.contains("entries?state=orphaned&#38;owner=h"),
            "{}",
            done.text
        );
        assert_eq!(server.state(&claim.id).await, expected, "{how}");
        let lines = server.audit();
        assert_eq!(lines.len(), 2, "{lines:?}");
        for (line, kind) in lines.iter().zip(["\"intent\"", "\"outcome\""]) {
            let part = format!("\"line\":{kind}");
            assert!(
                line.contains(&part) && line.contains("\"actor\":\"alice\""),
                "{line}"
            );
            assert!(
                line.contains("\"why\":\"ticket 17\"") && !line.contains("settled"),
                "{line}"
            );
        }
        let audit = server.get("/audit").await.text;
        assert!(audit.contains(&id) && audit.contains("applied"), "{audit}");
        if how == "complete" {
            let page = server.get(&format!("/entries/{id}/body")).await;
            assert_eq!(page.text, "settled");
        }
        if how == "retry" {
            let mut retry = tests::sql::duplicate(claim);
            retry.orphans = tower_idempotency::OrphanPolicy::Refuse;
            let acquired = server.store.store.acquire(&retry).await.expect("memory");
            assert!(
                matches!(acquired, Acquired::Granted { takeover: true, .. }),
                "{acquired:?}"
            );
        }
    }
}

#[tokio::test]
async fn stale_decision_shows_conflict() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let id = keys.orphaned.id.to_hex();
    let seen = server.seen(&keys.orphaned.id).await;
    let taken = server.store.store.acquire(&retry(&keys.orphaned)).await;
    assert!(matches!(taken, Ok(Acquired::Granted { generation: 2, .. })));
    let response = server
        .post(&format!("/entries/{id}/resolve"), &fields(&seen, "free"))
        .await;
    assert_eq!(response.status, 409);
    assert!(
        response.text.contains("Nothing was changed"),
        "{}",
        response.text
    );
    assert!(response.text.contains("◆ orphaned") && response.text.contains("▶ in progress"));
    let object = format!(r#"{{"seen":"{seen}","how":"free","reason":"x"}}"#);
    let json = [("content-type", "application/json")];
    let path = format!("/api/v1/entries/{id}/resolve");
    let response = server.send(Method::POST, &path, &json, &object).await;
    assert_eq!(response.status, 409);
    assert!(
        response.text.contains("\"outcome\":\"changed\""),
        "{}",
        response.text
    );
    assert_eq!(
        server.state(&keys.orphaned.id).await,
        Some(State::InProgress)
    );
    assert!(server.audit().is_empty(), "nothing was intended");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_32_concurrent_decisions_applies() {
    let console = HeldConsole::start().await;
    let server = &console.server;
    let claim = orphan(&server.store.store, "POST /orders").await;
    let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
    let mut operators = JoinSet::new();
    for n in 0..32 {
        let (address, path) = (server.address, format!("/entries/{id}/resolve"));
        let how = if n % 2 == 0 {
            "retry"
        } else {
            "needs-attention"
        };
        let body = form(&fields(&seen, how));
        operators.spawn(async move {
            let actor = format!("resolve:operator-{n}");
            let headers = [("x-actor", &*actor), ("sec-fetch-site", "same-origin")];
            send(address, Method::POST, &path, &headers, &body)
                .await
                .status
        });
    }
    // Each decision has found the entry as it was seen.
    for _ in 0..32 {
        bounded(console.resolutions.arrival()).await;
    }
    console.resolutions.open_for_good();
    let statuses = operators.join_all().await;
    assert_eq!(
        statuses.iter().filter(|it| it.as_u16() == 200).count(),
        1,
        "{statuses:?}"
    );
    assert_eq!(
        statuses.iter().filter(|it| it.as_u16() == 409).count(),
        31,
        "{statuses:?}"
    );
    let lines = server.audit();
    let applied = lines
        .iter()
        .filter(|it| it.contains("\"outcome\":\"applied\""))
        .count();
    assert_eq!(applied, 1, "{lines:?}");
    let intents = lines
        .iter()
        .filter(|it| it.contains("\"line\":\"intent\""))
        .count();
    assert_eq!((intents, lines.len()), (32, 64), "{lines:?}");
}

#[tokio::test]
async fn nothing_is_resolved_without_audit_line() {
    for path in ["/dev/full", "/no/such/directory/audit.jsonl", "."] {
        let server =
            Server::start_with(|console| console.with_audit_log(AuditLog::new(path))).await;
        let keys = Keys::create(&server.store.store).await;
        for (claim, how) in [
            (&keys.orphaned, "retry"),
            (&keys.orphaned, "free"),
            (&keys.in_progress, "break-lease"),
            (&keys.completed, "delete-record"),
        ] {
            let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
            let response = server
                .post(&format!("/entries/{id}/resolve"), &fields(&seen, how))
                .await;
            assert_eq!(response.status, 503, "{path} {how}: {}", response.text);
            assert!(
                response.text.contains("nothing was changed"),
                "{}",
                response.text
            );
            let bulk = server.post("/resolve", &fields(&seen, how)).await;
            assert_eq!(bulk.status, 409, "{path} {how}");
            assert_eq!(server.seen(&claim.id).await, seen, "{path} {how}");
        }
    }
}

/// The pages show the entry without the log.
#[tokio::test]
async fn unreadable_audit_log_hides_no_entry() {
    // A regular file whose first bytes cannot be read.
    let server =
        Server::start_with(|console| console.with_audit_log(AuditLog::new("/proc/self/mem"))).await;
    let claim = orphan(&server.store.store, "POST /orders").await;
    for path in ["/".to_owned(), format!("/entries/{}", claim.id.to_hex())] {
        let page = server.get(&path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        let note = "Cannot read the audit log";
        assert!(page.text.contains(note), "{path}: {}", page.text);
    }
    assert_eq!(server.get("/audit").await.status, 500);
}

#[tokio::test]
async fn form_needs_reason_and_confirmation() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let (id, seen) = (
        keys.orphaned.id.to_hex(),
        server.seen(&keys.orphaned.id).await,
    );
    let other = server.seen(&keys.attention.id).await;
    let long = "x".repeat(1001);
    for (form, expected) in [
        (
            vec![("seen", &*seen), ("how", "retry")],
            "reason is required",
        ),
        (
            vec![("seen", &seen), ("how", "retry"), ("reason", "  ")],
            "reason is required",
        ),
        (
            vec![("seen", &seen), ("how", "retry"), ("reason", &long)],
            "at most 1000 bytes",
        ),
        (
            vec![("seen", &seen), ("how", "free"), ("reason", "x")],
            "Tick the confirmation",
        ),
        (
            vec![("seen", &seen), ("how", "explode"), ("reason", "x")],
            "as the decision",
        ),
        (
            vec![("seen", "x"), ("how", "retry"), ("reason", "x")],
            "Expected the value of seen",
        ),
        (
            vec![("seen", &other), ("how", "retry"), ("reason", "x")],
            "another entry",
        ),
        (
            vec![
                ("seen", &seen),
                ("how", "break-lease"),
                ("reason", "x"),
                ("confirm", "yes"),
            ],
            "does not apply",
        ),
        (
            vec![("seen", &seen), ("how", "complete"), ("reason", "x")],
            "Expected a status",
        ),
        (
            vec![
                ("seen", &seen),
                ("how", "complete"),
                ("reason", "x"),
                ("status", "101"),
            ],
            "Expected a status",
        ),
        (
            vec![
                ("seen", &seen),
                ("how", "complete"),
                ("reason", "x"),
                ("status", "201"),
                ("headers", "x"),
            ],
            "Expected a header",
        ),
        (
            vec![
                ("seen", &seen),
                ("how", "complete"),
                ("reason", "x"),
                ("status", "201"),
                ("retention", "x"),
            ],
            "Expected a duration",
        ),
    ] {
        let response = server.post(&format!("/entries/{id}/resolve"), &form).await;
        assert_eq!(response.status, 400, "{form:?}");
        assert!(
            response.text.contains(expected),
            "{form:?}: {}",
            response.text
        );
    }
    assert_eq!(server.seen(&keys.orphaned.id).await, seen);
    assert!(server.audit().is_empty());
}

#[tokio::test]
async fn ticked_rows_are_resolved_as_seen() {
    let server = Server::start().await;
    let store = &server.store.store;
    let mut claims = Vec::new();
    for n in 0..4 {
        claims.push(orphan(store, &format!("POST /{n}")).await);
    }
    let mut form = vec![("how", "retry"), ("reason", "ticket 17")];
    let mut seen = Vec::new();
    for claim in &claims {
        seen.push(server.seen(&claim.id).await);
    }
    form.extend(seen[..3].iter().map(|seen| ("seen", &**seen)));
    let confirm = server
        .get(&format!("/resolve?{}", crate::harness::form(&form)))
        .await;
    assert_eq!(
        confirm.text.matches("name=\"seen\"").count(),
        3,
        "{}",
        confirm.text
    );
    // One of them is taken over in the meantime.
    let taken = store.acquire(&retry(&claims[1])).await;
    assert!(matches!(taken, Ok(Acquired::Granted { .. })));
    let confirm = server
        .get(&format!("/resolve?{}", crate::harness::form(&form)))
        .await;
    assert_eq!(
        confirm.text.matches("name=\"seen\"").count(),
        2,
        "{}",
        confirm.text
    );
    assert!(
        confirm.text.contains("and are left out: 1."),
        "{}",
        confirm.text
    );
    let done = server.post("/resolve", &form).await;
    assert_eq!(done.status, 409);
    assert!(done.text.contains("2 of 3 done"), "{}", done.text);
    assert!(
        done.text.contains("not changed: it is in progress now"),
        "{}",
        done.text
    );
    for (n, expected) in [(0, true), (1, false), (2, true), (3, false)] {
        let details = store
            .get(&claims[n].id)
            .await
            .expect("memory")
            .expect("an entry");
        assert_eq!(details.entry.retry_allowed, expected, "{n}");
    }
    assert_eq!(server.audit().len(), 4);
}

#[tokio::test]
async fn more_than_50_rows_are_refused() {
    let server = Server::start().await;
    let mut seen = Vec::new();
    for n in 0..51 {
        let claim = crate::harness::claim(&format!("POST /{n}"));
        crate::harness::acquire(&server.store.store, &claim).await;
        seen.push(server.seen(&claim.id).await);
    }
    let mut form = vec![("how", "break-lease"), ("reason", "x"), ("confirm", "yes")];
    form.extend(seen.iter().map(|seen| ("seen", &**seen)));
    let response = server.post("/resolve", &form).await;
    assert_eq!(response.status, 400, "{}", response.text);
    assert!(response.text.contains("found 51"), "{}", response.text);
    let none = server.post("/resolve", &form[..3]).await;
    assert_eq!(none.status, 400);
    assert!(server.audit().is_empty());
}

#[tokio::test]
async fn disconnect_leaves_whole_audit_trail() {
    let console = HeldConsole::start().await;
    let server = &console.server;
    let claim = orphan(&server.store.store, "POST /orders").await;
    let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
    let path = format!("/entries/{id}/resolve");
    let body = form(&fields(&seen, "free"));
    let sent = tokio::spawn({
        let address = server.address;
        async move { send(address, Method::POST, &path, &[], &body).await }
    });
    bounded(console.resolutions.arrival()).await;
    assert_eq!(server.audit().len(), 1, "the intent");
    console.disconnect(&sent).await;
    console.resolutions.open_for_good();
    eventually("the outcome", || server.audit().len() == 2).await;
    assert_eq!(server.state(&claim.id).await, None);
}

#[tokio::test]
async fn hung_store_leaves_unknown_outcome() {
    let store = Counted::held_at(Barrier::closed());
    let server = Server::start_on(store, |console| {
        let console = console.with_store_timeout(Duration::from_millis(500));
        console.into_router()
    })
    .await;
    let claim = orphan(&server.store.store, "POST /orders").await;
    let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
    let response = server
        .post(&format!("/entries/{id}/resolve"), &fields(&seen, "free"))
        .await;
    assert_eq!(response.status, 504, "{}", response.text);
    let log = fs::read_to_string(server.log()).expect("the log");
    assert!(log.contains("\"outcome\":\"unknown: "), "{log}");
}

#[tokio::test]
async fn api_resolves_with_json() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let id = keys.orphaned.id.to_hex();
    let entry = server.get(&format!("/api/v1/entries/{id}")).await.text;
    let (_, seen) = entry.split_once("\"seen\":\"").expect("a member");
    let seen = seen.split('"').next().expect("an end");
    let path = format!("/api/v1/entries/{id}/resolve");
    let object = format!(r#"{{"seen":"{seen}","how":"retry","reason":"ticket 17"}}"#);
    // A form of another site can send these media types without a preflight.
    for media_type in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    ] {
        let headers = [("content-type", media_type)];
        let response = server.send(Method::POST, &path, &headers, &object).await;
        assert_eq!(response.status, 415, "{media_type}");
    }
    let json = [("content-type", "application/json")];
    for wrong in ["", "[]", "{", "{}"] {
        let response = server.send(Method::POST, &path, &json, wrong).await;
        assert_eq!(response.status, 400, "{wrong}");
    }
    assert!(server.audit().is_empty());
    let response = server.send(Method::POST, &path, &json, &object).await;
    assert_eq!(response.status, 200, "{}", response.text);
    assert!(
        response.text.contains("\"retry_allowed\":true"),
        "{}",
        response.text
    );
    let audit = server.get("/api/v1/audit").await.text;
    assert!(audit.contains("\"source\":\"api\""), "{audit}");
}

/// The reason of the handler is the only statement about its effect.
#[tokio::test]
async fn reason_of_handler_outlives_decisions() {
    for how in ["needs-attention", "retry", "free", "complete"] {
        let server = Server::start().await;
        let keys = Keys::create(&server.store.store).await;
        let (id, seen) = (&keys.attention.id, server.seen(&keys.attention.id).await);
        let mut form = fields(&seen, how);
        form.push(("status", "201"));
        let path = format!("/entries/{}/resolve", id.to_hex());
        let done = server.post(&path, &form).await;
        assert_eq!(done.status, 200, "{how}: {}", done.text);
        let lines = server.audit();
        let before = r#""attention_code":"refund-failed""#;
        assert!(lines[0].contains(before), "{how}: {lines:?}");
        assert!(
            lines[0].contains(r#""reason":"refund re_7""#),
            "{how}: {lines:?}"
        );
        if how == "needs-attention" {
            let details = server
                .store
                .get(id)
                .await
                .expect("memory")
                .expect("an entry");
            let record = details.record.expect("a record");
            let kept = NeedsAttention::in_record(&record).expect("a failure");
            assert_eq!(kept.code(), "refund-failed");
            assert_eq!(kept.reason(), "refund re_7; ticket 17");
        }
    }
}

/// A confirmation does not replace the state that the page of the entry has shown.
#[tokio::test]
async fn entry_page_decides_on_state_it_showed() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let id = keys.attention.id.to_hex();
    let page = server.get(&format!("/entries/{id}")).await.text;
    let (_, link) = page
        .split_once(&format!("entries/{id}/resolve?how=free"))
        .expect("a link");
    let (link, _) = link.split_once('"').expect("an end");
    let link = format!(
        "/entries/{id}/resolve?how=free{}",
        link.replace("&amp;", "&")
    );
    let confirm = server.get(&link).await;
    assert_eq!(confirm.status, 200, "{}", confirm.text);
    assert!(confirm.text.contains("refund re_7"), "{}", confirm.text);
    assert!(
        confirm.text.contains("<dt>Generation</dt><dd>1</dd>"),
        "{}",
        confirm.text
    );
    // Another operator adds to the reason. The entry has the same state and the same generation.
    let seen = server.seen(&keys.attention.id).await;
    let kept = fields(&seen, "needs-attention");
    let kept = server.post(&format!("/entries/{id}/resolve"), &kept).await;
    assert_eq!(kept.status, 200, "{}", kept.text);
    let conflict = server.get(&link).await;
    assert_eq!(conflict.status, 409, "{}", conflict.text);
    assert!(
        conflict.text.contains("Nothing was changed"),
        "{}",
        conflict.text
    );
    assert!(
        !conflict.text.contains("name=\"seen\""),
        "{}",
        conflict.text
    );
    let other = server.seen(&keys.orphaned.id).await;
    let wrong = format!(
        "/entries/{id}/resolve?how=free&{}",
        form(&[("seen", &other)])
    );
    assert_eq!(server.get(&wrong).await.status, 400);
    assert_eq!(
        server.state(&keys.attention.id).await,
        Some(State::NeedsAttention)
    );
}

#[tokio::test]
async fn each_failure_shows_if_entry_is_changed() {
    for (kind, status, outcome, expected) in [
        (
            InspectErrorKind::WrongState,
            400,
            "failed",
            "Nothing was changed.",
        ),
        (
            InspectErrorKind::RecordTooLarge { limit: 5 },
            413,
            "failed",
            "Nothing was changed.",
        ),
        (
            InspectErrorKind::Refused,
            502,
            "failed",
            "Nothing was changed.",
        ),
        (
            InspectErrorKind::Backend,
            502,
            "unknown",
            "The decision may have been applied: see the entry.",
        ),
    ] {
        let server = Server::start().await;
        let claim = orphan(&server.store.store, "POST /orders").await;
        let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
        server.store.set_fault(Fault::Resolve(kind));
        let form = fields(&seen, "retry");
        let done = server.post(&format!("/entries/{id}/resolve"), &form).await;
        assert_eq!(done.status, status, "{}", done.text);
        assert!(done.text.contains(expected), "{}", done.text);
        let bulk = server.post("/resolve", &form).await.text;
        assert!(bulk.contains(expected), "{bulk}");
        let is_unchanged = bulk.contains("Some entries are not changed.");
        assert_eq!(is_unchanged, outcome == "failed", "{bulk}");
        assert_eq!(
            bulk.contains("Decisions that may have been applied: 1."),
            !is_unchanged,
            "{bulk}"
        );
        let lines = server.audit();
        let part = format!("\"outcome\":\"{outcome}: ");
        assert_eq!(
            lines.iter().filter(|it| it.contains(&part)).count(),
            2,
            "{lines:?}"
        );
        // The console has not read the entry afterwards.
        let audit = server.get("/audit").await.text;
        assert!(!audit.contains("absent"), "{audit}");
        let metrics = server.get("/metrics").await.text;
        let sample = format!("{{decision=\"retry\",outcome=\"{outcome}\"}} 2");
        assert!(metrics.contains(&sample), "{metrics}");
    }
}

#[tokio::test]
async fn response_is_recorded_whole_or_rejected() {
    let server = Server::start().await;
    let claim = orphan(&server.store.store, "POST /orders").await;
    let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
    let path = format!("/entries/{id}/resolve");
    let many = "x-total: 3\n".repeat(129);
    for (status, headers, body, expected) in [
        ("201", "set-cookie: a=b", "", "these headers: set-cookie"),
        ("204", "", "paid", "has no body"),
        ("201", &many, "", "at most 128 header lines"),
    ] {
        let mut form = fields(&seen, "complete");
        form.extend([("status", status), ("headers", headers), ("body", body)]);
        let done = server.post(&path, &form).await;
        assert_eq!(done.status, 400, "{}", done.text);
        assert!(done.text.contains(expected), "{}", done.text);
    }
    assert_eq!(server.seen(&claim.id).await, seen);
    assert!(server.audit().is_empty());
}

/// Browsers send each line break of a text area as CRLF. A program sends the bytes of the body.
#[tokio::test]
async fn page_records_line_feeds() {
    let server = Server::start().await;
    for (is_page, recorded) in [(true, "a\nb\n"), (false, "a\r\nb\r\n")] {
        let claim = orphan(&server.store.store, "POST /orders").await;
        let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
        let done = if is_page {
            let mut form = fields(&seen, "complete");
            form.extend([("status", "201"), ("body", "a\r\nb\r\n")]);
            server.post(&format!("/entries/{id}/resolve"), &form).await
        } else {
            let path = format!("/api/v1/entries/{id}/resolve");
            let json = [("content-type", "application/json")];
            let object = format!(
                r#"{{"seen":"{seen}","how":"complete","status":201,"reason":"x","body":"a\r\nb\r\n"}}"#
            );
            server.send(Method::POST, &path, &json, &object).await
        };
        assert_eq!(done.status, 200, "{}", done.text);
        let body = server.get(&format!("/entries/{id}/body")).await;
        assert_eq!(body.text, recorded);
    }
}

#[tokio::test]
async fn members_of_api_are_strings() {
    let server = Server::start().await;
    let claim = orphan(&server.store.store, "POST /orders").await;
    let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
    let path = format!("/api/v1/entries/{id}/resolve");
    let json = [("content-type", "application/json")];
    for members in [
        r#""how":"retry","reason":null"#,
        // Unknown members, and members of another decision.
        r#""how":"retry","reason":"x","confirm":"yes""#,
        r#""how":"retry","reason":"x","status":201"#,
        r#""how":"complete","status":201,"reason":"x","header":"location: /1""#,
        r#""how":"complete","status":201,"reason":"x","retention_seconds":"60""#,
        r#""how":"retry","reason":17"#,
        r#""how":"complete","status":201,"reason":"x","body":{"a":1}"#,
        r#""how":"complete","status":201,"reason":"x","body":true"#,
    ] {
        let object = format!(r#"{{"seen":"{seen}",{members}}}"#);
        let done = server.send(Method::POST, &path, &json, &object).await;
        assert_eq!(done.status, 400, "{members}: {}", done.text);
    }
    assert!(server.audit().is_empty());
    // The name of a member is text of a client, which a terminal may obey.
    let object = "{\"a\u{9b}2J\":\"x\"}";
    let error = server.send(Method::POST, &path, &json, object).await;
    let expected = "Expected only seen, how, reason, found a\\u009b2J. Nothing was changed.";
    assert!(error.text.contains(expected), "{}", error.text);
    let listed = "/api/v1/entries?status=orphaned";
    assert_eq!(server.get(listed).await.status, 400);
    let object =
        format!(r#"{{"seen":"{seen}","how":"complete","status":201,"reason":"x","body":null}}"#);
    let done = server.send(Method::POST, &path, &json, &object).await;
    assert_eq!(done.status, 200, "{}", done.text);
    let body = server.get(&format!("/entries/{id}/body")).await;
    assert_eq!(body.text, "");
}

/// Each row would take the whole time limit of the store.
#[tokio::test(start_paused = true)]
async fn hung_store_ends_ticked_rows() {
    let (scratch, store) = (Scratch::new(), Counted::held_at(Barrier::closed()));
    let mut seen = Vec::new();
    for n in 0..3 {
        let id = orphan(&store.store, &format!("POST /{n}")).await.id;
        let details = store.get(&id).await.expect("memory").expect("an entry");
        seen.push(details.entry.seen().to_string());
    }
    let log = scratch.file("audit.jsonl");
    let console = Console::new(Inspector::new(store), access);
    let app = console.with_audit_log(AuditLog::new(&log)).into_router();
    let mut fields = vec![("how", "retry"), ("reason", "ticket 17")];
    fields.extend(seen.iter().map(|seen| ("seen", &**seen)));
    let began = Instant::now();
    let res = app.oneshot(post_form("/resolve", &fields)).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
    let page = to_bytes(res.expect("a response").into_body(), usize::MAX).await;
    let page = String::from_utf8_lossy(&page.expect("a page")).into_owned();
    let unchanged = page.matches("not changed: an earlier row failed");
    assert_eq!(unchanged.count(), 2, "{page}");
    let unknown = "Decisions that may have been applied: 1.";
    assert!(page.contains(unknown), "{page}");
    let log = fs::read_to_string(log).expect("the log");
    assert_eq!(log.lines().count(), 2, "{log}");
}

/// The rows after the first one are resolved although the browser has left.
#[tokio::test]
async fn disconnect_does_not_stop_ticked_rows() {
    let console = HeldConsole::start().await;
    let server = &console.server;
    let mut seen = Vec::new();
    for n in 0..3 {
        let claim = orphan(&server.store.store, &format!("POST /{n}")).await;
        seen.push(server.seen(&claim.id).await);
    }
    let mut fields = vec![("how", "retry"), ("reason", "ticket 17")];
    fields.extend(seen.iter().map(|seen| ("seen", &**seen)));
    let (address, body) = (server.address, form(&fields));
    let sent = tokio::spawn(async move {
        let headers = [("sec-fetch-site", "same-origin")];
        send(address, Method::POST, "/resolve", &headers, &body).await
    });
    bounded(console.resolutions.arrival()).await;
    console.resolutions.release(1);
    // The second row.
    bounded(console.resolutions.arrival()).await;
    console.disconnect(&sent).await;
    console.resolutions.open_for_good();
    eventually("each outcome", || server.audit().len() == 6).await;
    let lines = server.audit();
    let applied = lines
        .iter()
        .filter(|it| it.contains("\"outcome\":\"applied\""));
    assert_eq!(applied.count(), 3, "{lines:?}");
}

#[tokio::test]
async fn lines_of_change_have_common_id() {
    let server = Server::start().await;
    let keys = Keys::create(&server.store.store).await;
    let mut ids = Vec::new();
    for claim in [&keys.orphaned, &keys.attention] {
        let (id, seen) = (claim.id.to_hex(), server.seen(&claim.id).await);
        let path = format!("/entries/{id}/resolve");
        assert_eq!(
            server.post(&path, &fields(&seen, "retry")).await.status,
            200
        );
    }
    for line in server.audit() {
        assert!(line.contains("\"store\":\"memory\""), "{line}");
        let (_, id) = line.split_once("\"change\":\"").expect("an id");
        ids.push(id[..16].to_owned());
    }
    assert_eq!((&ids[0], &ids[2]), (&ids[1], &ids[3]), "{ids:?}");
    assert_ne!(ids[0], ids[2]);
    // A page reads only the end of the log, and cannot know if it has all lines.
    let page = format!("/entries/{}", keys.orphaned.id.to_hex());
    let note = "Only the end of the audit log";
    assert!(!server.get(&page).await.text.contains(note));
    let log = fs::read_to_string(server.log()).expect("the log");
    fs::write(server.log(), format!("{log}{}", "{}\n".repeat(100_000))).expect("the log");
    assert!(server.get(&page).await.text.contains(note));
}

/// The events have the fields of the audit lines, and the states before and after.
#[test]
fn changes_are_events() {
    let scratch = Scratch::new();
    let mut ids = Vec::new();
    let (_, log) = observed("info", async {
        let store = Counted::new();
        let keys = Keys::create(&store.store).await;
        let console = Console::new(Inspector::new(store.clone()), access);
        let app = console
            .with_audit_log(AuditLog::new(scratch.file("audit.jsonl")))
            .into_router();
        for (claim, how) in [
            (&keys.attention, "retry"),
            (&keys.orphaned, "free"),
            (&keys.in_progress, "break-lease"),
        ] {
            if how == "break-lease" {
                store.set_fault(Fault::Resolve(InspectErrorKind::Refused));
            }
            resolve(&app, &store, &claim.id, how).await;
            ids.push(claim.id.to_hex());
        }
    });
    let of_audit = log
        .lines()
        .filter(|line| line.contains("tower_idempotency::audit"));
    let events: Vec<_> = of_audit.collect();
    assert_eq!(events.len(), 6, "{log}");
    for (n, (what, before, outcome, after)) in [
        ("retry", "needs-attention", "applied\"", Some("orphaned")),
        ("free", "orphaned", "applied\"", Some("absent")),
        ("break-lease", "in-progress", "failed: ", None),
    ]
    .into_iter()
    .enumerate()
    {
        let (intent, end) = (events[2 * n], events[2 * n + 1]);
        for (event, name) in [(intent, "change begins"), (end, "change ended")] {
            for field in [
                name.to_owned(),
                "actor=\"alice\"".to_owned(),
                "source=\"console\"".to_owned(),
                format!("what=\"{what}\""),
                "why=\"ticket 17\"".to_owned(),
                format!("id=\"{}\"", ids[n]),
                format!("before=\"{before}\""),
            ] {
                assert!(event.contains(&field), "{field}: {event}");
            }
        }
        assert!(
            !intent.contains("outcome=") && !intent.contains("after="),
            "{intent}"
        );
        assert!(end.contains(&format!("outcome=\"{outcome}")), "{end}");
        let after = after.map(|it| format!("after=\"{it}\""));
        match after {
            Some(after) => assert!(end.contains(&after), "{end}"),
            None => assert!(!end.contains("after="), "{end}"),
        }
    }
}

// F-802
/// The subscriber panics at each event, for example because the reader of standard error has ended.
#[test]
fn decisions_survive_panics_of_subscriber() {
    let scratch = Scratch::new();
    let file = scratch.file("audit.jsonl");
    with_panicking_reports(paused(), async |panics: &AtomicU64| {
        let store = Counted::new();
        let keys = Keys::create(&store.store).await;
        let app = |log: AuditLog| {
            let console = Console::new(Inspector::new(store.clone()), access);
            console.with_audit_log(log).into_router()
        };
        let is_present = async |id: &KeyId| store.get(id).await.expect("memory").is_some();
        let unlogged = app(AuditLog::new("/no/such/directory/audit.jsonl"));
        let id = &keys.orphaned.id;
        assert_eq!(resolve(&unlogged, &store, id, "free").await, 503);
        assert!(is_present(id).await);
        let app = app(AuditLog::new(&file));
        let body = format!("/entries/{}/body", keys.completed.id.to_hex());
        let req = Request::get(body).body(Body::empty()).expect("a request");
        let Ok(res) = app.clone().oneshot(req).await;
        assert_eq!(res.status(), 200);
        let before = panics.load(Ordering::SeqCst);
        for (claim, how) in [(&keys.orphaned, "free"), (&keys.completed, "delete-record")] {
            assert_eq!(resolve(&app, &store, &claim.id, how).await, 200, "{how}");
            assert!(!is_present(&claim.id).await, "{how}");
        }
        // The intent and the outcome of each decision.
        assert_eq!(panics.load(Ordering::SeqCst) - before, 4);
    });
    let log = fs::read_to_string(file).expect("the log");
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 4, "{log}");
    for change in lines.chunks(2) {
        assert!(change[0].contains("\"line\":\"intent\""), "{log}");
        assert!(change[1].contains("\"outcome\":\"applied\""), "{log}");
    }
}
