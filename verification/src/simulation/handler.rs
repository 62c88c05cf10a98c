//! The service inside the layer. Its executions take random times, have an effect, and end in random ways.

use std::{
    future::{Future, poll_fn},
    panic::resume_unwind,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body as _;
use tokio::{task::yield_now, time::sleep};
use tower::Service;
use tower_idempotency::{Body, Lease, store::StoreError, transaction::LeaseExt};

use super::{
    Millis,
    bugs::Bug,
    history::{self, EventKind, HeldLease},
    link::Link,
    paced_body::{PacedBody, Piece, ResponseBody},
    plan::Plan,
    random::Random,
    world::{Execution, ProducedResponse, Progress, Recording},
};

/// The handler of one process.
#[derive(Clone)]
pub(super) struct Handler(pub(super) Link);

/// The service failed without a response.
#[derive(Debug)]
pub(super) struct Failed;

pub(super) type HandlerResult = Result<Response<ResponseBody>, Failed>;

impl Service<Request<Body<PacedBody>>> for Handler {
    type Response = Response<ResponseBody>;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = HandlerResult> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body<PacedBody>>) -> Self::Future {
        let link = self.0.clone();
        Box::pin(async move {
            let lease = req.extensions().get::<Lease>().cloned();
            let run = Run::start(link, attempt_of(&req), lease);
            run.run_to_end(Some(req.into_body())).await
        })
    }
}

/// Finishes an orphan for an operator: the work of the handler, without a request.
pub(super) async fn finish(link: Link, attempt: usize, lease: Lease) -> HandlerResult {
    Run::start(link, attempt, Some(lease))
        .run_to_end(None)
        .await
}

/// The script of an execution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Script {
    yields: u64,
    before: Millis,
    pub(super) after: Millis,
    pub(super) ending: Ending,
    /// The body arrives in two pieces with this delay between them.
    split: Option<Millis>,
    announced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Responds(StatusCode),
    RespondsNoStore,
    RespondsTooLarge,
    BreaksBody,
    Fails,
    PanicsBefore,
    PanicsAfter,
}

impl Script {
    fn draw(random: &mut Random, plan: &Plan, faults_ended: bool) -> Self {
        let lease = plan.lease;
        let pause = |random: &mut Random| match random.below(8) {
            0..3 => 0,
            3..5 => random.below(4),
            5 => random.below(lease / 3),
            6 => random.between(lease / 3, lease),
            _ => random.between(lease, lease * 2 + lease / 2),
        };
        let kept = random.pick(&[
            StatusCode::CREATED,
            StatusCode::CREATED,
            StatusCode::NOT_FOUND,
        ]);
        if faults_ended {
            return Self {
                yields: 0,
                before: 0,
                after: 0,
                ending: Ending::Responds(kept),
                split: None,
                announced: true,
            };
        }
        let ending = if random.percent(plan.failing) {
            match random.below(8) {
                0 => Ending::Responds(StatusCode::TOO_MANY_REQUESTS),
                1 => Ending::Responds(StatusCode::INTERNAL_SERVER_ERROR),
                2 => Ending::RespondsNoStore,
                3 => Ending::RespondsTooLarge,
                4 => Ending::BreaksBody,
                5 => Ending::Fails,
                6 => Ending::PanicsBefore,
                _ => Ending::PanicsAfter,
            }
        } else {
            Ending::Responds(kept)
        };
        let slow = plan.failing > 0 && random.percent(5);
        Self {
            yields: random.below(3),
            before: pause(random),
            after: pause(random),
            ending,
            split: match random.below(6) {
                0 => Some(random.below(3)),
                1 if slow => Some(plan.collect_timeout + random.below(3)),
                _ => None,
            },
            announced: random.percent(60),
        }
    }

    fn status(&self) -> StatusCode {
        match self.ending {
            Ending::Responds(status) => status,
            _ => StatusCode::CREATED,
        }
    }
}

/// An execution in progress.
pub(super) struct Run {
    pub(super) link: Link,
    pub(super) number: usize,
    pub(super) request: history::Request,
    pub(super) lease: Option<Lease>,
    pub(super) script: Script,
    over: bool,
}

