//! Clients: they send a request, wait for its response or leave, and retry.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::Poll,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body as _;
use tokio::time::sleep;
use tower::Service;
use tower_idempotency::{
    Body, Idempotency, IdempotencyLayer, TakeOverOutcome,
    store::{Claim, Store},
};

use super::{
    Millis,
    bugs::Bug,
    handler::{self, Failed, Handler},
    history::{self, AttemptOutcome, EventKind, Reply},
    link::Link,
    paced_body::{PacedBody, Piece, ResponseBody},
    plan::Plan,
    random::Random,
};

/// The time at which a client leaves.
#[derive(Clone, Copy, Debug)]
pub(super) enum Leave {
    Never,
    AfterPolls(u64),
    After(Millis),
}

impl Leave {
    pub(super) fn draw(random: &mut Random, plan: &Plan) -> Self {
        if !random.percent(plan.leaving) {
            return Self::Never;
        }
        match random.below(3) {
            0 => Self::After(random.below(plan.lease / 3)),
            1 => Self::After(random.below(plan.lease * 2)),
            _ => Self::AfterPolls(random.between(1, 10)),
        }
    }
}

/// Returns the request, and `true` if its body arrives at once and complete.
pub(super) fn request(
    random: &mut Random,
    plan: &Plan,
    plain: bool,
    attempt: usize,
    request: history::Request,
) -> (Request<PacedBody>, bool) {
    let history::Request { key, variant } = request;
    let text = Bytes::from(format!("variant {variant}"));
    let (first, second) = (text.slice(..4), text.slice(4..));
    let kind = if plain { 0 } else { random.below(24) };
    let slow = plan.body_timeout + random.below(3);
    let pieces = match kind {
        0..16 => vec![Piece::Data(text)],
        16..20 => vec![
            Piece::Data(first),
            Piece::Wait(random.below(3)),
            Piece::Data(second),
        ],
        20 | 21 => vec![
            Piece::Data(first),
            Piece::Wait(random.below(3)),
            Piece::Break,
        ],
        22 => vec![Piece::Data(first), Piece::Wait(slow), Piece::Data(second)],
        _ => vec![Piece::Wait(0), Piece::Data(text), Piece::Wait(0)],
    };
    let clean = kind < 16 || kind == 23;
    let body = PacedBody::new(pieces);
    let req = Request::post(format!("/{variant}"))
        .header("idempotency-key", format!("\"key-{key}\""))
        .header("x-attempt", attempt)
        .header("authorization", plan.caller(key))
        .body(if random.percent(50) {
            body.announced()
        } else {
            body
        });
    (req.expect("a valid request"), clean)
}

/// Makes an attempt, in the process that serves the attempt.
pub(super) async fn attempt(
    link: Link,
    service: Idempotency<Handler>,
    req: Request<PacedBody>,
    number: usize,
    leave: Leave,
) {
    let exchange = exchange(service, req);
    run_attempt(link, exchange, number, leave).await;
}

/// Executes an orphan again for an operator. The operator's client may disconnect as well.
pub(super) async fn take_over(
    link: Link,
    layer: IdempotencyLayer,
    claim: Claim,
    number: usize,
    leave: Leave,
) {
    let works = link.clone();
    let exchange = async move {
        let work = move |lease| handler::finish(works, number, lease);
        match layer.take_over(claim, work).await {
            Ok(TakeOverOutcome::Executed(res)) => read(res).await,
            Ok(TakeOverOutcome::NoOrphan) => AttemptOutcome::NoOrphan,
            Ok(_) => AttemptOutcome::Failed,
            Err(error) => AttemptOutcome::Refused(error.kind().code(), error.status()),
        }
    };
    run_attempt(link, exchange, number, leave).await;
}

