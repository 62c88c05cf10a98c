//! The service behind the layer: executions that take drawn times, have an effect, and end in drawn ways.

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
    dice::Dice,
    history::{self, Held, What},
    link::Link,
    page::{Paced, Page, Piece},
    plan::Plan,
    world::{Execution, Keep, Progress, Said},
};

/// The handler of one process.
#[derive(Clone)]
pub(super) struct Handler(pub(super) Link);

/// The service failed without a response.
#[derive(Debug)]
pub(super) struct Failed;

pub(super) type Answer = Result<Response<Page>, Failed>;

impl Service<Request<Body<Paced>>> for Handler {
    type Response = Response<Page>;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Body<Paced>>) -> Self::Future {
        let link = self.0.clone();
        Box::pin(async move {
            let lease = req.extensions().get::<Lease>().cloned();
            let run = Run::begin(link, attempt_of(&req), lease);
            run.until_it_ends(Some(req.into_body())).await
        })
    }
}

/// The work of an operator who finishes an orphan: the work of the handler, without a request.
pub(super) async fn finish(link: Link, attempt: usize, lease: Lease) -> Answer {
    Run::begin(link, attempt, Some(lease))
        .until_it_ends(None)
        .await
}

/// The script of an execution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Script {
    yields: u64,
    before: Millis,
    pub(super) after: Millis,
    pub(super) ending: Ending,
    /// The body arrives in two pieces with this pause between them.
    split: Option<Millis>,
    announced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Answers(StatusCode),
    AnswersNotToKeep,
    AnswersTooMuch,
    BreaksOff,
    Fails,
    PanicsBefore,
    PanicsAfter,
}

impl Script {
    fn draw(dice: &mut Dice, plan: &Plan, healed: bool) -> Self {
        let lease = plan.lease;
        let pause = |dice: &mut Dice| match dice.below(8) {
            0..3 => 0,
            3..5 => dice.below(4),
            5 => dice.below(lease / 3),
            6 => dice.between(lease / 3, lease),
            _ => dice.between(lease, lease * 2 + lease / 2),
        };
        let kept = dice.pick(&[
            StatusCode::CREATED,
            StatusCode::CREATED,
            StatusCode::NOT_FOUND,
        ]);
        if healed {
            return Self {
                yields: 0,
                before: 0,
                after: 0,
                ending: Ending::Answers(kept),
                split: None,
                announced: true,
            };
        }
        let ending = if dice.percent(plan.failing) {
            match dice.below(8) {
                0 => Ending::Answers(StatusCode::TOO_MANY_REQUESTS),
                1 => Ending::Answers(StatusCode::INTERNAL_SERVER_ERROR),
                2 => Ending::AnswersNotToKeep,
                3 => Ending::AnswersTooMuch,
                4 => Ending::BreaksOff,
                5 => Ending::Fails,
                6 => Ending::PanicsBefore,
                _ => Ending::PanicsAfter,
            }
        } else {
            Ending::Answers(kept)
        };
        let slow = plan.failing > 0 && dice.percent(5);
        Self {
            yields: dice.below(3),
            before: pause(dice),
            after: pause(dice),
            ending,
            split: match dice.below(6) {
                0 => Some(dice.below(3)),
                1 if slow => Some(plan.collect_timeout + dice.below(3)),
                _ => None,
            },
            announced: dice.percent(60),
        }
    }