impl Run {
    pub(super) fn start(link: Link, attempt: usize, lease: Option<Lease>) -> Self {
        let mut world = link.world.lock();
        let (plan, faults_ended) = (world.plan, world.faults_ended);
        let script = Script::draw(&mut world.random, &plan, faults_ended);
        let number = world.executions.len();
        let request = world.attempts[attempt].request;
        world.executions.push(Execution {
            attempt,
            process: link.process,
            request,
            lease: lease.as_ref().map(Lease::lease_ref),
            commits: Vec::new(),
            over: None,
            responses: Vec::new(),
            state: Progress::Runs,
            completing: false,
            received: false,
            refused: false,
            lost: false,
        });
        world.attempts[attempt].execution = Some(number);
        let held = lease.as_ref().map(|lease| {
            let reference = lease.lease_ref();
            HeldLease {
                id: world.name_id(reference.id),
                token: world.name(reference.token),
                generation: lease.generation(),
                takeover: lease.is_takeover(),
            }
        });
        world.record_event(EventKind::ExecutionStarted {
            execution: number,
            attempt,
            lease: held,
        });
        super::oracle::judge_execution(&mut world, number, held);
        drop(world);
        Self {
            link,
            number,
            request,
            lease,
            script,
            over: false,
        }
    }

    async fn run_to_end(mut self, body: Option<Body<PacedBody>>) -> HandlerResult {
        let link = self.link.clone();
        let ended = run_unless_dropped(&link, self.number, self.work(body)).await;
        self.ends(ended).unwrap_or(Err(Failed))
    }

    /// Ends the execution, unless it was dropped.
    pub(super) fn ends<T, E>(&mut self, ended: Option<Result<T, E>>) -> Option<Result<T, E>> {
        if let Some(response) = &ended {
            self.set_progress(match response {
                Ok(_) => Progress::Answered,
                Err(_) => Progress::Failed,
            });
        }
        ended
    }

    fn set_progress(&mut self, state: Progress) {
        self.over = true;
        let mut world = self.link.world.lock();
        world.executions[self.number].state = state;
        world.record_event(EventKind::ExecutionEnded(self.number));
    }

    async fn work(&mut self, body: Option<Body<PacedBody>>) -> HandlerResult {
        let script = self.script;
        if let Some(body) = body
            && read(body).await.is_err()
        {
            // An incomplete request has no effect.
            return Ok(self.respond(StatusCode::BAD_REQUEST, false));
        }
        self.reach_effect().await;
        let transactional = self.link.world.lock().plan.transactional;
        let response = if transactional {
            self.commit().await
        } else {
            self.apply_effect();
            Ok(self.respond(script.status(), script.ending == Ending::RespondsTooLarge))
        };
        pause(script.after).await;
        if script.ending == Ending::PanicsAfter {
            self.panic();
        }
        if script.ending == Ending::Fails {
            return Err(Failed);
        }
        response
    }

    pub(super) async fn reach_effect(&mut self) {
        for _ in 0..self.script.yields {
            yield_now().await;
        }
        pause(self.script.before).await;
        if self.script.ending == Ending::PanicsBefore {
            self.panic();
        }
    }

    pub(super) fn panic(&mut self) -> ! {
        self.set_progress(Progress::Failed);
        // Panics without printing a message.
        resume_unwind(Box::new("as drawn"))
    }

    pub(super) fn apply_effect(&self) {
        let held = self.lease.as_ref().is_some_and(Lease::is_held);
        let execution = self.number;
        let mut world = self.link.world.lock();
        world.record_event(EventKind::Effect { execution, held });
        super::oracle::judge_effect(&mut world, execution, held);
    }

    /// Commits effect and record in one transaction, and retries once if the outcome of the commit is unknown.
    async fn commit(&mut self) -> HandlerResult {
        let Some(lease) = self.lease.clone() else {
            return Err(Failed);
        };
        for _ in 0..2 {
            let res = self.respond(
                self.script.status(),
                self.script.ending == Ending::RespondsTooLarge,
            );
            let prepared = match lease.prepare(res).await {
                Ok(prepared) => prepared,
                // The transaction was rolled back.
                Err(unrecorded) => return Ok(unrecorded.into_output().map(prepared_page)),
            };
            let (reference, record) = (prepared.lease_ref(), prepared.record().clone());
            let retention = prepared.retention();
            let commit = self.link.commit(reference, record, retention, self.number);
            match prepared.commit(commit).await {
                Ok(res) => return Ok(res.map(prepared_page)),
                Err(StoreError::LeaseLost) => break,
                Err(_) => {}
            }
        }
        Ok(self.respond(StatusCode::SERVICE_UNAVAILABLE, false))
    }