pub(super) async fn run_attempt(
    link: Link,
    exchange: impl Future<Output = AttemptOutcome>,
    number: usize,
    leave: Leave,
) {
    let outcome = {
        match leave {
            Leave::Never => poll_with_limit(exchange, u64::MAX).await,
            Leave::AfterPolls(polls) => poll_with_limit(exchange, polls).await,
            Leave::After(pause) => {
                tokio::select! {
                    biased;
                    outcome = poll_with_limit(exchange, u64::MAX) => outcome,
                    () = sleep(Duration::from_millis(pause)) => None,
                }
            }
        }
    };
    // The future of the request is already dropped, as in a server that lost the connection.
    let Some(outcome) = outcome else {
        return left(&link, number).await;
    };
    let mut world = link.world.lock();
    let outcome = match outcome {
        AttemptOutcome::Answered(_) | AttemptOutcome::Refused(..)
            if world.has(Bug::HandlerResponseIsSent)
                && let Some(execution) = world.attempts[number].execution
                && let Some(produced) = world.executions[execution].responses.last() =>
        {
            AttemptOutcome::Answered(Reply {
                status: produced.status,
                execution: Some(execution),
                replayed: false,
                body: produced.body.clone(),
            })
        }
        AttemptOutcome::Answered(Reply { replayed: true, .. })
            if world.has(Bug::ReplaysAreRefused) =>
        {
            AttemptOutcome::Refused("outcome-unknown", StatusCode::CONFLICT)
        }
        outcome => outcome,
    };
    world.ended(number, outcome);
}

async fn left(link: &Link, number: usize) {
    let lease = {
        let mut world = link.world.lock();
        world.attempts[number].left = true;
        world.record_event(EventKind::ClientLeft(number));
        world.ended(number, AttemptOutcome::Left);
        let execution = world.attempts[number].execution;
        let lease = execution.and_then(|execution| world.executions[execution].lease);
        lease.filter(|_| world.has(Bug::LeavingReleases))
    };
    if let Some(lease) = lease {
        let _ = link.release(&lease).await;
    }
}

/// Returns the outcome, unless the client has left after this number of polls.
async fn poll_with_limit(
    exchange: impl Future<Output = AttemptOutcome>,
    mut polls: u64,
) -> Option<AttemptOutcome> {
    let mut exchange = pin!(exchange);
    poll_fn(|cx| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        // A future that panicked is not polled again.
        match catch_unwind(AssertUnwindSafe(|| exchange.as_mut().poll(cx))) {
            Ok(polled) if polls == 0 && polled.is_pending() => Poll::Ready(None),
            Ok(polled) => polled.map(Some),
            Err(_panic) => Poll::Ready(Some(AttemptOutcome::Panicked)),
        }
    })
    .await
}

async fn exchange(mut service: Idempotency<Handler>, req: Request<PacedBody>) -> AttemptOutcome {
    match service.call(req).await {
        Ok(res) => read(res).await,
        Err(Failed) => AttemptOutcome::Failed,
    }
}

async fn read(res: Response<Body<ResponseBody>>) -> AttemptOutcome {
    let (head, body) = res.into_parts();
    let mut body: Pin<Box<_>> = Box::pin(body);
    let mut data = BytesMut::new();
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        match frame.map(http_body::Frame::into_data) {
            Ok(Ok(more)) => data.extend_from_slice(&more),
            Ok(Err(_trailers)) => {}
            Err(_) => return AttemptOutcome::BodyBroken,
        }
    }
    if let Some(kind) = head.extensions.get::<tower_idempotency::ErrorKind>() {
        return AttemptOutcome::Refused(kind.code(), head.status);
    }
    AttemptOutcome::Answered(Reply {
        status: head.status,
        execution: execution_of(&head.headers),
        replayed: head.headers.contains_key("idempotent-replayed"),
        body: data.freeze(),
    })
}

fn execution_of(headers: &HeaderMap) -> Option<usize> {
    headers.get("x-execution")?.to_str().ok()?.parse().ok()
}