    fn status(&self) -> StatusCode {
        match self.ending {
            Ending::Answers(status) => status,
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
    pub(super) fn begin(link: Link, attempt: usize, lease: Option<Lease>) -> Self {
        let mut world = link.world.look();
        let (plan, healed) = (world.plan, world.healed);
        let script = Script::draw(&mut world.dice, &plan, healed);
        let number = world.executions.len();
        let request = world.attempts[attempt].request;
        world.executions.push(Execution {
            attempt,
            process: link.process,
            request,
            lease: lease.as_ref().map(Lease::lease_ref),
            commits: Vec::new(),
            over: None,
            answers: Vec::new(),
            state: Progress::Runs,
            completing: false,
            heard: false,
            lost: false,
        });
        world.attempts[attempt].execution = Some(number);
        let held = lease.as_ref().map(|lease| {
            let reference = lease.lease_ref();
            Held {
                id: world.name_id(reference.id),
                token: world.name(reference.token),
                generation: lease.generation(),
                takeover: lease.is_takeover(),
            }
        });
        world.record_event(What::Executes {
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

    async fn until_it_ends(mut self, body: Option<Body<Paced>>) -> Answer {
        let link = self.link.clone();
        let ended = unless_cut_off(&link, self.number, self.work(body)).await;
        self.ends(ended).unwrap_or(Err(Failed))
    }

    /// Ends the execution, unless it was cut off.
    pub(super) fn ends<T, E>(&mut self, ended: Option<Result<T, E>>) -> Option<Result<T, E>> {
        if let Some(answer) = &ended {
            self.is_over(match answer {
                Ok(_) => Progress::Answered,
                Err(_) => Progress::Failed,
            });
        }
        ended
    }

    fn is_over(&mut self, state: Progress) {
        self.over = true;
        let mut world = self.link.world.look();
        world.executions[self.number].state = state;
        world.record_event(What::Executed(self.number));
    }

    async fn work(&mut self, body: Option<Body<Paced>>) -> Answer {
        let script = self.script;
        if let Some(body) = body
            && read(body).await.is_err()
        {
            // An incomplete request has no effect.
            return Ok(self.respond(StatusCode::BAD_REQUEST, false));
        }
        self.come_to_the_effect().await;
        let transactional = self.link.world.look().plan.transactional;
        let answer = if transactional {
            self.commit().await
        } else {
            self.have_the_effect();
            Ok(self.respond(script.status(), script.ending == Ending::AnswersTooMuch))
        };
        pause(script.after).await;
        if script.ending == Ending::PanicsAfter {
            self.panic();
        }
        if script.ending == Ending::Fails {
            return Err(Failed);
        }
        answer
    }

    pub(super) async fn come_to_the_effect(&mut self) {
        for _ in 0..self.script.yields {
            yield_now().await;
        }
        pause(self.script.before).await;
        if self.script.ending == Ending::PanicsBefore {
            self.panic();
        }
    }

    pub(super) fn panic(&mut self) -> ! {
        self.is_over(Progress::Failed);
        // Panics without printing a message.
        resume_unwind(Box::new("as drawn"))
    }

    pub(super) fn have_the_effect(&self) {
        let held = self.lease.as_ref().is_some_and(Lease::is_held);
        let execution = self.number;
        let mut world = self.link.world.look();
        world.record_event(What::Effect { execution, held });
        super::oracle::judge_effect(&mut world, execution, held);
    }

    /// Commits effect and record in one transaction, and retries once if the outcome of the commit is unknown.
    async fn commit(&mut self) -> Answer {
        let Some(lease) = self.lease.clone() else {
            return Err(Failed);
        };
        for _ in 0..2 {
            let res = self.respond(
                self.script.status(),
                self.script.ending == Ending::AnswersTooMuch,
            );
            let prepared = match lease.prepare(res).await {
                Ok(prepared) => prepared,
                // The transaction was rolled back.
                Err(unrecorded) => return Ok(unrecorded.into_answer().map(prepared_page)),
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

    /// Returns the response, which is entered in the books from here on.
    fn respond(&self, status: StatusCode, too_much: bool) -> Response<Page> {
        let script = self.script;
        let text = Bytes::from(self.text(too_much));
        let mut world = self.link.world.look();
        let recorded = world.plan.records(status) && script.ending != Ending::AnswersNotToKeep;
        let streams = script.split >= Some(world.plan.collect_timeout);
        let keep = match script.ending {
            _ if !recorded => Keep::No,
            _ if too_much || streams => Keep::Perhaps,
            Ending::BreaksOff => Keep::No,
            _ => Keep::Yes,
        };
        world.executions[self.number].answers.push(Said {
            status,
            body: text.clone(),
            keep,
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
        if script.ending == Ending::BreaksOff {
            pieces.push(Piece::Break);
        }
        let mut body = Paced::new(pieces);
        if script.announced {
            body = body.announced();
        }
        let mut res = Response::builder()
            .status(status)
            .header("x-execution", self.number);
        if script.ending == Ending::AnswersNotToKeep {
            res = res.header("x-idempo-policy", "no-store");
        }
        res.body(Page::Plain(body)).expect("a valid response")
    }
}

/// A prepared response has a body of the layer's; its content is the handler's.
fn prepared_page(body: Body<Page>) -> Page {
    Page::Prepared(Box::pin(body))
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.over {
            let (execution, process) = (self.number, self.link.process);
            let mut world = self.link.world.look();
            // If the process died, its tasks end in any order.
            if !world.dead[process] {
                world.record_event(What::CutOff(execution));
            }
            super::oracle::judge_cut(&mut world, execution, process);
        }
    }
}

/// Returns the output of the work, or `None` if the client left and its handler is cut off.
pub(super) async fn unless_cut_off<T>(
    link: &Link,
    execution: usize,
    work: impl Future<Output = T>,
) -> Option<T> {
    let (attempt, cuts) = {
        let world = link.world.look();
        (
            world.executions[execution].attempt,
            world.has(Bug::LeavingCutsOff),
        )
    };
    let mut work = pin!(work);
    poll_fn(|cx| {
        if cuts && link.world.look().attempts[attempt].left {
            return Poll::Ready(None);
        }
        work.as_mut().poll(cx).map(Some)
    })
    .await
}

fn attempt_of(req: &Request<Body<Paced>>) -> usize {
    let attempt = req.headers()["x-attempt"].to_str().expect("a number");
    attempt.parse().expect("a number")
}

async fn read(body: Body<Paced>) -> Result<(), super::page::BrokeOff> {
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