    /// Returns the text of a response.
    pub(super) fn text(&self, too_much: bool) -> String {
        let history::Request { key, variant } = self.request;
        let mut text = format!("execution {} of key {key} variant {variant}", self.number);
        if too_much {
            text.push_str(&" and so on".repeat(LIMIT / 10));
        }
        text
    }

    /// Returns the response, and adds it to those that the execution has produced.
    fn respond(&self, status: StatusCode, too_much: bool) -> Response<ResponseBody> {
        let script = self.script;
        let text = Bytes::from(self.text(too_much));
        let mut world = self.link.world.lock();
        let recorded = world.plan.records(status) && script.ending != Ending::RespondsNoStore;
        let streams = script.split >= Some(world.plan.collect_timeout);
        let recording = match script.ending {
            _ if !recorded => Recording::Forbidden,
            _ if too_much || streams => Recording::Allowed,
            Ending::BreaksBody => Recording::Forbidden,
            _ => Recording::Expected,
        };
        world.executions[self.number]
            .responses
            .push(ProducedResponse {
                status,
                body: text.clone(),
                recording,
                breaks: script.ending == Ending::BreaksBody,
            });
        drop(world);
        let mut pieces = Vec::new();
        let half = text.len() / 2;
        match script.split {
            Some(pause) => {
                pieces.push(Piece::Data(text.slice(..half)));
                pieces.push(Piece::Wait(pause));
                pieces.push(Piece::Data(text.slice(half..)));
            }
            None => pieces.push(Piece::Data(text)),
        }
        if script.ending == Ending::BreaksBody {
            pieces.push(Piece::Break);
        }
        let mut body = PacedBody::new(pieces);
        if script.announced {
            body = body.announced();
        }
        let mut res = Response::builder()
            .status(status)
            .header("x-execution", self.number);
        if script.ending == Ending::RespondsNoStore {
            res = res.header("x-idempo-policy", "no-store");
        }
        res.body(ResponseBody::Plain(body))
            .expect("a valid response")
    }
}

/// The body of a prepared response has a type of the layer. Its content is the handler's.
fn prepared_page(body: Body<ResponseBody>) -> ResponseBody {
    ResponseBody::Prepared(Box::pin(body))
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.over {
            let (execution, process) = (self.number, self.link.process);
            let mut world = self.link.world.lock();
            // If the process died, its tasks are dropped in any order.
            if !world.dead[process] {
                world.record_event(EventKind::ExecutionDropped(execution));
            }
            super::oracle::judge_drop(&mut world, execution, process);
        }
    }
}

/// Returns the output of the work, or `None` if the client left and the bug drops its handler.
pub(super) async fn run_unless_dropped<T>(
    link: &Link,
    execution: usize,
    work: impl Future<Output = T>,
) -> Option<T> {
    let (attempt, cuts) = {
        let world = link.world.lock();
        (
            world.executions[execution].attempt,
            world.has(Bug::LeavingCutsOff),
        )
    };
    let mut work = pin!(work);
    poll_fn(|cx| {
        if cuts && link.world.lock().attempts[attempt].left {
            return Poll::Ready(None);
        }
        work.as_mut().poll(cx).map(Some)
    })
    .await
}

fn attempt_of(req: &Request<Body<PacedBody>>) -> usize {
    let attempt = req.headers()["x-attempt"].to_str().expect("a number");
    attempt.parse().expect("a number")
}

async fn read(body: Body<PacedBody>) -> Result<(), super::paced_body::BrokenBody> {
    let mut body = pin!(body);
    while let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
        frame?;
    }
    Ok(())
}

pub(super) async fn pause(millis: Millis) {
    if millis > 0 {
        sleep(Duration::from_millis(millis)).await;
    }
}

/// The largest response body that the layer records here.
pub(super) const LIMIT: usize = 100;
